"""A second stream of work, with an explicit fork and join."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A CUDA stream beside the current one.  On a CPU, which has no streams, work between fork and join runs in program
    order.

    Memory that is allocated inside a fork belongs to the side stream; its next user there starts behind the next fork, and
    with it behind everything that the main stream had been given by then.  So tensors that cross the join may be dropped at
    any time after it.  Memory of the main stream may have its next user there as soon as it is dropped: what a fork reads of
    it has to be held until the join.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._held: list[torch.Tensor] = []

    @contextmanager
    def fork(self, *reads: torch.Tensor) -> Iterator[None]:
        """Work inside runs on the side stream, behind all that the current stream was given so far.  Of several forks before
        a join, each is behind the ones before it.  reads: tensors of the current stream, held until the join."""
        self._held += reads
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
        self._held.clear()
