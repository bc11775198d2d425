"""`decode_block_table`: the kernel against the reference, and the reference against a loop."""

import pytest
import torch
from kernel_kit import DEVICE, STRIDES, strided, watched_memory

from dspark_model.ops import decode_block_table, refresh_block_table
from dspark_model.testing import assert_bitwise_equal


def check(encoded: torch.Tensor, divisor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Kernel first, then the reference, then a loop; the offsets may not have changed."""
    batch, width = encoded.shape
    before = encoded.clone()
    with watched_memory(encoded):
        num_pages, table = decode_block_table(encoded, divisor, fused=True)
    wanted_pages, wanted_table = decode_block_table(encoded, divisor)
    assert_bitwise_equal(num_pages, wanted_pages, "kernel: num_pages")
    assert_bitwise_equal(table, wanted_table, "kernel: page_table")
    assert (num_pages.dtype, table.dtype, table.shape) == (torch.int64, torch.int32, (batch, width))
    for b, row in enumerate(encoded.tolist()):
        pages = []
        for value in row:
            if value < 0:
                break
            pages.append(value // divisor)
        assert int(wanted_pages[b]) == len(pages)
        assert wanted_table[b].tolist() == pages + [-1] * (width - len(pages))
    assert torch.equal(encoded, before)
    return num_pages, table


def offsets(values, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("divisor", [1, 5, 64])
@pytest.mark.parametrize(("batch", "width"), [(1, 1), (6, 9), (0, 4), (3, 0)])
@pytest.mark.parametrize("form", STRIDES)
def test_matches_a_loop(dtype, divisor, batch, width, form):
    encoded = torch.randint(0, 30, (batch, width)).to(dtype) * divisor
    encoded[torch.rand(batch, width) < 0.2] = -7
    check(strided(encoded.to(DEVICE), form), divisor)


def test_page_0_is_a_page_and_nothing_counts_behind_the_first_gap():
    num_pages, table = check(offsets([[0, 32, -1, 64], [-1, 0, 0, 0], [96, 0, 32, 64]]), 32)
    assert num_pages.tolist() == [2, 0, 4]
    assert table.tolist() == [[0, 1, -1, -1], [-1, -1, -1, -1], [3, 0, 1, 2]]


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64], ids=str)
def test_rows_of_placeholders_of_zeros_and_of_both(dtype):
    lowest = torch.iinfo(dtype).min
    rows = [[-1] * 6, [lowest] * 6, [0] * 6, [0] * 3 + [-1] * 3, [-1] * 3 + [0] * 3, [0, lowest] * 3]
    num_pages, _ = check(offsets(rows, dtype), 16)
    assert num_pages.tolist() == [0, 0, 6, 3, 0, 1]


def test_offsets_past_2_to_the_31_are_decoded():
    num_pages, table = check(offsets([[2**33, 2**31, 2**40, -(2**40)]]), 2**10)
    assert table.tolist() == [[2**23, 2**21, 2**30, -1]]
    assert num_pages.tolist() == [3]


def test_a_divisor_past_2_to_the_31():
    _, table = check(offsets([[0, 3 * 2**35, 2**35, 2**35 - 1]]), 2**35)
    assert table.tolist() == [[0, 3, 1, 0]]


def test_offsets_inside_a_page_name_the_page():
    _, table = check(offsets([[31, 32, 63, 64]], torch.int32), 32)
    assert table.tolist() == [[0, 1, 1, 2]]


@pytest.mark.parametrize("width", [1023, 1024, 1025, 2050])
def test_rows_wider_than_one_tile_of_the_kernel(width):
    encoded = torch.randint(0, 99, (4, width), device=DEVICE) * 3
    encoded[1, width - 1] = encoded[2, 1020] = encoded[2, 3] = -1
    num_pages, _ = check(encoded, 3)
    assert num_pages.tolist() == [width, width - 1, 3, width]


def test_one_row_of_offsets_for_all_requests():
    num_pages, _ = check(offsets([[5, 10, -1]]).expand(4, -1), 5)
    assert num_pages.tolist() == [2, 2, 2, 2]


def test_pages_past_the_limit_are_none():
    encoded = offsets([[0, 35, 40, 5], [39, -1, 0, 0], [40, 0, 0, 0], [2**62, 0, 0, 0]])
    for fused in (True, False):
        num_pages, table = decode_block_table(encoded, 5, limit=8, fused=fused)
        assert num_pages.tolist() == [2, 1, 0, 0]
        assert table.tolist() == [[0, 7, -1, -1], [7, -1, -1, -1], [-1] * 4, [-1] * 4]


@pytest.mark.parametrize(("width", "table_width"), [(9, 6), (6, 9), (4, 4), (1030, 1025), (0, 3), (3, 1)])
def test_refresh_writes_the_rows_of_its_slots(width, table_width):
    """Equal to `decode_block_table` in the slots' rows; the other rows, and what lies around the tables, stay as they are."""
    encoded = strided(torch.randint(-2, 30, (3, width)).to(DEVICE) * 4, "columns")
    slots = offsets([5, 0, 2])
    tables = [torch.full((8, table_width), 99, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    counts = [torch.full((8,), 77, dtype=torch.int64, device=DEVICE) for _ in range(2)]
    for fused, table, count in zip((True, False), tables, counts, strict=True):
        inner, own = table[1:-1], count[1:-1]
        with watched_memory(encoded, slots, writes=(inner, own)):
            refresh_block_table(encoded, 4, 25, slots, inner, own, fused=fused)
    assert_bitwise_equal(tables[0], tables[1])
    assert_bitwise_equal(counts[0], counts[1])
    for row, pages in zip((6, 1, 3), encoded.tolist(), strict=True):
        there = []
        for value in pages[:table_width]:
            if value < 0 or value // 4 >= 25:
                break
            there.append(value // 4)
        assert tables[0][row].tolist() == there + [-1] * (table_width - len(there)) and int(counts[0][row]) == len(there)
    assert (tables[0][[0, 2, 4, 5, 7]] == 99).all() and (counts[0][[0, 2, 4, 5, 7]] == 77).all()
