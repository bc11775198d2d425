"""The warpgroup of `between_attentions` that finishes tiles: sums of their parts, and what follows a product.

`facts` is a `Facts` of `between_attentions_schedule`.  A vector of a tile has four values of a multiplying thread: one feature
in two rows of x, and the feature 8 behind it.  Threads of neighbouring features swap, so that each has two neighbours in one
row.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from dspark_kernels.cute.between_attentions_meet import (
    FINISHERS,
    GROUP,
    WARP,
    Shared,
    load_words,
    put,
    raise_counter,
    this_launch,
    words_of,
)
from dspark_kernels.cute.between_attentions_schedule import (
    ELEMENTS,
    LINE,
    ROWS,
    Eps,
    Rows,
    Weights,
    Workspace,
    owner,
    share,
    tag,
)
from dspark_kernels.cute.block_attention_schedule import values_at

IN_FLIGHT = 12  # vectors of parts that a thread loads at a time: more do not fit in its registers


class Tile(NamedTuple):
    """What a CTA finishes: its number; its first part, how many, and their tag; where its sums of squares go; the barrier that
    tells that the CTA has multiplied what it has of the product."""

    number: cutlass.Int32
    first: cutlass.Int32
    count: cutlass.Int32
    tag: cutlass.Int32
    squares: cutlass.Int32
    multiplied: cute.Pointer


class Thread(NamedTuple):
    """Of the warpgroup.  feature: of its vectors, in a tile, the first of two neighbours; row: of its first vector, 8 before
    that of the next; num_rows: rows of x."""

    thread: cutlass.Int32
    feature: cutlass.Int32
    row: cutlass.Int32
    num_rows: cutlass.Int32


@cute.jit
def _meet():
    cute.arch.barrier(barrier_id=FINISHERS, number_of_threads=GROUP)


@cute.jit
def _round(value, dtype: cutlass.Constexpr):
    return value.to(dtype).to(cutlass.Float32)


@cute.jit
def _sum_parts(work: Workspace, tile: Tile, pairs, most: cutlass.Constexpr, facts: cutlass.Constexpr):
    """Pairs of neighbouring values, each the sum of a tile's parts in their order, as soon as they are there.

    pairs: of each the vector, its half and the thread that had it; most: parts of any tile of the product.
    """
    # The other CTAs are about as far: from here on it pays to look for their parts, which costs the weights bandwidth.
    cute.arch.mbarrier_wait(tile.multiplied, 0)
    loaded = [[cute.make_rmem_tensor(2, cutlass.Float32) for _ in pairs] for _ in range(most)]
    complete = cutlass.Boolean(False)
    while not complete:
        complete = cutlass.Boolean(True)
        for i in cutlass.range_constexpr(most):  # all in flight together; one that is not there is another
            piece = tile.first + cutlass.min(cutlass.Int32(i), tile.count - 1)
            for j in cutlass.range_constexpr(len(pairs)):
                v, half, thread = pairs[j]
                words = words_of(work, piece, v, thread, facts) + 2 * half
                complete = load_words(words, loaded[i][j], tile.tag) and complete
    for i in cutlass.range_constexpr(1, most):
        if i < tile.count:
            for j in cutlass.range_constexpr(len(pairs)):
                loaded[0][j][0] = loaded[0][j][0] + loaded[i][j][0]
                loaded[0][j][1] = loaded[0][j][1] + loaded[i][j][1]
    return loaded[0]


@cute.jit
def _load_rms(shared: Shared, work: Workspace, thread, size: cutlass.Constexpr, eps, squares, facts: cutlass.Constexpr):
    """1 / rms of each row into shared memory, from the sums of squares of `size` values in tiles of 64."""
    lanes, groups = facts.lanes, 4  # whatever the lanes: the order of a row's sum must not hang on them
    lane, group = thread % lanes, thread // lanes
    total = cutlass.Float32(0.0)
    if group < groups:
        for tile in cutlass.range(group, size // ROWS, groups, unroll=8):
            total += (work.squares + squares + tile * lanes + lane).load()
        shared.sums[thread] = total
    _meet()
    if thread < lanes:
        for i in cutlass.range_constexpr(1, groups):
            total += shared.sums[i * lanes + lane]
        shared.rms[lane] = cute.math.rsqrt(total * (1.0 / size) + eps)
    _meet()


@cute.jit
def _swap(pair):
    """Values of one feature in two rows become those of two neighbouring features in one row."""
    odd = cute.arch.lane_idx() // 4 % 2
    kept, given = pair[0], pair[1]
    if odd == 1:
        kept, given = pair[1], pair[0]
    taken = cute.arch.shuffle_sync_bfly(given, 4)
    pair[0], pair[1] = kept, taken
    if odd == 1:
        pair[0], pair[1] = taken, kept


@cute.jit
def _load_pair(pointer):
    """Two neighbouring values in float32."""
    pair, wide = cute.make_rmem_tensor(2, pointer.dtype), cute.make_rmem_tensor(2, cutlass.Float32)
    cute.autovec_copy(values_at(pointer, 0, pointer.dtype, 2, cute.AddressSpace.gmem), pair)
    wide.store(pair.load().to(cutlass.Float32))
    return wide


@cute.jit
def _store_pair(pointer, left, right):
    pair = cute.make_rmem_tensor(2, pointer.dtype)
    pair[0], pair[1] = left.to(pointer.dtype), right.to(pointer.dtype)
    cute.autovec_copy(pair, values_at(pointer, 0, pointer.dtype, 2, cute.AddressSpace.gmem))


@cute.jit
def _add_squares(shared: Shared, work: Workspace, squares, own: Thread, at, facts: cutlass.Constexpr):
    """The rows' sums of squares over a tile; squares: of the thread's rows; at: where they go."""
    lane, warp = own.thread % WARP, own.thread // WARP
    for v in cutlass.range_constexpr(facts.lanes // 8):
        squares[v] += cute.arch.shuffle_sync_bfly(squares[v], 8)
        squares[v] += cute.arch.shuffle_sync_bfly(squares[v], 16)
        if lane < 8:
            shared.sums[warp * facts.lanes + 8 * v + own.row] = squares[v]
    _meet()
    if own.thread < facts.lanes:
        total = shared.sums[own.thread]
        for i in cutlass.range_constexpr(1, 4):
            total += shared.sums[i * facts.lanes + own.thread]
        put(work.squares + at + own.thread, total)


def _batches(most: int, facts) -> list[list[int]]:
    """The vectors of a tile, in groups whose parts are loaded together."""
    size = max(1, IN_FLIGHT // most)
    vectors = range(facts.lanes // 8)
    return [list(vectors[first : first + size]) for first in range(0, len(vectors), size)]


@cute.jit
def _finish_residual(
    shared, work, residual, out, scaled, norm, tile: Tile, own: Thread, most: cutlass.Constexpr, facts: cutlass.Constexpr
):
    """out = residual + product, each rounded; scaled = out * norm, where there is a norm behind it."""
    dtype, first = ELEMENTS[facts.dtype], tile.number * ROWS + own.feature
    # On their way before the parts are there.  The last row stands for those that are not there.
    rows = [cutlass.min(8 * v + own.row, own.num_rows - 1) for v in range(facts.lanes // 8)]
    added = [[_load_pair(residual + row * facts.hidden + first + 8 * half) for half in range(2)] for row in rows]
    factors = [_load_pair(norm + first + 8 * half) for half in range(2)] if scaled is not None else None
    squares = cute.make_rmem_tensor(facts.lanes // 8, cutlass.Float32)
    squares.fill(0.0)
    for vectors in _batches(most, facts):
        sums = _sum_parts(work, tile, [(v, half, own.thread) for v in vectors for half in range(2)], most, facts)
        for i in cutlass.range_constexpr(2 * len(vectors)):
            v, half = vectors[i // 2], i % 2
            _swap(sums[i])
            left = _round(added[v][half][0] + _round(sums[i][0], dtype), dtype)
            right = _round(added[v][half][1] + _round(sums[i][1], dtype), dtype)
            squares[v] += left * left
            squares[v] += right * right
            if 8 * v + own.row < own.num_rows:
                place = rows[v] * facts.hidden + first + 8 * half
                _store_pair(out + place, left, right)
                if cutlass.const_expr(scaled is not None):
                    _store_pair(scaled + place, left * factors[half][0], right * factors[half][1])
    if cutlass.const_expr(scaled is not None):
        _add_squares(shared, work, squares, own, tile.squares, facts)


@cute.jit
def _finish_gated(shared, work, out, tile: Tile, own: Thread, most: cutlass.Constexpr, facts: cutlass.Constexpr):
    """silu(gate) * up, of rows scaled by 1 / rms.  Parts of gate are those of the first 64 threads, parts of up of the others;
    here these take the feature 8 behind."""
    gate_thread, half = own.thread % (GROUP // 2), own.thread // (GROUP // 2)
    feature = tile.number * (ROWS // 2) + own.feature - 32 * half + 8 * half
    for vectors in _batches(most, facts):
        pairs = [(v, half, gate_thread + side) for v in vectors for side in (0, GROUP // 2)]
        sums = _sum_parts(work, tile, pairs, most, facts)
        for i in cutlass.range_constexpr(len(vectors)):
            row = 8 * vectors[i] + own.row
            scale = shared.rms[row]
            gate, up = sums[2 * i], sums[2 * i + 1]
            _swap(gate)
            _swap(up)
            values = cute.make_rmem_tensor(2, cutlass.Float32)
            for j in cutlass.range_constexpr(2):
                opened = gate[j] * scale
                values[j] = opened / (1.0 + cute.math.exp(-opened)) * (up[j] * scale)
            if row < own.num_rows:
                _store_pair(out + row * facts.intermediate + feature, values[0], values[1])


@cute.jit
def _finish_normed(
    shared, work, out, width: cutlass.Constexpr, scaled, norm, tile: Tile, own: Thread, most: cutlass.Constexpr,
    facts: cutlass.Constexpr,
):  # fmt: skip
    """out = product of rows scaled by 1 / rms; of the columns of q_a also scaled = out * norm."""
    dtype, first = ELEMENTS[facts.dtype], tile.number * ROWS + own.feature
    q_tile = tile.number < facts.q_rank // ROWS
    inside = cutlass.min(tile.number * ROWS, facts.q_rank - ROWS) + own.feature  # of the norm's weight, for all tiles
    factors = [_load_pair(norm + inside + 8 * half) for half in range(2)] if scaled is not None else None
    squares = cute.make_rmem_tensor(facts.lanes // 8, cutlass.Float32)
    squares.fill(0.0)
    for vectors in _batches(most, facts):
        sums = _sum_parts(work, tile, [(v, half, own.thread) for v in vectors for half in range(2)], most, facts)
        for i in cutlass.range_constexpr(2 * len(vectors)):
            v, half = vectors[i // 2], i % 2
            row = 8 * v + own.row
            _swap(sums[i])
            left, right = (_round(value * shared.rms[row], dtype) for value in (sums[i][0], sums[i][1]))
            squares[v] += left * left
            squares[v] += right * right
            if row < own.num_rows:
                _store_pair(out + row * width + first + 8 * half, left, right)
                if cutlass.const_expr(scaled is not None):  # noqa: SIM102 (decided when it is built, the next on the device)
                    if q_tile:
                        place = row * facts.q_rank + first + 8 * half
                        _store_pair(scaled + place, left * factors[half][0], right * factors[half][1])
    if cutlass.const_expr(scaled is not None):  # noqa: SIM102 (as above)
        if q_tile:
            _add_squares(shared, work, squares, own, tile.squares, facts)


@cute.jit
def _finish_tile(
    shared: Shared, weights: Weights, rows: Rows, work: Workspace, launch, number, own: Thread, index: cutlass.Constexpr,
    facts: cutlass.Constexpr,
):  # fmt: skip
    """One tile of a product."""
    product, most = facts.products[index], facts.parts[index]
    count = cutlass.Int32(most)
    if cutlass.const_expr(index > 0):
        count = owner((number + 1) * product.boxes - 1, product) - owner(number * product.boxes, product) + 1
    squares_at = (index * facts.squares + number) * facts.lanes
    tile = Tile(number, number * most, count, tag(launch, index, facts), squares_at, shared.multiplied + index)
    if cutlass.const_expr(product.name == "o"):
        _finish_residual(
            shared, work, rows.residual, rows.h, rows.scaled_h, weights.post_norm, tile, own, most, facts
        )  # fmt: skip
    elif cutlass.const_expr(product.name == "gate_up"):
        _finish_gated(shared, work, rows.gated, tile, own, most, facts)
    elif cutlass.const_expr(product.name == "down"):
        scaled = rows.scaled_hidden if facts.following else None
        _finish_residual(shared, work, rows.h, rows.hidden, scaled, weights.input_norm, tile, own, most, facts)
    elif cutlass.const_expr(product.name == "qkv_a"):
        width = facts.q_rank + facts.latent
        _finish_normed(shared, work, rows.qkv_a, width, rows.scaled_q_a, weights.q_a_norm, tile, own, most, facts)
    else:
        _finish_normed(shared, work, rows.queries, facts.queries, None, None, tile, own, most, facts)
    cute.arch.fence_proxy("async.global")  # the next product's x is fetched by TMA
    _meet()
    if own.thread == 0:
        if cutlass.const_expr(index < len(facts.products) - 1):
            raise_counter(work.counters + LINE * index)
        else:
            # When all tiles are finished, every CTA that takes part has read which launch this is.
            finished = cute.arch.atomic_add(work.counters + LINE * index, cutlass.Int32(1), sem="acq_rel", scope="gpu") + 1
            if finished == launch * product.tiles:
                put(work.counters + facts.launches_at, launch)


@cute.jit
def finish(shared: Shared, weights: Weights, rows: Rows, work: Workspace, num_rows, eps: Eps, facts: cutlass.Constexpr):
    """One warpgroup: the tiles that this CTA finishes, of all products."""
    thread = cute.arch.thread_idx()[0] % GROUP
    cta, _, _ = cute.arch.block_idx()
    cute.arch.griddepcontrol_wait()
    launch = this_launch(work, facts)
    lane, quad = thread % WARP, thread % WARP // 4
    own = Thread(thread, thread // WARP * 16 + quad // 2 * 2, lane % 4 * 2 + quad % 2, num_rows)
    for index in cutlass.range_constexpr(len(facts.products)):
        product = facts.products[index]
        before = (index - 1) * facts.squares * facts.lanes  # sums of squares of the product before
        first_tile, last_tile = share(cta, product.tiles, product)
        if first_tile < last_tile:
            if cutlass.const_expr(index > 0):
                cute.arch.mbarrier_wait(shared.ready + index, 0)
            if cutlass.const_expr(product.normed):
                size = facts.q_rank if product.name == "q_b" else facts.hidden
                own_eps = {"gate_up": eps.mlp, "qkv_a": eps.attention, "q_b": eps.q_a}[product.name]
                _load_rms(shared, work, thread, size, own_eps, before, facts)
        for tile in cutlass.range(first_tile, last_tile, unroll=1):
            _finish_tile(shared, weights, rows, work, launch, tile, own, index, facts)
