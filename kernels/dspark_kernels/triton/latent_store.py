"""Latents into the pool at given pages and offsets, all layers in one launch."""

import triton
import triton.language as tl

from dspark_kernels.triton.fp8_rows import store_fp8_row


@triton.jit
def latent_store_kernel(
    pool_ptr,  # first value of layer 0's view
    layer_stride,  # values between two layers' views
    page_stride,
    row_stride,
    latents_ptr,  # [L, M, D]
    latents_layer_stride,
    latents_row_stride,
    pages_ptr,  # [M] int64
    offsets_ptr,  # [M] int64
    owned_ptr,  # [M] uint8
    WIDTH: tl.constexpr,
    WIDTH_LANES: tl.constexpr,
    FP8_WIDTH: tl.constexpr = 0,  # bytes of an fp8 pool's rows, whose pool_ptr is uint8; 0: rows are copied
):
    row = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    if tl.load(owned_ptr + row) != 0:
        source = latents_ptr + layer * latents_layer_stride + row * latents_row_stride
        page, offset = tl.load(pages_ptr + row), tl.load(offsets_ptr + row)
        target = pool_ptr + layer * layer_stride + page * page_stride + offset * row_stride
        if FP8_WIDTH:
            store_fp8_row(target, source, WIDTH, WIDTH_LANES, FP8_WIDTH)
        else:
            lanes = tl.arange(0, WIDTH_LANES)
            tl.store(target + lanes, tl.load(source + lanes, mask=lanes < WIDTH), mask=lanes < WIDTH)
