"""A second stream of work, with an explicit fork and join."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A CUDA stream beside the current one.  On a CPU, which has no streams, work between fork and join runs in program
    order.

    Memory that is allocated between fork and join belongs to the side stream; its next user there starts behind the next
    fork, and with it behind everything that the main stream had been given by then.  So tensors that cross the join may be
    dropped at any time after it.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Work inside runs on the side stream, behind all that the current stream was given so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Later work of the current stream waits for the side stream."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
