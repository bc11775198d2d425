"""`context_store`: committed rows go to their request's pages, and not one other byte, by the kernel as by the reference."""

import dataclasses
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from kernel_kit import DEVICE, LAYOUTS, POOL_DTYPES, make_pool, make_table, random_bits, recorded_stores, watched_memory

from dspark_model.ops import context_store, pool_row_width, quantise_rows
from dspark_model.testing import assert_bitwise_equal, poison_


@dataclass
class Rows:
    """What is stored where; the fields in the order of the op's arguments."""

    latents: torch.Tensor
    start: torch.Tensor
    count: torch.Tensor
    slots: torch.Tensor
    page_table: torch.Tensor
    num_pages: torch.Tensor

    @property
    def arguments(self) -> list[torch.Tensor]:
        return [self.latents, self.start, self.count, self.slots, self.page_table, self.num_pages]


def integers(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def random_rows(
    layers: int, batch: int, rows: int, page_size: int, width: int, dtype: torch.dtype, *, order: str = "scattered"
) -> Rows:
    """Slots of 3 pages at most, a fifth of the rows dummies; starts and counts at, before and behind the edges of pages."""
    num_slots = batch + 2
    slots = torch.where(torch.rand(batch) < 0.2, -1, torch.randperm(num_slots)[:batch])
    num_pages = torch.randint(0, 4, (num_slots,))
    start = torch.randint(0, 4, (batch,)) * page_size + torch.randint(-rows, 2, (batch,))
    count = torch.where(torch.rand(batch) < 0.5, rows, torch.randint(-1, rows + 2, (batch,)))
    return Rows(
        latents=random_bits(layers, batch, rows, width, dtype=dtype),
        start=start.to(DEVICE),
        count=count.to(DEVICE),
        slots=slots.to(DEVICE),
        page_table=make_table(num_slots, 3, num_pages.to(DEVICE), order=order),
        num_pages=num_pages.to(DEVICE),
    )


def pages_of(rows: Rows) -> int:
    return rows.page_table.shape[0] * rows.page_table.shape[1]


def by_hand(views, rows: Rows) -> int:
    """Stores one row after the other; returns how many."""
    stored, page_size = 0, views[0].shape[1]
    for b, slot in enumerate(rows.slots.tolist()):
        for n in range(min(int(rows.count[b]), rows.latents.shape[2])):
            index, offset = divmod(int(rows.start[b]) + n, page_size)
            if slot >= 0 and 0 <= index < int(rows.num_pages[slot]):
                stored += 1
                for layer, view in enumerate(views):
                    view[int(rows.page_table[slot, index]), offset] = rows.latents[layer, b, n]
    return stored


def check(storage: torch.Tensor, views, rows: Rows, *, watched: bool = True) -> int:
    """Kernel first, then the reference on the same bytes, then the loop; all of the storage counts.  Returns the number of
    rows that were stored."""
    before, arguments = storage.clone(), [argument.clone() for argument in rows.arguments]
    with watched_memory(*rows.arguments, writes=views) if watched else nullcontext():
        context_store(views, *rows.arguments, fused=True)
    fused = storage.clone()
    storage.copy_(before)
    context_store(views, *rows.arguments)
    assert_bitwise_equal(fused, storage, "kernel")
    reference = storage.clone()
    storage.copy_(before)
    stored = by_hand(views, rows)
    assert_bitwise_equal(reference, storage, "reference")
    for argument, wanted in zip(rows.arguments, arguments, strict=True):
        assert_bitwise_equal(argument, wanted, "an argument")
    return stored


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 16, 20, 32])
@pytest.mark.parametrize(("batch", "count"), [(0, 3), (1, 1), (5, 2), (4, 8), (2, 17), (3, 0)])
def test_committed_rows_and_nothing_else(layout, page_size, batch, count):
    order = "reversed" if batch % 2 else "scattered"
    rows = random_rows(2, batch, count, page_size, 5, torch.bfloat16, order=order)
    storage, views = make_pool(2, pages_of(rows), page_size, 5, layout, torch.bfloat16)
    check(storage, views, rows)


@pytest.mark.parametrize("dtype", POOL_DTYPES, ids=str)
def test_all_types_of_a_pool_are_copied_bit_by_bit(dtype):
    rows = random_rows(3, 4, 5, 4, 7, dtype)
    rows.slots, rows.num_pages[:], rows.start[0], rows.count[0] = integers([1, 0, -1, 3]), 3, 2, 5
    rows.page_table = make_table(6, 3, rows.num_pages)
    storage, views = make_pool(3, pages_of(rows), 4, 7, "page_major", dtype)
    assert check(storage, views, rows) >= 5


def one_request(start: int, count: int, num_pages: int, rows: int = 4, page_size: int = 4) -> Rows:
    """Slot 1 of two; its pages are 2, 0 and 5, those of slot 0 the rest."""
    table = torch.tensor([[1, 3, 4], [2, 0, 5]], dtype=torch.int32, device=DEVICE)
    latents = random_bits(2, 1, rows, 3, dtype=torch.float32)
    return Rows(latents, integers([start]), integers([count]), integers([1]), table, integers([3, num_pages]))


@pytest.mark.parametrize(
    ("start", "count", "num_pages", "stored"),
    [
        (0, 4, 3, 4),  # fills a page
        (2, 4, 3, 4),  # crosses into page 0
        (7, 3, 3, 3),
        (8, 4, 3, 4),  # ends with the last page
        (9, 4, 3, 3),  # one row has no page
        (12, 4, 3, 0),
        (6, 4, 2, 2),  # outruns the pages, though the table names a third
        (0, 4, 0, 0),
        (0, 0, 3, 0),
        (0, -1, 3, 0),
        (0, 9, 3, 4),  # more than there are rows
        (-2, 4, 3, 2),
        (2**40, 4, 3, 0),
        (2**31 - 2, 4, 3, 0),
        (2**32, 4, 3, 0),
    ],
)
def test_edges(start, count, num_pages, stored):
    rows = one_request(start, count, num_pages)
    storage, views = make_pool(2, 6, 4, 3, "layer_major", torch.float32)
    assert check(storage, views, rows) == stored


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [5, 80])
def test_an_fp8_pool_gets_its_own_form_of_the_same_rows(width, dtype, layout):
    fp8 = torch.float8_e4m3fn
    rows = random_rows(2, 5, 4, 4, width, torch.float32)
    rows.latents = torch.randn_like(rows.latents).to(dtype)
    storage, views = make_pool(2, pages_of(rows), 4, pool_row_width(width, fp8), layout, fp8)
    before = storage.clone()
    with watched_memory(*rows.arguments, writes=views):
        context_store(views, *rows.arguments, fused=True)
    fused = storage.clone()
    storage.copy_(before)
    context_store(views, *rows.arguments)
    assert_bitwise_equal(fused, storage, "kernel")
    reference = storage.clone()
    storage.copy_(before)
    by_hand(views, dataclasses.replace(rows, latents=quantise_rows(rows.latents)))
    assert_bitwise_equal(reference, storage, "reference")


@pytest.mark.parametrize("fused", [False, True])
def test_rejected_rows_of_nan_stay_out(fused):
    rows = one_request(3, 2, 3)
    rows.latents.fill_(1.0)
    poison_(rows.latents[:, :, 2:])
    storage, views = make_pool(2, 6, 4, 3, "page_major", torch.float32)
    storage.zero_()
    context_store(views, *rows.arguments, fused=fused)
    assert not storage.isnan().any()
    assert int(storage.sum()) == 2 * 2 * 3


def test_dummy_rows_write_nothing_of_slot_0():
    rows = random_rows(2, 5, 4, 4, 3, torch.float32)
    rows.slots.fill_(-1)
    rows.num_pages[0], rows.start[:], rows.count[:] = 3, 0, 4
    rows.page_table[0] = torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
    storage, views = make_pool(2, pages_of(rows), 4, 3, "page_major", torch.float32)
    assert check(storage, views, rows) == 0


def test_a_whole_prompt_of_one_request():
    rows = one_request(0, 11, 3, rows=11)
    storage, views = make_pool(2, 6, 4, 3, "page_major", torch.float32)
    assert check(storage, views, rows) == 11


def test_rows_that_lie_apart():
    rows = random_rows(2, 3, 4, 4, 5, torch.float32)
    rows.latents = random_bits(2, 6, 8, 9, dtype=torch.float32)[:, ::2, 1:5, 3:8]
    for name in ("start", "count", "slots"):
        setattr(rows, name, getattr(rows, name).repeat_interleave(2)[::2])
    storage, views = make_pool(2, pages_of(rows), 4, 5, "layer_major", torch.float32)
    check(storage, views, rows, watched=False)  # the kernel reads copies


@pytest.mark.skipif(DEVICE != "cpu", reason="reads the interpreter's addresses")
def test_distances_past_2_to_the_31_do_not_wrap():
    from dspark_kernels.triton.context_store import context_store_kernel

    rows = one_request(3, 2, 3, rows=2)
    latents = torch.zeros(2, 2, 3)
    strides = (2**40 + 8, 2**31 + 4, 2**33)
    with recorded_stores() as stores:
        context_store_kernel[(2, 2)](
            latents, *strides, latents, *latents.stride()[:2], *rows.arguments[1:], 3, 2, 4, WIDTH=3, WIDTH_LANES=4
        )
    assert stores == [
        latents.data_ptr() + 4 * (layer * strides[0] + page * strides[1] + offset * strides[2] + lane)
        for page, offset in ((2, 3), (0, 0))
        for layer in range(2)
        for lane in range(3)
    ]


@pytest.mark.parametrize("layers", [1, 3])
def test_layers_must_match(layers):
    rows = one_request(0, 4, 3)
    rows.latents = torch.zeros(layers, 1, 4, 3, device=DEVICE)
    storage, views = make_pool(2, 6, 4, 3, "page_major", torch.float32)
    before = storage.clone()
    with pytest.raises(ValueError, match=rf"\(layers, D\) = \({layers}, 3\)"):
        context_store(views, *rows.arguments, fused=True)
    assert_bitwise_equal(storage, before)
