"""`context_rows`: the kernel against the reference, and the reference against a loop."""

import pytest
import torch
from kernel_kit import DEVICE, random_bits, watched_memory

from dspark_model.ops import ContextRows, context_rows
from dspark_model.testing import assert_bitwise_equal, poison_


def check(slots: list[int], lens: list[int], rows: int, width: int) -> ContextRows:
    table = random_bits(max(lens) + rows, width, dtype=torch.float32)
    at, lengths = (torch.tensor(values, dtype=torch.int64, device=DEVICE) for values in (slots, lens))
    with watched_memory(at, lengths, table):
        fused = context_rows(at, lengths, table, rows, fused=True)
    reference = context_rows(at, lengths, table, rows)
    for name in ("start", "cos_sin"):
        assert_bitwise_equal(getattr(fused, name), getattr(reference, name), name)
    starts = [0 if slot < 0 else lens[slot] for slot in slots]
    assert reference.start.tolist() == starts
    wanted = [table[start : start + rows] for start in starts]
    assert_bitwise_equal(reference.cos_sin, torch.stack(wanted) if wanted else table.new_empty(0, rows, width))
    return fused


@pytest.mark.parametrize(("rows", "width"), [(8, 64), (2, 2), (1, 6), (17, 16), (5, 20)])
def test_matches_a_loop(rows, width):
    check([3, -1, 0, 1], [9, 0, 77, 40], rows, width)
    check([0], [0], rows, width)
    check([], [4], rows, width)


def test_dummy_rows_start_at_0_and_read_no_slot():
    assert check([-1, -1], [7], 3, 4).start.tolist() == [0, 0]


def test_lengths_of_other_slots_are_not_read():
    lens = poison_(torch.empty(4, dtype=torch.int64, device=DEVICE))
    lens[2] = 5
    table = random_bits(9, 4, dtype=torch.float32)
    slots = torch.tensor([2, -1], device=DEVICE)
    rows = context_rows(slots, lens, table, 3, fused=True)
    assert rows.start.tolist() == [5, 0]
    assert_bitwise_equal(rows.cos_sin, torch.stack((table[5:8], table[:3])))
