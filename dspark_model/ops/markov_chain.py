"""The sequential Markov bias over one block and the choice of its draft tokens."""

from dataclasses import dataclass

import torch

from dspark_model.ops.fp32_linear import fp32_linear


@dataclass(frozen=True, slots=True)
class MarkovChainOutput:
    """draft_tokens: int64 [B, K].  biased_logits: float32 [B, K, V], what each draft was chosen from.
    previous_tokens: int64 [B, K], the token before each draft: the anchor, then the drafts themselves."""

    draft_tokens: torch.Tensor
    biased_logits: torch.Tensor
    previous_tokens: torch.Tensor


def markov_chain(
    base_logits: torch.Tensor,
    anchors: torch.Tensor,
    markov_w1: torch.Tensor | None,
    markov_w2: torch.Tensor | None,
    *,
    temperatures: torch.Tensor | None = None,
    uniforms: torch.Tensor | None = None,
) -> MarkovChainOutput:
    """For k = 0 .. K-1: biased_k = base_k + W2 W1[x_{k-1}], x_k chosen from biased_k, x_{-1} the anchor
    (DSpark, arXiv 2607.05147).

    base_logits: float32 [B, K, V]; anchors: int64 [B]; markov_w1, markov_w2: [V, R], W2 packed or not (`fp32_linear`), both
    None for a drafter without a Markov head (bias 0).  The bias accumulates in float32.  Greedy: the largest biased logit,
    lowest id on ties.  With `temperatures` (float32 [B], 0 = greedy) and `uniforms` (float32 [B, K] in [0, 1)) a row of
    temperature t draws from softmax(biased / t) by inversion.
    """
    previous = anchors
    tokens, biased_rows, previous_rows = [], [], []
    for step, base in enumerate(base_logits.unbind(1)):
        biased = base if markov_w1 is None else base + fp32_linear(markov_w1[previous], markov_w2)
        token = biased.argmax(-1)
        if temperatures is not None:
            token = torch.where(temperatures > 0, _draw(biased, temperatures, uniforms[:, step]), token)
        previous_rows.append(previous)
        biased_rows.append(biased)
        tokens.append(token)
        previous = token
    return MarkovChainOutput(torch.stack(tokens, 1), torch.stack(biased_rows, 1), torch.stack(previous_rows, 1))


def _draw(logits: torch.Tensor, temperatures: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """One draw a row from softmax(logits / temperature) by inverting the cumulative distribution."""
    return invert_cdf(tempered_softmax(logits, temperatures), uniform)


def tempered_softmax(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """softmax(logits / temperature) of each row, with temperature 1 where it is 0 (a greedy row, whose result is not used).

    logits: float32 [B, ..., V]; temperatures: float32 [B].  Drafts are drawn from it and verified against it: one formula for
    both, since rejection sampling needs the exact distribution.
    """
    scale = torch.where(temperatures > 0, temperatures, 1.0)
    return torch.softmax(logits / scale.reshape(-1, *[1] * (logits.ndim - 1)), -1)


def invert_cdf(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Smallest index whose cumulative probability exceeds `uniform` times the total.

    probs: float32 [B, V], rows need not sum to 1 but must have a positive sum; uniform: float32 [B] in [0, 1).
    Returns int64 [B]; an index of probability 0 is never returned.
    """
    # float64: over 100,000 float32 terms the running sum would be off by more than small probabilities.
    cumulative = probs.double().cumsum(-1)
    wanted = uniform.double()[:, None] * cumulative[:, -1:]
    index = (cumulative <= wanted).sum(-1)
    # wanted can round up to the total; then the last index with any probability is the answer.
    last = probs.shape[-1] - 1 - (probs.flip(-1) > 0).int().argmax(-1)
    return torch.minimum(index, last)
