"""One product per head for few rows: a tile of rows and columns of one head a program."""

import triton
import triton.language as tl


@triton.jit
def per_head_product_kernel(
    x_ptr,  # [M, heads, d], values of a head side by side
    x_row_stride,
    x_head_stride,
    weight_ptr,  # [heads, d, e]
    weight_head_stride,
    weight_row_stride,
    weight_column_stride,
    out_ptr,  # [M, heads, e], values of a head side by side
    out_row_stride,
    out_head_stride,
    rows,
    DEPTH: tl.constexpr,  # d
    WIDTH: tl.constexpr,  # e
    ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    DEPTH_TILE: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
    row = (tl.program_id(2) * ROW_TILE + tl.arange(0, ROW_TILE)).to(tl.int64)
    x_ptr += head * x_head_stride + row[:, None] * x_row_stride
    weight_ptr += head * weight_head_stride + column[None, :] * weight_column_stride
    inside, wide = (row < rows)[:, None], (column < WIDTH)[None, :]
    total = tl.zeros((ROW_TILE, COLUMN_TILE), tl.float32)
    for start in range(0, DEPTH, DEPTH_TILE):
        depth = start + tl.arange(0, DEPTH_TILE)
        x = tl.load(x_ptr + depth[None, :], mask=inside & (depth < DEPTH)[None, :], other=0.0)
        weight = tl.load(weight_ptr + depth[:, None] * weight_row_stride, mask=wide & (depth < DEPTH)[:, None], other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
    out = out_ptr + head * out_head_stride + row[:, None] * out_row_stride + column[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside & wide)
