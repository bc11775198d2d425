"""Weights of layers for the tests of `between_attentions`."""

import torch

from dspark_model.ops import AfterAttention, BeforeAttention, BetweenSizes, NormedBy

EPS = {"mlp": 0.5, "attention": 0.125, "queries": 2.0}  # so far apart that no bound holds with another one's


def normal(rows: int, depth: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(rows, depth) * depth**-0.5).to(device, dtype)


def layers(sizes: BetweenSizes, device: str, dtype: torch.dtype) -> tuple[AfterAttention, BeforeAttention]:
    def norm(size, place):
        return NormedBy((torch.rand(size) + 0.5).to(device, dtype), EPS[place])

    def weight(rows, depth):
        return normal(rows, depth, device, dtype)

    s = sizes
    gate, up = weight(s.intermediate, s.hidden), weight(s.intermediate, s.hidden)
    after = AfterAttention(weight(s.hidden, s.values), norm(s.hidden, "mlp"), gate, up, weight(s.hidden, s.intermediate))
    qkv_a, q_b = weight(s.width, s.hidden), weight(s.queries, s.q_rank)
    return after, BeforeAttention(norm(s.hidden, "attention"), qkv_a, norm(s.q_rank, "queries"), q_b)
