"""Latents of consecutive context rows into the pages of their requests, all layers in one launch."""

import triton
import triton.language as tl

from dspark_kernels.triton.fp8_rows import store_fp8_row


@triton.jit
def context_store_kernel(
    pool_ptr,  # first value of layer 0's view
    layer_stride,  # values between two layers' views
    page_stride,
    row_stride,
    latents_ptr,  # [L, B, N, D]
    latents_layer_stride,
    latents_row_stride,
    start_ptr,  # [B] int64
    count_ptr,  # [B] int64
    slots_ptr,  # [B] int64, -1 = dummy row
    page_table_ptr,  # [S, P] int32
    num_pages_ptr,  # [S] int64
    table_width,
    rows,
    page_size,
    WIDTH: tl.constexpr,
    WIDTH_LANES: tl.constexpr,
    FP8_WIDTH: tl.constexpr = 0,  # bytes of an fp8 pool's rows, whose pool_ptr is uint8; 0: rows are copied
):
    request = (tl.program_id(0) // rows).to(tl.int64)
    row = (tl.program_id(0) % rows).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + request)
    if (slot >= 0) & (row < tl.load(count_ptr + request)):
        position = tl.load(start_ptr + request) + row
        index = position // page_size
        if (position >= 0) & (index < tl.load(num_pages_ptr + slot)):
            page = tl.load(page_table_ptr + slot * table_width + index).to(tl.int64)
            source = latents_ptr + layer * latents_layer_stride + tl.program_id(0).to(tl.int64) * latents_row_stride
            target = pool_ptr + layer * layer_stride + page * page_stride + (position - index * page_size) * row_stride
            if FP8_WIDTH:
                store_fp8_row(target, source, WIDTH, WIDTH_LANES, FP8_WIDTH)
            else:
                lanes = tl.arange(0, WIDTH_LANES)
                tl.store(target + lanes, tl.load(source + lanes, mask=lanes < WIDTH), mask=lanes < WIDTH)
