"""What the block attention for Hopper refuses."""

import torch

from dspark_kernels.cute.block_attention_fetch import SWIZZLE
from dspark_kernels.cute.block_attention_schedule import CHUNK, ELEMENTS

LATENT_STEP = 128  # of the values of a value row
MOST_WIDTH = 576  # of a key row: a query tile and the stages fill the shared memory
VALUE_LATENTS = (128, 256, 512)  # a cluster has a CTA for each 64
MOST_VALUE_WIDTH = 512  # of a matrix: what a CTA has of it lies in its shared memory


def check_call(queries, latents, page_table, context_lens, seq_lens, slots, latent: int, softmax_scale: float) -> None:
    """Raises ValueError for what the attention does not take."""
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


def values_refusal(dtype: torch.dtype, latent: int, value_width: int) -> str | None:
    """Why the merge does not multiply by matrices of this dtype and these sizes; None where it does."""
    if dtype not in ELEMENTS:
        return f"the merge multiplies by {' or '.join(map(str, ELEMENTS))}, not {dtype}"
    if latent not in VALUE_LATENTS:
        return f"the merge multiplies rows of {', '.join(map(str, VALUE_LATENTS))} latents, not {latent}"
    if value_width % CHUNK or not 0 < value_width <= MOST_VALUE_WIDTH:
        return f"the merge multiplies by up to {MOST_VALUE_WIDTH} columns in steps of {CHUNK}, not {value_width}"
    return None


def check_values(value_weights: torch.Tensor, queries: torch.Tensor, latent: int) -> None:
    """Raises ValueError for matrices that the merge does not take."""
    heads = queries.shape[2]
    if value_weights.dtype != queries.dtype or value_weights.device != queries.device:
        raise ValueError(
            f"value_weights are {value_weights.dtype} on {value_weights.device}; wanted the queries' {queries.dtype} on "
            f"{queries.device}"
        )
    if value_weights.dim() != 3 or value_weights.shape[:2] != (heads, latent):
        raise ValueError(f"value_weights have shape {tuple(value_weights.shape)}; wanted ({heads}, {latent}, v_head_dim)")
    reason = values_refusal(value_weights.dtype, latent, value_weights.shape[2])
    if reason is not None:
        raise ValueError(f"block_attention=cute: {reason}; multiply in a launch of its own")


def in_chunks(value_weights: torch.Tensor) -> bool:
    """Whether the values of each column lie side by side, from multiples of 16 bytes on."""
    head_stride, row_stride, column_stride = value_weights.stride()
    aligned = value_weights.data_ptr() % 16 == 0 and head_stride % CHUNK == 0 and column_stride % CHUNK == 0
    return row_stride == 1 and aligned
