"""RMSNorm over the latent and RoPE over its rotary slice: what the pool stores of one row."""

import torch

from dspark_model.ops.latent_store import bytes_if, fp8_width
from dspark_model.ops.rms_norm import rms_norm
from dspark_model.ops.rope_rotate import rope_rotate
from dspark_model.ops.row_addresses import RowAddresses


def latent_norm_rope(
    kv: torch.Tensor, weight: torch.Tensor, eps: float, cos_sin: torch.Tensor, *, backend: str = "torch"
) -> torch.Tensor:
    """[RMSNorm(kv[:C]) * weight | RoPE(kv[C:])], C = kv_lora_rank, both in float32 and rounded once, for the same rows of L
    layers.

    kv: [L, M, C + r], outputs of `kv_a_proj_with_mqa`, values of a row side by side; weight: [L, C], each layer's
    `kv_a_layernorm`; cos_sin: float32 [M, r], the table rows of the rows' absolute positions.
    Returns [L, M, C + r] in kv's dtype, contiguous.
    backend: `torch`; or `triton`, which sums the squares in another order: within 2 float32 roundings of the norm (2e-7
    relative), so that a rounded bf16 value differs from `torch` by at most one step; or `cute`, on CUDA devices, which sums in
    an order of its own, the same for every alignment and in both forms, and turns pairs with fused multiply-adds: within 1e-6
    relative, for a pair of its length.
    """
    if backend in _KERNELS:
        out = torch.empty(kv.shape, dtype=kv.dtype, device=kv.device)
        _KERNELS[backend](kv, weight, eps, cos_sin, out, (out.stride(0), 0, out.stride(1)), None)
        return out
    latent, k_pe = kv.split((weight.shape[-1], kv.shape[-1] - weight.shape[-1]), dim=-1)
    return torch.cat((rms_norm(latent, weight[:, None], eps), rope_rotate(k_pe, cos_sin)), dim=-1)


def latent_norm_rope_store(
    kv: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    layer_view: torch.Tensor,
    where: RowAddresses,
    *,
    backend: str,
) -> None:
    """`latent_norm_rope` of one layer's rows, stored straight into the pool: the plain kernel with another store address, equal
    to the bit to it and `latent_store` behind it.

    kv: [M, C + r]; weight: [C]; cos_sin: float32 [M, r]; layer_view: [pages, page_size, C + r] of kv's dtype, or an fp8 pool's;
    where: addresses of M rows, of any shape; rows that are not owned are skipped.  backend: `triton`, or `cute`, which has no
    form for an fp8 pool.

    Raises:
        ValueError: the backend has no such kernel, or the view's dtype or width differs.
    """
    if backend not in _KERNELS:
        raise ValueError(f"latent_norm_rope={backend} has no kernel that stores into the pool; choose {' or '.join(_KERNELS)}")
    quantised = fp8_width((layer_view,), kv[None])
    if quantised and backend != "triton":
        raise ValueError(f"latent_norm_rope={backend} has no form that stores into an fp8 pool; choose triton")
    options = {"fp8_width": quantised} if quantised else {}
    strides = (0, layer_view.stride(0), layer_view.stride(1))
    _KERNELS[backend](kv[None], weight[None], eps, cos_sin, bytes_if(quantised, layer_view), strides, where, **options)


def _triton(
    kv, weight, eps: float, cos_sin, out, strides: tuple[int, int, int], where: RowAddresses | None, *, fp8_width: int = 0
) -> None:
    """strides: of out between layers, pages and rows; where: None for rows side by side; fp8_width: see the kernel."""
    import triton
    from dspark_kernels.triton.latent_norm_rope import latent_norm_rope_kernel

    layers, rows, width = kv.shape
    latent, pairs = weight.shape[-1], (width - weight.shape[-1]) // 2
    if not kv.numel():
        return
    # The kernel does not look at the addresses of the plain form.
    places = (cos_sin, cos_sin, cos_sin) if where is None else (where.pages, where.offsets, where.owned.view(torch.uint8))
    latent_norm_rope_kernel[(rows, layers)](
        kv,
        kv.stride(0),
        kv.stride(1),
        weight,
        cos_sin,
        out,
        *strides,
        *places,
        eps,
        LATENT=latent,
        LATENT_LANES=triton.next_power_of_2(latent),
        PAIRS=pairs,
        PAIR_LANES=triton.next_power_of_2(pairs),
        POOL=where is not None,
        FP8_WIDTH=fp8_width,
        num_warps=4,
    )


def _cute(kv, weight, eps: float, cos_sin, out, strides: tuple[int, int, int], where: RowAddresses | None) -> None:
    """As `_triton`."""
    if kv.device.type != "cuda":
        raise ValueError(f"latent_norm_rope=cute runs on CUDA devices, got rows on {kv.device}; choose triton or torch")
    from dspark_kernels.cute.latent_norm_rope import latent_norm_rope as launch

    if not kv.numel():
        return
    places = None if where is None else (where.pages, where.offsets, where.owned.view(torch.uint8))
    launch(kv, weight, cos_sin, out, strides, places, eps)


_KERNELS = {"triton": _triton, "cute": _cute}
