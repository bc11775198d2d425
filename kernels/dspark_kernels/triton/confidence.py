"""The confidence logit of each drafted row."""

import triton
import triton.language as tl

from dspark_kernels.triton.programmatic import wait_then_let_next_in


@triton.jit
def _sum_hidden(hidden_row, weight_ptr, hidden, LANES: tl.constexpr):
    """hidden_row . weight, without the Markov part."""
    lanes = tl.arange(0, LANES)
    sums = tl.zeros((LANES,), tl.float32)
    for start in range(0, hidden, LANES):
        column = start + lanes
        values = tl.load(hidden_row + column, mask=column < hidden, other=0.0).to(tl.float32)
        sums += values * tl.load(weight_ptr + column, mask=column < hidden, other=0.0).to(tl.float32)
    return tl.sum(sums, 0)


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
    slots_ptr,  # [B] int64, below 0 for dummy rows; or None
    logits_ptr,  # [B, K] float32
    probability_ptr,  # [B, K] float32
    drafts,
    hidden,
    rank,
    LANES: tl.constexpr,
    RANK_LANES: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
    EARLY: tl.constexpr,  # only tokens and slots may come from the kernel before
):
    row = tl.program_id(0).to(tl.int64)
    hidden_row = hidden_ptr + row // drafts * hidden_batch_stride + row % drafts * hidden_step_stride
    bias = tl.load(bias_ptr)
    if EARLY:
        logit = _sum_hidden(hidden_row, weight_ptr, hidden, LANES)
    wait_then_let_next_in(PROGRAMMATIC)
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + row // drafts)
    if w1_ptr is not None:
        at = tl.arange(0, RANK_LANES)
        markov_row = tl.load(w1_ptr + tl.load(previous_ptr + row) * w1_stride + at, mask=at < rank, other=0.0)
        markov_weight = tl.load(weight_ptr + hidden + at, mask=at < rank, other=0.0)
    if not EARLY:
        # W1's row waits for the token's load; the long sum runs meanwhile.
        logit = _sum_hidden(hidden_row, weight_ptr, hidden, LANES)
    if w1_ptr is not None:
        logit += tl.sum(markov_row.to(tl.float32) * markov_weight.to(tl.float32), 0)
    logit += bias.to(tl.float32)
    if slots_ptr is not None:
        logit = tl.where(slot >= 0, logit, float("-inf"))
    tl.store(logits_ptr + row, logit)
    tl.store(probability_ptr + row, 1.0 / (1.0 + tl.exp(-logit)))
