"""Weight-only int8 storage with one scale per row; dequantised when a checkpoint is loaded.

A matrix `name` is stored as int8 [rows, columns] under its own name and float32 [rows, 1] under `name` + "_scale" (the
spelling of compressed-tensors), and `config.json` says `"quantization_config": {"quant_method": "int8_rows"}`.  Vectors
stay as they are.
"""

import torch

QUANT_METHOD = "int8_rows"
SCALE_SUFFIX = "_scale"
_LEVELS = 127
# Shares of a row's largest magnitude that are tried as the clipping point; for a row of Gaussian values the best is near 0.9.
_CLIPS = tuple(1.0 - 0.025 * step for step in range(13))


def quantise_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 values and float32 scales [rows, 1] of a float matrix [rows, columns], with values * scales close to it.

    Each row takes the clipping point, among a few shares of its largest magnitude, that leaves the least squared error.  A
    row of zeros gets scale 1.
    """
    wide = weight.detach().float()
    top = wide.abs().amax(dim=1, keepdim=True)
    top = torch.where(top > 0, top, float(_LEVELS))
    best_scale, best_error = top / _LEVELS, torch.full_like(top, float("inf"))
    for clip in _CLIPS:
        scale = top * clip / _LEVELS
        error = (_round(wide, scale) * scale - wide).square().sum(dim=1, keepdim=True)
        better = error < best_error
        best_scale, best_error = torch.where(better, scale, best_scale), torch.where(better, error, best_error)
    return _round(wide, best_scale).to(torch.int8), best_scale


def dequantise_rows(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """values int8 [rows, columns] times scales float32 [rows, 1], in float32, rounded once to `dtype`."""
    return (values.float() * scales).to(dtype)


def _round(wide: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (wide / scale).round().clamp(-_LEVELS, _LEVELS)
