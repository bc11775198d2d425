"""`packed_linear` and the packed form of `fp32_linear` against float64 and `F.linear`."""

import pytest
import torch

from dspark_model.ops import can_pack, fp32_linear, pack_weight, packed_linear
from dspark_model.testing import assert_bitwise_equal

needs_packing = pytest.mark.skipif(not can_pack(torch.ones(1, 1)), reason="not an x86 CPU with AVX2 and oneDNN")
# Widths that fill no block of 16, 48 or 64, beside some that do.
SHAPES = [(1, 1), (33, 20), (65, 577), (192, 64), (320, 48)]


def inputs(rows: int, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(rows, shape[1]), torch.randn(shape), torch.randn(shape[0])


def check(ours: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> None:
    """Within K + 1 float32 roundings of float64, the bound of any order of summation."""
    assert ours.dtype is torch.float32
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    magnitude = torch.nn.functional.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
    assert ((ours.double() - exact).abs() <= 2.0**-23 * (weight.shape[1] + 1) * magnitude).all()


@needs_packing
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 33, 130])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_product_with_the_plain_weight(shape, rows):
    x, weight, bias = inputs(rows, shape)
    packed = pack_weight(weight)
    check(packed_linear(x, packed, bias), x, weight, bias)
    check(packed_linear(x, packed), x, weight, torch.zeros_like(bias))
    torch.testing.assert_close(
        packed_linear(x, packed, bias), torch.nn.functional.linear(x, weight, bias), rtol=1e-4, atol=1e-4
    )
    assert_bitwise_equal(fp32_linear(x, packed), packed_linear(x, packed))


@needs_packing
@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded", "batched", "one row"])
def test_takes_any_strides_and_leading_dimensions(layout):
    _, weight, bias = inputs(1, (33, 20))
    x = {
        "transposed": torch.randn(20, 7).T,
        "strided": torch.randn(7, 40)[:, ::2],
        "expanded": torch.randn(1, 20).expand(7, 20),
        "batched": torch.randn(3, 9, 20)[:, 2:6],
        "one row": torch.randn(20),
    }[layout]
    ours = packed_linear(x, pack_weight(weight), bias)
    assert ours.shape == (*x.shape[:-1], 33) and ours.is_contiguous()
    check(ours, x, weight, bias)


@needs_packing
def test_packs_views_and_keeps_them_as_they_are():
    """A head is a view of the first rows of a padded table; a weight may be stored transposed."""
    table = torch.randn(50, 20)
    before = table.clone()
    x = torch.randn(8, 20)
    for weight in (table[:33], torch.randn(20, 33).T):
        check(packed_linear(x, pack_weight(weight)), x, weight, torch.zeros(33))
    packed = pack_weight(table[:33])
    assert packed.is_mkldnn and packed.shape == (33, 20) and not pack_weight(torch.nn.Parameter(table)).requires_grad
    assert_bitwise_equal(table, before)
    table.zero_()
    check(packed_linear(x, packed), x, before[:33], torch.zeros(33))


@needs_packing
def test_a_row_does_not_depend_on_the_others():
    """Rejected rows may hold anything, NaN too."""
    x, weight, bias = inputs(8, (192, 64))
    packed = pack_weight(weight)
    other = x.clone()
    other[3:] = float("nan")
    assert_bitwise_equal(packed_linear(other, packed, bias)[:3], packed_linear(x, packed, bias)[:3])


@pytest.mark.parametrize(
    "weight",
    [
        torch.ones(4, 4, dtype=torch.bfloat16),
        torch.ones(4, 4, dtype=torch.float64),
        torch.ones(4),
        torch.ones(0, 4),
        torch.ones(4, 4, device="meta"),
    ],
    ids=["bfloat16", "float64", "vector", "empty", "other-device"],
)
def test_other_weights_are_refused(weight):
    assert not can_pack(weight)
    with pytest.raises(ValueError, match="cannot be packed; wanted a float32 matrix"):
        pack_weight(weight)


@pytest.mark.parametrize("capability", ["DEFAULT", "SVE256", "ZVECTOR"])
def test_a_cpu_that_was_not_measured_is_refused(monkeypatch, capability):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert not can_pack(torch.ones(4, 4))


@needs_packing
@pytest.mark.parametrize("width", [19, 40])
def test_a_wrong_width_is_refused(width):
    with pytest.raises(RuntimeError):
        packed_linear(torch.randn(3, width), pack_weight(torch.randn(33, 20)))
