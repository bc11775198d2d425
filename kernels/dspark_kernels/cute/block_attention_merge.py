"""The second kernel of the block attention: merges the parts of each (request, tile of query rows) pair, in the list's order.

`facts` is a `block_attention_facts.Facts`.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from dspark_kernels.cute.block_attention_schedule import (
    CHUNK,
    CONSUMERS,
    ELEMENTS,
    PART,
    TILE,
    WARP,
    Requests,
    Workspace,
    entry_of,
    parts_of,
    values_at,
    vector_place,
)

MERGE_ROWS = 16  # of a CTA: those of one warp's vectors, or 8 with the statistics of either half of the latents
MERGE_BATCH = 9  # vectors in flight of a thread: all of them, where 16 warps share 132 parts
MERGING = 1  # a named barrier


class Shared(NamedTuple):
    """float32: weights [part, MERGE_ROWS]; largest statistics and sums of weights, [warp, MERGE_ROWS]; sums of vectors
    [warp, lane, CHUNK]."""

    weights: cute.Tensor
    peaks: cute.Tensor
    sums: cute.Tensor
    out: cute.Tensor


class Place(NamedTuple):
    """Of a CTA: a thread's vector, the warpgroup and the first of the rows that it merges; the first part, and how many."""

    v: cutlass.Int32
    group: cutlass.Int32
    first_row: cutlass.Int32
    part: cutlass.Int64
    count: cutlass.Int32


class Own(NamedTuple):
    """Of a thread that weighs parts: its row, and the first of its parts; the others are `step` behind one another."""

    row: cutlass.Int32
    part: cutlass.Int32


@cute.jit
def meet_merging(facts: cutlass.Constexpr):
    """All warps that weigh parts."""
    cute.arch.barrier(barrier_id=MERGING, number_of_threads=facts.weighing_warps * WARP)


def step_of(facts) -> int:
    """Parts from one of a thread to the next."""
    return facts.weighing_warps * WARP // MERGE_ROWS


def own_of(thread):
    """What a thread weighs."""
    return Own(thread % MERGE_ROWS, thread // MERGE_ROWS)


@cute.jit
def load_statistics(work, at: Place, own: Own, facts: cutlass.Constexpr):
    """Statistics of a thread's parts; those of no weight where there is no part."""
    step = step_of(facts)
    loaded = [cute.make_rmem_tensor(2, cutlass.Float32) for _ in range(-(-facts.ctas // step))]
    statistics = (((at.part + own.part) * 2 + at.group) * TILE + at.first_row + own.row) * 2
    for i in cutlass.range_constexpr(len(loaded)):
        loaded[i][0], loaded[i][1] = -cutlass.Float32.inf, cutlass.Float32(0.0)
        if own.part + i * step < at.count:
            here = statistics + i * step * 2 * TILE * 2
            cute.autovec_copy(values_at(work.statistics, here, cutlass.Float32, 2, cute.AddressSpace.gmem), loaded[i])
    return loaded


@cute.jit
def _load_batch(work, mine, start, count, vectors, facts: cutlass.Constexpr):
    """This lane's vectors of the parts start, start + warps, ... as far as there are some."""
    part_values = facts.vectors * CONSUMERS * CHUNK
    first = mine * CHUNK + cutlass.Int64(start) * part_values
    for j in cutlass.range_constexpr(MERGE_BATCH):
        if start + j * facts.merge_warps < count:
            at = first + j * facts.merge_warps * part_values
            cute.autovec_copy(values_at(work.parts, at, PART, CHUNK, cute.AddressSpace.gmem), vectors[j])


@cute.jit
def weigh_parts(loaded, shared: Shared, count, own: Own, facts: cutlass.Constexpr):
    """Weights of all parts, relative to the row's largest statistic, and the sums of them that each of `merge_warps` has, into
    shared memory.  loaded: of `load_statistics`."""
    thread, _, _ = cute.arch.thread_idx()
    warp, lane = cute.arch.make_warp_uniform(thread // WARP), thread % WARP
    peak = -cutlass.Float32.inf
    for i in cutlass.range_constexpr(len(loaded)):
        peak = cute.arch.fmax(peak, loaded[i][0])
    peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, MERGE_ROWS))
    if lane < MERGE_ROWS:
        shared.peaks[warp * MERGE_ROWS + own.row] = peak
    meet_merging(facts)
    highest = shared.peaks[own.row]
    for i in cutlass.range_constexpr(1, facts.weighing_warps):
        highest = cute.arch.fmax(highest, shared.peaks[i * MERGE_ROWS + own.row])
    base = cutlass.Float32(0.0) if highest == -cutlass.Float32.inf else highest
    for turn in cutlass.range_constexpr(facts.merge_turns):
        summed = cutlass.Float32(0.0)
        for i in cutlass.range_constexpr(turn, len(loaded), facts.merge_turns):
            weight = cute.math.exp2(loaded[i][0] - base, fastmath=True)
            summed += weight
            part = own.part + i * step_of(facts)
            if part < count:
                shared.weights[part * MERGE_ROWS + own.row] = weight * loaded[i][1]
        summed += cute.arch.shuffle_sync_bfly(summed, MERGE_ROWS)
        if lane < MERGE_ROWS:
            shared.sums[(turn * facts.weighing_warps + warp) * MERGE_ROWS + own.row] = summed
    meet_merging(facts)


@cute.jit
def _sum_vectors(vectors, merged, work, mine, warp, lane, count, shared: Shared, facts: cutlass.Constexpr):
    """A warp's weighted sum of its vectors; the first batch is loaded.  Ends with all warps' sums in shared memory."""
    for i in cutlass.range(warp, count, facts.merge_warps * MERGE_BATCH, unroll=1):
        if i > warp:
            _load_batch(work, mine, i, count, vectors, facts)
        for j in cutlass.range_constexpr(MERGE_BATCH):
            at = i + j * facts.merge_warps
            if at < count:
                for k in cutlass.range_constexpr(CHUNK):
                    weight = shared.weights[at * MERGE_ROWS + lane // 4 + k // 2 % 2 * 8]
                    merged[k] = cute.math.fma(weight, vectors[j][k].to(cutlass.Float32), merged[k])
    at = (warp * WARP + lane) * CHUNK
    for k in cutlass.range_constexpr(CHUNK):
        shared.out[at + k] = merged[k]
    cute.arch.sync_threads()


@cute.jit
def inverse_of(divisor):
    """What a row's sums are multiplied by; of a row that sees no key these are 0."""
    return 1.0 / (cutlass.Float32(1.0) if divisor == 0.0 else divisor)


@cute.jit
def _store(out, shared: Shared, request, row_tile, at: Place, thread, facts: cutlass.Constexpr):
    """Two neighbouring values of a row, from the sums of all warps; zeros without a part and for a row that sees no key."""
    dtype = ELEMENTS[facts.dtype]
    lane_of, pair_of = thread // (CHUNK // 2), thread % (CHUNK // 2)
    own_row = lane_of // 4 + pair_of % 2 * 8
    values = cute.make_rmem_tensor(2, dtype)
    values.fill(0.0)
    if at.count > 0:
        divisor, left, right = cutlass.Float32(0.0), cutlass.Float32(0.0), cutlass.Float32(0.0)
        for i in cutlass.range_constexpr(facts.merge_warps):
            divisor += shared.sums[i * MERGE_ROWS + own_row]
            left += shared.out[i * WARP * CHUNK + 2 * thread]
            right += shared.out[i * WARP * CHUNK + 2 * thread + 1]
        inverse = inverse_of(divisor)
        values[0], values[1] = (left * inverse).to(dtype), (right * inverse).to(dtype)
    query = row_tile * TILE + at.first_row + own_row
    if query < facts.queries:
        to = (cutlass.Int64(request) * facts.queries + query) * facts.latent + at.group * (facts.latent // 2)
        to += (at.v * (CHUNK // 4) + pair_of // 2) * 8 + lane_of % 4 * 2
        cute.autovec_copy(values, values_at(out, to, dtype, 2, cute.AddressSpace.gmem))


@cute.kernel
def merge_kernel(
    requests: Requests,
    work: Workspace,
    out: cute.Pointer,  # [B, N, heads, C]
    facts: cutlass.Constexpr,
):
    """A CTA merges one vector of each lane of one warp: 16 rows of a pair.  Its warps take turns with the parts."""
    warps = facts.merge_warps
    cute.arch.griddepcontrol_launch_dependents()  # all of its CTAs have their places, which the next kernel cannot take
    thread, _, _ = cute.arch.thread_idx()
    pair, place, _ = cute.arch.block_idx()
    warp, lane = cute.arch.make_warp_uniform(thread // WARP), thread % WARP
    request, row_tile = pair // facts.row_tiles, pair % facts.row_tiles
    first_row = place % 4 * MERGE_ROWS
    allocator = SmemAllocator()
    sizes = (facts.ctas * MERGE_ROWS, warps * MERGE_ROWS, warps * MERGE_ROWS, warps * WARP * CHUNK)
    shared = Shared(*(allocator.allocate_tensor(cutlass.Float32, cute.make_layout(size), 16) for size in sizes))

    part, count = parts_of(request, row_tile, entry_of(requests, request, facts), facts)
    cute.arch.griddepcontrol_wait()  # nothing above reads what the attention writes

    if row_tile * TILE + first_row < facts.queries:
        at = Place(place // 8, place // 4 % 2, first_row, part, count)
        if count > 0:
            # A thread a part and a row.  All loads are in flight before the first value is used.
            own = own_of(thread)
            loaded = load_statistics(work, at, own, facts)
            vectors = [cute.make_rmem_tensor(CHUNK, PART) for _ in range(MERGE_BATCH)]
            mine = part * facts.vectors * CONSUMERS + vector_place(at.v, place % 8 * WARP + lane, facts)
            _load_batch(work, mine, warp, count, vectors, facts)
            weigh_parts(loaded, shared, count, own, facts)
            merged = cute.make_rmem_tensor(CHUNK, cutlass.Float32)
            merged.fill(0.0)
            _sum_vectors(vectors, merged, work, mine, warp, lane, count, shared, facts)
        if thread < WARP * (CHUNK // 2):
            _store(out, shared, request, row_tile, at, thread, facts)
