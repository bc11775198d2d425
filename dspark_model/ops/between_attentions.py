"""All products between the attentions of two layers: W_O, the MLP, and the next layer's latents and queries."""

from dataclasses import dataclass, replace

import torch

from dspark_model.ops.before_attention import (
    BeforeAttention,
    check_front,
    front_eps,
    front_matrices,
    front_tensors,
    front_wanted,
    over_latents,
    project_rows,
)
from dspark_model.ops.between_workspace import (
    BetweenSizes,
    BetweenWorkspace,
    Form,
    build_facts,
    check_launch,
    check_matrices,
    check_wanted,
    check_workspace,
)
from dspark_model.ops.block_attention import AttentionParts
from dspark_model.ops.into_attention import NormedBy, absorption_sizes
from dspark_model.ops.low_m_linear import low_m_linear


@dataclass(frozen=True, slots=True)
class AfterAttention:
    """Weights of a layer behind its attention: o [H, V], gate and up [I, H], down [H, I]."""

    o: torch.Tensor
    norm: NormedBy
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class BetweenOutput:
    """values [M, V], in front of W_O; h [M, H], behind it; gated [M, I], in front of W_down; hidden [M, H], behind the MLP;
    qkv_a [M, Q + D] and queries [M, N] of the next layer, None without one; absorbed [M, heads, D]: these over latents, None
    without an absorption."""

    values: torch.Tensor
    h: torch.Tensor
    gated: torch.Tensor
    hidden: torch.Tensor
    qkv_a: torch.Tensor | None
    queries: torch.Tensor | None
    absorbed: torch.Tensor | None


def between_attentions(
    values: torch.Tensor | AttentionParts,
    residual: torch.Tensor,
    after: AfterAttention,
    before: BeforeAttention | None,
    *,
    backend: str = "torch",
    workspace: BetweenWorkspace | None = None,
    early: bool = False,
) -> BetweenOutput:
    """h = residual + values @ o.T; gated = silu(z @ gate.T) * (z @ up.T) with z = RMSNorm(h); hidden = h + gated @ down.T; and
    with the next layer's weights qkv_a = RMSNorm(hidden) @ qkv_a.T, queries = RMSNorm(qkv_a[:, :Q]) @ q_b.T; with an absorption
    `absorb_queries` of these; and `latent_norm_rope` of qkv_a[:, Q:] to the pool, where latents are to go there.

    values: [M, V], or the backend `cute`'s `AttentionParts` of them, which it merges first, to the bits of `block_attention`
    with value_weights; residual: [M, H]; M >= 1; weights as in `AfterAttention` and `BeforeAttention`; before: None behind the
    last layer.  Every product, with the norm in front and what follows, is `low_m_linear`'s, and so are the roundings.
    backend: `torch`; or `cute`, one launch for up to 32 rows of bfloat16 on Hopper, all tensors contiguous and at multiples of
    16 bytes.  Each of its products keeps `low_m_linear`'s bound for what it is given, and an absorption that of
    `per_head_product`; latents have the bits of `latent_norm_rope`'s backend `cute`.  A row's bits depend on its own values,
    the sizes and the device's number of processors, on nothing else.
    workspace: of the backend `cute`.  All CTAs of the launch wait for one another: it is a cooperative launch of one on each
    multiprocessor, unless it is early.
    early: of the backend `cute`: the launch begins where multiprocessors are free while the kernel before it on the stream
        still runs, if that one allows it (programmatic dependent launch), and fetches weights until it has ended.  The weights,
        and the lengths of an `AttentionParts`, must have been complete when that kernel let this one begin; all else may be
        what it makes or waits for.  When it gets to its last product it lets the kernel behind it begin.  It is no cooperative
        launch, so meanwhile no early one of another stream may run on the device, nor another kernel that waits for CTAs of
        its own without being a cooperative launch.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other; or `cute`, and `between_attentions_refusal` gives a reason,
            there are more rows than it takes, a tensor has other strides, or the workspace is missing, for other sizes or on
            another device.
        RuntimeError: `cute` would be compiled while the stream is being captured.
    """
    sizes = _check(values, residual, after, before)
    if backend == "cute":
        return _cute(values, residual, after, before, sizes, workspace, early)
    if backend != "torch":
        raise ValueError(f"between_attentions has no backend {backend}; choose torch or cute")
    if isinstance(values, AttentionParts):
        raise ValueError(
            "between_attentions=torch takes values, got AttentionParts; choose cute, or call block_attention for them"
        )
    h = low_m_linear(values, after.o, residual=residual)
    gated = low_m_linear(h, after.gate, up_weight=after.up, norm_weight=after.norm.weight, eps=after.norm.eps)
    hidden = low_m_linear(gated, after.down, residual=h)
    if before is None:
        return BetweenOutput(values, h, gated, hidden, None, None, None)
    front = project_rows(hidden, before)
    return BetweenOutput(values, h, gated, hidden, front.qkv_a, front.queries, front.absorbed)


def _check(values, residual, after: AfterAttention, before: BeforeAttention | None) -> BetweenSizes:
    """The layers' sizes; of the next layer's those that are there.  Raises ValueError for tensors that do not fit together."""
    matrices = {"residual [M, H]": residual, "gate [I, H]": after.gate}
    if isinstance(values, torch.Tensor):
        matrices = {"values [M, V]": values, **matrices}
    if before is not None:
        matrices |= front_matrices(before)
    check_matrices("between_attentions", matrices)
    (rows, width), hidden, inner = values.shape, residual.shape[1], after.gate.shape[0]
    wanted = {
        "residual": (residual, (rows, hidden)),
        "o": (after.o, (hidden, width)),
        "norm": (after.norm.weight, (hidden,)),
        "gate": (after.gate, (inner, hidden)),
        "up": (after.up, (inner, hidden)),
        "down": (after.down, (hidden, inner)),
    }
    q_rank = outer = queries = heads = 0
    if before is not None:
        wanted |= front_wanted(before, hidden)
        (queries, q_rank), outer, heads = before.q_b.shape, before.qkv_a.shape[0], absorption_sizes(before.absorption)
    check_wanted("between_attentions", wanted, values)
    if before is not None:
        check_front(before, rows)
    return BetweenSizes(hidden, width, inner, q_rank, outer, queries, heads)


def _cute(
    values, residual, after, before, sizes: BetweenSizes, workspace: BetweenWorkspace | None, early: bool
) -> BetweenOutput:
    rows, device, absorbed = values.shape[0], values.device, before is not None and before.absorption is not None
    own = check_workspace("between_attentions", workspace, device)
    if before is None:  # then the weights do not say what a next layer has
        sizes = replace(sizes, q_rank=own.q_rank, width=own.width, queries=own.queries)
    sizes = replace(sizes, layers=own.layers, heads=sizes.heads if absorbed else own.heads)
    check_launch("between_attentions", rows, values, own, sizes)

    from dspark_kernels.cute.between_attentions import launch

    def empty(width: int) -> torch.Tensor:
        return torch.empty(rows, width, dtype=residual.dtype, device=device)

    h, scaled_h, gated, hidden = empty(own.hidden), empty(own.hidden), empty(own.intermediate), empty(own.hidden)
    unmerged = values.unmerged if isinstance(values, AttentionParts) else None
    if unmerged is not None:
        values = empty(own.values)
    weights = {
        "o": after.o, "post_norm": after.norm.weight, "gate": after.gate, "up": after.up, "down": after.down
    }  # fmt: skip
    tensors = {
        "values": values, "residual": residual, "h": h, "scaled_h": scaled_h, "gated": gated, "hidden": hidden
    }  # fmt: skip
    eps, front, more = {"mlp": after.norm.eps}, {}, {}
    if before is not None:
        front_weights, front, more = front_tensors(before, own, empty)
        weights, tensors, eps = weights | front_weights, tensors | front, eps | front_eps(before)
    form, attention = Form(True, before is not None, absorbed), None if unmerged is None else unmerged.merged_facts
    stored = before is not None and before.latents is not None
    facts = build_facts(own, rows, form, device, early=early, attention=attention, stored=stored)
    launch(facts, unmerged, weights, tensors, (workspace.words, workspace.squares, workspace.counters[form]), eps, **more)
    return BetweenOutput(values, h, gated, hidden, front.get("qkv_a"), front.get("queries"), over_latents(front, own))
