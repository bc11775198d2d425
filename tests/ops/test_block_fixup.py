"""`block_fixup` against a loop."""

import pytest
import torch

from dspark_model.ops import block_fixup


@pytest.mark.parametrize("page_size", [1, 4, 32])
@pytest.mark.parametrize("rows", [1, 7, 8])
@pytest.mark.parametrize("batch", [0, 1, 6])
def test_matches_a_loop(page_size, rows, batch):
    table = torch.stack([torch.randperm(50)[:8] for _ in range(batch)]).int() if batch else torch.zeros(0, 8, dtype=torch.int32)
    num_pages = torch.randint(0, 9, (batch,))
    context = torch.randint(0, 8 * page_size + 1, (batch,))
    live = torch.rand(batch) > 0.3
    block = block_fixup(context, table, num_pages, live, rows=rows, page_size=page_size)
    assert block.positions.shape == (batch, rows)
    for b in range(batch):
        capacity = int(num_pages[b]) * page_size if live[b] else 0
        start = int(context[b])
        assert block.positions[b].tolist() == list(range(start, start + rows))
        assert int(block.seq_lens[b]) == (min(start + rows, capacity) if live[b] else 0)
        for j, position in enumerate(range(start, start + rows)):
            owned = position < capacity
            assert bool(block.where.owned[b, j]) == owned
            if owned:
                assert int(block.where.pages[b, j]) == int(table[b, position // page_size])
                assert int(block.where.offsets[b, j]) == position % page_size


def test_a_block_across_a_page_edge():
    block = block_fixup(
        torch.tensor([6]),
        torch.tensor([[9, 3, 5]], dtype=torch.int32),
        torch.tensor([2]),
        torch.tensor([True]),
        rows=4,
        page_size=4,
    )
    assert block.where.pages.tolist() == [[3, 3, 0, 0]]
    assert block.where.offsets.tolist() == [[2, 3, 0, 0]]
    assert block.where.owned.tolist() == [[True, True, False, False]]
    assert block.seq_lens.tolist() == [8]


def test_a_dummy_row_owns_nothing_whatever_its_table_says():
    block = block_fixup(
        torch.tensor([2]),
        torch.tensor([[1, 2]], dtype=torch.int32),
        torch.tensor([2]),
        torch.tensor([False]),
        rows=3,
        page_size=4,
    )
    assert not block.where.owned.any()
    assert block.seq_lens.tolist() == [0]
