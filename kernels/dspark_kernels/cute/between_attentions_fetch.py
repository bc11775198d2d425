"""The two warps of `between_attentions` that fetch by TMA.

`facts` is a `Facts` of `between_attentions_schedule`.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from dspark_kernels.cute.between_attentions_meet import (
    BLOCKS,
    SWIZZLE,
    Shared,
    acquire,
    give_piece,
    next_piece,
    put,
    this_launch,
    wait_for,
)
from dspark_kernels.cute.between_attentions_schedule import DEPTH, LINE, ROWS, Workspace, piece_boxes, share

# Boxes of weights under way of a CTA.  One does not fill the memory's bandwidth; each more waits in the memory, and what the
# CTAs tell one another waits behind it: 208 us for five layers with 2, 216 with 3, 234 with 12, 276 with 1.
AHEAD = 2
EVICT_FIRST, EVICT_NORMAL = 0x12F0000000000000, 0x1000000000000000


class Maps(NamedTuple):
    """A TMA atom and its tensor."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


@cute.jit
def _partition(maps: Maps, shared: cute.Tensor, rows: cutlass.Constexpr, columns: cutlass.Constexpr):
    """Boxes of a tensor in shared and in global memory."""
    box = (rows, columns)
    there = cute.flat_divide(cute.make_tensor(shared.iterator, shared.layout), box)
    here = cute.flat_divide(maps.tensor, box)
    return cpasync.tma_partition(maps.atom, 0, cute.make_layout(1), cute.group_modes(there, 0, 2), cute.group_modes(here, 0, 2))


@cute.jit
def _fetch_box(maps: list[Maps], shared: Shared, tile, box, done, gated: cutlass.Constexpr, facts: cutlass.Constexpr):
    """One box of a weight, or half a box of each of two, once there is room; done: boxes before it."""
    stage = acquire(shared, done, facts.stages)
    if done >= AHEAD:
        before = done - AHEAD
        cute.arch.mbarrier_wait(shared.landed + before % facts.stages, before // facts.stages % 2)
    landed, policy = shared.landed + stage, cutlass.Int64(EVICT_FIRST)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(landed, 2 * ROWS * DEPTH)
    if cutlass.const_expr(gated):
        for side in cutlass.range_constexpr(2):
            to, source = _partition(maps[side], shared.weights, ROWS // 2, SWIZZLE)
            for block in cutlass.range_constexpr(BLOCKS):
                cute.copy(
                    maps[side].atom, source[None, tile, box * BLOCKS + block], to[None, side, block, stage],
                    tma_bar_ptr=landed, cache_policy=policy,
                )  # fmt: skip
    else:
        to, source = _partition(maps[0], shared.weights, ROWS, DEPTH)
        cute.copy(
            maps[0].atom, source[None, tile, box], to[None, 0, 0, stage], tma_bar_ptr=landed, cache_policy=policy
        )  # fmt: skip


@cute.jit
def _ask(work: Workspace, facts: cutlass.Constexpr):
    """How often the launch's CTAs have asked for a piece before, as the first lane's result."""
    asked = cutlass.Int32(0)
    if cute.arch.lane_idx() == 0:
        asked = cute.arch.atomic_add(work.counters + facts.asked_at, cutlass.Int32(1), sem="relaxed", scope="gpu")
    return asked


@cute.jit
def _fetch_pieces(maps: list[Maps], shared: Shared, work: Workspace, facts: cutlass.Constexpr):
    """Of the first product, the CTA's own piece and those that it is the next to ask for; how many boxes."""
    cta, _, _ = cute.arch.block_idx()
    done, pieces = cutlass.Int32(0), cutlass.Int32(0)
    piece, asked = cta, _ask(work, facts)
    while piece < facts.first_pieces:
        give_piece(shared, pieces, piece)
        tile, first, last = piece_boxes(piece, facts)
        for box in cutlass.range(first, last, unroll=1):
            _fetch_box(maps, shared, tile, box, done, False, facts)
            done += 1
        pieces += 1
        piece = facts.ctas + cute.arch.shuffle_sync(asked, 0)  # answered while the boxes were fetched
        if piece < facts.first_pieces:
            asked = _ask(work, facts)
    give_piece(shared, pieces, cutlass.Int32(facts.first_pieces))
    if cute.arch.shuffle_sync(asked, 0) == facts.asks - 1 and cute.arch.lane_idx() == 0:  # nobody asks again
        put(work.counters + facts.asked_at, cutlass.Int32(0))
    return done


@cute.jit
def fetch_weights(maps: list[list[Maps]], shared: Shared, work: Workspace, facts: cutlass.Constexpr):
    """maps: of each product, two where it is gated."""
    cta, _, _ = cute.arch.block_idx()
    done = _fetch_pieces(maps[0], shared, work, facts)
    for index in cutlass.range_constexpr(1, len(facts.products)):
        product = facts.products[index]
        first, last = share(cta, product.tiles * product.boxes, product)
        for at in cutlass.range(first, last, unroll=1):
            _fetch_box(maps[index], shared, at // product.boxes, at % product.boxes, done, product.gated, facts)
            done += 1


@cute.jit
def fetch_x(maps: list[Maps], shared: Shared, work: Workspace, facts: cutlass.Constexpr):
    """maps: of each product."""
    cta, _, _ = cute.arch.block_idx()
    cute.arch.griddepcontrol_wait()  # the first product's x is there
    launch = this_launch(work, facts)
    done, pieces = cutlass.Int32(0), cutlass.Int32(0)
    cute.arch.fence_proxy("async.global")
    piece = next_piece(shared, pieces)
    while piece < facts.first_pieces:
        _, first, last = piece_boxes(piece, facts)
        for box in cutlass.range(first, last, unroll=1):
            _fetch_rows(maps[0], shared, box, done, facts)
            done += 1
        pieces += 1
        piece = next_piece(shared, pieces)
    for index in cutlass.range_constexpr(1, len(facts.products)):
        product = facts.products[index]
        first, last = share(cta, product.tiles * product.boxes, product)
        if first < last:  # a CTA that has none may come when the launch is over, and must not wait for the next one
            wait_for(work.counters + LINE * (index - 1), launch * facts.products[index - 1].tiles, shared.ready + index)
            cute.arch.fence_proxy("async.global")
        for at in cutlass.range(first, last, unroll=1):
            _fetch_rows(maps[index], shared, at % product.boxes, done, facts)
            done += 1


@cute.jit
def _fetch_rows(maps: Maps, shared: Shared, box, done, facts: cutlass.Constexpr):
    """One box of x, once there is room."""
    to, source = _partition(maps, shared.x, facts.lanes, DEPTH)
    stage = acquire(shared, done, facts.stages)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(shared.met + stage, 2 * facts.lanes * DEPTH)
    cute.copy(
        maps.atom, source[None, 0, box], to[None, 0, 0, stage], tma_bar_ptr=shared.met + stage,
        cache_policy=cutlass.Int64(EVICT_NORMAL),
    )  # fmt: skip
