"""The exact switches: a worker with any set of them equals the plain one to the bit, over the five scenarios."""

import dataclasses
import itertools

import pytest
import torch
from switch_matrix import (
    EXACT_SWITCHES,
    PAGE,
    PROFILES,
    SCENARIOS,
    Duel,
    Step,
    make_lent_worker,
    make_worker,
    small_model,
    switch_sets,
    switches_of,
    with_switches,
)

from dspark_model import ConfigError, DFlashWorker, LatentKVPool, RuntimeConfig
from dspark_model.serving_config import Layout
from dspark_model.testing import assert_bitwise_equal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALL = tuple(EXACT_SWITCHES)
PLAIN = RuntimeConfig.plain()


def grid() -> list[tuple]:
    """On a GPU everything for torch and triton; for the other profiles every set of switches in every scenario, with batch
    sizes and layouts in turn, and all switches together with each of them.  In Triton's interpreter, where a fused step takes
    about a second: each switch alone, all but each, and all switches of each profile in every scenario, of the later ones in
    one or two."""
    sizes = list(itertools.product((1, 4, 9), Layout))
    if DEVICE == "cuda":
        whole = itertools.product(("torch", "triton"), SCENARIOS, sizes)
        rows = [(profile, name, names, *size) for profile, name, size in whole for names in switch_sets(profile)]
        for profile in [name for name in PROFILES if name not in ("torch", "triton")]:
            turns = itertools.product(SCENARIOS, switch_sets(profile))
            rows += [(profile, name, names, *sizes[turn % 6]) for turn, (name, names) in enumerate(turns)]
            rows += [(profile, name, switches_of(profile), *size) for name, size in itertools.product(SCENARIOS, sizes)]
        return list(dict.fromkeys(rows))
    sets = [names for names in switch_sets("triton") if len(names) in (1, len(ALL) - 1)]
    rows = [("triton", "padded", names, 1, Layout.LAYER_MAJOR) for names in sets]
    rows += [
        (profile, name, switches_of(profile), 2, Layout.PAGE_MAJOR) for profile in ("torch", "triton") for name in SCENARIOS
    ]
    rows += [("merged", name, switches_of("merged"), 2, Layout.PAGE_MAJOR) for name in ("mixed", "ceiling")]
    rows += [("fp8", name, switches_of("fp8"), 2, Layout.PAGE_MAJOR) for name in ("mixed", "turnover", "ceiling")]
    rows += [("fp8_triton", "padded", switches_of("fp8_triton"), 1, Layout.LAYER_MAJOR)]
    rows += [("merged_triton", name, switches_of("merged_triton"), 2, Layout.PAGE_MAJOR) for name in ("steady", "padded")]
    return [*rows, ("low_m_merged", "ceiling", switches_of("low_m_merged"), 1, Layout.PAGE_MAJOR)]


@pytest.mark.parametrize(("profile", "scenario", "switches", "batch", "layout"), grid(),
                         ids=lambda value: "+".join(value) if isinstance(value, tuple) else str(value))  # fmt: skip
def test_matrix(profile, scenario, switches, batch, layout):
    model = small_model(device=DEVICE)
    plain = make_worker(model, with_switches((), profile), layout)
    fast = make_worker(model, with_switches(switches, profile), layout)
    duel = Duel(plain, fast)
    duel.run(SCENARIOS[scenario](batch, PAGE))
    assert duel.steps >= 3
    assert {name for name in EXACT_SWITCHES if fast.resolved.takes(name)} == set(switches)
    assert not any(plain.resolved.takes(name) for name in EXACT_SWITCHES)
    assert (fast.num_replays > 0) == ("cuda_graph" in switches)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_matrix_on_pages_of_an_outside_engine(scenario):
    model, runtimes = small_model(device=DEVICE), (with_switches((), "triton"), with_switches(ALL, "triton"))
    duel = Duel(*(make_lent_worker(model, runtime) for runtime in runtimes))
    duel.run(SCENARIOS[scenario](2, PAGE))
    assert duel.fast.num_replays > 0


@pytest.mark.parametrize("switches", [("cuda_graph",), ("cuda_graph", "fused_prologue")], ids="+".join)
@pytest.mark.parametrize("token", [-1, -(2**40), "vocab_size", 2**40])
def test_a_captured_step_drops_a_verdict_outside_the_vocabulary(switches, token):
    duel, steps = started(switches)
    step_input = duel._input(steps[0])
    plain = duel.plain.step(step_input)
    accepted = int(plain.num_accepted[0])
    tokens = step_input.generation.target_tokens
    tokens[0, accepted] = duel.config.vocab_size if token == "vocab_size" else token
    before = duel.fast.context_length(0)
    output = duel.fast.step(step_input)
    assert output.num_dropped.tolist() == [accepted + 1, 0]
    assert output.num_committed[0] == output.num_valid_drafts[0] == 0 and duel.fast.context_length(0) == before
    for name in ("committed_tokens", "draft_tokens", "num_committed", "anchor"):
        assert_bitwise_equal(getattr(output, name)[1], getattr(plain, name)[1], name)
    with pytest.raises(ValueError, match=f"request 0: {accepted + 1} rows of it had no page, or came with a token id outside"):
        duel.fast.step(step_input)
    duel.fast.release(0)


@pytest.mark.parametrize("fused", [False, True])
def test_a_captured_step_takes_a_page_that_is_not_there_for_none(fused):
    model, switches = small_model(device=DEVICE), ("cuda_graph", "fused_prologue")[: 1 + fused]
    worker = make_lent_worker(model, with_switches(switches))
    duel = Duel(make_lent_worker(model, PLAIN), worker)
    script = SCENARIOS["steady"](1, PAGE)
    duel.run(script[:2])
    step_input = duel._input(Step(accepts=((0, 7),)))
    step_input.block_table[0, 1:] = 160 * 3
    with pytest.raises(ValueError, match="names page 160, but the pool has 160"):
        duel.plain.step(step_input)
    output = worker.step(step_input)
    assert (int(output.num_committed), int(output.num_dropped)) == (8, 5) and worker.context_length(0) == PAGE
    assert worker.pool.num_pages[0] == 1


@pytest.mark.parametrize("changes", [{"sample_from_anchor": False}, {"markov_rank": 0, "confidence_head_with_markov": False},
                                     {"enable_confidence_head": False, "confidence_head_with_markov": False}],
                         ids=["plain_rule", "no_markov", "no_confidence"])  # fmt: skip
def test_other_drafters(changes):
    model = small_model(device=DEVICE, **changes)
    runtimes = with_switches((), "triton"), with_switches(ALL, "triton")
    duel = Duel(*(make_worker(model, runtime, Layout.PAGE_MAJOR) for runtime in runtimes))
    duel.run(SCENARIOS["mixed"](2, PAGE))


def started(switches: tuple[str, ...], batch: int = 2) -> tuple[Duel, list]:
    """A duel after its prefill, and the steps that are left of it."""
    model = small_model(device=DEVICE)
    duel = Duel(*(make_worker(model, runtime, Layout.LAYER_MAJOR) for runtime in (PLAIN, with_switches(switches))))
    script = SCENARIOS["steady"](batch, PAGE)
    duel.run(script[: batch + 1])
    return duel, script[batch + 1 :]


def test_a12_choice_is_read_when_the_step_runs():
    duel, steps = started(())
    step_input = duel._input(steps[0])
    once = duel.fast.step(step_input, runtime=with_switches(("fused_prologue",)))
    assert once.runtime.takes("fused_prologue") and not duel.fast.resolved.takes("fused_prologue")
    assert_bitwise_equal(once.draft_tokens, duel.plain.step(step_input).draft_tokens)


def test_a12_a_captured_step_keeps_what_it_was_captured_with():
    duel, steps = started(("cuda_graph",))
    duel.run(steps[:2])
    fused = with_switches(("cuda_graph", "fused_prologue"))
    step_input = duel._input(steps[2])
    output = duel.fast.step(step_input, runtime=fused)
    theirs = duel.plain.step(step_input)
    assert_bitwise_equal(output.draft_tokens, theirs.draft_tokens)
    assert output.runtime.takes("fused_prologue")
    assert duel.fast._graphs.num_graphs == 2
    assert sorted(duel.fast._graphs.replays.values()) == [1, 2]


def test_b3_without_the_fused_store_the_plain_code_projects_again(monkeypatch):
    calls = []
    duel, steps = started(("overlap_context_projection",))
    project = duel.fast.model.context_product
    monkeypatch.setattr(duel.fast.model, "context_product", lambda *rows: calls.append(1) or project(*rows))
    step_input = duel._input(steps[0])
    duel.fast.step(step_input)
    assert len(calls) == 2
    calls.clear()
    duel.fast.step(duel._input(steps[0]), runtime=with_switches(("overlap_context_projection", "fused_prologue")))
    assert len(calls) == 1


def test_steps_in_flight_are_bounded_until_they_are_taken_over():
    duel, steps = started(("cuda_graph",))
    step_input = duel._input(steps[0])
    duel.fast.step(step_input)
    duel.plain.step(step_input)
    request = duel.fast._requests[0]
    assert request.in_flight == 1
    assert request.length_bound(8) == request.length + 8
    assert duel.fast.context_length(0) == duel.plain.context_length(0)
    assert request.in_flight == 0 and len(duel.fast._in_flight) == 0


def test_several_steps_in_flight_are_taken_over_in_order(monkeypatch):
    duel, steps = started(("cuda_graph",))
    settle = duel.fast._in_flight.settle
    # As on a device that is always behind.
    monkeypatch.setattr(duel.fast._in_flight, "settle", lambda *, wait: settle(wait=True) if wait else None)
    for _ in range(3):
        step_input = duel._input(steps[0])
        duel.fast.step(step_input)
        duel.plain.step(step_input)
    assert [request.in_flight for request in duel.fast._requests.values()] == [3, 3]
    lengths = [request.length_bound(8) for request in duel.fast._requests.values()]
    duel.fast.synchronize()
    assert duel.fast._requests == duel.plain._requests
    assert all(request.length <= bound for request, bound in zip(duel.fast._requests.values(), lengths, strict=True))
    duel.fast.release(0)
    duel.plain.release(0)


def test_a_captured_step_says_why_another_step_was_not():
    duel, steps = started(("cuda_graph",))
    traced = duel.fast.step(duel._input(steps[0]), trace=True)
    choice = traced.runtime["cuda_graph"]
    assert (choice.in_force, choice.reason) == ("off", "a trace was asked for")
    assert duel.fast.num_replays == 0
    assert "0 captured" in duel.fast.describe()["graphs"]


def test_a_worker_that_keeps_distributions_captures_nothing():
    model = small_model(device=DEVICE)
    runtimes = (dataclasses.replace(r, draft_sampling="sample") for r in (PLAIN, with_switches(("cuda_graph",))))
    duel = Duel(*(make_worker(model, runtime, Layout.LAYER_MAJOR) for runtime in runtimes))
    duel.run(SCENARIOS["steady"](1, PAGE)[:2])
    choice = duel.fast.step(duel._input(SCENARIOS["steady"](1, PAGE)[2])).runtime["cuda_graph"]
    assert choice.in_force == "off" and "draft_sampling=sample" in choice.reason


def test_outputs_of_a_captured_step_are_overwritten_by_the_next():
    duel, steps = started(("cuda_graph",))
    first = duel.fast.step(duel._input(steps[0]))
    duel.fast.synchronize()
    kept = first.next_tokens.clone()
    duel.drafts = {0: kept[0, 1:].tolist(), 1: kept[1, 1:].tolist()}
    second = duel.fast.step(duel._input(steps[3]))
    assert second.next_tokens.data_ptr() == first.next_tokens.data_ptr()
    assert not torch.equal(kept, first.next_tokens)


def test_a_padded_batch_drafts_what_the_same_rows_draft_with_explicit_dummies():
    model = small_model(device=DEVICE)
    workers = [make_worker(model, runtime, Layout.LAYER_MAJOR) for runtime in (PLAIN, with_switches(("cuda_graph",)))]
    duel = Duel(*workers)
    duel.fast._graphs.batch_sizes = (4,)
    script = SCENARIOS["padded"](3, PAGE)
    duel.run(script[:-1])
    assert duel.fast.num_replays == 1


@pytest.mark.parametrize("sizes", [(), (0,), (2, True), (1.5,)])
def test_graph_batch_sizes_are_checked(sizes):
    model = small_model()
    pool = make_worker(model, PLAIN, Layout.LAYER_MAJOR).pool
    with pytest.raises(ValueError, match="wanted one or more whole numbers of at least 1"):
        DFlashWorker(model, pool, PLAIN, graph_batch_sizes=sizes)


def test_a10_another_pool_dtype_falls_back_with_a_reason():
    model = small_model(torch.float32, DEVICE)
    auto = dataclasses.replace(PLAIN, fused_prologue="auto", kv_dtype="bfloat16")
    config = make_worker(model, PLAIN, Layout.LAYER_MAJOR).pool.config
    pool = LatentKVPool(config, model.config, dtype=torch.bfloat16, device=DEVICE)
    choice = DFlashWorker(model, pool, auto).resolved["fused_prologue"]
    assert choice.fell_back
    assert "its stores copy bits, and the pool is torch.bfloat16" in choice.reason
    with pytest.raises(ConfigError, match="fused_prologue=require cannot be met: its stores copy bits"):
        DFlashWorker(model, pool, dataclasses.replace(auto, fused_prologue="require"))
