"""Which drafts stand: pure functions of the drafts and of what the target said about them.

B requests, K drafts, V vocabulary.  Row i of the target is its view after the i-th checked token: row 0 after the anchor,
row i after draft i - 1.
"""

from dataclasses import dataclass

import torch

from dspark_model.ops.markov_chain import invert_cdf
from dspark_model.sampling import DrawKind, SamplingParams

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
    return _accept(draft_tokens == target_tokens[:, :-1], num_drafts, draft_tokens, target_tokens)


def accept_sampled(
    draft_tokens: torch.Tensor,
    num_drafts: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    uniforms: torch.Tensor,
) -> Acceptance:
    """Rejection sampling (Leviathan et al., arXiv 2211.17192): accept draft x with probability min(1, p(x) / q(x)), and
    draw the token behind the accepted ones from norm(max(p - q, 0)), or from p when all checked drafts stand.

    target_probs: float32 [B, K + 1, V]; draft_probs: float32 [B, K, V], the exact distribution that each draft was drawn
    from (`one_hot` for an arg max); uniforms: float32 [B, K + 1] in [0, 1), one for each draft and one for the last token.
    """
    chosen = draft_tokens[..., None]
    p = target_probs[:, :-1].gather(-1, chosen)[..., 0]
    q = draft_probs.gather(-1, chosen)[..., 0]
    accepted = _leading(uniforms[:, :-1] * q < p, num_drafts)
    row = torch.arange(draft_tokens.shape[0], device=draft_tokens.device)
    p_next = target_probs[row, accepted]
    q_next = draft_probs[row, accepted.clamp(max=draft_tokens.shape[1] - 1)]
    rest = (p_next - q_next).clamp(min=0)
    # Where p equals q to the last bit nothing is left over; a rejection there is rounding, and p itself is right.
    use_rest = (accepted < num_drafts) & (rest.sum(-1) > 0)
    final = invert_cdf(torch.where(use_rest[:, None], rest, p_next), uniforms[:, -1])
    return _commit(accepted, draft_tokens, final)


def accept_given(committed_tokens: torch.Tensor, num_committed: torch.Tensor) -> Acceptance:
    """A caller's own verdict: committed_tokens int64 [B, K + 1], num_committed int64 [B] of at least 1."""
    index = torch.arange(committed_tokens.shape[1], device=committed_tokens.device)
    tokens = torch.where(index < num_committed[:, None], committed_tokens, NO_TOKEN)
    anchor = committed_tokens.gather(1, num_committed[:, None] - 1)[:, 0]
    return Acceptance(num_accepted=num_committed - 1, committed_tokens=tokens, anchor=anchor)


def one_hot(tokens: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The distribution of a draft that was not drawn: float32 [..., V]."""
    return torch.nn.functional.one_hot(tokens, vocab_size).float()


def confident_prefix_length(confidence: torch.Tensor, threshold: float) -> torch.Tensor:
    """Drafts before the first one whose confidence is below `threshold`; all of them when it is 0 or less.

    confidence: float32 [B, K], probabilities.  Returns int64 [B].
    """
    if threshold <= 0:
        return torch.full(confidence.shape[:1], confidence.shape[1], device=confidence.device)
    return (confidence >= threshold).long().cumprod(1).sum(1)


def _leading(stands: torch.Tensor, num_drafts: torch.Tensor) -> torch.Tensor:
    """Number of leading True among the first num_drafts columns."""
    checked = torch.arange(stands.shape[1], device=stands.device) < num_drafts[:, None]
    return (stands & checked).long().cumprod(1).sum(1)


def _accept(
    stands: torch.Tensor, num_drafts: torch.Tensor, draft_tokens: torch.Tensor, target_tokens: torch.Tensor
) -> Acceptance:
    accepted = _leading(stands, num_drafts)
    return _commit(accepted, draft_tokens, target_tokens.gather(1, accepted[:, None])[:, 0])


def _commit(accepted: torch.Tensor, draft_tokens: torch.Tensor, final: torch.Tensor) -> Acceptance:
    index = torch.arange(draft_tokens.shape[1] + 1, device=draft_tokens.device)
    padded = torch.nn.functional.pad(draft_tokens, (0, 1), value=NO_TOKEN)
    tokens = torch.where(index < accepted[:, None], padded, NO_TOKEN)
    tokens = torch.where(index == accepted[:, None], final[:, None], tokens)
    return Acceptance(num_accepted=accepted, committed_tokens=tokens, anchor=final)


def draw_token(logits: torch.Tensor, sampling: SamplingParams, position: int) -> int:
    """One draw from softmax(logits [V] / temperature) for the token at `position`, the temperature being above 0."""
    probs = torch.softmax(logits.float() / sampling.temperature, dim=-1)
    uniform = sampling.uniforms(position, DrawKind.TARGET, 1).to(logits.device)
    return int(invert_cdf(probs[None], uniform)[0])
