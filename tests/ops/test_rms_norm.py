"""`rms_norm` against float64."""

import pytest
import torch

from dspark_model.ops import rms_norm
from dspark_model.testing import assert_bitwise_equal

ONE_ROUNDING = {torch.float32: 4 * 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.mark.parametrize("dtype", list(ONE_ROUNDING), ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 5, 64), (0, 9), (4, 1536)], ids=str)
@pytest.mark.parametrize("eps", [1e-6, 1e-3, 0.5])
def test_matches_float64_to_one_rounding(dtype, shape, eps):
    x = (torch.randn(shape) * 3).to(dtype)
    weight = (torch.rand(shape[-1]) + 0.5).to(dtype)
    ours = rms_norm(x, weight, eps)
    wide = x.double()
    exact = wide / (wide.pow(2).sum(-1, keepdim=True) / shape[-1] + eps).sqrt() * weight.double()
    assert (ours.dtype, ours.shape) == (dtype, x.shape)
    bound = ONE_ROUNDING[dtype] * exact.abs() * 1.001 + 1e-7 * (dtype is torch.float16)
    assert ((ours.double() - exact).abs() <= bound).all()


def test_eps_keeps_a_zero_row_finite():
    assert_bitwise_equal(rms_norm(torch.zeros(2, 4), torch.ones(4), 1e-6), torch.zeros(2, 4))


def test_rows_do_not_see_each_other():
    x = torch.randn(5, 33)
    alone = rms_norm(x[2:3], torch.ones(33), 1e-6)
    x[[0, 1, 3, 4]] = float("nan")
    assert_bitwise_equal(rms_norm(x, torch.ones(33), 1e-6)[2:3], alone)


def test_large_bfloat16_values_do_not_overflow_inside():
    x = torch.full((1, 8), 3e38, dtype=torch.float32).bfloat16()
    small = torch.full((1, 8), 1e15).bfloat16()
    assert torch.isfinite(rms_norm(small, torch.ones(8, dtype=torch.bfloat16), 1e-6)).all()
    assert not torch.isnan(rms_norm(x, torch.ones(8, dtype=torch.bfloat16), 1e-6)).any()
