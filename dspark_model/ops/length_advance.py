"""Context lengths after a step, bounded by what the request owns."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LengthAdvance:
    """context_lens: int64 [B], rows that hold context after the step, 0 for dummy rows.
    num_dropped: int64 [B], committed rows that had no page and were dropped."""

    context_lens: torch.Tensor
    num_dropped: torch.Tensor


def length_advance(
    context_lens: torch.Tensor, num_committed: torch.Tensor, capacity: torch.Tensor, live: torch.Tensor
) -> LengthAdvance:
    """min(context_lens + num_committed, capacity) for live requests, 0 for dummy rows.

    All arguments [B]: int64 lengths before the step, committed rows, rows the request's pages hold, bool live.
    """
    wanted = torch.where(live, context_lens + num_committed, 0)
    advanced = torch.minimum(wanted, torch.where(live, capacity, 0))
    return LengthAdvance(context_lens=advanced, num_dropped=wanted - advanced)
