"""x @ weight.T for few rows of x: the weight streams through once, in tiles of its rows, and the inner dimension is split over
programs where the tiles alone are too few for the device.

RMSNorm in front, silu(gate) * up and the addition of a residual behind are part of the same pass.  The splits of a tile leave
float32 partial sums in a workspace; the program that arrives last adds them in the order of the splits.
"""

import triton
import triton.language as tl

from dspark_kernels.triton.programmatic import wait_then_let_next_in


@triton.jit
def _sum_splits(partial_ptr, offsets, split_stride, SPLITS: tl.constexpr):
    """The partial sums of a tile, added in the order of the splits; past L1, since other programs wrote them."""
    total = tl.load(partial_ptr + offsets, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        total += tl.load(partial_ptr + split * split_stride + offsets, cache_modifier=".cg")
    return total


@triton.jit
def _halves(joined, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """The first and the last TILE_N columns of [TILE_M, 2 * TILE_N]."""
    return joined.reshape(TILE_M, 2, TILE_N).permute(0, 2, 1).split()


@triton.jit(do_not_specialize=["num_rows"])
def low_m_linear_kernel(
    x_ptr,  # [M, K], values of a row side by side
    x_row_stride,
    weight_ptr,  # [N, K], values of a row side by side; with GATE_UP: the gate's rows
    weight_row_stride,
    up_distance,  # from weight_ptr to up's first value, [N, K] too, in values; GATE_UP only
    up_row_stride,
    norm_weight_ptr,  # [K], NORM only
    residual_ptr,  # [M, N], values of a row side by side, RESIDUAL only
    residual_row_stride,
    out_ptr,  # [M, N] contiguous
    sums_ptr,  # float32 [tiles, SPLITS, (TILE_M, TILE_N or 2 * TILE_N with GATE_UP) | NORM TILE_M], SPLITS > 1 only
    arrivals_ptr,  # int32 [tiles], 0 before and after a launch, SPLITS > 1 only
    num_rows,
    out_features,
    in_features,
    eps,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr,  # TILE_K divides in_features
    NORM: tl.constexpr,
    GATE_UP: tl.constexpr,
    RESIDUAL: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,  # computes weight @ x.T: 64 rows of a weight are what wgmma takes
    PROGRAMMATIC: tl.constexpr,
):
    tile = tl.program_id(0)
    split = tl.program_id(1)
    blocks = tl.cdiv(in_features, TILE_K)
    first = (blocks * split // SPLITS) * TILE_K
    last = (blocks * (split + 1) // SPLITS) * TILE_K

    rows = tl.arange(0, TILE_M)
    inside = rows < num_rows
    # Rows of both weights lie in one tile: the gate's, then those of up.
    joined: tl.constexpr = TILE_N * (1 + GATE_UP)
    here_rows = tl.arange(0, joined)
    # Lanes behind the last weight row read that row again: their sums are not stored.
    weight_rows = tl.minimum(tile * TILE_N + here_rows % TILE_N, out_features - 1).to(tl.int64)
    starts = weight_rows * weight_row_stride
    if GATE_UP:
        # Computed, not chosen between: the compiler then knows that the loads are aligned.
        starts += (here_rows // TILE_N) * (up_distance + weight_rows * (up_row_stride - weight_row_stride))
    lanes = tl.arange(0, TILE_K)
    wide_rows = rows[:, None].to(tl.int64)
    x_values = x_ptr + wide_rows * x_row_stride + lanes[None, :]
    weight_values = (weight_ptr + starts)[:, None] + lanes[None, :]

    wait_then_let_next_in(PROGRAMMATIC)
    columns = tile * TILE_N + tl.arange(0, TILE_N)
    stored = inside[:, None] & (columns < out_features)[None, :]
    if RESIDUAL:
        # Ahead of the products: behind them its latency would add to the launch.
        residual = tl.load(residual_ptr + wide_rows * residual_row_stride + columns[None, :], mask=stored, other=0.0)
    product = tl.zeros((joined, TILE_M) if WEIGHT_FIRST else (TILE_M, joined), tl.float32)
    # With WEIGHT_FIRST sums of the squares of 8 neighbours; else row products of x, whose diagonal are the sums of squares.
    squares = tl.zeros((TILE_M, TILE_K // 8 if WEIGHT_FIRST else TILE_M), tl.float32)
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
            wide_x = x.to(tl.float32)
            if WEIGHT_FIRST:
                squares += tl.sum((wide_x * wide_x).reshape(TILE_M, TILE_K // 8, 8), 2)
            else:
                squares = tl.dot(x, x.T, squares, input_precision="ieee")
            x = (wide_x * scale.to(tl.float32)[None, :]).to(x_ptr.dtype.element_ty)
            # For the next turn: this load's latency would stand in the way of the products.
            ahead = lanes + k + TILE_K
            scale = tl.load(norm_weight_ptr + ahead, mask=ahead < in_features, other=0.0)
        if WEIGHT_FIRST:
            product = tl.dot(weight, x.T, product, input_precision="ieee")
        else:
            product = tl.dot(x, weight.T, product, input_precision="ieee")
    if WEIGHT_FIRST:
        product = product.T
        square_sum = tl.sum(squares, 1)
    else:
        square_sum = tl.sum(tl.where(rows[:, None] == rows[None, :], squares, 0.0), 1)

    finish = True
    if SPLITS > 1:
        tile_values = rows[:, None] * joined + here_rows[None, :]
        split_stride = TILE_M * (joined + NORM)
        sums = sums_ptr + tile.to(tl.int64) * (SPLITS * split_stride)
        square_sums = sums + TILE_M * joined
        own = split * split_stride
        tl.store(sums + own + tile_values, product)
        if NORM:
            tl.store(square_sums + own + rows, square_sum)
        # Every thread's stores come before the one atomic that releases them.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel", scope="gpu")
        finish = arrived == SPLITS - 1
        if finish:
            tl.store(arrivals_ptr + tile, 0)
            product = _sum_splits(sums, tile_values, split_stride, SPLITS)
            if NORM:
                square_sum = _sum_splits(square_sums, rows, split_stride, SPLITS)
    if finish:
        if NORM:
            product *= tl.rsqrt(square_sum / in_features + eps)[:, None]
        if GATE_UP:
            gate, up = _halves(product, TILE_M, TILE_N)
            value = gate / (1.0 + tl.exp(-gate)) * up
        else:
            value = product
        result = value.to(out_ptr.dtype.element_ty)
        if RESIDUAL:
            result = (residual.to(tl.float32) + result.to(tl.float32)).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + wide_rows * out_features + columns[None, :], result, mask=stored)
