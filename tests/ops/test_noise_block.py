"""`noise_block`: exact copies of embedding rows."""

import pytest
import torch

from dspark_model.ops import noise_block
from dspark_model.testing import assert_bitwise_equal, poison_


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 7, 8])
@pytest.mark.parametrize("batch", [0, 1, 5])
def test_the_anchor_stands_first_and_mask_rows_behind(dtype, rows, batch):
    embed, mask = torch.randn(20, 9).to(dtype), torch.randn(9).to(dtype)
    anchors = torch.randint(20, (batch,))
    block = noise_block(anchors, embed, mask, rows)
    assert (block.dtype, block.shape) == (dtype, (batch, rows, 9))
    for b, anchor in enumerate(anchors.tolist()):
        assert_bitwise_equal(block[b, 0], embed[anchor])
        for row in range(1, rows):
            assert_bitwise_equal(block[b, row], mask)


def test_only_the_anchors_rows_of_the_table_are_read():
    embed = poison_(torch.empty(20, 9))
    embed[[0, 19]] = 1.0
    assert torch.equal(noise_block(torch.tensor([0, 19, 0]), embed, torch.ones(9), 4), torch.ones(3, 4, 9))


def test_a_mask_row_of_another_dtype_is_rounded_to_the_tables():
    mask = torch.randn(9)
    block = noise_block(torch.tensor([1]), torch.randn(4, 9).bfloat16(), mask, 3)
    assert_bitwise_equal(block[0, 2], mask.bfloat16())


@pytest.mark.parametrize(("batch", "rows"), [(2, 3), (1, 3), (1, 1)])
def test_neither_building_nor_writing_the_block_reaches_table_or_mask(batch, rows):
    embed, mask = torch.ones(4, 3), torch.zeros(3)
    noise_block(torch.ones(batch, dtype=torch.int64), embed, mask, rows).fill_(7.0)
    assert torch.equal(embed, torch.ones(4, 3))
    assert torch.equal(mask, torch.zeros(3))
