"""RMS normalisation."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension (Zhang and Sennrich, arXiv 1910.07467).

    x: [..., H]; weight: [H].  Computed in float32 with the weight, rounded once to x's dtype.
    """
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * scale * weight.float()).to(x.dtype)
