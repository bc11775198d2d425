"""The paged latent pool: storage, sharing, external memory."""

import pytest
import torch
from worker_kit import digest, external_pool, ids, make_pool, page_digests

from dspark_model.config_keys import ConfigError
from dspark_model.external_pool import ExternalLatentPool
from dspark_model.kv_pool import LatentKVPool
from dspark_model.page_allocator import CapacityError
from dspark_model.serving_config import Layout, PoolConfig
from dspark_model.testing import tiny_config


def stamp(pool: LatentKVPool, slot: int, rows: int) -> None:
    """Row r of a slot holds the value r in every layer."""
    for row in range(rows):
        page = pool.pages_of(slot)[row // pool.config.page_size]
        for view in pool.layer_views:
            view[page, row % pool.config.page_size] = row


def read(pool: LatentKVPool, slot: int, rows: int) -> list[float]:
    index = torch.arange(rows)
    pages = torch.tensor(pool.pages_of(slot))[index // pool.config.page_size]
    values = torch.stack([view[pages, index % pool.config.page_size] for view in pool.layer_views])
    assert (values == values[:1, :, :1]).all()
    return values[0, :, 0].tolist()


@pytest.mark.parametrize("layout", list(Layout))
def test_layouts_are_views_of_one_buffer(layout):
    pool = make_pool(layout=layout, num_pages=6)
    shape = list(pool.storage.shape)
    assert shape == ([2, 6, 8, 48] if layout is Layout.LAYER_MAJOR else [6, 2, 8, 48])
    pool.layer_views[1][4, 3] = 5.0
    where = (1, 4, 3) if layout is Layout.LAYER_MAJOR else (4, 1, 3)
    assert (pool.storage[where] == 5).all() and int((pool.storage == 5).sum()) == 48
    assert pool.bytes_per_token == 2 * 48 * 4


@pytest.mark.parametrize("name", ["page_size", "num_pages", "max_requests", "max_positions", "num_drafts"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True])
def test_pool_sizes_are_whole_numbers(name, value):
    with pytest.raises(ConfigError, match=f"pool.{name} is {value!r}, wanted a whole number"):
        make_pool(**{name: value})


def test_pages_follow_the_rows():
    pool = make_pool(num_pages=8)
    pool.open(0, 24, None, "r")
    assert (pool.num_available_pages, pool.num_held_pages) == (5, 0)
    pool.begin_step({0: 9}, None)
    assert pool.pages_of(0) == (0, 1) and pool.num_pages[0] == 2
    assert pool.page_table[0, :3].tolist() == [0, 1, -1]
    pool.begin_step({0: 16}, None)
    assert pool.pages_of(0) == (0, 1)
    with pytest.raises(CapacityError, match="slot 0 needs 2 more pages but was promised 1"):
        pool.begin_step({0: 25}, None)
    pool.close(0)
    assert (pool.num_available_pages, pool.num_held_pages) == (8, 0)
    assert (pool.page_table == -1).all() and pool.num_pages.sum() == 0


def test_cancel_restores_pages_and_their_order():
    pool = make_pool(num_pages=12)
    pool.open(0, 40, None, "a")
    pool.open(1, 40, None, "b")
    pool.begin_step({0: 3, 1: 3}, None)
    before = (list(pool._allocator._free), pool.page_table.tolist(), pool.num_pages.tolist(), pool.num_available_pages)
    undo = pool.begin_step({0: 30, 1: 17}, None)
    taken = (pool.pages_of(0), pool.pages_of(1))
    pool.cancel_step(undo)
    assert (list(pool._allocator._free), pool.page_table.tolist(), pool.num_pages.tolist(), pool.num_available_pages) == before
    pool.begin_step({0: 30, 1: 17}, None)
    assert (pool.pages_of(0), pool.pages_of(1)) == taken


def test_refused_open_changes_nothing():
    pool = make_pool(num_pages=3)
    pool.open(0, 16, None, "first")
    before = (list(pool._allocator._free), pool.num_available_pages, pool.page_table.tolist())
    with pytest.raises(CapacityError, match="second needs 2 pages, but only 1 of 3"):
        pool.open(1, 16, None, "second")
    with pytest.raises(ValueError, match="slot 0 of the pool is open already"):
        pool.open(0, 8, None, "again")
    assert (list(pool._allocator._free), pool.num_available_pages, pool.page_table.tolist()) == before


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("length", [8, 11, 16, 19])
def test_prefix_shares_whole_pages_and_copies_the_last(layout, length):
    pool = make_pool(layout=layout)
    pool.open(0, 40, None, "source")
    pool.begin_step({0: 24}, None)
    stamp(pool, 0, 24)
    handle = pool.retain_prefix(0, length)
    pool.open(1, 40, handle, "copy")
    full = length // 8
    assert pool.pages_of(1)[:full] == pool.pages_of(0)[:full]
    assert not set(pool.pages_of(1)[full:]) & set(pool.pages_of(0))
    assert read(pool, 1, length) == list(range(length))


@pytest.mark.parametrize("order", [("source", "handle", "copy"), ("handle", "copy", "source"), ("copy", "source", "handle")])
def test_prefix_release_order_does_not_matter(order):
    pool = make_pool(num_pages=16)
    pool.open(0, 24, None, "source")
    pool.begin_step({0: 19}, None)
    stamp(pool, 0, 19)
    handle = pool.retain_prefix(0, 19)
    pool.open(1, 24, handle, "copy")
    release = {"source": lambda: pool.close(0), "handle": lambda: pool.release_prefix(handle), "copy": lambda: pool.close(1)}
    for step, name in enumerate(order):
        release[name]()
        if "copy" not in order[: step + 1]:
            assert read(pool, 1, 19) == list(range(19))
    assert (pool.num_held_pages, pool.num_available_pages) == (0, 16)


def test_prefix_outlives_its_source_and_serves_twice():
    pool = make_pool(num_pages=16)
    pool.open(0, 24, None, "source")
    pool.begin_step({0: 13}, None)
    stamp(pool, 0, 13)
    handle = pool.retain_prefix(0, 13)
    pool.close(0)
    pool.open(2, 32, None, "other")
    pool.begin_step({2: 32}, None)
    stamp(pool, 2, 32)
    for slot in (0, 1):
        pool.open(slot, 24, handle, "copy")
        assert read(pool, slot, 13) == list(range(13))


def test_prefix_cannot_be_released_twice_or_used_after():
    pool, other = make_pool(num_pages=16), make_pool(num_pages=16)
    pool.open(0, 24, None, "source")
    pool.begin_step({0: 16}, None)
    handle = pool.retain_prefix(0, 16)
    pool.release_prefix(handle)
    before = (list(pool._allocator._free), list(pool._allocator._references), pool.num_available_pages)
    calls = (pool.release_prefix, lambda gone: pool.open(1, 24, gone, "late"), lambda gone: other.open(1, 24, gone, "foreign"))
    for call in calls:
        with pytest.raises(ValueError, match="the prefix of 16 tokens was released already or is of another pool"):
            call(handle)
    assert (list(pool._allocator._free), list(pool._allocator._references), pool.num_available_pages) == before


def test_prefix_without_a_page_for_its_tail_is_refused():
    pool = make_pool(num_pages=3)
    pool.open(0, 24, None, "source")
    pool.begin_step({0: 12}, None)
    before = (list(pool._allocator._free), list(pool._allocator._references))
    with pytest.raises(CapacityError, match="partly filled last page of a prefix of 12 tokens"):
        pool.retain_prefix(0, 12)
    assert (list(pool._allocator._free), list(pool._allocator._references)) == before
    assert pool.retain_prefix(0, 8).tail_page is None


def test_external_views_are_checked():
    config, sizes = tiny_config(), PoolConfig(page_size=8, num_pages=4, max_requests=1, max_positions=16)
    good = [torch.zeros(4, 8, 48) for _ in range(2)]
    bad = {
        "0 layer views were given, wanted one for each of 2": [],
        "1 layer views were given, wanted one for each of 2": good[:1],
        r"layer view 1 has shape \[4, 8, 40\]": [good[0], torch.zeros(4, 8, 40)],
        r"layer view 1 has shape \[5, 8, 48\]": [good[0], torch.zeros(5, 8, 48)],
        r"layer view 0 has shape \[4, 16, 48\]": [torch.zeros(4, 16, 48)] * 2,
        r"layer view 0 has shape \[4, 8, 48\] in torch.float8_e4m3fn, .* \[4, 8, 64\]": [good[0].to(torch.float8_e4m3fn)] * 2,
        "layer view 1 is torch.bfloat16": [good[0], good[1].bfloat16()],
        "layer view 1 is torch.float32 on meta": [good[0], good[1].to("meta")],
        "layer view 0 has stride 8 between": [torch.zeros(4, 48, 8).transpose(1, 2)] * 2,
    }
    for message, views in bad.items():
        with pytest.raises(ValueError, match=message):
            ExternalLatentPool(sizes, config, views)
    for divisor in (0, 1.5):
        with pytest.raises(ValueError, match=f"divisor is {divisor}, wanted a whole number of at least 1"):
            ExternalLatentPool(sizes, config, good, divisor=divisor)


def test_external_table_is_decoded_and_cancelled():
    pool = external_pool(divisor=3)
    pool.open(2, 40, None, "r")
    undo = pool.begin_step({2: 20}, torch.tensor([[0, 21, 117, -1, 6]]))
    assert pool.page_table[2, :6].tolist() == [0, 7, 39, -1, -1, -1] and pool.num_pages[2] == 3
    pool.cancel_step(undo)
    assert (pool.page_table == -1).all() and pool.num_pages[2] == 0


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (None, "needs StepInput.block_table"),
        (torch.zeros(1, 4), r"torch.float32 \[1, 4\], wanted integer \[1, pages\]"),
        (torch.zeros(2, 4).long(), r"int64 \[2, 4\], wanted integer \[1, pages\]"),
        (torch.zeros(4).long(), r"int64 \[4\], wanted integer"),
        (ids(120)[None], "names page 40, but the pool has 40"),
        (ids(3 * 2**32)[None], "names page 4294967296, but the pool has 40"),
        (ids(3 * 2**32 - 3)[None], "names page 4294967295, but the pool has 40"),
    ],
)
def test_external_table_is_refused(table, message):
    pool = external_pool(divisor=3)
    pool.open(0, 40, None, "r")
    before = (pool.page_table.tolist(), pool.num_pages.tolist(), page_digests(pool))
    with pytest.raises(ValueError, match=message):
        pool.begin_step({0: 8}, table)
    assert (pool.page_table.tolist(), pool.num_pages.tolist(), page_digests(pool)) == before


def test_entries_behind_the_first_negative_one_are_not_read():
    pool = external_pool()
    pool.open(0, 40, None, "r")
    pool.begin_step({0: 8}, torch.tensor([[4, -7, 2**40]]))
    assert pool.num_pages[0] == 1 and pool.page_table[0, 0] == 4


def test_own_pool_takes_no_table_and_external_no_prefix():
    pool, lent = make_pool(), external_pool()
    pool.open(0, 8, None, "r")
    with pytest.raises(ValueError, match="block_table was given, but this pool allocates"):
        pool.begin_step({0: 8}, torch.zeros(1, 1).long())
    handle = make_handle(pool)
    with pytest.raises(ValueError, match="pass no prefix"):
        lent.open(0, 8, handle, "r")


def make_handle(pool: LatentKVPool):
    pool.begin_step({0: 8}, None)
    return pool.retain_prefix(0, 8)


def test_memory_of_the_pool_is_left_alone():
    """No call but a prefix copy writes latents, and that one writes rows of one page."""
    pool = make_pool(fill=1.5)
    before = digest(pool.storage)
    pool.open(0, 40, None, "r")
    pool.begin_step({0: 20}, None)
    pool.retain_prefix(0, 16)
    pool.close(0)
    assert digest(pool.storage) == before
