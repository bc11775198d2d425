"""Page and offset of consecutive context rows; one program a request."""

import triton
import triton.language as tl


@triton.jit
def context_addresses_kernel(
    start_ptr,  # [B] int64
    count_ptr,  # [B] int64
    slots_ptr,  # [B] int64, -1 = dummy row
    page_table_ptr,  # [S, P] int32
    num_pages_ptr,  # [S] int64
    pages_ptr,  # [B, N] int64
    offsets_ptr,  # [B, N] int64
    owned_ptr,  # [B, N] uint8
    table_width,
    rows,
    page_size,
    LANES: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + request)
    held = tl.load(num_pages_ptr + slot, mask=slot >= 0, other=0)
    row = tl.arange(0, LANES)
    position = tl.load(start_ptr + request) + row
    index = position // page_size
    owned = (row < tl.load(count_ptr + request)) & (position >= 0) & (index < held)
    page = tl.load(page_table_ptr + slot * table_width + index, mask=owned, other=0).to(tl.int64)
    at = request * rows + row
    tl.store(pages_ptr + at, page, mask=row < rows)
    tl.store(offsets_ptr + at, tl.where(owned, position - index * page_size, 0), mask=row < rows)
    tl.store(owned_ptr + at, owned.to(tl.uint8), mask=row < rows)
