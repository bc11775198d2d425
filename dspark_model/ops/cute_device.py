"""What every CuTe DSL backend needs: its packages, and a device that it is written for."""

import importlib.util

import torch


def cute_device_refusal(subject: str, device: torch.device, *, hopper_only: bool = False) -> str | None:
    """Why CuTe DSL kernels do not run on this device, told of `subject`; None where they do.  hopper_only: of 9.0."""
    if importlib.util.find_spec("cutlass") is None or importlib.util.find_spec("dspark_kernels") is None:
        return f"{subject} needs the packages nvidia-cutlass-dsl and dspark_kernels, and one of them is not installed"
    if device.type != "cuda":
        return f"{subject} runs on CUDA devices, got {device}"
    if hopper_only and torch.cuda.get_device_capability(device) != (9, 0):
        found = torch.cuda.get_device_capability(device)
        return f"{subject} is written for devices of capability 9.0 (Hopper), got {found}"
    return None
