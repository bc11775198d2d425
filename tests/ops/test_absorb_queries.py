"""`absorb_queries` against float64, and its kernel against the reference."""

import pytest
import torch
from kernel_kit import DEVICE, watched_memory

from dspark_model.ops import absorb_queries
from dspark_model.testing import assert_bitwise_equal, poison_

# The interpreter rounds to bf16 as torch does not, so there float32 alone is held to a bound.
DTYPES = [(torch.float32, 1e-5)] + ([(torch.bfloat16, 8e-3)] if DEVICE == "cuda" else [])
BACKENDS = ["torch", "triton"]


def inputs(batch: int, rows: int, heads: int, nope: int, latent: int, rotary: int, dtype: torch.dtype):
    """Queries as a slice of a wider tensor, and keys as a slice of a weight that holds values too."""
    q = poison_(torch.empty(batch, rows, heads * (nope + rotary) + 3, dtype=dtype))
    q[..., :-3] = torch.randn(batch, rows, heads * (nope + rotary)).to(dtype)
    q = q[..., :-3].unflatten(-1, (heads, -1))
    weight = (torch.randn(heads, nope + 5, latent) * nope**-0.5).to(dtype)
    angles = torch.rand(batch, rows, rotary // 2) * 100
    table = torch.cat((angles.cos(), angles.sin()), -1)
    return q.to(DEVICE), weight.to(DEVICE)[:, :nope], table.to(DEVICE)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "bound"), DTYPES, ids=str)
@pytest.mark.parametrize(("nope", "latent", "rotary"), [(16, 32, 8), (5, 7, 2), (130, 66, 16), (16, 130, 8)])
@pytest.mark.parametrize(("batch", "rows", "heads"), [(1, 1, 1), (1, 7, 3), (3, 7, 2), (0, 3, 2), (5, 16, 1)])
def test_matches_float64(backend, dtype, bound, batch, rows, heads, nope, latent, rotary):
    q, keys, cos_sin = inputs(batch, rows, heads, nope, latent, rotary, dtype)
    reads = () if q.stride(0) != q.shape[1] * q.stride(1) else (q, keys, cos_sin)
    with watched_memory(*reads):
        ours = absorb_queries(q, keys, cos_sin, backend=backend)
    assert (ours.shape, ours.dtype) == ((batch, rows, heads, latent + rotary), dtype) and ours.is_contiguous()
    wide, table = q.double(), cos_sin.double()[:, :, None]
    cos, sin = table.chunk(2, -1)
    even, odd = wide[..., nope::2], wide[..., nope + 1 :: 2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    wanted = torch.cat((torch.einsum("bnhd,hdc->bnhc", wide[..., :nope], keys.double()), turned), -1)
    torch.testing.assert_close(ours.double(), wanted, rtol=bound, atol=bound)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_do_not_see_each_other(backend):
    q, keys, cos_sin = inputs(2, 4, 3, 16, 32, 8, torch.float32)
    before = absorb_queries(q, keys, cos_sin, backend=backend)
    q[0], cos_sin[0] = float("nan"), float("nan")
    after = absorb_queries(q, keys, cos_sin, backend=backend)
    assert_bitwise_equal(after[1], before[1])


def test_tensors_that_the_kernel_cannot_read_are_refused():
    q, keys, cos_sin = inputs(1, 3, 2, 16, 32, 8, torch.float32)
    for bad in ((q, keys.mT.contiguous().mT, cos_sin), (q, keys, cos_sin.mT.contiguous().mT), (q[..., ::2], keys, cos_sin)):
        with pytest.raises(ValueError, match="wanted side by side"):
            absorb_queries(*bad, backend="triton")
