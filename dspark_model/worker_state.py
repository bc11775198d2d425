"""The worker's state: one record per admitted request, one row of tensors per slot."""

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from dspark_model.ops import SlotDrafts, SlotTables


@dataclass(slots=True)
class RequestState:
    """Host side of one request.

    length: context rows in the pool.  num_valid_drafts: drafts of the last step that may be verified.  num_dropped: committed
    rows that had no page or came with an id outside the vocabulary.  drafting: whether it has been drafted for, so that
    generation rows may follow.  in_flight: steps whose results the host has not seen yet; the other counts are those before
    them.
    """

    request_id: Hashable
    slot: int
    max_context: int
    length: int = 0
    num_valid_drafts: int = 0
    num_dropped: int = 0
    drafting: bool = False
    in_flight: int = 0

    def length_bound(self, rows_per_step: int) -> int:
        """The most context rows that it can have after its steps in flight."""
        return min(self.length + self.in_flight * rows_per_step, self.max_context)


class SlotState:
    """Device side, S = max_requests slots.

    context_lens, anchors, num_valid_drafts, max_context: int64 [S]; draft_tokens: int64 [S, K].
    draft_probs: float32 [S, K, V], the distributions that drafts were drawn from, or None when drafts are never drawn;
    drawn: bool [S], whether the slot's last drafts were drawn rather than arg maxima.
    """

    def __init__(self, num_slots: int, num_drafts: int, sampled_vocab: int | None, device: torch.device):
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.context_lens = zeros(num_slots)
        self.anchors = zeros(num_slots)
        self.num_valid_drafts = zeros(num_slots)
        self.max_context = zeros(num_slots)
        self.draft_tokens = zeros(num_slots, num_drafts)
        self.drawn = zeros(num_slots, dtype=torch.bool)
        self.draft_probs = None
        if sampled_vocab is not None:
            self.draft_probs = zeros(num_slots, num_drafts, sampled_vocab, dtype=torch.float32)

    def _tensors(self) -> tuple[torch.Tensor, ...]:
        always = (self.context_lens, self.anchors, self.num_valid_drafts, self.max_context, self.draft_tokens, self.drawn)
        return always if self.draft_probs is None else (*always, self.draft_probs)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors())

    def tables(self, page_table: torch.Tensor, num_pages: torch.Tensor) -> SlotTables:
        """What a step reads, with the slots' pages int32 [S, P] and int64 [S]."""
        return SlotTables(
            context_lens=self.context_lens,
            draft_tokens=self.draft_tokens,
            num_valid_drafts=self.num_valid_drafts,
            max_context=self.max_context,
            page_table=page_table,
            num_pages=num_pages,
        )

    def drafts(self) -> SlotDrafts:
        """What a step replaces."""
        return SlotDrafts(self.context_lens, self.anchors, self.num_valid_drafts, self.draft_tokens)

    def reset(self, slot: int) -> None:
        """Forget the slot's last request."""
        for tensor in self._tensors():
            tensor[slot] = 0
