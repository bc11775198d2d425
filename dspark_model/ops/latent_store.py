"""Masked store of latents into the paged pool."""

from collections.abc import Sequence

import torch

from dspark_model.ops.row_addresses import RowAddresses


def latent_store(layer_views: Sequence[torch.Tensor], latents: torch.Tensor, where: RowAddresses) -> None:
    """Write the owned rows of `latents` to their pages; rows that are not owned are skipped, nothing else changes.

    layer_views: L tensors [pages, page_size, D]; latents: [L, B, N, D]; where: addresses [B, N], distinct among the
    owned ones.  Values are rounded to the pool's dtype.
    """
    owned = where.owned
    pages, offsets = where.pages[owned], where.offsets[owned]
    for view, rows in zip(layer_views, latents, strict=True):
        view[pages, offsets] = rows[owned].to(view.dtype)
