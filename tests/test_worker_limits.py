"""Positions, lengths and limits (faults A26 to A33)."""

import warnings

import pytest
import torch
from worker_kit import Bench, changed_pages, close, digest, make_pool, page_digests, prompt
from worker_reference import DenseDrafter

from dspark_model import ConfigError, ContextChunk, LatentKVPool, PoolConfig, StepInput
from dspark_model.testing import random_model, tiny_config


def long_pool(limit: int, config=None):
    return make_pool(config, page_size=16, num_pages=2 * limit // 16 + 20, max_positions=limit)


def test_a26_request_past_the_served_limit_is_refused_at_admission():
    bench = Bench(pool=long_pool(512))
    with pytest.raises(ValueError, match="max_context is 600, wanted 1 to the pool's max_positions of 512"):
        bench.admit("a", prompt(600), max_context=600)
    assert bench.worker.num_requests == 0


def test_a26_the_rope_table_covers_every_row_that_a_step_can_touch():
    """At the limit itself, with the widest block, no position lies outside the table, on a CPU an IndexError."""
    for sample_from_anchor in (True, False):
        bench = Bench(tiny_config(sample_from_anchor=sample_from_anchor), max_positions=24)
        bench.admit("a", prompt(23))
        bench.prefill("a")
        bench.generate({"a": 0})
        assert bench.worker.context_length("a") == 24
        furthest = max(24 + bench.k + 1, 24 + bench.worker.block_rows)
        assert furthest <= bench.worker.rope.num_positions < furthest + 16


@pytest.mark.filterwarnings("ignore:the pool serves")
def test_a26_a_pool_may_serve_more_than_the_drafter_states():
    """A drafter made for 64 positions at 100: warned about, computed with the rotation of position 100."""
    bench = Bench(tiny_config(max_position_embeddings=64), max_positions=128)
    bench.admit("a", prompt(100))
    bench.check(bench.prefill("a", trace=True), "a")
    bench.check_latents("a")


def test_a27_serving_past_the_drafters_range_warns_at_construction():
    with pytest.warns(UserWarning, match="the pool serves 96 positions, but the drafter was made for 64"):
        Bench(tiny_config(max_position_embeddings=64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Bench(tiny_config(max_position_embeddings=96))


@pytest.mark.filterwarnings("ignore:the pool serves")
def test_a27_positions_past_the_range_are_all_different():
    """Equal target rows everywhere, so that two lengths beyond the range can differ by their rotations alone."""
    bench = Bench(tiny_config(max_position_embeddings=32), max_positions=80)
    row = bench.target.rows([5], 0)
    latents = []
    for key, length in (("a", 40), ("b", 71)):
        bench.worker.admit(key)
        bench.scripts[key] = None
        chunk = {"target_hidden": row.expand(length, -1), "start_position": 0, "anchor": 9}
        output = bench.worker.step(_context(key, chunk), trace=True)
        latents.append((bench.latents(key), output.trace.draft.biased_logits))
    rotary = latents[1][0][0, :, bench.config.kv_lora_rank :]
    assert len({tuple(values) for values in rotary.tolist()}) == 71
    assert (latents[0][1] - latents[1][1]).abs().max() > 1e-3
    assert torch.equal(latents[0][0], latents[1][0][:, :40])


def _context(key, chunk):
    return StepInput(context=[ContextChunk(request_id=key, **chunk)])


@pytest.mark.parametrize("sample_from_anchor", [True, False])
@pytest.mark.parametrize("distance", range(9))
def test_a28_block_at_the_end_of_the_context(distance, sample_from_anchor):
    """`distance` tokens below the limit: drafts short enough, no foreign page touched, and the limit is reached exactly."""
    limit = 40
    bench = Bench(tiny_config(sample_from_anchor=sample_from_anchor), max_positions=64)
    bench.admit("n", prompt(30, 5))
    bench.prefill("n")
    bench.admit("a", prompt(limit - distance), max_context=limit)
    before = page_digests(bench.pool)
    output = bench.prefill("a", trace=True)
    own = set(bench.pool.pages_of(bench.worker.slot_of("a")))
    assert changed_pages(before, bench.pool) <= own
    assert len(own) <= bench.pool.pages_for(limit + bench.worker.block_rows)
    bench.check(output, "a")
    # The anchor takes position limit - distance and draft j the one j + 1 behind it.
    assert output.num_valid_drafts.tolist() == [max(0, min(7, distance - 1))]
    while bench.worker.context_length("a") < limit:
        valid = int(output.num_valid_drafts[output.request_ids.index("a")])
        output = bench.generate({"a": valid})
        bench.check(output, "a")
        assert len(bench.scripts["a"].tokens) <= limit
    assert output.num_valid_drafts.tolist() == [0]
    bench.check(bench.generate({"n": 3}), "n")
    bench.check_latents("n")


def test_a29_memory_follows_the_pool_not_the_config():
    """1,048,576 stated positions, a pool of 64 pages of 8 tokens: under 250,000 bytes altogether."""
    config = tiny_config(max_position_embeddings=1_048_576)
    bench = Bench(config, num_pages=64, max_positions=96)
    worker = bench.worker
    assert bench.pool.nbytes == 64 * 8 * 2 * 48 * 4 == 196_608
    assert worker.rope.cos_sin.nbytes == (96 + 8 + 7) * 16 * 4
    tables = bench.pool.page_table.nbytes + bench.pool.num_pages.nbytes
    assert tables == 5 * 13 * 4 + 5 * 8
    assert worker._slots.nbytes <= 5 * (4 * 8 + 7 * 8 + 1)
    assert bench.pool.nbytes + worker.rope.cos_sin.nbytes + tables + worker._slots.nbytes < 250_000


@pytest.mark.parametrize("pieces", [[37], [1, 20, 16], [8, 8, 21], [1] * 37, [0, 17, 20, 0]])
def test_a30_chunks_store_what_one_piece_stores(pieces):
    whole, cut = Bench(), Bench()
    text = prompt(37)
    whole.admit("a", text)
    wanted = whole.prefill("a", trace=True)
    cut.admit("a", text)
    start = 0
    for index, size in enumerate(pieces):
        end, last = start + size, index == len(pieces) - 1
        if size or last:
            output = cut.step(context=[cut.chunk("a", start, end, **({} if last else {"anchor": None}))], trace=True)
        start = end
    assert output.draft_tokens.tolist() == wanted.draft_tokens.tolist()
    # A matrix product may sum in another order with another number of rows: a few units in the last place, no more.
    close(cut.latents("a"), whole.latents("a"), bound=2e-5)
    cut.check_latents("a")
    cut.check(output, "a")


def test_a30_equal_row_counts_give_equal_bytes():
    """The same chunks, alone on another worker: where the row counts agree so do the bytes."""
    one, two = Bench(), Bench()
    for bench in (one, two):
        bench.admit("a", prompt(30))
        bench.step(context=[bench.chunk("a", 0, 11)])
        bench.step(context=[bench.chunk("a", 11)])
    assert digest(one.latents("a")) == digest(two.latents("a"))


@pytest.mark.parametrize("window", [64, 16])
def test_a31_chunk_twice_as_long_as_any_window(window):
    """There is no window here: a chunk of twice YaRN's original window, or of any number of pages, is one append."""
    config = tiny_config(rope_parameters=_rope(window))
    bench = Bench(config, pool=long_pool(256, config))
    bench.admit("a", prompt(2 * window + 3))
    bench.check(bench.prefill("a", trace=True), "a")
    bench.check_latents("a")


def _rope(window: int) -> dict:
    scaling = {"factor": 8.0, "original_max_position_embeddings": window, "mscale": 1.0, "mscale_all_dim": 0.8}
    return {"rope_type": "yarn", "rope_theta": 10000.0, **scaling}


def test_a31_a_sliding_window_is_refused_by_name():
    with pytest.raises(ConfigError, match="sliding_window"):
        tiny_config(sliding_window=16)


@pytest.mark.parametrize("place", [None, 0, 1, 2])
def test_a32_empty_context_alone_and_between_others(place):
    bench = Bench()
    keys = ["x", "y"]
    if place is not None:
        keys.insert(place, "empty")
    else:
        keys = ["empty"]
    lengths = {"empty": 0, "x": 19, "y": 8}
    for seed, key in enumerate(keys):
        bench.admit(key, prompt(lengths[key], seed))
    output = bench.prefill(*keys, trace=True)
    assert output.trace.draft.biased_logits.isfinite().all() and output.confidence.isfinite().all()
    for key in keys:
        bench.check(output, key)
    for accepted in (0, 4):
        output = bench.generate({key: accepted for key in keys})
        for key in keys:
            bench.check(output, key)
            bench.check_latents(key)


def test_a33_drafts_equal_the_reference_at_every_length():
    """Five prompts a length: with random weights acceptance says nothing, so ids and logits are compared.  The spread of
    the logits' error must not grow with the length."""
    config = tiny_config(max_position_embeddings=2048)
    worst = {}
    for length in (6, 200, 1500):
        bench = Bench(config, pool=_pool_for_five(config, length))
        for seed in range(5):
            bench.admit(seed, prompt(length, seed))
        output = bench.prefill(*range(5), trace=True)
        errors = []
        for seed in range(5):
            wanted = bench.check(output, seed)
            errors.append((output.trace.draft.base_logits[seed].double() - wanted["base"]).abs().max().item())
        worst[length] = max(errors)
    assert worst[1500] < 1e-4 and worst[1500] < 10 * worst[6], worst


def _pool_for_five(config, length: int) -> LatentKVPool:
    pages = 5 * ((length + 16) // 16 + 1)
    sizes = PoolConfig(page_size=16, num_pages=pages, max_requests=5, max_positions=length + 8)
    return LatentKVPool(sizes, config, dtype=torch.float32)


def test_a33_a_long_generation_stays_on_the_reference():
    """200 committed tokens over 25 page edges; every block is compared, with all acceptance lengths from 0 to K."""
    bench = Bench(max_positions=256)
    dense = DenseDrafter(random_model(bench.config))
    bench.admit("a", prompt(3))
    output = bench.prefill("a")
    for step in range(44):
        output = bench.generate({"a": step % 8})
        bench.check(output, "a")
    close(bench.latents("a"), dense.context_latents(bench.taps("a")))
    assert bench.worker.context_length("a") == len(bench.scripts["a"].tokens) > 190
