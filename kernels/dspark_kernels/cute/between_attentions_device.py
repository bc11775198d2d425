"""The kernel of `between_attentions`: weights never stop streaming while the products wait for one another.

In a CTA one warp fetches boxes of weights, of all products one after the other, as far ahead as shared memory allows; a second
one fetches the rows of x that meet them, once the product before is finished; one warpgroup multiplies; one finishes tiles.  An
early launch fetches weights while the kernel before it still makes the first product's x.

`facts` is a `Facts` of `between_attentions_schedule`.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from dspark_kernels.cute.between_attentions_fetch import Maps, fetch_weights, fetch_x
from dspark_kernels.cute.between_attentions_finish import finish
from dspark_kernels.cute.between_attentions_meet import (
    Shared,
    allocate,
    next_piece,
    pass_on,
    set_up,
    store_part,
    this_launch,
)
from dspark_kernels.cute.between_attentions_schedule import (
    DEPTH,
    ROWS,
    Eps,
    Rows,
    Weights,
    Workspace,
    owner,
    piece_boxes,
    share,
    tag,
)

FINISH, FETCH = 4, 8  # first warps of those who do; the ones before multiply
THREADS = 320


@cute.jit
def _multiply_boxes(mma, weights, x, sums, shared: Shared, done, count, stages: cutlass.Constexpr):
    """The next boxes, of one tile; done: boxes before them."""
    sums.fill(0.0)
    for i in cutlass.range(0, count, unroll=1):
        stage, phase = (done + i) % stages, (done + i) // stages % 2
        cute.arch.mbarrier_wait(shared.landed + stage, phase)
        cute.arch.mbarrier_wait(shared.met + stage, phase)
        warpgroup.fence()
        for k in cutlass.range_constexpr(DEPTH // 16):
            cute.gemm(mma, sums, weights[None, None, k, stage], x[None, None, k, stage], sums)
        warpgroup.commit_group()
        warpgroup.wait_group(1)
        if i > 0 and cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(shared.empty + (done + i - 1) % stages)
    warpgroup.wait_group(0)
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(shared.empty + (done + count - 1) % stages)


@cute.jit
def _multiply(mma, shared: Shared, work: Workspace, facts: cutlass.Constexpr):
    """One warpgroup: this CTA's parts of all products."""
    thread, cta, stages = cute.arch.thread_idx()[0], cute.arch.block_idx()[0], facts.stages
    mma.set(warpgroup.Field.ACCUMULATE, True)
    own = mma.get_slice(thread)
    weights = mma.make_fragment_A(own.partition_A(shared.weights))
    x = mma.make_fragment_B(own.partition_B(shared.x))
    sums = cute.make_rmem_tensor(mma.partition_shape_C((ROWS, facts.lanes)), cutlass.Float32)
    launch = this_launch(work, facts)
    done, pieces = cutlass.Int32(0), cutlass.Int32(0)
    piece = next_piece(shared, pieces)
    while piece < facts.first_pieces:
        _, first, last = piece_boxes(piece, facts)
        count = last - first
        _multiply_boxes(mma, weights, x, sums, shared, done, count, stages)
        store_part(sums, work, piece, tag(launch, 0, facts), thread, facts)
        done += count
        pieces += 1
        piece = next_piece(shared, pieces)
    pass_on(shared.multiplied)
    for index in cutlass.range_constexpr(1, len(facts.products)):
        product = facts.products[index]
        at, last = share(cta, product.tiles * product.boxes, product)
        while at < last:
            tile = at // product.boxes
            count = cutlass.min(product.boxes - at % product.boxes, last - at)
            _multiply_boxes(mma, weights, x, sums, shared, done, count, stages)
            part = tile * facts.parts[index] + cta - owner(tile * product.boxes, product)
            store_part(sums, work, part, tag(launch, index, facts), thread, facts)
            done += count
            at += count
        pass_on(shared.multiplied + index)


@cute.kernel
def between_attentions_kernel(
    weight_maps: list[list[Maps]],
    x_maps: list[Maps],
    mma: cute.TiledMma,
    weights: Weights,
    rows: Rows,
    work: Workspace,
    num_rows: cutlass.Int32,
    eps: Eps,
    facts: cutlass.Constexpr,
):
    """weight_maps, x_maps: of each product, of its one weight or its two, and of its x."""
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    shared = allocate(facts)
    if thread == 0:
        set_up(shared, facts)
    cute.arch.sync_threads()
    if warp < FINISH:
        _multiply(mma, shared, work, facts)
    elif warp < FETCH:
        finish(shared, weights, rows, work, num_rows, eps, facts)
    elif warp == FETCH:
        fetch_weights(weight_maps, shared, work, facts)
    else:
        fetch_x(x_maps, shared, work, facts)
