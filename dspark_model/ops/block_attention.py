"""Absorbed MLA attention of one block over paged context and the block itself."""

import torch


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
) -> torch.Tensor:
    """softmax(scale * q . k) v over one shared latent: keys are whole latent rows, values their first kv_lora_rank values
    (multi-head latent attention with W_UK absorbed into the query, DeepSeek-V2, arXiv 2405.04434).

    queries: [B, N, heads, D], N block rows, the absorbed part then the rotary part.
    latents: [pages, page_size, D], one layer of the pool; the block's own rows are there already, behind the context.
    page_table: int32 [B, P]; context_lens: int64 [B]; seq_lens: int64 [B], keys of each request: context and block.
        Rows at or past seq_lens[b] are never used, even if NaN.
    max_seq_len: host number that is at least every seq_lens[b]; bounds what is gathered.
    causal: row j of the block sees the block rows up to itself only; all rows see the whole context.
    Returns [B, N, heads, kv_lora_rank] in queries' dtype; float32 inside, one rounding.  A request with no key gives 0.
    """
    batch, rows, heads, width = queries.shape
    page_size = latents.shape[1]
    num_pages = -(-max_seq_len // page_size)
    pages = page_table[:, :num_pages].long().clamp(min=0)
    index = torch.arange(pages.shape[1] * page_size, device=queries.device)
    used = index < seq_lens[:, None]
    keys = latents[pages].reshape(batch, pages.shape[1] * page_size, width).float()
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
