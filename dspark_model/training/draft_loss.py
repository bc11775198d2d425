"""The vocabulary part of the loss, with its gradient made in the forward pass, a chunk of rows at a time.

Counts for M = 28,672 block rows, V = 49,152, H = 576, R = 64, U = 9,216 target rows, bf16.  GEMMs: draft logits
[M, H + R] x [H + R, V] 1.8 TFLOP, their gradient 1.8, W2's gradient 0.18, target logits 0.52: 4.3 TFLOP.  Bytes: draft
logits 2.8 GB written by the GEMM, read and overwritten once by the loss, read twice by the gradient GEMMs; target
logits 0.9 GB written and 2.8 GB read: about 18 GB.  At 600 TFLOP/s and 4 TB/s that is 7 + 5 ms.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

RowLoss = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class VocabularyRows:
    """What the draft rows are compared with; `chunks` pieces of equal size are treated one after the other.

    target_hidden: [chunks, U, H], the target's final hidden rows (what its head reads); target_rows: int64 [chunks,
    M], the row of target_hidden[chunk] whose distribution a draft row should have; labels: int64 [chunks, M]; weights:
    float32 [chunks, M], already divided by their sum.
    """

    target_hidden: torch.Tensor
    target_rows: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, slots=True)
class LossWeights:
    ce: float
    l1: float


def draft_loss_torch_(
    draft_logits: torch.Tensor,
    target_logits: torch.Tensor,
    target_rows: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    *,
    ce_weight: float,
    l1_weight: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """CE and L1 of each row; overwrites `draft_logits` with the weighted gradient.  The plain version of the Triton
    kernel of the same contract: draft_logits [M, V], target_logits [U, V], the rest [M]."""
    wide = draft_logits if draft_logits.dtype is torch.float64 else draft_logits.float()
    log_p = torch.log_softmax(wide, -1)
    p = log_p.exp()
    difference = p - torch.softmax(target_logits.to(wide.dtype), -1)[target_rows]
    sign = difference.sign()
    gradient = ce_weight * p + l1_weight * p * (sign - (p * sign).sum(-1, keepdim=True))
    gradient.scatter_add_(1, labels[:, None], torch.full_like(gradient[:, :1], -ce_weight))
    ce, l1 = -log_p.gather(1, labels[:, None])[:, 0], difference.abs().sum(-1)
    draft_logits.copy_(gradient * weights[:, None])
    return ce, l1


def load_row_loss(kernel: str) -> RowLoss:
    """The row loss named `triton` or `torch`."""
    if kernel == "torch":
        return draft_loss_torch_
    from dspark_kernels.triton.draft_loss import draft_loss_

    return draft_loss_


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, markov_rows, markov_w2, lm_head, rows: VocabularyRows, weights: LossWeights, row_loss):
        """hidden [chunks, M, H], markov_rows [chunks, M, R], markov_w2 [V, R]; returns loss, ce and l1 (both [chunks,
        M])."""
        dtype, width = lm_head.dtype, hidden.shape[-1]
        table = torch.cat((lm_head, markov_w2.to(dtype)), dim=1)
        inputs = torch.cat((hidden.to(dtype), markov_rows.to(dtype)), dim=-1)
        grad_inputs = torch.empty_like(inputs)
        grad_w2 = torch.zeros_like(markov_w2)
        ce, l1 = torch.zeros_like(rows.weights), torch.zeros_like(rows.weights)
        for chunk in range(hidden.shape[0]):
            logits = inputs[chunk] @ table.T
            target_logits = rows.target_hidden[chunk] @ lm_head.T
            ce[chunk], l1[chunk] = row_loss(
                logits,
                target_logits,
                rows.target_rows[chunk],
                rows.labels[chunk],
                rows.weights[chunk],
                ce_weight=weights.ce,
                l1_weight=weights.l1,
            )
            torch.mm(logits, table, out=grad_inputs[chunk])
            grad_w2 += logits.T @ inputs[chunk, :, width:]
        ctx.save_for_backward(grad_inputs, grad_w2)
        ctx.width, ctx.dtypes = width, (hidden.dtype, markov_rows.dtype)
        ctx.mark_non_differentiable(ce, l1)
        # A weight of 0 also silences rows whose values mean nothing.
        loss = torch.where(rows.weights > 0, (weights.ce * ce + weights.l1 * l1) * rows.weights, 0.0).sum()
        return loss, ce, l1

    @staticmethod
    def backward(ctx, grad_loss, grad_ce, grad_l1):
        grad_inputs, grad_w2 = ctx.saved_tensors
        grad_hidden = (grad_inputs[..., : ctx.width] * grad_loss).to(ctx.dtypes[0])
        grad_markov = (grad_inputs[..., ctx.width :] * grad_loss).to(ctx.dtypes[1])
        return grad_hidden, grad_markov, grad_w2 * grad_loss, None, None, None, None


def vocabulary_loss(
    hidden: torch.Tensor,
    markov_rows: torch.Tensor,
    markov_w2: torch.Tensor,
    lm_head: torch.Tensor,
    rows: VocabularyRows,
    weights: LossWeights,
    row_loss: RowLoss,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """weighted sum of ce_weight CE + l1_weight |p_draft - p_target|_1 over rows, with p_draft = softmax(head(hidden) +
    W2 W1 rows).

    hidden: [chunks, M, H], after `final_norm`; markov_rows: [chunks, M, R]; markov_w2: [V, R]; lm_head: [V, H],
    frozen, its dtype is that of the GEMMs.  Returns the loss, and CE and L1 of each row [chunks, M], which carry no
    gradient.
    """
    return _VocabularyLoss.apply(hidden, markov_rows, markov_w2, lm_head, rows, weights, row_loss)
