"""RMSNorm over the latent and RoPE over its rotary slice, one program a row and layer; stored side by side or straight into the
pool.  Both forms are one kernel: only the address of the store differs."""

import triton
import triton.language as tl

from dspark_kernels.triton.fp8_rows import fp8_codes, magnitude_bits, store_scale


@triton.jit
def latent_norm_rope_kernel(
    kv_ptr,  # [L, M, C + r], any strides but 1 between values
    kv_layer_stride,
    kv_row_stride,
    weight_ptr,  # [L, C]
    cos_sin_ptr,  # [M, r] float32: r / 2 cosines, r / 2 sines
    out_ptr,  # [L, M, C + r] contiguous, or the first value of layer 0's view of the pool
    out_layer_stride,
    out_page_stride,  # pool only
    out_row_stride,
    pages_ptr,  # [M] int64, pool only
    offsets_ptr,  # [M] int64, pool only
    owned_ptr,  # [M] uint8, pool only
    eps,
    LATENT: tl.constexpr,
    LATENT_LANES: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIR_LANES: tl.constexpr,
    POOL: tl.constexpr,
    FP8_WIDTH: tl.constexpr = 0,  # bytes of an fp8 pool's rows, whose out_ptr is uint8; 0: values are rounded to out's dtype
):
    row = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    kv = kv_ptr + layer * kv_layer_stride + row * kv_row_stride
    lanes = tl.arange(0, LATENT_LANES)
    inside = lanes < LATENT
    latent = tl.load(kv + lanes, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + layer * LATENT + lanes, mask=inside, other=0.0).to(tl.float32)
    normed = latent * tl.rsqrt(tl.sum(latent * latent, 0) / LATENT + eps) * weight

    pair = tl.arange(0, PAIR_LANES)
    turned = pair < PAIRS
    even = tl.load(kv + LATENT + 2 * pair, mask=turned, other=0.0).to(tl.float32)
    odd = tl.load(kv + LATENT + 2 * pair + 1, mask=turned, other=0.0).to(tl.float32)
    cos = tl.load(cos_sin_ptr + row * (2 * PAIRS) + pair, mask=turned, other=0.0)
    sin = tl.load(cos_sin_ptr + row * (2 * PAIRS) + PAIRS + pair, mask=turned, other=0.0)

    out = out_ptr + layer * out_layer_stride
    if POOL:
        owned = tl.load(owned_ptr + row).to(tl.int32)
        out += tl.load(pages_ptr + row) * out_page_stride + tl.load(offsets_ptr + row) * out_row_stride
        inside = lanes < LATENT * owned
        turned = pair < PAIRS * owned
    else:
        out += row * out_row_stride
    turned_even, turned_odd = even * cos - odd * sin, odd * cos + even * sin
    if FP8_WIDTH:
        # Rounded as the plain form stores them, and then quantised.
        kind = kv_ptr.dtype.element_ty
        normed = normed.to(kind).to(tl.float32)
        turned_even = turned_even.to(kind).to(tl.float32)
        turned_odd = turned_odd.to(kind).to(tl.float32)
        rotary = tl.maximum(tl.max(magnitude_bits(turned_even), 0), tl.max(magnitude_bits(turned_odd), 0))
        top = tl.maximum(tl.max(magnitude_bits(normed), 0), rotary)
        tl.store(out + lanes, fp8_codes(normed, top), mask=inside)
        tl.store(out + LATENT + 2 * pair, fp8_codes(turned_even, top), mask=turned)
        tl.store(out + LATENT + 2 * pair + 1, fp8_codes(turned_odd, top), mask=turned)
        store_scale(out, top, owned, LATENT + 2 * PAIRS, FP8_WIDTH)
    else:
        kind = out_ptr.dtype.element_ty
        tl.store(out + lanes, normed.to(kind), mask=inside)
        tl.store(out + LATENT + 2 * pair, turned_even.to(kind), mask=turned)
        tl.store(out + LATENT + 2 * pair + 1, turned_odd.to(kind), mask=turned)
