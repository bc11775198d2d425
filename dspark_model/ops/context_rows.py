"""Where the rows that a step adds to its requests' contexts begin, and their rotations."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class ContextRows:
    """start: int64 [B], context length before the step, 0 for dummy rows; cos_sin: float32 [B, N, r], rotations of the
    positions start, start + 1, ..., start + N - 1."""

    start: torch.Tensor
    cos_sin: torch.Tensor


def context_rows(
    slots: torch.Tensor, context_lens: torch.Tensor, cos_sin: torch.Tensor, rows: int, *, fused: bool = False
) -> ContextRows:
    """N = `rows` positions behind the context of each of B requests.

    slots: int64 [B], contiguous, -1 for dummy rows; context_lens: int64 [S]; cos_sin: float32 [positions, r], contiguous, the
    rotation table, which covers all these positions.
    fused: one Triton kernel, equal to the bit.
    """
    if fused:
        return _fused(slots, context_lens, cos_sin, rows)
    start = torch.where(slots >= 0, context_lens[slots.clamp(min=0)], 0)
    positions = start[:, None] + torch.arange(rows, device=slots.device)
    return ContextRows(start, torch.nn.functional.embedding(positions, cos_sin))


def _fused(slots: torch.Tensor, context_lens: torch.Tensor, cos_sin: torch.Tensor, rows: int) -> ContextRows:
    import triton
    from dspark_kernels.triton.context_rows import context_rows_kernel

    batch, width = slots.shape[0], cos_sin.shape[1]
    start = torch.empty(batch, dtype=torch.int64, device=slots.device)
    rotations = torch.empty((batch, rows, width), dtype=torch.float32, device=slots.device)
    if batch:
        context_rows_kernel[(batch,)](
            slots,
            context_lens,
            cos_sin,
            start,
            rotations,
            ROWS=rows,
            ROW_LANES=triton.next_power_of_2(rows),
            WIDTH=width,
            WIDTH_LANES=triton.next_power_of_2(width),
            num_warps=1,
        )
    return ContextRows(start, rotations)
