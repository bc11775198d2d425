"""The block attention with two key tiles in flight: its shared memory, and the warp that fills it by TMA.

A stage has three sections of columns, which are fetched, and become free, one by one: the value columns of each warpgroup, and
those behind the values, where the weights of a tile lie as soon as its scores are known.

`facts` is a `block_attention_facts.Facts`.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from dspark_kernels.cute.block_attention_fetch import (
    EVICT_NORMAL,
    STAGES,
    SWIZZLE,
    fetch_queries,
    keys_layout,
    pages_of,
    rows_layout,
    table_of,
)
from dspark_kernels.cute.block_attention_schedule import CONSUMERS, ELEMENTS, KEYS, TILE, WARP, next_pair

SECTIONS = 3  # of a stage's columns: values of the first warpgroup, of the second, and what is no value
REST = 2  # the last of them


class Shared(NamedTuple):
    """queries [64, D], keys [64, D, stage], the same bytes as values [C, 64, stage], and as weights [64, 64, stage]; float32:
    bases and sums of weights, [warpgroup, 64]; mbarriers: full and empty of each [stage, section], and of the queries."""

    queries: cute.Tensor
    keys: cute.Tensor
    values: cute.Tensor
    weights: cute.Tensor
    bases: cute.Tensor
    sums: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer
    queries_full: cute.Pointer
    queries_empty: cute.Pointer


def weights_begin(facts) -> int:
    """Where the weights lie in a stage: in its first column block without a value, a swizzled row of 64 for each query row."""
    return KEYS * facts.latent


@cute.jit
def allocate(facts: cutlass.Constexpr):
    """The CTA's shared memory."""
    dtype, allocator, swizzle = ELEMENTS[facts.dtype], SmemAllocator(), cute.make_swizzle(3, 4, 3)
    values_layout = cute.make_layout(
        ((SWIZZLE, facts.latent // SWIZZLE), (8, KEYS // 8), STAGES),
        stride=((1, KEYS * SWIZZLE), (SWIZZLE, 8 * SWIZZLE), KEYS * facts.width),
    )
    weights_layout = cute.make_layout(((8, TILE // 8), SWIZZLE, STAGES), stride=((SWIZZLE, 8 * SWIZZLE), 1, KEYS * facts.width))
    queries = allocator.allocate_tensor(dtype, rows_layout(facts.width // SWIZZLE), 1024, swizzle)
    keys = allocator.allocate_tensor(dtype, keys_layout(facts), 1024, swizzle)
    weights = cute.make_tensor(keys.iterator + weights_begin(facts), weights_layout)
    bases, sums = (allocator.allocate_tensor(cutlass.Float32, cute.make_layout(2 * TILE), 16) for _ in range(2))
    barriers = [allocator.allocate_array(cutlass.Int64, count) for count in (STAGES * SECTIONS, STAGES * SECTIONS, 1, 1)]
    return Shared(
        queries,
        keys,
        cute.make_tensor(keys.iterator, values_layout),
        weights,
        bases,
        sums,
        *barriers,
    )


@cute.jit
def set_up_barriers(shared: Shared):
    """One thread; the others meet it before they use them.  A warpgroup gives back its value columns, both the rest."""
    for i in cutlass.range_constexpr(STAGES * SECTIONS):
        cute.arch.mbarrier_init(shared.full + i, 1)
        cute.arch.mbarrier_init(shared.empty + i, CONSUMERS // WARP // (1 if i % SECTIONS == REST else 2))
    cute.arch.mbarrier_init(shared.queries_full, 1)
    cute.arch.mbarrier_init(shared.queries_empty, CONSUMERS // WARP)
    cute.arch.mbarrier_init_fence()


@cute.jit
def _fetch_section(
    atom, from_global, to_shared, shared: Shared, pages, token, done, section, begin, blocks: cutlass.Constexpr,
    facts: cutlass.Constexpr,
):  # fmt: skip
    """Some column blocks of a key tile into its stage, when their place is free; begin: the first of them."""
    stage = done % STAGES
    place = stage * SECTIONS + section
    if done >= STAGES:
        cute.arch.mbarrier_wait(shared.empty + place, (done // STAGES - 1) % 2)
    size = KEYS * blocks * SWIZZLE * ELEMENTS[facts.dtype].width // 8
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(shared.full + place, size)
    for box in cutlass.range_constexpr(KEYS // facts.box):
        row = (token + box * facts.box) % facts.page_size // facts.box
        for block in cutlass.range(begin, begin + blocks, unroll=1):
            cute.copy(
                atom,
                from_global[None, row, block, pages[box]],
                to_shared[None, box, block, stage],
                tma_bar_ptr=shared.full + place,
                cache_policy=cutlass.Int64(EVICT_NORMAL),
            )


@cute.jit
def fetch(
    tma_atom,
    tma_tensor,
    query_atom,
    query_tensor,
    requests,
    shared: Shared,
    tile,
    last,
    own,
    tiles_end,
    facts: cutlass.Constexpr,
):
    """The fetching warp: key tiles tile..last of the list, and the queries of each pair among them."""
    done = cutlass.Int32(0)  # tiles since the start: gives stage and phase
    pairs_done = cutlass.Int32(0)
    half = facts.latent // SWIZZLE // 2
    box_shape = (facts.box, SWIZZLE)
    shared_boxes = cute.flat_divide(cute.make_tensor(shared.keys.iterator, keys_layout(facts)), box_shape)
    global_boxes = cute.flat_divide(tma_tensor, box_shape)
    to_shared, from_global = cpasync.tma_partition(
        tma_atom, 0, cute.make_layout(1), cute.group_modes(shared_boxes, 0, 2), cute.group_modes(global_boxes, 0, 2)
    )
    rows = cute.make_tensor(shared.queries.iterator, rows_layout(facts.width // SWIZZLE))
    global_rows = cute.flat_divide(query_tensor, (TILE, facts.width))
    queries_to, queries_from = cpasync.tma_partition(
        query_atom, 0, cute.make_layout(1), cute.group_modes(rows, 0, 2), cute.group_modes(global_rows, 0, 2)
    )
    while tile < last:
        pair = next_pair(requests, tile, last, own, tiles_end, facts)
        table = table_of(requests, pair.request, facts)
        for key_tile in cutlass.range(pair.begin, pair.begin + pair.count, unroll=1):
            token = (pair.first // KEYS + key_tile) * KEYS
            pages = pages_of(table, token, pair, facts)
            # The first query tile in front of all keys; another one waits for its place, so keys go first.
            if cutlass.const_expr(facts.fetch_queries) and done == 0:
                from_here = queries_from[None, pair.row_tile, 0, pair.request]
                fetch_queries(query_atom, from_here, queries_to, shared.queries_full, facts)
            here = (tma_atom, from_global, to_shared, shared, pages, token, done)
            scorer = done % STAGES  # begins with its own value columns, which it also gives back first
            for section in (scorer, 1 - scorer):
                _fetch_section(*here, section, section * half, half, facts)
            _fetch_section(*here, REST, 2 * half, facts.width // SWIZZLE - 2 * half, facts)
            if cutlass.const_expr(facts.fetch_queries) and done > 0 and key_tile == pair.begin:
                cute.arch.mbarrier_wait(shared.queries_empty, (pairs_done - 1) % 2)
                from_here = queries_from[None, pair.row_tile, 0, pair.request]
                fetch_queries(query_atom, from_here, queries_to, shared.queries_full, facts)
            done += 1
        pairs_done += 1
        tile += pair.count
