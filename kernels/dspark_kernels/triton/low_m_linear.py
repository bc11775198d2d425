"""x @ weight.T for few rows of x: the weight streams through once, in tiles of its rows, and the inner dimension is split over
programs where the tiles alone are too few for the device.

RMSNorm in front, silu(gate) * up and the addition of a residual behind are part of the same pass.  The splits of a tile leave
float32 partial sums in a workspace; the program that arrives last adds them in the order of the splits.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def _prefetch(rows_ptr, first, size, TILE_N: tl.constexpr, PIECES: tl.constexpr):
    """Asks for `size` values of each of TILE_N rows, from value `first` on, to be brought to L2; in PIECES requests a row."""
    piece = size // PIECES
    starts = rows_ptr[:, None] + (first + tl.arange(0, PIECES) * piece)[None, :]
    nbytes = tl.zeros((TILE_N, PIECES), tl.int32) + piece * (rows_ptr.dtype.element_ty.primitive_bitwidth // 8)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [starts.to(tl.int64), nbytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _sum_splits(partial_ptr, offsets, split_stride, SPLITS: tl.constexpr):
    """The partial sums of a tile, added in the order of the splits; past L1, since other programs wrote them."""
    total = tl.load(partial_ptr + offsets, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        total += tl.load(partial_ptr + split * split_stride + offsets, cache_modifier=".cg")
    return total


@triton.jit(do_not_specialize=["num_rows", "prefetch_values"])
def low_m_linear_kernel(
    x_ptr,  # [M, K], values of a row side by side
    x_row_stride,
    weight_ptr,  # [N, K], values of a row side by side; with GATE_UP: the gate's rows
    weight_row_stride,
    up_ptr,  # [N, K], GATE_UP only
    up_row_stride,
    norm_weight_ptr,  # [K], NORM only
    residual_ptr,  # [M, N], values of a row side by side, RESIDUAL only
    residual_row_stride,
    out_ptr,  # [M, N] contiguous
    sums_ptr,  # float32 [tiles, SPLITS, (TILE_M, TILE_N) | GATE_UP (TILE_M, TILE_N) | NORM TILE_M], SPLITS > 1 only
    arrivals_ptr,  # int32 [tiles], 0 before and after a launch, SPLITS > 1 only
    num_rows,
    out_features,
    in_features,
    eps,
    prefetch_values,  # of each weight row, before the wait, PDL only; whole blocks of TILE_K, or 0
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr,  # TILE_K divides in_features
    NORM: tl.constexpr,
    GATE_UP: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
    PIECES: tl.constexpr,
):
    tile = tl.program_id(0)
    split = tl.program_id(1)
    kind = x_ptr.dtype.element_ty
    blocks = tl.cdiv(in_features, TILE_K)
    first = (blocks * split // SPLITS) * TILE_K
    last = (blocks * (split + 1) // SPLITS) * TILE_K

    rows = tl.arange(0, TILE_M)
    inside = rows < num_rows
    columns = tile * TILE_N + tl.arange(0, TILE_N)
    # Lanes behind the last weight row read that row again: their sums are not stored.
    weight_rows = tl.minimum(columns, out_features - 1).to(tl.int64)
    weights = weight_ptr + weight_rows * weight_row_stride
    ups = up_ptr + weight_rows * up_row_stride
    lanes = tl.arange(0, TILE_K)

    if PDL:
        if prefetch_values > 0:
            _prefetch(weights, first, prefetch_values, TILE_N, PIECES)
            if GATE_UP:
                _prefetch(ups, first, prefetch_values, TILE_N, PIECES)
        cuda.gdc_wait()
        # After the wait: no launch is ever more than one ahead, so what it prefetches stays in L2.
        cuda.gdc_launch_dependents()

    stored = inside[:, None] & (columns < out_features)[None, :]
    wide_rows = rows[:, None].to(tl.int64)
    if RESIDUAL:
        # Ahead of the products: behind them its latency would add to the launch.
        residual = tl.load(residual_ptr + wide_rows * residual_row_stride + columns[None, :], mask=stored, other=0.0)
    x_values = x_ptr + wide_rows * x_row_stride + lanes[None, :]
    weight_values = weights[:, None] + lanes[None, :]
    up_values = ups[:, None] + lanes[None, :]
    product = tl.zeros((TILE_M, TILE_N), tl.float32)
    up_product = tl.zeros((TILE_M, TILE_N), tl.float32)
    # Row products of x on the tensor cores; their diagonal are the sums of squares.
    squares = tl.zeros((TILE_M, TILE_M), tl.float32)
    if NORM:
        scale = tl.load(norm_weight_ptr + first + lanes, mask=lanes < in_features - first, other=0.0)
    for k in range(first, last, TILE_K):
        if EVEN_K:
            x = tl.load(x_values + k, mask=inside[:, None], other=0.0)
            weight = tl.load(weight_values + k, eviction_policy="evict_first")
        else:
            here = lanes < in_features - k
            x = tl.load(x_values + k, mask=inside[:, None] & here[None, :], other=0.0)
            weight = tl.load(weight_values + k, mask=here[None, :], other=0.0, eviction_policy="evict_first")
        if NORM:
            squares = tl.dot(x, x.T, squares, input_precision="ieee")
            x = (x.to(tl.float32) * scale.to(tl.float32)[None, :]).to(kind)
            # For the next turn: this load's latency would stand in the way of the products.
            ahead = lanes + k + TILE_K
            scale = tl.load(norm_weight_ptr + ahead, mask=ahead < in_features, other=0.0)
        product = tl.dot(x, weight.T, product, input_precision="ieee")
        if GATE_UP:
            if EVEN_K:
                up = tl.load(up_values + k, eviction_policy="evict_first")
            else:
                up = tl.load(up_values + k, mask=(lanes < in_features - k)[None, :], other=0.0, eviction_policy="evict_first")
            up_product = tl.dot(x, up.T, up_product, input_precision="ieee")
    square_sum = tl.sum(tl.where(rows[:, None] == rows[None, :], squares, 0.0), 1)

    finish = True
    if SPLITS > 1:
        tile_values = rows[:, None] * TILE_N + tl.arange(0, TILE_N)[None, :]
        split_stride = TILE_M * (TILE_N * (1 + GATE_UP) + NORM)
        sums = sums_ptr + tile.to(tl.int64) * (SPLITS * split_stride)
        up_sums = sums + TILE_M * TILE_N
        square_sums = sums + TILE_M * TILE_N * (1 + GATE_UP)
        own = split * split_stride
        tl.store(sums + own + tile_values, product)
        if GATE_UP:
            tl.store(up_sums + own + tile_values, up_product)
        if NORM:
            tl.store(square_sums + own + rows, square_sum)
        # Every thread's stores come before the one atomic that releases them.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel", scope="gpu")
        finish = arrived == SPLITS - 1
        if finish:
            tl.store(arrivals_ptr + tile, 0)
            product = _sum_splits(sums, tile_values, split_stride, SPLITS)
            if GATE_UP:
                up_product = _sum_splits(up_sums, tile_values, split_stride, SPLITS)
            if NORM:
                square_sum = _sum_splits(square_sums, rows, split_stride, SPLITS)
    if finish:
        if NORM:
            inverse = tl.rsqrt(square_sum / in_features + eps)[:, None]
            product *= inverse
            up_product *= inverse
        if GATE_UP:
            product = product / (1.0 + tl.exp(-product)) * up_product
        result = product.to(out_ptr.dtype.element_ty)
        if RESIDUAL:
            result = (residual.to(tl.float32) + result.to(tl.float32)).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + wide_rows * out_features + columns[None, :], result, mask=stored)
