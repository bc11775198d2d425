"""What goes into `DFlashWorker.step` and what comes out."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from dspark_model.modeling import BlockDraft
from dspark_model.runtime import ResolvedRuntime
from dspark_model.sampling import GREEDY, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContextChunk:
    """Prompt rows of one request.

    target_hidden: [n, T * E], the tapped hidden states of n prompt tokens, n >= 0.
    start_position: position of the first of them; equals the number of rows the worker has already.
    anchor: on the last chunk, the first token that the target chose after the prompt; None on the others.
    sampling: how the block that follows the last chunk is drafted.
    """

    request_id: Hashable
    target_hidden: torch.Tensor
    start_position: int
    anchor: int | None = None
    sampling: SamplingParams = GREEDY


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerationRows:
    """Target rows of B requests whose last drafts have been run through the target; K is the worker's num_drafts.

    request_ids: B ids; None makes a dummy row (padding), which changes nothing and whose tensors may hold anything.
    target_hidden: [B, K + 1, T * E]: after the anchor, then after each draft.
    target_tokens: int64 [B, K + 1], the target's own choice at each of these rows; or
    target_logits: [B, K + 1, V'], from which the worker verifies, V' >= the drafter's vocab_size; columns past it are padding
        and never chosen; or
    committed_tokens int64 [B, K + 1] and num_committed int64 [B]: the verdict of a caller that has verified elsewhere.
    widths: how many of the K + 1 rows are real for each request; None means num_valid_drafts + 1 of its last step.
    sampling: B parameters; None is greedy for all.  A temperature needs target_logits to verify with.
    """

    request_ids: Sequence[Hashable | None]
    target_hidden: torch.Tensor
    target_tokens: torch.Tensor | None = None
    target_logits: torch.Tensor | None = None
    committed_tokens: torch.Tensor | None = None
    num_committed: torch.Tensor | None = None
    widths: Sequence[int] | None = None
    sampling: Sequence[SamplingParams] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepInput:
    """One step: context requests first, then generation requests.

    block_table: only for an external pool: encoded page offsets [requests, P] of the requests in that order, dummy rows
    left out.
    """

    context: Sequence[ContextChunk] = ()
    generation: GenerationRows | None = None
    block_table: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StepTrace:
    """Intermediate results of a step that was asked to keep them.

    context: [M, hidden], projected context rows: those of the chunks, then K + 1 for each generation row.
    draft: logits and confidence logits of the drafting rows in the order of the output; None if nothing was drafted.
    """

    context: torch.Tensor
    draft: BlockDraft | None


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """B rows: one for each context chunk, then one for each generation row.

    committed_tokens: int64 [B, K + 1], accepted drafts and the target's own token, -1 behind num_committed.
    num_accepted, num_committed: int64 [B]; num_committed is num_accepted + 1, and 0 for chunks and dummy rows.
    next_tokens: int64 [B, K + 1], what the target runs next: anchor and drafts, -1 where nothing was drafted.
    anchor: int64 [B], the token in slot 0 of the drafted block, and draft_tokens: int64 [B, K], views of next_tokens.
    num_valid_drafts: int64 [B], drafts that may be verified; fewer than K close to the request's limit, 0 for a chunk that
        is not the last and for dummy rows.
    confidence: float32 [B, K], the estimate of P(draft k stands | those before it stand); None without that head.
    num_dropped: int64 [B], committed rows that no page was there for (external pools only), or the whole verdict of a captured
        step that ends in a token id outside the vocabulary.
    runtime: what the step ran with, and why.  trace: None unless asked for.
    """

    request_ids: tuple[Hashable | None, ...]
    committed_tokens: torch.Tensor
    num_accepted: torch.Tensor
    num_committed: torch.Tensor
    next_tokens: torch.Tensor
    num_valid_drafts: torch.Tensor
    confidence: torch.Tensor | None
    num_dropped: torch.Tensor
    runtime: ResolvedRuntime
    trace: StepTrace | None

    @property
    def anchor(self) -> torch.Tensor:
        return self.next_tokens[:, 0]

    @property
    def draft_tokens(self) -> torch.Tensor:
        return self.next_tokens[:, 1:]
