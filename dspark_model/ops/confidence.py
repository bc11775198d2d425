"""P(draft accepted | the drafts before it accepted), and its logit."""

from dataclasses import dataclass

import torch

from dspark_model.ops.programmatic import programmatic_launch


@dataclass(frozen=True, slots=True, eq=False)
class Confidence:
    """logits: float32 [B, K]; probability: float32 [B, K], their sigmoid."""

    logits: torch.Tensor
    probability: torch.Tensor


def confidence_logits(
    final_hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, markov_rows: torch.Tensor | None
) -> torch.Tensor:
    """w . [hidden ; markov_rows] + b in float32, of [..., H] and [..., R] or None: [...]."""
    parts = (final_hidden,) if markov_rows is None else (final_hidden, markov_rows)
    return torch.cat(parts, dim=-1).float() @ weight.float() + bias.float()


def confidence(
    final_hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    markov_w1: torch.Tensor | None = None,
    previous_tokens: torch.Tensor | None = None,
    *,
    slots: torch.Tensor | None = None,
    backend: str = "torch",
    early: bool = False,
) -> Confidence:
    """w . [hidden ; W1[previous]] + b in float32, and its sigmoid.

    final_hidden: [B, K, H] after `final_norm`; weight: [H], or [H + R] with `markov_w1` [V, R] and `previous_tokens` int64
    [B, K], ids of the vocabulary; bias: [1].
    slots: int64 [B], below 0 for dummy rows, whose logits are -inf and whose probabilities are 0 whatever they hold; None:
    there are none.
    backend: `torch`; or `triton`, one launch, which sums in another order: within 2^-18 of the sum of the terms' magnitudes,
        and probabilities within 2^-20 of the sigmoid of its logits.
        From Hopper on it begins while the kernel before it on the stream still runs, if that one allows it (programmatic
        dependent launch), and waits for its end; the bias must have been complete when that one let it begin.
    early: `triton` only: it reads final_hidden and weight before that end too, so they must have been complete as well.  The
        same bits.

    Raises:
        ValueError: backend `triton`, and a tensor does not fit.
    """
    if backend == "triton":
        return _fused(final_hidden, weight, bias, markov_w1, previous_tokens, slots, early)
    markov_rows = None if markov_w1 is None else markov_w1[previous_tokens]
    logits = confidence_logits(final_hidden, weight, bias, markov_rows)
    if slots is not None:
        logits = torch.where(slots[:, None] >= 0, logits, float("-inf"))
    return Confidence(logits, torch.sigmoid(logits))


def _fused(final_hidden, weight, bias, markov_w1, previous_tokens, slots, early) -> Confidence:
    import triton
    from dspark_kernels.triton.confidence import confidence_kernel

    (batch, drafts, hidden), rank = final_hidden.shape, 0 if markov_w1 is None else markov_w1.shape[1]
    if weight.shape != (hidden + rank,) or not weight.is_contiguous():
        raise ValueError(f"weight: contiguous [{hidden + rank}] wanted, got {list(weight.shape)}")
    if final_hidden.stride(-1) != 1 or (markov_w1 is not None and markov_w1.stride(-1) != 1):
        raise ValueError("final_hidden and markov_w1: values of a row side by side wanted; pass contiguous tensors")
    if markov_w1 is not None and (
        previous_tokens.dtype is not torch.int64
        or previous_tokens.shape != (batch, drafts)
        or not previous_tokens.is_contiguous()
    ):
        raise ValueError(
            f"previous_tokens: contiguous int64 [{batch}, {drafts}] wanted, got {previous_tokens.dtype} "
            f"{list(previous_tokens.shape)}"
        )
    if slots is not None and (slots.dtype is not torch.int64 or slots.shape != (batch,) or not slots.is_contiguous()):
        raise ValueError(f"slots: contiguous int64 [{batch}] wanted, got {slots.dtype} {list(slots.shape)}")
    logits, probability = (torch.empty((batch, drafts), dtype=torch.float32, device=final_hidden.device) for _ in range(2))
    if logits.numel():
        confidence_kernel[(batch * drafts,)](
            final_hidden,
            final_hidden.stride(0),
            final_hidden.stride(1),
            previous_tokens,
            markov_w1,
            0 if markov_w1 is None else markov_w1.stride(0),
            weight,
            bias,
            slots,
            logits,
            probability,
            drafts,
            hidden,
            rank,
            LANES=min(8192, triton.next_power_of_2(hidden)),
            RANK_LANES=triton.next_power_of_2(max(rank, 1)),
            num_warps=8,
            EARLY=early,
            **programmatic_launch(final_hidden.device),
        )
    return Confidence(logits, probability)
