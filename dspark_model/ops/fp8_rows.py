"""Rows of an fp8 pool: latents in float8_e4m3fn with their scale behind them."""

import torch

FP8 = torch.float8_e4m3fn
# Where the scale begins and how much room it has, so that rows begin at multiples of 16 bytes.
_STEP = 16
# The exponent of the least scale.  It keeps 1 / scale and every quotient that is not rounded to 0 normal in float32.
_LEAST_EXPONENT = -100


def pool_row_width(width: int, dtype: torch.dtype) -> int:
    """Values that a pool of `dtype` keeps for a latent row of `width` values: `width`, or for float8_e4m3fn the bytes of
    `quantise_rows`."""
    return width if dtype is not FP8 else -(-width // _STEP) * _STEP + _STEP


def quantise_rows(rows: torch.Tensor) -> torch.Tensor:
    """rows [..., D] of a floating dtype to rows of an fp8 pool, float8_e4m3fn [..., W], W = `pool_row_width(D)`: D + 16 where
    16 divides D, as in 592 bytes for 512 + 64 values.

    The row's bytes: D values `row / scale`, rounded to the nearest, ties to even; zeros up to a multiple of 16; the scale,
    float32; zeros.  scale is the least power of two, of at least 2^-100, for which no value is above 448, the largest of the
    type.  Quotients by a power of two, and products with it in float32 and bfloat16, are exact, so that every backend reads the
    same keys.  e4m3 rounds relative to each value, and neither a scale with more digits nor a second one for the rotary part
    gains much: docs/results/fp8_2026-11-30_cpu.md.
    Values that come back with a relative error of at most 2^-4 are those of at least 2^-6 scales, 2^-14.8 of the row's largest;
    below, the error is at most 2^-10 scales.  A row with a value that is not finite is kept as zeros with the scale NaN.
    """
    width = rows.shape[-1]
    finite = rows.isfinite().all(-1, keepdim=True)
    values = torch.where(finite, rows.float(), 0.0)
    mantissa, exponent = torch.frexp(values.abs().amax(-1, keepdim=True))
    # 448 = 0.875 * 2^9, and a mantissa lies in [0.5, 1), or is 0 with the exponent 0.
    exponent = torch.where(mantissa > 0, exponent - 9 + (mantissa > 0.875), _LEAST_EXPONENT).clamp(min=_LEAST_EXPONENT)
    bytes_ = torch.zeros((*rows.shape[:-1], pool_row_width(width, FP8)), dtype=torch.uint8, device=rows.device)
    bytes_[..., :width] = (values * _power_of_two(-exponent)).to(FP8).view(torch.uint8)
    bytes_[..., -_STEP : 4 - _STEP] = torch.where(finite, _power_of_two(exponent), torch.nan).view(torch.uint8)
    return bytes_.view(FP8)


def dequantise_rows(pool_rows: torch.Tensor, width: int) -> torch.Tensor:
    """The inverse of `quantise_rows`: float8_e4m3fn [..., W] to float32 [..., D] with D = `width`.

    Raises:
        ValueError: rows of D values have another W.
    """
    check_pool_row_width(pool_rows, width)
    # In memory of its own, where the scale's four bytes lie as a float32 has to.
    scale = pool_rows.view(torch.uint8)[..., -_STEP : 4 - _STEP].clone(memory_format=torch.contiguous_format)
    return pool_rows[..., :width].float() * scale.view(torch.float32)


def check_pool_row_width(pool_rows: torch.Tensor, width: int) -> None:
    """Raises ValueError unless the last dimension of an fp8 pool has room for rows of `width` values."""
    wanted = pool_row_width(width, FP8)
    if pool_rows.shape[-1] != wanted:
        raise ValueError(f"the fp8 pool has rows of {pool_rows.shape[-1]} bytes, wanted {wanted} for latents of {width} values")


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent in float32 for int32 exponents of normal numbers, exact on every device."""
    return (exponent + 127 << 23).view(torch.float32)
