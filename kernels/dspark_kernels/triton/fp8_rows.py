"""Rows of an fp8 pool: codes of float8_e4m3fn, zeros, and a scale that is a power of two; in integers, so that every device and
the interpreter round alike."""

import triton
import triton.language as tl


@triton.jit
def magnitude_bits(values):
    """float32 values without their signs, as int32; in the order of the values, NaN above all."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_exponent(top):
    """The biased exponent of the least power of two, from 2^-100 up, that leaves a magnitude of bits `top` at most 448 =
    1.75 * 2^8: larger fractions than 1.75 carry."""
    return tl.maximum(((top + 0x1FFFFF) >> 23) - 8, 27)


@triton.jit
def fp8_codes(values, top):
    """uint8 codes of float32 values of a row whose largest magnitude has the bits `top`: nearest, ties to even."""
    finite = top < 0x7F800000
    inverse = ((254 - scale_exponent(top)) << 23).to(tl.float32, bitcast=True)
    scaled = magnitude_bits(values).to(tl.float32, bitcast=True) * inverse
    bits = scaled.to(tl.int32, bitcast=True)
    # 3 of 23 bits of the fraction stay, and the exponent's bias goes from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    # Below 2^-6 values are multiples of 2^-9, the distance of float32 values at 2^14.
    small = (scaled + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    sign = (values.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(finite, tl.where(scaled < 0.015625, small, normal) | sign, 0).to(tl.uint8)


@triton.jit
def store_scale(row, top, owned, WIDTH: tl.constexpr, FP8_WIDTH: tl.constexpr):
    """What stands behind the WIDTH codes of a pool row of FP8_WIDTH bytes, byte by byte: rows may lie anywhere.  owned: 1, or 0
    for nothing."""
    bits = tl.where(top < 0x7F800000, scale_exponent(top) << 23, 0x7FC00000)
    place = WIDTH + tl.arange(0, 32)
    byte = place - (FP8_WIDTH - 16)
    value = tl.where((byte >= 0) & (byte < 4), bits >> (8 * (byte & 3)), 0)
    tl.store(row + place, (value & 0xFF).to(tl.uint8), mask=place < FP8_WIDTH * owned)


@triton.jit
def store_fp8_row(row, source, WIDTH: tl.constexpr, WIDTH_LANES: tl.constexpr, FP8_WIDTH: tl.constexpr):
    """A latent row of WIDTH values as a pool row.  row: its first byte, uint8; source: the first value."""
    lanes = tl.arange(0, WIDTH_LANES)
    values = tl.load(source + lanes, mask=lanes < WIDTH, other=0.0).to(tl.float32)
    top = tl.max(magnitude_bits(values), 0)
    tl.store(row + lanes, fp8_codes(values, top), mask=lanes < WIDTH)
    store_scale(row, top, 1, WIDTH, FP8_WIDTH)
