"""Captured decode steps: CUDA graphs of pure generation steps, replayed with other requests, lengths and pages."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch

from dspark_model.device_slots import DeviceSlots
from dspark_model.ops import NO_TOKEN
from dspark_model.runtime import ResolvedRuntime
from dspark_model.sampling import GREEDY
from dspark_model.serving_config import Attention, DraftSampling
from dspark_model.step_io import GenerationRows, StepInput
from dspark_model.step_plan import StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class DecodeOutputs:
    """What a decode step leaves for its caller, B rows; see `StepOutput`.  counts: int64 [3, B], see `StepRows`."""

    committed_tokens: torch.Tensor
    num_accepted: torch.Tensor
    num_committed: torch.Tensor
    next_tokens: torch.Tensor
    confidence: torch.Tensor | None
    counts: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        values = [getattr(self, field.name) for field in fields(self)]
        return [value for value in values if value is not None]


# Computes a decode step of the plan for the requests in slots int64 [B], the slots' state included.
DecodeStep = Callable[[StepPlan, torch.Tensor, ResolvedRuntime], DecodeOutputs]


def why_not_captured(step_input: StepInput, resolved: ResolvedRuntime, largest_batch: int, trace: bool) -> str | None:
    """Why a step is not one that graphs are captured for; None when it is."""
    rows = step_input.generation
    if resolved["draft_sampling"].in_force == DraftSampling.SAMPLE:
        return "runtime.draft_sampling=sample keeps the distributions of drafts, which captured steps do not follow"
    if resolved["attention"].in_force == Attention.FLASHINFER:
        return "attention=flashinfer plans each call on the host"
    if step_input.context or rows is None:
        return "the step has context chunks"
    if rows.target_tokens is None or rows.widths is not None:
        return "the verdict is not an exact one of uniform width"
    if any(params.temperature > 0 for params in rows.sampling or ()):
        return "drafts or tokens are drawn"
    if trace:
        return "a trace was asked for"
    if len(rows.request_ids) > largest_batch:
        return f"{len(rows.request_ids)} rows are more than the {largest_batch} that graphs are made for"
    return None


class _Captured:
    """One captured step: its inputs at fixed addresses, its outputs, and how to run it."""

    def __init__(self, plan: StepPlan, slots: DeviceSlots, outputs: DecodeOutputs, replay: Callable[[], None]):
        self.plan, self.slots, self.outputs, self.replay = plan, slots, outputs, replay

    def run(self, plan: StepPlan) -> DecodeOutputs:
        """Replay for the plan's rows; further rows are dummies."""
        rows, own = plan.generation, self.plan.generation
        count = len(rows.request_ids)
        self.slots.set([NO_TOKEN if request is None else request.slot for request in plan.requests])
        own.target_hidden[:count].copy_(rows.target_hidden)
        own.target_tokens[:count].copy_(rows.target_tokens)
        self.replay()
        cut = {field.name: getattr(self.outputs, field.name) for field in fields(self.outputs)}
        counts = cut.pop("counts")[:, :count]
        return DecodeOutputs(**{n: None if t is None else t[:count] for n, t in cut.items()}, counts=counts)


class GraphRunner:
    """Captures a decode step when it is first needed, one for each padded batch size, key bound and set of choices, and
    replays it from then on.  A captured step keeps the choices that it was captured with.

    Outputs of a replay lie at fixed addresses: the next replay of the same graph overwrites them.
    """

    def __init__(
        self,
        step: DecodeStep,
        batch_sizes: tuple[int, ...],
        num_drafts: int,
        context_width: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """batch_sizes: ascending; a batch is padded with dummy rows to the next one."""
        self.batch_sizes = batch_sizes
        self.replays: Counter[tuple] = Counter()
        self._step, self._device = step, device
        self._width, self._context_width, self._dtype = num_drafts + 1, context_width, dtype
        self._captured: dict[tuple, _Captured] = {}
        self._memory = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.memory_bytes = 0

    @property
    def num_graphs(self) -> int:
        return len(self._captured)

    def run(self, plan: StepPlan, resolved: ResolvedRuntime) -> DecodeOutputs:
        """Outputs of the plan's rows, still being computed."""
        count = len(plan.requests)
        batch = next(size for size in self.batch_sizes if size >= count)
        key = (batch, plan.max_length, tuple((choice.name, choice.in_force) for choice in resolved.choices))
        if key not in self._captured:
            self._captured[key] = self._capture(batch, plan.max_length, resolved)
        self.replays[key] += 1
        return self._captured[key].run(plan)

    def _capture(self, batch: int, max_length: int, resolved: ResolvedRuntime) -> _Captured:
        device = self._device
        slots = DeviceSlots(batch, device)
        rows = GenerationRows(
            request_ids=[None] * batch,
            target_hidden=torch.zeros(batch, self._width, self._context_width, dtype=self._dtype, device=device),
            target_tokens=torch.zeros(batch, self._width, dtype=torch.int64, device=device),
        )
        plan = StepPlan((), rows, (None,) * batch, tuple(range(batch)), (GREEDY,) * batch, {}, max_length)
        before = torch.cuda.memory_reserved(device) if self._memory is not None else 0
        # All rows are dummies meanwhile, so that neither warming up nor capturing changes state or pool.
        outputs, replay = self._record(lambda: self._step(plan, slots.tensor, resolved))
        if self._memory is not None:
            self.memory_bytes += torch.cuda.memory_reserved(device) - before
        return _Captured(plan, slots, outputs, replay)

    def _record(self, step: Callable[[], DecodeOutputs]) -> tuple[DecodeOutputs, Callable[[], None]]:
        if self._memory is None:
            return _record_eagerly(step)
        current, warm = torch.cuda.current_stream(), torch.cuda.Stream()
        warm.wait_stream(current)
        with torch.cuda.stream(warm):
            for _ in range(2):
                step()
        current.wait_stream(warm)
        graph = torch.cuda.CUDAGraph()
        with _collector_at_rest(), torch.cuda.graph(graph, pool=self._memory):
            outputs = step()
        return outputs, graph.replay


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    """Python's collector does not run meanwhile: another graph that it frees in the middle of a capture ends that capture with
    cudaErrorStreamCaptureInvalidated (seen once in 1,397 cases of the switch matrix)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _record_eagerly(step: Callable[[], DecodeOutputs]) -> tuple[DecodeOutputs, Callable[[], None]]:
    """Where there are no graphs: a replay computes the step again, into the same outputs."""
    outputs = step()

    def replay() -> None:
        for old, new in zip(outputs.tensors(), step().tensors(), strict=True):
            old.copy_(new)

    return outputs, replay
