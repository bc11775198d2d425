"""Encoded page offsets to page table rows and page counts, one program a request."""

import triton
import triton.language as tl


@triton.jit
def decode_block_table_kernel(
    encoded_ptr,  # [B, P] any integer type, any strides
    stride_row,
    stride_column,
    width,  # P
    divisor,
    limit,  # pages from here on are none
    slots_ptr,  # [B] int64, the rows of the tables; only with SLOTS, else row i goes to row i
    count_ptr,  # [S] int64
    table_ptr,  # [S, W] int32
    table_width,  # W
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    encoded_ptr += row * stride_row
    slot = tl.load(slots_ptr + row) if SLOTS else row
    lanes = tl.arange(0, BLOCK)
    used = tl.minimum(width, table_width)
    first_absent = tl.full((BLOCK,), used, tl.int64)
    for start in range(0, used, BLOCK):
        at = (start + lanes).to(tl.int64)
        value = tl.load(encoded_ptr + at * stride_column, mask=at < used, other=0).to(tl.int64)
        absent = (value < 0) | (value // divisor >= limit)
        first_absent = tl.minimum(first_absent, tl.where(absent & (at < used), at, used))
    count = tl.min(first_absent, 0)
    tl.store(count_ptr + slot, count)
    for start in range(0, table_width, BLOCK):
        at = (start + lanes).to(tl.int64)
        value = tl.load(encoded_ptr + at * stride_column, mask=at < count, other=0).to(tl.int64)
        page = tl.where(at < count, value // divisor, -1)
        tl.store(table_ptr + slot * table_width + at, page.to(tl.int32), mask=at < table_width)
