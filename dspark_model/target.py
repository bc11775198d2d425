"""What speculative decoding asks of a target model, whatever runs it."""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """One forward of the target.

    logits: [B, N, V], or [B, 1, V] of the last token with `last_logits_only`.  hidden: [B, N, T * E], the residual stream
    after each tapped layer, ascending by layer, side by side.  Both in the model's dtype.
    """

    logits: torch.Tensor
    hidden: torch.Tensor


class Target(Protocol):
    """A causal language model with a cache of `max_requests` slots and `max_positions` rows in each.

    Row b of a forward has its N tokens at positions starts[b] .. starts[b] + N - 1 of slot slots[b].  Their cache rows are
    overwritten and each token sees the rows up to its own position, so that a rejection is rolled back by passing a smaller
    start.  `TransformersTarget` is the implementation for `transformers` models.
    """

    target_layer_ids: tuple[int, ...]
    lm_head: torch.Tensor
    embed_tokens: torch.Tensor
    vocab_size: int
    max_requests: int
    max_positions: int
    device: torch.device
    dtype: torch.dtype

    def forward(
        self, tokens: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor, *, last_logits_only: bool = False
    ) -> TargetOutput:
        """Run tokens int64 [B, N] of slots int64 [B] from positions starts int64 [B]."""
        ...
