"""Fixtures of the whole suite."""

import os
import zlib

import pytest
import torch

from dspark_model import DrafterConfig
from dspark_model.testing import tiny_config

if not torch.cuda.is_available():
    # Without a device Triton's kernels run in its interpreter, which is chosen when triton is imported.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure():
    torch.set_float32_matmul_precision("highest")
    # The matrices here are tiny: with two threads on a busy machine the suite took ten times as long.
    torch.set_num_threads(1)


# Files of minutes come first, so that no process is left with one of them when the others have nothing more to do.
LONG = (
    "test_switch_matrix.py", "test_mutants.py", "test_kernels_compile.py", "test_cute_block_attention.py",
    "test_acceptance_floor.py", "test_training.py", "test_cute_compile.py", "test_demo.py", "test_block_attention_kernel.py",
    "test_training_forward.py", "test_training_text.py",
    "test_markov_chain_draws.py", "test_markov_chain.py", "test_cute_markov_chain.py",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
    if torch.cuda.is_available():
        return
    no_device = pytest.mark.skip(reason="torch sees no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_device)


@pytest.fixture(autouse=True)
def seed(request) -> int:
    """Seeds torch from the test's id, so that a test draws the same numbers alone and in any order."""
    value = zlib.crc32(request.node.nodeid.encode())
    torch.manual_seed(value)
    return value


@pytest.fixture(params=["markov", "no_markov"])
def drafter_config(request) -> DrafterConfig:
    """The tiny drafter with and without its Markov head."""
    return tiny_config() if request.param == "markov" else tiny_config(markov_rank=0, confidence_head_with_markov=False)
