"""Latents in `between_attentions`, of the block and of context rows: normed, turned and stored into the pool, to the bits of
`latent_norm_rope`.

`facts` is a `Facts` of `between_attentions_schedule`.
"""

import cutlass
import cutlass.cute as cute

from dspark_kernels.cute.between_attentions_meet import look_for
from dspark_kernels.cute.between_attentions_schedule import LINE, Context, Into, Rows, Weights, Workspace, first_tile
from dspark_kernels.cute.block_attention_schedule import CHUNK, WARP
from dspark_kernels.cute.latent_norm_rope import load_wide, rotated, store_rounded


@cute.jit
def _turn(kv, out, cos_sin, stored, facts: cutlass.Constexpr):
    """The rotary values of a row."""
    lane, pairs = cute.arch.lane_idx(), CHUNK // 2
    for first in cutlass.range_constexpr(0, facts.rotary // CHUNK, WARP):
        at = first + lane
        if stored and at < facts.rotary // CHUNK:
            values = load_wide(kv + at * CHUNK, CHUNK, True)
            cos = load_wide(cos_sin + at * pairs, pairs, True)
            sin = load_wide(cos_sin + (facts.rotary // 2 + at * pairs), pairs, True)
            store_rounded(out + at * CHUNK, rotated(values, cos, sin, pairs), CHUNK, True)


@cute.jit
def _norm(kv, out, weight, eps, stored, facts: cutlass.Constexpr):
    """The other values.  As in `latent_norm_rope_kernel` 32 chunks are summed together, and then these sums in their order."""
    lane, latent = cute.arch.lane_idx(), facts.latent - facts.rotary
    rounds = -(-latent // CHUNK // WARP)
    values = [cute.make_rmem_tensor(CHUNK, cutlass.Float32) for _ in range(rounds)]
    scales = [cute.make_rmem_tensor(CHUNK, cutlass.Float32) for _ in range(rounds)]
    total = cutlass.Float32(0.0)
    for i in cutlass.range_constexpr(rounds):
        at = i * WARP + lane
        values[i].fill(0.0)
        if at < latent // CHUNK:
            values[i].store(load_wide(kv + at * CHUNK, CHUNK, True).load())
            scales[i].store(load_wide(weight + at * CHUNK, CHUNK, True).load())
    for i in cutlass.range_constexpr(rounds):
        squares = cutlass.Float32(0.0)
        for j in cutlass.range_constexpr(CHUNK):
            squares = cute.math.fma(values[i][j], values[i][j], squares)
        total += cute.arch.warp_reduction_sum(squares)
    inverse = cute.math.rsqrt(cute.math.fma(total, cutlass.Float32(1.0 / latent), eps))
    for i in cutlass.range_constexpr(rounds):
        at = i * WARP + lane
        if stored and at < latent // CHUNK:
            normed = cute.make_rmem_tensor(CHUNK, cutlass.Float32)
            normed.store(values[i].load() * inverse * scales[i].load())
            store_rounded(out + at * CHUNK, normed, CHUNK, True)


@cute.jit
def _store_row(kv, pool, where, row, weight, eps, facts: cutlass.Constexpr):
    """One row of a layer's pool; where: an `Into` or a `Context`."""
    stored, turned = (where.owned + row).load() != 0, facts.latent - facts.rotary
    out = pool + ((where.pages + row).load() * where.page_stride + (where.offsets + row).load() * where.row_stride)
    _turn(kv + turned, out + turned, where.cos_sin + row * facts.rotary, stored, facts)
    _norm(kv, out, weight, eps, stored, facts)


@cute.jit
def store_context(rows: Rows, context: Context, work: Workspace, launch, eps, facts: cutlass.Constexpr):
    """One warp: this CTA's rows and layers of the context, once all of them are made; those of the last CTA come first."""
    cta, _, _ = cute.arch.block_idx()
    own, count, place = facts.ctas - 1 - cta, context.rows * facts.context, facts.place("context")
    if own < count:
        look_for(work.counters + LINE * place, launch * facts.products[place].tiles)
    for number in cutlass.range(own, count, facts.ctas, unroll=1):
        row, layer = cutlass.Int64(number // facts.context), number % facts.context
        kv = rows.context_kv + (row * (facts.context * facts.latent) + layer * facts.latent)
        weight = context.norms + layer * (facts.latent - facts.rotary)
        _store_row(kv, context.pool + layer * context.layer_stride, context, row, weight, eps, facts)


@cute.jit
def store_latents(
    weights: Weights, rows: Rows, into: Into, num_rows, eps, index: cutlass.Constexpr, facts: cutlass.Constexpr
):  # fmt: skip
    """One warp of each CTA that has a tile of the product `index`, once that may begin: this CTA's rows."""
    cta, _, _ = cute.arch.block_idx()
    first, step = first_tile(cta, index, facts), min(facts.products[index].tiles, facts.ctas)
    for row32 in cutlass.range(first, num_rows, step, unroll=1):
        row = cutlass.Int64(row32)
        kv = rows.qkv_a + (row * (facts.q_rank + facts.latent) + facts.q_rank)
        _store_row(kv, into.pool, into, row, weights.latent_norm, eps, facts)
