"""RMS normalisation, one program a row."""

import triton
import triton.language as tl

from dspark_kernels.triton.programmatic import wait_then_let_next_in


@triton.jit
def rms_norm_kernel(
    x_ptr,  # [M, H], values of a row side by side
    x_row_stride,
    weight_ptr,  # [H]
    out_ptr,  # [M, H], contiguous
    eps,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    inside = lanes < WIDTH
    weight = tl.load(weight_ptr + lanes, mask=inside, other=0.0).to(tl.float32)
    wait_then_let_next_in(PROGRAMMATIC)
    x = tl.load(x_ptr + row * x_row_stride + lanes, mask=inside, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * weight
    tl.store(out_ptr + row * WIDTH + lanes, normed.to(out_ptr.dtype.element_ty), mask=inside)
