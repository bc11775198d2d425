"""`latent_store`: owned rows are written, and not one other byte."""

import pytest
import torch

from dspark_model.ops import latent_store
from dspark_model.ops.row_addresses import RowAddresses
from dspark_model.testing import assert_bitwise_equal, poison_


def pool(layers: int, layout: str, dtype: torch.dtype) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    shape = (layers, 6, 4, 5) if layout == "layer_major" else (6, layers, 4, 5)
    storage = torch.randn(shape).to(dtype)
    return storage, storage.unbind(0 if layout == "layer_major" else 1)


def addresses(batch: int, rows: int) -> RowAddresses:
    """Distinct places, about half of them owned; the others point at page 0, row 0."""
    places = torch.randperm(24)[: batch * rows].view(batch, rows)
    owned = torch.rand(batch, rows) > 0.5
    return RowAddresses(torch.where(owned, places // 4, 0), torch.where(owned, places % 4, 0), owned)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["layer_major", "page_major"])
@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (3, 7), (0, 4), (2, 0)])
def test_owned_rows_and_nothing_else(dtype, layout, batch, rows):
    storage, views = pool(3, layout, dtype)
    wanted = [view.clone() for view in views]
    where = addresses(batch, rows)
    latents = torch.randn(3, batch, rows, 5)
    latents.masked_fill_(~where.owned[None, ..., None], float("nan"))
    for layer in range(3):
        for b, n in where.owned.nonzero().tolist():
            wanted[layer][where.pages[b, n], where.offsets[b, n]] = latents[layer, b, n].to(dtype)
    latent_store(views, latents, where)
    for layer in range(3):
        assert_bitwise_equal(views[layer], wanted[layer], f"layer {layer}")
    assert not storage.isnan().any()


def test_no_owned_row_leaves_the_pool_alone():
    storage, views = pool(2, "page_major", torch.float32)
    before = storage.clone()
    nothing = torch.zeros(2, 3, dtype=torch.int64)
    latent_store(views, poison_(torch.empty(2, 2, 3, 5)), RowAddresses(nothing, nothing, nothing.bool()))
    assert_bitwise_equal(storage, before)


def test_layers_must_match():
    _, views = pool(2, "layer_major", torch.float32)
    with pytest.raises(ValueError, match="zip"):
        latent_store(views, torch.zeros(3, 1, 1, 5), addresses(1, 1))
