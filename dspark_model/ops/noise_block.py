"""The block's input rows: the anchor's embedding, then the mask row."""

import torch


def noise_block(
    anchors: torch.Tensor,
    embed_tokens: torch.Tensor,
    mask_row: torch.Tensor,
    rows: int,
    *,
    vocab_start: int = 0,
    with_mask: bool = True,
    fused: bool = False,
) -> torch.Tensor:
    """Rows `[anchor, mask, ..., mask]` of each request.

    anchors: int64 [B]; embed_tokens: [V, H]; mask_row: [H], the mask token's embedding or a trained row.
    Returns [B, rows, H] in embed_tokens' dtype; a mask row of another dtype is rounded to it.
    vocab_start: for a table that holds tokens vocab_start .. vocab_start + V - 1 of a sharded vocabulary; an anchor outside
    gives a row of 0.  with_mask: False leaves the mask rows 0, for all shards but one.  The shards' blocks sum to the whole.
    fused: one Triton kernel, equal to the bit, for a mask row of the table's dtype and a table with contiguous rows.
    """
    if fused:
        return _fused(anchors, embed_tokens, mask_row, rows, vocab_start, with_mask)
    block = mask_row.to(embed_tokens.dtype).expand(anchors.shape[0], rows, -1).clone()
    if not with_mask:
        block.zero_()
    tokens = anchors - vocab_start
    here = (tokens >= 0) & (tokens < embed_tokens.shape[0])
    block[:, 0] = torch.where(here[:, None], embed_tokens[torch.where(here, tokens, 0)], 0)
    return block


def _fused(anchors, embed_tokens, mask_row, rows: int, vocab_start: int, with_mask: bool) -> torch.Tensor:
    import triton
    from dspark_kernels.triton.noise_block import noise_block_kernel

    batch, width = anchors.shape[0], embed_tokens.shape[1]
    block = torch.empty((batch, rows, width), dtype=embed_tokens.dtype, device=anchors.device)
    if block.numel():
        lanes = min(triton.next_power_of_2(width), 1024)
        noise_block_kernel[(batch * rows, triton.cdiv(width, lanes))](
            anchors.contiguous(),
            embed_tokens,
            embed_tokens.stride(0),
            mask_row,
            block,
            rows,
            width,
            vocab_start,
            embed_tokens.shape[0],
            int(with_mask),
            BLOCK=lanes,
            num_warps=4,
        )
    return block
