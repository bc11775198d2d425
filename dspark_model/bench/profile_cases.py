"""Numeric profiles of the whole step: the block decode alone, and the captured step, with every exact switch."""

import dataclasses
import gc
from collections.abc import Callable, Iterator

import torch

from dspark_model import ops
from dspark_model.bench.kernel_profile import kernel_profile, table
from dspark_model.bench.step_cases import Row, started_worker, step_bytes, target_rows
from dspark_model.bench.timing import capture, time_interleaved
from dspark_model.config_keys import ConfigError
from dspark_model.modeling import BlockContext, BlockPaths, MLADSparkForCausalLM
from dspark_model.persistent import PersistentPath
from dspark_model.serving_config import RuntimeConfig
from dspark_model.step_io import StepInput
from dspark_model.step_run import StepPaths
from dspark_model.testing import assert_bitwise_equal
from dspark_model.worker import DFlashWorker

PROFILES = {
    "torch": {},
    "triton": {"attention": "triton", "latent_norm_rope": "triton"},
    "cute": {"attention": "cute", "latent_norm_rope": "cute"},
    "cute, merged": {"attention": "cute", "latent_norm_rope": "cute", "merged_qkv_a": "on"},
    "low_m": {"attention": "cute", "latent_norm_rope": "cute", "gemm": "low_m"},
    "low_m, merged": {"attention": "cute", "latent_norm_rope": "cute", "gemm": "low_m", "merged_qkv_a": "on"},
    "persistent": {"attention": "cute", "latent_norm_rope": "cute", "gemm": "persistent", "merged_qkv_a": "on"},
}


def runtime_of(profile: str, *, switches: bool, split: bool) -> RuntimeConfig:
    """A profile without any switch, or with all; split: the streams of queries and latents among them."""
    plain = dataclasses.replace(RuntimeConfig.plain(), **PROFILES[profile])
    if not switches:
        return plain
    names = ["fused_prologue", "overlap_context_projection", "cuda_graph"]
    names += ["split_qkv_streams"] if split else []
    names += ["direct_pool_write"] if "latent_norm_rope" in PROFILES[profile] else []
    return dataclasses.replace(plain, **dict.fromkeys(names, "require"))


def _workers(
    model: MLADSparkForCausalLM, batch: int, context: int, profiles: list[str]
) -> Iterator[tuple[str, str, DFlashWorker]]:
    """Profile, label and a started worker with all switches, with one stream a layer and with two; says which cannot run.

    Of `persistent` with two only: one worker of a process launches early, see `PersistentPath`.
    """
    gc.collect()  # workers of before, which launch early as long as they are there
    for profile in profiles:
        for split in (True,) if PROFILES[profile].get("gemm") == "persistent" else (False, True):
            label = f"{profile}, split" if split else profile
            try:
                worker = started_worker(model, runtime_of(profile, switches=True, split=split), batch, context)
            except ConfigError as error:
                print(f"{label}: not run: {error}")
                continue
            path = worker._products.get(worker.resolved["gemm"].in_force)
            if isinstance(path, PersistentPath) and not path.launches_early:
                raise RuntimeError(f"{label}: a worker of before still launches early, so this one does not")
            yield profile, label, worker


def profile_step_rows(
    model: MLADSparkForCausalLM, batch: int, context: int, profiles: list[str], *, show_kernels: bool = False
) -> list[Row]:
    """Captured steps with all switches; a profile that differs from itself without switches raises AssertionError."""
    runs, workers = {}, []
    for profile, label, worker in _workers(model, batch, context, profiles):
        wanted = started_worker(model, runtime_of(profile, switches=False, split=False), batch, context)
        _check_step(worker, wanted, batch, label)
        (captured,) = worker._graphs._captured.values()
        runs[label] = captured.replay
        workers.append(worker)
    times = time_interleaved(runs, rounds=9, replays=15)
    if show_kernels:
        best = min(times, key=lambda label: times[label].median_us)
        print(f"kernels of {best}, B={batch}, context {context}:\n{table(kernel_profile(runs[best]), most=50)}")
    counted = step_bytes(model, batch, context)
    return [Row("step, profiles", label, batch, context, timing, counted) for label, timing in times.items()]


def _check_step(ours: DFlashWorker, theirs: DFlashWorker, batch: int, label: str) -> None:
    """Outputs and pool of one step, equal to the bit."""
    outputs = [worker.step(StepInput(generation=target_rows(worker, batch, 3))) for worker in (ours, theirs)]
    ours.synchronize()
    for name in ("next_tokens", "confidence", "num_committed"):
        assert_bitwise_equal(*(getattr(output, name) for output in outputs), f"step {label}, {name}")
    assert_bitwise_equal(ours.pool.storage, theirs.pool.storage, f"step {label}, pool")


def block_rows(model: MLADSparkForCausalLM, batch: int, context: int, profiles: list[str]) -> list[Row]:
    """The layers and `final_norm` alone."""
    works = {label: block_decode(worker, batch) for _, label, worker in _workers(model, batch, context, profiles)}
    graphs = {label: capture(work, copies=2) for label, work in works.items()}
    times = time_interleaved({label: graph.replay for label, graph in graphs.items()}, rounds=9, replays=15, copies=2)
    layers = sum(parameter.nbytes for layer in model.layers for parameter in layer.parameters())
    counted = layers + batch * context * model.config.num_hidden_layers * model.config.latent_dim * model.dtype.itemsize
    return [Row("block decode", label, batch, context, timing, counted) for label, timing in times.items()]


def block_decode(worker: DFlashWorker, batch: int) -> Callable[[], torch.Tensor]:
    """A call that decodes one block of the worker's requests with the worker's choices."""
    model, resolved = worker.model, worker.resolved
    low_m = worker._products.get(resolved["gemm"].in_force)
    paths = StepPaths.of(resolved, keep_logits=False).of_block(low_m, worker._side)
    shared = block_context(worker, batch, paths)
    x = model.embed_block(torch.arange(batch, device=model.device) + 2, worker.block_rows)
    return lambda: model.decode_block(x, shared)


def block_context(worker: DFlashWorker, batch: int, paths: BlockPaths) -> BlockContext:
    """What the layers share for the blocks behind the contexts of the worker's first requests."""
    pool = worker.pool
    slots = torch.tensor([worker.slot_of(key) for key in range(batch)], device=worker.model.device)
    lens, page_table = worker._slots.context_lens[slots], pool.page_table[slots]
    rows = ops.block_fixup(
        lens, page_table, pool.num_pages[slots], slots >= 0, rows=worker.block_rows, page_size=pool.config.page_size
    )
    return BlockContext(
        layer_views=pool.layer_views,
        page_table=page_table,
        context_lens=lens,
        rows=rows,
        cos_sin=worker.rope.rows(rows.positions),
        max_seq_len=pool.max_rows,
        window=pool.config.context_window,
        paths=paths,
    )
