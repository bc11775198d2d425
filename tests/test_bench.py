"""The benchmarks' own parts that need no GPU: their states, what they count, and that their variants compute the same."""

import pytest
import torch

from dspark_model import ops
from dspark_model.bench import head_cases
from dspark_model.bench.gemm_cases import (
    CASES,
    CHAIN,
    GemmCase,
    case_results,
    chain_results,
    low_m_tiles,
    make_workspace,
)
from dspark_model.bench.k3_rank import k3_rank_config, random_drafter
from dspark_model.bench.kernel_profile import KernelTime, kernel_times, table
from dspark_model.bench.qkv_cases import QkvVariant, check_profiles, qkv_part, qkv_summary, qkv_variants
from dspark_model.bench.step_cases import Row, bookkeeping, overlap_summary, started_worker, step_bytes, target_rows
from dspark_model.bench.timing import Timing
from dspark_model.serving_config import RuntimeConfig
from dspark_model.step_io import StepInput
from dspark_model.streams import SideStream
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
    wanted = "overlap, idle: +95.0 us less than one after the other, 95 % of the projection; +5.0 us over the longer part"
    assert overlap_summary(rows) == [wanted]
    assert rows[0].to_dict()["floor_us"] is None


def test_kernels_of_a_trace_are_summed_by_name():
    events = [{"cat": "kernel", "name": "a", "dur": 2.0}, {"cat": "cpu_op", "name": "a", "dur": 9.0}, {"name": "meta"}]
    events += [{"cat": "kernel", "name": "a", "dur": 4.0}, {"cat": "gpu_memcpy", "name": "copy", "dur": 10.0}]
    rows = kernel_times(events * 2, 2)
    assert rows == [KernelTime("copy", 1, 10.0), KernelTime("a", 2, 6.0)]
    assert table(rows, most=1).splitlines() == ["     10.0 us    1 x  copy", "     16.0 us    3 x  all"]


def test_the_qkv_variants_are_equal_to_the_bit_within_their_profile(small):
    small.merge_qkv_a()
    results = {}
    for variant in qkv_variants():
        if variant.backend == "cute":
            continue
        worker = started_worker(small, RuntimeConfig.plain(), 2, 40)
        work = qkv_part(worker, 2, variant.paths(SideStream(small.device)))
        before = worker.pool.storage.clone()
        queries = work()
        assert (len(queries), queries[0].shape) == (5, (2, 7, 8, 48))
        changed = (worker.pool.storage != before).any(-1).sum()
        assert int(changed) == 5 * 2 * 7, "the block's rows of each layer, and no other"
        results[variant] = [*queries, worker.pool.storage]
    assert len(results) == 12
    check_profiles(results, "part")
    broken = QkvVariant("torch", merged=False, split=True, direct=False)
    results[broken] = [tensor + 1 for tensor in results[broken]]
    with pytest.raises(AssertionError, match="part torch.split"):
        check_profiles(results, "part")


def test_a_qkv_variant_is_the_runtime_that_it_names(small):
    labels = [variant.label for variant in qkv_variants()]
    assert len(set(labels)) == 20
    runtime = QkvVariant("triton", merged=True, split=False, direct=True).runtime
    assert (runtime.latent_norm_rope, runtime.merged_qkv_a) == ("triton", "on")
    assert (runtime.split_qkv_streams, runtime.direct_pool_write, runtime.cuda_graph) == ("off", "require", "require")


def test_summary_of_the_qkv_part():
    rows = [Row("part", name, 1, 2048, Timing(us, us, us)) for name, us in (("torch", 100.0), ("cute+direct", 88.5))]
    assert qkv_summary(rows) == ["part, B=1, cute+direct: -11.5 us against torch"]


def test_products_of_the_rank():
    # 30.3 + 4.7 + 14.7 + 51.4 + 25.7 MB a layer; the merged form of a layer's first products.
    assert sum(case.weight_bytes for case in CHAIN) == 126_746_624
    assert {case.name: case.n for case in CASES}["qkv_a"] == 1536 + 576
    for case in CASES:
        tiles = low_m_tiles(case, 8, 132)
        assert sum(name.endswith("(chosen)") for name in tiles) == 1 and len(set(tiles.values())) == 2


SMALL_CHAIN = (
    GemmCase("qkv_a", 80, 64, norm=True),
    GemmCase("q_b", 48, 48, norm=True),
    GemmCase("o", 64, 32, residual=True),
    GemmCase("gate_up", 40, 64, norm=True, gate_up=True),
    GemmCase("down", 64, 40, residual=True),
)


@pytest.mark.parametrize("case", [*SMALL_CHAIN, GemmCase("head", 90, 64, norm=True, logits=True)], ids=lambda case: case.name)
def test_variants_of_a_product_pass_their_check(case):
    if torch.cuda.is_available():
        pytest.skip("a rehearsal on the CPU; on a device scripts/bench_gemm.py does it in earnest")
    for result in case_results(case, 5, make_workspace("cpu"), 2, device="cpu"):
        assert result.failure is None
        assert result.error is None or result.error <= 1


def test_a_wrong_product_is_reported_and_the_others_go_on(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("as above")
    ours = ops.low_m_linear
    monkeypatch.setattr("dspark_model.bench.gemm_cases.low_m_linear", lambda *args, **options: ours(*args, **options) * 1.01)
    results = list(case_results(SMALL_CHAIN[0], 5, make_workspace("cpu"), 2, device="cpu"))
    assert results[0].failure is None
    assert len(results) > 2 and all("away from float64" in result.failure for result in results[1:])


def test_the_chains_variants_agree():
    if torch.cuda.is_available():
        pytest.skip("as above")
    results = list(chain_results(3, make_workspace("cpu"), 2, cases=SMALL_CHAIN, device="cpu"))
    assert [result.failure for result in results] == [None] * 3


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
