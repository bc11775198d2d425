"""What a step leaves behind for the next one."""

from dataclasses import dataclass

import torch

from dspark_model.ops.accept_exact import NO_TOKEN
from dspark_model.ops.programmatic import programmatic_launch


@dataclass(frozen=True, slots=True, eq=False)
class SlotDrafts:
    """State of S slots that a step replaces.  context_lens, anchors, num_valid_drafts: int64 [S]; draft_tokens: int64
    [S, K]; all contiguous."""

    context_lens: torch.Tensor
    anchors: torch.Tensor
    num_valid_drafts: torch.Tensor
    draft_tokens: torch.Tensor


def step_commit(
    state: SlotDrafts,
    slots: torch.Tensor,
    anchors: torch.Tensor,
    context_lens: torch.Tensor,
    num_valid_drafts: torch.Tensor,
    draft_tokens: torch.Tensor,
    *,
    fused: bool = False,
) -> torch.Tensor:
    """Write the rows' results to their slots, and return the tokens that the target runs next: int64 [B, K + 1], the anchor
    and the drafts, NO_TOKEN throughout for rows without a draft and dummy rows.

    slots: int64 [B], NO_TOKEN for dummy rows, the others distinct; anchors: int64 [B], NO_TOKEN where nothing was drafted (a
    slot's drafts are then NO_TOKEN); context_lens, num_valid_drafts: int64 [B]; draft_tokens: int64 [B, K].
    fused: one Triton kernel, equal to the bit.
    """
    if fused:
        return _fused(state, slots, anchors, context_lens, num_valid_drafts, draft_tokens)
    drafted = (slots >= 0) & (anchors >= 0)
    drafts = torch.where(drafted[:, None], draft_tokens, NO_TOKEN)
    if slots.numel():
        live = slots >= 0
        # A dummy row repeats the first live one; where there is none, slot 0 keeps its values. `nonzero` would wait for the
        # device.
        row = torch.where(live, torch.arange(slots.shape[0], device=slots.device), live.int().argmax())
        at = slots[row].clamp(min=0)
        news = (context_lens, anchors, num_valid_drafts, drafts)
        olds = (state.context_lens, state.anchors, state.num_valid_drafts, state.draft_tokens)
        for old, new in zip(olds, news, strict=True):
            old[at] = torch.where(live.any(), new[row], old[at])
    return torch.cat((torch.where(drafted, anchors, NO_TOKEN)[:, None], drafts), dim=1)


def _fused(state: SlotDrafts, slots, anchors, context_lens, num_valid_drafts, draft_tokens) -> torch.Tensor:
    import triton
    from dspark_kernels.triton.step_commit import step_commit_kernel

    batch, drafts = draft_tokens.shape
    tokens = torch.empty((batch, drafts + 1), dtype=torch.int64, device=slots.device)
    if batch:
        step_commit_kernel[(batch,)](
            slots,
            anchors,
            context_lens,
            num_valid_drafts,
            draft_tokens,
            state.context_lens,
            state.anchors,
            state.num_valid_drafts,
            state.draft_tokens,
            tokens,
            DRAFTS=drafts,
            LANES=triton.next_power_of_2(drafts + 1),
            num_warps=1,
            **programmatic_launch(slots.device),
        )
    return tokens
