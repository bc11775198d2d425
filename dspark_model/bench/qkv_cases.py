"""Split streams, direct pool write, merged product and backends of norm and rotation: in whole steps, and by themselves."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from dspark_model.bench.profile_cases import block_context
from dspark_model.bench.step_cases import Row, started_worker, target_rows
from dspark_model.bench.timing import capture, time_interleaved
from dspark_model.config_keys import ConfigError
from dspark_model.fast_paths import backends
from dspark_model.modeling import BlockPaths, MLADSparkForCausalLM
from dspark_model.serving_config import RuntimeConfig
from dspark_model.step_io import StepInput
from dspark_model.streams import SideStream
from dspark_model.testing import assert_bitwise_equal
from dspark_model.worker import DFlashWorker


@dataclass(frozen=True, slots=True)
class QkvVariant:
    """backend: of `latent_norm_rope`; the rest as in `RuntimeConfig`."""

    backend: str
    merged: bool
    split: bool
    direct: bool

    @property
    def profile(self) -> str:
        return f"merged {self.backend}" if self.merged else self.backend

    @property
    def label(self) -> str:
        switches = [name for name in ("split", "direct") if getattr(self, name)]
        return "+".join([self.profile, *switches])

    @property
    def runtime(self) -> RuntimeConfig:
        """With the captured step, the fused prologue and the overlapped projection."""
        names = {"fused_prologue": True, "overlap_context_projection": True, "cuda_graph": True}
        names |= {"split_qkv_streams": self.split, "direct_pool_write": self.direct}
        return dataclasses.replace(
            RuntimeConfig.plain(),
            latent_norm_rope=self.backend,
            merged_qkv_a="on" if self.merged else "off",
            **{name: "require" if taken else "off" for name, taken in names.items()},
        )

    def paths(self, side: SideStream) -> BlockPaths:
        return BlockPaths(
            latent_norm_rope=self.backend,
            merged_qkv_a=self.merged,
            fused_store=True,
            direct_pool_write=self.direct,
            side=side if self.split else None,
        )


def qkv_variants() -> Iterator[QkvVariant]:
    """The first of a profile is the one that the others have to equal."""
    for merged in (False, True):
        for backend in ("torch", "triton", "cute"):
            for direct in (False, True)[: 1 if backend == "torch" else 2]:
                for split in (False, True):
                    yield QkvVariant(backend, merged, split, direct)


def qkv_step_rows(model: MLADSparkForCausalLM, batch: int, context: int) -> list[Row]:
    """Whole decode steps under replay."""
    runs, results, workers = {}, {}, []
    for variant in qkv_variants():
        try:
            worker = started_worker(model, variant.runtime, batch, context)
        except ConfigError as error:
            print(f"step {variant.label}: not run: {error}")
            continue
        output = worker.step(StepInput(generation=target_rows(worker, batch, 0)))
        worker.synchronize()
        results[variant] = [output.draft_tokens.clone(), output.confidence.clone(), worker.pool.storage]
        (captured,) = worker._graphs._captured.values()
        runs[variant.label] = captured.replay
        workers.append(worker)
    check_profiles(results, "step")
    times = time_interleaved(runs, rounds=9, replays=15)
    return [Row("step, q/kv", label, batch, context, timing) for label, timing in times.items()]


def qkv_part_rows(model: MLADSparkForCausalLM, batch: int, context: int) -> list[Row]:
    """From every layer's normed rows to latents in the pool and absorbed queries: what the choices change."""
    worker, side = started_worker(model, RuntimeConfig.plain(), batch, context), SideStream(model.device)
    against, works, results = backends(model, worker.pool)["latent_norm_rope"], {}, {}
    before = worker.pool.storage.clone()
    model.merge_qkv_a()
    for variant in qkv_variants():
        if against.get(variant.backend) is not None:
            print(f"q/kv part {variant.label}: not run: {against[variant.backend].reason}")
            continue
        work = qkv_part(worker, batch, variant.paths(side))
        worker.pool.storage.copy_(before)
        results[variant] = [tensor.clone() for tensor in (*work(), worker.pool.storage)]
        works[variant.label] = work
    check_profiles(results, "q/kv part")
    graphs = {label: capture(work, copies=4) for label, work in works.items()}
    times = time_interleaved({label: graph.replay for label, graph in graphs.items()}, replays=20, copies=4)
    return [Row("q/kv part of 5 layers", label, batch, context, timing) for label, timing in times.items()]


def qkv_part(worker: DFlashWorker, batch: int, paths: BlockPaths) -> Callable[[], list[torch.Tensor]]:
    """A call that does that part for the blocks of `batch` requests, and returns the layers' queries."""
    model, pool = worker.model, worker.pool
    shared = block_context(worker, batch, paths)
    draw = torch.Generator(model.device).manual_seed(5)
    shape = (model.config.num_hidden_layers, batch, worker.block_rows, model.config.hidden_size)
    normed = torch.randn(shape, generator=draw, device=model.device).to(model.dtype)

    def work() -> list[torch.Tensor]:
        layers = zip(model.layers, normed, pool.layer_views, strict=True)
        return [layer.write_latents_and_query(y, view, shared) for layer, y, view in layers]

    return work


def check_profiles(results: dict[QkvVariant, list[torch.Tensor]], what: str) -> None:
    """Within each profile all results are equal to the bit, or an AssertionError says which differs."""
    first: dict[str, list[torch.Tensor]] = {}
    for variant, tensors in results.items():
        for ours, theirs in zip(tensors, first.setdefault(variant.profile, tensors), strict=True):
            assert_bitwise_equal(ours, theirs, f"{what} {variant.label}")


def qkv_summary(rows: list[Row]) -> list[str]:
    """What each variant takes off its case's torch variant, in microseconds."""
    base = {(row.case, row.batch, row.context): row.timing.median_us for row in rows if row.variant == "torch"}
    lines = []
    for row in rows:
        key = (row.case, row.batch, row.context)
        if key in base and row.variant != "torch":
            lines.append(f"{row.case}, B={row.batch}, {row.variant}: {row.timing.median_us - base[key]:+.1f} us against torch")
    return lines
