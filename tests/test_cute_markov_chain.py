"""The Markov chain with W2 in registers: its machine code, and its PTX run on the CPU against float64."""

import importlib.util
import json
import math

import numpy as np
import pytest
import torch
from cute_kit import run_compiling, stack_bytes
from ptx_kit import Machine, Memory

from dspark_model.testing import poison_

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed")

# dtype, rank, drafts, programs, warps, lanes, copies, keep, prefetch: Kimi K3's shape of a rank, then small ones.
K3 = ["bfloat16", 256, 7, 128, 10, 1, 4, False, True]
BUILDS = {
    "k3": K3,
    "k3, most requests": [*K3[:5], 16, 1, True, True],
    "one": ["bfloat16", 64, 3, 3, 2, 1, 2, True, False],
    "bare": ["bfloat16", 64, 3, 3, 2, 1, 2, False, True],
    "float16": ["float16", 32, 2, 5, 1, 2, 4, True, False],
    "three": ["bfloat16", 96, 3, 3, 3, 4, 1, True, False],
    "two tiles": ["bfloat16", 32, 2, 2, 3, 16, 1, True, False],
    "many programs": ["bfloat16", 32, 2, 40, 1, 1, 8, True, False],
    "order": ["bfloat16", 32, 8, 3, 2, 2, 2, False, False],
}
PROGRAM = r"""
import base64, json, sys
import torch
from dspark_kernels.cute.markov_chain import Facts, compile_markov_chain

results = {}
for name, (dtype, *numbers) in json.loads(sys.argv[1]).items():
    compiled = compile_markov_chain(Facts(getattr(torch, dtype), *numbers), "sm_90a")
    results[name] = (compiled.__ptx__, base64.b64encode(compiled.__cubin__).decode())
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, tuple[str, str]]:
    """PTX and the machine code in base64, by name."""
    done = run_compiling(PROGRAM, tmp_path_factory.mktemp("dump"), json.dumps(BUILDS))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["k3", "k3, most requests"])
def test_a_ranks_shape_compiles_without_local_memory(compiled, name, tmp_path):
    ptx, code = compiled[name]
    assert ".local" not in ptx and stack_bytes(code, tmp_path) == [0]
    tiles = 1 if name == "k3" else 2
    assert ptx.count("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32") == 256 // 16 * tiles
    assert ptx.count("bar.sync") == 2, "two barriers a draft"
    assert ptx.count("ld.global.v4.b32") == 256 // 32 * (2 + tiles), "rows come 16 bytes at a time"


class Chain:
    """Launches of one build, with what the launch before left."""

    def __init__(self, compiled, name: str, batch: int, vocab: int, *, launches: int = 0, seed: int = 0):
        dtype, self.rank, self.drafts, self.programs, self.warps, _, copies, self.keep, _ = BUILDS[name]
        self.dtype, self.batch, self.vocab, self.seed = getattr(torch, dtype), batch, vocab, seed
        self.ptx = compiled[name][0]
        wide = poison_(torch.empty(2, vocab, self.rank + 8, dtype=self.dtype))
        wide[..., : self.rank] = torch.randn(2, vocab, self.rank)
        self.tables = wide
        self.words = np.full((copies, self.drafts, batch, self.programs), launches & 255, np.int64)
        self.generation = np.full(1, launches, np.int64)

    def launch(self, base: torch.Tensor, anchors: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """drafts, previous, biased.  All but the tables is there when the kernel before has ended."""
        apart, late_anchors = poison_(torch.empty(self.drafts, self.batch, self.vocab + 5)), np.full(self.batch, 1 << 40)
        words, generation = np.full_like(self.words, (self.generation[0] + 1) & 255), np.full(1, 1 << 40)
        drafts, previous = (np.full((self.batch, self.drafts), -7, np.int64) for _ in range(2))
        biased, memory = np.full(base.shape, np.nan, np.float32), Memory()
        w1, w2 = self.tables.view(torch.int16).numpy()
        stride = (self.rank + 8) // 2
        tables = [memory.add(apart.numpy()), apart.stride(1), apart.stride(0), memory.add(w1), stride, memory.add(w2), stride]
        others = [memory.add(x) for x in (late_anchors, words, generation, drafts, previous, biased)]
        arguments = [*tables, *others, self.batch, self.vocab]

        def end_before() -> None:
            apart[..., : self.vocab] = base.transpose(0, 1)
            late_anchors[:], words[:], generation[:] = anchors.numpy(), self.words, self.generation

        Machine(self.ptx, memory, arguments, self.programs, self.warps, self.dtype, self.seed, end_before).run()
        self.words, self.generation = words, generation
        self.seed += 1
        assert (self.words & 255 == self.generation & 255).all(), "a word is not of this launch"
        return drafts, previous, biased


def check(chain: Chain, base, anchors) -> None:
    drafts, previous, biased = chain.launch(base, anchors)
    assert (previous == np.concatenate((anchors[:, None].numpy(), drafts[:, :-1]), axis=1)).all()
    w1, w2 = chain.tables[..., : chain.rank].double()
    rows = w1[torch.from_numpy(previous)]
    exact = base.double() + rows @ w2.T
    if chain.keep:
        bound = (chain.rank + 2) * 2.0**-23 * (base.double().abs() + rows.abs() @ w2.abs().T)
        assert (torch.from_numpy(biased).double() - exact).abs().le(bound).all()
        exact = torch.from_numpy(biased)
    assert (exact.argmax(-1).numpy() == drafts).all()


@pytest.mark.parametrize(
    ("name", "batch", "vocab"),
    [
        ("one", 1, 90),
        ("bare", 1, 65),
        ("float16", 2, 77),
        ("three", 3, 140),
        ("two tiles", 11, 81),
        ("many programs", 1, 639),
    ],
)
def test_matches_float64(compiled, name, batch, vocab):
    chain = Chain(compiled, name, batch, vocab)
    check(chain, torch.randn(batch, chain.drafts, vocab), torch.randint(vocab, (batch,)))


@pytest.mark.parametrize("seed", range(4))
def test_each_launch_takes_its_own_words(compiled, seed):
    """Past the last of the 256 tags, with other turns of the warps each time."""
    chain = Chain(compiled, "one", 1, 81, launches=254, seed=100 * seed)
    for _ in range(4):
        check(chain, torch.randn(1, chain.drafts, 81), torch.randint(81, (1,)))
    assert chain.generation[0] == 258


def test_chooses_as_argmax_does(compiled):
    """Ties within a thread, a warp, a program and between programs; NaN, infinities, -0."""
    chain, inf, nan = Chain(compiled, "order", 2, 94), math.inf, math.nan
    chain.tables[..., : chain.rank] = 0
    rows = torch.full((8, 94), -3.0)
    rows[0, [70, 80, 90]] = -2.0
    rows[1, [5, 6, 13]] = 7.0
    rows[2, [30, 60]] = torch.tensor([-0.0, 0.0])
    rows[3, [10, 50, 80]] = torch.tensor([inf, nan, nan])
    rows[4] = -inf
    rows[5, [40, 41]] = inf
    rows[6] = -rows[3]
    rows[6, 80] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)  # a NaN with its sign set
    rows[7] = nan
    drafts, _, _ = chain.launch(rows.expand(2, -1, -1), torch.tensor([0, 93]))
    assert drafts.tolist() == [[70, 5, 30, 50, 0, 40, 50, 0]] * 2


def test_nan_of_one_request_stays_its_own(compiled):
    chain = Chain(compiled, "three", 3, 100)
    base, anchors = torch.randn(3, chain.drafts, 100), torch.tensor([3, 4, 5])
    chain.tables[0, 4, : chain.rank] = math.nan
    base[:, :, 4] = -99.0
    drafts, _, biased = chain.launch(base, anchors)
    assert drafts[1, 0] == 0 and np.isnan(biased[1, 0]).all()
    assert np.isfinite(biased[[0, 2]]).all()
