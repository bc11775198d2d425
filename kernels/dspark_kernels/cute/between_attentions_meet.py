"""How the warps and the CTAs of `between_attentions` meet: shared memory, barriers and counters.

`facts` is a `Facts` of `between_attentions_schedule`.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from dspark_kernels.cute.between_attentions_schedule import BOX, ELEMENTS, SUM_ROW, WARPS, Workspace
from dspark_kernels.cute.block_attention_schedule import WARP

MULTIPLIERS = 1  # a named barrier, that of `block_attention_merge` too


class Shared(NamedTuple):
    """weights [stage, BOX], x [stage, lanes * 512]; float32: sums [warp, lanes, SUM_ROW], rms [lanes]; mbarriers of each
    stage: for it to be there, and to be used; of each product: for the product before to be finished, and for 1 / rms of its
    rows to be there; for the number of the launch to be known; for the CTA's units to be multiplied, or its blocks of given
    rows to be prepared; and for its sums of units to be stored.  launch: int32 [1], that number."""

    weights: cute.Tensor
    x: cute.Tensor
    sums: cute.Tensor
    rms: cute.Tensor
    launch: cute.Tensor
    landed: cute.Pointer
    empty: cute.Pointer
    met: cute.Pointer
    x_empty: cute.Pointer
    ready: cute.Pointer
    normed: cute.Pointer
    known: cute.Pointer
    multiplied: cute.Pointer
    added: cute.Pointer


@cute.jit
def allocate(facts: cutlass.Constexpr):
    dtype, allocator = ELEMENTS[facts.dtype], SmemAllocator()
    weights = allocator.allocate_tensor(dtype, cute.make_layout(facts.stages * BOX), 1024)
    x = allocator.allocate_tensor(dtype, cute.make_layout(facts.x_stages * facts.x_values), 1024)
    sums = allocator.allocate_tensor(cutlass.Float32, cute.make_layout(WARPS * facts.lanes * SUM_ROW), 16)
    rms = allocator.allocate_tensor(cutlass.Float32, cute.make_layout(facts.lanes), 16)
    launch = allocator.allocate_tensor(cutlass.Int32, cute.make_layout(1), 16)
    products = len(facts.products)
    counts = (facts.stages, facts.stages, facts.x_stages, facts.x_stages, products, products, 1, 1, 1)
    return Shared(weights, x, sums, rms, launch, *(allocator.allocate_array(cutlass.Int64, count) for count in counts))


@cute.jit
def set_up(shared: Shared, facts: cutlass.Constexpr):
    """One thread; the others meet it before they use what is set up."""
    products = len(facts.products)
    kinds = (
        (shared.landed, facts.stages, 1), (shared.empty, facts.stages, WARPS), (shared.met, facts.x_stages, 1),
        (shared.x_empty, facts.x_stages, WARPS), (shared.ready, products, 1), (shared.normed, products, 1),
        (shared.known, 1, 1), (shared.multiplied, 1, WARPS), (shared.added, 1, 1),
    )  # fmt: skip
    for barriers, count, arrivals in kinds:
        for i in cutlass.range_constexpr(count):
            cute.arch.mbarrier_init(barriers + i, arrivals)
    cute.arch.mbarrier_init_fence()


@cute.jit
def this_launch(work: Workspace, facts: cutlass.Constexpr):
    """The launches so far and this one."""
    return cute.arch.load(work.counters + facts.launches_at, cutlass.Int32, sem="relaxed", scope="gpu") + 1


@cute.jit
def look_for(counter, wanted):
    """`wait_for`, for this warp alone."""
    if cute.arch.lane_idx() == 0:
        seen = cute.arch.load(counter, cutlass.Int32, sem="acquire", scope="gpu")
        while seen - wanted < 0:  # so that they may wrap around
            seen = cute.arch.load(counter, cutlass.Int32, sem="acquire", scope="gpu")
    cute.arch.sync_warp()


@cute.jit
def wait_for(counter, wanted, seen_barrier):
    """Until a counter has reached a value; then what was stored before it was raised is seen, by the other warps when they have
    waited for the barrier.  One warp of a CTA: each that looks delays those that finish."""
    look_for(counter, wanted)
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(seen_barrier)
    cute.arch.sync_warp()


@cute.jit
def pass_on(barrier):
    """One arrival of a warp, behind all of its lanes."""
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(barrier)


@cute.jit
def acquire(empty, done, stages: cutlass.Constexpr):
    """The next stage, once it is empty; done: stages filled before it."""
    stage = done % stages
    if done >= stages:
        cute.arch.mbarrier_wait(empty + stage, (done // stages - 1) % 2)
    return stage


@cute.jit
def raise_counter(counter, count):
    """So many more; who sees it sees what the thread, and those that it met before, have stored."""
    cute.arch.red(counter, count, op="add", dtype=cutlass.Int32, sem="release", scope="gpu")


@cute.jit
def store_words(words, left, right, tag):
    """Two neighbouring words, each a value and its tag, which is written and read whole: nobody has to wait for an order."""
    cute.arch.inline_ptx(
        "{ .reg .b64 one, two; mov.b64 one, {{$r1}, {$r3}}; mov.b64 two, {{$r2}, {$r3}}; "
        "st.relaxed.gpu.global.v2.b64 [{$r0}], {one, two}; }",
        read_only_args=[words, left, right, tag],
    )


@cute.jit
def load_words(words, values, wanted):
    """The values of two neighbouring words; whether both have the tag."""
    left, left_tag, right, right_tag = cute.arch.inline_ptx(
        "{ .reg .b64 one, two; ld.relaxed.gpu.global.v2.b64 {one, two}, [{$r0}]; "
        "mov.b64 {{$w0}, {$w1}}, one; mov.b64 {{$w2}, {$w3}}, two; }",
        write_only_types=[cutlass.Float32, cutlass.Int32, cutlass.Float32, cutlass.Int32],
        read_only_args=[words],
    )
    values[0], values[1] = left, right
    return left_tag == wanted and right_tag == wanted


@cute.jit
def meet():
    """All warps that multiply."""
    cute.arch.barrier(barrier_id=MULTIPLIERS, number_of_threads=WARPS * WARP)


@cute.jit
def put(pointer, value):
    cute.make_tensor(pointer, cute.make_layout(1))[0] = value
