"""Latents of context rows, of all layers at once, in the launches of `before_attention` and in front of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dspark_model.ops.between_workspace import BetweenWorkspace, Form, build_facts, check_launch, check_wanted, check_workspace
from dspark_model.ops.into_attention import NormedBy, latents_into_refusal
from dspark_model.ops.latent_norm_rope import latent_norm_rope
from dspark_model.ops.latent_store import PoolGeometry, latent_store
from dspark_model.ops.low_m_linear import low_m_linear
from dspark_model.ops.row_addresses import RowAddresses


@dataclass(frozen=True, slots=True)
class ContextInto:
    """Context rows whose latents go to the pool.

    rows: [M', H], `context_norm(context_proj(taps))`; weight: [L * D, H], the latent projections of all layers; norm: of [L, C]
    values; cos_sin: float32 [M', r], the rows' own; layer_views: L tensors [pages, page_size, D] with a `PoolGeometry`; where:
    addresses of M' rows, of any shape; rows that are not owned are skipped.
    """

    rows: torch.Tensor
    weight: torch.Tensor
    norm: NormedBy
    cos_sin: torch.Tensor
    layer_views: Sequence[torch.Tensor]
    where: RowAddresses


def context_kv(
    rows: torch.Tensor, weight: torch.Tensor, *, backend: str = "torch", workspace: BetweenWorkspace | None = None
) -> torch.Tensor:
    """rows @ weight.T, rounded once: of context rows [M', H] and weight [L * D, H] of all layers [M', L * D].

    backend: `torch`; or `cute`, with the bits that `before_attention` has for a context, for 1 to 32 rows of bfloat16 on
    Hopper.
    workspace: of the backend `cute`; a launch on another stream may use it meanwhile, if it is none of this op.

    Raises:
        ValueError, RuntimeError: as `between_attentions`.
    """
    if rows.ndim != 2 or weight.ndim != 2 or rows.shape[1] != weight.shape[1] or rows.dtype is not weight.dtype:
        raise ValueError(
            f"context_kv wants rows [M, H] and weight [L * D, H] of one dtype, got {[*rows.shape]} of {rows.dtype} and "
            f"{[*weight.shape]} of {weight.dtype}"
        )
    if backend == "cute":
        return _cute(rows, weight, workspace)
    if backend != "torch":
        raise ValueError(f"context_kv has no backend {backend}; choose torch or cute")
    return low_m_linear(rows, weight)


def _cute(rows, weight, workspace: BetweenWorkspace | None) -> torch.Tensor:
    own, form = check_workspace("context_kv", workspace, rows.device), Form(False, False, False, True)
    check_launch("context_kv", rows.shape[0], rows, own, own)
    if (rows.shape[1], weight.shape[0]) != (own.hidden, own.layers * (own.width - own.q_rank)):
        raise ValueError(
            f"context_kv: the BetweenWorkspace is for {own}, the weight is {[*weight.shape]}; make one with its layers"
        )

    from dspark_kernels.cute.between_attentions import launch

    kv = torch.empty(rows.shape[0], weight.shape[0], dtype=rows.dtype, device=rows.device)
    facts = build_facts(own, rows.shape[0], form, rows.device)
    work = (workspace.words, workspace.squares, workspace.counters[form])
    tensors = {"context": rows, "context_kv": kv}
    launch(facts, None, {"context": weight}, tensors, work, {}, context=(rows.shape[0],))
    return kv


def store_context(context: ContextInto) -> torch.Tensor:
    """The torch form of a context in `before_attention`; returns `context_kv`."""
    kv, layers = context_kv(context.rows, context.weight), len(context.layer_views)
    apart = kv.unflatten(-1, (layers, -1)).transpose(0, 1)
    latents = latent_norm_rope(apart, context.norm.weight, context.norm.eps, context.cos_sin)
    latent_store(context.layer_views, latents[:, None], context.where)
    return kv


def check_context(context: ContextInto, hidden: int, latent: int, like: torch.Tensor) -> None:
    """Raises ValueError for a context that does not fit; hidden: H, latent: D, like: rows of the drafter."""
    count, layers, where = context.rows.shape[0], len(context.layer_views), context.where
    rotary = context.cos_sin.shape[-1] if context.cos_sin.ndim else 0
    wanted = {
        "rows": (context.rows, (count, hidden)),
        "weight": (context.weight, (layers * latent, hidden)),
        "norm": (context.norm.weight, (layers, latent - rotary)),
        "cos_sin": (context.cos_sin, (count, rotary), torch.float32),
        "pages": (where.pages.reshape(-1), (count,), torch.int64),
        "offsets": (where.offsets.reshape(-1), (count,), torch.int64),
        "owned": (where.owned.reshape(-1), (count,), torch.bool),
    }
    wanted |= {f"layer_views[{i}]": (view, (*view.shape[:2], latent)) for i, view in enumerate(context.layer_views)}
    check_wanted("a context", wanted, like)


def context_arguments(context: ContextInto) -> tuple[int, ...]:
    """Addresses and numbers in the order of the kernel's `Context`.

    Raises:
        ValueError: the kernel cannot take where tensors lie.
    """
    refusal = context_into_refusal(context.layer_views)
    if refusal is not None:
        raise ValueError(f"a context by cute: {refusal}; choose torch")
    where = context.where
    tensors = (context.norm.weight, context.cos_sin, where.pages, where.offsets, where.owned)
    if not all(tensor.is_contiguous() for tensor in tensors) or any(tensor.data_ptr() % 16 for tensor in tensors[:2]):
        raise ValueError(
            "a context by cute wants norm, cos_sin and addresses contiguous, the first two at multiples of 16 bytes, got "
            f"strides {[tensor.stride() for tensor in tensors]}"
        )
    geometry, (norm, cos_sin, *places) = PoolGeometry.of(context.layer_views), tensors
    strides = (geometry.layer_stride, geometry.page_stride, geometry.row_stride)
    pool = context.layer_views[0].data_ptr()
    return (len(context.rows), norm.data_ptr(), cos_sin.data_ptr(), pool, *strides, *(t.data_ptr() for t in places))


def context_into_refusal(layer_views: Sequence[torch.Tensor]) -> str | None:
    """Why a launch cannot store latents of context rows to a pool's layers; None where it can, if these have the drafter's
    dtype."""
    for view in layer_views:
        if (reason := latents_into_refusal(view)) is not None:
            return reason
    try:
        PoolGeometry.of(layer_views)
    except ValueError as error:
        return str(error)
    return None
