"""One product per attention head, from and to tensors that are laid out row by row."""

import torch


def per_head_product(x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor, backend: str = "torch") -> None:
    """out[b, n, h] = x[b, n, h] @ weight[h], each head with its own matrix.

    x: [B, N, heads, d]; weight: [heads, d, e], any strides with one of the last two being 1; out: [B, N, heads, e], which may
    be a slice of a wider tensor: the product is written there, with no copy behind it.  For inference: no gradients.
    backend: `torch`; or `triton`, one kernel for few rows.  Both accumulate in float32, in another order, and round once: they
    differ by 1e-6 of the sum of magnitudes in float32, and by one step of rounding in bf16.
    """
    rows = x.shape[0] * x.shape[1]
    if backend == "triton":
        _triton(x, weight, out, rows)
        return
    # `view` raises where the rows do not lie at equal distances; a slice of the last dimension keeps them so.
    by_head = out.view(rows, *out.shape[2:]).transpose(0, 1)
    torch.bmm(x.reshape(rows, *x.shape[2:]).transpose(0, 1), weight, out=by_head)


def _triton(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, rows: int) -> None:
    import triton
    from dspark_kernels.triton.per_head_product import per_head_product_kernel

    heads, depth, width = weight.shape
    if x.stride(-1) != 1 or out.stride(-1) != 1:
        raise ValueError(f"values of a head lie {x.stride(-1)} and {out.stride(-1)} apart in x and out, wanted side by side")
    if not out.numel():
        return
    flat, target = x.view(rows, heads, depth), out.view(rows, heads, width)
    tile, column_tile = _row_tile(rows), 32
    grid = (heads, triton.cdiv(width, column_tile), triton.cdiv(rows, tile))
    per_head_product_kernel[grid](
        flat,
        *flat.stride()[:2],
        weight,
        *weight.stride(),
        target,
        *target.stride()[:2],
        rows,
        DEPTH=depth,
        WIDTH=width,
        ROW_TILE=tile,
        COLUMN_TILE=column_tile,
        DEPTH_TILE=min(128, max(16, triton.next_power_of_2(depth))),
        num_warps=4,
    )


def _row_tile(rows: int) -> int:
    """Rows a program takes: the tensor cores' least number, or more where there are more."""
    return min(64, max(16, 1 << (rows - 1).bit_length()))
