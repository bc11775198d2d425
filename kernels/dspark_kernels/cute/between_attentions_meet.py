"""How the warps and the CTAs of `between_attentions` meet: shared memory, barriers, counters, and words that say what they are.

`facts` is a `Facts` of `between_attentions_schedule`.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from dspark_kernels.cute.between_attentions_schedule import DEPTH, ELEMENTS, ROWS, Workspace

WARP, GROUP = 32, 128
SWIZZLE = 64  # 16-bit values in one row of a 128-byte swizzle
BLOCKS = DEPTH // SWIZZLE  # of a box
FINISHERS = 1  # a named barrier
QUEUE = 16  # pieces that a CTA has taken and not multiplied, at most: of a box each, all stages, one in front and one behind


class Shared(NamedTuple):
    """weights [64, 128, stage], x [lanes, 128, stage]; float32: sums [4, lanes], rms [lanes]; mbarriers of each stage: for
    its weights, its x, and for both to be used; pieces: int32, numbers of the pieces that the CTA has taken, with an mbarrier
    for each to be there; mbarriers of each product: for what the CTA has of it to be multiplied, and for the product before
    to be finished."""

    weights: cute.Tensor
    x: cute.Tensor
    sums: cute.Tensor
    rms: cute.Tensor
    landed: cute.Pointer
    met: cute.Pointer
    empty: cute.Pointer
    pieces: cute.Tensor
    taken: cute.Pointer
    multiplied: cute.Pointer
    ready: cute.Pointer


@cute.jit
def boxes_layout(rows: cutlass.Constexpr, facts: cutlass.Constexpr):
    """[rows, depth, stage]: swizzled blocks of 64 columns, one behind the other."""
    return cute.make_layout((rows, (SWIZZLE, BLOCKS), facts.stages), stride=(SWIZZLE, (1, rows * SWIZZLE), rows * DEPTH))


@cute.jit
def allocate(facts: cutlass.Constexpr):
    dtype, allocator, swizzle = ELEMENTS[facts.dtype], SmemAllocator(), cute.make_swizzle(3, 4, 3)
    weights = allocator.allocate_tensor(dtype, boxes_layout(ROWS, facts), 1024, swizzle)
    x = allocator.allocate_tensor(dtype, boxes_layout(facts.lanes, facts), 1024, swizzle)
    sums = allocator.allocate_tensor(cutlass.Float32, cute.make_layout(4 * GROUP), 16)
    rms = allocator.allocate_tensor(cutlass.Float32, cute.make_layout(facts.lanes), 16)
    barriers = [allocator.allocate_array(cutlass.Int64, facts.stages) for _ in range(3)]
    pieces = allocator.allocate_tensor(cutlass.Int32, cute.make_layout(QUEUE), 16)
    counts = (QUEUE, len(facts.products), len(facts.products))
    return Shared(
        weights, x, sums, rms, *barriers, pieces, *(allocator.allocate_array(cutlass.Int64, count) for count in counts)
    )


@cute.jit
def set_up(shared: Shared, facts: cutlass.Constexpr):
    """One thread; the others meet it before they use what is set up."""
    for stage in cutlass.range_constexpr(facts.stages):
        cute.arch.mbarrier_init(shared.landed + stage, 1)
        cute.arch.mbarrier_init(shared.met + stage, 1)
        cute.arch.mbarrier_init(shared.empty + stage, GROUP // WARP)
    for slot in cutlass.range_constexpr(QUEUE):
        cute.arch.mbarrier_init(shared.taken + slot, 1)
    for index in cutlass.range_constexpr(len(facts.products)):
        cute.arch.mbarrier_init(shared.multiplied + index, GROUP // WARP)
        cute.arch.mbarrier_init(shared.ready + index, 1)
    cute.arch.mbarrier_init_fence()


@cute.jit
def this_launch(work: Workspace, facts: cutlass.Constexpr):
    """The launches so far and this one."""
    return cute.arch.load(work.counters + facts.launches_at, cutlass.Int32, sem="relaxed", scope="gpu") + 1


@cute.jit
def give_piece(shared: Shared, count, piece):
    """The CTA's next piece to the other warps, or a number that is none; count: of those before.  A whole warp."""
    if cute.arch.lane_idx() == 0:
        shared.pieces[count % QUEUE] = piece
        cute.arch.mbarrier_arrive(shared.taken + count % QUEUE)


@cute.jit
def next_piece(shared: Shared, count):
    """What `give_piece` has given behind so many others."""
    cute.arch.mbarrier_wait(shared.taken + count % QUEUE, count // QUEUE % 2)
    return shared.pieces[count % QUEUE]


@cute.jit
def wait_for(counter, wanted, seen_barrier):
    """Until a counter has reached a value; then what was written before it was raised is seen, by the other warps when they
    have waited for the barrier.  One warp of a CTA: each that looks delays those that raise it."""
    if cute.arch.lane_idx() == 0:
        seen = cute.arch.load(counter, cutlass.Int32, sem="acquire", scope="gpu")
        while seen - wanted < 0:  # so that they may wrap around
            seen = cute.arch.load(counter, cutlass.Int32, sem="acquire", scope="gpu")
        cute.arch.mbarrier_arrive(seen_barrier)
    cute.arch.sync_warp()


@cute.jit
def pass_on(barrier):
    """One arrival of a warp, behind all of its lanes."""
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(barrier)


@cute.jit
def raise_counter(counter):
    """One more; who sees it sees what the thread, and those that it met before, have written."""
    cute.arch.red(counter, cutlass.Int32(1), op="add", dtype=cutlass.Int32, sem="release", scope="gpu")


@cute.jit
def acquire(shared: Shared, done, stages: cutlass.Constexpr):
    """The next stage, once it is empty."""
    stage = done % stages
    if done >= stages:
        cute.arch.mbarrier_wait(shared.empty + stage, (done // stages - 1) % 2)
    return stage


@cute.jit
def words_of(work: Workspace, piece, v, thread, facts: cutlass.Constexpr):
    """The first of the four words of a vector."""
    return work.parts + ((piece * (facts.lanes // 8) + v) * GROUP + thread) * 4


@cute.jit
def store_part(sums, work: Workspace, piece, tag, thread, facts: cutlass.Constexpr):
    """Each value with the tag in a word of its own, which is written and read whole: nobody has to wait for an order."""
    for v in cutlass.range_constexpr(facts.lanes // 8):
        words = words_of(work, piece, v, thread, facts)
        for i in cutlass.range_constexpr(2):
            cute.arch.inline_ptx(
                "{ .reg .b64 one, two; mov.b64 one, {{$r1}, {$r3}}; mov.b64 two, {{$r2}, {$r3}}; "
                "st.relaxed.gpu.global.v2.b64 [{$r0}], {one, two}; }",
                read_only_args=[words + 2 * i, sums[4 * v + 2 * i], sums[4 * v + 2 * i + 1], tag],
            )


@cute.jit
def load_words(words, values, wanted):
    """Two neighbouring words; whether both have the tag."""
    left, left_tag, right, right_tag = cute.arch.inline_ptx(
        "{ .reg .b64 one, two; ld.relaxed.gpu.global.v2.b64 {one, two}, [{$r0}]; "
        "mov.b64 {{$w0}, {$w1}}, one; mov.b64 {{$w2}, {$w3}}, two; }",
        write_only_types=[cutlass.Float32, cutlass.Int32, cutlass.Float32, cutlass.Int32],
        read_only_args=[words],
    )
    values[0], values[1] = left, right
    return left_tag == wanted and right_tag == wanted


@cute.jit
def put(pointer, value):
    cute.make_tensor(pointer, cute.make_layout(1))[0] = value
