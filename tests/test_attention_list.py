"""How the CTAs of the CuTe block attention share its key tiles: each tile is taken once, and the merge finds all parts."""

import importlib.util
import json
from collections import defaultdict

import numpy as np
import pytest
import torch
from cute_kit import ROOT, run_compiling
from ptx_kit import Machine, Memory

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed")

CTAS, KEYS, FIELDS, MOST = 20, 64, 8, 100  # MOST: pairs of a CTA
NO_WINDOW = 2**31 - 1
# Tiles of query rows: 1, 1, 7, 2; with one tile each two CTAs may take a tile of keys.
BUILDS = {
    "8 heads": [CTAS, 7, 8], "one request": [CTAS, 7, 8, True], "64 heads": [CTAS, 7, 64], "16 heads": [CTAS, 7, 16],
    "an odd number of CTAs": [CTAS + 1, 7, 8],
}  # fmt: skip
PROGRAM = r"""
import json, sys
import torch
sys.path.insert(0, sys.argv[2])
from list_kernel import compile_walk
from dspark_kernels.cute.block_attention_facts import Facts

def facts(ctas, rows, heads, one=False):
    return Facts(torch.bfloat16, 512, 576, rows, heads, 32, False, ctas, one_request=one)

print(json.dumps({name: compile_walk(facts(*numbers)) for name, numbers in json.loads(sys.argv[1]).items()}))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, str]:
    """PTX by build."""
    done = run_compiling(PROGRAM, tmp_path_factory.mktemp("dump"), json.dumps(BUILDS), str(ROOT / "tests"))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def walk(
    ptx: str, row_tiles: int, seq_lens: list[int], context_lens: list[int], window: int, ctas: int
) -> tuple[np.ndarray, np.ndarray]:
    """What CTAs take, [pairs, FIELDS], in the CTAs' order; and the merge's first part and number of parts, [request, row tile,
    2]."""
    taken = np.full((ctas, MOST, FIELDS), -1, np.int32)
    parts = np.full((len(seq_lens), row_tiles, 2), -1, np.int32)
    memory = Memory()
    arrays = (np.array(context_lens, np.int64), np.array(seq_lens, np.int64), taken, parts)
    arguments = [memory.add(array) for array in arrays] + [len(seq_lens), window, MOST]
    Machine(ptx, memory, arguments, ctas, 1, torch.float32, 0, lambda: None).run()
    return taken[taken[..., 0] >= 0], parts


def check(ptx: str, row_tiles: int, seq_lens: list[int], window: int = NO_WINDOW, ctas: int = CTAS) -> np.ndarray:
    """The contract, for one batch; what was taken."""
    context_lens = [max(0, length - 7) for length in seq_lens]
    taken, parts = walk(ptx, row_tiles, seq_lens, context_lens, window, ctas)
    firsts = [max(0, context - window) for context in context_lens]
    tiles = {
        (request, row_tile): -(-length // KEYS) - first // KEYS if first < length else 0
        for request, (first, length) in enumerate(zip(firsts, seq_lens, strict=True))
        for row_tile in range(row_tiles)
    }
    total, pairs = sum(tiles.values()), sum(count > 0 for count in tiles.values())
    halved = row_tiles == 1 and 2 * total <= ctas
    takers, loads, found = defaultdict(list), defaultdict(list), set()
    for taker, half, request, row_tile, first, end, begin, count in taken.tolist():
        assert count > 0 and (first, end) == (firsts[request], seq_lens[request])
        assert half in ((0, 1) if halved else (0,))
        for tile in range(begin, begin + count):
            assert (request, row_tile, tile, half) not in found, "a tile is taken twice"
            found.add((request, row_tile, tile, half))
        if half == 0:
            takers[request, row_tile].append((begin, taker))
            loads[taker].append(count)
    assert len(found) == total * (2 if halved else 1), "a tile is not taken"
    assert all(tile < tiles[request, row_tile] for request, row_tile, tile, _ in found)
    # No CTA has more tiles than an equal share; with the end of one pair and the begin of another it has fewer where it can.
    each = -(-total // ctas)
    spare = min(2, (each * ctas - total) // pairs) if pairs > 1 and each > 1 else 0
    assert all(sum(load) + spare * (len(load) - 1) <= each for load in loads.values())
    used = []
    for (request, row_tile), count in tiles.items():
        by_place = [taker for _, taker in sorted(takers[request, row_tile])]
        own = [taker + request * row_tiles + row_tile for taker in by_place]
        first_part, number = parts[request, row_tile].tolist()
        assert number == len(own) and (count == 0 or list(range(first_part, first_part + number)) == own)
        used += own
    assert len(set(used)) == len(used) and all(0 <= part < ctas + len(tiles) for part in used), "parts share a place"
    return taken


LENGTHS = {
    "none": [0], "one key": [1], "a tile for a CTA": [20 * 64], "ten tiles": [640], "eleven tiles": [641],
    "long": [20 * 64 * 3 + 1], "two, equal": [640, 640], "ends in CTAs": [2000, 64, 0, 900, 33, 1],
    "many": [*range(0, 700, 17)], "many without keys": [0] * 33 + [500] + [0] * 40 + [3000], "room for one": [1280 + 700, 600],
    "keys before and behind 32": [500] + [0] * 40 + [3000],
}  # fmt: skip


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("build", "row_tiles"), [("8 heads", 1), ("64 heads", 7), ("16 heads", 2)])
def test_each_tile_is_taken_once(compiled, build, row_tiles, lengths):
    check(compiled[build], row_tiles, LENGTHS[lengths])


@pytest.mark.parametrize("lengths", [name for name, lens in LENGTHS.items() if len(lens) == 1])
def test_one_request_is_shared_as_among_others_without_keys(compiled, lengths):
    """So its bits do not hang on them."""
    length = LENGTHS[lengths][0]
    alone = check(compiled["one request"], 1, [length])
    padded = check(compiled["8 heads"], 1, [0, length, *[0] * 40])
    padded[:, 2] -= 1
    assert (alone == padded).all()


@pytest.mark.parametrize("length", [640, 641, 704, 1344, 1345])
def test_an_odd_number_of_ctas(compiled, length):
    check(compiled["an odd number of CTAs"], 1, [length], ctas=CTAS + 1)


@pytest.mark.parametrize("window", [1, 64, 100])
def test_windows_leave_tiles_out(compiled, window):
    check(compiled["8 heads"], 1, [2000, 64, 0, 300], window)
    check(compiled["64 heads"], 7, [2000, 64, 0, 300], window)


@pytest.mark.parametrize("seed", range(6))
def test_random_batches(compiled, seed):
    draw = np.random.default_rng(seed)
    for build, row_tiles in (("8 heads", 1), ("64 heads", 7)):
        lengths = draw.integers(0, draw.choice([70, 500, 4000]), draw.choice([2, 5, 20, 40]))
        lengths[draw.random(len(lengths)) < 0.2] = 0
        check(compiled[build], row_tiles, lengths.tolist())
