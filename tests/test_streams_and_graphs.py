"""On a GPU: the switch matrix at Kimi K3's shape of one rank, streams with and without fork and join, and steady replays."""

import dataclasses
import gc
import importlib.util
import itertools
from contextlib import contextmanager

import pytest
import torch
from switch_matrix import (
    DIVISOR,
    EXACT_SWITCHES,
    K3_PROFILES,
    PROFILES,
    SCENARIOS,
    Admit,
    Duel,
    Release,
    Step,
    make_lent_worker,
    make_worker,
    small_model,
    switch_sets,
    switches_of,
    with_switches,
)

from dspark_model import ContextChunk, GenerationRows, RuntimeConfig, StepInput, ops
from dspark_model.bench.k3_rank import PAGE_SIZE, k3_rank_config, random_drafter
from dspark_model.modeling import BlockContext, BlockPaths
from dspark_model.serving_config import Layout
from dspark_model.streams import SideStream
from dspark_model.testing import assert_bitwise_equal

pytestmark = pytest.mark.gpu
ALL = switches_of("torch")
PLAIN = RuntimeConfig.plain()
CYCLES = 2_000_000  # about a millisecond


@pytest.fixture(scope="module")
def k3_model():
    return random_drafter(k3_rank_config())


def k3_grid() -> list[tuple]:
    """Every set of switches of torch and triton in every scenario with 4 requests; of every profile all switches with 1, 4
    and 9, and of `persistent` with 2, in both layouts."""
    sets = [
        (profile, name, names, 4, Layout.LAYER_MAJOR)
        for profile in ("torch", "triton")
        for name, names in itertools.product(SCENARIOS, switch_sets(profile))
    ]
    return sets + [
        (profile, name, switches_of(profile), batch, layout)
        for profile, name, batch, layout in itertools.product(K3_PROFILES, SCENARIOS, (1, 2, 4, 9), Layout)
        if batch != 2 or profile == "persistent"
    ]


@pytest.mark.parametrize(("profile", "scenario", "switches", "batch", "layout"), k3_grid(),
                         ids=lambda value: "+".join(value) if isinstance(value, tuple) else str(value))  # fmt: skip
def test_k3_matrix(k3_model, profile, scenario, switches, batch, layout):
    gc.collect()  # workers of tests before, one of which may be the one that launches early
    runtimes = with_switches(switches, profile), with_switches((), profile)
    fast, plain = (make_worker(k3_model, runtime, layout, page_size=PAGE_SIZE) for runtime in runtimes)
    if profile == "persistent":
        assert fast.describe()["persistent_launches"] == "begin beside the kernel before"
    duel = Duel(plain, fast)
    duel.run(SCENARIOS[scenario](batch, PAGE_SIZE))
    assert {name for name in EXACT_SWITCHES if duel.fast.resolved.takes(name)} == set(switches)
    assert (duel.fast.num_replays > 0) == ("cuda_graph" in switches)


class LateSide(SideStream):
    """The side stream starts its work late."""

    cycles = CYCLES

    @contextmanager
    def fork(self, *reads):
        with super().fork(*reads):
            torch.cuda._sleep(self.cycles)
            yield


class LateMain(SideStream):
    """The main stream is busy when it forks, and again behind the fork."""

    cycles = CYCLES

    @contextmanager
    def fork(self, *reads):
        torch.cuda._sleep(self.cycles)
        with super().fork(*reads):
            yield
        torch.cuda._sleep(self.cycles)


class NoFork(SideStream):
    """The side stream does not wait for the main one, which is late."""

    cycles = CYCLES

    @contextmanager
    def fork(self, *reads):
        torch.cuda._sleep(self.cycles)
        with torch.cuda.stream(self._stream):
            yield


class NoJoin(LateSide):
    """The main stream does not wait for the side one, which is late."""

    def join(self):
        pass


def overlapping_duel(side: type[SideStream]) -> Duel:
    model = small_model(device="cuda")
    switches = ("fused_prologue", "overlap_context_projection")
    duel = Duel(*(make_worker(model, runtime, Layout.LAYER_MAJOR) for runtime in (PLAIN, with_switches(switches))))
    duel.fast._side = side(model.device)
    return duel


@pytest.mark.parametrize("side", [LateSide, LateMain])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_delaying_a_stream_changes_nothing(side, scenario):
    overlapping_duel(side).run(SCENARIOS[scenario](4, 8))


def run_with_late_inputs(side: type[SideStream]) -> Duel:
    """A step whose hidden rows are written late on the main stream, into memory that holds zeros.  It goes past the checks of
    `step`, which wait for the device, and past a capture, which refuses a stream that was not forked or joined."""
    duel = overlapping_duel(side)
    script = SCENARIOS["steady"](4, 8)
    duel.run(script[:5])
    duel.fast._side.cycles = 50 * CYCLES  # beside 14 other processes the host took longer than one to launch the step
    step_input = duel._input(script[5])
    duel.plain.step(step_input)
    rows, worker = step_input.generation, duel.fast
    late = torch.zeros_like(rows.target_hidden)
    late_input = StepInput(generation=dataclasses.replace(rows, target_hidden=late))
    plan = worker._checker.plan(late_input, worker._requests, read_values=False)
    worker.pool.begin_step(plan.rows_needed, None)
    slots = torch.tensor([request.slot for request in plan.requests], device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(50 * CYCLES)
    late.copy_(rows.target_hidden)
    worker._run(plan, slots, worker.resolved, keep_logits=False)
    torch.cuda.synchronize()
    return duel


@pytest.mark.parametrize("side", [SideStream, LateSide, LateMain])
def test_late_inputs_are_waited_for(side):
    duel = run_with_late_inputs(side)
    assert_bitwise_equal(duel.fast.pool.storage, duel.plain.pool.storage)


@pytest.mark.parametrize("side", [NoFork, NoJoin])
def test_a_missing_fork_or_join_is_caught(side):
    duel = run_with_late_inputs(side)
    with pytest.raises(AssertionError, match="differ"):
        assert_bitwise_equal(duel.fast.pool.storage, duel.plain.pool.storage)


def test_memory_that_a_fork_reads_has_no_other_user_before_the_join():
    side = LateSide(torch.device("cuda"))
    x = torch.ones(1 << 20, device="cuda")
    at = x.data_ptr()
    with side.fork(x):
        doubled = 2 * x
    del x
    other = torch.zeros(1 << 20, device="cuda")
    assert other.data_ptr() != at
    side.join()
    assert (doubled == 2).all()


SPLIT_PATHS = {
    "plain": BlockPaths(),
    "fused": BlockPaths(fused_store=True),
    "direct_triton": BlockPaths(latent_norm_rope="triton", direct_pool_write=True),
    "merged": BlockPaths(merged_qkv_a=True),
    "merged_direct": BlockPaths(merged_qkv_a=True, latent_norm_rope="triton", direct_pool_write=True),
}
if importlib.util.find_spec("cutlass"):
    SPLIT_PATHS["direct_cute"] = BlockPaths(latent_norm_rope="cute", direct_pool_write=True)


def decode_late_block(paths: BlockPaths, side: type[SideStream] | None) -> list[torch.Tensor]:
    """Final rows and pool of a block of 4 requests whose input rows are written late on the main stream, into zeros; `side`
    takes the latents of each layer.  Streams are about 10 ms late, far more than the host needs to launch the block."""
    model = small_model(device="cuda")
    worker = make_worker(model, PLAIN, Layout.PAGE_MAJOR)
    model.merge_qkv_a()
    lens, rows = torch.tensor([3, 9, 8, 20], device="cuda"), 7
    page_table = torch.randperm(16, device="cuda").int().view(4, 4)
    pages = torch.full((4,), 4, device="cuda")
    block = ops.block_fixup(lens, page_table, pages, lens > 0, rows=rows, page_size=worker.pool.config.page_size)
    stream = None if side is None else side(model.device)
    if stream is not None:
        stream.cycles = 10 * CYCLES
    context = BlockContext(
        layer_views=worker.pool.layer_views,
        page_table=page_table,
        context_lens=lens,
        rows=block,
        cos_sin=worker.rope.rows(block.positions),
        max_seq_len=32,
        paths=dataclasses.replace(paths, side=stream),
    )
    rows_in = torch.randn(4, rows, model.config.hidden_size, device="cuda")
    late = torch.zeros_like(rows_in)
    with torch.inference_mode():
        model.decode_block(late, dataclasses.replace(context, paths=paths))  # compiles, and leaves other rows in freed memory
        worker.pool.storage.fill_(0.5)
        torch.cuda.synchronize()
        torch.cuda._sleep(10 * CYCLES)
        late.copy_(rows_in)
        final = model.decode_block(late, context)
        torch.cuda.synchronize()
    return [final, worker.pool.storage]


@pytest.mark.parametrize("side", [SideStream, LateSide, LateMain])
@pytest.mark.parametrize("paths", SPLIT_PATHS)
def test_split_streams_wait_for_each_other(paths, side, seed):
    split = decode_late_block(SPLIT_PATHS[paths], side)
    torch.manual_seed(seed)
    for ours, theirs in zip(split, decode_late_block(SPLIT_PATHS[paths], None), strict=True):
        assert_bitwise_equal(ours, theirs)


@pytest.mark.parametrize("side", [NoFork, NoJoin])
@pytest.mark.parametrize("paths", SPLIT_PATHS)
def test_split_streams_without_fork_or_join_are_caught(paths, side, seed):
    """Run before the reference, so that no freed memory holds the right values by chance."""
    split = decode_late_block(SPLIT_PATHS[paths], side)
    torch.manual_seed(seed)
    whole = decode_late_block(SPLIT_PATHS[paths], None)
    with pytest.raises(AssertionError, match="differ"):
        for ours, theirs in zip(split, whole, strict=True):
            assert_bitwise_equal(ours, theirs)


def churn(batch: int, page: int, steps: int) -> list:
    """Decode steps of requests that are released near their limit of 12 pages and start again with other pages."""
    lengths = {key: page - 3 + 5 * key for key in range(batch)}
    script = [Admit(key) for key in lengths]
    script.append(Step(prefill={key: (0, length, True) for key, length in lengths.items()}))
    for turn in range(steps):
        for key in [key for key, length in lengths.items() if length > 11 * page]:
            lengths[key] = 1 + (turn + key) % page
            script += [Release(key), Admit(key), Step(prefill={key: (0, lengths[key], True)})]
        accepts = {key: (3 * key + turn) % 9 for key in lengths}
        script.append(Step(accepts=tuple(accepts.items())))
        lengths = {key: length + min(accepts[key], 7) + 1 for key, length in lengths.items()}
    return script


@pytest.mark.parametrize("side", [LateSide, LateMain])
@pytest.mark.parametrize("profile", [name for name in ("triton", "cute") if name in PROFILES])
def test_500_replays_with_a_late_stream_are_equal_to_the_bit(profile, side):
    """All switches with a stream that is 50 microseconds late at each fork, against captured steps without other switches."""
    model = small_model(device="cuda")
    runtimes = with_switches(("cuda_graph",), profile), with_switches(switches_of(profile), profile)
    duel = Duel(*(make_worker(model, runtime, Layout.LAYER_MAJOR, page_size=32) for runtime in runtimes))
    duel.fast._side = side(model.device)
    duel.fast._side.cycles = CYCLES // 20
    duel.run(churn(4, 32, 500))
    assert duel.fast.num_replays == duel.plain.num_replays == 500


@pytest.mark.skipif("persistent" not in K3_PROFILES, reason="this needs a GPU and nvidia-cutlass-dsl")
@pytest.mark.parametrize("side", [LateSide, LateMain])
def test_replays_with_a_late_stream_whose_layers_store_the_context(k3_model, side):
    """The context's norm is behind the join there, and the first launch of the layers begins beside it."""
    gc.collect()  # workers of tests before, one of which may be the one that launches early
    runtimes = with_switches(switches_of("persistent"), "persistent"), with_switches(("cuda_graph",), "persistent")
    fast, plain = (make_worker(k3_model, runtime, Layout.LAYER_MAJOR, page_size=PAGE_SIZE) for runtime in runtimes)
    duel = Duel(plain, fast)
    fast._side = side(k3_model.device)
    fast._side.cycles = CYCLES // 20
    duel.run(churn(2, PAGE_SIZE, 60))
    assert duel.fast.num_replays == duel.plain.num_replays == 60


def lent_tables(keys: list[int], turn: int) -> torch.Tensor:
    """Encoded offsets of 14 pages for each of 4 requests, other pages in other turns."""
    pages = (torch.arange(4 * 14).view(4, 14) + 31 * turn) % 160
    return (pages[[key % 4 for key in keys]] * DIVISOR).cuda()


@pytest.mark.parametrize(("switches", "lent"), [(("cuda_graph",), False), (ALL, False), (ALL, True)],
                         ids=["graph", "all", "all_on_lent_pages"])  # fmt: skip
def test_steady_replays_neither_allocate_nor_wait(switches, lent):
    """1,000 replays over changing requests, lengths and pages; a request that is full is released and admitted again."""
    model, runtime = small_model(device="cuda"), with_switches(switches)
    worker = make_lent_worker(model, runtime) if lent else make_worker(model, runtime, Layout.LAYER_MAJOR, num_pages=400)
    batch, width = 4, worker.num_drafts + 1
    hidden = torch.randn(batch, width, model.config.context_width, device="cuda")
    tokens = torch.randint(0, model.config.vocab_size, (batch, width), device="cuda")
    keys, turn = list(range(batch)), 0

    def step(context: list[ContextChunk] | None = None) -> None:
        table = tables[: len(context)] if context else tables
        rows = None if context else GenerationRows(request_ids=keys, target_hidden=hidden, target_tokens=tokens)
        worker.step(StepInput(context=context or [], generation=rows, block_table=table if lent else None))

    def prefill(key):
        worker.admit(key)
        rows = torch.randn(5, model.config.context_width, device="cuda")
        step([ContextChunk(request_id=key, target_hidden=rows, start_position=0, anchor=3)])

    tables = lent_tables(keys, turn)
    for key in keys:
        prefill(key)
    for _ in range(3):
        step()
    steps, count = 0, torch.cuda.memory_stats()["allocation.all.allocated"]
    while steps < 1000:
        room = min(worker.pool.config.max_positions - worker._requests[key].length_bound(width) for key in keys)
        if room <= width:
            worker.synchronize()
            worker.release(keys[0])
            keys, turn = [*keys[1:], keys[0] + 4], turn + 1
            tables = lent_tables(keys, turn)
            prefill(keys[-1])
            count = torch.cuda.memory_stats()["allocation.all.allocated"]
            continue
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        steps += 1
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == count, "a steady step allocated device memory"
    assert worker.num_replays >= 1000
