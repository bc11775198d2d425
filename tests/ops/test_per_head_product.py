"""`per_head_product` against a loop over heads."""

import pytest
import torch

from dspark_model.ops import per_head_product
from dspark_model.testing import poison_


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize(("batch", "rows", "heads"), [(1, 1, 1), (2, 7, 3), (0, 4, 2), (3, 0, 2)])
def test_every_head_has_its_own_matrix(batch, rows, heads, extra, transposed):
    x = torch.randn(batch, rows, heads, 5)
    weight = torch.randn(heads, 4, 5).transpose(1, 2) if transposed else torch.randn(heads, 5, 4)
    wide = poison_(torch.empty(batch, rows, heads, 4 + extra))
    per_head_product(x, weight, out=wide[..., :4])
    wanted = torch.stack([x[:, :, h] @ weight[h] for h in range(heads)], dim=2)
    torch.testing.assert_close(wide[..., :4], wanted)
    assert wide[..., 4:].isnan().all()


def test_a_sliced_input_is_taken():
    wide, weight, out = torch.randn(2, 3, 2, 8), torch.randn(2, 5, 4), torch.empty(2, 3, 2, 4)
    per_head_product(wide[..., 1:6], weight, out=out)
    torch.testing.assert_close(out, torch.einsum("bnhd,hde->bnhe", wide[..., 1:6], weight))
