"""Rotary position embedding: the YaRN frequency rule and one shared table of cosines and sines."""

import math

import torch

from dspark_model.config import RopeConfig, RopeType


def inverse_frequencies(config: RopeConfig, dim: int) -> torch.Tensor:
    """Inverse frequency of each of the `dim / 2` pairs, float64, [dim / 2]; the first is exactly 1.

    Plain RoPE: theta^(-2i / dim).  YaRN (arXiv 2309.00071, as DeepSeek-V2 implements it) keeps the pairs that turn more
    than `beta_fast` times within the original window, divides those that turn less than `beta_slow` times by `factor`,
    and blends linearly in between.
    """
    index = torch.arange(dim // 2, dtype=torch.float64)
    frequencies = config.theta ** (-2.0 * index / dim)
    if config.rope_type is RopeType.DEFAULT:
        return frequencies
    low, high = _yarn_bounds(config, dim)
    ramp = ((index - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (1.0 - ramp + ramp / config.factor)


def _yarn_bounds(config: RopeConfig, dim: int) -> tuple[float, float]:
    """Pair indices between which YaRN blends."""

    def pair_turning(turns: float) -> float:
        window = config.original_max_position_embeddings
        return dim * math.log(window / (2.0 * math.pi * turns)) / (2.0 * math.log(config.theta))

    low = max(math.floor(pair_turning(config.beta_fast)), 0)
    high = min(math.ceil(pair_turning(config.beta_slow)), dim - 1)
    # Equal bounds would divide by zero; the rule's authors widen them by a thousandth.
    return float(low), float(high) if high > low else low + 0.001


class RopeTable:
    """Cosines and sines of every position that may be served, built once and read by references and kernels alike.

    `cos_sin` is float32 [num_positions, dim]: dim / 2 cosines, then dim / 2 sines, already times
    `RopeConfig.cos_sin_multiplier`.  Angles are computed in float64, since at position 131,072 a float32 angle is off by
    up to 0.008 radians.
    """

    def __init__(self, config: RopeConfig, dim: int, num_positions: int, device: torch.device | str = "cpu"):
        angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * inverse_frequencies(config, dim)
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * config.cos_sin_multiplier
        self.cos_sin = table.to(torch.float32).to(device)
        self.dim = dim
        self.num_positions = num_positions

    def rows(self, positions: torch.Tensor) -> torch.Tensor:
        """Table rows of `positions` (any shape, int64), float32 [..., dim]; positions outside the table raise on a CPU
        and are a device-side assertion on CUDA."""
        # Not plain indexing, which takes a negative position as one from the end.
        return torch.nn.functional.embedding(positions, self.cos_sin)
