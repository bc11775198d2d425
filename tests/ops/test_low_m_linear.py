"""`low_m_linear` against float64: every fused form, split and whole, at odd sizes, with poison around and in the workspace."""

import itertools
from dataclasses import replace

import pytest
import torch
from kernel_kit import DEVICE, watched_memory

from dspark_model.ops import LowMProduct, LowMTile, LowMWorkspace, low_m_linear, low_m_tile
from dspark_model.testing import assert_bitwise_equal, poison_

# The interpreter does not round to bf16 as torch does, so there float32 alone is held to a bound.
ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
KERNEL_DTYPES = tuple(ROUNDOFF) if DEVICE == "cuda" else (torch.float32,)
FORMS = [frozenset(form) for n in range(4) for form in itertools.combinations(("norm", "gate_up", "residual"), n)]
WHOLE, SPLIT = LowMTile(16, 32, 1, 2, 4), LowMTile(16, 32, 3, 2, 4)
TILES = {"whole": WHOLE, "split": SPLIT}
TILES |= {f"{name}-weight_first": replace(tile, weight_first=True) for name, tile in TILES.items()}
TILES["split-norm_apart"] = replace(SPLIT, weight_first=True, norm_apart=True)


def arguments(form, rows: int, out_features: int, in_features: int, dtype=torch.float32) -> dict:
    """Inputs whose rows have scales of their own."""

    def values(*shape):
        return torch.randn(*shape).to(dtype).to(DEVICE)

    given = {"x": values(rows, in_features), "weight": values(out_features, in_features) / in_features**0.5}
    given["x"] *= 2.0 ** (torch.arange(rows, device=DEVICE) % 5 - 2)[:, None].to(dtype)
    if "gate_up" in form:
        given["up_weight"] = values(out_features, in_features) / in_features**0.5
    if "norm" in form:
        given |= {"norm_weight": (torch.rand(in_features) + 0.5).to(dtype).to(DEVICE), "eps": 1e-5}
    if "residual" in form:
        given["residual"] = values(rows, out_features)
    return given


def poisoned_workspace(num_sums: int = 60_000, num_tiles: int = 64) -> LowMWorkspace:
    workspace = LowMWorkspace(DEVICE, num_sums=num_sums, num_tiles=num_tiles)
    poison_(workspace.sums)
    return workspace


def run(given: dict, tile: LowMTile | None = SPLIT, workspace: LowMWorkspace | None = None, **options) -> torch.Tensor:
    """The kernel, in watched memory; the counters have to be 0 afterwards."""
    workspace = workspace or poisoned_workspace()
    tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
    before = [tensor.clone() for tensor in tensors]
    with watched_memory(*tensors, writes=(workspace.sums, workspace.arrivals)):
        out = low_m_linear(**given, backend="triton", workspace=workspace, tile=tile, **options)
    assert not workspace.arrivals.any()
    for tensor, wanted in zip(tensors, before, strict=True):
        assert_bitwise_equal(tensor, wanted, "an argument")
    return out


def exact(given: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The result in float64, and the bound of the contract for the distance of a result to it."""
    dtype, in_features = given["x"].dtype, given["x"].shape[1]
    unit, x = ROUNDOFF[dtype], given["x"].double()
    inner = 2.0**-23 * in_features
    if "norm_weight" in given:
        x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + given["eps"]) * given["norm_weight"].double()
        inner += unit + 2.0**-22
    product, size = x @ given["weight"].double().T, x.abs() @ given["weight"].double().abs().T
    error = inner * size
    if "up_weight" in given:
        up, up_size = x @ given["up_weight"].double().T, x.abs() @ given["up_weight"].double().abs().T
        gate = product * torch.sigmoid(product)
        # silu's slope is below 1.1.
        error = 1.1 * error * (up.abs() + inner * up_size) + gate.abs() * inner * up_size
        product = gate * up
        error = error + 2.0**-20 * product.abs()
    error = error + 1.01 * unit * product.abs()
    if "residual" in given:
        product = product + given["residual"].double()
        error = error + 1.01 * unit * product.abs()
    return product, 1.01 * error + 1e-12


def check(given: dict, out: torch.Tensor) -> None:
    wanted, bound = exact(given)
    assert out.shape == wanted.shape and out.is_contiguous()
    excess = (out.double() - wanted).abs() - bound
    assert bool((excess <= 0).all()), f"{excess.max().item():.3g} above the bound"
    # All values together: a block left out of a long sum can hide in the bound of one value.
    distance = (out.double() - wanted).norm()
    assert bool(distance <= (2 * ROUNDOFF[given["x"].dtype] + 2.0**-20) * wanted.norm()), f"{distance.item():.3g} away"


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "+".join(sorted(form)) or "plain")
@pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)
def test_the_reference_keeps_the_bound(form, dtype):
    if DEVICE == "cuda" and dtype is torch.float32:
        torch.backends.cuda.matmul.allow_tf32 = False
    given = arguments(form, 7, 50, 90, dtype)
    out = low_m_linear(**given)
    assert out.dtype is dtype
    check(given, out)


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: "+".join(sorted(form)) or "plain")
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_every_form_keeps_the_bound(dtype, form, tile):
    if dtype is torch.float16 and "norm" in form:
        pytest.skip("refused, see below")
    given = arguments(form, 7, 50, 130, dtype)
    out = run(given, tile)
    assert out.dtype is dtype
    check(given, out)


@pytest.mark.parametrize("tile", [TILES["split"], TILES["split-weight_first"]], ids=["x_first", "weight_first"])
@pytest.mark.parametrize("rows", [0, 1, 2, 8, 9, 16, 17, 28, 64, 128])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_row_counts(dtype, rows, tile):
    form = ("gate_up", "residual") if dtype is torch.float16 else ("norm", "residual")
    given = arguments(form, rows, 33, 130, dtype)
    check(given, run(given, tile))


@pytest.mark.parametrize("out_features", [1, 15, 16, 17, 64])
@pytest.mark.parametrize("in_features", [1, 31, 32, 33, 64, 96, 97])
def test_sizes_at_and_behind_the_tiles(out_features, in_features):
    given = arguments(("norm", "gate_up"), 3, out_features, in_features)
    check(given, run(given))


@pytest.mark.parametrize("splits", [2, 5, 16])
def test_more_splits_than_blocks_and_uneven_ones(splits):
    given = arguments(("norm",), 3, 20, 100)
    check(given, run(given, LowMTile(16, 32, splits, 2, 4)))


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_rows_do_not_see_each_other(tile):
    given = arguments(("norm", "gate_up", "residual"), 7, 20, 70)
    before = run(given, tile)
    given["x"][[0, 2, 6]] = float("nan")
    given["x"][4] *= 1e6
    given["residual"][[0, 2, 6]] = float("inf")
    after = run(given, tile)
    assert_bitwise_equal(after[[1, 3, 5]], before[[1, 3, 5]])
    assert bool(after[[0, 2, 6]].isnan().all())


def test_a_rows_bits_do_not_depend_on_how_many_rows_of_its_class_there_are():
    given = arguments(("norm", "gate_up", "residual"), 16, 20, 70)
    whole = run(given)
    for rows in (1, 7, 8):
        part = {**given, "x": given["x"][:rows], "residual": given["residual"][:rows]}
        assert_bitwise_equal(run(part), whole[:rows])


@pytest.mark.parametrize("form", [(), ("norm", "residual"), ("norm", "gate_up")], ids=str)
def test_rows_that_lie_apart(form):
    given = arguments(form, 5, 20, 70)
    plain = run(given)
    apart = dict(given)
    for name in ("x", "weight", "up_weight", "residual"):
        if name in given:
            wide = poison_(given[name].new_empty(given[name].shape[0], given[name].shape[1] + 13))
            apart[name] = wide[:, 5:-8]
            apart[name].copy_(given[name])
    assert_bitwise_equal(run(apart), plain)


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_rows_of_gate_and_up_lie_apart_differently(tile):
    """And up's memory may lie in front of the gate's or behind it."""
    given = arguments(("gate_up", "norm"), 5, 20, 70)
    plain = run(given, tile)
    for first, second in (("weight", "up_weight"), ("up_weight", "weight")):
        memory = poison_(given["weight"].new_empty(20 * 77 + 20 * 81))
        apart = {first: memory[: 20 * 77].view(20, 77)[:, 3:73], second: memory[20 * 77 :].view(20, 81)[:, :70]}
        for name, rows in apart.items():
            rows.copy_(given[name])
        assert_bitwise_equal(run({**given, **apart}, tile), plain)


def test_one_workspace_serves_launches_of_all_sizes():
    workspace = poisoned_workspace()
    for turn in range(12):
        form = FORMS[turn % len(FORMS)]
        given = arguments(form, 1 + 3 * (turn % 5), 5 + 11 * (turn % 4), 40 + 32 * (turn % 3))
        check(given, run(given, LowMTile(16, 32, 1 + turn % 4, 2, 4), workspace))


def test_the_same_bits_every_time_whatever_the_workspace_holds():
    given = arguments(("norm", "gate_up"), 7, 40, 200)
    first = run(given)
    workspace = poisoned_workspace()
    for value in (0.0, float("inf"), 1e30):
        workspace.sums.fill_(value)
        assert_bitwise_equal(run(given, workspace=workspace), first)


def test_float32_results_of_narrow_inputs():
    for dtype in KERNEL_DTYPES:
        given = arguments((), 7, 33, 70, dtype)
        for out in (run(given, out_dtype=torch.float32), low_m_linear(**given, out_dtype=torch.float32)):
            assert out.dtype is torch.float32
            wanted, size = given["x"].double() @ given["weight"].double().T, None
            size = given["x"].double().abs() @ given["weight"].double().abs().T
            assert bool(((out.double() - wanted).abs() <= 70 * 2.0**-23 * size + 1e-12).all())


@pytest.mark.gpu
def test_a_residual_is_added_after_the_products_rounding():
    given = arguments(("residual",), 7, 48, 64, torch.bfloat16)
    plain = run({name: given[name] for name in ("x", "weight")})
    assert_bitwise_equal(run(given), given["residual"] + plain)


def test_tiles_of_kimi_k3_keep_all_programs_resident_and_their_loads_even():
    shapes = ((2112, 7168), (576, 7168), (1536, 1536), (7168, 1024), (1792, 7168), (7168, 1792), (2880, 7168))
    for (n, k), gate_up in itertools.product(shapes, (False, True)):
        for rows in (7, 8, 28, 64, 128):
            tile = low_m_tile(rows, n, k, torch.bfloat16, gate_up, 132)
            tiles, blocks = -(-n // tile.n), -(-k // tile.k)
            assert 1 <= tile.splits <= 16 and tiles * tile.splits <= max(tiles, 2 * 132)
            most, mean = -(-blocks // tile.splits), blocks / tile.splits
            assert most - mean < 1
    # The bits of a row are those of its class.
    assert low_m_tile(1, 2112, 7168, torch.bfloat16, False, 132) == low_m_tile(16, 2112, 7168, torch.bfloat16, False, 132)


def test_a_layers_cuts_are_those_that_were_the_fastest():
    """Splits and stages measured on an H200 with 8 rows."""
    measured = {(2112, 7168): (8, 4), (1536, 1536): (4, 6), (7168, 1024): (1, 6), (7168, 1792): (1, 6), (20480, 7168): (1, 3)}
    for (n, k), cut in measured.items():
        tile = low_m_tile(8, n, k, torch.bfloat16, False, 132)
        assert (tile.splits, tile.stages) == cut
    tile = low_m_tile(8, 1792, 7168, torch.bfloat16, True, 132)
    assert (tile.n, tile.splits, tile.stages) == (32, 4, 4)
    # Three programs a processor where all tiles of a large weight run at once so, and not with two.
    for n, stages, first in ((16896, 4, False), (16897, 3, True), (25344, 3, True), (25345, 4, False)):
        tile = low_m_tile(8, n, 7168, torch.bfloat16, False, 132)
        assert (tile.splits, tile.stages, tile.weight_first) == (1, stages, first), n
    assert low_m_tile(8, 9600, 1024, torch.bfloat16, False, 132).stages == 6
    assert low_m_tile(8, 12672, 7168, torch.bfloat16, True, 132).stages == 3


def test_more_rows_are_cut_as_was_the_fastest():
    """Measured on an H200 with 56 and 112 rows: weight rows, values and splits, stages."""
    measured = {
        (2112, 7168): (64, 4), (1536, 1536): (64, 4), (7168, 1024): (64, 1), (7168, 1792): (64, 1), (7168, 35840): (128, 2),
    }  # fmt: skip
    for (n, k), (width, splits) in measured.items():
        tile = low_m_tile(56, n, k, torch.bfloat16, False, 132)
        assert (tile.n, tile.splits, tile.warps, tile.norm_apart) == (width, splits, 4, True)
        assert (tile.k, tile.stages) == ((128, 4) if width == 64 else (64, 6))
        tile = low_m_tile(112, n, k, torch.bfloat16, False, 132)
        assert (tile.n, tile.k, tile.stages, tile.warps, tile.norm_apart) == (width, 64, 6, 8, True)
        assert tile.splits == (5 if n == 1536 else splits)
    assert [low_m_tile(rows, 1792, 7168, torch.bfloat16, True, 132).n for rows in (56, 112)] == [32, 32]
    assert not low_m_tile(32, 2112, 7168, torch.bfloat16, False, 132).norm_apart
    assert not low_m_tile(64, 2112, 7168, torch.float32, False, 132).norm_apart


def test_a_workspace_for_products_serves_them_and_fewer_rows():
    products = [LowMProduct(28, 40, 300, torch.float32), LowMProduct(7, 33, 200, torch.float32, gate_up=True)]
    workspace = LowMWorkspace.for_products(DEVICE, products)
    for rows in (28, 9, 1):
        given = arguments(("norm",), rows, 40, 300)
        check(given, run(given, None, workspace))
    given = arguments(("norm", "gate_up"), 7, 33, 200)
    check(given, run(given, None, workspace))


def test_what_does_not_fit_is_refused():
    given = arguments(("norm", "residual", "gate_up"), 3, 20, 40)
    x, weight = given["x"], given["weight"]
    refused = [
        ({"x": x[0], "weight": weight}, r"wants x \[M, K\]"),
        ({"x": x[:, :8], "weight": weight}, r"wants x \[M, K\] and weight \[N, K\], N and K at least 1, got \[3, 8\]"),
        ({"x": x, "weight": weight[:0]}, "at least 1"),
        ({"x": x.expand(43, -1, -1).flatten(0, 1), "weight": weight}, "at most 128 rows, got 129"),
        ({"x": x.double(), "weight": weight.double()}, "bfloat16, float16 or float32"),
        ({"x": x, "weight": weight.bfloat16()}, "wants weight .* torch.float32"),
        ({**given, "up_weight": weight[:5]}, r"wants up_weight \[20, 40\]"),
        ({**given, "norm_weight": given["norm_weight"][:5]}, r"wants norm_weight \[40\]"),
        ({**given, "residual": given["residual"][:2]}, r"wants residual \[3, 20\]"),
        ({**given, "eps": None}, "norm_weight and eps together"),
        ({"x": x, "weight": weight, "eps": 1e-5}, "norm_weight and eps together"),
        ({"x": x, "weight": weight, "out_dtype": torch.float16}, "returns torch.float32 or float32"),
        ({"x": x, "weight": weight, "backend": "cute"}, "no backend cute"),
    ]
    for case, message in refused:
        with pytest.raises(ValueError, match=message):
            low_m_linear(**case)
    low = {name: value.bfloat16() for name, value in arguments(("residual",), 3, 20, 40).items()}
    with pytest.raises(ValueError, match="with a residual of torch.bfloat16 returns that dtype"):
        low_m_linear(**low, out_dtype=torch.float32)


def test_what_the_kernel_cannot_do_is_refused():
    given = arguments((), 3, 20, 40)
    small = LowMWorkspace(DEVICE, num_sums=8, num_tiles=8)
    refused = [
        ({"tile": SPLIT}, "needs a LowMWorkspace with at least num_sums=1536 and num_tiles=2, got none"),
        (
            {"tile": SPLIT, "workspace": small},
            "has num_sums and num_tiles 8 and 8, this product wants num_sums=1536 and num_tiles=2",
        ),
        ({"weight": given["weight"].T.contiguous().T}, r"pass weight.contiguous\(\)"),
        (
            {"x": given["x"].half(), "weight": given["weight"].half(), "norm_weight": given["x"][0].half(), "eps": 1e-5},
            "float16",
        ),
    ]
    for changes, message in refused:
        with pytest.raises(ValueError, match=message):
            low_m_linear(**{"tile": WHOLE, **given, **changes}, backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8, 28])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: "+".join(sorted(form)) or "plain")
def test_replays_with_changed_inputs(form, rows):
    given = arguments(form, rows, 2112, 1536, torch.bfloat16)
    workspace = LowMWorkspace.for_products(DEVICE, [LowMProduct(rows, 2112, 1536, torch.bfloat16, gate_up="gate_up" in form)])

    def work():
        # Two in a row, which share the workspace.
        for _ in range(2):
            out = low_m_linear(**given, backend="triton", workspace=workspace)
        return out

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    for _ in range(50):
        given["x"].copy_(torch.randn(rows, 1536))
        graph.replay()
        eager = low_m_linear(**given, backend="triton", workspace=LowMWorkspace(DEVICE, num_sums=2_000_000, num_tiles=99))
        assert_bitwise_equal(out, eager)
        assert not workspace.arrivals.any()
    check(given, out)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [7, 32, 64, 128])
def test_kimi_k3s_products_repeat_to_the_bit(rows):
    for n, k in ((2112, 7168), (1536, 1536), (7168, 1024), (7168, 1792)):
        given = arguments(("norm",), rows, n, k, torch.bfloat16)
        workspace = LowMWorkspace.for_products(DEVICE, [LowMProduct(rows, n, k, torch.bfloat16)])
        first = low_m_linear(**given, backend="triton", workspace=workspace)
        check(given, first)
        for _ in range(200):
            assert_bitwise_equal(low_m_linear(**given, backend="triton", workspace=workspace), first)
