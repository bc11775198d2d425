"""`block_attention` against a loop over requests, rows and heads in float64."""

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
    make,
    outside_window_lost,
    table_of_slots,
    value_matrices,
)
from kernel_kit import DEVICE

from dspark_model.ops import (
    block_attention,
    per_head_product,
)
from dspark_model.testing import assert_bitwise_equal, poison_


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


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_an_fp8_pool_of_another_width_is_refused(backend):
    queries, latents, *rest = (value.to(DEVICE) for value in make([3], rows=2, page_size=4))
    with pytest.raises(ValueError, match="rows of 9 bytes, wanted 32 for latents of 9 values"):
        attend((queries, latents.to(torch.float8_e4m3fn), *rest), backend=backend)
