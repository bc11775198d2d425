"""`decode_block_table` against a loop."""

import pytest
import torch

from dspark_model.ops import decode_block_table


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("divisor", [1, 5, 64])
@pytest.mark.parametrize(("batch", "width"), [(1, 1), (6, 9), (0, 4), (3, 0)])
@pytest.mark.parametrize("strided", [False, True])
def test_matches_a_loop(dtype, divisor, batch, width, strided):
    encoded = torch.randint(0, 30, (batch, width)).to(dtype) * divisor
    encoded[torch.rand(batch, width) < 0.2] = -7
    if strided:
        encoded = torch.stack((encoded, torch.full_like(encoded, -1)), dim=-1)[..., 0]
    num_pages, table = decode_block_table(encoded, divisor)
    assert (num_pages.dtype, table.dtype, table.shape) == (torch.int64, torch.int32, (batch, width))
    for b, row in enumerate(encoded.tolist()):
        pages = []
        for value in row:
            if value < 0:
                break
            pages.append(value // divisor)
        assert int(num_pages[b]) == len(pages)
        assert table[b].tolist() == pages + [-1] * (width - len(pages))


def test_page_0_is_a_page_and_nothing_counts_behind_the_first_gap():
    num_pages, table = decode_block_table(torch.tensor([[0, 32, -1, 64], [-1, 0, 0, 0], [96, 0, 32, 64]]), 32)
    assert num_pages.tolist() == [2, 0, 4]
    assert table.tolist() == [[0, 1, -1, -1], [-1, -1, -1, -1], [3, 0, 1, 2]]


def test_offsets_past_2_to_the_31_are_decoded():
    num_pages, table = decode_block_table(torch.tensor([[2**33, 2**31]]), 2**10)
    assert table.tolist() == [[2**23, 2**21]]
    assert num_pages.tolist() == [2]
