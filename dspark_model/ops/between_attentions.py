"""All products between the attentions of two layers: W_O, the MLP, and the next layer's latents and queries."""

from dataclasses import dataclass, replace

import torch

from dspark_model.ops.block_attention import AttentionParts
from dspark_model.ops.cute_device import cute_device_refusal
from dspark_model.ops.low_m_linear import low_m_linear

# With more rows the launches of `low_m` are as fast: with 28 a step at K3's shape took 695 us, and 702 with one launch between
# two attentions in a form for 32 rows, on an H200.
MAX_BETWEEN_ROWS = 16
MERGE_WORDS = 8 * 4 * MAX_BETWEEN_ROWS  # of a column: of 8 parts of the latents, 4 rows for each row that may be a block


@dataclass(frozen=True, slots=True)
class NormedBy:
    """RMSNorm's weight [K] and eps."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class AfterAttention:
    """Weights of a layer behind its attention: o [H, V], gate and up [I, H], down [H, I]."""

    o: torch.Tensor
    norm: NormedBy
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class BeforeAttention:
    """Weights of a layer in front of its attention: qkv_a [Q + D, H], the rows of queries first, q_b [N, Q]."""

    norm: NormedBy
    qkv_a: torch.Tensor
    q_norm: NormedBy
    q_b: torch.Tensor


@dataclass(frozen=True, slots=True)
class BetweenSizes:
    """Sizes of a drafter's layers.  values: V, width: Q + D, queries: N."""

    hidden: int
    values: int
    intermediate: int
    q_rank: int
    width: int
    queries: int


@dataclass(frozen=True, slots=True)
class BetweenOutput:
    """values [M, V], in front of W_O; h [M, H], behind it; gated [M, I], in front of W_down; hidden [M, H], behind the MLP;
    qkv_a [M, Q + D] and queries [M, N] of the next layer, None without one."""

    values: torch.Tensor
    h: torch.Tensor
    gated: torch.Tensor
    hidden: torch.Tensor
    qkv_a: torch.Tensor | None
    queries: torch.Tensor | None


class BetweenWorkspace:
    """Sums of squares and counters of `between_attentions` on one device, for one set of sizes and any number of rows.

    One launch uses it at a time: launches of one stream may share it, graph replays too; two streams must not.  It begins as
    zeros and is left to the kernel from then on.

    Raises:
        ValueError: `between_attentions_refusal` gives a reason.
    """

    def __init__(self, sizes: BetweenSizes, device: torch.device):
        reason = between_attentions_refusal(sizes, torch.bfloat16, device)
        if reason is not None:
            raise ValueError(f"between_attentions=cute: {reason}; choose torch, which needs no workspace")
        self.sizes = sizes
        facts = [_facts(sizes, MAX_BETWEEN_ROWS, following, device) for following in (False, True)]
        self.words = torch.zeros(MERGE_WORDS * sizes.values, dtype=torch.int64, device=device)
        self.squares = torch.zeros(max(f.num_squares for f in facts), dtype=torch.float32, device=device)
        self.counters = tuple(torch.zeros(f.num_counters, dtype=torch.int32, device=device) for f in facts)


def between_attentions_refusal(sizes: BetweenSizes, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why `between_attentions` with the backend `cute` does not take such a drafter; None where it does."""
    reason = cute_device_refusal("it", device, hopper_only=True)
    if reason is not None:
        return reason
    if dtype is not torch.bfloat16:
        return f"it takes bfloat16, got {dtype}"
    return _sizes_refusal(sizes)


def _sizes_refusal(sizes: BetweenSizes) -> str | None:
    steps = {"hidden": 128, "values": 128, "intermediate": 128, "q_rank": 128, "width": 64, "queries": 64}
    wrong = [
        f"{name}={size}, no positive multiple of {step}"
        for name, step in steps.items()
        if (size := getattr(sizes, name)) < 1 or size % step
    ]
    return f"it takes sizes in whole tiles, got {'; '.join(wrong)}" if wrong else None


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
    with the next layer's weights qkv_a = RMSNorm(hidden) @ qkv_a.T, queries = RMSNorm(qkv_a[:, :Q]) @ q_b.T.

    values: [M, V]; residual: [M, H]; M >= 1; weights as in `AfterAttention` and `BeforeAttention`; before: None behind the last
    layer.  Every product, with the norm in front and what follows, is `low_m_linear`'s, and so are the roundings.
    backend: `torch`; or `cute`, one launch for up to 16 rows of bfloat16 on Hopper, all tensors contiguous and at multiples of
    16 bytes.  Each of its products keeps `low_m_linear`'s bound for what it is given.  A row's bits depend on its own values,
    the sizes and the device's number of processors, on nothing else.
    workspace: of the backend `cute`.  All CTAs of the launch wait for one another: it is a cooperative launch of one on each
    multiprocessor, unless it is early.
    early: of the backend `cute`: the launch begins where multiprocessors are free while the kernel before it on the stream
        still runs, if that one allows it (programmatic dependent launch), and fetches weights until it has ended.  Only
        `values` may be what that kernel makes: `residual`, the weights and the workspace's launch before must have been
        complete when it began.  It is no cooperative launch, so meanwhile no other early one may run on the device, nor another
        kernel that waits for CTAs of its own without being a cooperative launch.

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
        return BetweenOutput(values, h, gated, hidden, None, None)
    qkv_a = low_m_linear(hidden, before.qkv_a, norm_weight=before.norm.weight, eps=before.norm.eps)
    q_a = qkv_a[:, : sizes.q_rank]
    queries = low_m_linear(q_a, before.q_b, norm_weight=before.q_norm.weight, eps=before.q_norm.eps)
    return BetweenOutput(values, h, gated, hidden, qkv_a, queries)


def _check(values, residual, after: AfterAttention, before: BeforeAttention | None) -> BetweenSizes:
    """The layers' sizes; of the next layer's those that are there.  Raises ValueError for tensors that do not fit together."""
    matrices = {"residual [M, H]": residual, "gate [I, H]": after.gate}
    if isinstance(values, torch.Tensor):
        matrices = {"values [M, V]": values, **matrices}
    if before is not None:
        matrices |= {"qkv_a [Q + D, H]": before.qkv_a, "q_b [N, Q]": before.q_b}
    for name, tensor in matrices.items():
        if tensor.ndim != 2:
            raise ValueError(f"between_attentions wants {name}, got {[*tensor.shape]}")
    (rows, width), hidden, inner = values.shape, residual.shape[1], after.gate.shape[0]
    wanted = {
        "residual": (residual, (rows, hidden)),
        "o": (after.o, (hidden, width)),
        "norm": (after.norm.weight, (hidden,)),
        "gate": (after.gate, (inner, hidden)),
        "up": (after.up, (inner, hidden)),
        "down": (after.down, (hidden, inner)),
    }
    q_rank = outer = queries = 0
    if before is not None:
        (queries, q_rank), outer = before.q_b.shape, before.qkv_a.shape[0]
        wanted |= {
            "the next layer's norm": (before.norm.weight, (hidden,)),
            "qkv_a": (before.qkv_a, (max(outer, q_rank), hidden)),
            "q_norm": (before.q_norm.weight, (q_rank,)),
            "q_b": (before.q_b, (queries, q_rank)),
        }
    for name, (tensor, shape) in wanted.items():
        if tensor.shape != shape or tensor.dtype is not values.dtype or tensor.device != values.device:
            raise ValueError(
                f"between_attentions wants {name} {[*shape]} of {values.dtype} on {values.device}, got {[*tensor.shape]} of "
                f"{tensor.dtype} on {tensor.device}"
            )
    return BetweenSizes(hidden, width, inner, q_rank, outer, queries)


def _facts(sizes: BetweenSizes, rows: int, following: bool, device: torch.device, *, early: bool = False, attention=None):
    from dspark_kernels.cute.between_attentions_schedule import LANES, Facts

    lanes = next(lanes for lanes in LANES if rows <= lanes)
    ctas = torch.cuda.get_device_properties(device).multi_processor_count
    return Facts(
        torch.bfloat16, lanes, sizes.hidden, sizes.values, sizes.intermediate, sizes.q_rank, sizes.width - sizes.q_rank,
        sizes.queries, following, ctas, early, attention,
    )  # fmt: skip


def _cute(
    values, residual, after, before, sizes: BetweenSizes, workspace: BetweenWorkspace | None, early: bool
) -> BetweenOutput:
    rows, device, following = values.shape[0], values.device, before is not None
    if workspace is None or workspace.squares.device != device:
        found = "none" if workspace is None else f"one on {workspace.squares.device}"
        raise ValueError(f"between_attentions=cute needs a BetweenWorkspace on {device}, got {found}")
    own = workspace.sizes
    if not following:  # then the weights do not say what a next layer has
        sizes = replace(sizes, q_rank=own.q_rank, width=own.width, queries=own.queries)
    if sizes != own:
        raise ValueError(f"between_attentions: the BetweenWorkspace is for {own}, these weights are {sizes}; make one for them")
    reason = between_attentions_refusal(own, values.dtype, device)
    if reason is None and not 1 <= rows <= MAX_BETWEEN_ROWS:
        reason = f"it takes 1 to {MAX_BETWEEN_ROWS} rows, got {rows}"
    if reason is not None:
        raise ValueError(f"between_attentions=cute: {reason}; choose torch")

    from dspark_kernels.cute.between_attentions import launch

    def empty(width: int) -> torch.Tensor:
        return torch.empty(rows, width, dtype=values.dtype, device=device)

    h, scaled_h, gated, hidden = empty(own.hidden), empty(own.hidden), empty(own.intermediate), empty(own.hidden)
    unmerged = values.unmerged if isinstance(values, AttentionParts) else None
    if unmerged is not None:
        values = empty(own.values)
    weights, epses = [after.o, after.norm.weight, after.gate, after.up, after.down], [after.norm.eps, 0.0, 0.0]
    tensors, qkv_a, queries = [values, residual, h, scaled_h, gated, hidden], None, None
    if following:
        qkv_a, queries = empty(own.width), empty(own.queries)
        weights += [before.norm.weight, before.qkv_a, before.q_norm.weight, before.q_b]
        tensors += [empty(own.hidden), qkv_a, empty(own.q_rank), queries]
        epses[1:] = [before.norm.eps, before.q_norm.eps]
    work = (workspace.words, workspace.squares, workspace.counters[following])
    facts = _facts(own, rows, following, device, early=early, attention=None if unmerged is None else unmerged.facts)
    launch(facts, unmerged, weights, tensors, work, epses)
    return BetweenOutput(values, h, gated, hidden, qkv_a, queries)
