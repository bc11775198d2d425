"""The block attention with one key tile in flight.

One warp fetches key tiles into the stages, and two warpgroups work on the same tile: each scores half of its keys,
they exchange row maxima and weights through shared memory, and each gathers half of the value columns.

`facts` is a `block_attention_facts.Facts`.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from dspark_kernels.cute.block_attention_fetch import STAGES, SWIZZLE, Shared, keys_layout, values_layout
from dspark_kernels.cute.block_attention_schedule import (
    CHUNK,
    CONSUMERS,
    ELEMENTS,
    KEYS,
    PART,
    TILE,
    WARP,
    Pair,
    next_pair,
    values_at,
    vector_place,
)

LEAST_PEAK = 1e-30  # its reciprocal is finite
MAXIMA, WEIGHTS, QUERIES = 1, 2, 3  # named barriers; 0 is the whole CTA's


class Rows(NamedTuple):
    """Of a thread's two rows, eight apart: what their weights are relative to, the largest score so far times the scale (with
    two tiles in flight a base not far below it); the thread's sum of weights; factor of the outputs before the last tile."""

    highest: cute.Tensor
    sums: cute.Tensor
    shrink: cute.Tensor


class Seen(NamedTuple):
    """Keys of a request: first, end; end of those that all rows see; ends for a thread's two rows."""

    first: cutlass.Int32
    end: cutlass.Int32
    unmasked_end: cutlass.Int32
    limits: list


@cute.jit
def meet(name: cutlass.Constexpr):
    """All consumers meet."""
    cute.arch.barrier(barrier_id=name, number_of_threads=CONSUMERS)


@cute.jit
def load_queries(queries, shared, request, row_tile, thread, facts: cutlass.Constexpr):
    """One tile of query rows into shared memory, swizzled.  The last row stands in the rows that the tile has too many."""
    dtype = ELEMENTS[facts.dtype]
    chunks = facts.width // CHUNK
    per_thread = TILE * chunks // CONSUMERS // 2  # in two turns, which need fewer registers than one
    loaded = [cute.make_rmem_tensor(CHUNK, dtype) for _ in range(per_thread)]
    for begin in cutlass.range(thread, thread + 2 * per_thread * CONSUMERS, per_thread * CONSUMERS, unroll=1):
        for i in cutlass.range_constexpr(per_thread):  # no branch and no store in between: all loads are in flight together
            at = begin + i * CONSUMERS
            query = cutlass.min(row_tile * TILE + at // chunks, facts.queries - 1)
            where = cutlass.Int64(request) * queries.batch_stride + cutlass.Int64(query // facts.heads) * queries.row_stride
            where += cutlass.Int64(query % facts.heads) * queries.head_stride + at % chunks * CHUNK
            cute.autovec_copy(values_at(queries.values, where, dtype, CHUNK, cute.AddressSpace.gmem), loaded[i])
        for i in cutlass.range_constexpr(per_thread):
            at = begin + i * CONSUMERS
            row, chunk = at // chunks, at % chunks
            to = (chunk // 8) * TILE * SWIZZLE + row * SWIZZLE + ((chunk % 8) ^ (row % 8)) * CHUNK
            cute.autovec_copy(loaded[i], values_at(shared, to, dtype, CHUNK, cute.AddressSpace.smem))


@cute.jit
def clear_rows(shared, first, end, thread, facts: cutlass.Constexpr):
    """Zeros in the value columns of a tile's rows outside first..end.  The swizzle stays inside a row's 128 bytes."""
    dtype = ELEMENTS[facts.dtype]
    chunks = facts.latent // CHUNK
    zeros = cute.make_rmem_tensor(CHUNK, dtype)
    zeros.fill(0.0)
    for i in cutlass.range_constexpr(KEYS * chunks // CONSUMERS):
        at = thread + i * CONSUMERS
        row, chunk = at // chunks, at % chunks
        if row < first or row >= end:
            to = row // facts.span * facts.span * facts.width + row % facts.span * SWIZZLE
            to += (chunk // 8) * facts.span * SWIZZLE + (chunk % 8) * CHUNK
            cute.autovec_copy(zeros, values_at(shared, to, dtype, CHUNK, cute.AddressSpace.smem))


@cute.jit
def _multiply_scores(first_mma, mma, scores, queries, keys, full, done, facts: cutlass.Constexpr):
    """Starts queries times the keys of a tile, block after block as they come; done: tiles before it."""
    stage, steps = done % STAGES, SWIZZLE // 16
    for k in cutlass.range_constexpr(facts.width // 16):
        if cutlass.const_expr(k % steps == 0):
            cute.arch.mbarrier_wait(full + (stage * facts.blocks + k // steps), done // STAGES % 2)
            warpgroup.fence()  # here: with one in front of all, ptxas lets the products of 384 latents wait for one another
        cute.gemm(mma if k else first_mma, scores, queries[None, None, k], keys[None, None, k, stage], scores)
    warpgroup.commit_group()


class Gathering(NamedTuple):
    """wgmma of a tile's weights and so many columns of its values, a half of them for each warpgroup; operands and sums."""

    mma: cute.TiledMma
    weights: cute.Tensor
    values: cute.Tensor
    out: cute.Tensor


@cute.jit
def _gathering(shared: Shared, out, columns: cutlass.Constexpr, number, group, facts: cutlass.Constexpr):
    """Of the columns from number * columns on, into the first registers of `out`."""
    mma = tiled_product(columns // 2, warpgroup.OperandSource.SMEM, OperandMajorMode.MN, 2, True, facts)
    own = mma.get_slice(group * 128)
    values = cute.make_tensor(shared.keys.iterator + number * (columns * facts.span), values_layout(columns, facts))
    return Gathering(
        mma,
        mma.make_fragment_A(own.partition_A(shared.weights)),
        mma.make_fragment_B(own.partition_B(values)),
        cute.make_tensor(out.iterator, cute.make_layout(mma.partition_shape_C((TILE, columns)))),
    )


@cute.jit
def _multiply_values(one: Gathering, stage):
    """The weights times the values of a stage, to the end."""
    warpgroup.fence()
    for k in cutlass.range_constexpr(KEYS // 16):
        cute.gemm(one.mma, one.out, one.weights[None, None, k], one.values[None, None, k, stage], one.out)
    warpgroup.commit_group()
    warpgroup.wait_group(0)


@cute.jit
def _weigh(scores, weights, rows, s_maxima, seen, token, thread, scale, facts: cutlass.Constexpr):
    """Weights of a tile's scores, relative to the rows' largest score, which the warpgroups agree on."""
    group, column = thread // 128, thread % 4
    row = thread // WARP % 4 * 16 + thread % WARP // 4  # and row + 8
    values = cute.size(scores)
    if token < seen.first or token + KEYS > seen.unmasked_end:
        for i in cutlass.range_constexpr(values):
            key = token + group * (KEYS // 2) + i // 4 * 8 + column * 2 + i % 2
            if key < seen.first or key >= seen.limits[i // 2 % 2]:
                scores[i] = -cutlass.Float32.inf
    peaks = cute.make_rmem_tensor(2, cutlass.Float32)
    for i in cutlass.range_constexpr(2):
        peak = scores[2 * i]
        for j in cutlass.range_constexpr(values // 4):
            peak = cute.arch.fmax(peak, cute.arch.fmax(scores[4 * j + 2 * i], scores[4 * j + 2 * i + 1]))
        peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, 1))
        peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, 2))
        peaks[i] = peak
        if column == 0:
            s_maxima[group * TILE + row + 8 * i] = peak
    meet(MAXIMA)
    for i in cutlass.range_constexpr(2):
        other = s_maxima[(1 - group) * TILE + row + 8 * i]
        new = cute.arch.fmax(rows.highest[i], cute.arch.fmax(peaks[i], other) * scale)
        base = cutlass.Float32(0.0) if new == -cutlass.Float32.inf else new
        # As long as there is no score there are no outputs to shrink.
        seen_before = rows.highest[i] != -cutlass.Float32.inf
        rows.shrink[i] = cute.math.exp2(rows.highest[i] - base, fastmath=True) if seen_before else cutlass.Float32(1.0)
        rows.highest[i] = new
        added = cutlass.Float32(0.0)
        for j in cutlass.range_constexpr(values // 2):
            at = j // 2 * 4 + 2 * i + j % 2
            weight = cute.math.exp2(cute.math.fma(scores[at], scale, -base), fastmath=True)
            added += weight
            weights[at] = weight.to(ELEMENTS[facts.dtype])
        rows.sums[i] = rows.sums[i] * rows.shrink[i] + added


@cute.jit
def _hand_over(weights, s_weights, s_keys, seen, token, stage, thread, facts: cutlass.Constexpr):
    """Weights into shared memory, and what no key has as a value out of it."""
    dtype = ELEMENTS[facts.dtype]
    group, quad, column = thread // 128, thread % WARP // 4, thread % 4
    row = thread // WARP % 4 * 16 + quad  # and row + 8
    own_blocks = KEYS // 2 // CHUNK
    for j in cutlass.range_constexpr(own_blocks):
        for i in cutlass.range_constexpr(2):
            # Eight rows and four lanes a row meet all 32 banks once.
            to = (row + 8 * i) * SWIZZLE + ((group * own_blocks + j) ^ quad) * CHUNK + column * 2
            pair = cute.make_rmem_tensor(2, dtype)
            pair[0], pair[1] = weights[4 * j + 2 * i], weights[4 * j + 2 * i + 1]
            cute.autovec_copy(pair, values_at(s_weights.iterator, to, dtype, 2, cute.AddressSpace.smem))
    if token < seen.first or token + KEYS > seen.end:
        # A weight of zero does not undo a NaN or an infinity of what a page holds outside the keys.
        shared = cute.recast_ptr(s_keys.iterator, dtype=dtype) + stage * KEYS * facts.width
        clear_rows(shared, seen.first - token, seen.end - token, thread, facts)
    cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def rescale(out, rows):
    """The outputs so far, relative to the rows' new largest scores."""
    if cute.arch.vote_any_sync(rows.shrink[0] != 1.0 or rows.shrink[1] != 1.0):
        for i in cutlass.range_constexpr(cute.size(out)):
            out[i] = out[i] * rows.shrink[i // 2 % 2]


@cute.jit
def _peak(out, begin: cutlass.Constexpr, end: cutlass.Constexpr, i: cutlass.Constexpr):
    """The largest of a thread's values begin..end of its row i, by size."""
    peak = cutlass.Float32(LEAST_PEAK)
    for j in cutlass.range_constexpr(begin // 4, end // 4):
        for at in (4 * j + 2 * i, 4 * j + 2 * i + 1):
            peak = cute.arch.fmax(peak, cute.arch.fmax(out[at], -out[at]))
    return peak


@cute.jit
def _store_vectors(
    out, inverses, work, first, begin: cutlass.Constexpr, end: cutlass.Constexpr, facts: cutlass.Constexpr
):  # fmt: skip
    """A thread's vectors begin..end of a part; first: where the first one belongs."""
    for v in cutlass.range_constexpr(begin, end):
        vector = cute.make_rmem_tensor(CHUNK, PART)
        for k in cutlass.range_constexpr(CHUNK):
            vector[k] = (out[v * CHUNK + k] * inverses[k // 2 % 2]).to(PART)
        at = first + vector_place(v, 0, facts) * CHUNK
        cute.autovec_copy(vector, values_at(work.parts, at, PART, CHUNK, cute.AddressSpace.gmem))


@cute.jit
def store_part(out, rows, s_sums, work, part, thread, takers, half, facts: cutlass.Constexpr):
    """A thread's values of a part, and the statistics of its two rows.  Each warpgroup has one half of the values; with two
    takers both share this one of it, in the first half of their registers, and agree on its peak."""
    group, own_warp, quad, column = thread // 128, thread // WARP % 4, thread % WARP // 4, thread % 4
    row = own_warp * 16 + quad  # and row + 8
    whose = group if takers == 1 else half
    sums, values = rows.sums, cute.size(out)
    peaks, inverses = (cute.make_rmem_tensor(2, cutlass.Float32) for _ in range(2))
    for i in cutlass.range_constexpr(2):
        sums[i] += cute.arch.shuffle_sync_bfly(sums[i], 1)
        sums[i] += cute.arch.shuffle_sync_bfly(sums[i], 2)
        peak = _peak(out, 0, values // 2, i)
        if takers == 1:
            peak = cute.arch.fmax(peak, _peak(out, values // 2, values, i))
        peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, 1))
        peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, 2))
        peaks[i] = peak
        if column == 0:
            s_sums[group * TILE + row + 8 * i] = sums[i]
            s_sums[(2 + group) * TILE + row + 8 * i] = peak
    meet(MAXIMA)
    for i in cutlass.range_constexpr(2):
        total, peak = s_sums[row + 8 * i] + s_sums[TILE + row + 8 * i], peaks[i]
        if takers == 2:
            peak = cute.arch.fmax(peak, s_sums[(3 - group) * TILE + row + 8 * i])
        inverses[i] = 1.0 / peak
        statistic = cute.make_rmem_tensor(2, cutlass.Float32)  # of a row without a visible key: no weight
        statistic[0], statistic[1] = -cutlass.Float32.inf, cutlass.Float32(0.0)
        if total != 0.0:
            statistic[0], statistic[1] = rows.highest[i] + cute.math.log2(total), peak / total
        if column == 0:
            at = ((part * 2 + whose) * TILE + row + 8 * i) * 2
            cute.autovec_copy(statistic, values_at(work.statistics, at, cutlass.Float32, 2, cute.AddressSpace.gmem))
    owner = whose * (CONSUMERS // 2) + thread % (CONSUMERS // 2)
    begin = cutlass.Int32(0) if takers == 1 else group * (facts.vectors // 2)
    first = (part * facts.vectors * CONSUMERS + vector_place(begin, owner, facts)) * CHUNK
    _store_vectors(out, inverses, work, first, 0, facts.vectors // 2, facts)
    if takers == 1:
        _store_vectors(out, inverses, work, first, facts.vectors // 2, facts.vectors, facts)


@cute.jit
def seen_of(requests, pair: Pair, row, facts: cutlass.Constexpr):
    """What a thread's two rows see of a pair's keys; row: the first one in its tile."""
    limits = [pair.end, pair.end]
    unmasked_end = pair.end
    if cutlass.const_expr(facts.causal):
        context = cutlass.Int32((requests.context_lens + pair.request).load())
        for i in cutlass.range_constexpr(2):
            block_row = (pair.row_tile * TILE + row + 8 * i) // facts.heads
            limits[i] = cutlass.min(pair.end, context + block_row + 1)
        unmasked_end = cutlass.min(pair.end, context + pair.row_tile * TILE // facts.heads + 1)
    return Seen(pair.first, pair.end, unmasked_end, limits)


def tiled_product(columns: int, source, major, groups: int, accumulate: bool, facts):
    """wgmma of a tile of queries or of their weights with so many columns a warpgroup; groups: warpgroups that share it."""
    dtype = ELEMENTS[facts.dtype]
    op = warpgroup.MmaF16BF16Op(dtype, cutlass.Float32, (TILE, columns, 16), source, OperandMajorMode.K, major)
    mma = cute.make_tiled_mma(cute.make_mma_atom(op), (1, groups, 1))
    mma.set(warpgroup.Field.ACCUMULATE, accumulate)
    return mma


@cute.jit
def consume(
    queries, requests, work, shared: Shared, taker, place, last, listed, scale, takers, half, facts: cutlass.Constexpr
):  # fmt: skip
    """The two warpgroups: parts of the pairs among the places place..last of the list.  takers: CTAs that take these tiles; of
    two, this one has the values of one half."""
    dtype = ELEMENTS[facts.dtype]
    thread, _, _ = cute.arch.thread_idx()
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    done = cutlass.Int32(0)  # tiles since the start: gives stage and phase
    pairs_done = cutlass.Int32(0)
    group = cute.arch.make_warp_uniform(thread // 128)
    row = warp % 4 * 16 + lane // 4  # and row + 8
    smem = warpgroup.OperandSource.SMEM
    first_mma, score_mma = (
        tiled_product(KEYS // 2, smem, OperandMajorMode.K, 2, accumulate, facts) for accumulate in (False, True)
    )
    score_slice = score_mma.get_slice(group * 128)
    f_queries = score_mma.make_fragment_A(score_slice.partition_A(shared.queries))
    f_keys = score_mma.make_fragment_B(score_slice.partition_B(cute.make_tensor(shared.keys.iterator, keys_layout(facts))))
    scores = cute.make_rmem_tensor(score_mma.partition_shape_C((TILE, KEYS)), cutlass.Float32)
    out = cute.make_rmem_tensor(TILE * facts.latent // CONSUMERS, cutlass.Float32)
    whole = _gathering(shared, out, facts.latent, cutlass.Int32(0), group, facts)
    weights = cute.make_rmem_tensor(scores.layout, dtype)
    rows = Rows(*(cute.make_rmem_tensor(2, cutlass.Float32) for _ in range(3)))
    raw_queries = cute.recast_ptr(shared.queries.iterator, dtype=dtype)

    while place < last:
        pair = next_pair(requests, place, last, listed, facts)
        seen = seen_of(requests, pair, row, facts)
        if cutlass.const_expr(facts.fetch_queries):
            cute.arch.mbarrier_wait(shared.queries_full, pairs_done % 2)
        else:
            load_queries(queries, raw_queries, pair.request, pair.row_tile, thread, facts)
            cute.arch.fence_proxy("async.shared", space="cta")
        out.fill(0.0)
        rows.highest.fill(-cutlass.Float32.inf)
        rows.sums.fill(0.0)
        meet(QUERIES)

        first_token = pair.first // KEYS * KEYS
        for key_tile in cutlass.range(pair.begin, pair.begin + pair.count, unroll=1):
            token, stage = first_token + key_tile * KEYS, done % STAGES
            _multiply_scores(first_mma, score_mma, scores, f_queries, f_keys, shared.full, done, facts)
            warpgroup.wait_group(0)
            _weigh(scores, weights, rows, shared.maxima, seen, token, thread, scale, facts)
            _hand_over(weights, shared.weights, shared.keys, seen, token, stage, thread, facts)
            rescale(out, rows)
            meet(WEIGHTS)
            if cutlass.const_expr(not facts.halved):
                _multiply_values(whole, stage)
            else:
                if takers == 1:
                    _multiply_values(whole, stage)
                else:
                    _multiply_values(_gathering(shared, out, facts.latent // 2, half, group, facts), stage)
            if lane == 0:
                cute.arch.mbarrier_arrive(shared.empty + stage)
            done += 1

        if lane == 0:
            cute.arch.mbarrier_arrive(shared.queries_empty)
        pairs_done += 1
        part = cutlass.Int64(taker + pair.request * facts.row_tiles + pair.row_tile)
        store_part(out, rows, shared.maxima, work, part, thread, takers, half, facts)
        place += pair.places
