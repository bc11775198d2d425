"""Helpers of the checkpoint tests: write one with a change, load it, compare weights."""

import subprocess
import sys
import textwrap
from pathlib import Path

import torch

import dspark_model
from dspark_model import DrafterConfig, MLADSparkForCausalLM
from dspark_model.testing import (
    assert_bitwise_equal,
    random_lm_head,
    random_tensors,
    tiny_config,
    tiny_config_json,
    write_checkpoint,
)

ROOT = Path(dspark_model.__file__).parent.parent
EMBED = "embed_tokens.weight"
MARKOV_W2 = "markov_head.markov_w2.weight"
NAMES = [name for name in random_tensors(tiny_config()) if name != EMBED]


def load(folder, config: DrafterConfig | None = None, **options) -> MLADSparkForCausalLM:
    config = config or tiny_config()
    dtype = options.get("dtype") or getattr(torch, config.dtype)
    options.setdefault("lm_head", random_lm_head(config, dtype=dtype))
    return MLADSparkForCausalLM.from_pretrained(folder, **options)


def write_with(folder: Path, change, config: DrafterConfig | None = None, **options) -> Path:
    """A tiny checkpoint whose tensors `change` has edited."""
    config = config or tiny_config()
    tensors = random_tensors(config)
    change(tensors)
    return write_checkpoint(folder, config, tensors=tensors, **options)


def assert_same_weights(model: MLADSparkForCausalLM, tensors: dict[str, torch.Tensor]) -> None:
    state = model.state_dict()
    assert set(state) == set(tensors)
    for name, tensor in tensors.items():
        assert_bitwise_equal(state[name], tensor, name)


def drop_embedding(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[EMBED]


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def run_python(code: str, **environment) -> str:
    """Run `code` in a new process that finds the package."""
    script = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n" + textwrap.dedent(code)
    variables = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "OMP_NUM_THREADS": "1", **environment}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=variables)
    assert result.returncode == 0, result.stderr
    return result.stdout


def int8_checkpoint(folder: Path, change=lambda tensors: None) -> dict[str, torch.Tensor]:
    """Write the tiny drafter with one int8 matrix, edited by `change`; returns what has to be loaded."""
    tensors = random_tensors(tiny_config())
    values = torch.randint(-127, 128, tensors[MARKOV_W2].shape, dtype=torch.int8)
    scales = torch.rand(320, 1) / 100
    stored = {**tensors, MARKOV_W2: values, MARKOV_W2 + "_scale": scales}
    change(stored)
    config_json = tiny_config_json(quantization_config={"quant_method": "int8_rows"})
    write_checkpoint(folder, tiny_config(), tensors=stored, config_json=config_json)
    return {**tensors, MARKOV_W2: (values.double() * scales.double()).float()}
