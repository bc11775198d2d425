"""Queries for attention over latents: a head's first programs multiply its key matrix in, the last turns its rotary part."""

import triton
import triton.language as tl

from dspark_kernels.triton.programmatic import wait_then_let_next_in


@triton.jit
def absorb_queries_kernel(
    q_ptr,  # [M, heads, nope + r], values of a head side by side
    q_row_stride,
    q_head_stride,
    keys_ptr,  # [heads, nope, C], values of a row side by side
    keys_head_stride,
    keys_row_stride,
    cos_sin_ptr,  # [M, r] float32: r / 2 cosines, r / 2 sines
    out_ptr,  # [M, heads, C + r], contiguous
    rows,
    heads,
    NOPE: tl.constexpr,
    NOPE_TILE: tl.constexpr,
    LATENT: tl.constexpr,  # C
    PAIRS: tl.constexpr,
    PAIR_LANES: tl.constexpr,
    ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row = (tl.program_id(2) * ROW_TILE + tl.arange(0, ROW_TILE)).to(tl.int64)
    inside = (row < rows)[:, None]
    q = q_ptr + head * q_head_stride + row[:, None] * q_row_stride
    out = out_ptr + (row[:, None] * heads + head) * (LATENT + 2 * PAIRS)
    kind = out_ptr.dtype.element_ty
    if part * COLUMN_TILE < LATENT:
        column = part * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
        wide = (column < LATENT)[None, :]
        total = tl.zeros((ROW_TILE, COLUMN_TILE), tl.float32)
        depth = tl.arange(0, NOPE_TILE)
        keys = keys_ptr + head * keys_head_stride + depth[:, None] * keys_row_stride + column[None, :]
        matrix = tl.load(keys, mask=wide & (depth < NOPE)[:, None], other=0.0)
        wait_then_let_next_in(PROGRAMMATIC)
        for start in range(0, NOPE, NOPE_TILE):
            values = tl.load(q + start + depth[None, :], mask=inside & (depth < NOPE - start)[None, :], other=0.0)
            total = tl.dot(values, matrix, total, input_precision="ieee")
            ahead = start + NOPE_TILE
            matrix = tl.load(keys + ahead * keys_row_stride, mask=wide & (depth < NOPE - ahead)[:, None], other=0.0)
        tl.store(out + column[None, :], total.to(kind), mask=inside & wide)
    else:
        wait_then_let_next_in(PROGRAMMATIC)
        pair = tl.arange(0, PAIR_LANES)[None, :]
        both = inside & (pair < PAIRS)
        even = tl.load(q + NOPE + 2 * pair, mask=both, other=0.0).to(tl.float32)
        odd = tl.load(q + NOPE + 2 * pair + 1, mask=both, other=0.0).to(tl.float32)
        cos = tl.load(cos_sin_ptr + row[:, None] * (2 * PAIRS) + pair, mask=both, other=0.0)
        sin = tl.load(cos_sin_ptr + row[:, None] * (2 * PAIRS) + PAIRS + pair, mask=both, other=0.0)
        tl.store(out + LATENT + 2 * pair, (even * cos - odd * sin).to(kind), mask=both)
        tl.store(out + LATENT + 2 * pair + 1, (odd * cos + even * sin).to(kind), mask=both)
