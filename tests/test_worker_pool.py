"""The paged pool under a working drafter (faults A34 to A44)."""

import dataclasses
import math
import mmap

import pytest
import torch
from worker_kit import Bench, FakeTarget, changed_pages, close, digest, external_pool, make_pool, page_digests, prompt, snapshot

from dspark_model import CapacityError, ConfigError, DFlashWorker, ExternalLatentPool, PoolConfig, RuntimeConfig
from dspark_model.ops import dequantise_rows
from dspark_model.serving_config import Layout
from dspark_model.step_io import GenerationRows, StepInput
from dspark_model.testing import assert_bitwise_equal, poison_, random_model, tiny_config

NAN = float("nan")
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # the name is there from Python 3.13 on


@pytest.mark.parametrize("length", [8, 16, 24])
def test_a34_prompt_that_fills_its_pages(length):
    bench = Bench()
    bench.admit("source", prompt(16))
    bench.prefill("source")
    handle = bench.worker.retain_prefix("source", 8)
    bench.admit("a", prompt(16)[:8] + prompt(length - 8, 1), prefix=handle)
    before = page_digests(bench.pool)
    output = bench.step(context=[bench.chunk("a", 8)])
    pages = bench.pool.pages_of(bench.worker.slot_of("a"))
    assert len(pages) == bench.pool.pages_for(length + 7)
    assert changed_pages(before, bench.pool) == set(pages[1:])
    bench.check(output, "a")
    bench.check_latents("source")


@pytest.mark.parametrize("layout", list(Layout))
def test_a35_dummy_steps_after_a_release_write_nothing(layout):
    """No page is declared as scratch: the whole pool stays as it is, and so does all state."""
    bench = Bench(layout=layout)
    for key in "abc":
        bench.admit(key, prompt(21, ord(key)))
    bench.prefill("a", "b", "c")
    bench.generate({"a": 7, "b": 0, "c": 3})
    for key in "abc":
        bench.release(key)
    before = snapshot(bench.worker)
    for count in (1, 2, 5):
        for kind in ("tokens", "logits", "committed"):
            output = bench.generate({}, kind=kind, dummies={place: NAN for place in range(count)})
            assert output.num_committed.tolist() == output.num_valid_drafts.tolist() == [0] * count
            assert (output.committed_tokens == -1).all() and (output.draft_tokens == -1).all()
    assert snapshot(bench.worker) == before


def test_a35_stale_rows_of_a_lent_table_are_not_used():
    bench = Bench(pool=external_pool())
    bench.admit("a", prompt(20))
    bench.prefill("a", block_table=torch.arange(5)[None])
    bench.release("a")
    before = snapshot(bench.worker)
    bench.generate({}, dummies={0: NAN})
    bench.generate({}, dummies={0: NAN}, block_table=torch.empty(0, 5).long())
    assert snapshot(bench.worker) == before


@pytest.mark.parametrize("kind", ["tokens", "logits", "committed"])
@pytest.mark.parametrize("lent", [False, True])
def test_a36_padding_rows_with_nan_touch_no_page(kind, lent):
    """Both writers of a step, the context store and the block store, with page 0 owned by a live request."""
    bench = Bench(pool=external_pool() if lent else make_pool())
    tables = torch.stack((torch.arange(5), torch.arange(20, 25))) if lent else None
    bench.admit("a", prompt(9))
    bench.admit("b", prompt(14, 1))
    bench.prefill("a", "b", block_table=tables)
    held = {page for key in "ab" for page in _pages(bench, key)}
    assert 0 in held
    before = page_digests(bench.pool)
    output = bench.generate({"a": 2, "b": 6}, kind=kind, dummies={0: NAN, 2: NAN, 4: NAN}, block_table=tables)
    assert changed_pages(before, bench.pool) <= {page for key in "ab" for page in _pages(bench, key)}
    for key in "ab":
        bench.check(output, key)
        bench.check_latents(key)


def _pages(bench: Bench, key) -> list[int]:
    slot = bench.worker.slot_of(key)
    return bench.pool.page_table[slot, : bench.pool.num_pages[slot]].tolist()


@pytest.mark.parametrize("places", [(5, 6, 7), (0, 1, 2), (0, 3, 7)])
def test_a37_dummy_rows_of_nan_influence_no_other_row(places):
    """Eight rows, five of them real: bit for bit what they are beside dummies of zeros, wherever the dummies stand."""
    outputs = []
    for fill in (0.0, NAN):
        bench = Bench(max_requests=8, num_pages=70)
        for key in range(5):
            bench.admit(key, prompt(5 + 3 * key, key))
        bench.prefill(*range(5))
        output = bench.generate({key: key for key in range(5)}, dummies=dict.fromkeys(places, fill), trace=True)
        real = [index for index in range(8) if index not in places]
        outputs.append((output, real, digest(bench.pool.storage)))
        for key in range(5):
            bench.check(output, key)
    (one, real, pool_one), (two, _, pool_two) = outputs
    assert pool_one == pool_two
    for name in ("committed_tokens", "num_committed", "anchor", "draft_tokens", "num_valid_drafts", "confidence"):
        assert_bitwise_equal(getattr(one, name)[real], getattr(two, name)[real], name)
    assert_bitwise_equal(one.trace.draft.biased_logits[real], two.trace.draft.biased_logits[real])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("page_size", [4, 8])
def test_a38_pool_of_nan_at_every_length_of_two_pages(page_size, causal):
    bench = Bench(tiny_config(is_causal=causal), page_size=page_size)
    for length in range(1, 2 * page_size + 1):
        bench.pool.storage.fill_(NAN)
        bench.admit("a", prompt(length, length))
        output = bench.prefill("a", trace=True)
        assert output.trace.draft.biased_logits.isfinite().all()
        bench.check(output, "a")
        bench.release("a")


def scripted_run(pool, table: torch.Tensor) -> list[torch.Tensor]:
    bench = Bench(pool=pool)
    bench.admit("a", prompt(19))
    output, seen = bench.prefill("a", block_table=table, trace=True), []
    for accepted in (7, 2, 7, 7):
        seen += [output.draft_tokens, output.confidence, output.trace.draft.biased_logits]
        output = bench.generate({"a": accepted}, block_table=table, trace=True)
        bench.check(output, "a")
    return [*seen, output.draft_tokens, output.confidence, output.trace.draft.biased_logits]


def test_a39_page_order_does_not_matter():
    scattered = torch.randperm(40, generator=torch.Generator().manual_seed(5))[:10]
    wanted = scripted_run(external_pool(), torch.arange(10)[None])
    for table in (torch.arange(9, -1, -1), torch.arange(30, 40), scattered, torch.tensor([39, 0, *range(5, 13)])):
        for ours, theirs in zip(scripted_run(external_pool(), table[None]), wanted, strict=True):
            assert_bitwise_equal(ours, theirs)


def huge_pool() -> tuple[ExternalLatentPool, int]:
    """A lent pool of 40 pages, 2^26 elements from one page to the next; only what is touched takes memory."""
    config, stride, pages = tiny_config(), 1 << 26, 40
    sizes = PoolConfig(page_size=8, num_pages=pages, max_requests=2, max_positions=96)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = torch.frombuffer(mmap.mmap(-1, pages * stride * 4, flags=flags), dtype=torch.float32)
    views = [memory.as_strided((pages, 8, 48), (stride, 48, 1), layer * 8 * 48) for layer in range(2)]
    return ExternalLatentPool(sizes, config, views), stride


def test_a40_pages_beyond_two_to_the_31_elements():
    wanted = scripted_run(external_pool(), torch.arange(10)[None])
    pool, stride = huge_pool()
    assert 30 * stride < 2**31 < 39 * stride
    table = torch.tensor([[39, 38, 37, 36, 35, 34, 33, 32, 31, 30]])
    for ours, theirs in zip(scripted_run(pool, table), wanted, strict=True):
        assert_bitwise_equal(ours, theirs)
    # What a 32-bit offset of the last page would wrap around to.
    assert all(not view[page].any() for view in pool.layer_views for page in (39 - 32, 0, 1, 2))


@pytest.mark.parametrize("num_drafts", range(1, 9))
@pytest.mark.filterwarnings("ignore:num_drafts 8 is above")
def test_a41_batches_of_one_to_nine_with_every_block_width(num_drafts):
    bench = Bench(num_drafts=num_drafts, pool=make_pool(num_drafts=8, max_requests=9, num_pages=120))
    for batch in range(1, 10):
        for key in range(batch):
            bench.admit(key, prompt(3 * key + batch, 10 * batch + key))
        bench.prefill(*range(batch))
        output = bench.generate({key: (key + batch) % (num_drafts + 1) for key in range(batch)})
        assert output.draft_tokens.shape == (batch, num_drafts)
        for key in range(batch):
            if (key + batch) % 3 == 0 or key == batch - 1:
                bench.check(output, key)
        for key in range(batch):
            bench.release(key)


@pytest.mark.parametrize("start", range(1, 9))
def test_a42_whole_blocks_over_three_page_edges(start):
    """Page size and K + 1 are both 8, so that each start puts the page edge before another row of the block."""
    bench = Bench()
    bench.admit("n", prompt(8, 9))
    bench.prefill("n")
    bench.admit("a", prompt(start))
    output = bench.prefill("a")
    for _ in range(4):
        before = page_digests(bench.pool)
        output = bench.generate({"a": 7})
        assert output.num_committed.tolist() == [8] and output.num_valid_drafts.tolist() == [7]
        assert changed_pages(before, bench.pool) <= set(_pages(bench, "a"))
        bench.check(output, "a")
    bench.check_latents("a")
    bench.check_latents("n")


def test_a43_one_request_too_many_is_refused_before_any_change():
    """40 tokens and a block of 7 take 6 pages: 20 pages hold three such requests, not four."""
    bench = Bench(num_pages=20)
    for key in range(3):
        bench.admit(key, prompt(33, key), max_context=40)
    assert bench.pool.num_available_pages == 2
    before = snapshot(bench.worker)
    with pytest.raises(CapacityError, match="request 3 of 40 tokens needs 6 pages, but only 2 of 20 are neither held nor"):
        bench.worker.admit(3, max_context=40)
    assert snapshot(bench.worker) == before
    bench.prefill(0, 1, 2)
    output = bench.generate({0: 0, 1: 0, 2: 0})
    for key in range(3):
        bench.check(output, key)
    bench.release(1)
    bench.admit(3, prompt(40, 3), max_context=40)
    bench.check(bench.prefill(3), 3)


@pytest.mark.parametrize(("kv", "model", "bound"), [("bfloat16", "float32", 0.5), ("float16", "float32", 0.1)])
def test_a44_pool_of_another_type_than_the_model(kv, model, bound):
    """The pool rounds what it keeps, and nothing else: logits stay within a stated distance of the float64 reference."""
    dtype = getattr(torch, kv)
    pool = make_pool(dtype=dtype)
    with pytest.raises(ConfigError, match=f"wants a pool of torch.{model}.*but the pool is torch.{kv}"):
        DFlashWorker(random_model(tiny_config()), pool, RuntimeConfig.plain())
    bench = Bench(pool=pool, runtime=RuntimeConfig(kv_dtype=kv, draft_sampling="greedy"))
    bench.admit("a", prompt(30))
    output = bench.prefill("a", trace=True)
    assert output.runtime["kv_dtype"].in_force == kv and pool.dtype is dtype
    assert pool.bytes_per_token == 2 * 48 * 2
    wanted = bench.dense.draft(bench.taps("a"), bench.scripts["a"].anchor, 7)
    close(output.trace.draft.base_logits[0], wanted["base"], bound=bound)
    error = (bench.latents("a").double() - bench.dense.context_latents(bench.taps("a"))).abs().max()
    assert error < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a44_pool_and_model_of_the_same_half_type(dtype):
    bench = Bench(dtype=dtype)
    bench.admit("a", prompt(30))
    output = bench.prefill("a", trace=True)
    wanted = bench.dense.draft(bench.taps("a"), bench.scripts["a"].anchor, 7)
    assert bench.pool.dtype is dtype and output.runtime["kv_dtype"].requested == "auto"
    close(output.trace.draft.base_logits[0], wanted["base"], bound=0.7)


def test_a44_eight_bit_pools_that_were_not_asked_for_are_refused():
    for dtype in (torch.float8_e4m3fn, torch.int8):
        pool = make_pool(dtype=dtype, fill=None)
        with pytest.raises(ConfigError, match="wants a pool of torch.float32"):
            DFlashWorker(random_model(tiny_config()), pool, RuntimeConfig.plain())
    with pytest.raises(ConfigError, match="kv_dtype=fp8_e4m3 wants a pool of torch.float8_e4m3fn"):
        Bench(runtime=RuntimeConfig(kv_dtype="fp8_e4m3"))


FP8_RUNTIME = dataclasses.replace(RuntimeConfig.plain(), kv_dtype="fp8_e4m3")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", list(Layout))
def test_a44_fp8_pool(dtype, layout):
    """Each row comes back within what one rounding to 3 bits costs, and logits stay within a stated distance of float64."""
    pool = make_pool(dtype=torch.float8_e4m3fn, layout=layout)
    bench = Bench(pool=pool, dtype=dtype, runtime=FP8_RUNTIME)
    bench.admit("a", prompt(30))
    bench.prefill("a")
    output = bench.generate({"a": 5}, trace=True)
    assert output.runtime["kv_dtype"].in_force == "fp8_e4m3"
    assert pool.bytes_per_token == 2 * 64
    rows, wanted = dequantise_rows(bench.latents("a"), 48).double(), bench.dense.context_latents(bench.taps("a"))
    relative = (rows - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert 0.01 < relative.mean() < relative.max() < 0.04
    wanted = bench.dense.draft(bench.taps("a"), bench.scripts["a"].anchor, 7)
    close(output.trace.draft.base_logits[0], wanted["base"], bound=1.5)


@pytest.mark.parametrize("length", [16, 19])
def test_a44_prefix_of_an_fp8_pool_is_copied_byte_by_byte(length):
    bench = Bench(pool=make_pool(dtype=torch.float8_e4m3fn), runtime=FP8_RUNTIME)
    bench.admit("a", prompt(30))
    bench.prefill("a")
    handle = bench.worker.retain_prefix("a", num_tokens=length)
    bench.admit("b", prompt(30), prefix=handle)
    bench.step(context=[bench.chunk("b", length)])
    assert_bitwise_equal(bench.latents("b", length), bench.latents("a", length))
    for key in ("a", "b"):
        bench.generate({key: 7})
    assert_bitwise_equal(bench.latents("b"), bench.latents("a"))


def test_a44_fp8_pool_of_an_outside_engine():
    """Row for row what an own pool holds."""
    table = torch.arange(10).flip(0)[None]
    lent = external_pool(dtype=torch.float8_e4m3fn)
    found = []
    for pool, block_table in ((make_pool(dtype=torch.float8_e4m3fn), None), (lent, table)):
        bench = Bench(pool=pool, runtime=FP8_RUNTIME)
        bench.admit("a", prompt(30))
        bench.prefill("a", block_table=block_table)
        output = bench.generate({"a": 3}, block_table=block_table)
        found.append((bench.latents("a", 41), output.draft_tokens))
    assert_bitwise_equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("layout", list(Layout))
def test_a44_bytes_of_a_token_at_the_shape_of_kimi_k3(layout):
    """5 layers x (512 + 64) values x 2 bytes, measured on the tensor itself."""
    config = tiny_config(num_hidden_layers=5, kv_lora_rank=512, qk_rope_head_dim=64)
    pool = make_pool(config, dtype=torch.bfloat16, num_pages=3, page_size=32, layout=layout)
    assert pool.storage.untyped_storage().nbytes() == 3 * 32 * 5760
    assert pool.bytes_per_token == 5760
    pool = make_pool(config, dtype=torch.float8_e4m3fn, num_pages=3, page_size=32, layout=layout)
    assert pool.storage.untyped_storage().nbytes() == 3 * 32 * 2960
    assert pool.bytes_per_token == 2960


def test_a36_rows_of_rejected_drafts_leave_no_trace():
    """NaN in every target row behind the accepted ones: nothing of it reaches the pool or a later block."""
    bench = Bench()
    bench.admit("a", prompt(12))
    bench.prefill("a")
    for accepted in (3, 0, 6):
        rows = bench.rows({"a": accepted})
        poison_(rows.target_hidden[:, accepted + 1 :])
        output = bench.step(generation=rows)
        assert output.num_accepted.tolist() == [accepted]
        bench.check(output, "a")
        bench.check_latents("a")
    assert bench.latents("a").isfinite().all()


def test_a35_dummies_alone_on_a_fresh_worker():
    """Warm-up before any admission: nothing to verify against, no page anywhere."""
    config = tiny_config()
    pool = make_pool(config)
    worker = DFlashWorker(random_model(config), pool, RuntimeConfig.plain())
    before = snapshot(worker)
    hidden = torch.full((3, 8, config.context_width), NAN)
    rows = GenerationRows(request_ids=[None] * 3, target_hidden=hidden, target_tokens=poison_(torch.empty(3, 8).long()))
    output = worker.step(StepInput(generation=rows), trace=True)
    assert output.anchor.tolist() == [-1] * 3 and output.trace.draft.biased_logits.isfinite().all()
    assert snapshot(worker) == before


def test_fake_target_is_a_function_of_token_and_position():
    target = FakeTarget(6, 10)
    assert_bitwise_equal(target.rows([4, 5], 3)[1:], target.rows([5], 4))
    assert not torch.equal(target.rows([5], 4), target.rows([5], 5)) and math.isfinite(float(target.rows([1], 0).sum()))
