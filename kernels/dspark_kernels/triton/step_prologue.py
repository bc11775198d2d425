"""The whole-number part of a step, one program a row: verdict, lengths, addresses, the block's rows and their rotations."""

import triton
import triton.language as tl


@triton.jit
def _place(rows, used, slot, page_table_ptr, table_width, count, PAGE_SIZE: tl.constexpr):
    """Page, offset and ownership of rows of one request."""
    index = rows // PAGE_SIZE
    owned = used & (rows >= 0) & (index < count)
    page = tl.load(page_table_ptr + slot * table_width + index, mask=owned, other=0).to(tl.int64)
    return page, tl.where(owned, rows - index * PAGE_SIZE, 0), owned


@triton.jit
def _accept(live, checked, lanes, vocab_size, drafts_ptr, target_ptr, target_stride, committed_ptr, DRAFTS: tl.constexpr):
    """Accepted drafts of one request, the token behind them and whether it is one of the vocabulary's; stores the committed
    tokens, none of a dummy row or in front of another token."""
    drafts = tl.load(drafts_ptr + lanes, mask=lanes < DRAFTS, other=0)
    drafts = tl.maximum(drafts, 0)
    target = tl.load(target_ptr + lanes * target_stride, mask=lanes <= DRAFTS, other=0)
    stands = (lanes < checked) & (lanes < DRAFTS) & (drafts == target)
    accepted = tl.min(tl.where(stands, DRAFTS, tl.minimum(lanes, DRAFTS)), 0)
    final = tl.sum(tl.where(lanes == accepted, target, 0), 0)
    tokens = tl.where(lanes < accepted, drafts, tl.where(lanes == accepted, final, -1))
    stands = live & (final >= 0) & (final < vocab_size)
    tl.store(committed_ptr + lanes, tl.where(stands, tokens, -1), mask=lanes <= DRAFTS)
    return accepted.to(tl.int64), final, stands


@triton.jit
def step_prologue_kernel(
    slots_ptr,  # [B] int64, -1 = dummy row
    chunk_rows_ptr,  # [C] int64, the first C rows are context chunks
    chunk_anchors_ptr,  # [C] int64, -1 = not the last chunk
    num_chunks,
    target_ptr,  # [B - C, K + 1] int64, any strides
    target_stride_row,
    target_stride_column,
    context_lens_ptr,  # [S] int64
    drafts_ptr,  # [S, K] int64
    valid_ptr,  # [S] int64
    limits_ptr,  # [S] int64
    page_table_ptr,  # [S, P] int32
    num_pages_ptr,  # [S] int64
    table_width,
    cos_sin_ptr,  # [positions, r] float32
    committed_ptr,  # [B, K + 1] int64
    scalars_ptr,  # [7, B] int64: accepted, committed, anchor, context length, dropped, valid drafts, keys
    positions_ptr,  # [B, N] int64
    ids_ptr,  # [B, N] int64
    pages_ptr,  # [B, N] int64
    offsets_ptr,  # [B, N] int64
    owned_ptr,  # [B, N] uint8
    rotations_ptr,  # [B, N, r] float32
    batch,
    vocab_size,
    mask_token,
    first_draft_row,
    DRAFTS: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    live = slot >= 0
    slot = tl.maximum(slot, 0)
    old = tl.where(live, tl.load(context_lens_ptr + slot), 0)
    count = tl.where(live, tl.load(num_pages_ptr + slot), 0)

    out = committed_ptr + row * (DRAFTS + 1)
    if row < num_chunks:
        accepted = tl.zeros((), tl.int64)
        anchor = tl.load(chunk_anchors_ptr + row)
        fresh = tl.load(chunk_rows_ptr + row)
        committed = tl.zeros((), tl.int64)
        void = tl.zeros((), tl.int64)
        tl.store(out + lanes, tl.full((LANES,), -1, tl.int64), mask=lanes <= DRAFTS)
    else:
        checked = tl.where(live, tl.load(valid_ptr + slot), 0)
        drafts, target = drafts_ptr + slot * DRAFTS, target_ptr + (row - num_chunks) * target_stride_row
        accepted, anchor, stands = _accept(live, checked, lanes, vocab_size, drafts, target, target_stride_column, out, DRAFTS)
        void = tl.where(live & (stands == 0), accepted + 1, 0)
        fresh = tl.where(stands, accepted + 1, 0)
        committed = fresh
        anchor = tl.where(stands, anchor, 0)
        accepted = tl.where(stands, accepted, 0)

    wanted = tl.where(live, old + fresh, 0)
    length = tl.minimum(wanted, count * PAGE_SIZE)
    dropped = wanted - length + void
    drafting = live & (anchor >= 0) & (void == 0)
    keys = tl.where(drafting, tl.minimum(length + ROWS, count * PAGE_SIZE), 0)
    below_limit = tl.load(limits_ptr + slot) - length - 1
    valid = tl.maximum(tl.minimum(tl.minimum(below_limit, keys - length - first_draft_row), DRAFTS), 0)
    valid = tl.where(drafting & (dropped == 0), valid, 0)

    tl.store(scalars_ptr + row, accepted)
    tl.store(scalars_ptr + batch + row, committed)
    tl.store(scalars_ptr + 2 * batch + row, anchor)
    tl.store(scalars_ptr + 3 * batch + row, length)
    tl.store(scalars_ptr + 4 * batch + row, dropped)
    tl.store(scalars_ptr + 5 * batch + row, valid)
    tl.store(scalars_ptr + 6 * batch + row, keys)

    inside = lanes < ROWS
    positions = length + lanes
    usable = tl.where(drafting, count, 0)
    page, offset, owned = _place(positions, inside, slot, page_table_ptr, table_width, usable, PAGE_SIZE)
    at = row * ROWS + lanes
    tl.store(positions_ptr + at, positions, mask=inside)
    tl.store(ids_ptr + at, tl.where(lanes == 0, tl.maximum(anchor, 0), mask_token), mask=inside)
    tl.store(pages_ptr + at, page, mask=inside)
    tl.store(offsets_ptr + at, offset, mask=inside)
    tl.store(owned_ptr + at, owned.to(tl.uint8), mask=inside)
    column = tl.arange(0, WIDTH_LANES)
    both = inside[:, None] & (column < WIDTH)[None, :]
    rotations = tl.load(cos_sin_ptr + positions[:, None] * WIDTH + column[None, :], mask=both, other=0.0)
    tl.store(rotations_ptr + at[:, None] * WIDTH + column[None, :], rotations, mask=both)
