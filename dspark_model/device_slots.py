"""Slots of a step at a fixed device address."""

from collections.abc import Sequence

import torch

from dspark_model.ops import NO_TOKEN


class DeviceSlots:
    """Up to `size` slots, int64 on the device, replaced from the host without waiting for it or allocating memory there."""

    def __init__(self, size: int, device: torch.device):
        self.tensor = torch.full((size,), NO_TOKEN, dtype=torch.int64, device=device)
        self._host = [NO_TOKEN] * size

    def set(self, slots: Sequence[int]) -> None:
        """The first ones; those behind them become NO_TOKEN."""
        padded = [*slots, *[NO_TOKEN] * (len(self._host) - len(slots))]
        if padded != self._host:
            on_cuda = self.tensor.device.type == "cuda"
            self.tensor.copy_(torch.tensor(padded, dtype=torch.int64, pin_memory=on_cuda), non_blocking=True)
            self._host = padded
