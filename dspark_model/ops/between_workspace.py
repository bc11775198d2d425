"""What the launches between the attentions of a drafter share on a device: sizes, limits, and a workspace."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from dspark_model.ops.cute_device import cute_device_refusal

# With 28 a step at K3's shape takes 568 us so, 640 by the launches of `low_m`, on an H200.
MAX_BETWEEN_ROWS = 32


class Form(NamedTuple):
    """Of a launch: whether the products behind an attention are made, those in front of the next one, queries over latents, and
    the products of context rows."""

    behind: bool
    following: bool
    absorbed: bool = False
    context: bool = False


FORMS = (
    Form(True, False), Form(True, True), Form(False, True), Form(True, True, True), Form(False, True, True),
    Form(False, True, True, True), Form(False, False, False, True),
)  # fmt: skip
NOPE = 128  # values of a head's query that meet its key matrix, where queries over latents are made
MERGE_WORDS = 8 * 4 * MAX_BETWEEN_ROWS  # of a column: of 8 parts of the latents, 4 rows for each row that may be a block


@dataclass(frozen=True, slots=True)
class BetweenSizes:
    """Sizes of a drafter's layers.  values: V, width: Q + D, queries: N; heads: where queries over latents are made, else 0;
    layers: whose latents of context rows are made by one product, else 0."""

    hidden: int
    values: int
    intermediate: int
    q_rank: int
    width: int
    queries: int
    heads: int = 0
    layers: int = 0

    @property
    def rotary(self) -> int:
        """Values of a head's query, and of a latent row, that are turned."""
        return self.queries // self.heads - NOPE


class BetweenWorkspace:
    """Words, sums of squares and counters of `between_attentions` and `before_attention` on one device, for one set of sizes.

    One launch uses it at a time: launches of one stream may share it, graph replays too; two streams must not, but for
    `context_kv`, of which one may run beside the others.  It begins as zeros and is left to the kernel from then on.

    Raises:
        ValueError: `between_attentions_refusal` gives a reason.
    """

    def __init__(self, sizes: BetweenSizes, device: torch.device):
        reason = between_attentions_refusal(sizes, torch.bfloat16, device)
        if reason is not None:
            raise ValueError(f"between_attentions=cute: {reason}; choose torch, which needs no workspace")
        self.sizes = sizes
        forms = [form for form in FORMS if (sizes.heads or not form.absorbed) and (sizes.layers or not form.context)]
        facts = [build_facts(sizes, MAX_BETWEEN_ROWS, form, device) for form in forms]
        self.words = torch.zeros(MERGE_WORDS * sizes.values, dtype=torch.int64, device=device)
        self.squares = torch.zeros(max(f.num_squares for f in facts), dtype=torch.float32, device=device)
        self.counters = {
            form: torch.zeros(f.num_counters, dtype=torch.int32, device=device) for form, f in zip(forms, facts, strict=True)
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
    if wrong:
        return f"it takes sizes in whole tiles, got {'; '.join(wrong)}"
    return absorption_refusal(sizes) if sizes.heads else None


def absorption_refusal(sizes: BetweenSizes, nope: int = NOPE) -> str | None:
    """Why queries over latents are not made for a drafter of such sizes; None where they are.  nope: values of a head's query
    that are not turned."""
    latent = sizes.width - sizes.q_rank
    if nope != NOPE or sizes.queries % sizes.heads or sizes.rotary < 8 or sizes.rotary % 8 or (latent - sizes.rotary) % 64:
        return (
            f"it makes queries over latents of heads of {NOPE} values and a multiple of 8 that are turned, for latents of a "
            f"multiple of 64 beside these, got {sizes.heads} heads of {sizes.queries / sizes.heads:g} with {nope} not turned, "
            f"and latents of {latent}"
        )
    return None


def build_facts(
    sizes: BetweenSizes, rows: int, form: Form, device: torch.device, *, early: bool = False, attention=None,
    stored: bool = False,
):  # fmt: skip
    """`Facts` of a build for so many rows; attention: of one whose parts are merged; stored: the latents go to the pool."""
    from dspark_kernels.cute.between_attentions_schedule import LANES, Facts

    lanes = next(lanes for lanes in LANES if rows <= lanes)
    ctas = torch.cuda.get_device_properties(device).multi_processor_count
    return Facts(
        torch.bfloat16, lanes, sizes.hidden, sizes.values, sizes.intermediate, sizes.q_rank, sizes.width - sizes.q_rank,
        sizes.queries, form.following, ctas, early, attention, form.behind, sizes.heads if form.absorbed else 0, stored,
        sizes.layers if form.context else 0,
    )  # fmt: skip


def check_workspace(op: str, workspace: BetweenWorkspace | None, device: torch.device) -> BetweenSizes:
    """The sizes of the workspace.  Raises ValueError, told of `op`, where there is none on the device."""
    if workspace is None or workspace.squares.device != device:
        found = "none" if workspace is None else f"one on {workspace.squares.device}"
        raise ValueError(f"{op}=cute needs a BetweenWorkspace on {device}, got {found}")
    return workspace.sizes


def check_launch(op: str, rows: int, given, own: BetweenSizes, sizes: BetweenSizes) -> None:
    """Raises ValueError, told of `op`, for what `cute` does not take; given: rows [M, ...]; own, sizes: of workspace and
    weights."""
    if sizes != own:
        raise ValueError(f"{op}: the BetweenWorkspace is for {own}, these weights are {sizes}; make one for them")
    reason = between_attentions_refusal(own, given.dtype, given.device)
    if reason is None and not 1 <= rows <= MAX_BETWEEN_ROWS:
        reason = f"it takes 1 to {MAX_BETWEEN_ROWS} rows, got {rows}"
    if reason is not None:
        raise ValueError(f"{op}=cute: {reason}; choose torch")


def check_matrices(op: str, matrices: dict) -> None:
    """Raises ValueError for tensors that are no matrices."""
    for name, tensor in matrices.items():
        if tensor.ndim != 2:
            raise ValueError(f"{op} wants {name}, got {[*tensor.shape]}")


def check_wanted(op: str, wanted: dict, like: torch.Tensor) -> None:
    """Raises ValueError for tensors that have another shape than they should, or another dtype or device.

    wanted: tensor and shape by name, and the dtype where it is not that of `like`.
    """
    for name, (tensor, shape, *own) in wanted.items():
        (dtype,) = own or (like.dtype,)
        if tensor.shape != shape or tensor.dtype is not dtype or tensor.device != like.device:
            raise ValueError(
                f"{op} wants {name} {[*shape]} of {dtype} on {like.device}, got {[*tensor.shape]} of {tensor.dtype} on "
                f"{tensor.device}"
            )
