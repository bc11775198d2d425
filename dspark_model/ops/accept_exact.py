"""Strict acceptance: drafts stand as long as they equal the target's own choice."""

from dataclasses import dataclass

import torch

NO_TOKEN = -1  # filler behind the committed tokens of a request


@dataclass(frozen=True, slots=True)
class Acceptance:
    """num_accepted: int64 [B], accepted drafts.  committed_tokens: int64 [B, K + 1], the accepted drafts and then the
    target's own token; NO_TOKEN behind the first num_accepted + 1.  anchor: int64 [B], the last committed token."""

    num_accepted: torch.Tensor
    committed_tokens: torch.Tensor
    anchor: torch.Tensor


def accept_exact(draft_tokens: torch.Tensor, num_drafts: torch.Tensor, target_tokens: torch.Tensor) -> Acceptance:
    """Accept drafts as long as they equal the target's own choice.

    draft_tokens: int64 [B, K]; num_drafts: int64 [B], how many of them were checked; target_tokens: int64 [B, K + 1].
    Greedy when the choices are arg maxima; with choices drawn from the target the output keeps the target's distribution.
    """
    accepted = leading(draft_tokens == target_tokens[:, :-1], num_drafts)
    return commit(accepted, draft_tokens, target_tokens.gather(1, accepted[:, None])[:, 0])


def leading(stands: torch.Tensor, num_drafts: torch.Tensor) -> torch.Tensor:
    """Number of leading True among the first num_drafts columns: bool [B, K] and int64 [B] to int64 [B]."""
    checked = torch.arange(stands.shape[1], device=stands.device) < num_drafts[:, None]
    return (stands & checked).long().cumprod(1).sum(1)


def commit(accepted: torch.Tensor, draft_tokens: torch.Tensor, final: torch.Tensor) -> Acceptance:
    """The verdict that accepts the first `accepted` [B] of draft_tokens [B, K] and then takes `final` [B]."""
    index = torch.arange(draft_tokens.shape[1] + 1, device=draft_tokens.device)
    padded = torch.nn.functional.pad(draft_tokens, (0, 1), value=NO_TOKEN)
    tokens = torch.where(index < accepted[:, None], padded, NO_TOKEN)
    tokens = torch.where(index == accepted[:, None], final[:, None], tokens)
    return Acceptance(num_accepted=accepted, committed_tokens=tokens, anchor=final)
