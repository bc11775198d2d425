"""The shared memory of the block attention's first kernel, and the warp that fills it by TMA.

`facts` is a `block_attention_facts.Facts`.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from dspark_kernels.cute.block_attention_schedule import CONSUMERS, ELEMENTS, KEYS, TILE, WARP, Pair, next_pair

STAGES = 2  # key tiles that shared memory has room for
SWIZZLE = 64  # 16-bit values in one row of a 128-byte swizzle
# Cache policies of fetches: of what others read too; and of what is read once, or twice at once, so that the parts, and the
# rows that products make and read, stay in L2: a block decode with 32K of context took 305 us so, 314 with keys as the others.
EVICT_NORMAL = 0x1000000000000000
EVICT_FIRST = 0x12F0000000000000


class Shared(NamedTuple):
    """queries [64, D], keys [64, D, stage], weights [64, 64]; maxima float32 [warpgroup, 64], in the end sums of weights, and
    peaks of values behind them; mbarriers: full of each [stage, block of 64 columns], empty of each stage, and of the
    queries."""

    queries: cute.Tensor
    keys: cute.Tensor
    weights: cute.Tensor
    maxima: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer
    queries_full: cute.Pointer
    queries_empty: cute.Pointer


@cute.jit
def keys_layout(facts: cutlass.Constexpr):
    """Key tiles of all stages: a column block of 64 behind the other in each span of rows."""
    span = facts.span
    tokens, token_strides = (8, span // 8, KEYS // span), (SWIZZLE, 8 * SWIZZLE, span * facts.width)
    return cute.make_layout(
        (tokens, (SWIZZLE, facts.blocks), STAGES), stride=(token_strides, (1, span * SWIZZLE), KEYS * facts.width)
    )


@cute.jit
def values_layout(columns: cutlass.Constexpr, facts: cutlass.Constexpr):
    """The first columns of all stages' keys as values, [column, key, stage]."""
    span = facts.span
    tokens, token_strides = (8, span // 8, KEYS // span), (SWIZZLE, 8 * SWIZZLE, span * facts.width)
    return cute.make_layout(
        ((SWIZZLE, columns // SWIZZLE), tokens, STAGES), stride=((1, span * SWIZZLE), token_strides, KEYS * facts.width)
    )


@cute.jit
def rows_layout(blocks: cutlass.Constexpr):
    """Rows of a tile, with this many column blocks of 64."""
    return cute.make_layout(((8, TILE // 8), (SWIZZLE, blocks)), stride=((SWIZZLE, 8 * SWIZZLE), (1, TILE * SWIZZLE)))


@cute.jit
def allocate(facts: cutlass.Constexpr):
    """The CTA's shared memory."""
    dtype, allocator, swizzle = ELEMENTS[facts.dtype], SmemAllocator(), cute.make_swizzle(3, 4, 3)
    queries = allocator.allocate_tensor(dtype, rows_layout(facts.blocks), 1024, swizzle)
    keys = allocator.allocate_tensor(dtype, keys_layout(facts), 1024, swizzle)
    weights = allocator.allocate_tensor(dtype, rows_layout(1), 1024, swizzle)
    maxima = allocator.allocate_tensor(cutlass.Float32, cute.make_layout(4 * TILE), 16)
    barriers = [allocator.allocate_array(cutlass.Int64, count) for count in (STAGES * facts.blocks, STAGES, 1, 1)]
    return Shared(queries, keys, weights, maxima, *barriers)


@cute.jit
def set_up_barriers(shared: Shared, facts: cutlass.Constexpr):
    """One thread; the others meet it before they use them."""
    for place in cutlass.range_constexpr(STAGES * facts.blocks):
        cute.arch.mbarrier_init(shared.full + place, 1)
    for stage in cutlass.range_constexpr(STAGES):
        cute.arch.mbarrier_init(shared.empty + stage, CONSUMERS // WARP)
    cute.arch.mbarrier_init(shared.queries_full, 1)
    cute.arch.mbarrier_init(shared.queries_empty, CONSUMERS // WARP)
    cute.arch.mbarrier_init_fence()


@cute.jit
def _fetch_queries(atom, from_global, to_shared, full, facts: cutlass.Constexpr):
    """One tile of query rows into shared memory by TMA; zeros in the rows that the tile has too many."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, TILE * facts.width * ELEMENTS[facts.dtype].width // 8)
    cute.copy(atom, from_global, to_shared, tma_bar_ptr=full, cache_policy=cutlass.Int64(EVICT_NORMAL))


@cute.jit
def _table_of(requests, slots, request, facts: cutlass.Constexpr):
    """The page table's row of a request; slots: of `first_slots`."""
    row = cutlass.Int64(request)
    if cutlass.const_expr(facts.slotted):
        row = cutlass.Int64(cute.arch.shuffle_sync(slots, request % WARP))
        if request >= WARP:
            row = cutlass.Int64((requests.slots + request).load())
    return requests.page_table + row * requests.table_stride


@cute.jit
def _pages_of(table, token, pair: Pair, facts: cutlass.Constexpr):
    """The page of each box of the key tile that begins at a token."""
    boxes = KEYS // facts.box
    pages = cute.make_rmem_tensor(boxes, cutlass.Int32)
    for box in cutlass.range_constexpr(boxes):
        # A page outside the keys is none: its rows are masked, so any page with keys stands for it.
        known = cutlass.min(cutlass.max(token + box * facts.box, pair.first), pair.end - 1)
        pages[box] = cutlass.max((table + known // facts.page_size).load(), cutlass.Int32(0))
    return pages


@cute.jit
def fetch_blocks(
    atom, from_global, to_shared, pages, token, done, full, empty, begin, blocks: cutlass.Constexpr, facts: cutlass.Constexpr
):  # fmt: skip
    """Some column blocks of a key tile into its stage, when their place is free; begin: the first of them; full, empty: their
    barriers."""
    stage = done % STAGES
    if done >= STAGES:
        cute.arch.mbarrier_wait(empty, (done // STAGES - 1) % 2)
    size = KEYS * blocks * SWIZZLE * ELEMENTS[facts.dtype].width // 8
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, size)
    for box in cutlass.range_constexpr(KEYS // facts.box):
        row = (token + box * facts.box) % facts.page_size // facts.box
        for block in cutlass.range(begin, begin + blocks, unroll=1):
            cute.copy(
                atom,
                from_global[None, row, block, pages[box]],
                to_shared[None, box, block, stage],
                tma_bar_ptr=full,
                cache_policy=cutlass.Int64(EVICT_FIRST if facts.row_tiles == 1 else EVICT_NORMAL),
            )


@cute.jit
def fetch_tile(atom, from_global, to_shared, shared: Shared, pages, token, done, facts: cutlass.Constexpr):
    """A key tile, block after block: scores begin with those that are there."""
    stage = done % STAGES
    for block in cutlass.range(facts.blocks, unroll=1):
        full, empty = shared.full + (stage * facts.blocks + block), shared.empty + stage
        fetch_blocks(atom, from_global, to_shared, pages, token, done, full, empty, block, 1, facts)


@cute.jit
def fetch(
    tma_atom,
    tma_tensor,
    query_atom,
    query_tensor,
    requests,
    shared: Shared,
    slots,
    place,
    last,
    listed,
    fetch_one: cutlass.Constexpr,
    facts: cutlass.Constexpr,
):
    """The fetching warp: key tiles among the places place..last of the list, and the queries of each pair among them.

    slots: of `first_slots`; fetch_one: a tile's way into its stage.

    Early, it fetches the first tile, if that is of early context alone, beside the kernel before.  A CTA without a tile waits
    for that kernel too: who finds this launch ended may count on that one having ended.
    """
    if cutlass.const_expr(not facts.early):
        cute.arch.fence_proxy("async.global")  # by TMA comes what the kernel before has stored
    done = cutlass.Int32(0)  # tiles since the start: gives stage and phase
    pairs_done = cutlass.Int32(0)
    box_shape = (facts.box, SWIZZLE)
    shared_boxes = cute.flat_divide(cute.make_tensor(shared.keys.iterator, keys_layout(facts)), box_shape)
    global_boxes = cute.flat_divide(tma_tensor, box_shape)
    to_shared, from_global = cpasync.tma_partition(
        tma_atom, 0, cute.make_layout(1), cute.group_modes(shared_boxes, 0, 2), cute.group_modes(global_boxes, 0, 2)
    )
    rows = cute.make_tensor(shared.queries.iterator, rows_layout(facts.blocks))
    global_rows = cute.flat_divide(query_tensor, (TILE, facts.width))
    queries_to, queries_from = cpasync.tma_partition(
        query_atom, 0, cute.make_layout(1), cute.group_modes(rows, 0, 2), cute.group_modes(global_rows, 0, 2)
    )
    while place < last:
        pair = next_pair(requests, place, last, listed, facts)
        table = _table_of(requests, slots, pair.request, facts)
        for key_tile in cutlass.range(pair.begin, pair.begin + pair.count, unroll=1):
            token = (pair.first // KEYS + key_tile) * KEYS
            pages = _pages_of(table, token, pair, facts)
            ahead = cutlass.Boolean(False)
            if cutlass.const_expr(facts.early) and done == 0:
                ahead = token + KEYS + facts.late_rows <= cutlass.Int32((requests.context_lens + pair.request).load())
                if ahead:
                    fetch_one(tma_atom, from_global, to_shared, shared, pages, token, done, facts)
                cute.arch.griddepcontrol_wait()
                cute.arch.fence_proxy("async.global")  # by TMA comes what that kernel has stored
            # The first query tile in front of all keys; another one waits for its place, so keys go first.
            if cutlass.const_expr(facts.fetch_queries) and done == 0:
                from_here = queries_from[None, pair.row_tile, 0, pair.request]
                _fetch_queries(query_atom, from_here, queries_to, shared.queries_full, facts)
            if not ahead:
                fetch_one(tma_atom, from_global, to_shared, shared, pages, token, done, facts)
            if cutlass.const_expr(facts.fetch_queries) and done > 0 and key_tile == pair.begin:
                cute.arch.mbarrier_wait(shared.queries_empty, (pairs_done - 1) % 2)
                from_here = queries_from[None, pair.row_tile, 0, pair.request]
                _fetch_queries(query_atom, from_here, queries_to, shared.queries_full, facts)
            done += 1
        pairs_done += 1
        place += pair.places
    if cutlass.const_expr(facts.early):
        # Other warps come here at once: the next launch waits for room as soon as all CTAs of this one have begun.
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
