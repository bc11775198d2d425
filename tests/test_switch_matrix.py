"""`fused_prologue`: the kernels' worker equals the plain one to the bit, over the switch matrix; when it is not taken."""

import dataclasses
import itertools

import pytest
import torch
from switch_matrix import SCENARIOS, Duel, make_worker, small_model

from dspark_model import ConfigError, RuntimeConfig
from dspark_model.serving_config import Layout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# In the interpreter a step takes about a second, so a CPU sees two of the six.
GRID = list(itertools.product((1, 4, 9), Layout)) if DEVICE == "cuda" else [(1, Layout.PAGE_MAJOR), (4, Layout.LAYER_MAJOR)]
FUSED = dataclasses.replace(RuntimeConfig.plain(), fused_prologue="require")


@pytest.mark.parametrize(("batch", "layout"), GRID)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_matrix(scenario, batch, layout):
    model = small_model(device=DEVICE)
    plain, fast = (make_worker(model, runtime, layout) for runtime in (RuntimeConfig.plain(), FUSED))
    duel = Duel(plain, fast)
    duel.run(SCENARIOS[scenario](batch))
    assert duel.steps >= 3
    assert fast.resolved.takes("fused_prologue") and not plain.resolved.takes("fused_prologue")


@pytest.mark.parametrize("changes", [{"sample_from_anchor": False}, {"markov_rank": 0, "confidence_head_with_markov": False}],
                         ids=["plain_rule", "no_markov"])  # fmt: skip
def test_other_drafters(changes):
    model = small_model(device=DEVICE, **changes)
    duel = Duel(*(make_worker(model, runtime, Layout.PAGE_MAJOR) for runtime in (RuntimeConfig.plain(), FUSED)))
    duel.run(SCENARIOS["mixed"](4))


def test_choice_is_read_when_the_step_runs():
    model = small_model(device=DEVICE)
    plain, other = (make_worker(model, RuntimeConfig.plain(), Layout.LAYER_MAJOR) for _ in range(2))
    duel = Duel(plain, other)
    script = SCENARIOS["steady"](2)
    duel.run(script[:3])
    step_input = duel._input(script[3])
    once = other.step(step_input, runtime=FUSED)
    assert once.runtime.takes("fused_prologue")
    assert not other.resolved.takes("fused_prologue")
    assert torch.equal(once.draft_tokens, plain.step(step_input).draft_tokens)


def test_another_pool_dtype_falls_back_with_a_reason():
    model = small_model(torch.float32, DEVICE)
    auto = dataclasses.replace(RuntimeConfig.plain(), fused_prologue="auto", kv_dtype="bfloat16")
    config = make_worker(model, RuntimeConfig.plain(), Layout.LAYER_MAJOR).pool.config
    from dspark_model import DFlashWorker, LatentKVPool

    pool = LatentKVPool(config, model.config, dtype=torch.bfloat16, device=DEVICE)
    choice = DFlashWorker(model, pool, auto).resolved["fused_prologue"]
    assert choice.fell_back
    assert "its stores copy bits, and the pool is torch.bfloat16" in choice.reason
    with pytest.raises(ConfigError, match="fused_prologue=require cannot be met: its stores copy bits"):
        DFlashWorker(model, pool, dataclasses.replace(auto, fused_prologue="require"))
