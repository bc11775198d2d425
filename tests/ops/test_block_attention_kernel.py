"""The Triton kernels of `block_attention`, against float64 and their own bits."""

import dataclasses

import pytest
import torch
from attention_kit import (
    HEADS,
    RANK,
    SCALE,
    WIDTH,
    as_fp8,
    attend,
    exact,
    kernel,
    kernel_like_float64,
    lse_in_float64,
    make,
    outside_window_lost,
    table_of_slots,
)
from kernel_kit import DEVICE, LAYOUTS, watched_memory

from dspark_model.ops import (
    block_attention,
)
from dspark_model.testing import assert_bitwise_equal, poison_


@pytest.mark.parametrize("change", ["dtype", "queries", "latents", "table", "table_dtype", "lens", "slots"])
def test_kernel_refuses_what_it_does_not_know(change):
    queries, latents, table, context, seq = (value.to(DEVICE) for value in make([3, 4], rows=2, page_size=16))
    if change == "dtype":
        queries = queries.bfloat16()
    elif change == "queries":
        queries = queries.repeat_interleave(2, -1)[..., ::2]
    elif change == "latents":
        latents = latents.mT.contiguous().mT
    elif change == "table":
        table = table.T.contiguous().T
    elif change == "table_dtype":
        table = table.long()
    elif change == "lens":
        seq = seq.repeat_interleave(2)[::2]
    slots = torch.arange(2, dtype=torch.int32, device=DEVICE) if change == "slots" else None
    with pytest.raises(ValueError, match="wanted"):
        attend((queries, latents, table, context, seq), backend="triton", slots=slots)


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, 17)])
@pytest.mark.parametrize("stride", [0, 48])
def test_kernel_takes_from_an_fp8_pool_the_bits_of_a_pool_of_the_same_keys(causal, window, stride):
    """NaN in every row that is not a key, in codes as in scales; rows of very different sizes."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    inputs = make([0, 40, 55, 3], rows=2, page_size=16, dtype=dtype)
    inputs[1][:] *= torch.exp2(torch.randint(-6, 3, (*inputs[1].shape[:2], 1)).float()).to(dtype)
    fp8, held = as_fp8(inputs, stride)
    options = {"causal": causal, "window": window}
    wanted = kernel((inputs[0], held.to(dtype), *inputs[2:]), **options)
    assert_bitwise_equal(kernel(fp8, **options), wanted)
    if dtype is torch.float32:
        torch.testing.assert_close(wanted.double(), exact(inputs[0], held, *inputs[2:], **options), rtol=3e-6, atol=3e-6)


def test_kernel_refuses_rows_of_an_fp8_pool_off_16_bytes():
    (queries, pool, *rest), _ = as_fp8(make([3], rows=2, page_size=4), stride=36)
    moved = torch.empty_strided(pool.shape, pool.stride(), dtype=pool.dtype, device=DEVICE).copy_(pool)
    with pytest.raises(ValueError, match=r"begin \(144, 36, 1\) bytes apart; wanted multiples of 16"):
        attend((queries.to(DEVICE), moved, *(value.to(DEVICE) for value in rest)), backend="triton")


@pytest.mark.parametrize(("page_size", "causal"), [(16, True), (32, False), (48, True), (64, False), (128, False)])
@pytest.mark.parametrize("context", [[1, 70, 0], [15, 17]], ids=str)
def test_kernel_matches_float64_with_nan_in_every_row_that_is_not_a_key(context, page_size, causal):
    kernel_like_float64(make(context, rows=2, page_size=page_size), causal=causal)


@pytest.mark.parametrize("slack", [1, 200])
def test_kernel_with_a_loose_bound_on_the_length(slack):
    inputs = make([33, 6], rows=4, page_size=16)
    assert_bitwise_equal(kernel_like_float64(inputs, slack=slack), kernel(inputs))


@pytest.mark.parametrize("block_rows", [0, 1, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_kernel_with_a_block_that_was_cut_at_its_pages(causal, block_rows):
    kernel_like_float64(make([30, 2, 0], rows=4, page_size=16, block_rows=block_rows), causal=causal)


@pytest.mark.parametrize(("rows", "heads"), [(1, 1), (1, 64), (2, 12), (7, 8), (8, 2), (16, 1)])
def test_kernel_with_any_count_of_heads_and_rows(rows, heads):
    kernel_like_float64(make([18], rows=rows, page_size=16, heads=heads), causal=rows == 8)


@pytest.mark.parametrize("window", [1, 16, 17])
@pytest.mark.parametrize("causal", [False, True])
def test_kernel_window_never_reads_what_left_it(causal, window):
    inputs = outside_window_lost(make([0, 40, 55], rows=2, page_size=16), window)
    kernel_like_float64(inputs, causal=causal, window=window)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernel_takes_both_layouts_and_strided_queries(layout):
    queries, latents, table, context, seq = make([20, 2], rows=2, page_size=16)
    expected = kernel((queries, latents, table, context, seq))
    shape = (3, *latents.shape) if layout == "layer_major" else (latents.shape[0], 3, *latents.shape[1:])
    pool = poison_(torch.empty(shape))
    view = pool[1] if layout == "layer_major" else pool[:, 1]
    view.copy_(latents)
    wide = poison_(torch.empty(2, HEADS + 1, 2, WIDTH + 2))
    turned = wide[:, :HEADS, :, :WIDTH].transpose(1, 2)
    turned.copy_(queries)
    assert_bitwise_equal(kernel((turned, view, table, context, seq)), expected)


@pytest.mark.parametrize("order", ["front", "back", "between"])
def test_a_request_gives_the_same_bits_alone_and_among_dummies(order):
    queries, latents, table, context, seq = make([70, 20], rows=1, page_size=16)
    places = {"front": [3, 4], "back": [0, 1], "between": [1, 3]}[order]
    padded = [value.new_full((5, *value.shape[1:]), -1) for value in (table, context)]
    more_queries = torch.full((5, *queries.shape[1:]), float("nan"))
    more_seq = torch.zeros(5, dtype=torch.int64)
    for many, few in zip((more_queries, *padded, more_seq), (queries, table, context, seq), strict=True):
        many[places] = few
    alone = kernel((queries, latents, table, context, seq), slack=30)
    ours = kernel((more_queries, latents, *padded, more_seq), slack=30)
    assert_bitwise_equal(ours[places], alone)
    rest = [b for b in range(5) if b not in places]
    assert_bitwise_equal(ours[rest], torch.zeros(3, *alone.shape[1:]))


def test_kernel_takes_a_table_of_all_slots():
    """The row of slot -1 lies outside the table: that it is not read is watched."""
    inputs = make([70, 0, 20], rows=1, page_size=16)
    inputs[4][1] = 0
    of_slots, slots = table_of_slots(inputs)
    of_slots[2][0].clamp_(min=0)
    assert_bitwise_equal(kernel(of_slots, slots=slots), kernel(inputs))


def test_no_launch_shape_follows_padding_or_a_bound(monkeypatch):
    """More requests without keys and a looser bound change counts, the grid, and lanes of integers; no build that sums floats.

    On processors enough for the shares to be cut to the tiles that there can be.
    """
    from dspark_kernels.triton import block_attention as module

    launch, builds = module.block_attention, []

    class Recorded:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *arguments, **build: builds[-1].append((self.name, {**build, "BATCH_LANES": None}))

    for name in ("block_attention_kernel", "block_attention_merge_kernel"):
        monkeypatch.setattr(module, name, Recorded(name))
    monkeypatch.setattr(module, "block_attention", lambda *inputs, **rest: launch(*inputs, **{**rest, "processors": 600}))
    monkeypatch.setattr("dspark_kernels.triton.block_attention.hopper_kernel_takes", lambda *latents: False)
    for rows, dtype in ((1, torch.float32), (4, torch.bfloat16), (16, torch.bfloat16)):
        builds.clear()
        for batch, slack in ((1, 0), (1, 5000), (9, 0), (70, 1 << 18)):
            inputs = [value.to(DEVICE) for value in make([40] + [0] * (batch - 1), rows=rows, page_size=16, dtype=dtype)]
            inputs[4][1:] = 0
            builds.append([])
            attend(inputs, slack=slack, backend="triton")
        assert len(builds[0]) == 2
        assert all(build == builds[0] for build in builds)


def test_tiles_follow_static_facts_only():
    from dspark_kernels.triton.block_attention import choose_tuning, hopper_kernel_takes

    def tile(rows, dtype=torch.bfloat16, shared_bytes=227 << 10):
        return choose_tuning(rows, dtype, by_hand=False, shared_bytes=shared_bytes).row_tile

    assert (tile(16), tile(17), tile(448), tile(448, torch.float32)) == (16, 64, 64, 16)
    assert (tile(56, shared_bytes=163 << 10), tile(56, shared_bytes=99 << 10)) == (16, 16)
    assert choose_tuning(1, torch.float16, by_hand=True, shared_bytes=227 << 10).by_hand
    assert hopper_kernel_takes((9, 0), 512, 576, torch.float16)
    for other in (((8, 0), 512, 576, torch.float16), ((9, 0), 512, 560, torch.float16), ((9, 0), 512, 576, torch.float32)):
        assert not hopper_kernel_takes(*other)


@pytest.mark.parametrize(("shares", "causal"), [(1, False), (3, False), (3, True)])
def test_kernel_gives_the_logarithm_of_the_sum_of_weights(shares, causal):
    """Of requests that lie in one share, that several shares hold, and without keys."""
    from dspark_kernels.triton.block_attention import block_attention as launch
    from dspark_kernels.triton.block_attention import choose_tuning

    inputs = make([45, 0, 3, 13], rows=3, page_size=16)
    inputs[4][1] = 0
    on_device = [value.to(DEVICE) for value in inputs]
    lse = poison_(torch.empty(4, 3, HEADS, device=DEVICE))
    with watched_memory(*on_device, writes=[lse]):
        out = launch(
            *on_device, kv_lora_rank=RANK, softmax_scale=SCALE, max_seq_len=64, causal=causal, window=None, processors=shares,
            tuning=choose_tuning(9, torch.float32, by_hand=False, shared_bytes=1 << 30), lse=lse,
        )  # fmt: skip
    torch.testing.assert_close(lse.cpu().double(), lse_in_float64(inputs, causal=causal), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(out.cpu().double(), exact(*inputs, causal=causal), rtol=3e-6, atol=3e-6)


def test_kernel_repeats_its_bits():
    inputs = make([70, 20, 7], rows=1, page_size=16)
    assert_bitwise_equal(kernel(inputs), kernel(inputs))


@pytest.mark.parametrize(("shares", "min_tiles"), [(1, 1), (7, 1), (40, 1), (7, 3)])
def test_kernel_merges_any_split(min_tiles, shares):
    """Requests that lie within one share, end with one, and go through several."""
    from dspark_kernels.triton.block_attention import block_attention as launch
    from dspark_kernels.triton.block_attention import choose_tuning

    inputs = make([45, 0, 100, 13, 0, 15], rows=1, page_size=16, block_rows=1)
    inputs[4][1] = 0
    tuning = dataclasses.replace(choose_tuning(3, torch.float32, by_hand=False, shared_bytes=1 << 30), min_tiles=min_tiles)
    ours = launch(
        *[value.to(DEVICE) for value in inputs], kv_lora_rank=RANK, softmax_scale=SCALE, max_seq_len=128, causal=False,
        window=None, processors=shares, tuning=tuning,
    )  # fmt: skip
    torch.testing.assert_close(ours.cpu().double(), exact(*inputs, causal=False), rtol=3e-6, atol=3e-6)


def test_kernel_large_scores_do_not_overflow():
    queries, latents, table, context, seq = make([5, 40], rows=2, page_size=16)
    assert torch.isfinite(kernel((queries * 1e4, latents, table, context, seq))).all()


@pytest.mark.parametrize(("batch", "max_seq_len"), [(0, 8), (0, 0), (2, 0), (2, 40)])
def test_kernel_with_empty_batches_and_lengths(batch, max_seq_len):
    empty = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
    table = torch.full((batch, 3), -1, dtype=torch.int32, device=DEVICE)
    ours = block_attention(
        torch.randn(batch, 3, HEADS, WIDTH, device=DEVICE), poison_(torch.empty(4, 16, WIDTH, device=DEVICE)), table, empty,
        empty, kv_lora_rank=RANK, softmax_scale=SCALE, max_seq_len=max_seq_len, backend="triton",
    )  # fmt: skip
    assert_bitwise_equal(ours.cpu(), torch.zeros(batch, 3, HEADS, RANK))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize(
    ("rows", "heads", "context"), [(7, 8, 2048), (7, 8, 20000), (1, 8, 300), (7, 64, 2048), (16, 12, 5000)]
)
def test_kernel_on_the_device_is_as_exact_as_its_dtype(rows, heads, context, page_size, dtype):
    """Error against float64 at most that of float64 attention whose weights and result are rounded, and a fifth."""
    from dspark_model.bench.attention_cases import error_against_float64, make_case

    case = make_case(2, context, heads, block=rows, page_size=page_size, dtype=dtype)
    ours = case.run(backend="triton")
    assert_bitwise_equal(case.run(backend="triton"), ours)
    error, rounded = error_against_float64(case, ours), error_against_float64(case, case.rounded_reference())
    assert error <= 1.2 * rounded


@pytest.mark.gpu
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, 1000), (True, 64)])
@pytest.mark.parametrize(("page_size", "heads", "layout"), [(16, 8, 0), (32, 64, 1), (48, 12, 1), (128, 1, 0)])
def test_kernels_of_64_rows_on_the_device(page_size, heads, layout, causal, window, by_hand):
    """Ragged requests and dummies, NaN in every row that is not a key, at the width of the device's kernels."""
    from dspark_kernels.triton.block_attention import Tuning
    from dspark_kernels.triton.block_attention import block_attention as launch

    context, block, rank, width = [3000, 0, 1, 63, 64, 65, 12345], 7, 512, 576
    seq = torch.tensor([length + block for length in context], device="cuda")
    seq[1] = 0
    counts = [-(-length // page_size) for length in seq.tolist()]
    order = torch.randperm(sum(counts) + 2, device="cuda").int()
    table = torch.full((len(context), max(counts) + 1), -1, dtype=torch.int32, device="cuda")
    shape = (2, len(order), page_size, width) if layout == 0 else (len(order), 2, page_size, width)
    latents = torch.full(shape, float("nan"), dtype=torch.bfloat16, device="cuda").unbind(layout)[1]
    used = 0
    for b, count in enumerate(counts):
        pages = order[used : used + count]
        table[b, :count], used = pages, used + count
        rows = torch.randn(int(seq[b]), width, device="cuda").bfloat16()
        places = torch.arange(len(rows), device="cuda")
        latents[pages[places // page_size].long(), places % page_size] = rows
    queries = torch.randn(len(context), block, heads, width, device="cuda").bfloat16()
    lens = torch.tensor(context, device="cuda")
    arguments = (queries, latents, table, lens, seq)
    options = {"kv_lora_rank": rank, "softmax_scale": 0.07, "max_seq_len": 16384, "causal": causal, "window": window}
    tuning = Tuning(row_tile=64, key_tile=64, num_warps=8, num_stages=2, by_hand=by_hand)
    ours = launch(*arguments, processors=132, tuning=tuning, **options)
    expected = block_attention(*arguments, **options)
    torch.testing.assert_close(ours.float(), expected.float(), rtol=2e-2, atol=1e-2)
    assert_bitwise_equal(ours[1], torch.zeros_like(ours[1]))
    assert_bitwise_equal(launch(*arguments, processors=132, tuning=tuning, **options), ours)
    slots = torch.randperm(9, device="cuda")[: len(context)]
    wide = torch.full((9, table.shape[1]), torch.iinfo(torch.int32).max, dtype=torch.int32, device="cuda")
    wide[slots] = table
    lse = torch.full((len(context), block, heads), float("nan"), device="cuda")
    slotted = (queries, latents, wide, lens, seq)
    slots[1] = -1
    assert_bitwise_equal(launch(*slotted, processors=132, tuning=tuning, slots=slots, lse=lse, **options), ours)
    assert (lse[1] == float("-inf")).all()
    for b in (0, 2, 5, 6):
        keys = latents[table[b, : counts[b]].long()].flatten(0, 1)[: seq[b]].double()
        index, last = torch.arange(len(keys), device="cuda"), context[b] + torch.arange(block, device="cuda")
        hidden = (index > last[:, None]) if causal else (index < 0).expand(block, -1)
        hidden = hidden | (index < context[b] - (window or context[b]))
        scores = (0.07 * queries[b].double() @ keys.T).masked_fill(hidden[:, None, :], float("-inf"))
        torch.testing.assert_close(lse[b].double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-4)
    alone = [value[6:] if value is not latents else value for value in arguments]
    several = [torch.cat((torch.zeros_like(value), value)) if value is not latents else value for value in alone]
    one, two = (launch(*some, processors=132, tuning=tuning, **options) for some in (alone, several))
    assert_bitwise_equal(two[1:], one)
