"""Absorbed MLA attention of one block over paged context, for Hopper: what a build depends on, and the launch.

Two kernels.  In the first (`block_attention_kernel`) each CTA, or two together, takes an equal share of all key tiles and
writes what it has of each request and tile of query rows to a workspace.  The second adds these parts up
(`block_attention_merge`, where there are many `block_attention_warps`), and multiplies the sums by each head's matrix if there
are some (`block_attention_values`, `block_attention_heads`).
"""

from dataclasses import dataclass, replace
from functools import cache

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_ptr

from dspark_kernels.cute.block_attention_checks import check_call, check_values, in_chunks
from dspark_kernels.cute.block_attention_facts import Facts
from dspark_kernels.cute.block_attention_fetch import SWIZZLE
from dspark_kernels.cute.block_attention_heads import merge_heads_kernel, suits_whole_heads
from dspark_kernels.cute.block_attention_kernel import block_attention_kernel
from dspark_kernels.cute.block_attention_merge import merge_kernel
from dspark_kernels.cute.block_attention_schedule import (
    CHUNK,
    CONSUMERS,
    ELEMENTS,
    PART,
    TILE,
    WARP,
    Latents,
    Queries,
    Requests,
    Workspace,
)
from dspark_kernels.cute.block_attention_values import Matrices, merge_values_kernel
from dspark_kernels.cute.block_attention_warps import are_spread, merge_by_warps_kernel, splits_of, suits_warps
from dspark_kernels.cute.builds import build_architecture
from dspark_kernels.cute.compile import compile_once

THREADS = CONSUMERS + 128  # and one warpgroup for the fetching warp: registers move between whole warpgroups
ARCHITECTURE = "sm_90a"
NO_WINDOW = 2**31 - 1
MERGING_WARPS = 8  # where `between_attentions` merges: its warps that multiply
LOG2_E = 1.4426950408889634


@cute.jit
def tma_boxes(tensor, rows: cutlass.Constexpr, columns: cutlass.Constexpr):
    """Atom and tensor that bring boxes of rows x columns into 128-byte swizzles, a column block behind the other."""
    outer = cute.make_layout((rows, (SWIZZLE, columns // SWIZZLE)), stride=(SWIZZLE, (1, rows * SWIZZLE)))
    box = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, outer)
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, box, (rows, columns))


@cute.jit
def _launch(
    queries: Queries,
    latents: Latents,
    requests: Requests,
    work: Workspace,
    matrices: Matrices,
    out: cute.Pointer,
    scale: cutlass.Float32,
    stream: cuda.CUstream,
    facts: cutlass.Constexpr,
):
    wide_strides = (latents.token_stride, latents.page_stride, queries.head_stride, queries.batch_stride)
    token_stride, page_stride, head_stride, batch_stride = (cute.assume(stride, divby=CHUNK) for stride in wide_strides)
    pool_layout = cute.make_layout(
        (facts.page_size, (SWIZZLE, facts.blocks), latents.pages), stride=(token_stride, (1, SWIZZLE), page_stride)
    )
    tma_atom, tma_tensor = tma_boxes(cute.make_tensor(latents.values, pool_layout), facts.box, SWIZZLE)
    query_layout = cute.make_layout(
        (facts.queries, (SWIZZLE, facts.blocks), requests.batch), stride=(head_stride, (1, SWIZZLE), batch_stride)
    )
    query_atom, query_tensor = tma_boxes(cute.make_tensor(queries.values, query_layout), TILE, facts.width)
    block_attention_kernel(
        tma_atom, tma_tensor, query_atom, query_tensor, queries, requests, work, scale, facts
    ).launch(grid=(facts.ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True)  # fmt: skip
    threads = (facts.warps * WARP, 1, 1)
    if cutlass.const_expr(facts.merged and facts.many and facts.value_width):
        merge_heads_kernel(requests, work, matrices, out, facts).launch(
            grid=(requests.batch, facts.heads, -(-facts.rows // facts.group_rows)),
            block=threads,
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )
    elif cutlass.const_expr(facts.merged and facts.value_width):
        merge_values_kernel(requests, work, matrices, out, facts).launch(
            grid=(requests.batch * facts.slices, facts.heads, -(-facts.rows // facts.group_rows)),
            block=threads,
            cluster=(facts.slices, 1, 1),
            min_blocks_per_mp=2 if facts.paired else 1,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=True,
        )
    elif cutlass.const_expr(facts.merged and facts.many):
        merge_by_warps_kernel(requests, work, out, facts).launch(
            grid=(requests.batch * facts.row_tiles, 4 * splits_of(requests.batch, facts), 1),
            block=threads,
            min_blocks_per_mp=1 if facts.spread else 2,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=True,
        )
    elif cutlass.const_expr(facts.merged):
        merge_kernel(requests, work, out, facts).launch(
            grid=(requests.batch * facts.row_tiles, facts.vectors * CONSUMERS // WARP, 1),
            block=threads,
            min_blocks_per_mp=2 if facts.warps == 16 and not facts.one_request else 0,  # 0: as many as have room
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=True,
        )


TENSORS = (
    "queries", "latents", "page_table", "slots", "context_lens", "seq_lens", "parts", "statistics", "value_weights", "out",
)  # fmt: skip


def _arguments(
    facts: Facts, addresses: dict[str, int], query_strides, pool, table_stride, matrix_strides, batch, window, scale
) -> tuple:
    """In `_launch`'s order, up to the stream.

    addresses: by tensor; pool: strides between pages and between tokens, number of pages; matrix_strides: of value_weights.
    """
    element, wide = ELEMENTS[facts.dtype], cutlass.Int64
    types = {"page_table": (cutlass.Int32, 4), "context_lens": (wide, 8), "seq_lens": (wide, 8)}
    types["slots"] = (wide, 8)
    types |= {name: (element, 16) for name in ("queries", "latents", "out")}
    types["value_weights"] = (element, 16 if facts.value_chunks else 2)
    types |= {"parts": (PART, 16), "statistics": (cutlass.Float32, 16)}
    at = {
        name: make_ptr(kind, addresses[name], cute.AddressSpace.gmem, assumed_align=align)
        for name, (kind, align) in types.items()
    }
    page_stride, token_stride, pages = pool
    return (
        Queries(at["queries"], *map(wide, query_strides)),
        Latents(at["latents"], wide(page_stride), wide(token_stride), cutlass.Int32(pages)),
        Requests(
            at["page_table"],
            wide(table_stride),
            at["slots"],
            at["context_lens"],
            at["seq_lens"],
            cutlass.Int32(batch),
            cutlass.Int32(window),
        ),
        Workspace(at["parts"], at["statistics"]),
        Matrices(at["value_weights"], *map(wide, matrix_strides)),
        at["out"],
        cutlass.Float32(scale),
    )


def _entry(facts: Facts) -> tuple:
    """`_launch` and stand-ins of its arguments."""
    arguments = _arguments(facts, dict.fromkeys(TENSORS, 16), (8, 8, 8), (8, 8, 1), 1, (8, 8, 8), 1, NO_WINDOW, 1.0)
    return _launch, (*arguments, make_fake_stream(), facts)


def compile_block_attention(facts: Facts, architecture: str):
    """Both kernels for these facts; from the cache after the first time."""
    return compile_once(_entry, facts, architecture)


def _group_rows(batch: int, heads: int) -> int:
    """Block rows that a cluster, or a CTA, takes: few for one request, which then has all processors (16 clusters of 8 for
    K3's 7 rows of 8 heads); else many, as each reads the whole of a head's matrix."""
    return 4 if batch == 1 and heads <= 8 else 8


def unit_rows(batch: int, rows: int) -> int:
    """Block rows of a unit where `between_attentions` merges: few, so that there are units for all CTAs, up to 16 rows; the
    bits are the same."""
    return 8 if batch * rows > 16 and rows > 4 else 4


@dataclass(frozen=True)
class AttentionCall:
    """A launch: what its build depends on, what it is given, and the tensors that this names."""

    facts: Facts
    arguments: tuple
    tensors: dict[str, torch.Tensor]

    @property
    def merged_facts(self) -> Facts:
        """What a merge's build depends on."""
        return replace(self.facts, early=False, late_rows=0)

    @property
    def merge_arguments(self) -> tuple[Requests, Workspace, Matrices]:
        """What a merge needs of the launch's arguments."""
        _, _, requests, work, matrices, *_ = self.arguments
        return requests, work, matrices


@cache
def stand_in_merge_arguments() -> tuple[Requests, Workspace, Matrices]:
    """`AttentionCall.merge_arguments` for a build, or a launch, that does not look at them."""
    facts = Facts(torch.bfloat16, 128, 192, 1, 1, 8, False, 1)
    _, arguments = _entry(facts)
    _, _, requests, work, matrices, *_ = arguments
    return requests, work, matrices


def _call(
    queries, latents, page_table, context_lens, seq_lens, *, kv_lora_rank: int, softmax_scale: float, causal: bool = False,
    window: int | None = None, slots=None, value_weights=None, many: bool | None = None, **form,
) -> AttentionCall:  # fmt: skip
    """A launch that is ready, `block_attention`'s arguments checked; form: of `Facts`, instead of what is chosen here."""
    check_call(queries, latents, page_table, context_lens, seq_lens, slots, kv_lora_rank, softmax_scale)
    if value_weights is not None:
        check_values(value_weights, queries, kv_lora_rank)
    batch, rows, heads, width = queries.shape
    pages, page_size, _ = latents.shape
    device = queries.device
    architecture = build_architecture(torch.cuda.get_device_capability(device))
    if architecture != ARCHITECTURE:
        raise ValueError(
            f"block_attention=cute is built for {ARCHITECTURE}, and this device takes {architecture}; choose triton"
        )
    batch_stride, row_stride, head_stride = queries.stride()[:3]
    if heads == 1:
        head_stride = row_stride
    if value_weights is not None:
        form = {
            "value_width": value_weights.shape[2], "group_rows": _group_rows(batch, heads),
            "value_chunks": in_chunks(value_weights), **form,
        }  # fmt: skip
    ctas = torch.cuda.get_device_properties(device).multi_processor_count
    facts = Facts(
        queries.dtype, kv_lora_rank, width, rows, heads, page_size, causal, ctas, slotted=slots is not None,
        fetch_queries=rows == 1 or row_stride == heads * head_stride, one_request=batch == 1, **form,
    )  # fmt: skip
    if many is None:
        many = suits_whole_heads(batch, facts) if facts.value_width else suits_warps(batch, facts)
    if many and facts.merged:
        facts = replace(facts, many=True, group_rows=8, spread=not facts.value_width and are_spread(batch, facts))
    out = queries  # of a launch that does not merge there is none
    if facts.merged:
        out = torch.empty(batch, rows, heads, facts.value_width or kv_lora_rank, dtype=queries.dtype, device=device)
    places = ctas + batch * facts.row_tiles
    parts = torch.empty(places, TILE, kv_lora_rank, dtype=torch.float16, device=device)
    statistics = torch.empty(places, 2, TILE, 2, dtype=torch.float32, device=device)
    matrices = out if value_weights is None else value_weights
    given = (
        queries, latents, page_table, seq_lens if slots is None else slots, context_lens, seq_lens, parts, statistics,
        matrices, out,
    )  # fmt: skip
    tensors = dict(zip(TENSORS, given, strict=True))
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    strides, pool = (batch_stride, row_stride, head_stride), (*latents.stride()[:2], pages)
    seen, scale = NO_WINDOW if window is None else window, softmax_scale * LOG2_E
    arguments = _arguments(facts, addresses, strides, pool, page_table.stride(0), matrices.stride()[:3], batch, seen, scale)
    return AttentionCall(facts, arguments, tensors)


def _launch_now(call: AttentionCall) -> None:
    """On the device's current stream."""
    device = call.tensors["queries"].device
    with torch.cuda.device(device):
        stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
        compile_block_attention(call.facts, ARCHITECTURE)(*call.arguments, stream)


def block_attention(
    queries: torch.Tensor,
    latents: torch.Tensor,
    page_table: torch.Tensor,
    context_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_lora_rank: int,
    softmax_scale: float,
    causal: bool = False,
    window: int | None = None,
    slots: torch.Tensor | None = None,
    value_weights: torch.Tensor | None = None,
    two_tiles: bool | None = None,
    halves: bool = True,
    many: bool | None = None,
) -> torch.Tensor:
    """Two launches on the device's current stream, under a CUDA graph too; the lengths are read on the device only.

    queries: [B, N, heads, D], bfloat16 or float16; latents: [pages, page_size, D] of the same dtype; page_table: int32 [S, P];
    context_lens, seq_lens: int64 [B]; rows at or past seq_lens[b], and below context_lens[b] - window, have no influence.
    slots: int64 [B], the table's row of each request; None: request b has row b.  Those of requests without keys are not read,
    so they may be -1.
    value_weights: [heads, kv_lora_rank, v_head_dim] of the same dtype, any strides; with values of a column side by side, at
    multiples of 16 bytes, they are read 16 bytes at once.
    two_tiles: for benchmarks, which of the two schedules; None: by the shape (`Facts.seesaw`).
    halves: for tests, whether two CTAs may share a tile (`Facts.halves`).
    many: for tests, whether the merge is the one for many requests or rows (`Facts.many`); None: as their number suggests.
    Returns [B, N, heads, kv_lora_rank]; with value_weights the product of it, rounded, with each head's, [B, N, heads,
    v_head_dim].

    Raises:
        ValueError: there is no build for the device, the dtype or the shape, or a stride does not suit 16-byte accesses.
    """
    call = _call(
        queries, latents, page_table, context_lens, seq_lens, kv_lora_rank=kv_lora_rank, softmax_scale=softmax_scale,
        causal=causal, window=window, slots=slots, value_weights=value_weights, two_tiles=two_tiles, halves=halves,
        many=many,
    )  # fmt: skip
    if call.tensors["out"].numel():
        _launch_now(call)
    return call.tensors["out"]


def unmerged_attention(
    queries: torch.Tensor, latents: torch.Tensor, page_table: torch.Tensor, context_lens: torch.Tensor, seq_lens: torch.Tensor,
    *, early: bool, late_rows: int, **options,
) -> AttentionCall:  # fmt: skip
    """The first of `block_attention`'s launches, with value_weights, for `between_attentions` to merge; B, N and heads >= 1;
    early, late_rows: see `Facts`.

    Raises:
        ValueError: as `block_attention`.
    """
    form = {
        "merged": False, "merging_warps": MERGING_WARPS, "group_rows": unit_rows(*queries.shape[:2]),
        "early": early, "late_rows": late_rows,
    }  # fmt: skip
    call = _call(queries, latents, page_table, context_lens, seq_lens, **options, **form)
    _launch_now(call)
    return call
