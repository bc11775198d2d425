"""Golden cases: outputs computed in float64 by another program, and proof that a wrong model misses them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark_model import golden
from dspark_model.golden import check_case, find_cases
from dspark_model.serving_config import Layout

FOLDER = Path(__file__).parent / "golden"
CASES = find_cases([FOLDER])


def missed(folder: Path) -> set[str]:
    return {row.output for row in check_case(folder) if not row.passed}


def copy_case(name: str, folder: Path) -> Path:
    return Path(shutil.copytree(FOLDER / name, folder / name))


def test_all_cases_are_found():
    assert [case.name for case in CASES] == [
        "04_no_markov", "08_fc_norm", "09a_rope_scaling", "11_two_shards", "14_steps", "16_mscale_ratio",
    ]  # fmt: skip
    assert find_cases(CASES) == CASES


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case_is_reached(case, layout):
    rows = check_case(case, layout=layout)
    assert [row for row in rows if not row.passed] == []
    expected = set()
    for run in json.loads((case / "case.json").read_text())["runs"]:
        expected |= set(load_file(case / run["expected"]))
    assert expected <= {row.output for row in rows}, "an expected tensor was not compared"


@pytest.mark.parametrize("output", sorted(load_file(FOLDER / "04_no_markov" / "expected.safetensors")))
def test_one_changed_expected_value_is_a_miss(output, tmp_path):
    folder = copy_case("04_no_markov", tmp_path)
    expected = load_file(folder / "expected.safetensors")
    flat = expected[output].view(-1)
    flat[flat.numel() // 2] += 1 if not flat.is_floating_point() else 2e-3 * (1 + abs(float(flat[flat.numel() // 2])))
    save_file(expected, folder / "expected.safetensors")
    assert missed(folder) == {output}


@pytest.mark.parametrize(
    "name",
    [
        "context_norm.weight",
        "layers.1.self_attn.kv_a_layernorm.weight",
        "layers.0.self_attn.q_b_proj.weight",
        "final_norm.weight",
    ],
)
def test_one_changed_weight_is_a_miss(name, tmp_path):
    folder = copy_case("04_no_markov", tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights[name].view(-1)[:3] *= 1.5
    save_file(weights, folder / "model.safetensors")
    assert "base_logits" in missed(folder)


def test_a_weight_that_changes_the_accepted_rows_is_a_miss(tmp_path):
    folder = copy_case("14_steps", tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["markov_head.markov_w2.weight"] = weights["markov_head.markov_w2.weight"].flip(0).contiguous()
    save_file(weights, folder / "model.safetensors")
    assert {"step0.draft_tokens", "step1.num_committed"} <= missed(folder)


def test_unknown_and_mis_shaped_expected_tensors_are_misses(tmp_path):
    folder = copy_case("04_no_markov", tmp_path)
    expected = load_file(folder / "expected.safetensors")
    expected["router_logits"] = torch.zeros(2)
    expected["context"] = expected["context"][:-1].clone()
    save_file(expected, folder / "expected.safetensors")
    rows = {row.output: row for row in check_case(folder) if not row.passed}
    assert rows["router_logits"].detail == "this package has no such output"
    assert rows["context"].detail.startswith("shape")
    assert set(rows) == {"router_logits", "context"}


def test_values_that_are_not_a_number_are_misses(tmp_path):
    folder = copy_case("04_no_markov", tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["final_norm.weight"][3] = float("nan")
    save_file(weights, folder / "model.safetensors")
    assert {"final_hidden", "base_logits"} <= missed(folder)


def test_an_output_without_a_stated_bound_is_a_miss(tmp_path, monkeypatch):
    folder = copy_case("04_no_markov", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    monkeypatch.delitem(golden.BFLOAT16_BOUNDS, "margins")
    (row,) = [row for row in check_case(folder) if row.output == "margins" and row.dtype == "bfloat16"]
    assert not row.passed and row.detail == "no bound is stated for it in torch.bfloat16"
