"""How a request's tokens are drawn, and its own stream of random numbers."""

import random
from dataclasses import dataclass
from enum import IntEnum

import torch


class DrawKind(IntEnum):
    """What a draw is for; keeps the draws of one request and position apart."""

    ACCEPT = 0
    DRAFT = 1
    FIRST_DRAFT = 2
    TARGET = 3


# Below it a draw is the arg max for all that matters, and logits / temperature may leave float32's range.
MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """temperature: 0 is greedy, otherwise at least MIN_TEMPERATURE.

    seed: the draws of a request depend on it and on the position, on nothing else.
    """

    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self):
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature is {self.temperature}, wanted 0 (greedy) or a finite number of at least {MIN_TEMPERATURE}"
            )
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ValueError(f"seed is {self.seed!r}, wanted a whole number")

    def uniforms(self, position: int, kind: DrawKind, count: int) -> torch.Tensor:
        """float32 [count] in [0, 1) on the CPU, the same for the same seed, position and kind."""
        # A text seed is hashed whole; torch's CPU generator would keep 32 bits of a number and repeat itself.
        source = random.Random(f"{self.seed} {position} {int(kind)}")
        return torch.tensor([source.getrandbits(24) / (1 << 24) for _ in range(count)], dtype=torch.float32)


GREEDY = SamplingParams()
