"""Launches that begin while the kernel before them on the stream still runs."""

import torch


def programmatic_launch(device: torch.device) -> dict[str, bool]:
    """Options of a Triton launch whose kernel has `wait_then_let_next_in`: where the device can, it is launched so."""
    from triton import knobs

    on_nvidia = device.type == "cuda" and torch.version.hip is None and not knobs.runtime.interpret
    if not on_nvidia or torch.cuda.get_device_capability(device) < (9, 0):
        return {"PROGRAMMATIC": False}
    return {"PROGRAMMATIC": True, "launch_pdl": True}
