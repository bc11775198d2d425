"""Cases of the CuTe DSL block attention: inputs that try to fool it, and their float64 answers."""

import math
from dataclasses import dataclass, replace

import torch

LATENT, WIDTH, BLOCK = 512, 576, 7
NO_PAGE = 2**31 - 1


@dataclass(frozen=True)
class Case:
    """seq_lens: keys of each request, block rows with them; scale: of the latents; the queries' undoes it for the scores.

    slotted: requests name their rows of a longer table, -1 without keys; apart: a request's query rows have no one stride.
    two_tiles: which schedule; None: by the shape; rising: keys grow with their position, so later scores are far larger.
    """

    name: str
    seq_lens: tuple[int, ...]
    heads: int = 8
    page_size: int = 32
    causal: bool = False
    window: int | None = None
    dtype: str = "bfloat16"
    page_major: bool = False
    scale: float = 1.0
    slotted: bool = False
    apart: bool = False
    two_tiles: bool | None = None
    rising: bool = False


def cases() -> list[Case]:
    found = [Case(f"seq {length}", (length,)) for length in (1, 63, 64, 65, 2055)]
    found += [
        Case("ragged, dummies", (0, 100, 2055, 0, 7)),
        Case("many requests", tuple(range(0, 3000, 41))),
        Case("beyond one tile a CTA", (40000, 3, 131)),
        Case("ends of requests inside of CTAs", (9000, 64, 0, 2055, 700, 3001)),
        Case("large values", (2055, 70), scale=1e6),
        Case("window", (2055, 300, 20), window=100),
        Case("64 heads", (2055, 0, 70), heads=64),
        Case("page 128, causal, page major", (2055, 9, 64), page_size=128, causal=True, page_major=True),
        Case("page 16, float16, causal, window", (515, 8), page_size=16, dtype="float16", causal=True, window=33),
        Case("slots", (0, 100, 2055, 0, 7), slotted=True),
        Case("slots of many requests", tuple(range(0, 3000, 83)), slotted=True),
        Case("queries apart", (515, 0, 70), apart=True),
        Case("8 heads, two tiles in flight", (0, 100, 2055, 0, 7), two_tiles=True),
        Case("64 heads, one tile in flight", (2055, 0, 70), heads=64, two_tiles=False),
    ]
    found += [Case(f"64 heads, seq {length}", (length,), heads=64) for length in (1, 64, 65, 129, 515)]
    found += [
        Case("64 heads, window", (2055, 300, 20, *range(200, 400, 3)), heads=64, window=100),
        Case("64 heads, requests of few tiles", tuple(range(1, 330)), heads=64),  # about 17 a CTA, of 1 to 6 tiles
        Case("64 heads, beyond one tile a CTA", (40000, 3, 131), heads=64),
        Case("64 heads, rising scores", (2055, 0, 70, 9000), heads=64, rising=True),
        Case("64 heads, large values", (2055, 70), heads=64, scale=1e6),
        Case("64 heads, page 16, float16, causal, slots", (0, 515, 9, 64), 64, 16, causal=True, dtype="float16", slotted=True),
        Case("16 heads, page 128, causal, page major", (2055, 9, 64), 16, 128, causal=True, page_major=True),
        Case("64 heads, page 64, queries apart", (515, 0, 70), 64, 64, apart=True),
    ]
    return found


@dataclass
class Inputs:
    queries: torch.Tensor
    latents: torch.Tensor
    page_table: torch.Tensor
    context_lens: torch.Tensor
    seq_lens: torch.Tensor
    slots: torch.Tensor | None = None

    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.queries, self.latents, self.page_table, self.context_lens, self.seq_lens


def make_inputs(case: Case, device: str, seed: int = 0) -> Inputs:
    """Scattered pages; NaN in all rows that have no influence.  Entries of the table behind the keys, and rows of
    slots that no request has, name no page."""
    draw = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    used = [math.ceil(length / case.page_size) for length in case.seq_lens]
    batch, columns, total = len(used), max(max(used), 1) + 2, sum(used) + 3
    shape = (total, 2, case.page_size, WIDTH) if case.page_major else (total, case.page_size, WIDTH)
    storage = torch.empty(shape, dtype=dtype, device=device).normal_(generator=draw).mul_(case.scale)
    latents = storage[:, 1] if case.page_major else storage
    order = torch.randperm(total, generator=draw, device=device).int()
    table = torch.full((batch + 3, columns) if case.slotted else (batch, columns), NO_PAGE, dtype=torch.int32, device=device)
    where = torch.randperm(len(table), generator=draw, device=device)[:batch].tolist() if case.slotted else range(batch)
    seq_lens = torch.tensor(case.seq_lens, device=device)
    context_lens = (seq_lens - BLOCK).clamp(min=0)
    first = 0
    for request, count in enumerate(used):
        table[where[request], :count] = order[first : first + count]
        first += count
        if case.rising:
            latents[table[where[request], :count].long()] *= torch.linspace(0.1, 30, count, device=device)[:, None, None]
    alive = torch.zeros(total, case.page_size, dtype=torch.bool, device=device)
    for request, (start, end) in enumerate(spans(case, context_lens)):
        index = torch.arange(start, end, device=device)
        alive[table[where[request], index // case.page_size].long(), index % case.page_size] = True
    latents[~alive] = float("nan")
    queries = 3 / case.scale * torch.randn(batch, BLOCK, case.heads, WIDTH, generator=draw, device=device)
    slots = torch.where(seq_lens > 0, torch.tensor(where, device=device), -1) if case.slotted else None
    return Inputs(lay_out(case, queries.to(dtype)), latents, table, context_lens, seq_lens, slots)


def lay_out(case: Case, queries: torch.Tensor) -> torch.Tensor:
    """The same queries; in a case with rows apart, a row of NaN lies behind the heads of each block row."""
    return torch.nn.functional.pad(queries, (0, 0, 0, 1), value=float("nan"))[:, :, :-1] if case.apart else queries


def spans(case: Case, context_lens: torch.Tensor) -> list[tuple[int, int]]:
    """First key and end of each request."""
    firsts = [0 if case.window is None else max(0, context - case.window) for context in context_lens.tolist()]
    return list(zip(firsts, case.seq_lens, strict=True))


def expected(case: Case, inputs: Inputs, latent: int = LATENT) -> torch.Tensor:
    """float64, request by request."""
    out = torch.zeros(*inputs.queries.shape[:3], latent, dtype=torch.float64, device=inputs.queries.device)
    for request, (start, end) in enumerate(spans(case, inputs.context_lens)):
        if start >= end:
            continue
        index = torch.arange(start, end, device=out.device)
        row = request if inputs.slots is None else int(inputs.slots[request])
        pages = inputs.page_table[row, index // case.page_size].long()
        keys = inputs.latents[pages, index % case.page_size].double()
        scores = (inputs.queries[request].double() @ keys.T) * WIDTH**-0.5
        if case.causal:
            last = inputs.context_lens[request] + torch.arange(BLOCK, device=out.device)
            scores = scores.masked_fill(index > last[:, None, None], float("-inf"))
        out[request] = torch.softmax(scores, -1) @ keys[:, :latent]
    return out


def narrowed(case: Case, inputs: Inputs, width: int) -> Inputs:
    """The first columns of queries and latents."""
    queries = lay_out(case, inputs.queries[..., :width].contiguous())
    return replace(inputs, queries=queries, latents=inputs.latents[..., :width].contiguous())


def launch(case: Case, inputs: Inputs, latent: int = LATENT, **options) -> torch.Tensor:
    """options: others of the CuTe `block_attention`."""
    from dspark_kernels.cute.block_attention import block_attention

    return block_attention(
        *inputs.arguments(),
        kv_lora_rank=latent,
        softmax_scale=WIDTH**-0.5,
        causal=case.causal,
        window=case.window,
        slots=inputs.slots,
        two_tiles=case.two_tiles,
        **options,
    )


def add_dummies(case: Case, inputs: Inputs) -> Inputs:
    """One request without keys in front, and some behind."""

    def around(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor[:1], tensor, tensor[:1], tensor[:1]])

    queries, context_lens, seq_lens = map(around, (inputs.queries, inputs.context_lens, inputs.seq_lens))
    table, slots = inputs.page_table, inputs.slots
    outside = torch.tensor([0, -2, -1], device=seq_lens.device)
    context_lens[outside] = 0
    seq_lens[outside] = 0
    if slots is None:
        table = around(table)
    else:
        slots = around(slots)
        slots[outside] = -1
    return Inputs(lay_out(case, queries), inputs.latents, table, context_lens, seq_lens, slots)
