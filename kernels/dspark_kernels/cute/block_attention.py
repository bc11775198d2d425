"""Absorbed MLA attention of one block over paged context, for Hopper: what a build depends on, the launch, and what it refuses.

Two kernels.  In the first (`block_attention_device`) each CTA takes an equal part of all key tiles and writes what it has of
each request and tile of query rows to a workspace; the second (`block_attention_merge`) adds these parts up.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_ptr

from dspark_kernels.cute.block_attention_device import block_attention_kernel
from dspark_kernels.cute.block_attention_facts import Facts
from dspark_kernels.cute.block_attention_fetch import SWIZZLE
from dspark_kernels.cute.block_attention_merge import merge_kernel
from dspark_kernels.cute.block_attention_schedule import (
    CHUNK,
    CONSUMERS,
    ELEMENTS,
    KEYS,
    PART,
    TILE,
    WARP,
    Latents,
    Queries,
    Requests,
    Workspace,
)
from dspark_kernels.cute.block_attention_values import Matrices, merge_values_kernel
from dspark_kernels.cute.builds import build_architecture
from dspark_kernels.cute.compile import compile_once

THREADS = CONSUMERS + 128  # and one warpgroup for the fetching warp: registers move between whole warpgroups
NO_WINDOW = 2**31 - 1
LATENT_STEP = 128  # of the values of a value row
MOST_WIDTH = 576  # of a key row: a query tile and the stages fill the shared memory
LOG2_E = 1.4426950408889634


@cute.jit
def _tma(tensor, rows: cutlass.Constexpr, columns: cutlass.Constexpr):
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
    dtype = ELEMENTS[facts.dtype]
    blocks = facts.width // SWIZZLE
    wide_strides = (latents.token_stride, latents.page_stride, queries.head_stride, queries.batch_stride)
    token_stride, page_stride, head_stride, batch_stride = (cute.assume(stride, divby=CHUNK) for stride in wide_strides)
    pool_layout = cute.make_layout(
        (facts.page_size, (SWIZZLE, blocks), latents.pages), stride=(token_stride, (1, SWIZZLE), page_stride)
    )
    tma_atom, tma_tensor = _tma(cute.make_tensor(latents.values, pool_layout), facts.box, facts.box_columns)
    query_layout = cute.make_layout(
        (facts.queries, (SWIZZLE, blocks), requests.batch), stride=(head_stride, (1, SWIZZLE), batch_stride)
    )
    query_atom, query_tensor = _tma(cute.make_tensor(queries.values, query_layout), TILE, facts.width)
    score_mma, value_mma = (
        cute.make_tiled_mma(
            cute.make_mma_atom(
                warpgroup.MmaF16BF16Op(
                    dtype, cutlass.Float32, (TILE, columns, 16), warpgroup.OperandSource.SMEM, OperandMajorMode.K, major
                )
            ),
            (1, 2, 1),
        )
        for columns, major in ((KEYS // 2, OperandMajorMode.K), (facts.latent // 2, OperandMajorMode.MN))
    )
    block_attention_kernel(
        tma_atom, tma_tensor, query_atom, query_tensor, score_mma, score_mma, value_mma, queries, requests, work, scale, facts
    ).launch(grid=(facts.ctas, 1, 1), block=(THREADS, 1, 1), stream=stream)
    threads = (facts.merge_warps * WARP, 1, 1)
    if cutlass.const_expr(facts.value_width):
        merge_values_kernel(requests, work, matrices, out, facts).launch(
            grid=(requests.batch * facts.slices, facts.heads, -(-facts.rows // facts.group_rows)),
            block=threads,
            cluster=(facts.slices, 1, 1),
            min_blocks_per_mp=2 if facts.paired else 1,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=True,
        )
    else:
        merge_kernel(requests, work, out, facts).launch(
            grid=(requests.batch * facts.row_tiles, facts.vectors * CONSUMERS // WARP, 1),
            block=threads,
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
) -> torch.Tensor:
    """Two launches on the device's current stream, under a CUDA graph too; the lengths are read on the device only.

    queries: [B, N, heads, D], bfloat16 or float16; latents: [pages, page_size, D] of the same dtype; page_table: int32 [S, P];
    context_lens, seq_lens: int64 [B]; rows at or past seq_lens[b], and below context_lens[b] - window, have no influence.
    slots: int64 [B], the table's row of each request; None: request b has row b.  Those of requests without keys are not read,
    so they may be -1.
    Returns [B, N, heads, kv_lora_rank].

    Raises:
        ValueError: there is no build for the device, the dtype or the shape, or a stride does not suit 16-byte accesses.
    """
    _check(queries, latents, page_table, context_lens, seq_lens, slots, kv_lora_rank, softmax_scale)
    batch, rows, heads, width = queries.shape
    pages, page_size, _ = latents.shape
    device = queries.device
    architecture = build_architecture(torch.cuda.get_device_capability(device))
    if architecture != "sm_90a":
        raise ValueError(f"block_attention=cute is built for sm_90a, and this device takes {architecture}; choose triton")
    batch_stride, row_stride, head_stride = queries.stride()[:3]
    if heads == 1:
        head_stride = row_stride
    one_stride = rows == 1 or row_stride == heads * head_stride
    ctas = torch.cuda.get_device_properties(device).multi_processor_count
    facts = Facts(
        queries.dtype, kv_lora_rank, width, rows, heads, page_size, causal, ctas, slotted=slots is not None,
        fetch_queries=one_stride,
    )  # fmt: skip
    out = torch.empty(batch, rows, heads, kv_lora_rank, dtype=queries.dtype, device=device)
    if not out.numel():
        return out
    places = ctas + batch * facts.row_tiles
    parts = torch.empty(places, TILE, kv_lora_rank, dtype=torch.float16, device=device)
    statistics = torch.empty(places, 2, TILE, 2, dtype=torch.float32, device=device)
    tensors = (
        queries, latents, page_table, seq_lens if slots is None else slots, context_lens, seq_lens, parts, statistics, out,
    )  # fmt: skip
    addresses = dict(zip(TENSORS, (tensor.data_ptr() for tensor in tensors), strict=True))
    strides, pool = (batch_stride, row_stride, head_stride), (*latents.stride()[:2], pages)
    seen, scale = NO_WINDOW if window is None else window, softmax_scale * LOG2_E
    with torch.cuda.device(device):
        stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
        arguments = _arguments(facts, addresses, strides, pool, page_table.stride(0), batch, seen, scale)
        compile_block_attention(facts, architecture)(*arguments, stream)
    return out


def _check(queries, latents, page_table, context_lens, seq_lens, slots, latent: int, softmax_scale: float) -> None:
    """What `block_attention` refuses."""
    width, page_size = queries.shape[3], latents.shape[1]
    if queries.dtype not in ELEMENTS or latents.dtype != queries.dtype:
        raise ValueError(
            f"block_attention=cute takes queries and latents of one dtype, {' or '.join(map(str, ELEMENTS))}, "
            f"not {queries.dtype} and {latents.dtype}; choose triton or torch"
        )
    if latent % LATENT_STEP or not 0 < latent <= 512 or width % SWIZZLE or not latent <= width <= MOST_WIDTH:
        raise ValueError(
            f"block_attention=cute takes kv_lora_rank up to 512 in steps of {LATENT_STEP} and key rows up to {MOST_WIDTH} in "
            f"steps of {SWIZZLE}, not {latent} and {width}; choose triton or torch"
        )
    if page_size % 8:
        raise ValueError(f"block_attention=cute takes pages of a multiple of 8 tokens, not {page_size}; choose triton or torch")
    for name, tensor in (("queries", queries), ("latents", latents)):
        if tensor.data_ptr() % 16 or tensor.stride(-1) != 1 or any(stride % CHUNK for stride in tensor.stride()[:-1]):
            raise ValueError(
                f"block_attention=cute reads 16 bytes at once: {name} must start at a multiple of 16 bytes, with stride 1 in "
                f"the last dimension and multiples of {CHUNK} in the others; got {tensor.stride()} at {tensor.data_ptr():#x}"
            )
    if page_table.dtype != torch.int32 or page_table.stride(-1) != 1:
        raise ValueError(f"page_table must be int32 with stride 1 in a row, not {page_table.dtype}, {page_table.stride()}")
    for name, lens in (("context_lens", context_lens), ("seq_lens", seq_lens)):
        if lens.dtype != torch.int64 or lens.dim() != 1 or not lens.is_contiguous():
            raise ValueError(f"{name} must be int64 values side by side, not {lens.dtype}, {lens.stride()}")
    if slots is not None and (slots.dtype != torch.int64 or slots.shape != seq_lens.shape or not slots.is_contiguous()):
        raise ValueError(
            f"slots must be int64 values side by side, one a request, {tuple(seq_lens.shape)}; got {slots.dtype} "
            f"{tuple(slots.shape)}, {slots.stride()} apart"
        )
    if not softmax_scale > 0:
        raise ValueError(f"softmax_scale={softmax_scale}: must be positive")
