"""Inputs of `block_attention` that try to fool it, and the answer by a loop over requests, rows and heads in float64."""

import torch
from kernel_kit import DEVICE, watched_memory

from dspark_model.ops import (
    block_attention,
    dequantise_rows,
    quantise_rows,
)
from dspark_model.testing import poison_

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


def table_of_slots(inputs):
    """The same requests in a table of 7 slots, and their slots; -1 for requests without keys."""
    queries, latents, table, context, seq = inputs
    slots = torch.randperm(7)[: len(seq)]
    wide = torch.full((7, table.shape[1]), torch.iinfo(torch.int32).max, dtype=torch.int32)
    live = seq > 0
    wide[slots[live]] = torch.where(table[live] < 0, torch.iinfo(torch.int32).max, table[live])
    return (queries, latents, wide, context, seq), torch.where(live, slots, -1)


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
