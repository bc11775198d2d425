"""Sizes, weights and bounds for the tests of `between_attentions` and what belongs to it."""

from dataclasses import fields, replace

import torch
from torch.nn.functional import silu

from dspark_model.ops import (
    Absorption,
    AfterAttention,
    BeforeAttention,
    BetweenOutput,
    BetweenSizes,
    ContextInto,
    LatentsInto,
    NormedBy,
    RowAddresses,
)

K3 = BetweenSizes(hidden=7168, values=1024, intermediate=1792, q_rank=1536, width=2112, queries=1536)
# Fewer tiles than CTAs in every product; and CTAs with five tiles of one product and none of the next.
SMALL = BetweenSizes(hidden=128, values=128, intermediate=128, q_rank=128, width=192, queries=64)
WIDE = BetweenSizes(hidden=16384, values=1024, intermediate=128, q_rank=128, width=192, queries=64)  # CTAs with two tiles of o
UNEVEN = BetweenSizes(hidden=256, values=1152, intermediate=9216, q_rank=128, width=128 + 64, queries=17 * 64)
# With queries over latents: of K3; with fewer CTAs that store latents than rows; with latents of four warps; with CTAs that
# have several tiles of the heads' matrices.
ABSORBING = {
    "k3": replace(K3, heads=8, layers=5),
    "small": replace(SMALL, width=320, queries=192, heads=1, layers=1),
    "wide": BetweenSizes(256, 256, 128, 256, 256 + 1024 + 128, 2 * 256, heads=2, layers=3),
    "many": BetweenSizes(256, 128, 128, 128, 128 + 512 + 64, 40 * 192, heads=40, layers=2),
}
# So far apart that no bound holds with another one's.
EPS = {"mlp": 0.5, "attention": 0.125, "queries": 2.0, "latents": 0.25, "context": 0.0625}


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


def inputs(sizes: BetweenSizes, rows: int, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(rows, size).to(device, dtype) for size in (sizes.values, sizes.hidden))


def results(made: BetweenOutput) -> dict[str, torch.Tensor]:
    """Those that are there, by name."""
    return {field.name: result for field in fields(made) if (result := getattr(made, field.name)) is not None}


def check_product(name: str, x, norm: NormedBy | None, weight, up, added, result) -> None:
    """Within `low_m_linear`'s bound of float64."""
    unit = torch.finfo(x.dtype).eps / 2
    x, inner = x.double(), x.shape[1] * 2.0**-23
    if norm is not None:
        x = x / torch.sqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.double()
        inner += unit
    wanted, bound = x @ weight.double().T, inner * (x.abs() @ weight.double().abs().T)
    if up is not None:
        factor, factor_bound = x @ up.double().T, inner * (x.abs() @ up.double().abs().T)
        gate = silu(wanted)
        wanted, bound = gate * factor, 1.1 * bound * (factor.abs() + factor_bound) + gate.abs() * factor_bound
    bound += 1.01 * unit * wanted.abs()
    if added is not None:
        wanted = wanted + added.double()
        bound += 1.01 * unit * wanted.abs()
    distance = (result.double() - wanted).abs()
    assert (distance <= bound + 1e-12).all(), (name, float((distance / bound).max()))
    # A box left out of a long sum stays within the bound above, but not within what roundings make together.
    assert float(distance.norm() / wanted.norm()) < 2 * unit + 2.0**-20, name


def turns(rows: int, rotary: int, device) -> torch.Tensor:
    angles = torch.rand(rows, rotary // 2) * 6
    return torch.cat((angles.cos(), angles.sin()), -1).to(device)


def places(rows: int, page_size: int, device) -> RowAddresses:
    """One row of each page, and every fifth not owned."""
    pages, offsets = torch.randperm(rows + 2)[:rows], torch.randint(page_size, (rows,))
    return RowAddresses(pages.to(device), offsets.to(device), (torch.arange(rows) % 5 != 4).to(device))


def into_attention(sizes: BetweenSizes, before: BeforeAttention, rows: int, *, page_size: int = 32) -> BeforeAttention:
    """The same with queries over latents, and latents to a pool of NaN."""
    device, dtype, rotary = before.q_b.device, before.q_b.dtype, sizes.rotary
    latent = sizes.width - sizes.q_rank
    matrices = normal(sizes.heads * 256, latent - rotary, device, dtype).view(sizes.heads, 256, -1)[:, :128]
    norm = NormedBy((torch.rand(latent - rotary) + 0.5).to(device, dtype), EPS["latents"])
    pool = torch.full((rows + 2, 2, page_size, latent), float("nan"), dtype=dtype, device=device)[:, 1]
    absorption = Absorption(matrices, turns(rows, rotary, device))
    return replace(before, absorption=absorption, latents=LatentsInto(norm, pool, places(rows, page_size, device)))


def context_of(sizes: BetweenSizes, rows: int, device: str, dtype: torch.dtype, *, page_size: int = 16) -> ContextInto:
    """Context rows, and pools of NaN for them."""
    latent, layers = sizes.width - sizes.q_rank, sizes.layers
    norm = NormedBy((torch.rand(layers, latent - sizes.rotary) + 0.5).to(device, dtype), EPS["context"])
    pool = torch.full((rows + 2, layers, page_size, latent), float("nan"), dtype=dtype, device=device)
    return ContextInto(
        torch.randn(rows, sizes.hidden).to(device, dtype), normal(layers * latent, sizes.hidden, device, dtype), norm,
        turns(rows, sizes.rotary, device), pool.unbind(1), places(rows, page_size, device),
    )  # fmt: skip
