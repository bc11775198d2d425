"""The block's input rows from the anchors' embeddings and the mask row, in one launch."""

import triton
import triton.language as tl


@triton.jit
def noise_block_kernel(
    anchors_ptr,  # [B] int64
    table_ptr,  # [V, H], rows of tokens vocab_start .. vocab_start + V - 1
    table_stride,
    mask_ptr,  # [H]
    block_ptr,  # [B, N, H]
    rows,
    width,
    vocab_start,
    vocab_size,
    mask_here,  # 1 where this shard writes the mask row, else 0
    BLOCK: tl.constexpr,
):
    request = (tl.program_id(0) // rows).to(tl.int64)
    row = tl.program_id(0) % rows
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    out = block_ptr + tl.program_id(0).to(tl.int64) * width + at
    if row == 0:
        token = tl.load(anchors_ptr + request) - vocab_start
        here = (token >= 0) & (token < vocab_size)
        limit = tl.where(here, width, 0)
        values = tl.load(table_ptr + token * table_stride + at, mask=at < limit, other=0.0)
    else:
        values = tl.load(mask_ptr + at, mask=at < width * mask_here, other=0.0)
    tl.store(out, values, mask=inside)
