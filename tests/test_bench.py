"""The benchmarks' own parts that need no GPU: their states, what they count, and that their variants compute the same."""

import pytest
import torch

from dspark_model import ops
from dspark_model.bench.gemm_cases import (
    CASES,
    CHAIN,
    GemmCase,
    case_results,
    chain_results,
    kernels_of,
    low_m_tiles,
    make_workspace,
)
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


def test_products_of_the_rank():
    # 30.3 + 4.7 + 14.7 + 51.4 + 25.7 MB a layer; the merged form of a layer's first products.
    assert sum(case.weight_bytes for case in CHAIN) == 126_746_624
    assert {case.name: case.n for case in CASES}["qkv_a"] == 1536 + 576
    for case in CASES:
        tiles = low_m_tiles(case, 8, 132)
        assert sum(name.endswith("(chosen)") for name in tiles) == 1 and len(set(tiles.values())) == len(tiles)


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
    assert [result.failure for result in results] == [None] * 4


def test_what_is_compiled_ahead_is_each_kernel_once():
    for rows in (8, 32, 128):
        kernels = kernels_of(CHAIN[3], rows, 132, alone=True)
        assert len(set(kernels)) == len(kernels)
        assert any(pieces for _, _, pieces in kernels) == (rows != 128)
