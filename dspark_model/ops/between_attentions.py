"""All products between the attentions of two layers: W_O, the MLP, and the next layer's latents and queries."""

from dataclasses import dataclass, replace

import torch

from dspark_model.ops.block_attention import AttentionParts
from dspark_model.ops.cute_device import cute_device_refusal
from dspark_model.ops.low_m_linear import low_m_linear

# With more rows the launches of `low_m` are as fast: with 28 a step at K3's shape took 695 us, and 702 with one launch between
# two attentions in a form for 32 rows, on an H200.
MAX_BETWEEN_ROWS = 16
# Of a launch: whether the products behind an attention are made, and those in front of the next one.
FORMS = ((True, False), (True, True), (False, True))
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
    """Words, sums of squares and counters of `between_attentions` and `before_attention` on one device, for one set of sizes.

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
        facts = [_facts(sizes, MAX_BETWEEN_ROWS, *form, device) for form in FORMS]
        self.words = torch.zeros(MERGE_WORDS * sizes.values, dtype=torch.int64, device=device)
        self.squares = torch.zeros(max(f.num_squares for f in facts), dtype=torch.float32, device=device)
        self.counters = {
            form: torch.zeros(f.num_counters, dtype=torch.int32, device=device) for form, f in zip(FORMS, facts, strict=True)
        }


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

    values: [M, V], or the backend `cute`'s `AttentionParts` of them, which it merges first, to the bits of `block_attention`
    with value_weights; residual: [M, H]; M >= 1; weights as in `AfterAttention` and `BeforeAttention`; before: None behind the
    last layer.  Every product, with the norm in front and what follows, is `low_m_linear`'s, and so are the roundings.
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
    front = _torch_before(hidden, before)
    return BetweenOutput(values, h, gated, hidden, front.qkv_a, front.queries)


def _check(values, residual, after: AfterAttention, before: BeforeAttention | None) -> BetweenSizes:
    """The layers' sizes; of the next layer's those that are there.  Raises ValueError for tensors that do not fit together."""
    matrices = {"residual [M, H]": residual, "gate [I, H]": after.gate}
    if isinstance(values, torch.Tensor):
        matrices = {"values [M, V]": values, **matrices}
    if before is not None:
        matrices |= _front_matrices(before)
    _check_matrices(matrices)
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
        wanted |= _front_wanted(before, hidden)
        (queries, q_rank), outer = before.q_b.shape, before.qkv_a.shape[0]
    _check_wanted(wanted, values)
    return BetweenSizes(hidden, width, inner, q_rank, outer, queries)


def _check_before(hidden, before: BeforeAttention) -> BetweenSizes:
    """The sizes that are there.  Raises ValueError for tensors that do not fit together."""
    _check_matrices({"hidden [M, H]": hidden, **_front_matrices(before)})
    _check_wanted(_front_wanted(before, hidden.shape[1]), hidden)
    return BetweenSizes(hidden.shape[1], 0, 0, before.q_b.shape[1], before.qkv_a.shape[0], before.q_b.shape[0])


def _front_matrices(before: BeforeAttention) -> dict:
    return {"qkv_a [Q + D, H]": before.qkv_a, "q_b [N, Q]": before.q_b}


def _front_wanted(before: BeforeAttention, hidden: int) -> dict:
    """Tensors in front of an attention, by name, with the shapes that they have to have."""
    (queries, q_rank), outer = before.q_b.shape, before.qkv_a.shape[0]
    return {
        "the next layer's norm": (before.norm.weight, (hidden,)),
        "qkv_a": (before.qkv_a, (max(outer, q_rank), hidden)),
        "q_norm": (before.q_norm.weight, (q_rank,)),
        "q_b": (before.q_b, (queries, q_rank)),
    }


def _check_matrices(matrices: dict) -> None:
    for name, tensor in matrices.items():
        if tensor.ndim != 2:
            raise ValueError(f"between_attentions wants {name}, got {[*tensor.shape]}")


def _check_wanted(wanted: dict, like) -> None:
    """Raises ValueError for tensors that have another shape than they should, or another dtype or device than `like`."""
    for name, (tensor, shape) in wanted.items():
        if tensor.shape != shape or tensor.dtype is not like.dtype or tensor.device != like.device:
            raise ValueError(
                f"between_attentions wants {name} {[*shape]} of {like.dtype} on {like.device}, got {[*tensor.shape]} of "
                f"{tensor.dtype} on {tensor.device}"
            )


def _facts(
    sizes: BetweenSizes, rows: int, behind: bool, following: bool, device: torch.device, *, early: bool = False, attention=None
):  # fmt: skip
    from dspark_kernels.cute.between_attentions_schedule import LANES, Facts

    lanes = next(lanes for lanes in LANES if rows <= lanes)
    ctas = torch.cuda.get_device_properties(device).multi_processor_count
    return Facts(
        torch.bfloat16, lanes, sizes.hidden, sizes.values, sizes.intermediate, sizes.q_rank, sizes.width - sizes.q_rank,
        sizes.queries, following, ctas, early, attention, behind,
    )  # fmt: skip


def _check_cute(rows: int, given, own: BetweenSizes, sizes: BetweenSizes) -> None:
    """Raises ValueError for what `cute` does not take; given: rows [M, ...]; own, sizes: of workspace and weights."""
    if sizes != own:
        raise ValueError(f"between_attentions: the BetweenWorkspace is for {own}, these weights are {sizes}; make one for them")
    reason = between_attentions_refusal(own, given.dtype, given.device)
    if reason is None and not 1 <= rows <= MAX_BETWEEN_ROWS:
        reason = f"it takes 1 to {MAX_BETWEEN_ROWS} rows, got {rows}"
    if reason is not None:
        raise ValueError(f"between_attentions=cute: {reason}; choose torch")


def _check_workspace(workspace: BetweenWorkspace | None, device: torch.device) -> BetweenSizes:
    """The sizes of the workspace.  Raises ValueError where there is none on the device."""
    if workspace is None or workspace.squares.device != device:
        found = "none" if workspace is None else f"one on {workspace.squares.device}"
        raise ValueError(f"between_attentions=cute needs a BetweenWorkspace on {device}, got {found}")
    return workspace.sizes


def _cute(
    values, residual, after, before, sizes: BetweenSizes, workspace: BetweenWorkspace | None, early: bool
) -> BetweenOutput:
    rows, device, form = values.shape[0], values.device, (True, before is not None)
    own = _check_workspace(workspace, device)
    if before is None:  # then the weights do not say what a next layer has
        sizes = replace(sizes, q_rank=own.q_rank, width=own.width, queries=own.queries)
    _check_cute(rows, values, own, sizes)

    from dspark_kernels.cute.between_attentions import launch

    def empty(width: int) -> torch.Tensor:
        return torch.empty(rows, width, dtype=residual.dtype, device=device)

    h, scaled_h, gated, hidden = empty(own.hidden), empty(own.hidden), empty(own.intermediate), empty(own.hidden)
    unmerged = values.unmerged if isinstance(values, AttentionParts) else None
    if unmerged is not None:
        values = empty(own.values)
    weights, eps_mlp = [after.o, after.norm.weight, after.gate, after.up, after.down], after.norm.eps
    front_weights, front_rows, front_eps = _in_front(before, own, empty)
    facts = _facts(own, rows, *form, device, early=early, attention=None if unmerged is None else unmerged.facts)
    tensors = [values, residual, h, scaled_h, gated, hidden, *front_rows]
    work = (workspace.words, workspace.squares, workspace.counters[form])
    launch(facts, unmerged, weights + front_weights, tensors, work, (eps_mlp, *front_eps))
    return BetweenOutput(values, h, gated, hidden, front_rows[1], front_rows[3])


def _in_front(before: BeforeAttention | None, own: BetweenSizes, empty):
    """What a launch needs in front of an attention: weights, rows (qkv_a the second, queries the last), eps."""
    if before is None:
        return [None] * 4, [None] * 4, (0.0, 0.0)
    weights = [before.norm.weight, before.qkv_a, before.q_norm.weight, before.q_b]
    rows = [empty(width) for width in (own.hidden, own.width, own.q_rank, own.queries)]
    return weights, rows, (before.norm.eps, before.q_norm.eps)


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
    sizes = _check_before(hidden, before)
    if backend == "cute":
        return _cute_before(hidden, before, sizes, workspace)
    if backend != "torch":
        raise ValueError(f"before_attention has no backend {backend}; choose torch or cute")
    return _torch_before(hidden, before)


def _torch_before(hidden: torch.Tensor, before: BeforeAttention) -> BeforeOutput:
    qkv_a = low_m_linear(hidden, before.qkv_a, norm_weight=before.norm.weight, eps=before.norm.eps)
    q_a = qkv_a[:, : before.q_b.shape[1]]
    return BeforeOutput(qkv_a, low_m_linear(q_a, before.q_b, norm_weight=before.q_norm.weight, eps=before.q_norm.eps))


def _cute_before(hidden, before, sizes: BetweenSizes, workspace: BetweenWorkspace | None) -> BeforeOutput:
    rows, device, form = hidden.shape[0], hidden.device, (False, True)
    own = _check_workspace(workspace, device)
    _check_cute(rows, hidden, own, replace(sizes, values=own.values, intermediate=own.intermediate))

    from dspark_kernels.cute.between_attentions import launch

    def empty(width: int) -> torch.Tensor:
        return torch.empty(rows, width, dtype=hidden.dtype, device=device)

    weights, tensors, eps = _in_front(before, own, empty)
    work = (workspace.words, workspace.squares, workspace.counters[form])
    facts = _facts(own, rows, *form, device)
    launch(facts, None, [None] * 5 + weights, [None, hidden, *[None] * 4, *tensors], work, (0.0, *eps))
    return BeforeOutput(tensors[1], tensors[3])
