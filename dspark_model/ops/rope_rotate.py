"""Rotary rotation of adjacent pairs."""

import torch


def rope_rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (2i, 2i + 1) of the last dimension in place order: out[2i] = x[2i] cos_i - x[2i+1] sin_i,
    out[2i+1] = x[2i+1] cos_i + x[2i] sin_i (Su et al., arXiv 2104.09864, interleaved pairs).

    x: [..., r]; cos_sin: float32 [..., r], r/2 cosines then r/2 sines, broadcastable over x's leading dimensions.
    Computed in float32, rounded once to x's dtype.
    """
    cos, sin = cos_sin.chunk(2, dim=-1)
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)
