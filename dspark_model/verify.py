"""Which drafts stand: pure functions of the drafts and of what the target said about them.

B requests, K drafts, V vocabulary.  Row i of the target is its view after the i-th checked token: row 0 after the anchor,
row i after draft i - 1.
"""

import torch

from dspark_model.ops.accept_exact import NO_TOKEN, Acceptance, accept_exact, commit, leading
from dspark_model.ops.markov_chain import invert_cdf
from dspark_model.sampling import DrawKind, SamplingParams

__all__ = [
    "NO_TOKEN",
    "Acceptance",
    "accept_exact",
    "accept_given",
    "accept_sampled",
    "confident_prefix_length",
    "draw_token",
    "one_hot",
]


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
    accepted = leading(uniforms[:, :-1] * q < p, num_drafts)
    row = torch.arange(draft_tokens.shape[0], device=draft_tokens.device)
    p_next = target_probs[row, accepted]
    q_next = draft_probs[row, accepted.clamp(max=draft_tokens.shape[1] - 1)]
    rest = (p_next - q_next).clamp(min=0)
    # Where p equals q to the last bit nothing is left over; a rejection there is rounding, and p itself is right.
    use_rest = (accepted < num_drafts) & (rest.sum(-1) > 0)
    final = invert_cdf(torch.where(use_rest[:, None], rest, p_next), uniforms[:, -1])
    return commit(accepted, draft_tokens, final)


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


def draw_token(logits: torch.Tensor, sampling: SamplingParams, position: int) -> int:
    """One draw from softmax(logits [V] / temperature) for the token at `position`, the temperature being above 0."""
    probs = torch.softmax(logits.float() / sampling.temperature, dim=-1)
    uniform = sampling.uniforms(position, DrawKind.TARGET, 1).to(logits.device)
    return int(invert_cdf(probs[None], uniform)[0])
