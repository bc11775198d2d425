"""Rows of an fp8 pool: each byte is where it should be, and each value is the nearest one that the type has."""

import math

import pytest
import torch
from kernel_kit import DEVICE

from dspark_model.ops import dequantise_rows, pool_row_width, quantise_rows
from dspark_model.testing import assert_bitwise_equal

FP8 = torch.float8_e4m3fn
# Every finite value of the type that is not negative, in order: its code is its place.
LADDER = torch.arange(0x7F, dtype=torch.uint8).view(FP8).double()


def exact_scale(row: torch.Tensor) -> float:
    """The least power of two, from 2^-100 up, that leaves no value above 448; by trial."""
    largest, exponent = float(row.double().abs().max()), -100
    while largest > 448 * 2.0**exponent:
        exponent += 1
    return 2.0**exponent


def exact_codes(row: torch.Tensor, scale: float) -> torch.Tensor:
    """The code of the nearest value for each of a row's values, the even one of two that are as near; in float64."""
    distance = (LADDER - (row.double().abs() / scale)[:, None]).abs()
    code = torch.arange(0x7F)
    key = torch.where(distance == distance.amin(-1, keepdim=True), code % 2, 2)
    return (key.argmin(-1) + torch.where(row.signbit(), 0x80, 0)).to(torch.uint8)


def rows_of(kind: str, *shape: int) -> torch.Tensor:
    if kind == "ties":
        # Half way between two neighbours, and a largest value that makes the scale 1.
        between = (LADDER[1:] + LADDER[:-1]) / 2
        rows = between[torch.randint(len(between), shape)].float() * (2 * torch.randint(2, shape) - 1)
        rows[..., 0] = 448
        return rows
    spread = {"narrow": 0.3, "wide": 6.0, "tiny": 1.0, "huge": 1.0}[kind]
    size = {"tiny": -130.0, "huge": 100.0}.get(kind, 0.0)
    return torch.randn(shape) * torch.exp2(torch.randn(shape) * spread + size)


@pytest.mark.parametrize(
    ("width", "dtype", "wanted"),
    [
        (576, FP8, 592),
        (512, FP8, 528),
        (48, FP8, 64),
        (9, FP8, 32),
        (1, FP8, 32),
        (576, torch.bfloat16, 576),
        (9, torch.uint8, 9),
    ],
)
def test_width_of_a_pool_row(width, dtype, wanted):
    assert pool_row_width(width, dtype) == wanted


def test_bytes_of_a_row_by_hand():
    """Scale 2: 448 is 0x7e (1.75 * 2^8), 1 is 0x38, 17 lies between 16 and 18 and goes to the even 0x58."""
    row = torch.tensor([896.0, -2.0, 34.0, 0.0, -0.0])
    found = quantise_rows(row).view(torch.uint8).tolist()
    assert found == [0x7E, 0xB8, 0x58, 0, 0x80, *[0] * 11, 0, 0, 0, 0x40, *[0] * 12]
    assert dequantise_rows(quantise_rows(row), 5).tolist() == [896.0, -2.0, 32.0, 0.0, -0.0]


@pytest.mark.parametrize("kind", ["narrow", "wide", "ties", "tiny", "huge"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_value_is_the_nearest_one_of_the_type(kind, dtype):
    rows = rows_of(kind, 40, 21).to(dtype)
    found = quantise_rows(rows.to(DEVICE)).cpu()
    assert found.dtype is FP8 and found.shape == (40, 48)
    scales = found.view(torch.uint8)[:, 32:36].contiguous().view(torch.float32)[:, 0]
    back = dequantise_rows(found.to(DEVICE), 21).cpu()
    for row, kept, scale, value in zip(rows, found, scales, back, strict=True):
        assert float(scale) == exact_scale(row)
        codes = exact_codes(row, float(scale))
        assert_bitwise_equal(kept[:21].view(torch.uint8), codes)
        exact = kept[:21].double() * float(scale)
        assert_bitwise_equal(value.double(), exact)
        bound = torch.maximum(row.double().abs() / 16, torch.tensor(float(scale) / 1024))
        assert ((exact - row.double()).abs() <= bound).all()
    assert not found.view(torch.uint8)[:, 21:32].any() and not found.view(torch.uint8)[:, 36:].any()


@pytest.mark.parametrize("exponent", [-100, -99, -1, 0, 1, 60, 119])
def test_the_scale_changes_just_above_448(exponent):
    edge = torch.tensor(448.0 * 2.0**exponent)
    above = torch.nextafter(edge, torch.tensor(math.inf))
    for value, scale in ((edge, 2.0**exponent), (above, 2.0 ** (exponent + 1))):
        assert exact_scale(value[None]) == scale
        kept = quantise_rows(value[None].to(DEVICE)).cpu()
        assert float(kept.view(torch.uint8)[16:20].view(torch.float32)) == scale
        assert float(dequantise_rows(kept, 1)) == float(edge)


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 1e-38])
def test_rows_that_are_too_small_are_0(value):
    kept = quantise_rows(torch.full((2, 7), value, device=DEVICE))
    assert (kept.view(torch.uint8)[:, 16:20].contiguous().view(torch.float32) == 2.0**-100).all()
    back = dequantise_rows(kept, 7)
    assert torch.equal(back, torch.zeros(2, 7, device=DEVICE))


def test_the_largest_float32_is_rounded_down():
    """It is 256 scales but for the last bit, and 256 of them are 2^128."""
    row = torch.tensor([torch.finfo(torch.float32).max, 1.0], device=DEVICE)
    assert quantise_rows(row).view(torch.uint8)[:2].tolist() == [0x78, 0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 11])
def test_a_row_that_is_not_finite_comes_back_as_nan(value, place):
    row = torch.randn(2, 12, device=DEVICE)
    row[1, place] = value
    back = dequantise_rows(quantise_rows(row), 12)
    assert back[0].isfinite().all() and back[1].isnan().all()


@pytest.mark.parametrize("kind", ["narrow", "wide"])
def test_what_comes_back_is_exact_in_bfloat16_and_stays_as_it_is(kind):
    back = dequantise_rows(quantise_rows(rows_of(kind, 50, 32).to(DEVICE)), 32)
    assert torch.equal(back.bfloat16().float(), back)
    assert torch.equal(dequantise_rows(quantise_rows(back), 32), back)


def test_rows_anywhere_in_memory():
    rows = rows_of("narrow", 3, 4, 9).to(DEVICE)
    wanted = quantise_rows(rows)
    assert_bitwise_equal(quantise_rows(rows.transpose(0, 1)), wanted.transpose(0, 1))
    # A pool's rows, pages 3 bytes more than its rows apart.
    memory = torch.zeros(1 + 3 * (4 * 32 + 3), dtype=FP8, device=DEVICE)
    view = memory[1:].as_strided((3, 4, 32), (4 * 32 + 3, 32, 1))
    view.copy_(wanted)
    assert_bitwise_equal(dequantise_rows(view, 9), dequantise_rows(wanted, 9))


def test_no_rows():
    assert quantise_rows(torch.zeros(0, 3, 9, device=DEVICE)).shape == (0, 3, 32)
    assert dequantise_rows(torch.zeros(2, 0, 32, dtype=FP8, device=DEVICE), 9).shape == (2, 0, 9)


@pytest.mark.parametrize("width", [17, 48])
def test_rows_of_another_width_are_refused(width):
    with pytest.raises(ValueError, match=f"rows of 32 bytes, wanted .* for latents of {width} values"):
        dequantise_rows(torch.zeros(2, 32, dtype=FP8, device=DEVICE), width)
