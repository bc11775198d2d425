"""All products between two attentions of a drafter in one launch, for Hopper: what a build depends on, and the launch."""

from collections.abc import Mapping, Sequence

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_stream, make_ptr

from dspark_kernels.cute.between_attentions_device import THREADS, between_attentions_kernel
from dspark_kernels.cute.between_attentions_fetch import Maps
from dspark_kernels.cute.between_attentions_schedule import ELEMENTS, NOPE, Context, Eps, Facts, Into, Rows, Weights, Workspace
from dspark_kernels.cute.block_attention import AttentionCall, stand_in_merge_arguments, tma_boxes
from dspark_kernels.cute.block_attention_fetch import SWIZZLE
from dspark_kernels.cute.block_attention_product import Matrices
from dspark_kernels.cute.block_attention_schedule import CHUNK, Requests
from dspark_kernels.cute.block_attention_schedule import Workspace as Parts
from dspark_kernels.cute.builds import build_architecture
from dspark_kernels.cute.compile import compile_once


@cute.jit
def _map(pointer, count, depth: cutlass.Constexpr, rows: cutlass.Constexpr, columns: cutlass.Constexpr):
    """The map of [count, depth] values for boxes of rows x columns, in swizzled blocks of 64 columns."""
    blocks = columns // SWIZZLE
    layout = cute.make_layout((count, (SWIZZLE, blocks, depth // columns)), stride=(depth, (1, SWIZZLE, columns)))
    return Maps(*tma_boxes(cute.make_tensor(pointer, layout), rows, columns))


@cute.jit
def _map_by_head(
    pointer, count, row_stride, blocks: cutlass.Constexpr, heads: cutlass.Constexpr, head_stride,
    rows: cutlass.Constexpr, columns: cutlass.Constexpr,
):  # fmt: skip
    """The map of [count, blocks * 64, heads] values, for boxes of rows x columns of a head."""
    shape, stride = (count, (SWIZZLE, blocks), heads), (row_stride, (1, SWIZZLE), head_stride)
    return Maps(*tma_boxes(cute.make_tensor(pointer, cute.make_layout(shape, stride=stride)), rows, columns))


@cute.jit
def _matrix_map(matrices: Matrices, facts: cutlass.Constexpr):
    """Of the heads' value matrices, for boxes of all columns and 64 latents."""
    a = facts.attention
    column_stride, head_stride = (cute.assume(s, divby=CHUNK) for s in (matrices.column_stride, matrices.head_stride))
    return _map_by_head(matrices.values, a.value_width, column_stride, a.slices, a.heads, head_stride, a.value_width, SWIZZLE)


@cute.jit
def _absorption_maps(into: Into, queries, num_rows, facts: cutlass.Constexpr):
    """Of the heads' key matrices, for boxes of 64 latents, and of the part of the queries that meets them, for that of a
    head."""
    f, width = facts, facts.queries // facts.heads
    latent, head_stride = f.slices * SWIZZLE, cute.assume(into.keys_stride, divby=CHUNK)
    keys = _map_by_head(into.keys, NOPE, latent, f.slices, f.heads, head_stride, NOPE, SWIZZLE)
    return keys, _map_by_head(queries, num_rows, f.queries, NOPE // SWIZZLE, f.heads, width, f.lanes, NOPE)


@cute.jit
def _launch(
    requests: Requests,
    parts: Parts,
    matrices: Matrices,
    weights: Weights,
    rows: Rows,
    into: Into,
    context: Context,
    work: Workspace,
    num_rows: cutlass.Int32,
    eps_mlp: cutlass.Float32,
    eps_attention: cutlass.Float32,
    eps_q_a: cutlass.Float32,
    eps_latent: cutlass.Float32,
    eps_context: cutlass.Float32,
    stream: cuda.CUstream,
    facts: cutlass.Constexpr,
):
    f = facts
    sources = {
        "o": (weights.o,), "gate_up": (weights.gate, weights.up), "down": (weights.down,), "qkv_a": (weights.qkv_a,),
        "q_b": (weights.q_b,), "context": (weights.context,),
    }  # fmt: skip
    x_of = {
        "o": rows.values, "gate_up": rows.scaled_h, "down": rows.gated, "qkv_a": rows.scaled_hidden, "q_b": rows.scaled_q_a,
        "context": rows.context,
    }  # fmt: skip
    weight_maps, x_maps = [], []
    for product in facts.products:
        if cutlass.const_expr(product.by_head):
            keys, queries = _absorption_maps(into, rows.queries, num_rows, facts)
            weight_maps.append([keys])
            x_maps.append(queries)
        else:
            sides = sources[product.name]
            count, height = product.tiles * product.rows // len(sides), product.rows // len(sides)
            weight_maps.append([_map(side, count, product.depth, height, product.columns) for side in sides])
            given = context.rows if product.name == "context" else num_rows
            x_maps.append(_map(x_of[product.name], given, product.depth, f.lanes, product.x_columns))
    matrix = [_matrix_map(matrices, facts)] if facts.attention is not None else []
    between_attentions_kernel(
        weight_maps, x_maps, matrix, requests, parts, weights, rows, into, context, work, num_rows,
        Eps(eps_mlp, eps_attention, eps_q_a, eps_latent, eps_context), facts,
    ).launch(
        grid=(facts.ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, cooperative=not facts.early,
        use_pdl=facts.early, min_blocks_per_mp=1,
    )  # fmt: skip


def _places(element) -> tuple[tuple, tuple]:
    """Of the fields of `Into` and of `Context`: types and alignments of pointers, or of numbers, which have none."""
    number, wide = (cutlass.Int32, None), (cutlass.Int64, None)
    values, turns = (element, 16), (cutlass.Float32, 16)
    addresses = ((cutlass.Int64, 8), (cutlass.Int64, 8), (cutlass.Uint8, 1))
    into = (values, wide, turns, values, wide, wide, *addresses)
    return into, (number, values, turns, values, wide, wide, wide, *addresses)


def _arguments(facts: Facts, merge: tuple, weights, rows, into, context, work, num_rows: int, eps) -> tuple:
    """In `_launch`'s order, up to the stream.  merge: requests, parts and matrices; weights, rows, work: addresses; into,
    context: what `Into` and `Context` hold."""
    element = ELEMENTS[facts.dtype]

    def pointer(kind, address, align=16):
        return make_ptr(kind, address, cute.AddressSpace.gmem, assumed_align=align)

    def fields(kinds, given):
        pairs = zip(kinds, given, strict=True)
        return [kind(value) if align is None else pointer(kind, value, align) for (kind, align), value in pairs]

    into_kinds, context_kinds = _places(element)
    return (
        *merge,
        Weights(*(pointer(element, address) for address in weights)),
        Rows(*(pointer(element, address) for address in rows)),
        Into(*fields(into_kinds, into)),
        Context(*fields(context_kinds, context)),
        Workspace(*map(pointer, (cutlass.Int64, cutlass.Float32, cutlass.Int32), work)),
        cutlass.Int32(num_rows),
        *map(cutlass.Float32, eps),
    )


NO_INTO, NO_CONTEXT = (16,) * len(Into._fields), (1,) + (16,) * (len(Context._fields) - 1)  # which no product looks at


def _entry(facts: Facts) -> tuple:
    """`_launch` and stand-ins of its arguments."""
    weights, rows, work = ((16,) * len(kind._fields) for kind in (Weights, Rows, Workspace))
    merge, eps = stand_in_merge_arguments(), (0.0,) * len(Eps._fields)
    arguments = _arguments(facts, merge, weights, rows, NO_INTO, NO_CONTEXT, work, 1, eps)
    return _launch, (*arguments, make_fake_stream(), facts)


def compile_between_attentions(facts: Facts, architecture: str):
    """The kernel for these facts; from the cache after the first time."""
    return compile_once(_entry, facts, architecture)


def launch(
    facts: Facts,
    attention: AttentionCall | None,
    weights: Mapping[str, torch.Tensor],
    rows: Mapping[str, torch.Tensor],
    work: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    eps: Mapping[str, float],
    into: Sequence[int] = (),
    context: Sequence[int] = (),
) -> None:
    """One launch on the device's current stream, under a CUDA graph too.

    attention: what makes the first product's x, where `Facts.attention` is its facts; weights, rows, eps: by the names of
    `Weights`, `Rows` and `Eps`, those that the build's products have; work: words, squares, counters; into, context: addresses
    and numbers in the order of `Into` and of `Context`, as far as the build looks at them.

    Raises:
        ValueError: a tensor is not contiguous or does not begin at a multiple of 16 bytes.
    """
    for name, tensor in (*weights.items(), *rows.items()):
        if not tensor.is_contiguous() or tensor.data_ptr() % 16:
            raise ValueError(
                f"between_attentions=cute wants {name} contiguous and at a multiple of 16 bytes, got {[*tensor.shape]} with "
                f"strides {[*tensor.stride()]} at {tensor.data_ptr():#x}; pass a clone(memory_format=torch.contiguous_format)"
            )
    first = next(iter(rows.values()))
    device = first.device
    architecture = build_architecture(torch.cuda.get_device_capability(device))
    # The kernel does not look at the addresses of what is not there.
    addresses = [
        [given.get(name, first).data_ptr() for name in kind._fields] for kind, given in ((Weights, weights), (Rows, rows))
    ]
    with torch.cuda.device(device):
        stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
        merge = stand_in_merge_arguments() if attention is None else attention.merge_arguments
        num_rows = rows["residual"].shape[0] if "residual" in rows else 1
        places = [tensor.data_ptr() for tensor in work]
        into, context = (*into, *NO_INTO[len(into) :]), (*context, *NO_CONTEXT[len(context) :])
        norms = tuple(eps.get(name, 0.0) for name in Eps._fields)
        arguments = _arguments(facts, merge, *addresses, into, context, places, num_rows, norms)
        compile_between_attentions(facts, architecture)(*arguments, stream)
