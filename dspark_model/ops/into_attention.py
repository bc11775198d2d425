"""What an attention takes of the products in front of it: queries over latents, and latents in the pool."""

from dataclasses import dataclass

import torch

from dspark_model.ops.absorb_queries import absorb_queries
from dspark_model.ops.alignment import in_steps_of_16_bytes
from dspark_model.ops.between_workspace import NOPE
from dspark_model.ops.latent_norm_rope import latent_norm_rope
from dspark_model.ops.latent_store import latent_store
from dspark_model.ops.row_addresses import RowAddresses


@dataclass(frozen=True, slots=True)
class NormedBy:
    """RMSNorm's weight [K] and eps."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Absorption:
    """What makes queries over latents: keys [heads, nope, C], W_UK of each head, with N = heads * (nope + r) and D = C + r;
    cos_sin: float32 [M, r], the rows' own."""

    keys: torch.Tensor
    cos_sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class LatentsInto:
    """Where the rows' latents go: norm of C values; layer_view [pages, page_size, D], one layer of the pool; where: addresses
    of M rows, of any shape; rows that are not owned are skipped."""

    norm: NormedBy
    layer_view: torch.Tensor
    where: RowAddresses


def absorption_sizes(absorption: Absorption | None) -> int:
    """Heads of queries over latents that are made; 0 without any."""
    return 0 if absorption is None else absorption.keys.shape[0]


def make_absorbed(queries: torch.Tensor, absorption: Absorption) -> torch.Tensor:
    """The torch form: queries over latents [M, heads, D] of queries [M, N]."""
    keys, cos_sin = absorption.keys, absorption.cos_sin
    return absorb_queries(queries.view(1, len(queries), keys.shape[0], -1), keys, cos_sin[None])[0]


def store_latents(kv: torch.Tensor, absorption: Absorption, into: LatentsInto) -> None:
    """The torch form: latents of rows kv [M, D] to the pool."""
    latents = latent_norm_rope(kv[None], into.norm.weight[None], into.norm.eps, absorption.cos_sin)
    latent_store((into.layer_view,), latents[:, None], into.where)


def check_into(
    absorption: Absorption | None, into: LatentsInto | None, rows: int, queries: int, latent: int, like: torch.Tensor
) -> None:
    """Raises ValueError for what does not fit; queries: N, latent: D, like: the weights' dtype and device."""
    if absorption is None:
        if into is not None:
            raise ValueError("latents go to the pool with an absorption's cos_sin, and there is no absorption; give one")
        return
    keys, cos_sin = absorption.keys, absorption.cos_sin
    rotary = cos_sin.shape[-1] if cos_sin.ndim else 0
    wanted = f"keys [heads, nope, {latent - rotary}] of {like.dtype} with heads * (nope + {rotary}) = {queries}"
    fits = keys.ndim == 3 and keys.shape[2] == latent - rotary and keys.shape[0] * (keys.shape[1] + rotary) == queries
    if not fits or keys.dtype is not like.dtype or keys.device != like.device:
        raise ValueError(f"an absorption wants {wanted}, got {[*keys.shape]} of {keys.dtype} on {keys.device}")
    if cos_sin.shape != (rows, rotary) or cos_sin.dtype is not torch.float32 or cos_sin.device != like.device:
        raise ValueError(
            f"an absorption wants cos_sin [{rows}, r] of torch.float32 on {like.device}, got {[*cos_sin.shape]} of "
            f"{cos_sin.dtype} on {cos_sin.device}"
        )
    if into is not None:
        _check_latents(into, rows, latent, latent - rotary, like)


def _check_latents(into: LatentsInto, rows: int, latent: int, normed: int, like: torch.Tensor) -> None:
    weight, view, where = into.norm.weight, into.layer_view, into.where
    if weight.shape != (normed,) or weight.dtype is not like.dtype or weight.device != like.device:
        raise ValueError(
            f"latents want a norm [{normed}] of {like.dtype} on {like.device}, got {[*weight.shape]} of {weight.dtype} on "
            f"{weight.device}"
        )
    if view.ndim != 3 or view.shape[2] != latent or view.dtype is not like.dtype or view.device != like.device:
        raise ValueError(
            f"latents want a layer_view [pages, page_size, {latent}] of {like.dtype} on {like.device}, got {[*view.shape]} of "
            f"{view.dtype} on {view.device}"
        )
    kinds = ((where.pages, torch.int64), (where.offsets, torch.int64), (where.owned, torch.bool))
    if any(tensor.numel() != rows or tensor.dtype is not kind or tensor.device != like.device for tensor, kind in kinds):
        raise ValueError(
            f"latents want int64 pages and offsets and bool owned of {rows} rows on {like.device}, got "
            f"{[(*tensor.shape, tensor.dtype, tensor.device) for tensor, _ in kinds]}"
        )


def into_arguments(absorption: Absorption, into: LatentsInto | None) -> tuple[int, ...]:
    """Addresses and strides in the order of the kernel's `Into`, those of the absorption first.

    Raises:
        ValueError: the kernel cannot take where tensors lie.
    """
    keys, cos_sin = absorption.keys, absorption.cos_sin
    if keys.shape[1] != NOPE:
        raise ValueError(
            f"an absorption by cute wants heads of {NOPE} values that are not turned, got {keys.shape[1]}; choose torch"
        )
    if keys.stride()[1:] != (keys.shape[2], 1) or not in_steps_of_16_bytes(keys):
        raise ValueError(
            "an absorption by cute wants each head's keys contiguous and at a multiple of 16 bytes, got strides "
            f"{keys.stride()}"
        )
    if not cos_sin.is_contiguous() or cos_sin.data_ptr() % 16:
        raise ValueError(
            f"an absorption by cute wants cos_sin contiguous and at a multiple of 16 bytes, got strides {cos_sin.stride()}"
        )
    head = (keys.data_ptr(), keys.stride(0), cos_sin.data_ptr())
    if into is None:
        return head
    view, where = into.layer_view, into.where
    places = (where.pages, where.offsets, where.owned)
    if latents_into_refusal(view) is not None or not all(tensor.is_contiguous() for tensor in places):
        raise ValueError(
            f"latents by cute want rows of the pool at multiples of 16 bytes and contiguous addresses, got {view.stride()} and "
            f"{[tensor.stride() for tensor in places]}"
        )
    return (*head, view.data_ptr(), *view.stride()[:2], *(tensor.data_ptr() for tensor in places))


def latents_into_refusal(layer_view: torch.Tensor) -> str | None:
    """Why a launch cannot store latents to a pool's layer; None where it can, if that has the drafter's dtype."""
    if layer_view.stride(2) != 1 or not in_steps_of_16_bytes(layer_view):
        return f"rows of the pool do not lie at multiples of 16 bytes, by strides {layer_view.stride()}"
    return None
