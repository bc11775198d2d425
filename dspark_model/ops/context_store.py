"""Store of consecutive context rows into the pages of their requests, for all layers."""

from collections.abc import Sequence

import torch

from dspark_model.ops.context_addresses import context_addresses
from dspark_model.ops.latent_store import PoolGeometry, bytes_if, fp8_width, latent_store


def context_store(
    layer_views: Sequence[torch.Tensor],
    latents: torch.Tensor,
    start: torch.Tensor,
    count: torch.Tensor,
    slots: torch.Tensor,
    page_table: torch.Tensor,
    num_pages: torch.Tensor,
    *,
    fused: bool = False,
) -> None:
    """Write the first count[b] of N rows of each request to its rows start[b], start[b] + 1, ...; rows without a page and
    dummy rows are skipped, nothing else changes.

    layer_views: L tensors [pages, page_size, W]; latents: [L, B, N, D]; start, count: int64 [B]; slots: int64 [B], -1 for
    dummy rows; page_table: int32 [S, P]; num_pages: int64 [S].  Values are rounded as
    `latent_store` does it.
    fused: one Triton kernel, equal to the bit, for what `latent_store` takes with it; ValueError for others.
    """
    if fused:
        _fused(layer_views, latents, start, count, slots, page_table, num_pages)
        return
    rows, page_size = latents.shape[2], layer_views[0].shape[1]
    where = context_addresses(start, count, slots, page_table, num_pages, rows=rows, page_size=page_size)
    latent_store(layer_views, latents, where)


def _fused(layer_views, latents, start, count, slots, page_table, num_pages) -> None:
    import triton
    from dspark_kernels.triton.context_store import context_store_kernel

    geometry = PoolGeometry.of(layer_views)
    quantised = fp8_width(layer_views, latents)
    layers, batch, rows, width = latents.shape
    flat = latents.reshape(layers, batch * rows, width)
    if not flat.numel():
        return
    context_store_kernel[(batch * rows, layers)](
        bytes_if(quantised, layer_views[0]),
        geometry.layer_stride,
        geometry.page_stride,
        geometry.row_stride,
        flat,
        flat.stride(0),
        flat.stride(1),
        *(tensor.contiguous() for tensor in (start, count, slots, page_table, num_pages)),
        page_table.shape[1],
        rows,
        layer_views[0].shape[1],
        WIDTH=width,
        WIDTH_LANES=triton.next_power_of_2(width),
        FP8_WIDTH=quantised,
        num_warps=1,
    )
