"""What a step leaves behind for the next one: the slots' state and the tokens that the target runs next."""

import triton
import triton.language as tl

from dspark_kernels.triton.programmatic import wait_then_let_next_in


@triton.jit
def step_commit_kernel(
    slots_ptr,  # [B] int64, -1 = dummy row
    anchors_ptr,  # [B] int64, -1 = nothing drafted
    lens_ptr,  # [B] int64
    valid_ptr,  # [B] int64
    drafts_ptr,  # [B, K] int64
    state_lens_ptr,  # [S] int64
    state_anchors_ptr,  # [S] int64
    state_valid_ptr,  # [S] int64
    state_drafts_ptr,  # [S, K] int64
    tokens_ptr,  # [B, K + 1] int64
    DRAFTS: tl.constexpr,
    LANES: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    wait_then_let_next_in(PROGRAMMATIC)
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    anchor = tl.load(anchors_ptr + row)
    count = tl.where((slot >= 0) & (anchor >= 0), DRAFTS, 0)
    drafts = tl.load(drafts_ptr + row * DRAFTS + lanes, mask=lanes < count, other=-1)
    shifted = tl.load(drafts_ptr + row * DRAFTS + lanes - 1, mask=(lanes > 0) & (lanes <= count), other=-1)
    tokens = tl.where(lanes == 0, tl.where(count > 0, anchor, -1), shifted)
    tl.store(tokens_ptr + row * (DRAFTS + 1) + lanes, tokens, mask=lanes <= DRAFTS)
    if slot >= 0:
        tl.store(state_lens_ptr + slot, tl.load(lens_ptr + row))
        tl.store(state_anchors_ptr + slot, anchor)
        tl.store(state_valid_ptr + slot, tl.load(valid_ptr + row))
        tl.store(state_drafts_ptr + slot * DRAFTS + lanes, drafts, mask=lanes < DRAFTS)
