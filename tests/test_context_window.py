"""`PoolConfig.context_window`: a drafter that sees the last W context rows, whose older pages go back to the pool."""

import dataclasses
import itertools

import pytest
import torch
from drafting import make_worker, random_hidden

from dspark_model import ContextChunk, DFlashWorker, GenerationRows, LatentKVPool, PoolConfig, StepInput
from dspark_model.config_keys import ConfigError
from dspark_model.external_pool import ExternalLatentPool
from dspark_model.kv_pool import CapacityError
from dspark_model.serving_config import RuntimeConfig
from dspark_model.testing import assert_bitwise_equal, poison_, random_model, tiny_config

PAGE, DRAFTS = 4, 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RUNTIMES = {
    "plain": RuntimeConfig.plain(),
    "auto": RuntimeConfig(),
    "triton": dataclasses.replace(RuntimeConfig.plain(), attention="triton", fused_prologue="require"),
}


def windowed(model, window, *, pages=60, requests=3, positions=120, runtime="plain") -> DFlashWorker:
    config = PoolConfig(
        page_size=PAGE, num_pages=pages, max_requests=requests, max_positions=positions, num_drafts=DRAFTS,
        context_window=window,
    )  # fmt: skip
    pool = LatentKVPool(config, model.config, dtype=model.dtype, device=model.device)
    poison_(pool.storage)
    return DFlashWorker(model, pool, RUNTIMES[runtime])


def chunk(model, key, start, rows, anchor=None, seed=0):
    hidden = hidden_rows(model, rows, seed + 1000 * start)
    return StepInput(context=[ContextChunk(request_id=key, target_hidden=hidden, start_position=start, anchor=anchor)])


def hidden_rows(model, rows, seed):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, model.config.context_width, generator=draw).to(model.device, model.dtype)


def decode(worker, keys, seed, accepted=2):
    """A step in which each request commits `accepted` + 1 tokens."""
    model, width = worker.model, worker.num_drafts + 1
    hidden = hidden_rows(model, len(keys) * width, seed).view(len(keys), width, -1)
    tokens = (torch.arange(len(keys) * width).view(len(keys), width) * 7 + seed) % model.config.vocab_size
    return worker.step(StepInput(generation=GenerationRows(
        request_ids=keys, target_hidden=hidden, committed_tokens=tokens.to(model.device),
        num_committed=torch.full((len(keys),), accepted + 1, device=model.device),
    )))  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return random_model(tiny_config(), device=DEVICE)


# In the interpreter the kernels take half a minute.
CASES = [
    (window, name) for window in (1, 3, 4, 9, 200) for name in RUNTIMES if DEVICE == "cuda" or name != "triton" or window == 9
]


@pytest.mark.parametrize(("window", "runtime"), CASES)
def test_outputs_are_those_of_pages_that_were_kept(model, window, runtime, monkeypatch):
    """Page by page given back, poisoned and taken by others; beside a worker whose pool forgets nothing."""
    ours, kept = (windowed(model, window, pages=80, runtime=runtime) for _ in range(2))
    monkeypatch.setattr(kept.pool, "forget", lambda slot, length: None)
    monkeypatch.setattr(kept.pool, "_most_pages", kept.pool.pages_for)
    for worker in (ours, kept):
        for key in "ab":
            worker.admit(key)
    outputs = []
    for worker in (ours, kept):
        made = [worker.step(chunk(model, "a", 0, 17)), worker.step(chunk(model, "a", 17, 6, seed=5))]
        poison_free_pages(worker)
        made.append(worker.step(chunk(model, "a", 23, 0, anchor=1)))  # sees the oldest row that 23 rows leave
        made.append(worker.step(chunk(model, "b", 0, 2, anchor=2, seed=9)))
        for turn in range(4 if (DEVICE, runtime) == ("cpu", "triton") else 12):
            poison_free_pages(worker)
            made.append(decode(worker, ["a", "b"] if turn % 3 else ["b", "a"], turn, accepted=turn % 4))
            made[-1] = dataclasses.replace(made[-1], confidence=made[-1].confidence.clone())
        outputs.append([step.confidence.clone() for step in made if step.confidence is not None])
    assert len(outputs[0]) >= 6
    for step, (left, right) in enumerate(zip(*outputs, strict=True)):
        assert_bitwise_equal(left, right, f"step {step}")
    assert not any(request.num_dropped for request in ours._requests.values())


def poison_free_pages(worker) -> None:
    """Rows of pages that nobody holds become NaN."""
    worker.synchronize()
    held = {page for slot in worker.pool._pages for page in worker.pool.pages_of(slot)}
    free = [page for page in range(worker.pool.config.num_pages) if page not in held]
    for view in worker.pool.layer_views:
        view[free] = float("nan")


def test_only_rows_of_the_window_have_influence(model):
    """The drafts' confidence follows the row at the window's edge and not the one before it."""
    window, length = 9, 22

    def confidence(changed):
        worker = windowed(model, window)
        worker.admit("a")
        hidden = hidden_rows(model, length, 3)
        if changed is not None:
            hidden[changed] += 1.0
        return worker.step(
            StepInput(context=[ContextChunk(request_id="a", target_hidden=hidden, start_position=0, anchor=1)])
        ).confidence

    before = confidence(None)
    for row in range(length):
        assert torch.equal(confidence(row), before) == (row < length - window), row


def test_a_window_as_long_as_the_context_changes_nothing(model):
    results = []
    for window in (None, 120):
        worker = windowed(model, window)
        worker.admit("a")
        worker.step(chunk(model, "a", 0, 30, anchor=1))
        results.append([decode(worker, ["a"], turn).confidence.clone() for turn in range(8)])
    for left, right in zip(*results, strict=True):
        assert_bitwise_equal(left, right)


@pytest.mark.parametrize("runtime", ["plain", "auto"])
def test_long_requests_live_in_few_pages(model, runtime):
    """Two requests of 100 rows and more, in a pool with room for 36 rows of each."""
    worker = windowed(model, 8, pages=18, requests=2, runtime=runtime)
    worker.admit("a")
    worker.admit("b")
    assert worker.pool.num_available_pages == 4  # 7 pages promised to each: 8 + 16 rows, and one that they begin inside
    for key, seed in (("a", 0), ("b", 50)):
        for start in range(0, 40, 10):
            worker.step(chunk(model, key, start, 10, anchor=1 if start == 30 else None, seed=seed))
    for turn in range(20):
        decode(worker, ["a", "b"], turn)
        worker.synchronize()
        assert worker.pool.num_held_pages <= 16
    assert worker.context_length("a") == 100
    for key in "ab":
        worker.release(key)
    assert (worker.pool.num_available_pages, worker.pool.num_held_pages) == (18, 0)


def test_a_long_chunk_borrows_pages_and_pays_them_back(model):
    worker = windowed(model, 8, pages=20, requests=2)
    worker.admit("a")
    available = worker.pool.num_available_pages
    worker.step(chunk(model, "a", 0, 70, anchor=1))
    # Rows 62 to 69 are seen; their pages begin at row 60, and the block's rows stand behind them.
    assert worker.pool.num_held_pages == -(-(70 + worker.block_rows) // PAGE) - 15
    assert worker.pool.num_available_pages == available
    worker.release("a")
    assert worker.pool.num_available_pages == 20


def test_a_chunk_that_finds_no_pages_changes_nothing(model):
    worker = windowed(model, 8, pages=16, requests=2)
    worker.admit("a")
    worker.admit("b")
    worker.step(chunk(model, "b", 0, 3, anchor=1))
    before = (worker.pool.num_available_pages, worker.pool.num_held_pages, worker.pool.page_table.clone())
    with pytest.raises(CapacityError, match="send it in smaller ones"):
        worker.step(chunk(model, "a", 0, 60))
    assert (worker.pool.num_available_pages, worker.pool.num_held_pages) == before[:2]
    assert torch.equal(worker.pool.page_table, before[2])
    for start in range(0, 60, 10):
        worker.step(chunk(model, "a", start, 10))
    assert worker.context_length("a") == 60


def test_a_step_that_fails_gives_borrowed_pages_back(model, monkeypatch):
    worker = windowed(model, 8, pages=20, requests=2)
    worker.admit("a")
    before = (worker.pool.num_available_pages, worker.pool.num_held_pages)
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_run", lambda *args, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            worker.step(chunk(model, "a", 0, 50))
    assert (worker.pool.num_available_pages, worker.pool.num_held_pages) == before
    worker.step(chunk(model, "a", 0, 50, anchor=1))


def test_promises_hold_whatever_is_sent(model):
    """Any order of chunks, verdicts and lengths ends with all pages back, and no request is refused what it was promised."""
    draw = torch.Generator().manual_seed(4)

    def any_of(count):
        return int(torch.randint(count, (1,), generator=draw))

    for window, _ in itertools.product((1, 5, 8), range(4)):
        worker = windowed(model, window, pages=40, requests=2)
        for key in "ab":
            worker.admit(key)
            start = 0
            for _ in range(1 + any_of(4)):
                rows = 1 + any_of(12)
                worker.step(chunk(model, key, start, rows))
                start += rows
            worker.step(chunk(model, key, start, 0, anchor=1))
        for turn in range(10):
            decode(worker, ["a", "b"][any_of(2) :], turn, accepted=any_of(4))
            for request in worker._requests.values():
                held = worker.pool.pages_of(request.slot)
                first = max(0, request.length - window) // PAGE
                row = worker.pool.page_table[request.slot]
                assert (row[:first] == -1).all()
                assert row[first : first + len(held)].tolist() == list(held)
        for key in "ab":
            worker.release(key)
        assert (worker.pool.num_available_pages, worker.pool.num_held_pages) == (40, 0)


def test_prefixes_and_external_pools_are_refused(model):
    worker = windowed(model, 8)
    worker.admit("a")
    worker.step(chunk(model, "a", 0, 10, anchor=1))
    with pytest.raises(ValueError, match="context_window=8 gives old pages back"):
        worker.retain_prefix("a", 8)
    other = make_worker(model, RUNTIMES["plain"])
    other.admit("a")
    other.step(
        StepInput(context=[ContextChunk(request_id="a", target_hidden=random_hidden(model, 9).to(DEVICE), start_position=0)])
    )
    prefix = other.retain_prefix("a", 8)
    with pytest.raises(ValueError, match="leave the prefix out"):
        worker.admit("b", prefix=prefix)
    assert worker.num_requests == 1
    with pytest.raises(ValueError, match="outside engine decides"):
        ExternalLatentPool(worker.pool.config, model.config, worker.pool.layer_views)
    assert "the last 8 rows of a context" in worker.describe()["pool"]


@pytest.mark.parametrize("window", [0, -3, 2.5, True])
def test_windows_are_checked(window):
    with pytest.raises(ConfigError, match="pool.context_window"):
        PoolConfig(num_pages=4, max_requests=1, max_positions=8, context_window=window)


def test_captured_steps_wait_only_when_pages_run_out(model, monkeypatch):
    """Their lengths stay unknown until the worker has to wait for them: then older pages come back, and the outputs are those
    of a pool that forgets nothing."""
    runtime = dataclasses.replace(RuntimeConfig.plain(), cuda_graph="require")
    monkeypatch.setitem(RUNTIMES, "captured", runtime)
    outputs, waits = [], 0
    for keeps in (False, True):
        worker = windowed(model, 8, pages=60, requests=1, runtime="captured")
        if keeps:
            monkeypatch.setattr(worker.pool, "forget", lambda slot, length: None)
            monkeypatch.setattr(worker.pool, "_most_pages", worker.pool.pages_for)
        settle = worker._in_flight.settle

        def late(*, wait, settle=settle, keeps=keeps, in_flight=worker._in_flight):
            nonlocal waits
            if wait:
                waits += not keeps and len(in_flight) > 0
                settle(wait=True)

        worker.admit("a")
        worker.step(chunk(model, "a", 0, 30, anchor=1))
        monkeypatch.setattr(worker._in_flight, "settle", late)
        made = []
        for turn in range(20):
            hidden = hidden_rows(model, DRAFTS + 1, turn).view(1, DRAFTS + 1, -1)
            tokens = torch.full((1, DRAFTS + 1), turn, device=model.device)
            step = worker.step(
                StepInput(generation=GenerationRows(request_ids=["a"], target_hidden=hidden, target_tokens=tokens))
            )
            made.append(step.confidence.clone())
            assert worker.pool.num_held_pages <= worker.pool.pages_for(30 + 20 * 4 + worker.block_rows)
        assert worker.num_replays >= 19
        worker.synchronize()
        assert not worker._requests["a"].num_dropped
        outputs.append(made)
    for left, right in zip(*outputs, strict=True):
        assert_bitwise_equal(left, right)
    assert 2 <= waits < 20
