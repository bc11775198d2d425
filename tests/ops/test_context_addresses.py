"""`context_addresses`: the kernel against the reference, and the reference against a loop."""

import pytest
import torch
from kernel_kit import DEVICE, watched_memory

from dspark_model.ops import RowAddresses, context_addresses
from dspark_model.testing import assert_bitwise_equal, poison_

TABLE = [[7, 3, 0, 9], [1, 2, 5, 4], [8, 6, 10, 11]]
NUM_PAGES = [4, 0, 2]


def check(slots: list[int], start: list[int], count: list[int], rows: int, page_size: int) -> RowAddresses:
    """Entries of the table without a page are poisoned."""
    integers = [torch.tensor(values, dtype=torch.int64, device=DEVICE) for values in (start, count, slots, NUM_PAGES)]
    table = poison_(torch.empty(3, 4, dtype=torch.int32, device=DEVICE))
    for slot, held in enumerate(NUM_PAGES):
        table[slot, :held] = torch.tensor(TABLE[slot][:held], dtype=torch.int32, device=DEVICE)
    given = (*integers[:3], table, integers[3])
    with watched_memory(*given):
        fused = context_addresses(*given, rows=rows, page_size=page_size, fused=True)
    reference = context_addresses(*given, rows=rows, page_size=page_size)
    for name in ("pages", "offsets", "owned"):
        assert_bitwise_equal(getattr(fused, name), getattr(reference, name), name)
    for request, slot in enumerate(slots):
        for row in range(rows):
            position = start[request] + row
            owned = slot >= 0 and row < count[request] and 0 <= position < NUM_PAGES[slot] * page_size
            wanted = (TABLE[slot][position // page_size], position % page_size, True) if owned else (0, 0, False)
            found = tuple(getattr(fused, name)[request, row].item() for name in ("pages", "offsets", "owned"))
            assert found == wanted, (request, row)
    return fused


@pytest.mark.parametrize(("rows", "page_size"), [(8, 16), (1, 8), (5, 3), (17, 32), (8, 1)])
def test_matches_a_loop(rows, page_size):
    last = 4 * page_size
    for start in (0, page_size - 1, page_size, last - 1, last, last - rows + 1, -2):
        check([0, -1, 2, 1], [start, 3, start, start], [rows, rows, min(3, rows), rows], rows, page_size)
    check([2, 0], [0, 1], [0, 1], rows, page_size)
    check([], [], [], rows, page_size)


def test_dummy_rows_own_nothing_and_read_no_slot():
    assert not check([-1, -1], [0, 5], [4, 4], 4, 8).owned.any()
