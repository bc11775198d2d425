"""A kernel that lets the next one begin at once, and writes what that one reads long after."""

import torch
import triton
import triton.language as tl


@triton.jit
def _copy_late(out_ptr, in_ptr, count, nanoseconds, tile: tl.constexpr):
    tl.extra.cuda.gdc_launch_dependents()
    begin = tl.extra.cuda.globaltimer()
    now = begin
    while now - begin < nanoseconds:
        now = tl.extra.cuda.globaltimer()
    at = tl.program_id(0) * tile + tl.arange(0, tile)
    tl.store(out_ptr + at, tl.load(in_ptr + at, mask=at < count), mask=at < count)


def copy_late(out: torch.Tensor, values: torch.Tensor, nanoseconds: int = 30_000) -> None:
    """out = values, both contiguous, so long after the launch behind this one may begin."""
    tile = 1024
    _copy_late[(triton.cdiv(values.numel(), tile),)](out, values, values.numel(), nanoseconds, tile=tile)
