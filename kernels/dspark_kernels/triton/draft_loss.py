"""Loss and gradient over the vocabulary of draft rows, one program a row, gradient written over the logits."""

import torch
import triton
import triton.language as tl


@triton.jit
def _log_sum_exp(row_ptr, vocab, lanes, BLOCK: tl.constexpr):
    """log sum exp of one row of logits."""
    # Running maxima and sums, one per lane; joined after the loop.
    top = tl.full((BLOCK,), -1e30, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        x = tl.load(row_ptr + start + lanes, mask=start + lanes < vocab, other=-1e30).to(tl.float32)
        new_top = tl.maximum(top, x)
        total = total * tl.exp(top - new_top) + tl.exp(x - new_top)
        top = new_top
    best = tl.max(top, 0)
    # Lanes that saw no column hold a maximum of -1e30, so their term is exp(-huge) = 0.
    return best + tl.log(tl.sum(total * tl.exp(top - best), 0))


@triton.jit
def _row_lse_kernel(logits_ptr, lse_ptr, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tl.store(lse_ptr + row, _log_sum_exp(logits_ptr + row * vocab, vocab, tl.arange(0, BLOCK), BLOCK))


@triton.jit
def _draft_loss_kernel(
    draft_ptr,  # [M, V] draft logits in, gradient out
    target_ptr,  # [U, V] target logits
    target_lse_ptr,  # [U] float32
    target_rows_ptr,  # [M] row of target_ptr
    labels_ptr,  # [M]
    weights_ptr,  # [M] float32
    ce_ptr,  # [M] float32
    l1_ptr,  # [M] float32
    vocab,
    ce_weight,
    l1_weight,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights_ptr + row)
    label = tl.load(labels_ptr + row)
    target_row = tl.load(target_rows_ptr + row).to(tl.int64)
    draft = draft_ptr + row * vocab
    target = target_ptr + target_row * vocab
    lanes = tl.arange(0, BLOCK)

    # Pass 1.
    z_lse = _log_sum_exp(draft, vocab, lanes, BLOCK)
    t_lse = tl.load(target_lse_ptr + target_row)

    # Pass 2: L1 = sum |p - q| and S = sum p sign(p - q).
    l1 = tl.zeros((BLOCK,), tl.float32)
    signed = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        mask = start + lanes < vocab
        z = tl.load(draft + start + lanes, mask=mask, other=-1e30).to(tl.float32)
        t = tl.load(target + start + lanes, mask=mask, other=-1e30).to(tl.float32)
        p = tl.exp(z - z_lse)
        difference = p - tl.exp(t - t_lse)
        l1 += tl.abs(difference)
        signed += tl.where(difference > 0, p, tl.where(difference < 0, -p, 0.0))
    total = tl.sum(signed, 0)
    tl.store(l1_ptr + row, tl.sum(l1, 0))
    tl.store(ce_ptr + row, z_lse - tl.load(draft + label).to(tl.float32))

    # Pass 3: d/dz_i = weight (ce_weight (p_i - [i = label]) + l1_weight p_i (sign_i - S)), stored over the logits.
    # The barrier keeps other warps' stores behind the label's load above.
    tl.debug_barrier()
    for start in range(0, vocab, BLOCK):
        mask = start + lanes < vocab
        z = tl.load(draft + start + lanes, mask=mask, other=-1e30).to(tl.float32)
        t = tl.load(target + start + lanes, mask=mask, other=-1e30).to(tl.float32)
        p = tl.exp(z - z_lse)
        difference = p - tl.exp(t - t_lse)
        sign = tl.where(difference > 0, 1.0, tl.where(difference < 0, -1.0, 0.0))
        hit = tl.where(start + lanes == label, 1.0, 0.0)
        gradient = weight * (ce_weight * (p - hit) + l1_weight * p * (sign - total))
        tl.store(draft + start + lanes, gradient.to(draft_ptr.dtype.element_ty), mask=mask)


def draft_loss_(
    draft_logits: torch.Tensor,
    target_logits: torch.Tensor,
    target_rows: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    *,
    ce_weight: float,
    l1_weight: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """CE and L1 of each row; overwrites `draft_logits` with the weighted gradient.

    draft_logits: [M, V] contiguous, any float dtype; target_logits: [U, V] contiguous; target_rows, labels: int64 [M];
    weights: float32 [M].  Returns float32 [M] twice: -log p[label] and sum |p - q|, without the weights.

    Bytes at least: 1 read and 1 write of the draft row and 1 read of the target row from memory, and 1 read of all target
    rows for their sums.  The draft row is read 3 times and the target row twice, 96 KiB each in bf16 at 49,152 columns:
    what the programs at work hold is about as large as the L2 of an H200, so a part of that comes from memory again.
    """
    target_lse = torch.empty(target_logits.shape[0], dtype=torch.float32, device=target_logits.device)
    _row_lse_kernel[(target_logits.shape[0],)](target_logits, target_lse, target_logits.shape[1], BLOCK=4096, num_warps=16)
    ce = torch.empty(draft_logits.shape[0], dtype=torch.float32, device=draft_logits.device)
    l1 = torch.empty_like(ce)
    _draft_loss_kernel[(draft_logits.shape[0],)](
        draft_logits,
        target_logits,
        target_lse,
        target_rows,
        labels,
        weights,
        ce,
        l1,
        draft_logits.shape[1],
        ce_weight,
        l1_weight,
        BLOCK=4096,
        num_warps=16,
    )
    return ce, l1
