"""How parts of the CuTe block attention are added up, without a GPU: the kernels' PTX, run on the CPU, has the bits of their
contract."""

import importlib.util
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cute_kit import run_compiling, stack_bytes
from ptx_kit import Machine, Memory, fma

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed")

ROOT = Path(__file__).parent.parent
CTAS, TILE, ROWS = 40, 64, 7  # CTAs that made the parts; query rows of a tile; block rows
SHARED = 160 << 10  # bytes, more than any build takes
BUILDS = {  # heads, latents, many, spread
    "by warps": (8, 256, True, False), "by warps, spread": (8, 128, True, True), "by warps, 16 heads": (16, 128, True, False),
    "by warps, 32 heads": (32, 128, True, False), "by warps, 32 heads, spread": (32, 128, True, True),
    "plain": (8, 128, False, False), "plain, 32 heads": (32, 128, False, False),
}  # fmt: skip
PROGRAM = r"""
import base64, json, sys
import torch
sys.path.insert(0, sys.argv[2])
from merge_kernels import compile_merge
from dspark_kernels.cute.block_attention_facts import Facts

builds, ctas, rows, dtype = json.loads(sys.argv[1]), int(sys.argv[3]), int(sys.argv[4]), getattr(torch, sys.argv[5])

def code(heads, latent, many, spread):
    built = compile_merge(Facts(dtype, latent, latent + 64, rows, heads, 32, False, ctas, many=many, spread=spread))
    return built.__ptx__, base64.b64encode(built.__cubin__).decode()

print(json.dumps([code(*numbers) for numbers in builds]))
"""
# Key tiles of each request; as there is a CTA for each tile of keys and of query rows, each makes a part.
FEW = {"one part": [1, 1, 1, 1], "a turn of 16": [16, 15, 1, 0], "one more": [17, 0, 12, 5], "two turns": [33, 4, 2, 1]}
OF_HEADS = {
    16: {"a turn of 16": [16, 0, 4], "one more": [17, 1, 2]},
    32: {"a turn of 4": [4, 3, 0, 1], "more": [9, 1], "5": [5, 5]},
}


def compile_merges(builds: list[tuple], ctas: int, dtype: str, folder: Path) -> list[tuple[str, str]]:
    """PTX and machine code of each."""
    done = run_compiling(PROGRAM, folder, json.dumps(builds), str(ROOT / "tests"), str(ctas), str(ROWS), dtype)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, str]:
    """PTX by build."""
    merges = compile_merges(list(BUILDS.values()), CTAS, "float16", tmp_path_factory.mktemp("dump"))
    return {name: ptx for name, (ptx, _) in zip(BUILDS, merges, strict=True)}


def test_registers_suffice_at_k3s_sizes(tmp_path):
    builds = list(itertools.product((8, 16, 64), (512,), (True,), (False, True)))
    for _, code in compile_merges(builds, 132, "bfloat16", tmp_path):
        assert stack_bytes(code, tmp_path) == [0]


def draw_parts(latent: int, places: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Values [part, row, latent], float16, and statistics [part, half, row, 2].

    Neighbours almost cancel, so the order of a sum shows; some rows see no key of a part, row 5 none of any.
    """
    draw = np.random.default_rng(seed)
    values = draw.uniform(-1, 1, (places, TILE, latent)).astype(np.float16)
    values[1::2] = -values[: places // 2 * 2 : 2] + draw.uniform(-1e-3, 1e-3, values[1::2].shape).astype(np.float16)
    statistics = np.empty((places, 2, TILE, 2), np.float32)
    statistics[..., 0] = draw.normal(0, 0.05, (places, 1, TILE))
    statistics[..., 1] = draw.uniform(0.9, 1.1, (places, 2, TILE))
    blind = draw.random((places, TILE)) < 0.1
    blind[:, 5] = True
    statistics[np.broadcast_to(blind[:, None], statistics.shape[:3])] = (-np.inf, 0)
    values[blind] = 0
    return values, statistics


def in_vectors(values: np.ndarray) -> np.ndarray:
    """As the attention stores them: of the threads' wgmma registers, in the order that `vector_place` describes."""
    places, _, latent = values.shape
    group, v, block, column, pair = np.meshgrid(*map(np.arange, (2, latent // 32, 2, 4, 2)), indexing="ij")
    out = np.empty((places, latent // 32 * 256, 8), np.float16)
    for row in range(TILE):
        warp, high, quad = row // 16, row % 16 // 8, row % 8
        place = group * (latent // 128) * 512 + v // 4 * 512 + warp // 2 * 256 + quad * 32 + warp % 2 * 16 + v % 4 * 4 + column
        out[:, place, block * 4 + high * 2 + pair] = values[
            :, row, group * (latent // 2) + v * 16 + block * 8 + column * 2 + pair
        ]
    return out


def merged(values: np.ndarray, statistics: np.ndarray, warps: int) -> np.ndarray:
    """A pair's parts added up: by so many warps, each with every so manyeth part; [row, latent], float16."""
    count, _, latent = values.shape
    statistics = np.repeat(statistics, latent // 2, axis=1)  # [part, latent, row, 2]
    logarithms, factors = np.swapaxes(statistics, 1, 2)[..., 0], np.swapaxes(statistics, 1, 2)[..., 1]
    highest = logarithms.max(axis=0)
    weights = np.exp2(logarithms - np.where(np.isinf(highest), np.float32(0), highest))
    total, sums = np.zeros((2, *highest.shape), np.float32)
    for warp in range(warps):
        both = np.zeros((2, *highest.shape), np.float32)  # of neighbours, which a warp's halves have
        for side in range(2):
            for part in range(2 * warp + side, count, 2 * warps):
                both[side] += weights[part]
        total += both[0] + both[1]
        own = np.zeros_like(sums)
        for part in range(warp, count, warps):
            own = fma(weights[part] * factors[part], values[part].astype(np.float32), own)
        sums += own
    return (sums * (np.float32(1) / np.where(total == 0, np.float32(1), total))).astype(np.float16)


def row_tiles_of(build: str) -> int:
    return -(-ROWS * BUILDS[build][0] // TILE)


def run(ptx: str, build: str, tiles: list[int], seed: int, only: list[tuple[int, int]]) -> np.ndarray:
    """What some CTAs of a merge leave, and what all have to, [2, request, query row, latent]; NaN where nothing was written."""
    heads, latent, many, _ = BUILDS[build]
    queries, warps, row_tiles = ROWS * heads, 16 if heads < 28 else 4, row_tiles_of(build)
    assert sum(tiles) * row_tiles <= CTAS
    values, statistics = draw_parts(latent, CTAS + len(tiles) * row_tiles, seed)
    lens = np.array(tiles, np.int64) * 64
    out, wanted = np.full((2, len(tiles), row_tiles * TILE, latent), np.nan, np.float16)
    out = np.ascontiguousarray(out[:, :queries])
    used, first = [], 0
    for request, count in enumerate(tiles):
        for row_tile in range(row_tiles):
            part = first + request * row_tiles + row_tile
            rows = slice(row_tile * TILE, row_tile * TILE + TILE)
            wanted[request, rows] = merged(values[part : part + count], statistics[part : part + count], warps) if count else 0
            used += range(part, part + count)
            first += count
    others = np.setdiff1d(np.arange(len(values)), used)
    values[others], statistics[others] = np.nan, np.nan
    made, memory = (in_vectors(values), statistics), Memory()
    left = tuple(np.full_like(array, np.nan) for array in made)  # until the attention ends

    def end_attention() -> None:
        for to, array in zip(left, made, strict=True):
            to[:] = array

    at = [memory.add(array) for array in (lens, lens, *left, out)]
    arguments = [0, 0, 0, at[0], at[1], len(tiles), 2**31 - 1, *at[2:]]
    grid = (len(tiles) * row_tiles, 4 if many else latent // 4)
    form = {"shared": SHARED, "early": True, "only": only}
    Machine(ptx, memory, arguments, grid, 8 if many else warps, torch.float16, seed, end_attention, **form).run(10_000_000)
    return np.stack([out, wanted[:, :queries]])


def cases() -> list[tuple[str, list[int]]]:
    return [
        pytest.param(build, tiles, id=f"{build}: {name}")
        for build, (heads, _, many, _) in BUILDS.items()
        if many
        for name, tiles in OF_HEADS.get(heads, FEW).items()
    ]


@pytest.mark.parametrize(("build", "tiles"), cases())
def test_a_warp_adds_up_all_parts_in_the_contracts_order(compiled, build, tiles, seed):
    """Of each pair half of the rows with half of the latents, other ones for other seeds."""
    pairs = len(tiles) * row_tiles_of(build)
    out, wanted = run(compiled[build], build, tiles, seed, [(pair, (pair + seed) % 4) for pair in range(pairs)])
    written = ~np.isnan(out)
    assert (written.sum(axis=(1, 2)) > 0).all()
    np.testing.assert_array_equal(out[written].view(np.int16), wanted[written].view(np.int16))
    for request, row in np.argwhere(written.any(axis=2)):
        assert written[request, row].reshape(2, -1).all(axis=1).sum() == 1, "a half of the latents is not whole"


@pytest.mark.parametrize(("build", "tiles"), [("plain", [17, 12, 3]), ("plain", [33, 7]), ("plain, 32 heads", [5, 4, 1])])
def test_the_warps_of_a_cta_have_that_order_too(compiled, build, tiles, seed):
    """Some of the CTAs: the first and the last 16 rows, latents in the midst and at the end."""
    pairs = len(tiles) * row_tiles_of(build)
    out, wanted = run(compiled[build], build, tiles, seed, [(0, 5), (pairs - 1, 0), (pairs // 2, 31), (1, 18)])
    written = ~np.isnan(out)
    assert written.any(axis=(1, 2)).sum() >= 2
    np.testing.assert_array_equal(out[written].view(np.int16), wanted[written].view(np.int16))
