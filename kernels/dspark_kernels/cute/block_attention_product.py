"""64 latents' part of a head's matrix, and its product with the merged rows, where the second kernel multiplies.

`facts` is a `block_attention_facts.Facts`.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warp

from dspark_kernels.cute.block_attention_schedule import CHUNK, ELEMENTS, SLICE, WARP, values_at

ROWS = 8  # of a product: as many as a group can have
ROW_STRIDE = 96  # of the rounded rows: eight lanes that read two of them meet all banks once


class Matrices(NamedTuple):
    """[heads, latent, value_width]; strides in values."""

    values: cute.Pointer
    head_stride: cutlass.Int64
    row_stride: cutlass.Int64
    column_stride: cutlass.Int64


@cute.jit
def fetch_matrix(matrices: Matrices, fetched, head, part_of, tile, facts: cutlass.Constexpr):
    """A lane's values of 8 columns of the 64 latents of number `part_of` into its own places: of column lane // 4, latents
    8 * (lane % 4) + 0..7, and those 32 on."""
    dtype, lane = ELEMENTS[facts.dtype], cute.arch.lane_idx()
    copy = cute.make_copy_atom(cpasync.CopyG2SOp(), dtype, num_bits_per_copy=CHUNK * dtype.width)
    if tile < facts.value_tiles:
        column, row = tile * CHUNK + lane // 4, part_of * SLICE + lane % 4 * CHUNK
        at = head * matrices.head_stride + row * matrices.row_stride + column * matrices.column_stride
        for i in cutlass.range_constexpr(2):
            here = at + i * (SLICE // 2) * matrices.row_stride
            own = _own_chunk(fetched, tile, i, facts)
            if cutlass.const_expr(facts.value_chunks):
                cute.copy(copy, values_at(matrices.values, here, dtype, CHUNK, cute.AddressSpace.gmem), own)
            else:
                for j in cutlass.range_constexpr(CHUNK):
                    own[j] = (matrices.values + (here + j * matrices.row_stride)).load()


@cute.jit
def _own_chunk(fetched, tile, i, facts: cutlass.Constexpr):
    """A lane's place for one half of its values of 8 columns: [tile, half, lane, value]."""
    at = ((tile * 2 + i) * WARP + cute.arch.lane_idx()) * CHUNK
    return values_at(fetched.iterator, at, ELEMENTS[facts.dtype], CHUNK, cute.AddressSpace.smem)


@cute.jit
def multiply(rounded, fetched, tile, facts: cutlass.Constexpr):
    """Rows of 64 latents times 8 columns: of row lane // 4, columns 2 * (lane % 4) and the next.

    Step s of 16 latents takes those that a lane has at 4 * s, in the order of `fetch_matrix`: any order suits a sum.
    """
    dtype, lane = ELEMENTS[facts.dtype], cute.arch.lane_idx()
    mma = cute.make_tiled_mma(cute.make_mma_atom(warp.MmaF16BF16Op(dtype, cutlass.Float32, (16, 8, 16))))
    left = cute.make_rmem_tensor(mma.partition_shape_A((16, SLICE)), dtype)
    right = cute.make_rmem_tensor(mma.partition_shape_B((CHUNK, SLICE)), dtype)
    product = cute.make_rmem_tensor(mma.partition_shape_C((16, CHUNK)), cutlass.Float32)
    left.fill(0.0)  # rows 8 to 15 are none
    product.fill(0.0)
    own, matrix = cute.make_rmem_tensor(CHUNK, dtype), cute.make_rmem_tensor(CHUNK, dtype)
    for i in cutlass.range_constexpr(2):
        at = lane // 4 * ROW_STRIDE + i * (SLICE // 2) + lane % 4 * CHUNK
        cute.autovec_copy(values_at(rounded.iterator, at, dtype, CHUNK, cute.AddressSpace.smem), own)
        cute.autovec_copy(_own_chunk(fetched, tile, i, facts), matrix)
        for k in cutlass.range_constexpr(CHUNK):
            left[(2 * i + k // 4) * 8 + k % 4 // 2 * 4 + k % 2] = own[k]
            right[(2 * i + k // 4) * 4 + k % 4] = matrix[k]
    for step in cutlass.range_constexpr(SLICE // 16):
        cute.gemm(mma, product, left[None, None, step], right[None, None, step], product)
    return product


@cute.jit
def send(product, received, cta, tile, facts: cutlass.Constexpr):
    """A warp's products of 8 columns to the CTA that adds them up: [owned tile, sender, row, column]."""
    lane = cute.arch.lane_idx()
    if tile < facts.value_tiles:
        at = (tile % facts.owned_tiles * facts.slices + cta) * ROWS * CHUNK + lane * 2
        target = cute.arch.map_dsmem_ptr(received.iterator, tile // facts.owned_tiles)
        pair = cute.make_rmem_tensor(2, cutlass.Float32)
        pair[0], pair[1] = product[0], product[1]
        cute.autovec_copy(pair, values_at(target, at, cutlass.Float32, 2, cute.AddressSpace.dsmem))
