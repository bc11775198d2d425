"""A causal paged kernel's result made a whole block's: the keys behind each row, merged by log-sum-exp."""

import torch


def add_upper_triangle(
    seen: torch.Tensor,
    lse: torch.Tensor,
    queries: torch.Tensor,
    latents: torch.Tensor,
    page_table: torch.Tensor,
    context_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    softmax_scale: float,
    slots: torch.Tensor | None = None,
) -> torch.Tensor:
    """Row j of a block gets the block's rows behind j, which the causal kernel hid from it.

    seen: [B, N, heads, D], the causal result; lse: float32 [B, N, heads], logarithm of the sum of its weights
    exp(scale * q . k), -inf without a key.  Others as in `block_attention`.
    Returns as `seen`; float32 inside, rounded once more at the store.
    """
    batch, rows, heads, rank = seen.shape
    offsets = torch.arange(rows, device=seen.device)
    index = context_lens[:, None] + offsets
    present = index < seq_lens[:, None]
    keys = _block_keys(latents, page_table, torch.where(present, index, 0), present, slots)
    # [B, N, heads, N]: row, head, key
    scores = torch.einsum("bjhd,bid->bjhi", queries.float(), keys) * softmax_scale
    behind = present[:, None, :] & (offsets > offsets[:, None])
    scores = scores.masked_fill(~behind[:, :, None, :], float("-inf"))

    top = torch.maximum(lse, scores.amax(-1))
    top = torch.where(top == float("-inf"), 0.0, top)
    seen_weight = torch.exp(lse - top)
    weights = torch.exp(scores - top[..., None])
    total = seen_weight + weights.sum(-1)
    both = seen.float() * seen_weight[..., None] + torch.einsum("bjhi,bid->bjhd", weights, keys[..., :rank])
    return (both / torch.where(total > 0, total, 1.0)[..., None]).to(seen.dtype)


def _block_keys(latents, page_table, index: torch.Tensor, present: torch.Tensor, slots: torch.Tensor | None) -> torch.Tensor:
    """float32 [B, N, width], the rows `index` of each request; 0 where not present."""
    request = torch.arange(index.shape[0], device=index.device) if slots is None else slots.clamp(min=0)
    page = page_table[request[:, None], index // latents.shape[1]].long()
    keys = latents[torch.where(present, page, 0), index % latents.shape[1]].float()
    return torch.where(present[..., None], keys, 0.0)
