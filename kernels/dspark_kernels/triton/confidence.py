"""The confidence logit of each drafted row."""

import triton
import triton.language as tl


@triton.jit
def confidence_kernel(
    hidden_ptr,  # [B, K, H], values of a row side by side
    hidden_batch_stride,
    hidden_step_stride,
    previous_ptr,  # [B, K] int64
    w1_ptr,  # [V, R], or None
    w1_stride,
    weight_ptr,  # [H + R], or [H]
    bias_ptr,  # [1]
    out_ptr,  # [B, K] float32
    drafts,
    hidden,
    rank,
    LANES: tl.constexpr,
    RANK_LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    hidden_row = hidden_ptr + row // drafts * hidden_batch_stride + row % drafts * hidden_step_stride
    lanes = tl.arange(0, LANES)
    sums = tl.zeros((LANES,), tl.float32)
    for start in range(0, hidden, LANES):
        at = start + lanes
        values = tl.load(hidden_row + at, mask=at < hidden, other=0.0).to(tl.float32)
        sums += values * tl.load(weight_ptr + at, mask=at < hidden, other=0.0).to(tl.float32)
    logit = tl.sum(sums, 0)
    if w1_ptr is not None:
        at = tl.arange(0, RANK_LANES)
        values = tl.load(w1_ptr + tl.load(previous_ptr + row) * w1_stride + at, mask=at < rank, other=0.0).to(tl.float32)
        logit += tl.sum(values * tl.load(weight_ptr + hidden + at, mask=at < rank, other=0.0).to(tl.float32), 0)
    tl.store(out_ptr + row, logit + tl.load(bias_ptr).to(tl.float32))
