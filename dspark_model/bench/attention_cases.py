"""What `scripts/bench_attention.py` times: block attention of one layer over rotating pools, its floors and errors."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dspark_model import ops
from dspark_model.bench.k3_rank import NUM_DRAFTS
from dspark_model.bench.timing import Timing, capture, time_interleaved
from dspark_model.step_plan import key_bound

WIDTH, RANK, VALUE_WIDTH = 576, 512, 128  # Kimi K3: latent with its rotary part, the latent, and values of a head
SCALE = 192**-0.5  # of the drafter's 128 + 64 query values a head
BYTE_RATE, FLOP_RATE = 4.3e12, 790e12  # what large reads and dense bf16 products reach on an H200
ROTATED_BYTES = 300_000_000  # six times L2
CASES = (
    (1, 2048, 8), (4, 2048, 8), (16, 2048, 8), (1, 32768, 8), (4, 32768, 8), (1, 131072, 8), (1, 393216, 8), (4, 2048, 16),
    (1, 2048, 64), (4, 2048, 64), (16, 2048, 64), (1, 32768, 64),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One layer's block attention: every request has `context` rows and a block, its pages scattered; max_seq_len: the power of
    two that the host knows of their keys."""

    queries: torch.Tensor
    pools: tuple[torch.Tensor, ...]  # each [pages, page_size, WIDTH]
    page_table: torch.Tensor
    context_lens: torch.Tensor
    seq_lens: torch.Tensor
    max_seq_len: int

    def inputs(self, pool: int = 0) -> tuple[torch.Tensor, ...]:
        return self.queries, self.pools[pool], self.page_table, self.context_lens, self.seq_lens

    def run(self, pool: int = 0, *, backend: str, value_weights: torch.Tensor | None = None) -> torch.Tensor:
        return ops.block_attention(
            *self.inputs(pool), kv_lora_rank=RANK, softmax_scale=SCALE, max_seq_len=self.max_seq_len, backend=backend,
            value_weights=value_weights,
        )  # fmt: skip

    def run_with_product_apart(self, pool: int, *, backend: str, value_weights: torch.Tensor) -> torch.Tensor:
        """The same values with a launch for the product."""
        attended = self.run(pool, backend=backend)
        values = attended.new_empty(*attended.shape[:3], VALUE_WIDTH)
        ops.per_head_product(attended, value_weights, out=values, backend="triton")
        return values

    def value_weights(self) -> torch.Tensor:
        """W_UV as a drafter has it: [heads, RANK, VALUE_WIDTH], a view of rows of kv_b_proj."""
        draw, device = torch.Generator(self.queries.device).manual_seed(8), self.queries.device
        rows = torch.randn(self.queries.shape[2], 2 * VALUE_WIDTH, RANK, generator=draw, device=device, dtype=torch.float32)
        return (rows * RANK**-0.5).to(self.queries.dtype)[:, VALUE_WIDTH:].mT

    def refusal(self, backend: str) -> str | None:
        """Why the backend does not take this case."""
        page_size, heads, device = self.pools[0].shape[1], self.queries.shape[2], self.queries.device
        return ops.block_attention_refusal(
            backend, device=device, dtype=self.queries.dtype, kv_lora_rank=RANK, width=WIDTH, page_size=page_size, heads=heads
        )

    def rows(self, request: int) -> torch.Tensor:
        """The keys of a request in pool 0, [seq_len, WIDTH]."""
        page_size, length = self.pools[0].shape[1], int(self.seq_lens[request])
        pages = self.page_table[request, : -(-length // page_size)].long()
        return self.pools[0][pages].flatten(0, 1)[:length]

    def weights(self, request: int) -> torch.Tensor:
        """Float64 softmax weights of a request, [N * heads, seq_len]."""
        scores = self.queries[request].flatten(0, 1).double() @ self.rows(request).double().T
        return torch.softmax(scores * SCALE, dim=-1)

    def rounded_reference(self) -> torch.Tensor:
        """Float64 attention with the two roundings that tensor cores ask for: of the weights, and of the result."""
        dtype = self.queries.dtype
        out = [
            self.weights(request).to(dtype).double() @ self.rows(request)[:, :RANK].double()
            for request in range(self.queries.shape[0])
        ]
        return torch.stack(out).to(dtype).view(*self.queries.shape[:3], RANK)

    def floors_us(self) -> tuple[float, float]:
        """Microseconds for the keys' bytes, and for the products."""
        keys, rows = int(self.seq_lens.sum()), self.queries.shape[1] * self.queries.shape[2]
        count = keys * WIDTH * self.pools[0].element_size()
        flops = 2 * keys * rows * (WIDTH + RANK)
        return 1e6 * count / BYTE_RATE, 1e6 * flops / FLOP_RATE


def make_case(
    batch: int,
    context: int,
    heads: int,
    *,
    block: int = NUM_DRAFTS,
    page_size: int = 32,
    dtype: torch.dtype = torch.bfloat16,
    rotated_bytes: int = 0,
    device: str = "cuda",
) -> AttentionCase:
    """Normal latents and queries.  rotated_bytes: pools are added until they hold as much."""
    draw = torch.Generator(device).manual_seed(7)
    length = context + block
    per_request = -(-length // page_size)
    pages = batch * per_request
    size = pages * page_size * WIDTH * dtype.itemsize
    count = max(1, -(-rotated_bytes // size)) if size < rotated_bytes else 1
    pools = tuple(
        torch.randn(pages, page_size, WIDTH, generator=draw, device=device, dtype=torch.float32).to(dtype) for _ in range(count)
    )
    table = torch.randperm(pages, generator=draw, device=device).view(batch, per_request).int()
    queries = torch.randn(batch, block, heads, WIDTH, generator=draw, device=device, dtype=torch.float32).to(dtype)
    lens = torch.full((batch,), context, dtype=torch.int64, device=device)
    return AttentionCase(queries, pools, table, lens, lens + block, key_bound(context + block))


def error_against_float64(case: AttentionCase, out: torch.Tensor, value_weights: torch.Tensor | None = None) -> float:
    """Root of the mean square error over that of the exact result, pool 0."""
    wrong = right = 0.0
    for request in range(out.shape[0]):
        exact = case.weights(request) @ case.rows(request)[:, :RANK].double()
        if value_weights is not None:
            exact = values_of(exact.view(*out.shape[1:3], RANK), value_weights).flatten(0, 1)
        wrong += float((out[request].flatten(0, 1).double() - exact).square().sum())
        right += float(exact.square().sum())
    return (wrong / right) ** 0.5


def values_of(attended: torch.Tensor, value_weights: torch.Tensor) -> torch.Tensor:
    """Float64 product of attended latents [..., heads, RANK] with each head's matrix: [..., heads, VALUE_WIDTH]."""
    return torch.einsum("...hc,hcv->...hv", attended.double(), value_weights.double())


def flashinfer_call(case: AttentionCase) -> Callable[[int], torch.Tensor]:
    """FlashInfer's fa3 MLA over the same pages, planned here, outside what is timed.  Raises ImportError without FlashInfer."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    batch, block, heads, _ = case.queries.shape
    device, page_size = case.queries.device, case.pools[0].shape[1]
    step = {"dtype": torch.int32, "device": device}
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(128 << 20, dtype=torch.int8, device=device), backend="fa3")
    wrapper.plan(
        torch.arange(batch + 1, **step) * block, torch.arange(batch + 1, **step) * case.page_table.shape[1],
        case.page_table.flatten(), case.seq_lens.int(), heads, RANK, WIDTH - RANK, page_size, False, SCALE, case.queries.dtype,
        case.queries.dtype,
    )  # fmt: skip
    nope, rope = (part.contiguous() for part in case.queries.flatten(0, 1).split((RANK, WIDTH - RANK), dim=-1))
    shape = (batch, block, heads, RANK)
    return lambda pool: wrapper.run(nope, rope, case.pools[pool][..., :RANK], case.pools[pool][..., RANK:]).view(shape)


def time_case(case: AttentionCase, calls: dict[str, Callable[[int], torch.Tensor]]) -> dict[str, Timing]:
    """Time of one layer; a graph runs over all pools, at least 8 times."""
    pools = len(case.pools)
    copies = max(1, -(-8 // pools)) * pools

    def work(call: Callable[[int], torch.Tensor]) -> Callable[[], None]:
        order = iter(())

        def once() -> None:
            nonlocal order
            pool = next(order, None)
            if pool is None:
                order = iter(range(pools))
                pool = next(order)
            call(pool)

        return once

    graphs = {name: capture(work(call), copies=copies) for name, call in calls.items()}
    replays = max(2, 160 // copies)
    return time_interleaved({name: g.replay for name, g in graphs.items()}, rounds=9, replays=replays, copies=copies)
