"""The switch matrix: a worker with fast paths beside one without, step by step over the same scenario, equal to the bit.

Five scenarios: steady decode, mixed batch with chunked prefill, request turnover with reuse of ids, context ceiling and page
edges, padded dummy rows.  Each is a script of operations that both workers follow; the target's hidden rows come from a
seed, and its tokens agree with a scripted number of the plain worker's drafts.
"""

import dataclasses
import importlib.util
import itertools
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from dspark_model import ContextChunk, DFlashWorker, DrafterConfig, GenerationRows, LatentKVPool, PoolConfig, StepInput
from dspark_model.external_pool import ExternalLatentPool
from dspark_model.kv_pool import PagedLatents
from dspark_model.modeling import MLADSparkForCausalLM
from dspark_model.ops import pool_row_width
from dspark_model.runtime import pool_dtype_for
from dspark_model.serving_config import Layout, RuntimeConfig
from dspark_model.step_io import StepOutput
from dspark_model.testing import assert_bitwise_equal

PAGE = 8
EXACT_SWITCHES = ("fused_prologue", "overlap_context_projection", "split_qkv_streams", "direct_pool_write", "cuda_graph")
# Numeric profiles: switches are exact within each.
PROFILES = {
    "torch": {},
    "triton": {"latent_norm_rope": "triton"},
    "merged": {"merged_qkv_a": "on"},
    "merged_triton": {"merged_qkv_a": "on", "latent_norm_rope": "triton"},
    "attention": {"attention": "triton", "latent_norm_rope": "triton"},
    "low_m": {"gemm": "low_m", "attention": "triton", "latent_norm_rope": "triton"},
    "fp8": {"kv_dtype": "fp8_e4m3"},
    "fp8_triton": {"kv_dtype": "fp8_e4m3", "attention": "triton", "latent_norm_rope": "triton"},
    "low_m_merged": {"gemm": "low_m", "merged_qkv_a": "on", "attention": "triton", "latent_norm_rope": "triton"},
}
if torch.cuda.is_available() and importlib.util.find_spec("cutlass"):
    PROFILES["cute"] = {"latent_norm_rope": "cute"}
    PROFILES["merged_cute"] = {"merged_qkv_a": "on", "latent_norm_rope": "cute"}
# Profiles of kernels that know Kimi K3's widths alone.
K3_PROFILES = dict(PROFILES)
if "cute" in PROFILES:
    K3_PROFILES["cute_attention"] = {"attention": "cute", "latent_norm_rope": "cute"}
    K3_PROFILES["cute_low_m"] = {"gemm": "low_m", "attention": "cute", "latent_norm_rope": "cute", "merged_qkv_a": "on"}
    K3_PROFILES["persistent"] = K3_PROFILES["cute_low_m"] | {"gemm": "persistent"}
DUMMY = None


@dataclass(frozen=True)
class Admit:
    key: Hashable
    max_context: int | None = None


@dataclass(frozen=True)
class Release:
    key: Hashable


@dataclass(frozen=True)
class Step:
    """prefill: {request: (start, end, last)}; accepts: {request or DUMMY placeholder: accepted drafts}, in row order."""

    prefill: dict = field(default_factory=dict)
    accepts: tuple[tuple[Hashable, int], ...] = ()


def steady(batch: int, page: int) -> list:
    keys = list(range(batch))
    steps = [Admit(key) for key in keys]
    steps.append(Step(prefill={key: (0, page - 3 + 3 * key, True) for key in keys}))
    return steps + [Step(accepts=tuple((key, (3 * key + turn) % 9) for key in keys)) for turn in range(6)]


def mixed(batch: int, page: int) -> list:
    keys = list(range(batch))
    steps = [Admit(key) for key in [*keys, "long", "short"]]
    steps.append(Step(prefill={key: (0, page - 4 + key, True) for key in keys}))
    accepts = tuple((key, (key + 2) % 8) for key in keys)
    steps.append(Step(prefill={"long": (0, page + 1, False)}, accepts=accepts))
    steps.append(Step(prefill={"long": (page + 1, page + 2, False), "short": (0, 3, True)}, accepts=accepts))
    steps.append(Step(prefill={"long": (page + 2, 2 * page + 5, True)}, accepts=(*accepts, ("short", 7))))
    return [*steps, Step(accepts=(("long", 7), ("short", 0), *accepts))]


def turnover(batch: int, page: int) -> list:
    keys = list(range(batch))
    steps = [Admit(key) for key in keys]
    steps.append(Step(prefill={key: (0, page - 1 + key, True) for key in keys}))
    for turn in range(3):
        steps.append(Step(accepts=tuple((key, (turn + key) % 8) for key in keys)))
        steps += [Release(keys[turn % batch]), Admit(keys[turn % batch])]
        steps.append(Step(prefill={keys[turn % batch]: (0, 2 + turn, True)}))
    return [*steps, Step(accepts=tuple((key, 7) for key in reversed(keys)))]


def ceiling(batch: int, page: int) -> list:
    """Requests run into their limits, at and behind a page's edge."""
    keys = list(range(batch))
    limits = [2 * page + 1 + key % 3 for key in keys]
    steps = [Admit(key, limit) for key, limit in zip(keys, limits, strict=True)]
    steps.append(Step(prefill={key: (0, 2 * page - 9 + key % 2, True) for key in keys}))
    steps.append(Step(accepts=tuple((key, 7) for key in keys)))
    return [*steps, Step(accepts=tuple((key, key % 2) for key in keys))]


def padded(batch: int, page: int) -> list:
    keys = list(range(batch))
    steps = [Admit(key) for key in keys]
    steps.append(Step(prefill={key: (0, page - 2, True) for key in keys}))
    rows = [(key, (key + 5) % 8) for key in keys]
    return [*steps, Step(accepts=(*rows, (DUMMY, 0))), Step(accepts=((DUMMY, 0), *rows, (DUMMY, 0))), Step(accepts=tuple(rows))]


SCENARIOS = {"steady": steady, "mixed": mixed, "turnover": turnover, "ceiling": ceiling, "padded": padded}


def make_worker(
    model: MLADSparkForCausalLM,
    runtime: RuntimeConfig,
    layout: Layout,
    *,
    page_size: int = PAGE,
    num_pages: int = 160,
    max_requests: int = 12,
) -> DFlashWorker:
    """A worker on a pool that is filled with a pattern, so that every byte can be compared; it captures every batch size, since
    a padded batch has another row count, and equality to the bit is for equal ones."""
    sizes = {"num_pages": num_pages, "max_requests": max_requests, "max_positions": 12 * page_size}
    config = PoolConfig(page_size=page_size, layout=layout, **sizes)
    dtype = pool_dtype_for(runtime.kv_dtype, model.dtype)
    pool = LatentKVPool(config, model.config, dtype=dtype, device=model.device)
    pattern = torch.arange(pool.storage.numel(), device=model.device) % 251
    pool.storage.copy_((pattern - 120).reshape(pool.storage.shape).to(pool.dtype))
    return DFlashWorker(model, pool, runtime, graph_batch_sizes=range(1, max_requests + 1))


DIVISOR = 3  # of the encoded offsets of lent pages


def make_lent_worker(model: MLADSparkForCausalLM, runtime: RuntimeConfig, *, page_size: int = PAGE) -> DFlashWorker:
    """As `make_worker`, in a pool of an outside engine, with a gap behind the layers of each page."""
    dtype = pool_dtype_for(runtime.kv_dtype, model.dtype)
    pages, layers, width = 160, model.config.num_hidden_layers, pool_row_width(model.config.latent_dim, dtype)
    memory = torch.arange(pages * (layers + 1) * page_size * width, device=model.device) % 251 - 120
    views = memory.to(dtype).view(pages, layers + 1, page_size, width).unbind(1)[:layers]
    config = PoolConfig(page_size=page_size, num_pages=pages, max_requests=12, max_positions=12 * page_size)
    pool = ExternalLatentPool(config, model.config, views, divisor=DIVISOR)
    return DFlashWorker(model, pool, runtime, graph_batch_sizes=range(1, 13))


def all_bytes(pool: PagedLatents) -> torch.Tensor:
    """The whole memory that a pool's pages lie in."""
    view = pool.layer_views[0]
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(view.untyped_storage())


def switch_sets(profile: str) -> list[tuple[str, ...]]:
    """Every set of the exact switches that a profile has, but the empty one."""
    names = switches_of(profile)
    return [s for n in range(1, len(names) + 1) for s in itertools.combinations(names, n)]


def switches_of(profile: str) -> tuple[str, ...]:
    """torch's norm and rotation have no form that stores into the pool."""
    has_direct = "latent_norm_rope" in K3_PROFILES[profile]
    return tuple(name for name in EXACT_SWITCHES if name != "direct_pool_write" or has_direct)


def with_switches(names: tuple[str, ...], profile: str = "torch") -> RuntimeConfig:
    """The plain runtime of a profile with some switches required."""
    return dataclasses.replace(RuntimeConfig.plain(), **K3_PROFILES[profile], **dict.fromkeys(names, "require"))


class Duel:
    """Two workers over one scenario: `plain` decides what the target says, `fast` has to follow to the bit."""

    def __init__(self, plain: DFlashWorker, fast: DFlashWorker, seed: int = 0):
        self.plain, self.fast, self.config = plain, fast, plain.model.config
        self.draw = torch.Generator().manual_seed(seed)
        self.drafts: dict[Hashable, list[int]] = {}
        self.lent: dict[Hashable, torch.Tensor] = {}
        self.free = torch.randperm(plain.pool.config.num_pages, generator=self.draw).tolist()
        self.steps = 0

    def run(self, script: list) -> None:
        """Follow a script of operations."""
        for operation in script:
            if isinstance(operation, Admit):
                pages = [self.free.pop(0) for _ in range(14)] if isinstance(self.plain.pool, ExternalLatentPool) else []
                self.lent[operation.key] = torch.tensor([page * DIVISOR for page in pages] + [-1, 0])
                for worker in (self.plain, self.fast):
                    worker.admit(operation.key, max_context=operation.max_context)
            elif isinstance(operation, Release):
                self.free += (self.lent[operation.key][:-2] // DIVISOR).tolist()
                for worker in (self.plain, self.fast):
                    worker.release(operation.key)
            else:
                self._step(operation)

    def _step(self, step: Step) -> None:
        step_input = self._input(step)
        ours, theirs = self.fast.step(step_input), self.plain.step(step_input)
        for worker in (self.plain, self.fast):
            worker.synchronize()
        self.steps += 1
        compare_outputs(ours, theirs, f"step {self.steps}")
        compare_state(self.fast, self.plain, f"step {self.steps}")
        for index, key in enumerate(theirs.request_ids):
            if key is not None:
                self.drafts[key] = theirs.draft_tokens[index].tolist()

    def _hidden(self, *shape: int) -> torch.Tensor:
        rows = torch.randn(*shape, self.config.context_width, generator=self.draw)
        return rows.to(self.plain.model.dtype).to(self.plain.model.device)

    def _input(self, step: Step) -> StepInput:
        context = [
            ContextChunk(
                request_id=key,
                target_hidden=self._hidden(end - start),
                start_position=start,
                anchor=(7 * end + 3) % self.config.vocab_size if last else None,
            )
            for key, (start, end, last) in step.prefill.items()
        ]
        keys = [key for key, _ in step.accepts]
        live = [*step.prefill, *(key for key in keys if key is not DUMMY)]
        block_table = None
        if isinstance(self.plain.pool, ExternalLatentPool):
            block_table = torch.stack([self.lent[key] for key in live]).to(self.plain.model.device)
        if not keys:
            return StepInput(context=context, block_table=block_table)
        width = self.plain.num_drafts + 1
        hidden = self._hidden(len(keys), width)
        tokens = torch.full((len(keys), width), -(2**40), dtype=torch.int64)
        for row, (key, accepted) in enumerate(step.accepts):
            if key is DUMMY:
                hidden[row] = float("nan")
                continue
            drafts = torch.tensor([*self.drafts[key], 0]).clamp(min=0)
            other = (drafts + 1 + torch.arange(width)) % self.config.vocab_size
            tokens[row] = torch.where(torch.arange(width) < accepted, drafts, other)
        rows = GenerationRows(request_ids=keys, target_hidden=hidden, target_tokens=tokens.to(hidden.device))
        return StepInput(context=context, generation=rows, block_table=block_table)


def compare_outputs(ours: StepOutput, theirs: StepOutput, where: str) -> None:
    assert ours.request_ids == theirs.request_ids
    for item in dataclasses.fields(StepOutput):
        a, b = getattr(ours, item.name), getattr(theirs, item.name)
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
            assert_bitwise_equal(a, b, f"{where}, {item.name}")


def compare_state(ours: DFlashWorker, theirs: DFlashWorker, where: str) -> None:
    """The whole pool, the page tables, every slot and the host's records."""
    assert_bitwise_equal(all_bytes(ours.pool), all_bytes(theirs.pool), f"{where}, pool")
    assert_bitwise_equal(ours.pool.page_table, theirs.pool.page_table, f"{where}, page table")
    assert_bitwise_equal(ours.pool.num_pages, theirs.pool.num_pages, f"{where}, page counts")
    for name, tensor in vars(ours._slots).items():
        if isinstance(tensor, torch.Tensor):
            assert_bitwise_equal(tensor, vars(theirs._slots)[name], f"{where}, {name}")
    assert ours._requests == theirs._requests, where


def small_model(dtype: torch.dtype = torch.float32, device: str = "cpu", **changes) -> MLADSparkForCausalLM:
    from dspark_model.testing import random_model, tiny_config

    config: DrafterConfig = tiny_config(**changes)
    return random_model(config, 5, dtype, device)
