"""All products between two attentions of a drafter in one launch, for Hopper: what a build depends on, and the launch."""

from collections.abc import Sequence

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_ptr

from dspark_kernels.cute.between_attentions_device import THREADS, between_attentions_kernel
from dspark_kernels.cute.between_attentions_fetch import Maps
from dspark_kernels.cute.between_attentions_meet import SWIZZLE
from dspark_kernels.cute.between_attentions_schedule import DEPTH, ELEMENTS, ROWS, Eps, Facts, Rows, Weights, Workspace
from dspark_kernels.cute.builds import build_architecture
from dspark_kernels.cute.compile import compile_once


@cute.jit
def _map(pointer, count, depth: cutlass.Constexpr, rows: cutlass.Constexpr, columns: cutlass.Constexpr):
    """The map of [count, depth] values for boxes of rows x columns, in swizzled halves of 64 columns."""
    halves = columns // SWIZZLE
    shape = (count, (SWIZZLE, halves, depth // columns) if halves > 1 else (SWIZZLE, depth // SWIZZLE))
    stride = (depth, (1, SWIZZLE, columns) if halves > 1 else (1, SWIZZLE))
    box = cute.make_composed_layout(
        cute.make_swizzle(3, 4, 3), 0, cute.make_layout((rows, (SWIZZLE, halves)), stride=(SWIZZLE, (1, rows * SWIZZLE)))
    )
    tensor = cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))
    return Maps(*cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, box, (rows, columns)))


@cute.jit
def _launch(
    weights: Weights,
    rows: Rows,
    work: Workspace,
    num_rows: cutlass.Int32,
    eps_mlp: cutlass.Float32,
    eps_attention: cutlass.Float32,
    eps_q_a: cutlass.Float32,
    stream: cuda.CUstream,
    facts: cutlass.Constexpr,
):
    f, lanes = facts, facts.lanes
    weight_maps = [
        [_map(weights.o, f.hidden, f.values, ROWS, DEPTH)],
        [_map(side, f.intermediate, f.hidden, ROWS // 2, SWIZZLE) for side in (weights.gate, weights.up)],
        [_map(weights.down, f.hidden, f.intermediate, ROWS, DEPTH)],
    ]
    x_maps = [
        _map(rows.values, num_rows, f.values, lanes, DEPTH),
        _map(rows.scaled_h, num_rows, f.hidden, lanes, DEPTH),
        _map(rows.gated, num_rows, f.intermediate, lanes, DEPTH),
    ]
    if cutlass.const_expr(f.following):
        weight_maps += [
            [_map(weights.qkv_a, f.q_rank + f.latent, f.hidden, ROWS, DEPTH)],
            [_map(weights.q_b, f.queries, f.q_rank, ROWS, DEPTH)],
        ]
        x_maps += [
            _map(rows.scaled_hidden, num_rows, f.hidden, lanes, DEPTH),
            _map(rows.scaled_q_a, num_rows, f.q_rank, lanes, DEPTH),
        ]
    operation = warpgroup.MmaF16BF16Op(
        ELEMENTS[f.dtype], cutlass.Float32, (ROWS, lanes, 16), warpgroup.OperandSource.SMEM, OperandMajorMode.K,
        OperandMajorMode.K,
    )  # fmt: skip
    mma = cute.make_tiled_mma(cute.make_mma_atom(operation))
    between_attentions_kernel(
        weight_maps, x_maps, mma, weights, rows, work, num_rows, Eps(eps_mlp, eps_attention, eps_q_a), facts
    ).launch(
        grid=(facts.ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, cooperative=not facts.early, use_pdl=facts.early
    )  # fmt: skip


def _arguments(facts: Facts, weights, rows, work, num_rows: int, eps) -> tuple:
    """In `_launch`'s order, up to the stream.  weights, rows, work: addresses."""
    element = ELEMENTS[facts.dtype]

    def pointers(kind, addresses):
        return [make_ptr(kind, address, cute.AddressSpace.gmem, assumed_align=16) for address in addresses]

    parts, squares, counters = work
    return (
        Weights(*pointers(element, weights)),
        Rows(*pointers(element, rows)),
        Workspace(
            *pointers(cutlass.Int64, (parts,)), *pointers(cutlass.Float32, (squares,)), *pointers(cutlass.Int32, (counters,))
        ),
        cutlass.Int32(num_rows),
        *map(cutlass.Float32, eps),
    )


def _entry(facts: Facts) -> tuple:
    """`_launch` and stand-ins of its arguments."""
    arguments = _arguments(facts, (16,) * len(Weights._fields), (16,) * len(Rows._fields), (16,) * 3, 1, (0.0,) * 3)
    return _launch, (*arguments, make_fake_stream(), facts)


def compile_between_attentions(facts: Facts, architecture: str):
    """The kernel for these facts; from the cache after the first time."""
    return compile_once(_entry, facts, architecture)


def launch(
    facts: Facts,
    weights: Sequence[torch.Tensor],
    rows: Sequence[torch.Tensor],
    work: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    eps: Sequence[float],
) -> None:
    """One launch on the device's current stream, under a CUDA graph too.

    weights, rows: in the order of `Weights` and `Rows`; what belongs to the next layer is left out where none follows; work:
    parts, squares, counters; eps: of the norms of the MLP, of the next layer's and of its queries.

    Raises:
        ValueError: a tensor is not contiguous or does not begin at a multiple of 16 bytes.
    """
    for name, tensor in (*zip(Weights._fields, weights, strict=False), *zip(Rows._fields, rows, strict=False)):
        if not tensor.is_contiguous() or tensor.data_ptr() % 16:
            raise ValueError(
                f"between_attentions=cute wants {name} contiguous and at a multiple of 16 bytes, got {[*tensor.shape]} with "
                f"strides {[*tensor.stride()]} at {tensor.data_ptr():#x}; pass a clone(memory_format=torch.contiguous_format)"
            )
    device = rows[0].device
    architecture = build_architecture(torch.cuda.get_device_capability(device))
    # The kernel does not look at the addresses of what is not there.
    addresses = [
        [tensor.data_ptr() for tensor in (*given, *given[:1] * (len(kind._fields) - len(given)))]
        for kind, given in ((Weights, tuple(weights)), (Rows, tuple(rows)))
    ]
    with torch.cuda.device(device):
        stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
        arguments = _arguments(facts, *addresses, [tensor.data_ptr() for tensor in work], rows[0].shape[0], eps)
        compile_between_attentions(facts, architecture)(*arguments, stream)
