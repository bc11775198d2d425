"""Linear map of few rows: the weight is read once, with the pointwise work around it in the same pass."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from dspark_model.ops.fp32_linear import fp32_linear
from dspark_model.ops.programmatic import programmatic_launch
from dspark_model.ops.rms_norm import rms_norm

MAX_ROWS = 128
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Processors of an H200, for which tiles are chosen where there is no device: the interpreter and compilation ahead of time.
_H200_PROCESSORS = 132
_ONE_PROGRAM_BYTES = 28 << 20
_WIDE_TILE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class LowMTile:
    """How a product is cut: a program takes `n` weight rows (of each weight, with a gate) in blocks of `k` values, over one of
    `splits` ranges of the inner dimension; `stages` - 1 blocks are under way.  n and k: powers of two, at least 16.

    weight_first: weight @ x.T instead of x @ weight.T; with 64 weight rows (of both, with a gate) a program these are wgmma
    instructions, which read both factors from shared memory.
    norm_apart: a norm in front is a launch of its own, `rms_norm`'s; else each program norms the x that it takes.
    """

    n: int
    k: int
    splits: int
    stages: int
    warps: int
    weight_first: bool = False
    norm_apart: bool = False


@dataclass(frozen=True, slots=True)
class LowMProduct:
    """Sizes of one product, for a workspace."""

    rows: int
    out_features: int
    in_features: int
    dtype: torch.dtype
    gate_up: bool = False


class LowMWorkspace:
    """Partial sums and arrival counters of split products on one device.

    One launch uses it at a time: launches of one stream may share it in any number and order, graph replays too; two streams
    must not.  The sums may hold anything between launches; the counters are 0 then, and a launch leaves them so.
    """

    def __init__(self, device: torch.device | str, *, num_sums: int, num_tiles: int):
        self.sums = torch.empty(num_sums, dtype=torch.float32, device=device)
        self.arrivals = torch.zeros(num_tiles, dtype=torch.int32, device=device)

    @classmethod
    def for_products(cls, device: torch.device | str, products: Iterable[LowMProduct]) -> "LowMWorkspace":
        """Enough for each of the products, and for the same with fewer rows, at the tiles of `low_m_tile`."""
        processors = _processors(torch.device(device))
        num_sums = num_tiles = 0
        for product in products:
            for tile_m in (16, 32, 64, 128):
                if tile_m > _tile_m(product.rows):
                    break
                tile = low_m_tile(tile_m, product.out_features, product.in_features, product.dtype, product.gate_up, processors)
                tiles = -(-product.out_features // tile.n)
                num_sums = max(num_sums, tiles * _sums_per_tile(tile_m, tile, product.gate_up, norm=True))
                num_tiles = max(num_tiles, tiles)
        return cls(device, num_sums=num_sums, num_tiles=num_tiles)


def low_m_tile(rows: int, out_features: int, in_features: int, dtype: torch.dtype, gate_up: bool, processors: int) -> LowMTile:
    """The cut of a product; it alone decides the order of the sums.

    64 weight rows by 128 values are 16 KB, beside which 8 rows of x are 1/8 of the traffic.  On an H200 with 8 rows one program
    a processor that has five such blocks under way was the fastest for weights up to 26 MB (fewer sums to add), two with three
    for those of 30 MB and more, and three with two where its tiles run at once so, and not with two, as the 320 of a head do:
    71 us, 75 with two.  With the weight first wgmma takes both factors from shared memory: 5 to 13 % less time with 8 rows, but
    3 to 20 % more where a weight has more tiles than programs that run at once.

    With more than 32 rows x is as much traffic as the weight, so one program a processor with more under way was the fastest,
    and 128 weight rows for one of 514 MB (with 112 rows 143 us, 153 with 64).  Each program would norm x again: gate and up
    take 22 us without that and 39 with it, a norm apart 2.
    """
    tile_m, size = _tile_m(rows), out_features * in_features * dtype.itemsize * (1 + gate_up)
    n = (32 if dtype is torch.float32 else 64) // (1 + gate_up)
    tiles = -(-out_features // n)
    if dtype is torch.float32:
        k, stages, warps, programs = 32, 3, 4, 2
    elif tile_m > 32:
        wide = size >= _WIDE_TILE_BYTES
        n = 2 * n if wide else n
        (k, stages), warps, programs = (128, 4) if tile_m == 64 and not wide else (64, 6), tile_m // 16, 1
    elif size <= _ONE_PROGRAM_BYTES:
        k, stages, warps, programs = 128, 6, 4, 1
    elif 2 * processors < tiles <= 3 * processors:
        k, stages, warps, programs = 128, 3, 4, 3
    else:
        k, stages, warps, programs = 128, 4, 4, 2
    splits = low_m_splits(out_features, in_features, n, k, processors * programs)
    weight_first = dtype is not torch.float32 and (tile_m > 16 or splits > 1 or programs == 3)
    return LowMTile(n, k, splits, stages, warps, weight_first, norm_apart=weight_first and tile_m > 32)


def low_m_splits(out_features: int, in_features: int, n: int, k: int, resident: int) -> int:
    """Among the splits, at most 16, with which no more than `resident` programs run, the fewest that give each program the
    fewest blocks of k values."""
    tiles, blocks = -(-out_features // n), -(-in_features // k)
    most = max(1, min(16, resident // tiles, blocks))
    fewest_blocks = -(-blocks // most)
    return -(-blocks // fewest_blocks)


def low_m_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    up_weight: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "torch",
    workspace: LowMWorkspace | None = None,
    tile: LowMTile | None = None,
    early: bool = False,
) -> torch.Tensor:
    """x @ weight.T, accumulated in float32, for 0 to 128 rows; around it in this order, each where it is asked for:

    norm_weight [K], eps: x becomes RMSNorm(x) * norm_weight, rounded to x's dtype.
    up_weight [N, K]: the result is silu(x @ weight.T) * (x @ up_weight.T), in float32 (`GatedMLP` rounds both products before).
    The result is rounded to out_dtype.
    residual [M, N]: the result becomes residual + result, rounded again, as the plain model does it.

    x: [M, K], weight: [N, K], values of a row side by side and rows at any stride, as up_weight and residual; bfloat16, float16
    or float32, the same everywhere.  out_dtype: x's dtype (None) or float32; the latter not with a residual.  Returns [M, N],
    contiguous.

    backend: `torch`; or `triton`, which adds in another order and, with a norm that is not apart (see `LowMTile`), rounds x *
    norm_weight and scales the finished sums by 1 / rms.  With u the unit roundoff of x's dtype (2^-8 for bfloat16), both lie
    within u * sum_k |n_k * weight_k| + K * 2^-23 * sum_k |n_k * weight_k| of the exact product of the normed row n (the first
    term with a norm only), before the roundings of the result: they differ from each other by at most twice that.  A row's bits
    depend on its own values, the sizes, M's class (up to 16, 32, 64, 128), the dtype and the device's number of processors, on
    nothing else.
    workspace: `triton` only, for products that are split; see `LowMWorkspace`.
    tile: another cut than `low_m_tile` gives, for measurements; the order of the sums is then that of the cut.
    early: `triton` only: the launch begins where multiprocessors are free while the kernel before it on the stream still runs,
        if that one allows it (programmatic dependent launch, Hopper and later), and waits for its end there.

    Raises:
        ValueError: shapes, dtypes, strides or devices do not fit; more than 128 rows; float16 with a norm and `triton` (x *
            norm_weight could leave float16's range); a split product without a workspace, or with one that is too small.
    """
    _check(x, weight, up_weight, norm_weight, eps, residual, out_dtype)
    if backend == "triton":
        return _triton(x, weight, up_weight, norm_weight, eps, residual, out_dtype or x.dtype, workspace, tile, early)
    if backend != "torch":
        raise ValueError(f"low_m_linear has no backend {backend}; choose torch or triton")
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    product = fp32_linear(x, weight)
    if up_weight is not None:
        product = product * torch.sigmoid(product) * fp32_linear(x, up_weight)
    result = product.to(out_dtype or x.dtype)
    return result if residual is None else residual + result


def _check(x, weight, up_weight, norm_weight, eps, residual, out_dtype) -> None:
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1] or not weight.numel():
        raise ValueError(
            f"low_m_linear wants x [M, K] and weight [N, K], N and K at least 1, got {[*x.shape]}, {[*weight.shape]}"
        )
    if x.shape[0] > MAX_ROWS:
        raise ValueError(f"low_m_linear takes at most {MAX_ROWS} rows, got {x.shape[0]}; use torch's linear for more")
    if x.dtype not in DTYPES:
        raise ValueError(f"low_m_linear wants bfloat16, float16 or float32, got x of {x.dtype}")
    wanted = {
        "weight": (weight, weight.shape),
        "up_weight": (up_weight, weight.shape),
        "norm_weight": (norm_weight, x.shape[1:]),
        "residual": (residual, (x.shape[0], weight.shape[0])),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor is None:
            continue
        if tensor.shape != shape or tensor.dtype is not x.dtype or tensor.device != x.device:
            raise ValueError(
                f"low_m_linear wants {name} {[*shape]} of {x.dtype} on {x.device}, got {[*tensor.shape]} of {tensor.dtype} on "
                f"{tensor.device}"
            )
    if (norm_weight is None) != (eps is None):
        raise ValueError(f"low_m_linear wants norm_weight and eps together, got eps={eps}")
    if out_dtype not in (None, x.dtype, torch.float32):
        raise ValueError(f"low_m_linear returns {x.dtype} or float32, not {out_dtype}")
    if residual is not None and out_dtype not in (None, x.dtype):
        raise ValueError(f"low_m_linear with a residual of {residual.dtype} returns that dtype, not {out_dtype}")


def _triton(x, weight, up_weight, norm_weight, eps, residual, out_dtype, workspace, tile, early) -> torch.Tensor:
    (rows, in_features), out_features, gate_up = x.shape, weight.shape[0], up_weight is not None
    _check_kernel(x, weight, up_weight, norm_weight, residual)
    out = torch.empty((rows, out_features), dtype=out_dtype, device=x.device)
    if not rows:
        return out
    tile_m = _tile_m(rows)
    if tile is None:
        tile = low_m_tile(rows, out_features, in_features, x.dtype, gate_up, _processors(x.device))
    norm = norm_weight is not None
    if norm and tile.norm_apart:
        x, norm = rms_norm(x, norm_weight, eps, backend="triton"), False
    tiles = -(-out_features // tile.n)
    if tile.splits > 1:
        _check_workspace(workspace, x.device, tiles * _sums_per_tile(tile_m, tile, gate_up, norm), tiles)

    from dspark_kernels.triton.low_m_linear import low_m_linear_kernel

    ups = weight if up_weight is None else up_weight
    added = out if residual is None else residual
    low_m_linear_kernel[(tiles, tile.splits)](
        x,
        x.stride(0),
        weight,
        weight.stride(0),
        (ups.data_ptr() - weight.data_ptr()) // weight.element_size(),
        ups.stride(0),
        norm_weight if norm else x,
        added,
        added.stride(0),
        out,
        workspace.sums if tile.splits > 1 else out,
        workspace.arrivals if tile.splits > 1 else out,
        rows,
        out_features,
        in_features,
        eps if norm else 0.0,
        TILE_M=tile_m,
        TILE_N=tile.n,
        TILE_K=tile.k,
        SPLITS=tile.splits,
        EVEN_K=in_features % tile.k == 0,
        NORM=norm,
        GATE_UP=gate_up,
        RESIDUAL=residual is not None,
        WEIGHT_FIRST=tile.weight_first,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **(programmatic_launch(x.device) if early else {"PROGRAMMATIC": False}),
    )
    return out


def _check_kernel(x, weight, up_weight, norm_weight, residual) -> None:
    named = {"x": x, "weight": weight, "up_weight": up_weight, "norm_weight": norm_weight, "residual": residual}
    for name, tensor in named.items():
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"low_m_linear's kernel wants the values of a row of {name} side by side, got strides {tensor.stride()}; pass "
                f"{name}.contiguous()"
            )
    if norm_weight is not None and x.dtype is torch.float16:
        raise ValueError("low_m_linear's kernel takes no float16 with a norm, x * norm_weight could overflow; norm x before")


def _check_workspace(workspace: LowMWorkspace | None, device: torch.device, num_sums: int, num_tiles: int) -> None:
    wanted = f"num_sums={num_sums} and num_tiles={num_tiles}"
    if workspace is None:
        raise ValueError(f"this product is split, so low_m_linear needs a LowMWorkspace with at least {wanted}, got none")
    if workspace.sums.device != device:
        raise ValueError(f"the LowMWorkspace is on {workspace.sums.device}, x on {device}; make one on x's device")
    if workspace.sums.numel() < num_sums or workspace.arrivals.numel() < num_tiles:
        got = f"{workspace.sums.numel()} and {workspace.arrivals.numel()}"
        raise ValueError(
            f"the LowMWorkspace has num_sums and num_tiles {got}, this product wants {wanted}; size it for the largest"
        )


def _tile_m(rows: int) -> int:
    """The class of a row count: rows of zeros fill it up."""
    return next(size for size in (16, 32, 64, 128) if rows <= size)


def _sums_per_tile(tile_m: int, tile: LowMTile, gate_up: bool, norm: bool) -> int:
    return 0 if tile.splits == 1 else tile.splits * tile_m * (tile.n * (1 + gate_up) + norm)


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _H200_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
