"""A second kernel of the block attention for many (request, tile of query rows) pairs: a warp takes all parts of four rows and
64 latents, and has no other warp's help.

It has the bits of `merge_kernel`, whose CTAs have a warp for every so manyeth part: those of many pairs, each with few parts,
would come one behind the other.

The 32 vectors of a warp lie side by side in a part.  Half of them belong to two rows, eight apart, and half to the rows 16
further; four times four neighbours are 64 latents of these.

`facts` is a `block_attention_facts.Facts`.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from dspark_kernels.cute.block_attention_merge import inverse_of
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

LEAST_PAIRS = 4  # of fewer each has so many parts that warps share them
LANES = WARP // 2  # that have the same two rows
STEP = 4  # vectors of a lane that are neighbours, and parts of one that are summed beside one another
WARP_ROWS = 4
SPREAD_BYTES = 120 << 10  # of shared memory, of which a processor has not two


class Rows(NamedTuple):
    """Of a warp: which half of the latents; its pair's first part, and how many; the first of a lane's two rows in the tile
    (the other is 8 behind); the lane among those of the same rows, and which half of the warp these are."""

    group: cutlass.Int32
    part: cutlass.Int64
    count: cutlass.Int32
    row: cutlass.Int32
    lane: cutlass.Int32
    half: cutlass.Int32


def suits_warps(batch: int, facts) -> bool:
    """Whether so many requests are merged so."""
    return batch * facts.row_tiles >= LEAST_PAIRS


def are_spread(batch: int, facts) -> bool:
    """Whether the CTAs of so many requests are few enough for a processor each; two on one would leave others idle."""
    return batch * facts.row_tiles * 4 * (facts.vectors // STEP) <= facts.ctas


def rounds_of(facts) -> int:
    """Parts of each of `STEP` sums that are under way."""
    return 4 if facts.spread else 2


def padded_parts(facts) -> int:
    """The parts' number is rounded up to a multiple of this: those that are none have no weight."""
    return max(rounds_of(facts) * facts.merge_warps, 2 * LANES)


def statistics_layout(facts):
    """Of all warps' statistics in shared memory, [part, row of the warp, 2]; weights take the first of two places later."""
    parts = -(-facts.most_parts // padded_parts(facts)) * padded_parts(facts)
    size = parts * WARP_ROWS * 2
    return cute.make_layout((max(size, SPREAD_BYTES // 4 // facts.warps) if facts.spread else size, facts.warps))


@cute.jit
def splits_of(batch, facts: cutlass.Constexpr):
    """CTAs that share the latents of a half, as long as all have places on the processors at once."""
    ctas = batch * (facts.row_tiles * 4)
    return cutlass.max(cutlass.Int32(1), cutlass.min(cutlass.Int32(facts.vectors // STEP), 2 * facts.ctas // ctas))


@cute.jit
def _own_statistic(shared, part, row, at: Rows):
    """A lane's place for a part, of the first or the second of its rows."""
    here = (part * WARP_ROWS + at.half * 2 + row) * 2
    return values_at(shared.iterator, here, cutlass.Float32, 2, cute.AddressSpace.smem)


@cute.jit
def _fetch_statistics(work, shared, at: Rows):
    """Of a lane's parts, every 16th, into its own places."""
    copy = cute.make_copy_atom(cpasync.CopyG2SOp(), cutlass.Float32, num_bits_per_copy=64)
    for part in cutlass.range(at.lane, at.count, LANES, unroll=1):
        for r in cutlass.range_constexpr(2):
            here = (((at.part + part) * 2 + at.group) * TILE + at.row + 8 * r) * 2
            from_global = values_at(work.statistics, here, cutlass.Float32, 2, cute.AddressSpace.gmem)
            cute.copy(copy, from_global, _own_statistic(shared, part, r, at))
    cute.arch.cp_async_commit_group()


@cute.jit
def _bases(shared, at: Rows):
    """The largest of each row's statistics; 0 for a row that sees no key."""
    bases = cute.make_rmem_tensor(2, cutlass.Float32)
    bases.fill(-cutlass.Float32.inf)
    for part in cutlass.range(at.lane, at.count, LANES, unroll=1):
        for r in cutlass.range_constexpr(2):
            bases[r] = cute.arch.fmax(bases[r], _own_statistic(shared, part, r, at)[0])
    for r in cutlass.range_constexpr(2):
        for step in (1, 2, 4, 8):
            bases[r] = cute.arch.fmax(bases[r], cute.arch.shuffle_sync_bfly(bases[r], step))
        bases[r] = cutlass.Float32(0.0) if bases[r] == -cutlass.Float32.inf else bases[r]
    return bases


@cute.jit
def _weigh(shared, at: Rows, facts: cutlass.Constexpr):
    """Weights of both rows' parts, in their places, and what the rows' sums are multiplied by.

    That is the inverse of the sum of weights in the order of `merge_kernel`: each of its warps sums those of two neighbouring
    parts, and of every so manyeth behind them, apart; then their two sums, and then the warps' in turn.
    """
    warps, bases = facts.merge_warps, _bases(shared, at)
    apart = max(1, 2 * warps // LANES)  # rounds of the half warp until the same warp of `merge_kernel` comes again
    sums, totals = cute.make_rmem_tensor(2 * apart, cutlass.Float32), cute.make_rmem_tensor(2, cutlass.Float32)
    sums.fill(0.0)
    totals.fill(0.0)
    padded = padded_parts(facts)
    for start in cutlass.range(0, (at.count + padded - 1) // padded * padded, LANES * apart, unroll=1):
        for i in cutlass.range_constexpr(apart):
            for r in cutlass.range_constexpr(2):
                part, weight, scaled = start + i * LANES + at.lane, cutlass.Float32(0.0), cutlass.Float32(0.0)
                own = _own_statistic(shared, part, r, at)
                if part < at.count:
                    weight = cute.math.exp2(own[0] - bases[r], fastmath=True)
                    scaled = weight * own[1]
                own[0] = scaled
                if cutlass.const_expr(2 * warps >= LANES):
                    sums[2 * i + r] += weight
                else:  # it comes twice in a round: the upper lanes have the parts behind those of the lower, which sum both
                    sums[r] += weight
                    sums[r] += cute.arch.shuffle_sync_bfly(weight, LANES // 2)
    for i in cutlass.range_constexpr(apart):
        for r in cutlass.range_constexpr(2):
            pair = sums[2 * i + r] + cute.arch.shuffle_sync_bfly(sums[2 * i + r], 1)
            for j in cutlass.range_constexpr(min(warps, LANES // 2)):
                totals[r] += cute.arch.shuffle_sync(pair, at.half * LANES + 2 * j)
    for r in cutlass.range_constexpr(2):
        totals[r] = inverse_of(totals[r])
    return totals


@cute.jit
def _load(work, first, begin, stride, count, vectors, facts: cutlass.Constexpr):
    """A lane's vectors of four parts, and in each further round of those that are `stride` behind; a part that is none is the
    last one again, without a weight."""
    for i in cutlass.range_constexpr(len(vectors)):
        if begin + i * stride < count:
            for j in cutlass.range_constexpr(STEP):
                part = cutlass.min(begin + i * stride + j, count - 1)
                at = first + cutlass.Int64(part) * (facts.vectors * CONSUMERS * CHUNK)
                cute.autovec_copy(values_at(work.parts, at, PART, CHUNK, cute.AddressSpace.gmem), vectors[i][j])


@cute.jit
def _add(sums, vector, shared, part, half):
    """A part of a lane's vector, weighed."""
    weights = cute.make_rmem_tensor(4, cutlass.Float32)  # of its two rows: the first, and the third
    here = (part * WARP_ROWS + half * 2) * 2
    cute.autovec_copy(values_at(shared.iterator, here, cutlass.Float32, 4, cute.AddressSpace.smem), weights)
    for k in cutlass.range_constexpr(CHUNK):
        sums[k] = cute.math.fma(weights[k // 2 % 2 * 2], vector[k].to(cutlass.Float32), sums[k])


@cute.jit
def _move(sums, merged):
    """Sums of `merge_kernel`'s warps, in turn."""
    for one in sums:
        for k in cutlass.range_constexpr(CHUNK):
            merged[k] += one[k]
        one.fill(0.0)


@cute.jit
def _sum_parts(work, first, shared, at: Rows, facts: cutlass.Constexpr):
    """A lane's vector, merged: the sums of four warps of `merge_kernel` at once, some parts of each under way.

    Of few parts each is the only one of such a warp; then those that are under way are all of different ones.
    """
    warps, rounds = facts.merge_warps, rounds_of(facts)
    merged = cute.make_rmem_tensor(CHUNK, cutlass.Float32)
    merged.fill(0.0)
    sums = [cute.make_rmem_tensor(CHUNK, cutlass.Float32) for _ in range(STEP)]
    for one in sums:
        one.fill(0.0)
    vectors = [[cute.make_rmem_tensor(CHUNK, PART) for _ in range(STEP)] for _ in range(rounds)]
    few = cutlass.const_expr(warps > STEP) and at.count <= warps
    end, turn, stride = cutlass.Int32(warps), cutlass.Int32(STEP), cutlass.Int32(warps)
    if few:
        end, turn, stride = at.count, cutlass.Int32(STEP * rounds), cutlass.Int32(STEP)
    for begin in cutlass.range(0, end, turn, unroll=1):
        for start in cutlass.range(begin, begin + 1 if few else at.count, rounds * warps, unroll=1):
            _load(work, first, start, stride, at.count, vectors, facts)
            for i in cutlass.range_constexpr(rounds):
                if start + i * stride < at.count:
                    if cutlass.const_expr(warps > STEP and i > 0):  # noqa: SIM102 (decided when it is built)
                        if few:
                            _move(sums, merged)
                    for j in cutlass.range_constexpr(STEP):
                        _add(sums[j], vectors[i][j], shared, start + i * stride + j, at.half)
        _move(sums, merged)
    return merged


@cute.jit
def _store(out, merged, inverses, pair, at: Rows, vector, facts: cutlass.Constexpr):
    """A lane's values of its two rows."""
    dtype, request, row_tile = ELEMENTS[facts.dtype], pair // facts.row_tiles, pair % facts.row_tiles
    for r in cutlass.range_constexpr(2):
        query = row_tile * TILE + at.row + 8 * r
        if query < facts.queries:
            to = (cutlass.Int64(request) * facts.queries + query) * facts.latent + at.group * (facts.latent // 2)
            for block in cutlass.range_constexpr(2):
                first, values = block * 4 + 2 * r, cute.make_rmem_tensor(2, dtype)
                values[0], values[1] = (merged[first] * inverses[r]).to(dtype), (merged[first + 1] * inverses[r]).to(dtype)
                column = (vector * 2 + block) * CHUNK + at.lane % 4 * 2
                cute.autovec_copy(values, values_at(out, to + column, dtype, 2, cute.AddressSpace.gmem))


@cute.kernel
def merge_by_warps_kernel(
    requests: Requests,
    work: Workspace,
    out: cute.Pointer,  # [B, N, heads, C]
    facts: cutlass.Constexpr,
):
    """Grid: pairs; halves of the tile's rows, halves of the latents, and CTAs that share such a half."""
    cute.arch.griddepcontrol_launch_dependents()  # as `merge_kernel`
    thread, _, _ = cute.arch.thread_idx()
    pair, place, _ = cute.arch.block_idx()
    _, places, _ = cute.arch.grid_dim()
    quad, lane = cute.arch.make_warp_uniform(thread // WARP), thread % WARP
    shared = SmemAllocator().allocate_tensor(cutlass.Float32, statistics_layout(facts), 16)[None, quad]
    entry = entry_of(requests, pair // facts.row_tiles, facts)
    part, count = parts_of(pair // facts.row_tiles, pair % facts.row_tiles, entry, facts)
    group, rows = place // 2 % 2, place % 2
    at = Rows(group, part, count, rows * 32 + lane // LANES * 16 + quad, lane % LANES, lane // LANES)
    steps, splits = facts.vectors // STEP, places // 4
    each = (steps + splits - 1) // splits
    begin, end = place // 4 * each, cutlass.min(place // 4 * each + each, steps)
    thread_of = group * (CONSUMERS // 2) + rows * 2 * WARP + quad * 4
    cute.arch.griddepcontrol_wait()  # nothing above reads what the attention writes

    _fetch_statistics(work, shared, at)
    cute.arch.cp_async_wait_group(0)  # a lane reads what it has fetched itself
    inverses = _weigh(shared, at, facts)
    cute.arch.sync_warp()
    for step in cutlass.range(begin, end, unroll=1):
        first = (part * facts.vectors * CONSUMERS + vector_place(step * STEP, thread_of, facts) + lane) * CHUNK
        merged = _sum_parts(work, first, shared, at, facts)
        _store(out, merged, inverses, pair, at, step * STEP + at.lane // 4, facts)
