"""The block attention with two key tiles in flight, where products are the bound.

The warpgroups take turns with the tiles.  Each scores its own tiles alone, and gathers its half of the value columns of all
tiles, in their order: so one's softmax runs while the other's products do.  What the scores are relative to (the base) goes
from tile to tile, and with it the weights, which lie where the tile's last columns were.

`facts` is a `block_attention_facts.Facts`.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from dspark_kernels.cute.block_attention_device import (
    QUERIES,
    Rows,
    clear_rows,
    load_queries,
    meet,
    rescale,
    seen_of,
    store_part,
    tiled_product,
)
from dspark_kernels.cute.block_attention_fetch import STAGES, SWIZZLE, keys_layout
from dspark_kernels.cute.block_attention_schedule import (
    CHUNK,
    CONSUMERS,
    ELEMENTS,
    KEYS,
    TILE,
    next_pair,
    values_at,
)
from dspark_kernels.cute.block_attention_seesaw_fetch import (
    REST,
    SECTIONS,
    Shared,
    weights_begin,
)

GROUP = CONSUMERS // 2  # threads of a warpgroup
WEIGHTS, OWN = 4, 6  # named barriers, and the next one: of each warpgroup's weights, for the other; of itself alone
SLACK = 8.0  # a weight may grow to 2**8 before the base follows: no product is rescaled for less


class Products(NamedTuple):
    """wgmma: scores that do not accumulate, and that do; values times weights from registers, and from shared memory."""

    first: cute.TiledMma
    score: cute.TiledMma
    own: cute.TiledMma
    other: cute.TiledMma


class Operands(NamedTuple):
    """Of a warpgroup, in shared memory: by 16 columns, by 16 keys."""

    queries: cute.Tensor
    keys: cute.Tensor
    weights: cute.Tensor
    values: cute.Tensor


class State(NamedTuple):
    """Of a thread, in registers: scores and weights of the own tile; outputs; what is known of its rows."""

    scores: cute.Tensor
    weights: cute.Tensor
    out: cute.Tensor
    rows: Rows


class Place(NamedTuple):
    """Thread in its warpgroup, and the first of its two rows, eight apart."""

    thread: cutlass.Int32
    row: cutlass.Int32


@cute.jit
def _products(facts: cutlass.Constexpr):
    columns = facts.latent // 2
    smem, registers = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
    kinds = (
        (KEYS, smem, OperandMajorMode.K, 1, False),
        (KEYS, smem, OperandMajorMode.K, 1, True),
        (columns, registers, OperandMajorMode.MN, 2, True),
        (columns, smem, OperandMajorMode.MN, 2, True),
    )
    return Products(*(tiled_product(*kind, facts) for kind in kinds))


@cute.jit
def _operands(products: Products, shared: Shared, group, facts: cutlass.Constexpr):
    """A warpgroup's views of the shared memory."""
    score, other = products.score.get_slice(0), products.other.get_slice(group * GROUP)
    keys = cute.make_tensor(shared.keys.iterator, keys_layout(facts))
    return Operands(
        products.score.make_fragment_A(score.partition_A(shared.queries)),
        products.score.make_fragment_B(score.partition_B(keys)),
        products.other.make_fragment_A(other.partition_A(shared.weights)),
        products.other.make_fragment_B(other.partition_B(shared.values)),
    )


@cute.jit
def _state(products: Products, facts: cutlass.Constexpr):
    """Registers, unset."""
    scores = cute.make_rmem_tensor(products.score.partition_shape_C((TILE, KEYS)), cutlass.Float32)
    out = cute.make_rmem_tensor(products.own.partition_shape_C((TILE, facts.latent)), cutlass.Float32)
    # Scores of 16 keys lie in the order in which a product takes weights.
    weights = cute.make_rmem_tensor(cute.make_layout(((2, 2, 2), 1, KEYS // 16)), ELEMENTS[facts.dtype])
    return State(scores, weights, out, Rows(*(cute.make_rmem_tensor(2, cutlass.Float32) for _ in range(3))))


@cute.jit
def _wait_full(shared: Shared, stage: cutlass.Constexpr, section: cutlass.Constexpr, tile):
    """Until a section of a tile is there; tile: counted from the CTA's first."""
    cute.arch.mbarrier_wait(shared.full + stage * SECTIONS + section, tile // STAGES % 2)


@cute.jit
def _give_back(shared: Shared, stage: cutlass.Constexpr, group: cutlass.Constexpr):
    """A warpgroup needs neither its value columns of a stage any more, nor its weights."""
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(shared.empty + stage * SECTIONS + group)
        cute.arch.mbarrier_arrive(shared.empty + stage * SECTIONS + REST)


@cute.jit
def _start_scores(
    products: Products, state: State, operands: Operands, shared: Shared, tile, group: cutlass.Constexpr,
    section: cutlass.Constexpr, facts: cutlass.Constexpr,
):  # fmt: skip
    """Queries times the keys of an own tile, over the columns of one section; the own value columns are the first."""
    _wait_full(shared, group, section, tile)
    half = facts.latent // 2 // 16
    end = facts.width // 16 if section == REST else (section + 1) * half
    warpgroup.fence()
    for k in cutlass.range_constexpr(section * half, end):
        mma = products.first if section == group and k == section * half else products.score
        cute.gemm(mma, state.scores, operands.queries[None, None, k], operands.keys[None, None, k, group], state.scores)


@cute.jit
def _start_values(mma, out, weights, values):
    """Weights times values, over all keys of a tile."""
    warpgroup.fence()
    for k in cutlass.range_constexpr(KEYS // 16):
        cute.gemm(mma, out, weights[None, None, k], values[None, None, k], out)
    warpgroup.commit_group()


@cute.jit
def _move_base(rows: Rows, i: cutlass.Constexpr, new):
    """The new base of one row, as a finite number; what there is of sums becomes relative to it, and outputs are to."""
    base = cutlass.Float32(0.0) if new == -cutlass.Float32.inf else new
    rows.shrink[i] = cute.math.exp2(rows.highest[i] - base, fastmath=True)
    rows.highest[i] = new
    rows.sums[i] = rows.sums[i] * rows.shrink[i]
    return base


@cute.jit
def _gather_other(
    products: Products, state: State, operands: Operands, shared: Shared, tile, place: Place, group: cutlass.Constexpr
):
    """Starts the product of the other warpgroup's tile, once that has weighed it."""
    other = 1 - group
    _wait_full(shared, other, group, tile)
    cute.arch.barrier(barrier_id=WEIGHTS + other, number_of_threads=CONSUMERS)
    for i in cutlass.range_constexpr(2):
        _move_base(state.rows, i, shared.bases[other * TILE + place.row + 8 * i])
    rescale(state.out, state.rows)
    weights, values = operands.weights[None, None, None, other], operands.values[None, None, None, other]
    _start_values(products.other, state.out, weights, values)


@cute.jit
def _weigh(state: State, seen, token, place: Place, scale, facts: cutlass.Constexpr):
    """Weights of a tile's scores.  The base stays unless a score would be far above it."""
    scores, rows, column = state.scores, state.rows, place.thread % 4
    values = cute.size(scores)
    if token < seen.first or token + KEYS > seen.unmasked_end:
        for i in cutlass.range_constexpr(values):
            key = token + i // 4 * 8 + column * 2 + i % 2
            if key < seen.first or key >= seen.limits[i // 2 % 2]:
                scores[i] = -cutlass.Float32.inf
    for i in cutlass.range_constexpr(2):
        peak = scores[2 * i]
        for j in cutlass.range_constexpr(values // 4):
            peak = cute.arch.fmax(peak, cute.arch.fmax(scores[4 * j + 2 * i], scores[4 * j + 2 * i + 1]))
        peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, 1))
        peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, 2)) * scale
        base = _move_base(rows, i, peak if peak > rows.highest[i] + SLACK else rows.highest[i])
        added = cutlass.Float32(0.0)
        for j in cutlass.range_constexpr(values // 2):
            at = j // 2 * 4 + 2 * i + j % 2
            weight = cute.math.exp2(cute.math.fma(scores[at], scale, -base), fastmath=True)
            added += weight
            state.weights[at] = weight.to(ELEMENTS[facts.dtype])
        rows.sums[i] += added


@cute.jit
def _clear(shared: Shared, seen, token, place: Place, group: cutlass.Constexpr, facts: cutlass.Constexpr):
    """A weight of zero does not undo a NaN or an infinity of what a page holds outside the keys."""
    raw = cute.recast_ptr(shared.keys.iterator, dtype=ELEMENTS[facts.dtype]) + group * KEYS * facts.width
    for i in cutlass.range_constexpr(2):  # each thread for two of `clear_rows`
        clear_rows(raw, seen.first - token, seen.end - token, place.thread + i * GROUP, facts)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=OWN + group, number_of_threads=GROUP)


@cute.jit
def _hand_over(state: State, shared: Shared, seen, token, place: Place, group: cutlass.Constexpr, facts: cutlass.Constexpr):
    """A tile's weights and base, for the other warpgroup."""
    dtype, column, row = ELEMENTS[facts.dtype], place.thread % 4, place.row
    raw = cute.recast_ptr(shared.keys.iterator, dtype=dtype) + (group * KEYS * facts.width + weights_begin(facts))
    # The weights' place is keys that another warp's scores may still be read from.
    cute.arch.barrier(barrier_id=OWN + group, number_of_threads=GROUP)
    for j in cutlass.range_constexpr(KEYS // CHUNK):
        for i in cutlass.range_constexpr(2):
            # Eight rows and four lanes a row meet all 32 banks once.
            to = (row + 8 * i) * SWIZZLE + (j ^ row % 8) * CHUNK + column * 2
            pair = cute.make_rmem_tensor(2, dtype)
            pair[0], pair[1] = state.weights[4 * j + 2 * i], state.weights[4 * j + 2 * i + 1]
            cute.autovec_copy(pair, values_at(raw, to, dtype, 2, cute.AddressSpace.smem))
    if column == 0:
        for i in cutlass.range_constexpr(2):
            shared.bases[group * TILE + row + 8 * i] = state.rows.highest[i]
    if token < seen.first or token + KEYS > seen.end:
        _clear(shared, seen, token, place, group, facts)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier_arrive(barrier_id=WEIGHTS + group, number_of_threads=CONSUMERS)


@cute.jit
def _take_tile(
    products: Products, state: State, operands: Operands, shared: Shared, seen, token, tile, place: Place, scale,
    follows: cutlass.Constexpr, group: cutlass.Constexpr, facts: cutlass.Constexpr,
):  # fmt: skip
    """An own tile, and, where it follows one, the value product of the tile in front of it, which is the other's."""
    here = (products, state, operands, shared)
    _start_scores(*here, tile, group, group, facts)
    warpgroup.commit_group()
    if cutlass.const_expr(follows):
        _gather_other(*here, tile - 1, place, group)
    _start_scores(*here, tile, group, 1 - group, facts)
    _start_scores(*here, tile, group, REST, facts)
    warpgroup.commit_group()
    if cutlass.const_expr(follows):
        warpgroup.wait_group(1)
        _give_back(shared, 1 - group, group)
    warpgroup.wait_group(0)
    _weigh(state, seen, token, place, scale, facts)
    _hand_over(state, shared, seen, token, place, group, facts)
    rescale(state.out, state.rows)
    _start_values(products.own, state.out, state.weights, operands.values[None, None, None, group])
    warpgroup.wait_group(0)
    _give_back(shared, group, group)


@cute.jit
def _take_pair(
    products: Products, state: State, operands: Operands, shared: Shared, pair, seen, done, place: Place, scale,
    group: cutlass.Constexpr, facts: cutlass.Constexpr,
):  # fmt: skip
    """All tiles of a pair; done: tiles in front of them, which say whose turn it is."""
    here = (products, state, operands, shared)
    first_token = (pair.first // KEYS + pair.begin) * KEYS
    mine = (done + group) % STAGES  # the first own tile
    if mine == 0:
        _take_tile(*here, seen, first_token, done, place, scale, False, group, facts)
        mine += STAGES
    for i in cutlass.range(mine, pair.count, STAGES, unroll=1):
        _take_tile(*here, seen, first_token + i * KEYS, done + i, place, scale, True, group, facts)
    last = done + pair.count - 1
    if last % STAGES != group:
        _gather_other(*here, last, place, group)
        warpgroup.wait_group(0)
        _give_back(shared, 1 - group, group)


@cute.jit
def consume_in_turn(
    queries, requests, work, shared: Shared, taker, place, last, listed, scale, group: cutlass.Constexpr, facts
):
    """One of the two warpgroups: parts of the pairs among the places place..last of the list."""
    thread, _, _ = cute.arch.thread_idx()
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    at = Place(thread % GROUP, warp % 4 * 16 + lane // 4)
    done = cutlass.Int32(0)  # tiles since the start
    pairs_done = cutlass.Int32(0)
    products = _products(facts)
    operands, state = _operands(products, shared, group, facts), _state(products, facts)
    raw_queries = cute.recast_ptr(shared.queries.iterator, dtype=ELEMENTS[facts.dtype])

    while place < last:
        pair = next_pair(requests, place, last, listed, facts)
        seen = seen_of(requests, pair, at.row, facts)
        if cutlass.const_expr(facts.fetch_queries):
            cute.arch.mbarrier_wait(shared.queries_full, pairs_done % 2)
        else:
            load_queries(queries, raw_queries, pair.request, pair.row_tile, thread, facts)
            cute.arch.fence_proxy("async.shared", space="cta")
        state.out.fill(0.0)
        state.rows.highest.fill(-cutlass.Float32.inf)
        state.rows.sums.fill(0.0)
        meet(QUERIES)
        _take_pair(products, state, operands, shared, pair, seen, done, at, scale, group, facts)
        done += pair.count
        if lane == 0:
            cute.arch.mbarrier_arrive(shared.queries_empty)
        pairs_done += 1
        part = cutlass.Int64(taker + pair.request * facts.row_tiles + pair.row_tile)
        store_part(state.out, state.rows, shared.sums, work, part, thread, cutlass.Int32(1), cutlass.Int32(0), facts)
        place += pair.places
