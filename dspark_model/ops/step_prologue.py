"""The whole-number part of a step: which drafts stand, how long each request is, and where the block's rows go."""

from dataclasses import dataclass

import torch

from dspark_model.ops.accept_exact import NO_TOKEN, accept_exact
from dspark_model.ops.block_fixup import BlockRows, block_fixup
from dspark_model.ops.length_advance import length_advance
from dspark_model.ops.row_addresses import RowAddresses


@dataclass(frozen=True, slots=True, eq=False)
class SlotTables:
    """What a step reads of S slots.  context_lens, num_valid_drafts, max_context, num_pages: int64 [S]; draft_tokens:
    int64 [S, K]; page_table: int32 [S, P]; all contiguous."""

    context_lens: torch.Tensor
    draft_tokens: torch.Tensor
    num_valid_drafts: torch.Tensor
    max_context: torch.Tensor
    page_table: torch.Tensor
    num_pages: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class GivenRows:
    """Rows of a step whose verdict is known: num_new int64 [C], their new context rows; anchors int64 [C], NO_TOKEN where
    nothing is to be drafted."""

    num_new: torch.Tensor
    anchors: torch.Tensor


@dataclass(frozen=True, slots=True)
class BlockShape:
    """num_drafts: K; vocab_size: ids that a verdict may end in; rows: N of the block; first_draft_row: the row that predicts
    draft 0; mask_token: its id."""

    num_drafts: int
    vocab_size: int
    rows: int
    first_draft_row: int
    page_size: int
    mask_token: int


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """B rows: the given ones, then those that were verified.

    committed_tokens: int64 [B, K + 1], NO_TOKEN behind num_committed and for given and dummy rows; num_accepted,
    num_committed: int64 [B], 0 for given rows.  anchors: int64 [B], 0 for dummy rows, NO_TOKEN where nothing is drafted.
    counts: int64 [3, B], context_lens, num_dropped and num_valid_drafts, which are its rows.
    context_lens, num_dropped: int64 [B], see `length_advance`.  A verdict that ends in an id outside the vocabulary is void:
    all its rows are dropped, nothing is committed, and the row drafts nothing, with an anchor of 0.
    num_valid_drafts: int64 [B], drafts that may be verified: those whose token lies below the request's limit and whose block
    row has a page, none where rows were dropped.
    block_ids: int64 [B, N], embedding rows of the block: the anchor (0 where there is none), then the mask token.
    block: the block's rows, see `block_fixup`; those of a row that drafts nothing own no page and have seq_lens 0.
    cos_sin: float32 [B, N, r], the rotations of the block's positions.
    """

    committed_tokens: torch.Tensor
    num_accepted: torch.Tensor
    num_committed: torch.Tensor
    anchors: torch.Tensor
    counts: torch.Tensor
    block_ids: torch.Tensor
    block: BlockRows
    cos_sin: torch.Tensor

    @property
    def context_lens(self) -> torch.Tensor:
        return self.counts[0]

    @property
    def num_dropped(self) -> torch.Tensor:
        return self.counts[1]

    @property
    def num_valid_drafts(self) -> torch.Tensor:
        return self.counts[2]

    def select(self, index: torch.Tensor) -> "StepRows":
        """The rows at int64 [R]."""
        where = self.block.where
        return StepRows(
            committed_tokens=self.committed_tokens[index],
            num_accepted=self.num_accepted[index],
            num_committed=self.num_committed[index],
            anchors=self.anchors[index],
            counts=self.counts[:, index],
            block_ids=self.block_ids[index],
            block=BlockRows(
                positions=self.block.positions[index],
                where=RowAddresses(where.pages[index], where.offsets[index], where.owned[index]),
                seq_lens=self.block.seq_lens[index],
            ),
            cos_sin=self.cos_sin[index],
        )


def step_prologue(
    slots: torch.Tensor,
    tables: SlotTables,
    given: GivenRows,
    target_tokens: torch.Tensor,
    cos_sin: torch.Tensor,
    shape: BlockShape,
    *,
    fused: bool = False,
) -> StepRows:
    """Accept, advance the lengths and place the block, for C given rows and then B - C rows of exact verification.

    slots: int64 [B], NO_TOKEN for dummy rows, the others distinct; target_tokens: int64 [B - C, K + 1], any strides, see
    `accept_exact`; cos_sin: float32 [positions, r], the rotation table.  Reads the tables, writes nothing that exists.
    fused: one Triton kernel, equal to the bit.
    """
    run = _fused if fused else _reference
    return run(slots, tables, given, target_tokens, cos_sin, shape)


def _reference(slots, tables: SlotTables, given: GivenRows, target_tokens, cos_sin, shape: BlockShape) -> StepRows:
    live, at, first = slots >= 0, slots.clamp(min=0), given.num_new.shape[0]
    checked = torch.where(live, tables.num_valid_drafts[at], 0)[first:]
    verdict = accept_exact(tables.draft_tokens[at][first:].clamp(min=0), checked, target_tokens)
    verified = live[first:]
    # Accepted drafts are ids of the vocabulary; the token behind them may be anything.
    stands = verified & (verdict.anchor >= 0) & (verdict.anchor < shape.vocab_size)
    fresh = verdict.num_accepted + 1
    filler = torch.full((first, shape.num_drafts + 1), NO_TOKEN, dtype=torch.int64, device=slots.device)
    committed = torch.where(stands[:, None], verdict.committed_tokens, NO_TOKEN)
    none = torch.zeros_like(given.num_new)
    anchors = torch.cat((given.anchors, torch.where(stands, verdict.anchor, 0)))
    old = torch.where(live, tables.context_lens[at], 0)
    num_pages = tables.num_pages[at]
    void = torch.cat((none, torch.where(verified & ~stands, fresh, 0)))
    num_new = torch.cat((given.num_new, torch.where(stands, fresh, 0)))
    advance = length_advance(old, num_new, num_pages * shape.page_size, live)
    dropped = advance.num_dropped + void
    drafting = live & (anchors >= 0) & (void == 0)
    page_table = tables.page_table[at]
    block = block_fixup(advance.context_lens, page_table, num_pages, drafting, rows=shape.rows, page_size=shape.page_size)
    below_limit = tables.max_context[at] - advance.context_lens - 1
    with_page = block.seq_lens - advance.context_lens - shape.first_draft_row
    valid = torch.minimum(below_limit, with_page).clamp(0, shape.num_drafts)
    ids = torch.full_like(block.positions, shape.mask_token)
    ids[:, 0] = anchors.clamp(min=0)
    return StepRows(
        committed_tokens=torch.cat((filler, committed)),
        num_accepted=torch.cat((none, torch.where(stands, verdict.num_accepted, 0))),
        num_committed=torch.cat((none, torch.where(stands, fresh, 0))),
        anchors=anchors,
        counts=torch.stack((advance.context_lens, dropped, torch.where(drafting & (dropped == 0), valid, 0))),
        block_ids=ids,
        block=block,
        cos_sin=torch.nn.functional.embedding(block.positions, cos_sin),
    )


def _fused(slots, tables: SlotTables, given: GivenRows, target_tokens, cos_sin, shape: BlockShape) -> StepRows:
    import triton
    from dspark_kernels.triton.step_prologue import step_prologue_kernel

    batch, width = slots.shape[0], cos_sin.shape[1]

    def integers(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=torch.int64, device=slots.device)

    committed, scalars = integers(batch, shape.num_drafts + 1), integers(7, batch)
    positions, ids, pages, offsets = integers(4, batch, shape.rows).unbind(0)
    owned = torch.empty((batch, shape.rows), dtype=torch.bool, device=slots.device)
    rotations = torch.empty((batch, shape.rows, width), dtype=torch.float32, device=slots.device)
    if batch:
        step_prologue_kernel[(batch,)](
            slots,
            given.num_new,
            given.anchors,
            given.num_new.shape[0],
            target_tokens,
            *target_tokens.stride(),
            tables.context_lens,
            tables.draft_tokens,
            tables.num_valid_drafts,
            tables.max_context,
            tables.page_table,
            tables.num_pages,
            tables.page_table.shape[1],
            cos_sin,
            committed,
            scalars,
            positions,
            ids,
            pages,
            offsets,
            owned.view(torch.uint8),
            rotations,
            batch,
            shape.vocab_size,
            shape.mask_token,
            shape.first_draft_row,
            DRAFTS=shape.num_drafts,
            ROWS=shape.rows,
            LANES=triton.next_power_of_2(max(shape.rows, shape.num_drafts + 1)),
            PAGE_SIZE=shape.page_size,
            WIDTH=width,
            WIDTH_LANES=triton.next_power_of_2(width),
            num_warps=1,
        )
    accepted, count, anchors, *_, keys = scalars.unbind(0)
    where = RowAddresses(pages=pages, offsets=offsets, owned=owned)
    return StepRows(
        committed_tokens=committed,
        num_accepted=accepted,
        num_committed=count,
        anchors=anchors,
        counts=scalars[3:6],
        block_ids=ids,
        block=BlockRows(positions=positions, where=where, seq_lens=keys),
        cos_sin=rotations,
    )
