"""What the host knows of steps whose results are still on their way from the device."""

from collections import deque
from dataclasses import dataclass

import torch

from dspark_model.worker_state import RequestState


@dataclass(frozen=True, slots=True)
class _Pending:
    """requests: those of the rows, None for dummy rows; values: int64 [3, B] on the host, see `StepRows.counts`; arrived: the
    event behind the copy, None where there is nothing to wait for."""

    requests: tuple[RequestState | None, ...]
    values: torch.Tensor
    arrived: torch.cuda.Event | None


class StepsInFlight:
    """Copies lengths, valid drafts and dropped rows to the host without waiting, and takes them over once they are there.

    Meanwhile a request's `length_bound` counts K + 1 rows for each of its steps in flight.
    """

    def __init__(self):
        self._pending: deque[_Pending] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, requests: tuple[RequestState | None, ...], values: torch.Tensor) -> None:
        """values: int64 [3, B] on the device, the step's `StepRows.counts`; later steps may overwrite it."""
        on_cuda = values.device.type == "cuda"
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=on_cuda)
        host.copy_(values, non_blocking=on_cuda)
        arrived = torch.cuda.Event() if on_cuda else None
        if arrived is not None:
            arrived.record()
        self._pending.append(_Pending(requests, host, arrived))
        for request in requests:
            if request is not None:
                request.in_flight += 1

    def settle(self, *, wait: bool) -> None:
        """Take over the results that are there; wait: all of them."""
        while self._pending:
            first = self._pending[0]
            if first.arrived is not None and not first.arrived.query():
                if not wait:
                    return
                first.arrived.synchronize()
            self._pending.popleft()
            lengths, dropped, valid = first.values.tolist()
            for index, request in enumerate(first.requests):
                if request is not None:
                    request.in_flight -= 1
                    request.length, request.num_valid_drafts = lengths[index], valid[index]
                    request.num_dropped += dropped[index]
