"""What `scripts/bench_step.py` times: bookkeeping, the overlapped projection, and whole decode steps."""

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dspark_model import ops
from dspark_model.bench.k3_rank import NUM_DRAFTS, make_worker
from dspark_model.bench.timing import Timing, capture, time_interleaved
from dspark_model.modeling import MLADSparkForCausalLM
from dspark_model.serving_config import RuntimeConfig
from dspark_model.step_io import GenerationRows, StepInput
from dspark_model.streams import SideStream
from dspark_model.testing import assert_bitwise_equal
from dspark_model.worker import DFlashWorker

COPY_RATE = 4.3e12  # bytes a second, what large reads reach on an H200
SWITCHES = ("fused_prologue", "overlap_context_projection")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a result: what was timed, with how many requests at which context, and counted bytes."""

    case: str
    variant: str
    batch: int
    context: int
    timing: Timing
    bytes_counted: int | None = None

    def to_dict(self) -> dict:
        row = {**dataclasses.asdict(self), **dataclasses.asdict(self.timing)}
        del row["timing"]
        floor = None if self.bytes_counted is None else 1e6 * self.bytes_counted / COPY_RATE
        return {**row, "floor_us": floor}


def started_worker(model: MLADSparkForCausalLM, runtime: RuntimeConfig, batch: int, context: int) -> DFlashWorker:
    """A worker whose requests hold `context` rows of random values and have been drafted for; all their pages are there."""
    worker = make_worker(model, runtime, batch=batch, context=context)
    state = worker._slots
    for key in range(batch):
        worker.admit(key)
        request = worker._requests[key]
        request.length, request.num_valid_drafts, request.drafting = context, NUM_DRAFTS, True
        state.context_lens[request.slot], state.num_valid_drafts[request.slot] = context, NUM_DRAFTS
        worker.pool.begin_step({request.slot: worker.pool.max_rows}, None)
    drafts = torch.arange(batch * NUM_DRAFTS, device=model.device).reshape(batch, -1) % 1000 + 2
    state.draft_tokens[:batch] = drafts
    return worker


def target_rows(worker: DFlashWorker, batch: int, accepted: int) -> GenerationRows:
    """Random hidden rows, and target tokens that agree with `accepted` drafts."""
    draw = torch.Generator(worker.model.device).manual_seed(3)
    shape = (batch, NUM_DRAFTS + 1, worker.model.config.context_width)
    hidden = torch.randn(shape, generator=draw, device=worker.model.device, dtype=torch.float32).to(worker.model.dtype)
    slots = torch.tensor([worker.slot_of(key) for key in range(batch)], device=hidden.device)
    tokens = torch.ones((batch, NUM_DRAFTS + 1), dtype=torch.int64, device=hidden.device)
    tokens[:, :accepted] = worker._slots.draft_tokens[slots, :accepted]
    return GenerationRows(request_ids=list(range(batch)), target_hidden=hidden, target_tokens=tokens)


def bookkeeping_rows(model: MLADSparkForCausalLM, batch: int, context: int) -> list[Row]:
    """The step without its products: verdict, lengths, addresses, context store, noise block, block stores, commit."""
    variants = {}
    for name in ("plain", "fused"):
        worker = started_worker(model, RuntimeConfig.plain(), batch, context)
        variants[name] = bookkeeping(worker, target_rows(worker, batch, 3), fused=name == "fused")
    results = {name: work() for name, work in variants.items()}
    for a, b in zip(results["plain"], results["fused"], strict=True):
        assert_bitwise_equal(b, a, "bookkeeping")
    graphs = {name: capture(work, copies=10) for name, work in variants.items()}
    times = time_interleaved({name: graph.replay for name, graph in graphs.items()}, copies=10)
    return [Row("bookkeeping", name, batch, context, timing) for name, timing in times.items()]


def bookkeeping(worker: DFlashWorker, rows: GenerationRows, *, fused: bool) -> Callable[[], list[torch.Tensor]]:
    """A call that does the bookkeeping of one step, on the same state each time, and returns what it made."""
    model, pool, state, batch = worker.model, worker.pool, worker._slots, len(rows.request_ids)
    device, layers, width = model.device, model.config.num_hidden_layers, model.config.latent_dim
    slots = torch.tensor([worker.slot_of(key) for key in rows.request_ids], device=device)
    tables = state.tables(pool.page_table, pool.num_pages)
    none = torch.empty(0, dtype=torch.int64, device=device)
    given = ops.GivenRows(none, none)
    draw = torch.Generator(device).manual_seed(4)
    latents = torch.randn((layers, batch, NUM_DRAFTS + 1, width), generator=draw, device=device).to(model.dtype)
    block = latents[:, :, :NUM_DRAFTS].contiguous()
    drafts = torch.ones((batch, NUM_DRAFTS), dtype=torch.int64, device=device)
    old = state.drafts()
    scratch = ops.SlotDrafts(*(getattr(old, field.name).clone() for field in dataclasses.fields(old)))
    lens = state.context_lens[slots]

    def work() -> list[torch.Tensor]:
        step = ops.step_prologue(slots, tables, given, rows.target_tokens, worker.rope.cos_sin, worker._shape, fused=fused)
        ops.context_store(
            pool.layer_views, latents, lens, step.num_committed, slots, pool.page_table, pool.num_pages, fused=fused
        )
        noise = model.embed_block(step.anchors, worker.block_rows, fused=fused)
        for view, own in zip(pool.layer_views, block, strict=True):
            ops.latent_store((view,), own[None], step.block.where, fused=fused)
        tokens = ops.step_commit(scratch, slots, step.anchors, step.context_lens, step.num_valid_drafts, drafts, fused=fused)
        return [step.committed_tokens, step.context_lens, step.block.where.pages, step.cos_sin, noise, tokens, pool.storage]

    return work


def overlap_rows(model: MLADSparkForCausalLM, batch: int) -> list[Row]:
    """The context projection beside a window of other work: alone, one after the other, and at the same time."""
    worker = started_worker(model, RuntimeConfig.plain(), batch, 2048)
    rows = target_rows(worker, batch, 3)
    hidden, side = rows.target_hidden.flatten(0, 1), SideStream(model.device)
    cos_sin = worker.rope.rows(torch.arange(hidden.shape[0], device=model.device))
    result = []

    def project() -> torch.Tensor:
        return worker._context_latents(model.project_context(hidden), cos_sin, "triton")

    for name, window in _windows(worker, rows, project).items():

        def serial(window: Callable = window) -> None:
            project()
            window()

        def overlapped(window: Callable = window) -> None:
            with side.fork():
                project()
            window()
            side.join()

        works = {"projection": project, "window": window, "serial": serial, "overlapped": overlapped}
        graphs = {key: capture(work) for key, work in works.items()}
        times = time_interleaved({key: graph.replay for key, graph in graphs.items()}, replays=20)
        result += [Row(f"overlap, {name}", key, batch, 2048, timing) for key, timing in times.items()]
    return result


def overlap_summary(rows: list[Row]) -> list[str]:
    """For each window: how much of the projection hides in it, and what remains above the longer of the two."""
    lines = []
    for case in dict.fromkeys(row.case for row in rows if row.case.startswith("overlap")):
        us = {row.variant: row.timing.median_us for row in rows if row.case == case}
        gain, longest = us["serial"] - us["overlapped"], max(us["projection"], us["window"])
        lines.append(
            f"{case}: {gain:+.1f} us less than one after the other, {100 * gain / us['projection']:.0f} % of the projection; "
            f"{us['overlapped'] - longest:+.1f} us over the longer part"
        )
    return lines


def _windows(worker: DFlashWorker, rows: GenerationRows, project: Callable) -> dict[str, Callable[[], object]]:
    """Idle time as long as the projection and short, the real bookkeeping, and a copy that saturates the memory.

    Idle is a copy from the host, which occupies no multiprocessor.  A spinning kernel occupies one: then a block of the product
    that needs all of its shared memory waits for it.
    """
    device, cycles, size = worker.model.device, 200_000, 8 * 2**20
    host = torch.empty(32 * 2**20, dtype=torch.uint8, pin_memory=True)
    received = torch.empty_like(host, device=device)
    works = {
        "spin": lambda: torch.cuda._sleep(cycles),
        "receive": lambda: received[:size].copy_(host[:size], non_blocking=True),
        "project": project,
    }
    graphs = {name: capture(work) for name, work in works.items()}
    us = {name: timing.median_us for name, timing in time_interleaved({n: g.replay for n, g in graphs.items()}).items()}
    cycles, size = int(cycles * us["project"] / us["spin"]), min(host.numel(), int(size * us["project"] / us["receive"]))
    source = torch.empty(300 * 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    accept = bookkeeping(worker, rows, fused=True)
    return {
        "idle, as long": lambda: received[:size].copy_(host[:size], non_blocking=True),
        "idle, short": lambda: received[:4096].copy_(host[:4096], non_blocking=True),
        "spin, as long": lambda: torch.cuda._sleep(cycles),
        "spin, 5 us": lambda: torch.cuda._sleep(9_000),
        "bookkeeping": accept,
        "memory": lambda: target.copy_(source),
    }


def step_rows(model: MLADSparkForCausalLM, batch: int, context: int) -> list[Row]:
    """Whole decode steps under replay, for each set of switches; they are equal to the bit, or nothing is timed."""
    sets = [names for count in range(len(SWITCHES) + 1) for names in itertools.combinations(SWITCHES, count)]
    runs, outputs, workers = {}, {}, []
    for names in sets:
        switches = dict.fromkeys((*names, "cuda_graph"), "require")
        worker = started_worker(model, dataclasses.replace(RuntimeConfig.plain(), **switches), batch, context)
        output = worker.step(StepInput(generation=target_rows(worker, batch, 0)))
        worker.synchronize()
        label = "+".join(names) or "plain"
        outputs[label] = (output.draft_tokens.clone(), output.confidence.clone(), worker.pool.storage)
        (captured,) = worker._graphs._captured.values()
        runs[label] = captured.replay
        workers.append(worker)
    for label, tensors in outputs.items():
        for ours, theirs in zip(tensors, outputs["plain"], strict=True):
            assert_bitwise_equal(ours, theirs, f"step {label}")
    times = time_interleaved(runs, rounds=9, replays=15)
    counted = step_bytes(model, batch, context)
    return [Row("step", label, batch, context, timing, counted) for label, timing in times.items()]


def step_bytes(model: MLADSparkForCausalLM, batch: int, context: int) -> int:
    """Bytes that a decode step reads at least: every weight but the embedding tables, the head, and the pool's rows."""
    tables = ("embed_tokens", "markov_w1", "mask_embedding")
    weights = sum(p.nbytes for name, p in model.named_parameters() if not any(table in name for table in tables))
    latents = sum(layer.self_attn.kv_a_proj_with_mqa.weight.nbytes for layer in model.layers)
    # W2 is read once a draft; K passes of it fit in the cache and count once.  The latents' weights serve context and block.
    pool = batch * context * model.config.num_hidden_layers * model.config.latent_dim * model.lm_head.element_size()
    return weights + latents + model.lm_head.nbytes + pool
