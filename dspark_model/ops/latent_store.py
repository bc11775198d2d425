"""Masked store of latents into the paged pool."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dspark_model.ops.fp8_rows import FP8, check_pool_row_width, quantise_rows
from dspark_model.ops.row_addresses import RowAddresses

QUANTISED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """Distances in values between two layers' views, two pages and two rows of a page, the same for all layers."""

    layer_stride: int
    page_stride: int
    row_stride: int

    @classmethod
    def of(cls, layer_views: Sequence[torch.Tensor]) -> "PoolGeometry":
        """Raises ValueError when the layers' views do not lie at equal distances or differ in their strides, or when the values
        of a row do not lie side by side."""
        first, size = layer_views[0], layer_views[0].element_size()
        if first.stride(2) != 1:
            raise ValueError(f"the values of a row of the pool lie {first.stride(2)} apart, wanted side by side")
        steps = [later.data_ptr() - view.data_ptr() for view, later in zip(layer_views, layer_views[1:], strict=False)]
        if any(view.stride() != first.stride() for view in layer_views) or any(step != steps[0] for step in steps):
            raise ValueError("the layers' views of the pool differ in their strides or distances")
        layer_stride, rest = divmod(steps[0] if steps else 0, size)
        if rest:
            raise ValueError(f"the layers' views lie {steps[0]} bytes apart, which is no multiple of {size}")
        return cls(layer_stride=layer_stride, page_stride=first.stride(0), row_stride=first.stride(1))


def check_copyable(layer_views: Sequence[torch.Tensor], latents: torch.Tensor) -> None:
    """Raises ValueError unless a kernel can copy rows of latents [L, ..., D] to the views as they are."""
    got, wanted = (latents.shape[0], latents.shape[-1]), (len(layer_views), layer_views[0].shape[-1])
    if got != wanted or latents.dtype is not layer_views[0].dtype or latents.stride(-1) != 1:
        raise ValueError(
            f"latents have (layers, D) = {got} in {latents.dtype}, values {latents.stride(-1)} apart; the kernel wants "
            f"{wanted} in {layer_views[0].dtype}, values side by side"
        )


def fp8_width(layer_views: Sequence[torch.Tensor], latents: torch.Tensor) -> int:
    """Bytes of the pool's rows if a kernel has to quantise latents [L, ..., D] for them, 0 if it copies.

    Raises:
        ValueError: it can do neither.
    """
    if layer_views[0].dtype is not FP8 or latents.dtype is FP8:
        check_copyable(layer_views, latents)
        return 0
    check_pool_row_width(layer_views[0], latents.shape[-1])
    if latents.shape[0] != len(layer_views) or latents.stride(-1) != 1 or latents.dtype not in QUANTISED_DTYPES:
        raise ValueError(
            f"latents have {latents.shape[0]} layers in {latents.dtype}, values {latents.stride(-1)} apart; the kernel wants "
            f"{len(layer_views)} in bfloat16, float16 or float32, values side by side"
        )
    return layer_views[0].shape[-1]


def bytes_if(quantised: int, view: torch.Tensor) -> torch.Tensor:
    """The view as bytes where a kernel quantises."""
    return view.view(torch.uint8) if quantised else view


def latent_store(
    layer_views: Sequence[torch.Tensor], latents: torch.Tensor, where: RowAddresses, *, fused: bool = False
) -> None:
    """Write the owned rows of `latents` to their pages; rows that are not owned are skipped, nothing else changes.

    layer_views: L tensors [pages, page_size, W], W = `pool_row_width(D)`; latents: [L, B, N, D]; where: addresses [B, N],
    distinct among the owned ones.  Values are rounded to the pool's dtype; a float8_e4m3fn pool gets `quantise_rows` of them,
    or latents [L, B, N, W] of its own dtype as they are.
    fused: one Triton kernel, equal to the bit, for pools with a `PoolGeometry` and latents of the pool's dtype, for an fp8 pool
    also of bfloat16, float16 and float32; ValueError for others.
    """
    if fused:
        _fused(layer_views, latents, where)
        return
    owned = where.owned.flatten()
    if not owned.numel():
        return
    # A row that is not owned repeats the first owned one; where there is none, page 0 keeps its value. Boolean indexing would
    # wait for the device.
    row = torch.where(owned, torch.arange(owned.numel(), device=owned.device), owned.int().argmax())
    pages, offsets = where.pages.flatten()[row], where.offsets.flatten()[row]
    for view, rows in zip(layer_views, latents.flatten(1, 2), strict=True):
        view[pages, offsets] = torch.where(owned.any(), _as_kept(rows[row], view), view[pages, offsets])


def _as_kept(rows: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Latents [M, D] as a layer's view of the pool keeps them."""
    if view.dtype is not FP8 or rows.dtype is FP8:
        return rows.to(view.dtype)
    check_pool_row_width(view, rows.shape[-1])
    return quantise_rows(rows)


def _fused(layer_views: Sequence[torch.Tensor], latents: torch.Tensor, where: RowAddresses) -> None:
    import triton
    from dspark_kernels.triton.latent_store import latent_store_kernel

    geometry = PoolGeometry.of(layer_views)
    quantised = fp8_width(layer_views, latents)
    flat = latents.flatten(1, 2)
    if not flat.numel():
        return
    latent_store_kernel[(flat.shape[1], flat.shape[0])](
        bytes_if(quantised, layer_views[0]),
        geometry.layer_stride,
        geometry.page_stride,
        geometry.row_stride,
        flat,
        flat.stride(0),
        flat.stride(1),
        where.pages.contiguous(),
        where.offsets.contiguous(),
        where.owned.contiguous().view(torch.uint8),
        WIDTH=flat.shape[2],
        WIDTH_LANES=triton.next_power_of_2(flat.shape[2]),
        FP8_WIDTH=quantised,
        num_warps=1,
    )
