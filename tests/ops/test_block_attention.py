"""`block_attention` against a loop over requests, rows and heads in float64."""

import pytest
import torch

from dspark_model.ops import block_attention
from dspark_model.testing import assert_bitwise_equal, poison_

HEADS, RANK, WIDTH, SCALE = 3, 6, 9, 0.3


def make(
    context: list[int], rows: int, page_size: int, dtype=torch.float32, spare_pages: int = 2, block_rows: int | None = None
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
    queries = torch.randn(len(context), rows, HEADS, WIDTH).to(dtype)
    return queries, latents, table, torch.tensor(context, dtype=torch.int64), torch.tensor(seq, dtype=torch.int64)


def exact(queries, latents, table, context, seq, *, causal: bool) -> torch.Tensor:
    batch, rows = queries.shape[:2]
    out = torch.zeros(batch, rows, HEADS, RANK, dtype=torch.float64)
    page_size = latents.shape[1]
    for b in range(batch):
        places = [(int(table[b, i // page_size]), i % page_size) for i in range(int(seq[b]))]
        for j in range(rows):
            seen = places[: int(context[b]) + j + 1] if causal else places
            if not seen:
                continue
            keys = torch.stack([latents[place] for place in seen]).double()
            for h in range(HEADS):
                weight = torch.softmax(SCALE * keys @ queries[b, j, h].double(), 0)
                out[b, j, h] = weight @ keys[:, :RANK]
    return out


def attend(inputs, *, causal=False, slack=0) -> torch.Tensor:
    longest = max(inputs[4].tolist(), default=0)
    return block_attention(*inputs, kv_lora_rank=RANK, softmax_scale=SCALE, max_seq_len=longest + slack, causal=causal)


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
