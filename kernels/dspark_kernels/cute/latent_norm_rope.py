"""RMSNorm over the latent and RoPE over its rotary slice, one CTA a row and layer; stored side by side or straight into the
pool.  Both forms are one kernel: only the address of the store differs."""

import math
from dataclasses import dataclass, replace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_stream, make_ptr

from dspark_kernels.cute.builds import build_architecture
from dspark_kernels.cute.compile import compile_once

ELEMENTS = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16, torch.float32: cutlass.Float32}
WARP = 32
MOST_THREADS = 512
WIDEST = 16  # bytes of the widest load or store


@dataclass(frozen=True, slots=True)
class Facts:
    """What a build is specialised for.  Rows, layers and strides stay dynamic.

    dtype: of kv, weight and out; latent: C; rotary: r; pool: the store goes to pages and offsets; aligned: the places of all
    chunks are multiples of a chunk, so that each is one access.
    """

    dtype: torch.dtype
    latent: int
    rotary: int
    pool: bool
    aligned: bool

    @property
    def chunk(self) -> int:
        """Neighbouring values that one thread takes.  It sets the order of the sum, so it follows from the shape alone: builds
        that differ in `pool` or `aligned` give the same bits."""
        return math.gcd(WIDEST // self.dtype.itemsize, self.latent, self.rotary)

    @property
    def turned(self) -> int:
        """Neighbouring values of the rotary slice that one thread takes: whole pairs."""
        return max(self.chunk, 2)

    @property
    def threads(self) -> int:
        """A thread for each chunk of the latent and of the rotary slice, up to a limit, in whole warps."""
        wanted = self.latent // self.chunk + self.rotary // self.turned
        return min(MOST_THREADS, -(-wanted // WARP) * WARP)


@cute.jit
def _values(pointer, count: cutlass.Constexpr, aligned: cutlass.Constexpr):
    """count values in memory as a tensor; aligned: pointer is a multiple of their size."""
    size = pointer.dtype.width // 8
    place = cute.make_ptr(
        pointer.dtype, pointer.toint(), cute.AddressSpace.gmem, assumed_align=count * size if aligned else size
    )
    return cute.make_tensor(place, cute.make_layout(count))


@cute.jit
def load_wide(pointer, count: cutlass.Constexpr, aligned: cutlass.Constexpr):
    """count values from memory, as float32 in registers."""
    memory = _values(pointer, count, aligned)
    registers = cute.make_rmem_tensor(count, pointer.dtype)
    cute.autovec_copy(memory, registers)
    wide = cute.make_rmem_tensor(count, cutlass.Float32)
    wide.store(registers.load().to(cutlass.Float32))
    return wide


@cute.jit
def store_rounded(pointer, wide, count: cutlass.Constexpr, aligned: cutlass.Constexpr):
    """The one rounding: count float32 values from registers to memory."""
    registers = cute.make_rmem_tensor(count, pointer.dtype)
    registers.store(wide.load().to(pointer.dtype))
    cute.autovec_copy(registers, _values(pointer, count, aligned))


@cute.jit
def _sum_over_threads(value: cutlass.Float32, thread: cutlass.Int32, warps: cutlass.Constexpr) -> cutlass.Float32:
    """The sum of all threads' values, for each of them: a butterfly in each warp, then the warps in order."""
    value = cute.arch.warp_reduction_sum(value)
    totals = cute.make_tensor(cute.arch.alloc_smem(cutlass.Float32, warps), cute.make_layout(warps))
    if thread % WARP == 0:
        totals[thread // WARP] = value
    cute.arch.sync_threads()
    total = totals[0]
    for warp in cutlass.range_constexpr(1, warps):
        total += totals[warp]
    return total


@cute.jit
def rotated(values, cos, sin, pairs: cutlass.Constexpr):
    """Adjacent pairs turned.  The fused multiply-adds are spelt out, so that no build chooses its own."""
    out = cute.make_rmem_tensor(2 * pairs, cutlass.Float32)
    for i in cutlass.range_constexpr(pairs):
        even, odd = values[2 * i], values[2 * i + 1]
        out[2 * i] = cute.math.fma(even, cos[i], -(odd * sin[i]))
        out[2 * i + 1] = cute.math.fma(odd, cos[i], even * sin[i])
    return out


@cute.kernel
def latent_norm_rope_kernel(
    kv: cute.Pointer,  # [L, M, C + r], any strides but 1 between values
    kv_layer_stride: cutlass.Int64,
    kv_row_stride: cutlass.Int64,
    weight: cute.Pointer,  # [L, C]
    cos_sin: cute.Pointer,  # [M, r] float32: r / 2 cosines, r / 2 sines
    out: cute.Pointer,  # [L, M, C + r], or the first value of layer 0's view of the pool
    out_layer_stride: cutlass.Int64,
    out_page_stride: cutlass.Int64,  # pool only
    out_row_stride: cutlass.Int64,
    pages: cute.Pointer,  # [M] int64, pool only
    offsets: cute.Pointer,  # [M] int64, pool only
    owned: cute.Pointer,  # [M] uint8, pool only
    eps: cutlass.Float32,
    facts: cutlass.Constexpr,
):
    thread, _, _ = cute.arch.thread_idx()
    row32, layer32, _ = cute.arch.block_idx()
    row, layer = cutlass.Int64(row32), cutlass.Int64(layer32)
    chunk, turned, threads, aligned = facts.chunk, facts.turned, facts.threads, facts.aligned
    chunks, turns = facts.latent // chunk, facts.rotary // turned
    kv = kv + layer * kv_layer_stride + row * kv_row_stride
    weight = weight + layer * facts.latent
    cos_sin = cos_sin + row * facts.rotary

    stored = cutlass.Boolean(True)
    out = out + layer * out_layer_stride
    if cutlass.const_expr(facts.pool):
        stored = (owned + row).load() != 0
        out = out + (pages + row).load() * out_page_stride + (offsets + row).load() * out_row_stride
    else:
        out = out + row * out_row_stride

    # In front of the barrier, and by the last threads: those have no chunk of the latent when there are threads for all.
    for i in cutlass.range_constexpr(-(-turns // threads)):
        at = threads - 1 - thread + i * threads
        if stored and at < turns:
            pairs, first = turned // 2, facts.latent + at * turned
            values = load_wide(kv + first, turned, aligned)
            cos = load_wide(cos_sin + at * pairs, pairs, aligned)
            sin = load_wide(cos_sin + facts.rotary // 2 + at * pairs, pairs, aligned)
            store_rounded(out + first, rotated(values, cos, sin, pairs), turned, aligned)

    rounds = -(-chunks // threads)
    latent = [cute.make_rmem_tensor(chunk, cutlass.Float32) for _ in range(rounds)]
    scales = [cute.make_rmem_tensor(chunk, cutlass.Float32) for _ in range(rounds)]
    squares = cutlass.Float32(0.0)
    for i in cutlass.range_constexpr(rounds):
        at = thread + i * threads
        latent[i].fill(0.0)
        if at < chunks:
            latent[i].store(load_wide(kv + at * chunk, chunk, aligned).load())
            scales[i].store(load_wide(weight + at * chunk, chunk, aligned).load())
        for j in cutlass.range_constexpr(chunk):
            squares = cute.math.fma(latent[i][j], latent[i][j], squares)
    total = _sum_over_threads(squares, thread, threads // WARP)
    inverse = cute.math.rsqrt(cute.math.fma(total, cutlass.Float32(1.0 / facts.latent), eps))

    for i in cutlass.range_constexpr(rounds):
        at = thread + i * threads
        if stored and at < chunks:
            normed = cute.make_rmem_tensor(chunk, cutlass.Float32)
            normed.store(latent[i].load() * inverse * scales[i].load())
            store_rounded(out + at * chunk, normed, chunk, aligned)


@cute.jit
def _launch(
    kv: cute.Pointer,
    kv_layer_stride: cutlass.Int64,
    kv_row_stride: cutlass.Int64,
    weight: cute.Pointer,
    cos_sin: cute.Pointer,
    out: cute.Pointer,
    out_layer_stride: cutlass.Int64,
    out_page_stride: cutlass.Int64,
    out_row_stride: cutlass.Int64,
    pages: cute.Pointer,
    offsets: cute.Pointer,
    owned: cute.Pointer,
    eps: cutlass.Float32,
    rows: cutlass.Int32,
    layers: cutlass.Int32,
    stream: cuda.CUstream,
    facts: cutlass.Constexpr,
):
    latent_norm_rope_kernel(
        kv,
        kv_layer_stride,
        kv_row_stride,
        weight,
        cos_sin,
        out,
        out_layer_stride,
        out_page_stride,
        out_row_stride,
        pages,
        offsets,
        owned,
        eps,
        facts,
    ).launch(grid=(rows, layers, 1), block=(facts.threads, 1, 1), stream=stream)


def _arguments(element, addresses, kv_strides, strides, eps: float, grid) -> tuple:
    """In `_launch`'s order, up to the stream.

    addresses: of kv, weight, cos_sin, out, pages, offsets, owned; kv_strides: layers, rows; strides: of out between layers,
    pages and rows; grid: rows, layers.
    """
    types = (element, element, cutlass.Float32, element, cutlass.Int64, cutlass.Int64, cutlass.Uint8)
    pointers = [make_ptr(kind, address, cute.AddressSpace.gmem) for kind, address in zip(types, addresses, strict=True)]
    kv, weight, cos_sin, out, *places = pointers
    wide, kv_wide = map(cutlass.Int64, strides), map(cutlass.Int64, kv_strides)
    return (kv, *kv_wide, weight, cos_sin, out, *wide, *places, cutlass.Float32(eps), *map(cutlass.Int32, grid))


def _entry(facts: Facts) -> tuple:
    """`_launch` and stand-ins of its arguments."""
    arguments = _arguments(ELEMENTS[facts.dtype], (0,) * 7, (0, 0), (0, 0, 0), 0.0, (1, 1))
    return _launch, (*arguments, make_fake_stream(), facts)


def compile_latent_norm_rope(facts: Facts, architecture: str):
    """The kernel for these facts and one of the architectures of `builds.BUILDS`; from the cache after the first time."""
    return compile_once(_entry, facts, architecture)


def latent_norm_rope(
    kv: torch.Tensor,
    weight: torch.Tensor,
    cos_sin: torch.Tensor,
    out: torch.Tensor,
    strides: tuple[int, int, int],
    places: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    eps: float,
) -> None:
    """One launch on the device's current stream.

    kv: [L, M, C + r], values of a row side by side; weight: [L, C]; cos_sin: float32 [M, r]; out: written, of kv's dtype;
    strides: of out between layers, pages and rows, in values; places: int64 pages, int64 offsets, uint8 owned, of M rows; None
    for rows side by side.

    Raises:
        ValueError: nothing is built for the device or the dtype.
    """
    if kv.dtype not in ELEMENTS:
        raise ValueError(f"latent_norm_rope=cute has no kernel for {kv.dtype}, only for {', '.join(map(str, ELEMENTS))}")
    layers, rows, width = kv.shape
    architecture = build_architecture(torch.cuda.get_device_capability(kv.device))
    # The kernel does not look at the addresses of the plain form.
    tensors = (kv, weight, cos_sin, out, *((cos_sin,) * 3 if places is None else places))
    facts = Facts(kv.dtype, weight.shape[-1], width - weight.shape[-1], places is not None, False)
    facts = replace(facts, aligned=_aligned(facts, tensors, (*kv.stride()[:2], *strides)))
    with torch.cuda.device(kv.device):
        stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
        addresses = [tensor.data_ptr() for tensor in tensors]
        arguments = _arguments(ELEMENTS[kv.dtype], addresses, kv.stride()[:2], strides, eps, (rows, layers))
        compile_latent_norm_rope(facts, architecture)(*arguments, stream)


def _aligned(facts: Facts, tensors: tuple[torch.Tensor, ...], strides: tuple[int, ...]) -> bool:
    """Whether every chunk of every row lies on a multiple of its size; C and r are whole chunks already."""
    if facts.latent % facts.turned:
        return False
    bases = [tensor.data_ptr() for tensor in tensors[:4]]
    return not any(base % WIDEST for base in bases) and not any(stride % facts.turned for stride in strides)
