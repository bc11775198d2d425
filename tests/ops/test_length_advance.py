"""`length_advance` against a loop."""

import pytest
import torch

from dspark_model.ops import length_advance


@pytest.mark.parametrize("batch", [0, 1, 50])
def test_matches_a_loop(batch):
    lengths, committed = torch.randint(0, 20, (batch,)), torch.randint(0, 9, (batch,))
    capacity, live = torch.randint(0, 30, (batch,)), torch.rand(batch) > 0.3
    result = length_advance(lengths, committed, capacity, live)
    for b in range(batch):
        wanted = int(lengths[b] + committed[b]) if live[b] else 0
        kept = min(wanted, int(capacity[b]))
        assert int(result.context_lens[b]) == (kept if live[b] else 0)
        assert int(result.num_dropped[b]) == (wanted - kept if live[b] else 0)


@pytest.mark.parametrize(
    ("length", "committed", "capacity", "live", "wanted"),
    [
        (4, 3, 8, True, (7, 0)),
        (4, 4, 8, True, (8, 0)),
        (4, 5, 8, True, (8, 1)),
        (4, 3, 0, True, (0, 7)),
        (4, 3, 8, False, (0, 0)),
    ],
)
def test_edges(length, committed, capacity, live, wanted):
    result = length_advance(*(torch.tensor([value]) for value in (length, committed, capacity)), torch.tensor([live]))
    assert (int(result.context_lens), int(result.num_dropped)) == wanted
