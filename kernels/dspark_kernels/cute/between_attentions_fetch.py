"""The two warps of `between_attentions` that fetch by TMA.

`facts` is a `Facts` of `between_attentions_schedule`.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from dspark_kernels.cute.between_attentions_meet import BLOCKS, SWIZZLE, Shared, acquire, this_launch, wait_for
from dspark_kernels.cute.between_attentions_schedule import DEPTH, ROWS, Workspace, share

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
def fetch_weights(maps: list[list[Maps]], shared: Shared, facts: cutlass.Constexpr):
    """maps: of each product, two where it is gated."""
    cta, _, _ = cute.arch.block_idx()
    done = cutlass.Int32(0)
    for index in cutlass.range_constexpr(len(facts.products)):
        product = facts.products[index]
        total = product.tiles * product.boxes
        first, last = share(cta, total, product)
        for at in cutlass.range(first, last, unroll=1):
            stage = acquire(shared, done, facts.stages)
            if done >= AHEAD:
                before = done - AHEAD
                cute.arch.mbarrier_wait(shared.landed + before % facts.stages, before // facts.stages % 2)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(shared.landed + stage, 2 * ROWS * DEPTH)
            tile, box = at // product.boxes, at % product.boxes
            if cutlass.const_expr(product.gated):
                for side in cutlass.range_constexpr(2):
                    to, source = _partition(maps[index][side], shared.weights, ROWS // 2, SWIZZLE)
                    for block in cutlass.range_constexpr(BLOCKS):
                        cute.copy(
                            maps[index][side].atom, source[None, tile, box * BLOCKS + block], to[None, side, block, stage],
                            tma_bar_ptr=shared.landed + stage, cache_policy=cutlass.Int64(EVICT_FIRST),
                        )  # fmt: skip
            else:
                to, source = _partition(maps[index][0], shared.weights, ROWS, DEPTH)
                cute.copy(
                    maps[index][0].atom, source[None, tile, box], to[None, 0, 0, stage],
                    tma_bar_ptr=shared.landed + stage, cache_policy=cutlass.Int64(EVICT_FIRST),
                )  # fmt: skip
            done += 1


@cute.jit
def fetch_x(maps: list[Maps], shared: Shared, work: Workspace, facts: cutlass.Constexpr):
    """maps: of each product."""
    cta, _, _ = cute.arch.block_idx()
    launch = this_launch(work, facts)
    done = cutlass.Int32(0)
    for index in cutlass.range_constexpr(len(facts.products)):
        product = facts.products[index]
        total = product.tiles * product.boxes
        first, last = share(cta, total, product)
        if first < last:
            if cutlass.const_expr(index > 0):
                wait_for(work.counters + index - 1, launch * facts.products[index - 1].tiles)
            cute.arch.fence_proxy("async.global")
        to, source = _partition(maps[index], shared.x, facts.lanes, DEPTH)
        for at in cutlass.range(first, last, unroll=1):
            stage = acquire(shared, done, facts.stages)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(shared.met + stage, 2 * facts.lanes * DEPTH)
            cute.copy(
                maps[index].atom, source[None, 0, at % product.boxes], to[None, 0, 0, stage],
                tma_bar_ptr=shared.met + stage, cache_policy=cutlass.Int64(EVICT_NORMAL),
            )  # fmt: skip
            done += 1
