"""One product per attention head, from and to tensors that are laid out row by row."""

import torch


def per_head_product(x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor) -> None:
    """out[b, n, h] = x[b, n, h] @ weight[h], each head with its own matrix.

    x: [B, N, heads, d]; weight: [heads, d, e], any strides with one of the last two being 1; out: [B, N, heads, e], which may
    be a slice of a wider tensor: the product is written there, with no copy behind it.  For inference: no gradients.
    """
    rows = x.shape[0] * x.shape[1]
    # `view` raises where the rows do not lie at equal distances; a slice of the last dimension keeps them so.
    by_head = out.view(rows, *out.shape[2:]).transpose(0, 1)
    torch.bmm(x.reshape(rows, *x.shape[2:]).transpose(0, 1), weight, out=by_head)
