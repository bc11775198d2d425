"""The products in front of a drafter's first attention: its latents and queries."""

from dataclasses import dataclass, replace

import torch

from dspark_model.ops.between_workspace import BetweenSizes, BetweenWorkspace, build_facts, check_launch, check_workspace
from dspark_model.ops.low_m_linear import low_m_linear


@dataclass(frozen=True, slots=True)
class NormedBy:
    """RMSNorm's weight [K] and eps."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class BeforeAttention:
    """Weights of a layer in front of its attention: qkv_a [Q + D, H], the rows of queries first, q_b [N, Q]."""

    norm: NormedBy
    qkv_a: torch.Tensor
    q_norm: NormedBy
    q_b: torch.Tensor


@dataclass(frozen=True, slots=True)
class BeforeOutput:
    """qkv_a [M, Q + D] and queries [M, N], as in `BetweenOutput`."""

    qkv_a: torch.Tensor
    queries: torch.Tensor


def before_attention(
    hidden: torch.Tensor,
    before: BeforeAttention,
    *,
    backend: str = "torch",
    workspace: BetweenWorkspace | None = None,
) -> BeforeOutput:
    """`between_attentions` in front of the first attention: only qkv_a and queries, of hidden [M, H].

    Raises:
        ValueError, RuntimeError: as `between_attentions`.
    """
    sizes = _check(hidden, before)
    if backend == "cute":
        return _cute_before(hidden, before, sizes, workspace)
    if backend != "torch":
        raise ValueError(f"before_attention has no backend {backend}; choose torch or cute")
    return project_rows(hidden, before)


def project_rows(hidden: torch.Tensor, before: BeforeAttention) -> BeforeOutput:
    """The torch form."""
    qkv_a = low_m_linear(hidden, before.qkv_a, norm_weight=before.norm.weight, eps=before.norm.eps)
    q_a = qkv_a[:, : before.q_b.shape[1]]
    return BeforeOutput(qkv_a, low_m_linear(q_a, before.q_b, norm_weight=before.q_norm.weight, eps=before.q_norm.eps))


def _check(hidden, before: BeforeAttention) -> BetweenSizes:
    """The sizes that are there.  Raises ValueError for tensors that do not fit together."""
    check_matrices({"hidden [M, H]": hidden, **front_matrices(before)})
    check_wanted(front_wanted(before, hidden.shape[1]), hidden)
    return BetweenSizes(hidden.shape[1], 0, 0, before.q_b.shape[1], before.qkv_a.shape[0], before.q_b.shape[0])


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


def check_matrices(matrices: dict) -> None:
    """Raises ValueError for tensors that are no matrices."""
    for name, tensor in matrices.items():
        if tensor.ndim != 2:
            raise ValueError(f"between_attentions wants {name}, got {[*tensor.shape]}")


def check_wanted(wanted: dict, like) -> None:
    """Raises ValueError for tensors that have another shape than they should, or another dtype or device than `like`."""
    for name, (tensor, shape) in wanted.items():
        if tensor.shape != shape or tensor.dtype is not like.dtype or tensor.device != like.device:
            raise ValueError(
                f"between_attentions wants {name} {[*shape]} of {like.dtype} on {like.device}, got {[*tensor.shape]} of "
                f"{tensor.dtype} on {tensor.device}"
            )


def _cute_before(hidden, before, sizes: BetweenSizes, workspace: BetweenWorkspace | None) -> BeforeOutput:
    rows, device, form = hidden.shape[0], hidden.device, (False, True)
    own = check_workspace(workspace, device)
    check_launch(rows, hidden, own, replace(sizes, values=own.values, intermediate=own.intermediate))

    from dspark_kernels.cute.between_attentions import launch

    def empty(width: int) -> torch.Tensor:
        return torch.empty(rows, width, dtype=hidden.dtype, device=device)

    weights, tensors = front_tensors(before, own, empty)
    work = (workspace.words, workspace.squares, workspace.counters[form])
    facts = build_facts(own, rows, *form, device)
    launch(facts, None, weights, {"residual": hidden, **tensors}, work, (0.0, before.norm.eps, before.q_norm.eps))
    return BeforeOutput(tensors["qkv_a"], tensors["queries"])


def front_tensors(before: BeforeAttention, own: BetweenSizes, empty) -> tuple[dict, dict]:
    """Weights and rows of a launch in front of an attention, by the kernel's names; empty: makes rows of a width."""
    weights = {
        "input_norm": before.norm.weight, "qkv_a": before.qkv_a, "q_a_norm": before.q_norm.weight, "q_b": before.q_b
    }  # fmt: skip
    widths = {"scaled_hidden": own.hidden, "qkv_a": own.width, "scaled_q_a": own.q_rank, "queries": own.queries}
    return weights, {name: empty(width) for name, width in widths.items()}
