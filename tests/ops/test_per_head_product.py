"""`per_head_product` against a loop over heads."""

import pytest
import torch
from kernel_kit import DEVICE

from dspark_model.ops import per_head_product
from dspark_model.testing import assert_bitwise_equal, poison_

BACKENDS = ["torch", "triton"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("depth", "width"), [(5, 4), (130, 40)])
@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize(("batch", "rows", "heads"), [(1, 1, 1), (2, 7, 3), (0, 4, 2), (3, 0, 2), (5, 14, 2)])
def test_every_head_has_its_own_matrix(batch, rows, heads, extra, depth, width, transposed, backend):
    x = torch.randn(batch, rows, heads, depth, device=DEVICE)
    weight = (
        torch.randn(heads, width, depth, device=DEVICE).mT if transposed else torch.randn(heads, depth, width, device=DEVICE)
    )
    wide = poison_(torch.empty(batch, rows, heads, width + extra, device=DEVICE))
    per_head_product(x, weight, out=wide[..., :width], backend=backend)
    wanted = torch.stack([x[:, :, h].double() @ weight[h].double() for h in range(heads)], dim=2)
    torch.testing.assert_close(wide[..., :width].double(), wanted, rtol=1e-5, atol=1e-4)
    assert wide[..., width:].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_is_rounded_once(backend):
    x, weight = torch.randn(4, 7, 8, 512, device="cuda").bfloat16(), torch.randn(8, 128, 512, device="cuda").bfloat16().mT
    out = torch.empty(4, 7, 8, 128, device="cuda", dtype=torch.bfloat16)
    per_head_product(x, weight, out=out, backend=backend)
    wanted = torch.einsum("bnhd,hde->bnhe", x.double(), weight.double())
    torch.testing.assert_close(out.double(), wanted, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sliced_input_is_taken(backend):
    wide, weight = torch.randn(2, 3, 2, 8, device=DEVICE), torch.randn(2, 5, 4, device=DEVICE)
    out = torch.empty(2, 3, 2, 4, device=DEVICE)
    per_head_product(wide[..., 1:6], weight, out=out, backend=backend)
    torch.testing.assert_close(out, torch.einsum("bnhd,hde->bnhe", wide[..., 1:6], weight))


def test_rows_do_not_see_each_other():
    x, weight = torch.randn(2, 3, 2, 8, device=DEVICE), torch.randn(2, 8, 4, device=DEVICE)
    before, after = torch.empty(2, 3, 2, 4, device=DEVICE), torch.empty(2, 3, 2, 4, device=DEVICE)
    per_head_product(x, weight, out=before, backend="triton")
    x[0] = float("nan")
    per_head_product(x, weight, out=after, backend="triton")
    assert_bitwise_equal(after[1], before[1])


def test_values_with_gaps_are_refused():
    x, weight = torch.randn(2, 3, 2, 16, device=DEVICE), torch.randn(2, 8, 4, device=DEVICE)
    with pytest.raises(ValueError, match="lie 2 and 1 apart in x and out, wanted side by side"):
        per_head_product(x[..., ::2], weight, out=x.new_empty(2, 3, 2, 4), backend="triton")
