"""Where the context of each request ends, and the rotations of the positions from there on; one program a request."""

import triton
import triton.language as tl


@triton.jit
def context_rows_kernel(
    slots_ptr,  # [B] int64, -1 = dummy row
    context_lens_ptr,  # [S] int64
    cos_sin_ptr,  # [positions, r] float32
    lens_ptr,  # [B] int64
    rotations_ptr,  # [B, N, r] float32
    ROWS: tl.constexpr,  # N
    ROW_LANES: tl.constexpr,
    WIDTH: tl.constexpr,  # r
    WIDTH_LANES: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + request)
    length = tl.load(context_lens_ptr + slot, mask=slot >= 0, other=0)
    tl.store(lens_ptr + request, length)
    row = tl.arange(0, ROW_LANES)[:, None]
    column = tl.arange(0, WIDTH_LANES)[None, :]
    inside = (row < ROWS) & (column < WIDTH)
    values = tl.load(cos_sin_ptr + (length + row) * WIDTH + column, mask=inside, other=0.0)
    tl.store(rotations_ptr + (request * ROWS + row) * WIDTH + column, values, mask=inside)
