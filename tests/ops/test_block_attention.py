"""`block_attention` against a loop over requests, rows and heads in float64."""

import dataclasses
import re
import sys
import types

import pytest
import torch
from kernel_kit import DEVICE, LAYOUTS, watched_memory

from dspark_model.ops import (
    attention_flashinfer,
    block_attention,
    block_attention_refusal,
    dequantise_rows,
    per_head_product,
    quantise_rows,
)
from dspark_model.ops.attention_fixup import add_upper_triangle
from dspark_model.testing import assert_bitwise_equal, poison_

HEADS, RANK, WIDTH, SCALE = 3, 6, 9, 0.3


def make(
    context: list[int],
    rows: int,
    page_size: int,
    dtype=torch.float32,
    spare_pages: int = 2,
    block_rows: int | None = None,
    heads: int = HEADS,
):
    """Queries, a pool that is NaN wherever no request has a row, a page table, context and key counts."""
    seq = [length + (rows if block_rows is None else block_rows) for length in context]
    pages_of = [-(-length // page_size) for length in seq]
    total = sum(pages_of) + spare_pages
    order = torch.randperm(total).tolist()
    table = torch.full((len(context), max(pages_of, default=0) + 2), -1, dtype=torch.int32)
    latents = poison_(torch.empty(total, page_size, WIDTH)).to(dtype)
    for b, count in enumerate(pages_of):
        pages = [order.pop() for _ in range(count)]
        table[b, :count] = torch.tensor(pages, dtype=torch.int32)
        for row in range(seq[b]):
            latents[pages[row // page_size], row % page_size] = torch.randn(WIDTH).to(dtype)
    queries = torch.randn(len(context), rows, heads, WIDTH).to(dtype)
    return queries, latents, table, torch.tensor(context, dtype=torch.int64), torch.tensor(seq, dtype=torch.int64)


def exact(queries, latents, table, context, seq, *, causal: bool, window: int | None = None) -> torch.Tensor:
    batch, rows, heads = queries.shape[:3]
    out = torch.zeros(batch, rows, heads, RANK, dtype=torch.float64)
    page_size = latents.shape[1]
    for b in range(batch):
        first = 0 if window is None else max(0, int(context[b]) - window)
        places = [(int(table[b, i // page_size]), i % page_size) for i in range(first, int(seq[b]))]
        for j in range(rows):
            seen = places[: int(context[b]) + j + 1 - first] if causal else places
            if not seen:
                continue
            keys = torch.stack([latents[place] for place in seen]).double()
            for h in range(heads):
                weight = torch.softmax(SCALE * keys @ queries[b, j, h].double(), 0)
                out[b, j, h] = weight @ keys[:, :RANK]
    return out


def attend(inputs, *, causal=False, slack=0, window=None, slots=None, value_weights=None, backend="torch") -> torch.Tensor:
    longest = max(inputs[4].tolist(), default=0)
    return block_attention(
        *inputs,
        kv_lora_rank=RANK,
        softmax_scale=SCALE,
        max_seq_len=longest + slack,
        causal=causal,
        window=window,
        slots=slots,
        value_weights=value_weights,
        backend=backend,
    )


def kernel(inputs, *, slots=None, value_weights=None, backend="triton", **options) -> torch.Tensor:
    """The Triton backend's result, on the CPU.  It reads nothing but its arguments and writes nothing but what it allocates."""
    inputs = [value.to(DEVICE) for value in inputs]
    slots = None if slots is None else slots.to(DEVICE)
    others = [tensor for tensor in (slots, value_weights) if tensor is not None]
    with watched_memory(*inputs, *others):
        return attend(inputs, backend=backend, slots=slots, value_weights=value_weights, **options).cpu()


def kernel_like_float64(inputs, *, bound=3e-6, slack=0, backend="triton", **options) -> torch.Tensor:
    ours = kernel(inputs, slack=slack, backend=backend, **options)
    torch.testing.assert_close(ours.double(), exact(*inputs, **{"causal": False, **options}), rtol=bound, atol=bound)
    return ours


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 32])
@pytest.mark.parametrize("context", [[0], [1, 5, 0], [31, 32, 33], [4, 3, 8, 17]], ids=str)
def test_matches_float64_with_nan_in_every_row_that_is_not_a_key(dtype, bound, causal, page_size, context):
    inputs = make(context, rows=5, page_size=page_size, dtype=dtype)
    ours = attend(inputs, causal=causal)
    assert (ours.dtype, ours.shape) == (dtype, (len(context), 5, HEADS, RANK))
    torch.testing.assert_close(ours.double(), exact(*inputs, causal=causal), rtol=bound, atol=bound)


@pytest.mark.parametrize("slack", [1, 3, 7])
def test_a_loose_bound_on_the_length_reads_nothing_more(slack):
    inputs = make([3, 6], rows=4, page_size=4)
    torch.testing.assert_close(attend(inputs, slack=slack), attend(inputs), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_a_block_that_was_cut_at_its_pages(causal):
    """Fewer keys than context and block rows, as for a request whose pages end inside the block."""
    inputs = make([6, 2], rows=4, page_size=4, block_rows=2)
    torch.testing.assert_close(attend(inputs, causal=causal).double(), exact(*inputs, causal=causal), rtol=2e-6, atol=2e-6)


def test_a_request_without_keys_gives_zeros_and_disturbs_nobody():
    queries, latents, table, context, seq = make([4, 5], rows=3, page_size=4)
    alone = attend((queries, latents, table, context, seq))
    seq[0] = 0
    table[0] = -1
    ours = attend((queries, latents, table, context, seq))
    assert_bitwise_equal(ours[0], torch.zeros(3, HEADS, RANK))
    torch.testing.assert_close(ours[1], alone[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("batch", "max_seq_len"), [(0, 8), (0, 0), (2, 0)])
def test_empty_batches_and_lengths(batch, max_seq_len):
    empty = torch.zeros(batch, dtype=torch.int64)
    table = torch.full((batch, 3), -1, dtype=torch.int32)
    ours = block_attention(
        torch.randn(batch, 3, HEADS, WIDTH), poison_(torch.empty(4, 4, WIDTH)), table, empty, empty,
        kv_lora_rank=RANK, softmax_scale=SCALE, max_seq_len=max_seq_len,
    )  # fmt: skip
    assert_bitwise_equal(ours, torch.zeros(batch, 3, HEADS, RANK))


def test_any_stride_between_pages():
    queries, latents, table, context, seq = make([9, 2], rows=3, page_size=4)
    wide = torch.empty(latents.shape[0], 3, 4, WIDTH).fill_(float("nan"))
    wide[:, 1] = latents
    assert_bitwise_equal(attend((queries, wide[:, 1], table, context, seq)), attend((queries, latents, table, context, seq)))


def test_large_scores_do_not_overflow():
    queries, latents, table, context, seq = make([5], rows=2, page_size=4)
    assert torch.isfinite(attend((queries * 1e4, latents, table, context, seq))).all()


@pytest.mark.parametrize("window", [1, 3, 6, 7, 100])
@pytest.mark.parametrize("causal", [False, True])
def test_window_hides_older_context_and_never_uses_its_pages(causal, window):
    inputs = outside_window_lost(make([0, 7, 13], rows=3, page_size=4), window)
    expected = exact(*inputs, causal=causal, window=window)
    torch.testing.assert_close(attend(inputs, causal=causal, window=window).double(), expected, rtol=2e-6, atol=2e-6)


def outside_window_lost(inputs, window: int):
    """NaN in the context rows outside the window, and pages that hold nothing else have left the table."""
    latents, table, context = inputs[1], inputs[2], inputs[3]
    page_size = latents.shape[1]
    for b, length in enumerate(context.tolist()):
        for row in range(max(0, length - window)):
            latents[int(table[b, row // page_size]), row % page_size] = float("nan")
        table[b, : max(0, length - window) // page_size] = torch.iinfo(torch.int32).max
    return inputs


def value_matrices(layout: str, width: int = 5) -> torch.Tensor:
    """[HEADS, RANK, width], the values of a column or of a row side by side, between NaN."""
    drawn = torch.randn(HEADS, 2 * width, RANK)
    drawn[:, :width] = float("nan")
    return drawn[:, width:].mT if layout == "columns" else drawn[:, width:].mT.contiguous()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("layout", ["columns", "rows"])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, 5)])
def test_values_are_the_attention_times_each_heads_matrix(causal, window, layout, backend):
    """Also of a request without keys, and of a table of all slots; to the bit what the two ops give one after the other."""
    inputs = make([9, 0, 30, 2], rows=3, page_size=4)
    inputs[4][1] = 0
    of_slots, slots = table_of_slots(inputs)
    weights = value_matrices(layout).to(DEVICE)
    options = {"causal": causal, "window": window, "slots": slots, "backend": backend}
    ours = kernel(of_slots, value_weights=weights, **options)
    expected = torch.einsum("bnhc,hcv->bnhv", exact(*inputs, causal=causal, window=window), weights.cpu().double())
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)
    assert ours.shape == (4, 3, HEADS, 5) and ours.is_contiguous()
    assert_bitwise_equal(ours[1], torch.zeros(3, HEADS, 5))
    apart = torch.empty(4, 3, HEADS, 5, device=DEVICE)
    attended = kernel(of_slots, **options).to(DEVICE)
    per_head_product(attended, weights, out=apart, backend=backend)
    assert_bitwise_equal(ours, apart.cpu())


def test_values_are_rounded_twice():
    inputs = make([9, 2], rows=3, page_size=4, dtype=torch.bfloat16)
    weights = value_matrices("columns").bfloat16()
    wanted = torch.einsum("bnhc,hcv->bnhv", attend(inputs).double(), weights.double())
    torch.testing.assert_close(attend(inputs, value_weights=weights).double(), wanted, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda w: w[:2], r"shape \(2, 6, 5\), wanted \(3, 6, v_head_dim\)"),
        (lambda w: w.mT, r"shape \(3, 5, 6\)"),
        (lambda w: w.bfloat16(), "value_weights are torch.bfloat16"),
        (lambda w: w.repeat_interleave(2, -1)[..., ::2], "stride 1 in one of the last two"),
    ],
    ids=["heads", "transposed", "dtype", "strides"],
)
def test_matrices_that_do_not_fit_are_refused(change, what):
    with pytest.raises(ValueError, match=what):
        attend(make([3], rows=2, page_size=4), value_weights=change(value_matrices("rows")))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"window": 0}, "window=0"),
        ({"window": -4, "backend": "triton"}, "window=-4"),
        ({"backend": "fast"}, "no backend 'fast'"),
    ],
)
def test_bad_options_are_refused(options, what):
    with pytest.raises(ValueError, match=what):
        attend(make([3], rows=2, page_size=4), **options)


def test_table_of_all_slots():
    """Rows of slots without a request, and entries behind a request's pages, name no page."""
    inputs = make([9, 0, 30, 2], rows=3, page_size=4)
    inputs[4][1] = 0
    of_slots, slots = table_of_slots(inputs)
    for window in (None, 5):
        expected = exact(*inputs, causal=False, window=window)
        ours = attend(of_slots, slots=slots, window=window)
        torch.testing.assert_close(ours.double(), expected, rtol=2e-6, atol=2e-6)


def table_of_slots(inputs):
    """The same requests in a table of 7 slots, and their slots; -1 for requests without keys."""
    queries, latents, table, context, seq = inputs
    slots = torch.randperm(7)[: len(seq)]
    wide = torch.full((7, table.shape[1]), torch.iinfo(torch.int32).max, dtype=torch.int32)
    live = seq > 0
    wide[slots[live]] = torch.where(table[live] < 0, torch.iinfo(torch.int32).max, table[live])
    return (queries, latents, wide, context, seq), torch.where(live, slots, -1)


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


def as_fp8(inputs: tuple, stride: int = 0) -> tuple[tuple, torch.Tensor]:
    """The inputs with an fp8 pool of the same rows, and what it holds of them in float32; rows lie `stride` bytes apart."""
    queries, latents, *rest = inputs
    pool = quantise_rows(latents)
    held = dequantise_rows(pool, WIDTH)
    if stride:
        wide = poison_(torch.empty(*pool.shape[:2], stride, dtype=pool.dtype))
        wide[..., : pool.shape[2]] = pool
        pool = wide[..., : pool.shape[2]]
    return (queries, pool, *rest), held


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("stride", [0, 35])
def test_keys_of_an_fp8_pool_are_what_it_holds(causal, window, stride):
    inputs = make([0, 1, 13], rows=3, page_size=4)
    fp8, held = as_fp8(inputs, stride)
    options = {"causal": causal, "window": window}
    plain = (inputs[0], held, *inputs[2:])
    assert_bitwise_equal(attend(fp8, **options), attend(plain, **options))
    torch.testing.assert_close(attend(fp8, **options).double(), exact(*plain, **options), rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_an_fp8_pool_of_another_width_is_refused(backend):
    queries, latents, *rest = (value.to(DEVICE) for value in make([3], rows=2, page_size=4))
    with pytest.raises(ValueError, match="rows of 9 bytes, wanted 32 for latents of 9 values"):
        attend((queries, latents.to(torch.float8_e4m3fn), *rest), backend=backend)


def test_kernel_refuses_rows_of_an_fp8_pool_off_16_bytes():
    (queries, pool, *rest), _ = as_fp8(make([3], rows=2, page_size=4), stride=36)
    moved = torch.empty_strided(pool.shape, pool.stride(), dtype=pool.dtype, device=DEVICE).copy_(pool)
    with pytest.raises(ValueError, match=r"begin \(144, 36, 1\) bytes apart; wanted multiples of 16"):
        attend((queries.to(DEVICE), moved, *(value.to(DEVICE) for value in rest)), backend="triton")


SERVED = {
    "device": torch.device(DEVICE), "dtype": torch.bfloat16, "kv_lora_rank": 512, "width": 576, "page_size": 32, "heads": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "change", "reason"),
    [
        ("torch", {}, None),
        ("triton", {"causal": True, "window": 4, "captured": True}, None),
        ("causal_fixup", {"window": 4, "captured": True}, None),
        ("flashinfer", {}, None),
        ("fast", {}, "no backend 'fast'"),
        ("torch", {"width": 512}, "rows of 512 values with kv_lora_rank=512"),
        ("torch", {"page_size": 0}, "page_size=0"),
        ("triton", {"device": torch.device("meta")}, "CUDA devices, got meta"),
        ("triton", {"dtype": torch.float8_e4m3fn}, "got torch.float8_e4m3fn"),
        ("triton", {"fp8_pool": True}, None),
        ("triton", {"fp8_pool": True, "dtype": torch.float16}, "bfloat16 or float32 with fp8 pools, got torch.float16"),
        ("cute", {"fp8_pool": True}, "cute does not read fp8 pools; triton and torch do"),
        ("causal_fixup", {"fp8_pool": True}, "causal_fixup does not read fp8 pools"),
        ("flashinfer", {"fp8_pool": True}, "flashinfer does not read fp8 pools"),
        ("causal_fixup", {"causal": True}, "this block is causal"),
        ("flashinfer", {"causal": True}, "this block is causal"),
        ("flashinfer", {"captured": True}, "run the step eagerly"),
        ("flashinfer", {"dtype": torch.float32}, "got torch.float32"),
        ("flashinfer", {"width": 560}, r"got 512 \+ 48"),
        ("flashinfer", {"window": 3}, "window=3"),
        ("flashinfer", {"device": torch.device("cpu")}, "CUDA devices, got cpu"),
    ],
)
def test_refusal_says_why(monkeypatch, backend, change, reason):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # all packages are installed
    if reason is None and backend == "flashinfer":
        change = {"device": torch.device("cuda")}
    said = block_attention_refusal(backend, **{**SERVED, **change})
    if reason is None:
        assert said is None
    else:
        assert re.search(reason, said)


@pytest.mark.parametrize("backend", ["triton", "causal_fixup", "flashinfer"])
def test_a_missing_package_is_said(monkeypatch, backend):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"block_attention={backend}: {backend} needs the package.* installed"):
        attend(make([3], rows=2, page_size=4), backend=backend)


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


def lse_in_float64(inputs, *, causal: bool = False) -> torch.Tensor:
    queries, latents, table, context, seq = inputs
    out = torch.full(queries.shape[:3], float("-inf"), dtype=torch.float64)
    for b, length in enumerate(seq.tolist()):
        if length:
            keys = torch.stack([latents[int(table[b, i // latents.shape[1]]), i % latents.shape[1]] for i in range(length)])
            scores = SCALE * queries[b].double() @ keys.double().T
            if causal:
                last = int(context[b]) + torch.arange(queries.shape[1])
                scores.masked_fill_((torch.arange(length) > last[:, None])[:, None, :], float("-inf"))
            out[b] = scores.logsumexp(-1)
    return out


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


@pytest.mark.parametrize("block_rows", [0, 1, 4])
@pytest.mark.parametrize("page_size", [2, 16])
def test_upper_triangle_completes_a_causal_result(block_rows, page_size):
    """A causal result in float64; also of blocks that were cut at their pages, and without keys."""
    inputs = make([6, 0, 1, 17], rows=4, page_size=page_size, block_rows=block_rows)
    inputs[4][2] = 0
    seen, lse = exact(*inputs, causal=True).float(), lse_in_float64(inputs, causal=True).float()
    of_slots, slots = table_of_slots(inputs)
    for (queries, *pool), where in ((inputs, None), (of_slots, slots)):
        ours = add_upper_triangle(seen, lse, queries, *pool, softmax_scale=SCALE, slots=where)
        torch.testing.assert_close(ours.double(), exact(*inputs, causal=False), rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("window", [None, 3])
def test_causal_fixup_is_the_whole_block(window):
    inputs = make([20, 0, 6], rows=2, page_size=16)
    inputs[4][1] = 0
    ours = kernel_like_float64(inputs, window=window, backend="causal_fixup", bound=5e-6)
    torch.testing.assert_close(ours, attend(inputs, window=window), rtol=5e-6, atol=5e-6)
    of_slots, slots = table_of_slots(inputs)
    assert_bitwise_equal(kernel(of_slots, slots=slots, window=window, backend="causal_fixup"), ours)


class PlannedLikeFlashInfer:
    """What FlashInfer's documentation says of `plan` and `run`, in float64, one request and row at a time."""

    def __init__(self, workspace, backend):
        assert backend == "auto"

    def plan(self, rows_end, pages_end, pages, lens, heads, rank, rope, page_size, causal, scale, q_dtype, kv_dtype):
        assert all(value.dtype is torch.int32 for value in (rows_end, pages_end, pages, lens))
        assert (rank, rope, causal, len(pages)) == (RANK, WIDTH - RANK, False, int(pages_end[-1]))
        self.rows_end, self.pages_end, self.pages, self.lens = rows_end, pages_end, pages, lens
        self.scale = scale

    def run(self, absorbed, rotary, values, turned):
        assert absorbed.is_contiguous() and rotary.is_contiguous()
        queries, keys = torch.cat((absorbed, rotary), -1).double(), torch.cat((values, turned), -1).double()
        out = torch.empty_like(absorbed)
        for b, length in enumerate(self.lens.tolist()):
            assert length > 0
            held = keys[self.pages[self.pages_end[b] : self.pages_end[b + 1]].long()].flatten(0, 1)[:length]
            for row in range(self.rows_end[b], self.rows_end[b + 1]):
                out[row] = torch.softmax(self.scale * queries[row] @ held.T, -1) @ held[:, :RANK]
        return out


@pytest.mark.parametrize("slotted", [False, True])
def test_flashinfer_gets_the_pages_of_requests_with_keys(monkeypatch, slotted):
    package = types.ModuleType("flashinfer.mla")
    package.BatchMLAPagedAttentionWrapper = PlannedLikeFlashInfer
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.mla", package)
    monkeypatch.setattr(attention_flashinfer, "_wrapper", attention_flashinfer._wrapper.__wrapped__)
    inputs = make([9, 0, 30, 1], rows=3, page_size=4)
    inputs[4][1] = 0
    (queries, latents, table, _, seq), slots = table_of_slots(inputs) if slotted else (inputs, None)
    ours = attention_flashinfer.planned_attention(
        queries, latents, table, seq, kv_lora_rank=RANK, softmax_scale=SCALE, slots=slots
    )
    torch.testing.assert_close(ours.double(), exact(*inputs, causal=False), rtol=2e-6, atol=2e-6)
    nobody = attention_flashinfer.planned_attention(
        queries, latents, table, seq * 0, kv_lora_rank=RANK, softmax_scale=SCALE, slots=slots
    )
    assert_bitwise_equal(nobody, torch.zeros_like(ours))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "heads", "bound"), [("cute", 8, 1.3), ("cute", 64, 1.3), ("causal_fixup", 8, 1.6), ("flashinfer", 8, 2)]
)
def test_other_backends_on_the_device(backend, heads, bound):
    """Error against float64 over that of float64 attention whose weights and result are rounded: two roundings of the result,
    of which the first is of a part of it, are less than 1.5 times one; FlashInfer's was at most 1.05 times on an H200."""
    if backend != "causal_fixup":
        pytest.importorskip({"cute": "cutlass"}.get(backend, backend))
    from dspark_model.bench.attention_cases import error_against_float64, make_case

    case = make_case(2, 3000, heads)
    rounded = error_against_float64(case, case.rounded_reference())
    assert error_against_float64(case, case.run(backend=backend)) <= bound * rounded


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
