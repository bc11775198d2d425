"""The kernel of `between_attentions`: weights never stop streaming while the products wait for one another.

In a CTA one warp fetches boxes of weights, of all products one after the other, as far ahead as shared memory allows; a second
one fetches the rows of x that meet them, once the product before is finished; two warpgroups multiply; one finishes tiles.

`facts` is a `Facts` of `between_attentions_schedule`.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from dspark_kernels.cute.between_attentions_fetch import fetch_weights, fetch_x
from dspark_kernels.cute.between_attentions_finish import finish
from dspark_kernels.cute.between_attentions_meet import (
    GIVEN,
    GROUP,
    MULTIPLIED,
    TAKEN,
    WARP,
    Shared,
    allocate,
    set_up,
    store_part,
    tag,
    this_launch,
)
from dspark_kernels.cute.between_attentions_schedule import ROWS, Rows, Weights, Workspace, owner, share


@cute.jit
def _multiply(mma, shared: Shared, work: Workspace, facts: cutlass.Constexpr):
    """The multiplying warpgroups: this CTA's parts of all products.  They take turns with the boxes of a tile."""
    thread, group = cute.arch.thread_idx()[0] % GROUP, cute.arch.warp_idx() // (GROUP // WARP)
    cta, groups, stages = cute.arch.block_idx()[0], facts.multipliers, facts.stages
    mma.set(warpgroup.Field.ACCUMULATE, True)
    slice = mma.get_slice(thread)
    weights = mma.make_fragment_A(slice.partition_A(shared.weights))
    x = mma.make_fragment_B(slice.partition_B(shared.x))
    sums = cute.make_rmem_tensor(mma.partition_shape_C((ROWS, facts.lanes)), cutlass.Float32)
    launch = this_launch(work, facts)
    done, tiles_done = cutlass.Int32(0), cutlass.Int32(0)
    for index in cutlass.range_constexpr(len(facts.products)):
        product = facts.products[index]
        total = product.tiles * product.boxes
        at, last = share(cta, total, product)
        while at < last:
            tile = at // product.boxes
            count = cutlass.min(product.boxes - at % product.boxes, last - at)
            sums.fill(0.0)
            for i in cutlass.range(group, count, groups, unroll=1):
                stage, phase = (done + i) % stages, (done + i) // stages % 2
                cute.arch.mbarrier_wait(shared.landed + stage, phase)
                cute.arch.mbarrier_wait(shared.met + stage, phase)
                warpgroup.fence()
                for k in cutlass.range_constexpr(facts.depth // 16):
                    cute.gemm(mma, sums, weights[None, None, k, stage], x[None, None, k, stage], sums)
                warpgroup.commit_group()
                warpgroup.wait_group(1)
                if i >= groups and cute.arch.lane_idx() == 0:
                    cute.arch.mbarrier_arrive(shared.empty + (done + i - groups) % stages)
            warpgroup.wait_group(0)
            if group < count and cute.arch.lane_idx() == 0:
                final = count - 1 - (count - 1 - group) % groups
                cute.arch.mbarrier_arrive(shared.empty + (done + final) % stages)
            done += count
            if cutlass.const_expr(groups == 2):
                _join(sums, shared, group, tiles_done, thread, facts)
            tiles_done += 1
            if group == 0:
                piece = tile * facts.pieces[index] + cta - owner(tile * product.boxes, product)
                store_part(sums, work, piece, tag(launch, index, facts), thread, facts)
            at += count
        if group == 0:
            cute.arch.barrier_arrive(barrier_id=MULTIPLIED + index, number_of_threads=2 * GROUP)


@cute.jit
def _join(sums, shared: Shared, group, tiles_done, thread, facts: cutlass.Constexpr):
    """The first group's sums become those of both."""
    vectors = facts.lanes // 8
    if group == 1:
        if tiles_done > 0:
            cute.arch.barrier(barrier_id=TAKEN, number_of_threads=2 * GROUP)
        for v in cutlass.range_constexpr(vectors):
            for i in cutlass.range_constexpr(4):
                shared.other[(v * 4 + i) * GROUP + thread] = sums[4 * v + i]
        cute.arch.barrier_arrive(barrier_id=GIVEN, number_of_threads=2 * GROUP)
    else:
        cute.arch.barrier(barrier_id=GIVEN, number_of_threads=2 * GROUP)
        for v in cutlass.range_constexpr(vectors):
            for i in cutlass.range_constexpr(4):
                sums[4 * v + i] = sums[4 * v + i] + shared.other[(v * 4 + i) * GROUP + thread]
        cute.arch.barrier_arrive(barrier_id=TAKEN, number_of_threads=2 * GROUP)


@cute.kernel
def between_attentions_kernel(
    weight_maps: list,
    x_maps: list,
    mma: cute.TiledMma,
    weights: Weights,
    rows: Rows,
    work: Workspace,
    num_rows: cutlass.Int32,
    eps: list,
    facts: cutlass.Constexpr,
):
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    shared = allocate(facts)
    if thread == 0:
        set_up(shared, facts)
    cute.arch.sync_threads()
    finishers = facts.multipliers * (GROUP // WARP)
    fetchers = finishers + GROUP // WARP
    if warp < finishers:
        _multiply(mma, shared, work, facts)
    elif warp < fetchers:
        finish(shared, weights, rows, work, num_rows, eps, facts)
    elif warp == fetchers:
        fetch_weights(weight_maps, shared, facts)
    else:
        fetch_x(x_maps, shared, work, facts)
