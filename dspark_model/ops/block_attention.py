"""Absorbed MLA attention of one block over paged context and the block itself."""

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dspark_model.ops.alignment import in_steps_of_16_bytes
from dspark_model.ops.cute_device import cute_device_refusal
from dspark_model.ops.fp8_rows import FP8, check_pool_row_width, dequantise_rows
from dspark_model.ops.per_head_product import per_head_product

if TYPE_CHECKING:
    from dspark_kernels.cute.block_attention import AttentionCall

BACKENDS = ("torch", "triton", "cute", "causal_fixup", "flashinfer")
_TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_16_BIT_DTYPES = (torch.bfloat16, torch.float16)


def block_attention_refusal(
    backend: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    kv_lora_rank: int,
    width: int,
    page_size: int,
    heads: int,
    causal: bool = False,
    window: int | None = None,
    captured: bool = False,
    fp8_pool: bool = False,
) -> str | None:
    """Why `block_attention` with this backend does not take such calls; None where it does.

    dtype: of queries and latents; width: values of a latent row; captured: the call becomes part of a CUDA graph; fp8_pool: the
    latents are rows of an fp8 pool, and dtype is that of the queries.
    """
    if backend not in BACKENDS:
        return f"block_attention has no backend {backend!r}; choose one of {', '.join(BACKENDS)}"
    if min(page_size, heads) < 1:
        return f"attention needs pages and heads of at least 1, got page_size={page_size} and {heads} heads"
    if not 0 < kv_lora_rank < width:
        return f"attention reads a rotary part behind the value, got rows of {width} values with kv_lora_rank={kv_lora_rank}"
    if backend == "torch":
        return None
    if causal and backend not in ("triton", "cute"):
        return f"{backend} attends to the whole block, and this block is causal; cute, triton and torch take both"
    if fp8_pool and backend != "triton":
        return f"{backend} does not read fp8 pools; triton and torch do"
    if backend == "cute":
        return _cute_refusal(device, dtype, kv_lora_rank, width, page_size)
    if backend == "flashinfer":
        return _flashinfer_refusal(device, dtype, kv_lora_rank, width, window, captured)
    return _triton_refusal(device, dtype, backend, fp8_pool)


def _triton_refusal(device: torch.device, dtype: torch.dtype, backend: str, fp8_pool: bool) -> str | None:
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec("dspark_kernels") is None:
        return f"{backend} needs the packages triton and dspark_kernels, and one of them is not installed"
    from triton import knobs

    if device.type not in (("cuda", "cpu") if knobs.runtime.interpret else ("cuda",)):
        return f"{backend} runs on CUDA devices, got {device}"
    least = (8, 9) if fp8_pool else (8, 0)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < least:
        found = torch.cuda.get_device_capability(device)
        return (
            f"{backend} needs a device of capability {least[0]}.{least[1]} or later{' for fp8 pools' * fp8_pool}, got {found}"
        )
    if dtype not in _TRITON_DTYPES:
        return f"{backend} takes queries and latents of bfloat16, float16 or float32, got {dtype}"
    # A weight times the scale would leave float16's range.
    if fp8_pool and dtype is torch.float16:
        return f"{backend} takes queries of bfloat16 or float32 with fp8 pools, got {dtype}"
    return None


def _cute_refusal(device: torch.device, dtype: torch.dtype, kv_lora_rank: int, width: int, page_size: int) -> str | None:
    reason = cute_device_refusal("cute", device, hopper_only=True)
    if reason is not None:
        return reason
    if dtype not in _16_BIT_DTYPES:
        return f"cute takes queries and latents of bfloat16 or float16, got {dtype}"
    if kv_lora_rank % 128 or kv_lora_rank > 512 or width % 64 or width > 576:
        return (
            "cute takes latents of up to 512 + 64 values, the value in steps of 128 and the row in steps of 64, got "
            f"{kv_lora_rank} + {width - kv_lora_rank}"
        )
    if page_size % 8:
        return f"cute takes pages of a multiple of 8 tokens, got {page_size}"
    return None


def _flashinfer_refusal(device: torch.device, dtype: torch.dtype, kv_lora_rank: int, width: int, window, captured: bool):
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer needs the package flashinfer, and it is not installed"
    if captured:
        return "flashinfer plans each call from lengths on the host, so no captured step can hold it; run the step eagerly"
    if dtype not in _16_BIT_DTYPES:
        return f"flashinfer takes queries and latents of bfloat16 or float16, got {dtype}"
    if (kv_lora_rank, width) != (512, 576):
        return f"flashinfer's MLA takes latents of 512 + 64 values, got {kv_lora_rank} + {width - kv_lora_rank}"
    if window is not None:
        return f"flashinfer's MLA has no window over the context, got window={window}"
    if device.type != "cuda":
        return f"flashinfer runs on CUDA devices, got {device}"
    return None


def block_attention(
    queries: torch.Tensor,
    latents: torch.Tensor,
    page_table: torch.Tensor,
    context_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_lora_rank: int,
    softmax_scale: float,
    max_seq_len: int,
    causal: bool = False,
    window: int | None = None,
    slots: torch.Tensor | None = None,
    value_weights: torch.Tensor | None = None,
    backend: str = "torch",
) -> torch.Tensor:
    """softmax(scale * q . k) v over one shared latent: keys are whole latent rows, values their first kv_lora_rank values
    (multi-head latent attention with W_UK absorbed into the query, DeepSeek-V2, arXiv 2405.04434).

    queries: [B, N, heads, D], N block rows, the absorbed part then the rotary part.
    latents: [pages, page_size, D], one layer of the pool; the block's own rows are there already, behind the context.  An fp8
        pool has rows of another width, and the keys are `dequantise_rows` of them.
    page_table: int32 [S, P]; context_lens: int64 [B]; seq_lens: int64 [B], keys of each request: context and block.
        Rows at or past seq_lens[b] and entries of pages that hold no key are never used, even if NaN or no page.
    slots: int64 [B], the table's row of each request; None: request b has row b.  A slot of -1 stands for a request with
        seq_lens[b] = 0; no row is looked up for it.
    max_seq_len: host number that is at least every seq_lens[b]; bounds what is gathered.
    causal: row j of the block sees the block rows up to itself only; all rows see the whole context.
    window: W >= 1: no row sees a context row with an index below context_lens[b] - W; such rows and their pages are never used
        either.  None: all rows see the whole context.
    value_weights: W_UV, [heads, kv_lora_rank, v_head_dim] in queries' dtype, any strides with one of the last two being 1: the
        result is `per_head_product` of the attention, rounded, with these.  `cute` multiplies in the launch that merges, if
        kv_lora_rank is 128, 256 or 512, and v_head_dim a multiple of 8 up to 512; a launch of its own, by Triton with the
        kernels and by torch else, does it for other sizes and backends.
    backend: `torch`;
        `triton`: reads each key once a 64 query rows, gathers nothing, never waits for the device, and rounds the weights to
            the queries' dtype before the product with the values.  From an fp8 pool of rows at multiples of 16 bytes it gives
            the bits that it gives for a pool of the queries' dtype with the same keys;
        `cute`: the same for Hopper, in CuTe DSL;
        `causal_fixup`: the Triton kernel run causally, then the block's strict upper triangle in torch, merged by log-sum-exp:
            what an engine does whose paged kernel is causal only.  It rounds the causal part once more;
        `flashinfer`: FlashInfer's paged MLA; waits for the device to plan from the lengths, so it cannot be captured.
        `block_attention_refusal` says in advance what a backend does not take.

    Bits: with `triton`, `cute` and `causal_fixup` they are the same in every run.  They depend on the device's type, the
    dtypes, the shape of a request's queries, kv_lora_rank, softmax_scale, causal, window, whether rows lie at multiples of 16
    bytes, and on the requests that have keys, in their order: their queries, keys and lengths.  They depend neither on requests
    without keys, nor on the size of the batch with these, nor on max_seq_len, the page size, the pages' places or the pool's
    layout.  Another request with keys may move the places where a long context is divided, and so the last bit.  A product with
    value_weights in the merge's launch keeps all of this; one in a launch of its own has the bits of `per_head_product`.
    Returns [B, N, heads, kv_lora_rank] in queries' dtype; float32 inside, one rounding.  A request with no key gives 0.  With
        value_weights [B, N, heads, v_head_dim], contiguous, rounded once more.

    Raises:
        ValueError: the window is below 1, `block_attention_refusal` gives a reason, value_weights do not fit the queries, or a
            kernel cannot take the strides, widths or dtypes of the tensors.
    """
    _check_served(backend, queries, latents, kv_lora_rank, causal, window)
    options = {
        "kv_lora_rank": kv_lora_rank, "softmax_scale": softmax_scale, "max_seq_len": max_seq_len, "causal": causal,
        "window": window, "slots": slots,
    }  # fmt: skip
    if value_weights is not None:
        _check_value_weights(value_weights, queries, kv_lora_rank)
        if backend == "cute" and _cute_multiplies(value_weights):
            return _cute(queries, latents, page_table, context_lens, seq_lens, value_weights=value_weights, **options)
        attended = block_attention(queries, latents, page_table, context_lens, seq_lens, backend=backend, **options)
        shape = (*attended.shape[:-1], value_weights.shape[2])
        values = torch.empty(shape, dtype=attended.dtype, device=attended.device)
        by_kernel = backend in ("triton", "cute", "causal_fixup")
        per_head_product(attended, value_weights, out=values, backend="triton" if by_kernel else "torch")
        return values
    if backend != "torch":
        return _BACKENDS[backend](queries, latents, page_table, context_lens, seq_lens, **options)
    if slots is not None:
        page_table = page_table[slots.clamp(min=0)]  # what a slot of -1 gets has no key
    batch, rows, heads, width = queries.shape
    page_size = latents.shape[1]
    num_pages = -(-max_seq_len // page_size)
    pages = page_table[:, :num_pages].long()
    index = torch.arange(pages.shape[1] * page_size, device=queries.device)
    used = index < seq_lens[:, None]
    if window is not None:
        used = used & (index >= context_lens[:, None] - window)
    held = used.view(batch, pages.shape[1], page_size).any(-1)
    pages = torch.where(held, pages, 0)
    keys = latents[pages].flatten(1, 2)
    keys = dequantise_rows(keys, width) if latents.dtype is FP8 else keys.float()
    keys = torch.where(used[..., None], keys, 0.0)
    visible = used[:, None, :].expand(batch, rows, -1)
    if causal:
        last_seen = context_lens[:, None] + torch.arange(rows, device=queries.device)
        visible = visible & (index <= last_seen[..., None])
    visible = visible.repeat_interleave(heads, dim=1)
    flat = queries.reshape(batch, rows * heads, width).float()
    scores = (flat @ keys.transpose(1, 2)) * softmax_scale
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
    weights = torch.where(visible.any(-1, keepdim=True), weights, 0.0)
    out = weights @ keys[..., :kv_lora_rank]
    return out.reshape(batch, rows, heads, kv_lora_rank).to(queries.dtype)


@dataclass(frozen=True, slots=True)
class AttentionParts:
    """An attention of the backend `cute` that has not been merged: what `between_attentions` takes instead of its values.

    shape, dtype, device: of the values, [B * N, heads * v_head_dim].
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    unmerged: "AttentionCall"


def attention_parts_refusal(
    *, device: torch.device, rows: int, heads: int, kv_lora_rank: int, v_head_dim: int, dtype: torch.dtype
) -> str | None:
    """Why `attention_parts` does not take blocks of so many rows; None where it does, if `block_attention` takes `cute`."""
    reason = cute_device_refusal("it", device, hopper_only=True)
    if reason is not None:
        return reason
    from dspark_kernels.cute.between_attentions_values import merge_refusal

    return merge_refusal(dtype, rows, heads, kv_lora_rank, v_head_dim)


def attention_parts(
    queries: torch.Tensor,
    latents: torch.Tensor,
    page_table: torch.Tensor,
    context_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_lora_rank: int,
    softmax_scale: float,
    value_weights: torch.Tensor,
    causal: bool = False,
    window: int | None = None,
    slots: torch.Tensor | None = None,
    early: bool = False,
    late_rows: int = 0,
) -> AttentionParts:
    """`block_attention` with value_weights and the backend `cute`, without its second launch: `between_attentions` merges, and
    makes the same bits.  It reads context_lens, seq_lens and value_weights again, on the same stream: they must not be written
    before it is launched.

    value_weights: values of a column side by side, at multiples of 16 bytes.
    early: the launch begins where multiprocessors are free while the kernel before it on the stream still runs, if that one
        allows it (programmatic dependent launch), and fetches keys until it has ended.  Only `queries`, and rows of latents at
        or past context_lens[b] - late_rows, may be what that kernel makes: all else must have been complete when it let this
        one begin.

    Raises:
        ValueError: as `block_attention`, or `attention_parts_refusal` gives a reason, or value_weights lie otherwise.
    """
    _check_served("cute", queries, latents, kv_lora_rank, causal, window)
    _check_value_weights(value_weights, queries, kv_lora_rank)
    batch, rows, heads, _ = queries.shape
    v_head_dim = value_weights.shape[2]
    reason = attention_parts_refusal(
        device=queries.device, rows=rows, heads=heads, kv_lora_rank=kv_lora_rank, v_head_dim=v_head_dim, dtype=queries.dtype
    )
    if reason is None and min(batch, rows) < 1:
        reason = f"it takes at least one row, got {batch} requests of {rows}"
    if reason is not None:
        raise ValueError(f"attention_parts: {reason}; choose block_attention")
    from dspark_kernels.cute.block_attention import unmerged_attention
    from dspark_kernels.cute.block_attention_checks import in_chunks

    if not in_chunks(value_weights):
        raise ValueError(
            "attention_parts: it takes value_weights with the values of a column side by side, at multiples of 16 bytes, got "
            f"strides {value_weights.stride()}; choose block_attention"
        )
    unmerged = unmerged_attention(
        queries, latents, page_table, context_lens, seq_lens, kv_lora_rank=kv_lora_rank, softmax_scale=softmax_scale,
        causal=causal, window=window, slots=slots, value_weights=value_weights, early=early,
        late_rows=late_rows,
    )  # fmt: skip
    return AttentionParts((batch * rows, heads * v_head_dim), queries.dtype, queries.device, unmerged)


def _check_served(backend: str, queries, latents, kv_lora_rank: int, causal: bool, window: int | None) -> None:
    """Raises ValueError for a window of no row, and with the backend's refusal."""
    if window is not None and window < 1:
        raise ValueError(f"window={window}: a window over the context holds at least 1 row; pass None for no window")
    captured = queries.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    fp8_pool = latents.dtype is FP8
    rows = queries if fp8_pool else latents
    reason = block_attention_refusal(
        backend, device=queries.device, dtype=rows.dtype, kv_lora_rank=kv_lora_rank, width=rows.shape[-1],
        page_size=latents.shape[1], heads=queries.shape[2], causal=causal, window=window, captured=captured, fp8_pool=fp8_pool,
    )  # fmt: skip
    if reason is not None:
        raise ValueError(f"block_attention={backend}: {reason}")


def _check_value_weights(value_weights: torch.Tensor, queries: torch.Tensor, kv_lora_rank: int) -> None:
    """Raises ValueError for matrices that do not fit the queries."""
    heads = queries.shape[2]
    if value_weights.dim() != 3 or value_weights.shape[:2] != (heads, kv_lora_rank):
        raise ValueError(
            f"value_weights have shape {tuple(value_weights.shape)}, wanted ({heads}, {kv_lora_rank}, v_head_dim); transpose "
            "rows of kv_b_proj"
        )
    if value_weights.dtype is not queries.dtype or 1 not in value_weights.stride()[1:]:
        raise ValueError(
            f"value_weights are {value_weights.dtype} with strides {value_weights.stride()}; wanted the queries' "
            f"{queries.dtype}, and stride 1 in one of the last two dimensions"
        )


def _cute_multiplies(value_weights: torch.Tensor) -> bool:
    """Whether the CuTe merge multiplies by such matrices."""
    from dspark_kernels.cute.block_attention_checks import values_refusal

    return values_refusal(value_weights.dtype, *value_weights.shape[1:]) is None


def _triton(queries, latents, page_table, context_lens, seq_lens, *, kv_lora_rank: int, max_seq_len: int, lse=None, **options):
    from dspark_kernels.triton.block_attention import block_attention as launch
    from dspark_kernels.triton.block_attention import choose_tuning, hopper_kernel_takes

    _check_kernel_takes(queries, latents, page_table, context_lens, seq_lens, options["slots"])
    batch, block, heads, width = queries.shape
    if not queries.numel() or max_seq_len == 0:
        if lse is not None:
            lse.fill_(float("-inf"))
        return queries.new_zeros(batch, block, heads, kv_lora_rank)
    # The interpreter has neither processors, and 4 shares are enough to be merged, nor shared memory.
    by_hand, processors, shared_bytes = False, 4, 1 << 30
    if queries.device.type == "cuda":
        device = torch.cuda.get_device_properties(queries.device)
        processors, shared_bytes = device.multi_processor_count, device.shared_memory_per_block_optin
        by_hand = hopper_kernel_takes((device.major, device.minor), kv_lora_rank, width, latents.dtype)
        # It copies 16 bytes at a time.
        by_hand = by_hand and in_steps_of_16_bytes(queries) and in_steps_of_16_bytes(latents)
    return launch(
        queries,
        latents,
        page_table,
        context_lens,
        seq_lens,
        kv_lora_rank=kv_lora_rank,
        max_seq_len=max_seq_len,
        processors=processors,
        tuning=choose_tuning(block * heads, queries.dtype, by_hand=by_hand, shared_bytes=shared_bytes),
        lse=lse,
        **options,
    )


def _causal_fixup(queries, latents, page_table, context_lens, seq_lens, *, kv_lora_rank: int, causal: bool, **options):
    from dspark_model.ops.attention_fixup import add_upper_triangle

    lse = torch.empty(queries.shape[:3], dtype=torch.float32, device=queries.device)
    seen = _triton(
        queries, latents, page_table, context_lens, seq_lens, kv_lora_rank=kv_lora_rank, causal=True, lse=lse, **options
    )
    return add_upper_triangle(
        seen, lse, queries, latents, page_table, context_lens, seq_lens, softmax_scale=options["softmax_scale"],
        slots=options["slots"],
    )  # fmt: skip


def _flashinfer(queries, latents, page_table, context_lens, seq_lens, **options):
    from dspark_model.ops.attention_flashinfer import planned_attention

    _check_kernel_takes(queries, latents, page_table, context_lens, seq_lens, options["slots"])
    return planned_attention(
        queries, latents, page_table, seq_lens, kv_lora_rank=options["kv_lora_rank"], softmax_scale=options["softmax_scale"],
        slots=options["slots"],
    )  # fmt: skip


def _cute(queries, latents, page_table, context_lens, seq_lens, *, max_seq_len: int, **options):
    from dspark_kernels.cute.block_attention import block_attention as launch

    return launch(queries, latents, page_table, context_lens, seq_lens, **options)


_BACKENDS = {"triton": _triton, "cute": _cute, "causal_fixup": _causal_fixup, "flashinfer": _flashinfer}


def _check_kernel_takes(queries, latents, page_table, context_lens, seq_lens, slots) -> None:
    """Raises ValueError for tensors that the kernels do not know."""
    if latents.dtype is FP8:
        check_pool_row_width(latents, queries.shape[-1])
        if not in_steps_of_16_bytes(latents):
            raise ValueError(f"rows of the fp8 pool begin {latents.stride()} bytes apart; wanted multiples of 16 for all")
    elif queries.dtype is not latents.dtype:
        raise ValueError(f"queries are {queries.dtype} and latents {latents.dtype}; wanted one dtype for both")
    elif queries.shape[-1] != latents.shape[-1]:
        raise ValueError(
            f"queries have {queries.shape[-1]} values a row, latents {latents.shape[-1]}; wanted rows of equal width"
        )
    strides = (queries.stride(-1), latents.stride(-1), page_table.stride(-1))
    if any(stride != 1 for stride in strides):
        raise ValueError(f"queries, latents, page_table have values {strides} apart; wanted 1; make them contiguous")
    if page_table.dtype is not torch.int32 or not context_lens.is_contiguous() or not seq_lens.is_contiguous():
        raise ValueError(
            f"page_table is {page_table.dtype}, wanted torch.int32; context_lens and seq_lens lie {context_lens.stride()} and "
            f"{seq_lens.stride()} apart, wanted contiguous"
        )
    if slots is not None and (slots.dtype is not torch.int64 or not slots.is_contiguous() or slots.shape != seq_lens.shape):
        raise ValueError(
            f"slots are {slots.dtype} {tuple(slots.shape)}, {slots.stride()} apart; wanted contiguous torch.int64 "
            f"{tuple(seq_lens.shape)}"
        )
