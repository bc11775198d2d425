"""One token per row of logits: the largest, or a draw by Gumbel noise."""

import torch
import triton
import triton.language as tl


@triton.jit
def _sample_rows_kernel(
    logits_ptr,  # [B, V]
    temperatures_ptr,  # [B] float32
    seed_ptr,  # [1] int64
    out_ptr,  # [B] int64
    vocab,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row)
    seed = tl.load(seed_ptr)
    lanes = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), -1e30, tl.float32)
    best_at = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, BLOCK):
        at = start + lanes
        score = tl.load(logits_ptr + row * vocab + at, mask=at < vocab, other=-1e30).to(tl.float32)
        if temperature > 0:
            uniform = tl.rand(seed, tl.program_id(0) * vocab + at)
            # rand can return 0; its smallest other value is 2^-32.
            score += temperature * -tl.log(-tl.log(tl.maximum(uniform, 2.3e-10)) + 1e-20)
        better = score > best
        best = tl.where(better, score, best)
        best_at = tl.where(better, at, best_at)
    top = tl.max(best, 0)
    # The lowest id among equals, as argmax of the whole row would return.
    winner = tl.min(tl.where(best == top, best_at, vocab), 0)
    tl.store(out_ptr + row, winner.to(tl.int64))


def sample_rows(logits: torch.Tensor, temperatures: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """argmax(logits + temperature x Gumbel noise): greedy at temperature 0 (lowest id on ties), else a draw from
    softmax(logits / temperature).

    logits: [B, V] contiguous; temperatures: float32 [B]; seed: int64 [1] on the device, changed by the caller for each
    call.
    Returns int64 [B].
    """
    out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    _sample_rows_kernel[(logits.shape[0],)](logits, temperatures, seed, out, logits.shape[1], BLOCK=4096, num_warps=8)
    return out
