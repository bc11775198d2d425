"""The block's latents in `between_attentions`: normed, turned and stored into the pool, to the bits of `latent_norm_rope`.

`facts` is a `Facts` of `between_attentions_schedule`.
"""

import cutlass
import cutlass.cute as cute

from dspark_kernels.cute.between_attentions_schedule import Into, Rows, Weights, first_tile
from dspark_kernels.cute.block_attention_schedule import CHUNK, WARP
from dspark_kernels.cute.latent_norm_rope import load_wide, rotated, store_rounded


@cute.jit
def _turn(kv, out, into: Into, row, stored, facts: cutlass.Constexpr):
    """The rotary values of a row."""
    lane, pairs = cute.arch.lane_idx(), CHUNK // 2
    cos_sin = into.cos_sin + row * facts.rotary
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
def store_latents(
    weights: Weights, rows: Rows, into: Into, num_rows, eps, index: cutlass.Constexpr, facts: cutlass.Constexpr
):  # fmt: skip
    """One warp of each CTA that has a tile of the product `index`, once that may begin: this CTA's rows."""
    cta, _, _ = cute.arch.block_idx()
    first, step = first_tile(cta, index, facts), min(facts.products[index].tiles, facts.ctas)
    for row32 in cutlass.range(first, num_rows, step, unroll=1):
        row = cutlass.Int64(row32)
        stored = (into.owned + row).load() != 0
        out = into.pool + ((into.pages + row).load() * into.page_stride + (into.offsets + row).load() * into.row_stride)
        kv = rows.qkv_a + (row * (facts.q_rank + facts.latent) + facts.q_rank)
        turned = facts.latent - facts.rotary
        _turn(kv + turned, out + turned, into, row, stored, facts)
        _norm(kv, out, weights.latent_norm, eps, stored, facts)
