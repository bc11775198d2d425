"""FlashInfer's paged multi-head latent attention, planned for each call."""

import functools

import torch

WORKSPACE_BYTES = 128 << 20  # what FlashInfer's documentation recommends


@functools.cache
def _wrapper(device: torch.device):
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    return BatchMLAPagedAttentionWrapper(torch.empty(WORKSPACE_BYTES, dtype=torch.int8, device=device), backend="auto")


def planned_attention(
    queries: torch.Tensor,
    latents: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_lora_rank: int,
    softmax_scale: float,
    slots: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `block_attention`, every row sees every key.  Waits for the device: FlashInfer plans on the host (`plan` in 0.6.1
    copies the lengths there), once for each call here.  A stream that is captured cannot wait.
    """
    batch, block, heads, width = queries.shape
    out = queries.new_zeros(batch, block, heads, kv_lora_rank)
    live = (seq_lens > 0).nonzero()[:, 0]  # FlashInfer is not asked about requests without keys
    if not live.numel() or not queries.numel():
        return out
    lens = seq_lens[live]
    page_size = latents.shape[1]
    counts = (lens + page_size - 1) // page_size
    table = page_table[live if slots is None else slots[live]]
    indices = table[torch.arange(table.shape[1], device=table.device) < counts[:, None]]
    wrapper = _wrapper(queries.device)
    wrapper.plan(
        torch.arange(len(live) + 1, dtype=torch.int32, device=queries.device) * block,
        torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(),
        indices,
        lens.int(),
        heads,
        kv_lora_rank,
        width - kv_lora_rank,
        page_size,
        False,  # not causal
        softmax_scale,
        queries.dtype,
        latents.dtype,
    )
    absorbed, rotary = (
        part.contiguous() for part in queries[live].flatten(0, 1).split((kv_lora_rank, width - kv_lora_rank), -1)
    )
    attended = wrapper.run(absorbed, rotary, latents[..., :kv_lora_rank], latents[..., kv_lora_rank:])
    out[live] = attended.view(len(live), block, heads, kv_lora_rank)
    return out
