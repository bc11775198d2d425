"""What is in front of a drafter's first attention: its latents and queries."""

from dataclasses import dataclass, replace

import torch

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
from dspark_model.ops.context_into import ContextInto, check_context, context_arguments, store_context
from dspark_model.ops.into_attention import (
    Absorption,
    LatentsInto,
    NormedBy,
    absorption_sizes,
    check_into,
    into_arguments,
    make_absorbed,
    store_latents,
)
from dspark_model.ops.low_m_linear import low_m_linear


@dataclass(frozen=True, slots=True)
class BeforeAttention:
    """Weights of a layer in front of its attention: qkv_a [Q + D, H], the rows of queries first, q_b [N, Q].  absorption:
    queries over latents are made too; latents: these go to the pool, which takes the absorption's cos_sin."""

    norm: NormedBy
    qkv_a: torch.Tensor
    q_norm: NormedBy
    q_b: torch.Tensor
    absorption: Absorption | None = None
    latents: LatentsInto | None = None


@dataclass(frozen=True, slots=True)
class BeforeOutput:
    """qkv_a [M, Q + D], queries [M, N] and absorbed [M, heads, D], None without an absorption, as in `BetweenOutput`;
    context_kv [M', L * D], None without a context."""

    qkv_a: torch.Tensor
    queries: torch.Tensor
    absorbed: torch.Tensor | None
    context_kv: torch.Tensor | None = None


def before_attention(
    hidden: torch.Tensor,
    before: BeforeAttention,
    *,
    backend: str = "torch",
    workspace: BetweenWorkspace | None = None,
    early: bool = False,
    context: ContextInto | None = None,
) -> BeforeOutput:
    """`between_attentions` in front of the first attention: only what `before` makes, of hidden [M, H].

    context: rows whose latents of all layers are made, and go to the pool, in the same launch; with an absorption, and of at
        most as many rows as hidden may have.  Its product has the bits of `context_kv`.
    early: of the backend `cute`: it is no cooperative launch, and begins where multiprocessors are free while the kernel before
        it on the stream still runs, if that one allows it, and reads weights; the attention behind it may begin beside it.
        Else as for `between_attentions`.

    Raises:
        ValueError, RuntimeError: as `between_attentions`.
    """
    sizes = _check(hidden, before, context)
    if backend == "cute":
        return _cute_before(hidden, before, sizes, workspace, early, context)
    if backend != "torch":
        raise ValueError(f"before_attention has no backend {backend}; choose torch or cute")
    made = project_rows(hidden, before)
    return made if context is None else replace(made, context_kv=store_context(context))


def project_rows(hidden: torch.Tensor, before: BeforeAttention) -> BeforeOutput:
    """The torch form."""
    qkv_a = low_m_linear(hidden, before.qkv_a, norm_weight=before.norm.weight, eps=before.norm.eps)
    q_a, kv = qkv_a.split((before.q_b.shape[1], qkv_a.shape[1] - before.q_b.shape[1]), -1)
    queries = low_m_linear(q_a, before.q_b, norm_weight=before.q_norm.weight, eps=before.q_norm.eps)
    if before.absorption is None:
        return BeforeOutput(qkv_a, queries, None)
    if before.latents is not None:
        store_latents(kv, before.absorption, before.latents)
    return BeforeOutput(qkv_a, queries, make_absorbed(queries, before.absorption))


def _check(hidden, before: BeforeAttention, context: ContextInto | None = None) -> BetweenSizes:
    """The sizes that are there.  Raises ValueError for tensors that do not fit together."""
    check_matrices("before_attention", {"hidden [M, H]": hidden, **front_matrices(before)})
    check_wanted("before_attention", front_wanted(before, hidden.shape[1]), hidden)
    check_front(before, hidden.shape[0])
    heads, layers = absorption_sizes(before.absorption), 0
    if context is not None:
        if before.absorption is None:
            raise ValueError("before_attention takes a context with an absorption, and there is none; give one")
        layers = len(context.layer_views)
        check_context(context, hidden.shape[1], before.qkv_a.shape[0] - before.q_b.shape[1], hidden)
    return BetweenSizes(hidden.shape[1], 0, 0, before.q_b.shape[1], before.qkv_a.shape[0], before.q_b.shape[0], heads, layers)


def check_front(before: BeforeAttention, rows: int) -> None:
    """Raises ValueError for an absorption, or latents, that do not fit what is in front of an attention."""
    check_into(
        before.absorption, before.latents, rows, before.q_b.shape[0], before.qkv_a.shape[0] - before.q_b.shape[1], before.q_b
    )


def front_matrices(before: BeforeAttention) -> dict:
    """Matrices in front of an attention, by name."""
    return {"qkv_a [Q + D, H]": before.qkv_a, "q_b [N, Q]": before.q_b}


def front_wanted(before: BeforeAttention, hidden: int) -> dict:
    """Tensors in front of an attention, by name, with the shapes that they have to have."""
    (queries, q_rank), outer = before.q_b.shape, before.qkv_a.shape[0]
    return {
        "the next layer's norm": (before.norm.weight, (hidden,)),
        "qkv_a": (before.qkv_a, (max(outer, q_rank), hidden)),
        "q_norm": (before.q_norm.weight, (q_rank,)),
        "q_b": (before.q_b, (queries, q_rank)),
    }


def _cute_before(
    hidden, before, sizes: BetweenSizes, workspace: BetweenWorkspace | None, early: bool, context: ContextInto | None
) -> BeforeOutput:
    device, form = hidden.device, Form(False, True, before.absorption is not None, context is not None)
    own = check_workspace("before_attention", workspace, device)
    sizes = replace(sizes, values=own.values, intermediate=own.intermediate)
    if not form.absorbed:
        sizes = replace(sizes, heads=own.heads)
    if not form.context:
        sizes = replace(sizes, layers=own.layers)
    counts = [hidden.shape[0]] if context is None else [hidden.shape[0], context.rows.shape[0]]
    for count in counts:
        check_launch("before_attention", count, hidden, own, sizes)

    from dspark_kernels.cute.between_attentions import launch

    def empty(width: int) -> torch.Tensor:
        return torch.empty(hidden.shape[0], width, dtype=hidden.dtype, device=device)

    weights, tensors, more = front_tensors(before, own, empty)
    kv = None
    if context is not None:
        kv = torch.empty(context.rows.shape[0], context.weight.shape[0], dtype=hidden.dtype, device=device)
        weights, tensors = weights | {"context": context.weight}, tensors | {"context": context.rows, "context_kv": kv}
        more["context"] = context_arguments(context)
    work = (workspace.words, workspace.squares, workspace.counters[form])
    facts = build_facts(own, max(counts), form, device, early=early, stored=before.latents is not None)
    eps = front_eps(before) | ({} if context is None else {"context": context.norm.eps})
    launch(facts, None, weights, {"residual": hidden, **tensors}, work, eps, **more)
    return BeforeOutput(tensors["qkv_a"], tensors["queries"], over_latents(tensors, own), kv)


def front_tensors(before: BeforeAttention, own: BetweenSizes, empty) -> tuple[dict, dict, dict]:
    """Weights and rows of a launch in front of an attention, by the kernel's names, and what more `launch` is to know
    of how they become what the attention takes; empty: makes rows of a width."""
    weights = {
        "input_norm": before.norm.weight, "qkv_a": before.qkv_a, "q_a_norm": before.q_norm.weight, "q_b": before.q_b
    }  # fmt: skip
    widths = {"scaled_hidden": own.hidden, "qkv_a": own.width, "scaled_q_a": own.q_rank, "queries": own.queries}
    if before.absorption is None:
        return weights, {name: empty(width) for name, width in widths.items()}, {}
    widths["absorbed"] = own.heads * (own.width - own.q_rank)
    if before.latents is not None:
        weights["latent_norm"] = before.latents.norm.weight
    rows = {name: empty(width) for name, width in widths.items()}
    return weights, rows, {"into": into_arguments(before.absorption, before.latents)}


def front_eps(before: BeforeAttention) -> dict[str, float]:
    """Of the norms in front of an attention, by the kernel's names."""
    latent = {} if before.latents is None else {"latent": before.latents.norm.eps}
    return {"attention": before.norm.eps, "q_a": before.q_norm.eps, **latent}


def over_latents(rows: dict, own: BetweenSizes) -> torch.Tensor | None:
    """Queries over latents [M, heads, D] among a launch's rows, if it makes them."""
    absorbed = rows.get("absorbed")
    return None if absorbed is None else absorbed.view(len(absorbed), own.heads, -1)
