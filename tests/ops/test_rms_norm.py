"""`rms_norm` against float64."""

import pytest
import torch
from kernel_kit import DEVICE

from dspark_model.ops import rms_norm
from dspark_model.testing import assert_bitwise_equal, poison_

ONE_ROUNDING = {torch.float32: 4 * 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# The interpreter rounds to 16 bits as torch does not, so there float32 alone is held to a bound.
CASES = [("torch", dtype) for dtype in ONE_ROUNDING]
CASES += [("triton", dtype) for dtype in ONE_ROUNDING if DEVICE == "cuda" or dtype is torch.float32]
BACKENDS = ("torch", "triton")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE)


def ones(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(size, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 5, 64), (0, 9), (4, 1536)], ids=str)
@pytest.mark.parametrize("eps", [1e-6, 1e-3, 0.5])
def test_matches_float64_to_one_rounding(backend, dtype, shape, eps):
    x = (random(*shape) * 3).to(dtype)
    weight = (torch.rand(shape[-1], device=DEVICE) + 0.5).to(dtype)
    ours = rms_norm(x, weight, eps, backend=backend)
    wide = x.double()
    exact = wide / (wide.pow(2).sum(-1, keepdim=True) / shape[-1] + eps).sqrt() * weight.double()
    assert (ours.dtype, ours.shape) == (dtype, x.shape)
    slack = 1.001 if backend == "torch" else 1.01 + 4 * (dtype is torch.float32)
    bound = ONE_ROUNDING[dtype] * exact.abs() * slack + 1e-7 * (dtype is torch.float16)
    assert ((ours.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_eps_keeps_a_zero_row_finite(backend):
    zero = torch.zeros(2, 4, device=DEVICE)
    assert_bitwise_equal(rms_norm(zero, ones(4), 1e-6, backend=backend), zero)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_do_not_see_each_other(backend):
    x = random(5, 33)
    alone = rms_norm(x[2:3], ones(33), 1e-6, backend=backend)
    x[[0, 1, 3, 4]] = float("nan")
    assert_bitwise_equal(rms_norm(x, ones(33), 1e-6, backend=backend)[2:3], alone)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_may_be_part_of_wider_ones(backend):
    wide = poison_(torch.empty(3, 50, device=DEVICE))
    wide[:, 9:42] = random(3, 33)
    ours = rms_norm(wide[:, 9:42], ones(33), 1e-6, backend=backend)
    assert_bitwise_equal(ours, rms_norm(wide[:, 9:42].contiguous(), ones(33), 1e-6, backend=backend))
    with pytest.raises(ValueError, match="lie 2 apart, wanted side by side"):
        rms_norm(wide[:, ::2], ones(25), 1e-6, backend="triton")


def test_large_bfloat16_values_do_not_overflow_inside():
    x = torch.full((1, 8), 3e38, dtype=torch.float32).bfloat16()
    small = torch.full((1, 8), 1e15).bfloat16()
    assert torch.isfinite(rms_norm(small, torch.ones(8, dtype=torch.bfloat16), 1e-6)).all()
    assert not torch.isnan(rms_norm(x, torch.ones(8, dtype=torch.bfloat16), 1e-6)).any()
