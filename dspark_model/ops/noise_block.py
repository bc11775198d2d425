"""The block's input rows: the anchor's embedding, then the mask row."""

import torch


def noise_block(anchors: torch.Tensor, embed_tokens: torch.Tensor, mask_row: torch.Tensor, rows: int) -> torch.Tensor:
    """Rows `[anchor, mask, ..., mask]` of each request.

    anchors: int64 [B]; embed_tokens: [V, H]; mask_row: [H], the mask token's embedding or a trained row.
    Returns [B, rows, H] in embed_tokens' dtype; a mask row of another dtype is rounded to it.
    """
    block = mask_row.to(embed_tokens.dtype).expand(anchors.shape[0], rows, -1).clone()
    block[:, 0] = embed_tokens[anchors]
    return block
