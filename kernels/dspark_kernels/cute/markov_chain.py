"""The greedy Markov chain of a block of few requests in one launch: all CTAs are resident and meet once a draft.

Each warp keeps 16 rows of W2 in its registers, in the order in which the tensor core wants them.  A candidate is one int64
word, as in the Triton kernel: bits 63 to 32 the logit as an integer of the same order, 31 to 8 the complement of its id, 7 to 0
the launch's tag.  Each request is one warp's, which meets that warp of the other CTAs.
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
TILE = 8  # requests that the tensor core takes at a time
CHUNK = 32  # values of a row that the four lanes of a quad load at a time, 16 bytes each; two steps of the tensor core
MAX_ID = (1 << 24) - 1
MAX_TAG = (1 << 8) - 1
LINE = 64  # values in 128 bytes
LOWEST = -(1 << 31)  # below the order of -inf
INFINITY = 0x7F800000
NAN = 0x7FFFFFFE  # above the order of inf
PTX_TYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}


@dataclass(frozen=True, slots=True)
class Facts:
    """What a build is specialised for.  The batch, the vocabulary and strides stay dynamic.

    dtype: of the tables; rank: R, whole chunks; drafts: K; lanes: most requests, a power of 2; copies: of each word, so that
    fewer CTAs look at the same; keep: biased logits are stored; prefetch: each CTA asks for the W1 rows of its candidates
    before it knows which one is chosen; cooperative: the driver refuses a grid that cannot be resident at once.
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
    cooperative: bool = True

    @property
    def chunks(self) -> int:
        return self.rank // CHUNK

    @property
    def tiles(self) -> int:
        """Of requests."""
        return -(-self.lanes // TILE)

    @property
    def turns(self) -> int:
        """Requests of a warp."""
        return -(-self.lanes // self.warps)


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


class Meeting(NamedTuple):
    """words: int64 [copies, K, B, programs], those of the launch before or zeros; tag: of this launch; batch: B."""

    words: cute.Pointer
    tag: cutlass.Uint32
    batch: cutlass.Int32


class Place(NamedTuple):
    """Of a thread: its two rows' ids; the rows that it reads for them, the last one where there is none; its lane, and that in
    a quad, whose columns of a tile are 2 * quad and 2 * quad + 1; its warp and CTA."""

    ids: tuple
    rows: tuple
    lane: cutlass.Int32
    quad: cutlass.Int32
    warp: cutlass.Int32
    program: cutlass.Int32


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
def _load_base(tables, at, step, batch, base, facts: cutlass.Constexpr):
    """base[tile][row * 2 + column]: a thread's logits before the bias; those of the last request where there is none."""
    for tile in cutlass.range_constexpr(facts.tiles):
        for column in cutlass.range_constexpr(2):
            request = cutlass.min(tile * TILE + at.quad * 2 + column, batch - 1)
            where = request * tables.base_batch_stride + step * tables.base_step_stride
            for row in cutlass.range_constexpr(2):
                base[tile][row * 2 + column] = (tables.base + (where + at.rows[row])).load()


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
def _token(key):
    return cutlass.Int32(key >> 8) ^ MAX_ID


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
def _choose(values, at, request: cutlass.Constexpr):
    """The best pair of a warp's rows for one request of a tile.  A row past the vocabulary has the last row's logit and a
    higher id, so that it is never chosen."""
    order, key = cutlass.Int32(LOWEST), cutlass.Uint32(0)
    if at.quad == request // 2:  # the lanes that have its column
        for row in cutlass.range_constexpr(2):
            here = _order(values[row * 2 + request % 2])
            if here > order:
                order, key = here, _key(at.ids[row])
    return _best_of_warp(order, key)


@cute.jit
def _publish(meeting, candidates, tables, at, request, step, facts: cutlass.Constexpr):
    """The best of a CTA's warps for one request, for all CTAs."""
    own = (candidates + (request * facts.warps + cutlass.min(at.lane, facts.warps - 1))).load()
    order, key = _best_of_warp(*_halves(own))
    if at.lane < facts.copies:
        # The word carries all that the others need, so that no order with other memory is asked for.
        where = _words(meeting, at.lane, request, step, facts) + at.program
        cute.arch.store(where, _word(order, key | meeting.tag), sem="relaxed", scope="gpu")
    if cutlass.const_expr(facts.prefetch):
        _prefetch_row(tables, _token(key), at.lane, facts)


@cute.jit
def _prefetch_row(tables, token, lane, facts: cutlass.Constexpr):
    """Brings a row of W1 into the L2 cache; whole lines alone, so that nothing behind it is asked for."""
    if lane < facts.rank // LINE:
        address = tables.w1.toint() + (token * tables.w1_stride + lane * (LINE // 2)) * 4
        cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address])


@cute.jit
def _prefetch_anchors(tables, tokens, at, facts: cutlass.Constexpr):
    """The rows of the first draft: a warp waits for its rows of W2 before it asks for them."""
    if at.warp == 0:
        for tile in cutlass.range_constexpr(facts.tiles):
            _prefetch_row(tables, tokens[tile], at.quad, facts)


@cute.jit
def _words(meeting, copy, request, step, facts: cutlass.Constexpr):
    """Where the words of a draft and request begin."""
    return meeting.words + ((copy * facts.drafts + step) * meeting.batch + request) * facts.programs


@cute.jit
def _meet(meeting, at, request, step, facts: cutlass.Constexpr):
    """Waits for all CTAs' words of one draft and request; the chosen id."""
    words = _words(meeting, at.program % facts.copies, request, step, facts)
    each = -(-facts.programs // WARP)
    pending = cutlass.Boolean(True)
    best = cutlass.Int64(0)
    while pending:
        # A word that two lanes look at does no harm.
        places = [words + cutlass.min(at.lane + i * WARP, facts.programs - 1) for i in range(each)]
        found = [cute.arch.load(place, cutlass.Int64, sem="relaxed", scope="gpu") for place in places]
        best, arrived = found[0], _is_new(found[0], meeting.tag)
        for i in cutlass.range_constexpr(1, each):
            best = cutlass.max(best, found[i])
            arrived = arrived and _is_new(found[i], meeting.tag)
        pending = not cute.arch.vote_all_sync(arrived)
    _, key = _best_of_warp(*_halves(best))
    return _token(key)


@cute.jit
def _is_new(word, tag):
    return cutlass.Uint32(word & MAX_TAG) == tag


@cute.jit
def _store_biased(values, outputs, at, step, batch, vocab, facts: cutlass.Constexpr):
    for tile in cutlass.range_constexpr(facts.tiles):
        for row in cutlass.range_constexpr(2):
            for column in cutlass.range_constexpr(2):
                request = tile * TILE + at.quad * 2 + column
                if request < batch and at.ids[row] < vocab:
                    where = cutlass.Int64(request * facts.drafts + step) * vocab + at.ids[row]
                    (outputs.biased + where).store(values[tile][row * 2 + column])


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
    candidates = cute.arch.alloc_smem(cutlass.Int64, facts.lanes * facts.warps)
    chosen = cute.arch.alloc_smem(cutlass.Int32, facts.lanes)

    first = (program * facts.warps + warp) * ROWS + lane // 4
    ids = (first, first + 8)
    rows = tuple(cutlass.Int64(cutlass.min(token, vocab - 1)) for token in ids)
    at = Place(ids, rows, lane, lane % 4, warp, program)
    own_requests = tuple(cutlass.min(tile * TILE + lane // 4, batch - 1) for tile in range(facts.tiles))
    low, high = (_load_row(tables.w2, row * tables.w2_stride, at.quad, facts.chunks) for row in rows)
    cute.arch.griddepcontrol_wait()  # the rest may come from the kernel before
    cute.arch.griddepcontrol_launch_dependents()
    tokens = cute.make_rmem_tensor(facts.tiles, cutlass.Int32)
    for tile in cutlass.range_constexpr(facts.tiles):
        tokens[tile] = cutlass.Int32((anchors + own_requests[tile]).load())
    base = [cute.make_rmem_tensor(4, cutlass.Float32) for _ in range(facts.tiles)]
    _load_base(tables, at, cutlass.Int32(0), batch, base, facts)
    if cutlass.const_expr(facts.prefetch):
        _prefetch_anchors(tables, tokens, at, facts)
    # Every word is written in every launch, so that any tag but the last one's tells a new word from an old one.
    launches = generation.load()
    meeting = Meeting(words, cutlass.Uint32((launches + 1) & MAX_TAG), batch)
    if program == 0 and thread < batch:
        (outputs.previous + thread * facts.drafts).store((anchors + thread).load())

    for step in cutlass.range(facts.drafts, unroll=1):
        values = []
        for tile in cutlass.range_constexpr(facts.tiles):
            part = _load_row(tables.w1, tokens[tile] * tables.w1_stride, at.quad, facts.chunks)
            biased = _bias(low, high, part, facts)
            for i in cutlass.range_constexpr(4):
                biased[i] += base[tile][i]
            values.append(biased)
        # On its way while the CTAs meet.
        _load_base(tables, at, cutlass.min(step + 1, facts.drafts - 1), batch, base, facts)
        for request in cutlass.range_constexpr(facts.lanes):
            order, key = _choose(values[request // TILE], at, request % TILE)
            if lane == 0:
                (candidates + (request * facts.warps + warp)).store(_word(order, key))
        cute.arch.sync_threads()
        for turn in cutlass.range_constexpr(facts.turns):
            request = warp + turn * facts.warps
            if request < batch:
                _publish(meeting, candidates, tables, at, request, step, facts)
        if cutlass.const_expr(facts.keep):
            _store_biased(values, outputs, at, step, batch, vocab, facts)
        last = step + 1 == facts.drafts
        for turn in cutlass.range_constexpr(facts.turns):
            request = warp + turn * facts.warps
            if request < batch and (program == 0 or not last):
                draft = _meet(meeting, at, request, step, facts)
                if lane == 0:
                    (chosen + request).store(draft)
                    if program == 0:
                        (outputs.drafts + (request * facts.drafts + step)).store(cutlass.Int64(draft))
                        if not last:
                            (outputs.previous + (request * facts.drafts + step + 1)).store(cutlass.Int64(draft))
        cute.arch.sync_threads()
        for tile in cutlass.range_constexpr(facts.tiles):
            tokens[tile] = (chosen + own_requests[tile]).load()
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
        grid=(facts.programs, 1, 1),
        block=(facts.warps * WARP, 1, 1),
        stream=stream,
        cooperative=facts.cooperative,
        use_pdl=True,
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


def launch_markov_chain(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    meeting: tuple[torch.Tensor, torch.Tensor],
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    *,
    warps: int,
    lanes: int,
    copies: int,
    prefetch: bool,
    cooperative: bool,
) -> None:
    """One launch on the device's current stream.

    inputs: base [B, K, V], anchors, W1, W2, rows of the tables at multiples of 16 bytes; meeting: words
    [copies * K, B, programs], generation; outputs: drafts, previous, biased or None; lanes: the power of 2 from B on.  See the
    kernel for dtypes.

    Raises:
        ValueError: nothing is built for the device.
    """
    (base, anchors, w1, w2), (words, generation), (drafts, previous, biased) = inputs, meeting, outputs
    batch, steps, vocab = base.shape
    architecture = build_architecture(torch.cuda.get_device_capability(base.device))
    keep, programs = biased is not None, words.shape[-1]
    facts = Facts(w2.dtype, w2.shape[1], steps, programs, warps, lanes, copies, keep, prefetch, cooperative)
    # A build that keeps no logits does not look at their address.
    tensors = (base, w1, w2, anchors, words, generation, drafts, previous, base if biased is None else biased)
    strides = (base.stride(0), base.stride(1), w1.stride(0) // 2, w2.stride(0) // 2)
    with torch.cuda.device(base.device):
        stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
        arguments = _arguments(tuple(tensor.data_ptr() for tensor in tensors), strides, (batch, vocab))
        compile_markov_chain(facts, architecture)(*arguments, stream)
