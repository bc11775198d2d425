"""Encoded page offsets to page table rows and page counts, one program a request."""

import triton
import triton.language as tl


@triton.jit
def decode_block_table_kernel(
    encoded_ptr,  # [B, P] any integer type, any strides
    stride_row,
    stride_column,
    count_ptr,  # [B] int64
    table_ptr,  # [B, P] int32
    width,
    divisor,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    first_absent = tl.full((BLOCK,), width, tl.int64)
    for start in range(0, width, BLOCK):
        at = (start + lanes).to(tl.int64)
        value = tl.load(encoded_ptr + row * stride_row + at * stride_column, mask=at < width, other=0)
        first_absent = tl.minimum(first_absent, tl.where((value < 0) & (at < width), at, width))
    count = tl.min(first_absent, 0)
    tl.store(count_ptr + row, count)
    for start in range(0, width, BLOCK):
        at = (start + lanes).to(tl.int64)
        value = tl.load(encoded_ptr + row * stride_row + at * stride_column, mask=at < width, other=0).to(tl.int64)
        page = tl.where(at < count, value // divisor, -1)
        tl.store(table_ptr + row * width + at, page.to(tl.int32), mask=at < width)
