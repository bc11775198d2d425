"""What follows a tile's products in `between_attentions`, by the warps that made them.

`facts` is a `Facts` of `between_attentions_schedule`.  A thread has pairs of neighbouring features in one row of x.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from dspark_kernels.cute.between_attentions_meet import Shared, meet, put, raise_counter
from dspark_kernels.cute.between_attentions_multiply import sum_of
from dspark_kernels.cute.between_attentions_schedule import (
    BLOCK,
    ELEMENTS,
    LINE,
    NOPE,
    WARPS,
    Into,
    Rows,
    Weights,
    Workspace,
)
from dspark_kernels.cute.block_attention_fetch import SWIZZLE
from dspark_kernels.cute.block_attention_schedule import WARP, values_at
from dspark_kernels.cute.latent_norm_rope import rotated

THREADS = WARPS * WARP


class Pair(NamedTuple):
    """Of a thread: a row of x, the first of two features in the tile, and whether there is such a pair."""

    row: cutlass.Int32
    feature: cutlass.Int32
    there: cutlass.Boolean


class Loaded(NamedTuple):
    """On its way while the products are made: two residual values, and two of the norm's weight, or cosine and sine."""

    residual: cute.Tensor
    norm: cute.Tensor


@cute.jit
def _round(value, dtype: cutlass.Constexpr):
    return value.to(dtype).to(cutlass.Float32)


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


def _pairs_of(product, facts) -> int:
    """How many pairs a thread has."""
    return -(-product.features * facts.lanes // 2 // THREADS)


@cute.jit
def _pair_of(turn: cutlass.Constexpr, num_rows, product: cutlass.Constexpr, facts: cutlass.Constexpr):
    """Neighbouring threads have neighbouring features of one row."""
    thread, _, _ = cute.arch.thread_idx()
    number, pairs = thread + turn * THREADS, product.features // 2
    row = number // pairs
    return Pair(row, number % pairs * 2, row < num_rows)


@cute.jit
def _load_turn(into: Into, row, feature, facts: cutlass.Constexpr):
    """Cosine and sine of a pair of a query's features; those of the first pair for one that is not turned."""
    at = cutlass.max(feature % (NOPE + facts.rotary) - NOPE, 0) // 2
    turn, cos_sin = cute.make_rmem_tensor(2, cutlass.Float32), into.cos_sin + (row * facts.rotary + at)
    turn[0], turn[1] = cos_sin.load(), (cos_sin + facts.rotary // 2).load()
    return turn


@cute.jit
def load_ahead(weights: Weights, rows: Rows, into: Into, tile, num_rows, index: cutlass.Constexpr, facts: cutlass.Constexpr):
    """Of each pair of the thread, what its end needs.  The last row stands for those that are not there."""
    product = facts.products[index]
    loaded = []
    for turn in cutlass.range_constexpr(_pairs_of(product, facts)):
        pair = _pair_of(turn, num_rows, product, facts)
        row, feature = cutlass.min(pair.row, num_rows - 1), tile * product.features + pair.feature
        residual, norm = None, None
        if cutlass.const_expr(product.name in ("o", "down")):
            residual = _load_pair((rows.residual if index == 0 else rows.h) + (row * facts.hidden + feature))
        if cutlass.const_expr(product.name == "o"):
            norm = _load_pair(weights.post_norm + feature)
        if cutlass.const_expr(product.name == "down" and facts.following):
            norm = _load_pair(weights.input_norm + feature)
        if cutlass.const_expr(product.name == "qkv_a"):
            norm = _load_pair(weights.q_a_norm + cutlass.min(feature, facts.q_rank - 2))
        if cutlass.const_expr(product.name == "q_b" and facts.heads > 0):
            norm = _load_turn(into, row, feature, facts)
        loaded.append(Loaded(residual, norm))
    return loaded


@cute.jit
def _add_squares(work: Workspace, left, right, pair: Pair, at, product: cutlass.Constexpr):
    """A row's sum of squares over the tile, by the threads that have its pairs."""
    total = left * left
    total += right * right
    for step in cutlass.range_constexpr((product.features // 2).bit_length() - 1):
        total += cute.arch.shuffle_sync_bfly(total, 1 << step)
    if pair.feature == 0:
        put(work.squares + (at + pair.row), total)


@cute.jit
def _store_turned(rows: Rows, row, feature, left, right, turn, facts: cutlass.Constexpr):
    """A pair of a query's features as one over latents has it, if it is of those that are turned."""
    head, own = feature // (NOPE + facts.rotary), feature % (NOPE + facts.rotary) - NOPE
    if own >= 0:
        pair = rotated([left, right], turn, turn.iterator + 1, 1)
        at = (row * facts.heads + head) * facts.latent + (facts.latent - facts.rotary)
        _store_pair(rows.absorbed + (at + own), pair[0], pair[1])


@cute.jit
def _finish_pair(
    shared: Shared, rows: Rows, work: Workspace, tile, pair: Pair, loaded: Loaded, index: cutlass.Constexpr,
    facts: cutlass.Constexpr,
):  # fmt: skip
    """Stores one pair, and what the next product makes of it."""
    product, dtype = facts.products[index], ELEMENTS[facts.dtype]
    feature = tile * product.features + pair.feature
    squares_at = (index * facts.squares + tile) * facts.lanes
    left, right = sum_of(shared, pair.row, pair.feature, product, facts)
    if cutlass.const_expr(product.name in ("o", "down")):
        left = _round(loaded.residual[0] + _round(left, dtype), dtype)
        right = _round(loaded.residual[1] + _round(right, dtype), dtype)
        out, scaled = (rows.h, rows.scaled_h) if product.name == "o" else (rows.hidden, rows.scaled_hidden)
        place = pair.row * facts.hidden + feature
        if pair.there:
            if cutlass.const_expr(loaded.norm is not None):
                _store_pair(scaled + place, left * loaded.norm[0], right * loaded.norm[1])
            _store_pair(out + place, left, right)
        if cutlass.const_expr(loaded.norm is not None):
            _add_squares(work, left, right, pair, squares_at, product)
    elif cutlass.const_expr(product.name == "gate_up"):
        up_left, up_right = sum_of(shared, pair.row, pair.feature + product.features, product, facts)
        scale = shared.rms[pair.row]
        opened_left, opened_right = left * scale, right * scale
        left = opened_left / (1.0 + cute.math.exp(-opened_left)) * (up_left * scale)
        right = opened_right / (1.0 + cute.math.exp(-opened_right)) * (up_right * scale)
        if pair.there:
            _store_pair(rows.gated + (pair.row * facts.intermediate + feature), left, right)
    elif cutlass.const_expr(product.by_head):
        if pair.there:
            at = (pair.row * facts.heads + tile // facts.slices) * facts.latent + tile % facts.slices * SWIZZLE
            _store_pair(rows.absorbed + (at + pair.feature), left, right)
    else:
        if cutlass.const_expr(product.normed):
            scale = shared.rms[pair.row]
            left, right = left * scale, right * scale
        left, right = _round(left, dtype), _round(right, dtype)
        out, width = {
            "qkv_a": (rows.qkv_a, facts.q_rank + facts.latent),
            "q_b": (rows.queries, facts.queries),
            "context": (rows.context_kv, facts.context * facts.latent),
        }[product.name]
        if pair.there:
            _store_pair(out + (pair.row * width + feature), left, right)
            if cutlass.const_expr(product.name == "q_b" and facts.heads > 0):
                _store_turned(rows, pair.row, feature, left, right, loaded.norm, facts)
        if cutlass.const_expr(product.name == "qkv_a"):  # noqa: SIM102 (decided when it is built, the next on the device)
            if tile * product.features < facts.q_rank:
                if pair.there:
                    place = pair.row * facts.q_rank + feature
                    _store_pair(rows.scaled_q_a + place, left * loaded.norm[0], right * loaded.norm[1])
                _add_squares(work, left, right, pair, squares_at, product)


@cute.jit
def finish_tile(
    shared: Shared, rows: Rows, work: Workspace, tile, num_rows, loaded, index: cutlass.Constexpr, facts: cutlass.Constexpr
):  # fmt: skip
    """Stores a tile whose products lie in shared memory."""
    product = facts.products[index]
    meet()
    for turn in cutlass.range_constexpr(_pairs_of(product, facts)):
        pair = _pair_of(turn, num_rows, product, facts)
        if pair.row < facts.lanes:  # whole warps, or the threads of whole rows
            _finish_pair(shared, rows, work, tile, pair, loaded[turn], index, facts)
    if cutlass.const_expr(index < len(facts.products) - 1):
        cute.arch.fence_proxy("async.global")  # the next product's x is fetched by TMA
    meet()


@cute.jit
def prepare_rows(weights: Weights, rows: Rows, work: Workspace, num_rows, facts: cutlass.Constexpr):
    """Eight warps: this CTA's blocks of the given rows, times the norm's weight, and their squares."""
    cta, _, _ = cute.arch.block_idx()
    for block in cutlass.range(cta, facts.hidden // BLOCK.features, facts.ctas, unroll=1):
        for turn in cutlass.range_constexpr(_pairs_of(BLOCK, facts)):
            pair = _pair_of(turn, num_rows, BLOCK, facts)
            feature = block * BLOCK.features + pair.feature
            given = _load_pair(rows.residual + (cutlass.min(pair.row, num_rows - 1) * facts.hidden + feature))
            norm = _load_pair(weights.input_norm + feature)
            if pair.there:
                _store_pair(rows.scaled_hidden + (pair.row * facts.hidden + feature), given[0] * norm[0], given[1] * norm[1])
            _add_squares(work, given[0], given[1], pair, (facts.prepared_at + block) * facts.lanes, BLOCK)
    cute.arch.fence_proxy("async.global")  # x is fetched by TMA


@cute.jit
def publish(work: Workspace, launch, count, index: cutlass.Constexpr, facts: cutlass.Constexpr):
    """So many tiles more of a product are finished.  Once a CTA and product: what it waits for is the stores' way to the
    memory."""
    thread, _, _ = cute.arch.thread_idx()
    counter = work.counters + LINE * index
    if thread == 0 and count > 0:
        if cutlass.const_expr(index == len(facts.products) - 1):
            # When all tiles are finished, every CTA that takes part has read which launch this is.
            finished = cute.arch.atomic_add(counter, count, sem="acq_rel", scope="gpu") + count
            if finished == launch * facts.products[index].tiles:
                put(work.counters + facts.launches_at, launch)
        else:
            raise_counter(counter, count)
