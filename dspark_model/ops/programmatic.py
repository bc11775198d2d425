"""Launches that begin while the kernel before them on the stream still runs."""

import torch


def programmatic_launch(device: torch.device) -> dict[str, bool]:
    """Options of a Triton launch whose kernel begins with `programmatic.begin`: where the device can, it is launched so."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"PROGRAMMATIC": False}
    return {"PROGRAMMATIC": True, "launch_pdl": True}
