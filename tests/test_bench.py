"""The benchmarks' own parts that need no GPU: their states, what they count, and that their variants compute the same."""

import pytest
import torch

from dspark_model.bench import head_cases
from dspark_model.bench.k3_rank import k3_rank_config, random_drafter
from dspark_model.bench.step_cases import Row, bookkeeping, overlap_summary, started_worker, step_bytes, target_rows
from dspark_model.bench.timing import Timing
from dspark_model.serving_config import RuntimeConfig
from dspark_model.step_io import StepInput
from dspark_model.testing import assert_bitwise_equal

SMALL = {
    "hidden_size": 64,
    "target_hidden_size": 32,
    "intermediate_size": 48,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "vocab_size": 1024,
    "markov_rank": 8,
}


@pytest.fixture(scope="module")
def small():
    return random_drafter(k3_rank_config(**SMALL), torch.float32, "cpu")


def test_the_rank_has_k3s_shape_under_tp8():
    config = k3_rank_config()
    assert (config.num_hidden_layers, config.num_attention_heads, config.latent_dim) == (5, 8, 576)
    assert config.context_width == 35840
    # 5,760 bytes a token: five layers of 576 values in two bytes.
    assert config.num_hidden_layers * config.latent_dim * 2 == 5760


def test_plain_and_fused_bookkeeping_make_the_same(small):
    made = []
    for fused in (False, True):
        worker = started_worker(small, RuntimeConfig.plain(), 2, 40)
        work = bookkeeping(worker, target_rows(worker, 2, 3), fused=fused)
        work()
        made.append(work())
        assert made[-1][1].tolist() == [44, 44], "the state must not move from call to call"
    for ours, theirs in zip(*made, strict=True):
        assert_bitwise_equal(ours, theirs)


def test_a_started_worker_steps_on(small):
    worker = started_worker(small, RuntimeConfig.plain(), 2, 40)
    output = worker.step(StepInput(generation=target_rows(worker, 2, 3)))
    assert output.num_accepted.tolist() == [3, 3]
    assert output.num_dropped.tolist() == [0, 0]
    assert worker.context_length(0) == 44


def test_counted_bytes(small):
    grown = step_bytes(small, 2, 100) - step_bytes(small, 1, 100)
    assert grown == 100 * 5 * 48 * 4
    assert step_bytes(small, 1, 0) > small.context_proj.weight.nbytes + small.lm_head.nbytes


def test_summary_of_an_overlap():
    us = {"projection": 100.0, "window": 120.0, "serial": 220.0, "overlapped": 125.0}
    rows = [Row("overlap, idle", name, 1, 2048, Timing(value, value, value)) for name, value in us.items()]
    assert overlap_summary(rows) == ["overlap, idle: hides 95 % of the projection, +5.0 us over the longer part"]
    assert rows[0].to_dict()["floor_us"] is None


def test_head_cases_check_and_run_each_variant(monkeypatch):
    monkeypatch.setattr(head_cases, "SETS", 2)
    inputs = head_cases.HeadInputs.random(2, 200, 24, 16, drafts=3, device="cpu")
    usable = head_cases.plans(inputs, all_plans=False)
    for plan in usable.values():
        assert 0 < head_cases.check_plan(inputs, plan) < 1
    for name, work in head_cases.variants(inputs, usable).items():
        first, second, third = (work() for _ in range(3))
        if not name.startswith("confidence"):
            assert_bitwise_equal(third[0].previous_tokens, first[0].previous_tokens)
            assert not torch.equal(second[0].previous_tokens, first[0].previous_tokens), "the tables must take turns"


def test_head_checks_notice_a_wrong_chain(monkeypatch):
    inputs = head_cases.HeadInputs.random(1, 100, 16, 8, drafts=2, device="cpu")
    plan = head_cases.chosen_plan(inputs)
    chain = head_cases.ops.markov_chain

    def without_bias(base, anchors, w1, w2, **options):
        return chain(base, anchors, w1, w2 * 0, **options)

    monkeypatch.setattr(head_cases.ops, "markov_chain", without_bias)
    with pytest.raises(AssertionError, match="times the bound"):
        head_cases.check_plan(inputs, plan)
