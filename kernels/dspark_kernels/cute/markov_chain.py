"""The greedy Markov chain of a block of few requests in one launch: all CTAs are resident and meet once a draft.

Each warp keeps 16 rows of W2 in its registers, in the order in which the tensor core wants them.  A candidate is one int64 word,
as in the Triton kernel: bits 63 to 32 the logit as an integer of the same order, 31 to 8 the complement of its id, 7 to 0 the
launch's tag.  Warp n of each CTA meets the others for request n.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_stream, make_ptr

from dspark_kernels.cute.builds import build_architecture
from dspark_kernels.cute.compile import compile_once

WARP = 32
ROWS = 16  # of a warp
CHUNK = 32  # values of a row that the four lanes of a quad load at a time, 16 bytes each; two steps of the tensor core
MAX_ID = (1 << 24) - 1
MAX_TAG = (1 << 8) - 1
LOWEST = -(1 << 31)  # below the order of -inf
INFINITY = 0x7F800000
NAN = 0x7FFFFFFE  # above the order of inf
PTX_TYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}


@dataclass(frozen=True, slots=True)
class Facts:
    """What a build is specialised for.  The batch, the vocabulary and strides stay dynamic.

    dtype: of the tables; rank: R, whole chunks; drafts: K; lanes: most requests, 1, 2, 4 or 8, at most the warps of a CTA;
    copies: of each word, so that fewer CTAs look at the same; keep: biased logits are stored; prefetch: each CTA asks for the W1
    rows of its candidates before it knows which one is chosen.
    """

    dtype: torch.dtype
    rank: int
    drafts: int
    programs: int
    warps: int
    lanes: int
    copies: int
    keep: bool
    prefetch: bool

    @property
    def chunks(self) -> int:
        return self.rank // CHUNK


class Tables(NamedTuple):
    """base: float32 [B, K, V]; w1, w2: [V, R] as pairs of values, strides in pairs."""

    base: cute.Pointer
    base_batch_stride: cutlass.Int64
    base_step_stride: cutlass.Int64
    w1: cute.Pointer
    w1_stride: cutlass.Int64
    w2: cute.Pointer
    w2_stride: cutlass.Int64


class Outputs(NamedTuple):
    """drafts, previous: int64 [B, K]; biased: float32 [B, K, V], read by builds that keep it."""

    drafts: cute.Pointer
    previous: cute.Pointer
    biased: cute.Pointer


class Place(NamedTuple):
    """Of a thread.  ids: of its two rows; requests: of its two columns, the last one where there is none."""

    ids: tuple
    rows: tuple
    requests: tuple
    quad: cutlass.Int32


@cute.jit
def _load_row(pointer, offset, quad, chunks: cutlass.Constexpr):
    """A lane's part of a row: four registers of two values from each chunk."""
    parts = [cute.make_rmem_tensor(4, cutlass.Int32) for _ in range(chunks)]
    for c in cutlass.range_constexpr(chunks):
        address = pointer.toint() + (offset + c * (CHUNK // 2) + quad * 4) * 4
        memory = cute.make_ptr(cutlass.Int32, address, cute.AddressSpace.gmem, assumed_align=16)
        cute.autovec_copy(cute.make_tensor(memory, cute.make_layout(4)), parts[c])
    return parts


@cute.jit
def _multiply_add(sums, rows, column, kind: cutlass.Constexpr):
    """sums += 16 rows x 16 values times 8 columns.  rows: the two rows' registers of the first and the second 8 values."""
    results = cute.arch.inline_ptx(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[cutlass.Float32] * 4,
        read_only_args=[*rows, *column, *[sums[i] for i in range(4)]],
    )
    for i in cutlass.range_constexpr(4):
        sums[i] = results[i]


@cute.jit
def _bias(low, high, part, facts: cutlass.Constexpr):
    """[row * 2 + column] of a thread's two rows and two columns.  The tensor core may take the values of a row in any order, if
    that is the same in both operands.  Two running sums, so that two products are under way."""
    kind = PTX_TYPES[facts.dtype]
    sums = [cute.make_rmem_tensor(4, cutlass.Float32) for _ in range(2)]
    for half in cutlass.range_constexpr(2):
        sums[half].fill(0.0)
    for c in cutlass.range_constexpr(facts.chunks):
        for half in cutlass.range_constexpr(2):
            a, b = 2 * half, 2 * half + 1
            rows = (low[c][a], high[c][a], low[c][b], high[c][b])
            _multiply_add(sums[half], rows, (part[c][a], part[c][b]), kind)
    for i in cutlass.range_constexpr(4):
        sums[0][i] += sums[1][i]
    return sums[0]


@cute.jit
def _load_base(tables, at, step, base):
    """base[row * 2 + column]: the logits that a thread's two rows and two columns have before the bias."""
    for row in cutlass.range_constexpr(2):
        for column in cutlass.range_constexpr(2):
            where = cutlass.Int64(at.requests[column]) * tables.base_batch_stride
            where += cutlass.Int64(step) * tables.base_step_stride + at.rows[row]
            base[row * 2 + column] = (tables.base + where).load()


@cute.jit
def _order(value):
    """A float32 as an int32 of the same order: -0 as 0, NaN above all."""
    bits = value.bitcast(cutlass.Int32)
    magnitude = bits & 0x7FFFFFFF
    order = magnitude
    if bits < 0:
        order = -magnitude
    if magnitude > INFINITY:
        order = cutlass.Int32(NAN)
    return order


@cute.jit
def _key(token):
    """The low half of an id's word, without a tag."""
    return cutlass.Uint32(token ^ MAX_ID) << 8


@cute.jit
def _best_of_warp(order, key):
    """The largest pair of all lanes, for each of them."""
    highest = cute.arch.warp_redux_sync(order, "max")
    if order != highest:
        key = cutlass.Uint32(0)
    return highest, cute.arch.warp_redux_sync(key, "umax")


@cute.jit
def _word(order, key):
    return (cutlass.Int64(order) << 32) | cutlass.Int64(key)


@cute.jit
def _halves(word):
    return cutlass.Int32(word >> 32), cutlass.Uint32(word & 0xFFFFFFFF)


@cute.jit
def _choose(values, at, vocab, request: cutlass.Constexpr):
    """The best pair of a warp's rows for one request."""
    order, key = cutlass.Int32(LOWEST), cutlass.Uint32(0)
    if at.quad == request // 2:  # the lanes that have its column
        for row in cutlass.range_constexpr(2):
            here = _order(values[row * 2 + request % 2])
            if at.ids[row] < vocab and here > order:
                order, key = here, _key(at.ids[row])
    return _best_of_warp(order, key)


@cute.jit
def _meet(words, tag, lane, facts: cutlass.Constexpr):
    """Waits for all CTAs' words of one draft and request; the chosen id."""
    each = -(-facts.programs // WARP)
    pending = cutlass.Boolean(True)
    best = cutlass.Int64(0)
    while pending:
        # A word that two lanes look at does no harm.
        found = [
            cute.arch.load(
                words + cutlass.min(lane + i * WARP, facts.programs - 1), cutlass.Int64, sem="relaxed", scope="gpu"
            )
            for i in range(each)
        ]
        best = found[0]
        here = cutlass.Uint32(found[0] & MAX_TAG) == tag
        for i in cutlass.range_constexpr(1, each):
            best = cutlass.max(best, found[i])
            here = here and cutlass.Uint32(found[i] & MAX_TAG) == tag
        pending = not cute.arch.vote_all_sync(here)
    _, key = _best_of_warp(*_halves(best))
    return cutlass.Int32(key >> 8) ^ MAX_ID


@cute.kernel
def markov_chain_kernel(
    tables: Tables,
    anchors: cute.Pointer,  # [B] int64
    words: cute.Pointer,  # [copies, K, B, programs] int64, those of the launch before or zeros
    generation: cute.Pointer,  # [1] int64, launches before this one
    outputs: Outputs,
    batch: cutlass.Int32,
    vocab: cutlass.Int32,
    facts: cutlass.Constexpr,
):
    thread, _, _ = cute.arch.thread_idx()
    program, _, _ = cute.arch.block_idx()
    lane, warp = thread % WARP, thread // WARP
    quad, drafts = lane % 4, facts.drafts
    candidates = cute.arch.alloc_smem(cutlass.Int64, facts.lanes * facts.warps)
    chosen = cute.arch.alloc_smem(cutlass.Int32, facts.lanes)

    first = (program * facts.warps + warp) * ROWS + lane // 4
    ids = (first, first + 8)
    rows = tuple(cutlass.min(token, vocab - 1) for token in ids)
    requests = tuple(cutlass.min(quad * 2 + column, batch - 1) for column in range(2))
    at = Place(ids, rows, requests, quad)
    own_request = cutlass.min(lane // 4, batch - 1)
    token = cutlass.Int32((anchors + own_request).load())
    low, high = (_load_row(tables.w2, row * tables.w2_stride, quad, facts.chunks) for row in rows)
    base = cute.make_rmem_tensor(4, cutlass.Float32)
    _load_base(tables, at, cutlass.Int32(0), base)
    # Every word is written in every launch, so that any tag but the last one's tells a new word from an old one.
    launches = generation.load()
    tag = cutlass.Uint32((launches + 1) & MAX_TAG)
    if program == 0 and thread < batch:
        (outputs.previous + thread * drafts).store((anchors + thread).load())

    for step in cutlass.range(drafts, unroll=1):
        part = _load_row(tables.w1, token * tables.w1_stride, quad, facts.chunks)
        values = _bias(low, high, part, facts)
        for i in cutlass.range_constexpr(4):
            values[i] += base[i]
        _load_base(tables, at, cutlass.min(step + 1, drafts - 1), base)  # on its way while the CTAs meet
        for request in cutlass.range_constexpr(facts.lanes):
            order, key = _choose(values, at, vocab, request)
            if lane == 0:
                (candidates + (request * facts.warps + warp)).store(_word(order, key))
        cute.arch.sync_threads()
        if warp < batch:
            mine = (candidates + (warp * facts.warps + cutlass.min(lane, facts.warps - 1))).load()
            order, key = _best_of_warp(*_halves(mine))
            place = (step * batch + warp) * facts.programs
            copy = drafts * batch * facts.programs
            if lane < facts.copies:
                # The word carries all that the others need, so that no order with other memory is asked for.
                cute.arch.store(words + (lane * copy + place + program), _word(order, key | tag), sem="relaxed", scope="gpu")
            if cutlass.const_expr(facts.prefetch):
                if lane < facts.rank // 64:
                    candidate = (cutlass.Int32(key >> 8) ^ MAX_ID) * tables.w1_stride
                    cute.arch.inline_ptx(
                        "prefetch.global.L2 [{$r0}];", read_only_args=[tables.w1.toint() + (candidate + lane * 32) * 4]
                    )
            if step + 1 < drafts or program == 0:
                draft = _meet(words + (program % facts.copies * copy + place), tag, lane, facts)
                if lane == 0:
                    (chosen + warp).store(draft)
                    if program == 0:
                        (outputs.drafts + (warp * drafts + step)).store(cutlass.Int64(draft))
                        if step + 1 < drafts:
                            (outputs.previous + (warp * drafts + step + 1)).store(cutlass.Int64(draft))
        if cutlass.const_expr(facts.keep):
            for row in cutlass.range_constexpr(2):
                for column in cutlass.range_constexpr(2):
                    if quad * 2 + column < batch and ids[row] < vocab:
                        where = cutlass.Int64((quad * 2 + column) * drafts + step) * vocab + ids[row]
                        (outputs.biased + where).store(values[row * 2 + column])
        cute.arch.sync_threads()
        token = (chosen + own_request).load()
    if program == 0 and thread == 0:
        # All have published the last words, and so have read the generation.
        generation.store(launches + 1)


@cute.jit
def _launch(
    tables: Tables,
    anchors: cute.Pointer,
    words: cute.Pointer,
    generation: cute.Pointer,
    outputs: Outputs,
    batch: cutlass.Int32,
    vocab: cutlass.Int32,
    stream: cuda.CUstream,
    facts: cutlass.Constexpr,
):
    markov_chain_kernel(tables, anchors, words, generation, outputs, batch, vocab, facts).launch(
        grid=(facts.programs, 1, 1), block=(facts.warps * WARP, 1, 1), stream=stream, cooperative=True
    )


def _arguments(addresses: tuple[int, ...], strides: tuple[int, ...], sizes: tuple[int, int]) -> tuple:
    """In `_launch`'s order, up to the stream.

    addresses: of base, W1, W2, anchors, words, generation, drafts, previous, biased; strides: of base between requests and
    drafts, of W1 and W2 in pairs; sizes: batch, vocabulary.
    """
    kinds = (cutlass.Float32, cutlass.Int32, cutlass.Int32, *(cutlass.Int64,) * 5, cutlass.Float32)
    base, w1, w2, anchors, words, generation, *outputs = (
        make_ptr(kind, address, cute.AddressSpace.gmem) for kind, address in zip(kinds, addresses, strict=True)
    )
    batch_stride, step_stride, w1_stride, w2_stride = map(cutlass.Int64, strides)
    tables = Tables(base, batch_stride, step_stride, w1, w1_stride, w2, w2_stride)
    return (tables, anchors, words, generation, Outputs(*outputs), *map(cutlass.Int32, sizes))


def _entry(facts: Facts) -> tuple:
    """`_launch` and stand-ins of its arguments."""
    return _launch, (*_arguments((0,) * 9, (0,) * 4, (1, 1)), make_fake_stream(), facts)


def compile_markov_chain(facts: Facts, architecture: str):
    """The kernel for these facts and one of the architectures of `builds.BUILDS`; from the cache after the first time."""
    return compile_once(_entry, facts, architecture)
