"""The warps of `between_attentions` that fetch by TMA, and the one that makes 1 / rms of rows.

`facts` is a `Facts` of `between_attentions_schedule`.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from dspark_kernels.cute.between_attentions_latents import store_latents
from dspark_kernels.cute.between_attentions_meet import (
    Shared,
    acquire,
    pass_on,
    this_launch,
    wait_for,
)
from dspark_kernels.cute.between_attentions_schedule import (
    BLOCK,
    BOX,
    ELEMENTS,
    LINE,
    MADE,
    NOPE,
    Eps,
    Into,
    Rows,
    Weights,
    Workspace,
    first_tile,
)
from dspark_kernels.cute.between_attentions_values import num_units, unit_of
from dspark_kernels.cute.block_attention_fetch import EVICT_FIRST, EVICT_NORMAL, SWIZZLE
from dspark_kernels.cute.block_attention_schedule import WARP

# Boxes of weights under way of a CTA.  One does not fill the memory's bandwidth; each more waits in the memory, and what the
# CTAs tell one another waits behind it: a block decode with 2K took 274 us with 2, 276 with 3, 283 with 4, 342 with 1.
AHEAD = 2
AHEAD_MORE = 3  # of gate and up, the longest stretch in which CTAs have nothing to tell: 254 us a block decode, 258 with 2
SQUARES_IN_FLIGHT = 28  # of a lane: K3's 112 tiles of a row, by four groups, at once
GROUPS = 4  # of tiles, whose squares are summed apart, whatever the lanes: the order of a row's sum must not hang on them


class Maps(NamedTuple):
    """A TMA atom and its tensor."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


@cute.jit
def _copy(
    maps: Maps, shared, at, where: tuple, rows: cutlass.Constexpr, columns: cutlass.Constexpr, barrier,
    policy: cutlass.Constexpr, facts: cutlass.Constexpr,
):  # fmt: skip
    """Asks for a box of rows x columns, by its numbers in the tensor, which goes `at` values behind the first of `shared`:
    blocks of 64 columns, one behind the other."""
    place = cute.recast_ptr(shared.iterator, cute.make_swizzle(3, 4, 3), dtype=ELEMENTS[facts.dtype]) + at
    layout = cute.make_layout((rows, (SWIZZLE, columns // SWIZZLE)), stride=(SWIZZLE, (1, rows * SWIZZLE)))
    there = cute.flat_divide(cute.make_tensor(place, layout), (rows, columns))
    here = cute.flat_divide(maps.tensor, (rows, columns))
    to, source = cpasync.tma_partition(
        maps.atom, 0, cute.make_layout(1), cute.group_modes(there, 0, 2), cute.group_modes(here, 0, 2)
    )
    cute.copy(
        maps.atom, source[(None, *where)], to[None, 0, 0], tma_bar_ptr=barrier, cache_policy=cutlass.Int64(policy)
    )  # fmt: skip


@cute.jit
def _next_stage(shared: Shared, done, ahead: cutlass.Constexpr, facts: cutlass.Constexpr):
    """The stage of a box, once there is room, and not too many are under way; done: boxes before it."""
    stage = acquire(shared.empty, done, facts.stages)
    if done >= ahead:
        before = done - ahead
        cute.arch.mbarrier_wait(shared.landed + before % facts.stages, before // facts.stages % 2)
    return stage


@cute.jit
def _fetch_box(maps: list[Maps], shared: Shared, tile, box, done, product: cutlass.Constexpr, facts: cutlass.Constexpr):
    """One box of a weight, or half a box of each of two, once there is room; done: boxes before it."""
    stage = _next_stage(shared, done, AHEAD_MORE if product.gated or product.name == "context" else AHEAD, facts)
    landed, rows = shared.landed + stage, product.rows // len(maps)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(landed, 2 * BOX)
    if cutlass.const_expr(product.by_head):
        where = (0, tile % facts.slices, tile // facts.slices)
        _copy(maps[0], shared.weights, stage * BOX, where, NOPE, SWIZZLE, landed, EVICT_FIRST, facts)
    else:
        for side in cutlass.range_constexpr(len(maps)):
            at = stage * BOX + side * (BOX // len(maps))
            _copy(maps[side], shared.weights, at, (tile, box), rows, product.columns, landed, EVICT_FIRST, facts)


@cute.jit
def _fetch_matrix(maps: Maps, shared: Shared, number, done, facts: cutlass.Constexpr):
    """A unit's part of its head's matrix, as one box; done: boxes before it."""
    unit, rows = unit_of(number, facts.attention), facts.attention.value_width
    stage = _next_stage(shared, done, AHEAD, facts)
    landed, where = shared.landed + stage, (0, unit.slice, unit.group.head)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(landed, 2 * rows * SWIZZLE)
    _copy(maps, shared.weights, stage * BOX, where, rows, SWIZZLE, landed, EVICT_NORMAL, facts)


@cute.jit
def fetch_weights(
    maps: list[list[Maps]], matrix: list[Maps], batch, shared: Shared, facts: cutlass.Constexpr
):  # fmt: skip
    """One warp.  maps: of each product, two where it is gated; matrix: of the heads' matrices, where parts are merged."""
    cta, _, _ = cute.arch.block_idx()
    done = cutlass.Int32(0)
    if cutlass.const_expr(facts.attention is not None):
        for unit in cutlass.range(cta, num_units(batch, facts.attention), facts.ctas, unroll=1):
            _fetch_matrix(matrix[0], shared, unit, done, facts)
            done += 1
    for index in cutlass.range_constexpr(len(facts.products)):
        product = facts.products[index]
        for tile in cutlass.range(first_tile(cta, index, facts), product.tiles, facts.ctas, unroll=1):
            for box in cutlass.range(product.boxes, unroll=1):
                _fetch_box(maps[index], shared, tile, box, done, product, facts)
                done += 1


@cute.jit
def _fetch_columns(maps: Maps, shared: Shared, tile, done, product: cutlass.Constexpr, facts: cutlass.Constexpr):
    """All columns of x for one tile; done: stages of x before it."""
    for i in cutlass.range(product.x_fetches, unroll=1):
        stage = acquire(shared.x_empty, done + i, facts.x_stages)
        met = shared.met + stage
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(met, 2 * facts.lanes * product.x_columns)
        where = (0, 0, tile // facts.slices) if product.by_head else (0, i)
        _copy(maps, shared.x, stage * facts.x_values, where, facts.lanes, product.x_columns, met, EVICT_NORMAL, facts)


@cute.jit
def fetch_x(maps: list[Maps], shared: Shared, work: Workspace, facts: cutlass.Constexpr):
    """One warp.  maps: of each product."""
    cta, _, _ = cute.arch.block_idx()
    cute.arch.griddepcontrol_wait()  # the first product's x is there, or what it is made of
    launch, done = this_launch(work, facts), cutlass.Int32(0)
    for index in cutlass.range_constexpr(len(facts.products)):
        product = facts.products[index]
        # A CTA that has none may come when the launch is over, and must not wait for the next one.
        if first_tile(cta, index, facts) < product.tiles:
            before = facts.awaited(index)
            if cutlass.const_expr(before == MADE):
                wait_for(work.counters + facts.made_at, launch * facts.ctas, shared.ready + index)
            elif cutlass.const_expr(before is not None):
                wait_for(work.counters + LINE * before, launch * facts.products[before].tiles, shared.ready + index)
            cute.arch.fence_proxy("async.global")
        for tile in cutlass.range(first_tile(cta, index, facts), product.tiles, facts.ctas, unroll=1):
            _fetch_columns(maps[index], shared, tile, done, product, facts)
            done += product.x_fetches


@cute.jit
def _sum_squares(squares, group, tiles: cutlass.Constexpr, lanes: cutlass.Constexpr):
    """Of one row the sums of the tiles group, group + 4, ... of a product, in their order."""
    total = cutlass.Float32(0.0)
    turns = -(-tiles // GROUPS)
    for begin in cutlass.range_constexpr(0, turns, SQUARES_IN_FLIGHT):
        count = min(SQUARES_IN_FLIGHT, turns - begin)
        values = cute.make_rmem_tensor(count, cutlass.Float32)
        for i in cutlass.range_constexpr(count):  # all in flight together
            tile = group + (begin + i) * GROUPS
            values[i] = (squares + cutlass.min(tile, tiles - 1) * lanes).load()
        for i in cutlass.range_constexpr(count):
            if group + (begin + i) * GROUPS < tiles:
                total += values[i]
    return total


def _sum_pairs(values: list):
    """Of 2**n values, neighbours first."""
    while len(values) > 1:
        values = [left + right for left, right in zip(values[::2], values[1::2], strict=True)]
    return values[0]


@cute.jit
def _sum_of_squares(squares, tiles: cutlass.Constexpr, lanes: cutlass.Constexpr):
    """Of a lane's row, the sum of all tiles: the four groups as (0 + 1) + (2 + 3), whichever lanes have them."""
    group = cute.arch.lane_idx() // lanes
    sums = [_sum_squares(squares, group + i, tiles, lanes) for i in range(0, GROUPS, WARP // lanes)]
    for apart in (8, 16):
        if cutlass.const_expr(lanes <= apart):
            sums = [total + cute.arch.shuffle_sync_bfly(total, apart) for total in sums]
    return _sum_pairs(sums)


@cute.jit
def make_rms(
    shared: Shared, weights: Weights, rows: Rows, into: Into, work: Workspace, num_rows, eps: Eps, facts: cutlass.Constexpr
):  # fmt: skip
    """One warp: 1 / rms of the rows of each product that is normed, from the squares that the tiles of the product before left,
    or the blocks of given rows; and the latents, once they are made."""
    eps_of = {"gate_up": eps.mlp, "qkv_a": eps.attention, "q_b": eps.q_a}
    cta, _, _ = cute.arch.block_idx()
    lane, lanes = cute.arch.lane_idx(), facts.lanes
    for index in cutlass.range_constexpr(len(facts.products)):
        product = facts.products[index]
        if cutlass.const_expr(product.normed):  # noqa: SIM102 (decided when it is built, the next on the device)
            if first_tile(cta, index, facts) < product.tiles:
                cute.arch.mbarrier_wait(shared.ready + index, 0)
                before = facts.awaited(index)
                tiles = product.depth // (BLOCK if before == MADE else facts.products[before]).features
                begin = facts.prepared_at if before == MADE else before * facts.squares
                total = _sum_of_squares(work.squares + (begin * lanes + lane % lanes), tiles, lanes)
                if lane < lanes:
                    shared.rms[lane] = cute.math.rsqrt(total * (1.0 / product.depth) + eps_of[product.name])
                pass_on(shared.normed + index)
                if cutlass.const_expr(product.name == "q_b" and facts.stored):
                    store_latents(weights, rows, into, num_rows, eps.latent, index, facts)
