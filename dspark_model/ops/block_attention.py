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
    window: int | None = None,
    backend: str = "torch",
) -> torch.Tensor:
    """softmax(scale * q . k) v over one shared latent: keys are whole latent rows, values their first kv_lora_rank values
    (multi-head latent attention with W_UK absorbed into the query, DeepSeek-V2, arXiv 2405.04434).

    queries: [B, N, heads, D], N block rows, the absorbed part then the rotary part.
    latents: [pages, page_size, D], one layer of the pool; the block's own rows are there already, behind the context.
    page_table: int32 [B, P]; context_lens: int64 [B]; seq_lens: int64 [B], keys of each request: context and block.
        Rows at or past seq_lens[b] are never used, even if NaN.
    max_seq_len: host number that is at least every seq_lens[b]; bounds what is gathered.
    causal: row j of the block sees the block rows up to itself only; all rows see the whole context.
    window: W >= 1: no row sees a context row with an index below context_lens[b] - W; such rows and their pages are never used
        either.  None: all rows see the whole context.
    backend: `torch`; or `triton`, which reads each key once a 64 query rows, gathers nothing, never waits for the device, and
        rounds the weights to the pool's dtype before the product with the values.  Its bits depend on the requests that have
        keys, in their order, not on requests without.  Or `cute`, the same for Hopper in CuTe DSL.
    Returns [B, N, heads, kv_lora_rank] in queries' dtype; float32 inside, one rounding.  A request with no key gives 0.

    Raises:
        ValueError: the window is below 1, the backend is unknown, or `triton` cannot take the page size, dtypes or strides.
    """
    if window is not None and window < 1:
        raise ValueError(f"window={window}: a window over the context holds at least 1 row; pass None for no window")
    if backend == "triton":
        return _triton(
            queries, latents, page_table, context_lens, seq_lens, kv_lora_rank=kv_lora_rank, softmax_scale=softmax_scale,
            max_seq_len=max_seq_len, causal=causal, window=window,
        )  # fmt: skip
    if backend == "cute":
        return _cute(
            queries, latents, page_table, context_lens, seq_lens, kv_lora_rank=kv_lora_rank, softmax_scale=softmax_scale,
            causal=causal, window=window,
        )  # fmt: skip
    if backend != "torch":
        raise ValueError(f"block_attention has no backend {backend!r}; choose torch, triton or cute")
    batch, rows, heads, width = queries.shape
    page_size = latents.shape[1]
    num_pages = -(-max_seq_len // page_size)
    pages = page_table[:, :num_pages].long().clamp(min=0)
    index = torch.arange(pages.shape[1] * page_size, device=queries.device)
    used = index < seq_lens[:, None]
    if window is not None:
        used = used & (index >= context_lens[:, None] - window)
        held = used.unflatten(1, (pages.shape[1], page_size)).any(-1)
        pages = torch.where(held, pages, 0)
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


def _cute(queries, latents, page_table, context_lens, seq_lens, **options):
    if queries.device.type != "cuda":
        raise ValueError(f"block_attention=cute runs on CUDA devices, got queries on {queries.device}; choose triton or torch")
    from dspark_kernels.cute.block_attention import block_attention as launch

    return launch(queries, latents, page_table, context_lens, seq_lens, **options)


def _triton(queries, latents, page_table, context_lens, seq_lens, *, kv_lora_rank: int, max_seq_len: int, **options):
    from dspark_kernels.triton.block_attention import block_attention as launch
    from dspark_kernels.triton.block_attention import choose_tuning

    _check_kernel_takes(queries, latents, page_table, context_lens, seq_lens, kv_lora_rank)
    batch, block, heads, width = queries.shape
    if not queries.numel() or max_seq_len == 0:
        return queries.new_zeros(batch, block, heads, kv_lora_rank)
    cuda = queries.device.type == "cuda"
    return launch(
        queries,
        latents,
        page_table,
        context_lens,
        seq_lens,
        kv_lora_rank=kv_lora_rank,
        max_seq_len=max_seq_len,
        # The interpreter has no processors; 4 shares are enough to be merged.
        processors=torch.cuda.get_device_properties(queries.device).multi_processor_count if cuda else 4,
        tuning=choose_tuning(block * heads, max_seq_len, latents.dtype, overlap=cuda),
        **options,
    )


def _check_kernel_takes(queries, latents, page_table, context_lens, seq_lens, kv_lora_rank: int) -> None:
    """Raises ValueError for arguments that the Triton kernel does not know."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    if queries.dtype is not latents.dtype or latents.dtype not in dtypes:
        raise ValueError(
            f"block_attention=triton got queries in {queries.dtype} and latents in {latents.dtype}; it wants both in one of "
            f"{', '.join(map(str, dtypes))}"
        )
    if not 0 < kv_lora_rank < latents.shape[-1] or queries.shape[-1] != latents.shape[-1]:
        raise ValueError(
            f"queries have {queries.shape[-1]} values a row, latents {latents.shape[-1]}, of which kv_lora_rank={kv_lora_rank} "
            "are the value; block_attention=triton wants rows of equal width with a rotary part behind the value"
        )
    strides = (queries.stride(-1), latents.stride(-1), page_table.stride(-1))
    if any(stride != 1 for stride in strides):
        raise ValueError(
            f"queries, latents, page_table have values {strides} apart; block_attention=triton wants 1; make them contiguous"
        )
    if page_table.dtype is not torch.int32 or not context_lens.is_contiguous() or not seq_lens.is_contiguous():
        raise ValueError(
            f"page_table is {page_table.dtype}, wanted torch.int32; context_lens and seq_lens lie {context_lens.stride()} and "
            f"{seq_lens.stride()} apart, wanted contiguous"
        )
