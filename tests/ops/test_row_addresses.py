"""`row_addresses` against a loop over Python lists."""

import pytest
import torch

from dspark_model.ops import row_addresses


@pytest.mark.parametrize("page_size", [1, 3, 32])
@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (4, 9), (0, 3), (2, 0)])
def test_matches_a_lookup_one_row_at_a_time(page_size, batch, rows):
    table = torch.randint(0, 1000, (batch, 5), dtype=torch.int32)
    num_pages = torch.randint(0, 6, (batch,))
    positions = torch.randint(-page_size, 7 * page_size, (batch, rows))
    where = row_addresses(positions, table, num_pages, page_size)
    assert (where.pages.dtype, where.offsets.dtype, where.owned.dtype) == (torch.int64, torch.int64, torch.bool)
    for b in range(batch):
        pages = table[b, : num_pages[b]].tolist()
        for n, position in enumerate(positions[b].tolist()):
            owned = 0 <= position < len(pages) * page_size
            got = (bool(where.owned[b, n]), int(where.pages[b, n]), int(where.offsets[b, n]))
            wanted = (True, pages[position // page_size], position % page_size) if owned else (False, 0, 0)
            assert got == wanted


def test_edges_of_a_page():
    table = torch.tensor([[7, 0, -1]], dtype=torch.int32)
    where = row_addresses(torch.tensor([[0, 3, 4, 7, 8, -1]]), table, torch.tensor([2]), 4)
    assert where.owned.tolist() == [[True, True, True, True, False, False]]
    assert where.pages.tolist() == [[7, 7, 0, 0, 0, 0]]
    assert where.offsets.tolist() == [[0, 3, 0, 3, 0, 0]]


def test_entries_past_the_page_count_are_not_pages():
    table = torch.tensor([[5, 123456]], dtype=torch.int32)
    where = row_addresses(torch.tensor([[4, 5, 100_000]]), table, torch.tensor([1]), 4)
    assert not where.owned.any()
    assert where.pages.tolist() == [[0, 0, 0]]


def test_positions_past_2_to_the_31_do_not_wrap():
    where = row_addresses(torch.tensor([[2**31 + 1, 2**40]]), torch.zeros(1, 4, dtype=torch.int32), torch.tensor([4]), 32)
    assert not where.owned.any()
