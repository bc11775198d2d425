"""How a request's tokens are drawn, and its own stream of random numbers."""

from dataclasses import dataclass
from enum import IntEnum

import torch


class DrawKind(IntEnum):
    """What a draw is for; keeps the draws of one request and position apart."""

    ACCEPT = 0
    DRAFT = 1
    FIRST_DRAFT = 2
    TARGET = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """temperature: 0 is greedy.  seed: the draws of a request depend on it and on the position, on nothing else."""

    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self):
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}, wanted a finite number of at least 0")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ValueError(f"seed is {self.seed!r}, wanted a whole number")

    def uniforms(self, position: int, kind: DrawKind, count: int) -> torch.Tensor:
        """float32 [count] in [0, 1) on the CPU, the same for the same seed, position and kind."""
        # Odd multipliers spread the three numbers over the generator's 64-bit seed.
        mixed = (self.seed * 0x9E3779B97F4A7C15 + position * 0xC2B2AE3D27D4EB4F + kind) % (1 << 63)
        return torch.rand(count, generator=torch.Generator().manual_seed(mixed))


GREEDY = SamplingParams()
