"""A worker on pages that an outside engine lends and numbers."""

import pytest
import torch
from worker_kit import Bench, changed_pages, external_pool, page_digests, prompt

from dspark_model.testing import tiny_config

DIVISOR = 6


def encode(*rows: list[int], width: int = 8) -> torch.Tensor:
    """Page lists as the engine sends them: every third column of a wider table, page x divisor, below 0 for no page."""
    wide = torch.full((len(rows), 3 * width), 10**6, dtype=torch.int64)
    table = wide[:, 1::3]
    table.fill_(-5)
    for index, pages in enumerate(rows):
        table[index, : len(pages)] = torch.tensor(pages, dtype=torch.int64) * DIVISOR
    assert not table.is_contiguous()
    return table


def lent(**options) -> Bench:
    return Bench(pool=external_pool(divisor=DIVISOR), **options)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_strided_encoded_offsets_and_page_zero(dtype):
    bench = lent()
    bench.admit("a", prompt(13))
    bench.admit("b", prompt(26, 1))
    tables = encode([39, 0, 7, 1], [5, 20, 2, 33, 11, 12]).to(dtype)
    output = bench.prefill("a", "b", block_table=tables, trace=True)
    for accepted in (4, 0):
        for key in "ab":
            bench.check(output, key)
            bench.check_latents(key)
        output = bench.generate({"a": accepted, "b": 7 - accepted}, block_table=tables, trace=True)
    assert output.num_dropped.tolist() == [0, 0]


def test_tables_come_in_the_order_of_the_step_and_may_grow():
    bench = lent()
    for seed, key in enumerate("abc"):
        bench.admit(key, prompt(10, seed))
    pages = {"a": [3, 4, 5], "b": [30, 1, 9], "c": [8, 0, 2]}
    bench.step(context=[bench.chunk("c"), bench.chunk("a")], block_table=encode(pages["c"], pages["a"]))
    output = bench.generate({"a": 6, "c": 7}, context=[bench.chunk("b")], dummies={0: float("nan")},
                            block_table=encode(pages["b"], [*pages["a"], 21], [*pages["c"], 22]))  # fmt: skip
    for key in "abc":
        bench.check(output, key)
        bench.check_latents(key)


@pytest.mark.parametrize(("pages", "valid", "length"), [(3, 7, 16), (2, 0, 16), (1, 0, 8)])
def test_prompt_of_two_pages_with_too_few(pages, valid, length):
    """Three pages hold prompt and block, two the prompt alone, one not even that: rows are dropped and counted."""
    bench = lent()
    bench.admit("a", prompt(16))
    before = page_digests(bench.pool)
    output = bench.prefill("a", block_table=encode(list(range(10, 10 + pages))))
    assert output.num_dropped.tolist() == [16 - length]
    assert output.num_valid_drafts.tolist() == [valid] and bench.worker.context_length("a") == length
    changed = changed_pages(before, bench.pool)
    assert changed == set(range(10, 10 + pages))


@pytest.mark.parametrize("sample_from_anchor", [True, False])
@pytest.mark.parametrize("length", range(9, 17))
def test_block_is_cut_where_the_pages_end(length, sample_from_anchor):
    """Two pages: 16 - length block rows have a page, and as many drafts may be verified (one less with the plain rule)."""
    bench = Bench(tiny_config(sample_from_anchor=sample_from_anchor), pool=external_pool(divisor=DIVISOR))
    bench.admit("a", prompt(length))
    bench.admit("n", prompt(12, 3))
    before = page_digests(bench.pool)
    output = bench.prefill("a", "n", block_table=encode([6, 7], [8, 9, 10]))
    assert changed_pages(before, bench.pool) == {6, 7, 8, 9, 10}
    rows = 16 - length
    assert output.num_valid_drafts[0] == max(0, min(7, rows if sample_from_anchor else rows - 1))
    assert output.num_dropped.tolist() == [0, 0] and output.confidence.isfinite().all()
    bench.check(output, "n")


def test_committed_rows_without_a_page_end_the_request():
    bench = lent()
    bench.admit("a", prompt(13))
    bench.admit("n", prompt(12, 3))
    both = ([6, 7, 5], [8, 9, 10, 11])
    bench.prefill("a", "n", block_table=encode(*both))
    output = bench.generate({"a": 7, "n": 7}, block_table=encode([6, 7], both[1]))
    assert output.num_committed.tolist() == [8, 8] and output.num_dropped.tolist() == [5, 0]
    assert output.num_valid_drafts[0] == 0 and bench.worker.context_length("a") == 16
    bench.check(output, "n")
    with pytest.raises(ValueError, match="request 'a': 5 rows of it had no page, .* were dropped.*release it and admit it"):
        bench.generate({"a": 0}, block_table=encode(both[0]))
    bench.release("a")
    bench.admit("a", prompt(11, 4))
    output = bench.step(context=[bench.chunk("a")], block_table=encode([6, 7, 5]))
    bench.check(output, "a")


def test_pages_that_are_taken_away_are_never_written():
    """The engine moves a request's later pages elsewhere: only the pages of the step's own table change."""
    bench = lent()
    bench.admit("a", prompt(10))
    bench.prefill("a", block_table=encode([1, 2, 3]))
    before = page_digests(bench.pool)
    output = bench.generate({"a": 2}, block_table=encode([1, 2, 4]))
    changed = changed_pages(before, bench.pool)
    assert changed <= {1, 2, 4}
    bench.check(output, "a")
