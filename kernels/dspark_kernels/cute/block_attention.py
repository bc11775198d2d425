"""Absorbed MLA attention of one block over paged context, for Hopper: TMA, wgmma, mbarriers.

The keys of all (request, tile of 64 query rows) pairs, in tiles, form one list.  Each CTA takes an equal part of it, one after
the other, and writes what it has of each pair to a workspace; a second kernel merges the parts of a pair in the order of the
list.  A request without keys has no tile, so it moves no boundary.

In a CTA one warp fetches key tiles into the stages, and two warpgroups work on the same tile: each scores half of its keys,
they exchange row maxima and weights through shared memory, and each gathers half of the value columns.

The workspace keeps a part in the order of the registers: vector v of thread t is 16 bytes at v * 256 + t, so a warp writes and
reads 512 neighbouring bytes.  A vector belongs to two rows, eight apart.
"""

from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_ptr
from cutlass.memory import SmemAllocator

from dspark_kernels.cute.builds import build_architecture
from dspark_kernels.cute.compile import compile_once

ELEMENTS = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}
PARTS = {torch.float16: cutlass.Float16, torch.float32: cutlass.Float32}
WARP = 32
TILE = 64  # query rows of a tile
STAGED_KEYS = 128  # rows of key tiles that shared memory has room for
CONSUMERS = 256  # two warpgroups
THREADS = CONSUMERS + 128  # and one for the fetching warp: registers move between whole warpgroups
FETCH_REGISTERS, CONSUME_REGISTERS = 40, 232
CHUNK = 8  # 16-bit values in 16 bytes
SWIZZLE = 64  # 16-bit values in one row of a 128-byte swizzle
MERGE_ROWS = 16  # of a CTA: those of one warp's vectors
MERGE_BATCH = 9  # vectors in flight of a thread: all of them, where 16 warps share 132 parts
MARKS = 10  # of a CTA, see Facts.timeline
EVICT_NORMAL = 0x1000000000000000  # cache policy of the fetches: row tiles of one request read the same keys
NO_WINDOW = 2**31 - 1
LATENT_STEP = 128  # of the values of a value row
MOST_WIDTH = 576  # of a key row: a query tile and the stages fill the shared memory
LEAST_PEAK = 1e-30  # its reciprocal is finite
LOG2_E = 1.4426950408889634
MAXIMA, WEIGHTS, QUERIES, PRODUCTS = 1, 2, 3, 4  # named barriers; 0 is the whole CTA's


@dataclass(frozen=True, slots=True)
class Facts:
    """What a build is specialised for.

    dtype: of queries, latents and out; latent: values of a value row; width: values of a key row; rows: of the block; heads;
    page_size; causal; ctas: that share the list of tiles.
    keys: of a tile, 32 or 64.
    part_dtype: of the parts between the kernels: float32, or float16 relative to the largest value of half a row, which is
    off by at most 2**-11 of itself or 2**-25 of that largest one.
    merge_launch: when CTAs of the merging kernel may start: "after" the attention, at the "end" or at the "start" of its CTAs.
    merge_room: bytes of shared memory that a merging CTA asks for, None: what it needs.  With half of an SM's the split between
    shared memory and L1 cache stays as the attention needs it.
    early_start: CTAs of the attention may start while the kernel before it ends.
    overlap: a tile's scores are multiplied while the one before it is weighed and gathered.
    fetch_queries: query tiles come by TMA; the rows of a request must have one stride.
    timeline: the kernels write when they reach what ATTENTION_MARKS and MERGE_MARKS name.
    """

    dtype: torch.dtype
    latent: int
    width: int
    rows: int
    heads: int
    page_size: int
    causal: bool
    ctas: int
    keys: int = 64
    part_dtype: torch.dtype = torch.float16
    merge_launch: str = "end"
    merge_room: int | None = None
    early_start: bool = False
    overlap: bool = False
    fetch_queries: bool = True
    timeline: bool = False

    @property
    def queries(self) -> int:
        return self.rows * self.heads

    @property
    def row_tiles(self) -> int:
        return -(-self.queries // TILE)

    @property
    def stages(self) -> int:
        return STAGED_KEYS // self.keys

    @property
    def weight_buffers(self) -> int:
        """Weights of two tiles fit where one takes half of a row."""
        return SWIZZLE // self.keys

    @property
    def box(self) -> int:
        """Rows that one TMA box takes: they lie in one page and in one tile."""
        return gcd(self.page_size, self.keys)

    @property
    def span(self) -> int:
        """Rows that lie one behind the other in a column block of a key tile; half a tile is inside one span."""
        return self.box if self.box >= self.keys // 2 else self.keys

    @property
    def vector(self) -> int:
        """Values of a part in 16 bytes."""
        return 16 // self.part_dtype.itemsize

    @property
    def vectors(self) -> int:
        """Of a thread, for one part."""
        return TILE * self.latent // CONSUMERS // self.vector

    @property
    def merge_warps(self) -> int:
        """Each takes every so manyeth part.  Not by the batch: the bits of a request must not hang on its neighbours."""
        return 16 if self.row_tiles < 4 else 4

    @property
    def box_columns(self) -> int:
        """A box is a whole span where it can be, so that few are asked for."""
        return self.width if self.box == self.span else SWIZZLE


class Queries(NamedTuple):
    """[B, N, heads, D]; strides in values."""

    values: cute.Pointer
    batch_stride: cutlass.Int64
    row_stride: cutlass.Int64
    head_stride: cutlass.Int64


class Latents(NamedTuple):
    """[pages, page_size, D]; strides in values."""

    values: cute.Pointer
    page_stride: cutlass.Int64
    token_stride: cutlass.Int64
    pages: cutlass.Int32


class Requests(NamedTuple):
    """page_table: int32 [B, P]; context_lens, seq_lens: int64 [B]."""

    page_table: cute.Pointer
    table_stride: cutlass.Int64
    context_lens: cute.Pointer
    seq_lens: cute.Pointer
    batch: cutlass.Int32
    window: cutlass.Int32


class Workspace(NamedTuple):
    """parts: 16-byte vectors [part, vectors, 256]; statistics: float32 [part, warpgroup, 64 rows, 2], base-2 logarithm of the
    row's sum of weights and factor of the row's values; times: int64 [CTAs of both kernels, MARKS]."""

    parts: cute.Pointer
    statistics: cute.Pointer
    times: cute.Pointer


# Nanoseconds of the whole device, then cycles of the SM; those of a CTA with several parts are the last part's from "products".
ATTENTION_MARKS = (
    "start ns",
    "end ns",
    "start",
    "schedule",
    "first fetch",
    "queries",
    "first tile",
    "first scores",
    "products",
    "end",
)
MERGE_MARKS = ("start ns", "end ns", "start", "schedule", "parts are there", "statistics", "weights", "summed", "end", "")


@cute.jit
def _mark(work, cta, mark: cutlass.Constexpr, here, facts: cutlass.Constexpr):
    """The thread that is `here` notes the time."""
    if cutlass.const_expr(facts.timeline) and here:
        at = work.times + (cutlass.Int64(cta) * MARKS + mark)
        at.store(cute.arch.globaltimer() if cutlass.const_expr(mark < 2) else cute.arch.clock64())


@cute.jit
def _range(requests, request):
    """First key and end of a request's keys."""
    end = cutlass.Int32((requests.seq_lens + request).load())
    first = cutlass.Int32((requests.context_lens + request).load()) - requests.window
    return cutlass.max(first, cutlass.Int32(0)), end


@cute.jit
def _scan(requests, first_request, base, facts: cutlass.Constexpr):
    """Key tiles of request first_request + lane, none past the batch, and where they end in a list that goes on at base."""
    lane = cute.arch.lane_idx()
    own = cutlass.Int32(0)
    if first_request + lane < requests.batch:
        first, end = _range(requests, first_request + lane)
        if first < end:
            own = (end + facts.keys - 1) // facts.keys - first // facts.keys
    tiles_end = own * facts.row_tiles
    for step in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(tiles_end, 1 << step, mask_and_clamp=0)
        if lane >= 1 << step:
            tiles_end += other
    return own, tiles_end + base


@cute.jit
def _total(requests, tiles_end, facts: cutlass.Constexpr):
    """Length of the list, from the first scan."""
    total = cute.arch.shuffle_sync(tiles_end, WARP - 1)
    for first in cutlass.range(WARP, requests.batch, WARP, unroll=1):
        _, more = _scan(requests, first, total, facts)
        total = cute.arch.shuffle_sync(more, WARP - 1)
    return total


@cute.jit
def _locate(requests, tile, own, tiles_end, facts: cutlass.Constexpr):
    """The request that a tile of the list belongs to, its tiles' start in the list, and its key tiles.

    own, tiles_end: of the first scan, so that 32 requests take no load.
    """
    request, start, tiles = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
    base = cutlass.Int32(0)
    for first in cutlass.range(0, requests.batch, WARP, unroll=1):
        if first > 0:
            own, tiles_end = _scan(requests, first, base, facts)
        here = tiles_end - own * facts.row_tiles
        found = cute.arch.vote_ballot_sync(here <= tile and tile < tiles_end)
        if found != 0:
            at = cute.arch.popc(found - 1)
            request = first + at
            start = cute.arch.shuffle_sync(here, at)
            tiles = cute.arch.shuffle_sync(own, at)
        base = cute.arch.shuffle_sync(tiles_end, WARP - 1)
    return request, start, tiles


@cute.jit
def _entry_of(requests, request, facts: cutlass.Constexpr):
    """Start of a request's tiles in the list, its key tiles, and the list's length."""
    start, tiles, total = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
    for first in cutlass.range(0, requests.batch, WARP, unroll=1):
        own, tiles_end = _scan(requests, first, total, facts)
        if first <= request and request < first + WARP:
            start = cute.arch.shuffle_sync(tiles_end - own * facts.row_tiles, request - first)
            tiles = cute.arch.shuffle_sync(own, request - first)
        total = cute.arch.shuffle_sync(tiles_end, WARP - 1)
    return start, tiles, total


@cute.jit
def _share(total, cta, facts: cutlass.Constexpr):
    """First tile of a CTA's part of the list."""
    return cta * (total // facts.ctas) + cutlass.min(cta, total % facts.ctas)


@cute.jit
def _owner(total, tile, facts: cutlass.Constexpr):
    """The CTA whose part holds this tile: the inverse of `_share`."""
    each, more = total // facts.ctas, total % facts.ctas
    long = more * (each + 1)
    owner = tile // (each + 1)
    if tile >= long:
        owner = more + (tile - long) // cutlass.max(each, cutlass.Int32(1))
    return owner


@cute.jit
def _barrier(name: cutlass.Constexpr):
    """All consumers meet."""
    cute.arch.barrier(barrier_id=name, number_of_threads=CONSUMERS)


@cute.jit
def _place(pointer, offset, dtype: cutlass.Constexpr, count: cutlass.Constexpr, space: cutlass.Constexpr):
    """count values, offset values behind a pointer, as a tensor that one access reads or writes."""
    address = pointer.toint() + offset * (dtype.width // 8)
    place = cute.make_ptr(dtype, address, space, assumed_align=count * dtype.width // 8)
    return cute.make_tensor(place, cute.make_layout(count))


@cute.jit
def _load_queries(queries, shared, request, row_tile, thread, facts: cutlass.Constexpr):
    """One tile of query rows into shared memory, swizzled.  The last row stands in the rows that the tile has too many."""
    dtype = ELEMENTS[facts.dtype]
    chunks = facts.width // CHUNK
    per_thread = TILE * chunks // CONSUMERS
    loaded = [cute.make_rmem_tensor(CHUNK, dtype) for _ in range(per_thread)]
    for i in cutlass.range_constexpr(per_thread):  # no branch and no store in between: all loads are in flight together
        at = thread + i * CONSUMERS
        query = cutlass.min(row_tile * TILE + at // chunks, facts.queries - 1)
        where = cutlass.Int64(request) * queries.batch_stride + cutlass.Int64(query // facts.heads) * queries.row_stride
        where += cutlass.Int64(query % facts.heads) * queries.head_stride + at % chunks * CHUNK
        cute.autovec_copy(_place(queries.values, where, dtype, CHUNK, cute.AddressSpace.gmem), loaded[i])
    for i in cutlass.range_constexpr(per_thread):
        at = thread + i * CONSUMERS
        row, chunk = at // chunks, at % chunks
        to = (chunk // 8) * TILE * SWIZZLE + row * SWIZZLE + ((chunk % 8) ^ (row % 8)) * CHUNK
        cute.autovec_copy(loaded[i], _place(shared, to, dtype, CHUNK, cute.AddressSpace.smem))


@cute.jit
def _fetch_queries(atom, from_global, to_shared, full, facts: cutlass.Constexpr):
    """One tile of query rows into shared memory by TMA; zeros in the rows that the tile has too many."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, TILE * facts.width * ELEMENTS[facts.dtype].width // 8)
    cute.copy(atom, from_global, to_shared, tma_bar_ptr=full, cache_policy=cutlass.Int64(EVICT_NORMAL))


@cute.jit
def _clear_rows(shared, first, end, thread, facts: cutlass.Constexpr):
    """Zeros in the value columns of a tile's rows outside first..end.  The swizzle stays inside a row's 128 bytes."""
    dtype = ELEMENTS[facts.dtype]
    chunks = facts.latent // CHUNK
    zeros = cute.make_rmem_tensor(CHUNK, dtype)
    zeros.fill(0.0)
    for i in cutlass.range_constexpr(facts.keys * chunks // CONSUMERS):
        at = thread + i * CONSUMERS
        row, chunk = at // chunks, at % chunks
        if row < first or row >= end:
            to = row // facts.span * facts.span * facts.width + row % facts.span * SWIZZLE
            to += (chunk // 8) * facts.span * SWIZZLE + (chunk % 8) * CHUNK
            cute.autovec_copy(zeros, _place(shared, to, dtype, CHUNK, cute.AddressSpace.smem))


@cute.jit
def _multiply_scores(first_mma, mma, scores, queries, keys, stage, facts: cutlass.Constexpr):
    """Starts queries times the keys of a stage."""
    warpgroup.fence()
    for k in cutlass.range_constexpr(facts.width // 16):
        cute.gemm(mma if k else first_mma, scores, queries[None, None, k], keys[None, None, k, stage], scores)
    warpgroup.commit_group()


@cute.jit
def _multiply_values(mma, out, weights, values, tile, facts: cutlass.Constexpr):
    """Starts the weights times the values of the tile-th tile since the start."""
    warpgroup.fence()
    steps = facts.keys // 16
    for k in cutlass.range_constexpr(steps):
        at = tile % facts.weight_buffers * steps + k
        cute.gemm(mma, out, weights[None, None, at], values[None, None, k, tile % facts.stages], out)
    warpgroup.commit_group()


class Rows(NamedTuple):
    """Of a thread's two rows, eight apart: largest score so far, times the scale; the thread's sum of weights; factor of the
    outputs before the last tile."""

    highest: cute.Tensor
    sums: cute.Tensor
    shrink: cute.Tensor


class Seen(NamedTuple):
    """Keys of a request: first, end; end of those that all rows see; ends for a thread's two rows."""

    first: cutlass.Int32
    end: cutlass.Int32
    unmasked_end: cutlass.Int32
    limits: list


@cute.jit
def _weigh(scores, weights, rows, s_maxima, seen, token, thread, scale, facts: cutlass.Constexpr):
    """Weights of a tile's scores, relative to the rows' largest score, which the warpgroups agree on."""
    group, column = thread // 128, thread % 4
    row = thread // WARP % 4 * 16 + thread % WARP // 4  # and row + 8
    values = cute.size(scores)
    if token < seen.first or token + facts.keys > seen.unmasked_end:
        for i in cutlass.range_constexpr(values):
            key = token + group * (facts.keys // 2) + i // 4 * 8 + column * 2 + i % 2
            if key < seen.first or key >= seen.limits[i // 2 % 2]:
                scores[i] = -cutlass.Float32.inf
    peaks = cute.make_rmem_tensor(2, cutlass.Float32)
    for i in cutlass.range_constexpr(2):
        peak = scores[2 * i]
        for j in cutlass.range_constexpr(values // 4):
            peak = cute.arch.fmax(peak, cute.arch.fmax(scores[4 * j + 2 * i], scores[4 * j + 2 * i + 1]))
        peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, 1))
        peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, 2))
        peaks[i] = peak
        if column == 0:
            s_maxima[group * TILE + row + 8 * i] = peak
    _barrier(MAXIMA)
    for i in cutlass.range_constexpr(2):
        other = s_maxima[(1 - group) * TILE + row + 8 * i]
        new = cute.arch.fmax(rows.highest[i], cute.arch.fmax(peaks[i], other) * scale)
        base = cutlass.Float32(0.0) if new == -cutlass.Float32.inf else new
        rows.shrink[i] = cute.math.exp2(rows.highest[i] - base, fastmath=True)
        rows.highest[i] = new
        added = cutlass.Float32(0.0)
        for j in cutlass.range_constexpr(values // 2):
            at = j // 2 * 4 + 2 * i + j % 2
            weight = cute.math.exp2(cute.math.fma(scores[at], scale, -base), fastmath=True)
            added += weight
            weights[at] = weight.to(ELEMENTS[facts.dtype])
        rows.sums[i] = rows.sums[i] * rows.shrink[i] + added


@cute.jit
def _hand_over(weights, s_weights, s_keys, seen, token, tile, thread, facts: cutlass.Constexpr):
    """Weights into shared memory, and what no key has as a value out of it."""
    dtype = ELEMENTS[facts.dtype]
    group, quad, column = thread // 128, thread % WARP // 4, thread % 4
    row = thread // WARP % 4 * 16 + quad  # and row + 8
    own_blocks = facts.keys // 2 // CHUNK
    first_block = tile % facts.weight_buffers * (facts.keys // CHUNK) + group * own_blocks
    for j in cutlass.range_constexpr(own_blocks):
        for i in cutlass.range_constexpr(2):
            # Eight rows and four lanes a row meet all 32 banks once.
            to = (row + 8 * i) * SWIZZLE + ((first_block + j) ^ quad) * CHUNK + column * 2
            pair = cute.make_rmem_tensor(2, dtype)
            pair[0], pair[1] = weights[4 * j + 2 * i], weights[4 * j + 2 * i + 1]
            cute.autovec_copy(pair, _place(s_weights.iterator, to, dtype, 2, cute.AddressSpace.smem))
    if token < seen.first or token + facts.keys > seen.end:
        # A weight of zero does not undo a NaN or an infinity of what a page holds outside the keys.
        shared = cute.recast_ptr(s_keys.iterator, dtype=dtype) + tile % facts.stages * facts.keys * facts.width
        _clear_rows(shared, seen.first - token, seen.end - token, thread, facts)
    cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def _rescale(out, rows):
    """The outputs so far, relative to the rows' new largest scores."""
    if cute.arch.vote_any_sync(rows.shrink[0] != 1.0 or rows.shrink[1] != 1.0):
        for i in cutlass.range_constexpr(cute.size(out)):
            out[i] = out[i] * rows.shrink[i // 2 % 2]


@cute.jit
def _store_part(out, rows, s_sums, work, part, thread, facts: cutlass.Constexpr):
    """A thread's values of a part, and the statistics of its two rows."""
    group, own_warp, quad, column = thread // 128, thread // WARP % 4, thread % WARP // 4, thread % 4
    row = own_warp * 16 + quad  # and row + 8
    sums = rows.sums
    for i in cutlass.range_constexpr(2):
        sums[i] += cute.arch.shuffle_sync_bfly(sums[i], 1)
        sums[i] += cute.arch.shuffle_sync_bfly(sums[i], 2)
        if column == 0:
            s_sums[group * TILE + row + 8 * i] = sums[i]
    _barrier(MAXIMA)
    inverses = cute.make_rmem_tensor(2, cutlass.Float32)
    for i in cutlass.range_constexpr(2):
        total = s_sums[row + 8 * i] + s_sums[TILE + row + 8 * i]
        peak = cutlass.Float32(1.0)
        if cutlass.const_expr(facts.part_dtype == torch.float16):
            peak = cutlass.Float32(LEAST_PEAK)
            for j in cutlass.range_constexpr(cute.size(out) // 4):
                for at in (4 * j + 2 * i, 4 * j + 2 * i + 1):
                    peak = cute.arch.fmax(peak, cute.arch.fmax(out[at], -out[at]))
            peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, 1))
            peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, 2))
        inverses[i] = 1.0 / peak
        statistic = cute.make_rmem_tensor(2, cutlass.Float32)  # of a row without a visible key: no weight
        statistic[0], statistic[1] = -cutlass.Float32.inf, cutlass.Float32(0.0)
        if total != 0.0:
            statistic[0], statistic[1] = rows.highest[i] + cute.math.log2(total), peak / total
        if column == 0:
            at = ((part * 2 + group) * TILE + row + 8 * i) * 2
            cute.autovec_copy(statistic, _place(work.statistics, at, cutlass.Float32, 2, cute.AddressSpace.gmem))
    dtype = PARTS[facts.part_dtype]
    for v in cutlass.range_constexpr(facts.vectors):
        vector = cute.make_rmem_tensor(facts.vector, dtype)
        for k in cutlass.range_constexpr(facts.vector):
            vector[k] = (out[v * facts.vector + k] * inverses[k // 2 % 2]).to(dtype)
        at = ((part * facts.vectors + v) * CONSUMERS + thread) * facts.vector
        cute.autovec_copy(vector, _place(work.parts, at, dtype, facts.vector, cute.AddressSpace.gmem))


@cute.kernel
def block_attention_kernel(
    tma_atom: cute.CopyAtom,
    tma_tensor: cute.Tensor,  # [page_size, D, pages]
    query_atom: cute.CopyAtom,
    query_tensor: cute.Tensor,  # [N * heads, D, B]
    first_mma: cute.TiledMma,  # of the first 16 columns: does not accumulate
    score_mma: cute.TiledMma,
    value_mma: cute.TiledMma,
    queries: Queries,
    requests: Requests,
    work: Workspace,
    scale: cutlass.Float32,  # times log2(e)
    facts: cutlass.Constexpr,
):
    dtype = ELEMENTS[facts.dtype]
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == CONSUMERS // WARP:
        cpasync.prefetch_descriptor(tma_atom)
        if cutlass.const_expr(facts.fetch_queries):
            cpasync.prefetch_descriptor(query_atom)
    _mark(work, cta, 0, thread == 0, facts)
    _mark(work, cta, 2, thread == 0, facts)
    lane = cute.arch.lane_idx()
    blocks = facts.width // SWIZZLE  # of 64 columns

    allocator = SmemAllocator()
    swizzle = cute.make_swizzle(3, 4, 3)
    span = facts.span
    tokens = (8, span // 8, facts.keys // span)
    token_strides = (SWIZZLE, 8 * SWIZZLE, span * facts.width)
    keys_outer = cute.make_layout(
        (tokens, (SWIZZLE, blocks), facts.stages), stride=(token_strides, (1, span * SWIZZLE), facts.keys * facts.width)
    )
    values_outer = cute.make_layout(
        ((SWIZZLE, facts.latent // SWIZZLE), tokens, facts.stages),
        stride=((1, span * SWIZZLE), token_strides, facts.keys * facts.width),
    )
    queries_outer = cute.make_layout(((8, TILE // 8), (SWIZZLE, blocks)), stride=((SWIZZLE, 8 * SWIZZLE), (1, TILE * SWIZZLE)))
    weights_outer = cute.make_layout(((8, TILE // 8), (SWIZZLE, 1)), stride=((SWIZZLE, 8 * SWIZZLE), (1, TILE * SWIZZLE)))
    s_queries = allocator.allocate_tensor(dtype, queries_outer, 1024, swizzle)
    s_keys = allocator.allocate_tensor(dtype, keys_outer, 1024, swizzle)
    s_weights = allocator.allocate_tensor(dtype, weights_outer, 1024, swizzle)
    s_maxima = allocator.allocate_tensor(cutlass.Float32, cute.make_layout(2 * TILE), 16)
    full = allocator.allocate_array(cutlass.Int64, facts.stages)
    empty = allocator.allocate_array(cutlass.Int64, facts.stages)
    queries_full = allocator.allocate_array(cutlass.Int64, 1)
    queries_empty = allocator.allocate_array(cutlass.Int64, 1)
    s_values = cute.make_tensor(s_keys.iterator, values_outer)

    if thread == 0:
        for stage in cutlass.range_constexpr(facts.stages):
            cute.arch.mbarrier_init(full + stage, 1)
            cute.arch.mbarrier_init(empty + stage, CONSUMERS // WARP)
        cute.arch.mbarrier_init(queries_full, 1)
        cute.arch.mbarrier_init(queries_empty, CONSUMERS // WARP)
        cute.arch.mbarrier_init_fence()
    if cutlass.const_expr(facts.early_start):
        cute.arch.griddepcontrol_wait()  # nothing above reads what the kernel before it writes
    if cutlass.const_expr(facts.merge_launch == "start"):
        cute.arch.griddepcontrol_launch_dependents()

    own, tiles_end = _scan(requests, 0, cutlass.Int32(0), facts)
    total = _total(requests, tiles_end, facts)
    tile, last = _share(total, cta, facts), _share(total, cta + 1, facts)
    done = cutlass.Int32(0)  # tiles since the start: gives stage and phase
    tiles_of_queries = cutlass.Int32(0)  # since the start
    _mark(work, cta, 3, thread == 0, facts)
    cute.arch.sync_threads()

    if warp >= CONSUMERS // WARP:
        cute.arch.setmaxregister_decrease(FETCH_REGISTERS)
        if warp > CONSUMERS // WARP:
            tile = last
        boxes = facts.keys // facts.box
        columns = facts.box_columns
        shared_boxes = cute.flat_divide(cute.make_tensor(s_keys.iterator, keys_outer), (facts.box, columns))
        global_boxes = cute.flat_divide(tma_tensor, (facts.box, columns))
        to_shared, from_global = cpasync.tma_partition(
            tma_atom,
            0,
            cute.make_layout(1),
            cute.group_modes(shared_boxes, 0, 2),
            cute.group_modes(global_boxes, 0, 2),
        )
        queries_to, queries_from = cpasync.tma_partition(
            query_atom,
            0,
            cute.make_layout(1),
            cute.group_modes(cute.make_tensor(s_queries.iterator, queries_outer), 0, 2),
            cute.group_modes(cute.flat_divide(query_tensor, (TILE, facts.width)), 0, 2),
        )
        while tile < last:
            request, start, tiles = _locate(requests, tile, own, tiles_end, facts)
            first, end = _range(requests, request)
            row_tile, begin = (tile - start) // tiles, (tile - start) % tiles
            count = cutlass.min(tiles - begin, last - tile)
            table = requests.page_table + cutlass.Int64(request) * requests.table_stride
            for key_tile in cutlass.range(begin, begin + count, unroll=1):
                token = (first // facts.keys + key_tile) * facts.keys
                stage = done % facts.stages
                pages = cute.make_rmem_tensor(boxes, cutlass.Int32)
                for box in cutlass.range_constexpr(boxes):
                    # A page outside the keys is none: its rows are masked, so any page with keys stands for it.
                    known = cutlass.min(cutlass.max(token + box * facts.box, first), end - 1)
                    pages[box] = cutlass.max((table + known // facts.page_size).load(), cutlass.Int32(0))
                # The first query tile in front of all keys; another one waits for its place, so keys go first.
                if cutlass.const_expr(facts.fetch_queries) and done == 0:
                    from_here = queries_from[None, row_tile, 0, request]
                    _fetch_queries(query_atom, from_here, queries_to, queries_full, facts)
                if done >= facts.stages:
                    cute.arch.mbarrier_wait(empty + stage, (done // facts.stages - 1) % 2)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, facts.keys * facts.width * dtype.width // 8)
                for box in cutlass.range_constexpr(boxes):
                    row = (token + box * facts.box) % facts.page_size // facts.box
                    for block in cutlass.range_constexpr(facts.width // columns):
                        cute.copy(
                            tma_atom,
                            from_global[None, row, block, pages[box]],
                            to_shared[None, box, block, stage],
                            tma_bar_ptr=full + stage,
                            cache_policy=cutlass.Int64(EVICT_NORMAL),
                        )
                if cutlass.const_expr(facts.fetch_queries) and done > 0 and key_tile == begin:
                    cute.arch.mbarrier_wait(queries_empty, (tiles_of_queries - 1) % 2)
                    from_here = queries_from[None, row_tile, 0, request]
                    _fetch_queries(query_atom, from_here, queries_to, queries_full, facts)
                _mark(work, cta, 4, done == 0 and lane == 0, facts)
                done += 1
            tiles_of_queries += 1
            tile += count
    else:
        cute.arch.setmaxregister_increase(CONSUME_REGISTERS)
        group = cute.arch.make_warp_uniform(thread // 128)
        row = warp % 4 * 16 + lane // 4  # and row + 8
        first_mma.set(warpgroup.Field.ACCUMULATE, False)
        score_mma.set(warpgroup.Field.ACCUMULATE, True)
        value_mma.set(warpgroup.Field.ACCUMULATE, True)
        score_slice = score_mma.get_slice(group * 128)
        value_slice = value_mma.get_slice(group * 128)
        f_queries = score_mma.make_fragment_A(score_slice.partition_A(s_queries))
        f_keys = score_mma.make_fragment_B(score_slice.partition_B(cute.make_tensor(s_keys.iterator, keys_outer)))
        f_weights = value_mma.make_fragment_A(value_slice.partition_A(s_weights))
        f_values = value_mma.make_fragment_B(value_slice.partition_B(s_values))
        scores = cute.make_rmem_tensor(score_mma.partition_shape_C((TILE, facts.keys)), cutlass.Float32)
        out = cute.make_rmem_tensor(value_mma.partition_shape_C((TILE, facts.latent)), cutlass.Float32)
        weights = cute.make_rmem_tensor(scores.layout, dtype)
        rows = Rows(*(cute.make_rmem_tensor(2, cutlass.Float32) for _ in range(3)))
        raw_queries = cute.recast_ptr(s_queries.iterator, dtype=dtype)

        while tile < last:
            request, start, tiles = _locate(requests, tile, own, tiles_end, facts)
            first, end = _range(requests, request)
            row_tile, begin = (tile - start) // tiles, (tile - start) % tiles
            count = cutlass.min(tiles - begin, last - tile)
            limits = [end, end]
            if cutlass.const_expr(facts.causal):
                context = cutlass.Int32((requests.context_lens + request).load())
                for i in cutlass.range_constexpr(2):
                    block_row = (row_tile * TILE + row + 8 * i) // facts.heads
                    limits[i] = cutlass.min(end, context + block_row + 1)
                unmasked_end = cutlass.min(end, context + row_tile * TILE // facts.heads + 1)
            else:
                unmasked_end = end
            if cutlass.const_expr(facts.fetch_queries):
                cute.arch.mbarrier_wait(queries_full, tiles_of_queries % 2)
            else:
                _load_queries(queries, raw_queries, request, row_tile, thread, facts)
                cute.arch.fence_proxy("async.shared", space="cta")
            out.fill(0.0)
            rows.highest.fill(-cutlass.Float32.inf)
            rows.sums.fill(0.0)
            _barrier(QUERIES)
            _mark(work, cta, 5, done == 0 and thread == 0, facts)

            seen = Seen(first, end, unmasked_end, limits)
            first_token = first // facts.keys * facts.keys
            if cutlass.const_expr(facts.overlap):
                token, stage = first_token + begin * facts.keys, done % facts.stages
                cute.arch.mbarrier_wait(full + stage, (done // facts.stages) % 2)
                _mark(work, cta, 6, done == 0 and thread == 0, facts)
                _multiply_scores(first_mma, score_mma, scores, f_queries, f_keys, stage, facts)
                warpgroup.wait_group(0)
                _mark(work, cta, 7, done == 0 and thread == 0, facts)
                _weigh(scores, weights, rows, s_maxima, seen, token, thread, scale, facts)
                _hand_over(weights, s_weights, s_keys, seen, token, done, thread, facts)
                _rescale(out, rows)
                for key_tile in cutlass.range(begin + 1, begin + count, unroll=1):
                    token, before = first_token + key_tile * facts.keys, done
                    done += 1
                    stage = done % facts.stages
                    cute.arch.mbarrier_wait(full + stage, (done // facts.stages) % 2)
                    _multiply_scores(first_mma, score_mma, scores, f_queries, f_keys, stage, facts)
                    _barrier(WEIGHTS)
                    _multiply_values(value_mma, out, f_weights, f_values, before, facts)
                    warpgroup.wait_group(1)
                    _weigh(scores, weights, rows, s_maxima, seen, token, thread, scale, facts)
                    if cutlass.const_expr(facts.weight_buffers > 1):
                        _hand_over(weights, s_weights, s_keys, seen, token, done, thread, facts)
                    warpgroup.wait_group(0)
                    if lane == 0:
                        cute.arch.mbarrier_arrive(empty + before % facts.stages)
                    if cutlass.const_expr(facts.weight_buffers == 1):
                        _barrier(PRODUCTS)  # neither warpgroup reads the last tile's weights any more
                        _hand_over(weights, s_weights, s_keys, seen, token, done, thread, facts)
                    _rescale(out, rows)
                _barrier(WEIGHTS)
                _multiply_values(value_mma, out, f_weights, f_values, done, facts)
                warpgroup.wait_group(0)
                if lane == 0:
                    cute.arch.mbarrier_arrive(empty + done % facts.stages)
                done += 1
            else:
                for key_tile in cutlass.range(begin, begin + count, unroll=1):
                    token, stage = first_token + key_tile * facts.keys, done % facts.stages
                    cute.arch.mbarrier_wait(full + stage, (done // facts.stages) % 2)
                    _mark(work, cta, 6, done == 0 and thread == 0, facts)
                    _multiply_scores(first_mma, score_mma, scores, f_queries, f_keys, stage, facts)
                    warpgroup.wait_group(0)
                    _mark(work, cta, 7, done == 0 and thread == 0, facts)
                    _weigh(scores, weights, rows, s_maxima, seen, token, thread, scale, facts)
                    _hand_over(weights, s_weights, s_keys, seen, token, done, thread, facts)
                    _rescale(out, rows)
                    _barrier(WEIGHTS)
                    _multiply_values(value_mma, out, f_weights, f_values, done, facts)
                    warpgroup.wait_group(0)
                    if lane == 0:
                        cute.arch.mbarrier_arrive(empty + stage)
                    done += 1

            _mark(work, cta, 8, thread == 0, facts)
            if lane == 0:
                cute.arch.mbarrier_arrive(queries_empty)
            tiles_of_queries += 1
            part = cutlass.Int64(cta + request * facts.row_tiles + row_tile)
            _store_part(out, rows, s_maxima, work, part, thread, facts)
            tile += count
        _mark(work, cta, 9, thread == 0, facts)
        _mark(work, cta, 1, thread == 0, facts)
        if cutlass.const_expr(facts.merge_launch == "end"):  # the first thread to say it speaks for its CTA
            cute.arch.griddepcontrol_launch_dependents()


@cute.kernel
def merge_kernel(
    requests: Requests,
    work: Workspace,
    out: cute.Pointer,  # [B, N, heads, C]
    facts: cutlass.Constexpr,
):
    """A CTA merges one vector of each lane of one warp: 16 rows of a pair.  Its warps take turns with the parts."""
    dtype, part_dtype, warps = ELEMENTS[facts.dtype], PARTS[facts.part_dtype], facts.merge_warps
    thread, _, _ = cute.arch.thread_idx()
    pair, place, _ = cute.arch.block_idx()
    pairs, _, _ = cute.arch.grid_dim()
    cta = facts.ctas + place * pairs + pair  # in the timeline
    warp, lane = cute.arch.make_warp_uniform(thread // WARP), thread % WARP
    request, row_tile = pair // facts.row_tiles, pair % facts.row_tiles
    v, group, first_row = place // 8, place // 4 % 2, place % 4 * MERGE_ROWS
    live = row_tile * TILE + first_row < facts.queries

    allocator = SmemAllocator()
    s_weights = allocator.allocate_tensor(cutlass.Float32, cute.make_layout(facts.ctas * MERGE_ROWS), 16)
    s_peaks = allocator.allocate_tensor(cutlass.Float32, cute.make_layout(warps * MERGE_ROWS), 16)
    s_sums = allocator.allocate_tensor(cutlass.Float32, cute.make_layout(warps * MERGE_ROWS), 16)
    s_out = allocator.allocate_tensor(cutlass.Float32, cute.make_layout(warps * WARP * facts.vector), 16)

    _mark(work, cta, 0, thread == 0, facts)
    _mark(work, cta, 2, thread == 0, facts)
    start, tiles, total = _entry_of(requests, request, facts)
    start += row_tile * tiles
    first = _owner(total, start, facts)
    count = _owner(total, start + tiles - 1, facts) - first + 1 if tiles > 0 else cutlass.Int32(0)
    _mark(work, cta, 3, thread == 0, facts)
    if cutlass.const_expr(facts.merge_launch != "after"):
        cute.arch.griddepcontrol_wait()
    if cutlass.const_expr(facts.early_start):
        cute.arch.griddepcontrol_launch_dependents()
    _mark(work, cta, 4, thread == 0, facts)

    if live:
        pairs_of_values = facts.vector // 2
        merged = cute.make_rmem_tensor(facts.vector, cutlass.Float32)
        merged.fill(0.0)
        if count > 0:
            part = cutlass.Int64(first + request * facts.row_tiles + row_tile)

            # A thread a part and a row.  All loads are in flight before the first value is used.
            own_row, own_part, step = thread % MERGE_ROWS, thread // MERGE_ROWS, warps * WARP // MERGE_ROWS
            rounds = -(-facts.ctas // step)
            statistics = (((part + own_part) * 2 + group) * TILE + first_row + own_row) * 2
            own = [cute.make_rmem_tensor(2, cutlass.Float32) for _ in range(rounds)]
            for i in cutlass.range_constexpr(rounds):
                own[i][0], own[i][1] = -cutlass.Float32.inf, cutlass.Float32(0.0)
                if own_part + i * step < count:
                    at = statistics + i * step * 2 * TILE * 2
                    cute.autovec_copy(_place(work.statistics, at, cutlass.Float32, 2, cute.AddressSpace.gmem), own[i])
            vectors = [cute.make_rmem_tensor(facts.vector, part_dtype) for _ in range(MERGE_BATCH)]
            mine = (part * facts.vectors + v) * CONSUMERS + place % 8 * WARP + lane
            _load_batch(work, mine, warp, count, vectors, facts)

            peak = -cutlass.Float32.inf
            for i in cutlass.range_constexpr(rounds):
                peak = cute.arch.fmax(peak, own[i][0])
            peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, MERGE_ROWS))
            if lane < MERGE_ROWS:
                s_peaks[warp * MERGE_ROWS + own_row] = peak
            cute.arch.sync_threads()
            _mark(work, cta, 5, thread == 0, facts)
            highest = s_peaks[own_row]
            for i in cutlass.range_constexpr(1, warps):
                highest = cute.arch.fmax(highest, s_peaks[i * MERGE_ROWS + own_row])
            base = cutlass.Float32(0.0) if highest == -cutlass.Float32.inf else highest
            summed = cutlass.Float32(0.0)
            for i in cutlass.range_constexpr(rounds):
                weight = cute.math.exp2(own[i][0] - base, fastmath=True)
                summed += weight
                if own_part + i * step < count:
                    s_weights[(own_part + i * step) * MERGE_ROWS + own_row] = weight * own[i][1]
            summed += cute.arch.shuffle_sync_bfly(summed, MERGE_ROWS)
            if lane < MERGE_ROWS:
                s_sums[warp * MERGE_ROWS + own_row] = summed
            cute.arch.sync_threads()
            _mark(work, cta, 6, thread == 0, facts)

            for i in cutlass.range(warp, count, warps * MERGE_BATCH, unroll=1):
                if i > warp:
                    _load_batch(work, mine, i, count, vectors, facts)
                for j in cutlass.range_constexpr(MERGE_BATCH):
                    at = i + j * warps
                    if at < count:
                        for k in cutlass.range_constexpr(facts.vector):
                            weight = s_weights[at * MERGE_ROWS + lane // 4 + k // 2 % 2 * 8]
                            merged[k] = cute.math.fma(weight, vectors[j][k].to(cutlass.Float32), merged[k])
            at = (warp * WARP + lane) * facts.vector
            for k in cutlass.range_constexpr(facts.vector):
                s_out[at + k] = merged[k]
            cute.arch.sync_threads()
            _mark(work, cta, 7, thread == 0, facts)

        if thread < WARP * pairs_of_values:
            lane_of, pair_of = thread // pairs_of_values, thread % pairs_of_values
            own_row = lane_of // 4 + pair_of % 2 * 8
            values = cute.make_rmem_tensor(2, dtype)
            values.fill(0.0)
            if count > 0:
                divisor, left, right = cutlass.Float32(0.0), cutlass.Float32(0.0), cutlass.Float32(0.0)
                for i in cutlass.range_constexpr(warps):
                    divisor += s_sums[i * MERGE_ROWS + own_row]
                    left += s_out[i * WARP * facts.vector + 2 * thread]
                    right += s_out[i * WARP * facts.vector + 2 * thread + 1]
                if divisor != 0.0:
                    values[0], values[1] = (left / divisor).to(dtype), (right / divisor).to(dtype)
            query = row_tile * TILE + first_row + own_row
            if query < facts.queries:
                at = (cutlass.Int64(request) * facts.queries + query) * facts.latent + group * (facts.latent // 2)
                at += (v * (facts.vector // 4) + pair_of // 2) * 8 + lane_of % 4 * 2
                cute.autovec_copy(values, _place(out, at, dtype, 2, cute.AddressSpace.gmem))
    _mark(work, cta, 8, thread == 0, facts)
    _mark(work, cta, 1, thread == 0, facts)


@cute.jit
def _load_batch(work, mine, start, count, vectors, facts: cutlass.Constexpr):
    """This lane's vectors of the parts start, start + warps, ... as far as there are some."""
    dtype, part_values = PARTS[facts.part_dtype], facts.vectors * CONSUMERS * facts.vector
    first = mine * facts.vector + cutlass.Int64(start) * part_values
    for j in cutlass.range_constexpr(MERGE_BATCH):
        if start + j * facts.merge_warps < count:
            at = first + j * facts.merge_warps * part_values
            cute.autovec_copy(_place(work.parts, at, dtype, facts.vector, cute.AddressSpace.gmem), vectors[j])


@cute.jit
def _tma(tensor, rows: cutlass.Constexpr, columns: cutlass.Constexpr):
    """Atom and tensor that bring boxes of rows x columns into 128-byte swizzles, a column block behind the other."""
    outer = cute.make_layout((rows, (SWIZZLE, columns // SWIZZLE)), stride=(SWIZZLE, (1, rows * SWIZZLE)))
    box = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, outer)
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, box, (rows, columns))


@cute.jit
def _launch(
    queries: Queries,
    latents: Latents,
    requests: Requests,
    work: Workspace,
    out: cute.Pointer,
    scale: cutlass.Float32,
    stream: cuda.CUstream,
    facts: cutlass.Constexpr,
):
    dtype = ELEMENTS[facts.dtype]
    blocks = facts.width // SWIZZLE
    wide_strides = (latents.token_stride, latents.page_stride, queries.head_stride, queries.batch_stride)
    token_stride, page_stride, head_stride, batch_stride = (cute.assume(stride, divby=CHUNK) for stride in wide_strides)
    pool_layout = cute.make_layout(
        (facts.page_size, (SWIZZLE, blocks), latents.pages), stride=(token_stride, (1, SWIZZLE), page_stride)
    )
    tma_atom, tma_tensor = _tma(cute.make_tensor(latents.values, pool_layout), facts.box, facts.box_columns)
    query_layout = cute.make_layout(
        (facts.queries, (SWIZZLE, blocks), requests.batch), stride=(head_stride, (1, SWIZZLE), batch_stride)
    )
    query_atom, query_tensor = _tma(cute.make_tensor(queries.values, query_layout), TILE, facts.width)
    score_mma, value_mma = (
        cute.make_tiled_mma(
            cute.make_mma_atom(
                warpgroup.MmaF16BF16Op(
                    dtype, cutlass.Float32, (TILE, columns, 16), warpgroup.OperandSource.SMEM, OperandMajorMode.K, major
                )
            ),
            (1, 2, 1),
        )
        for columns, major in ((facts.keys // 2, OperandMajorMode.K), (facts.latent // 2, OperandMajorMode.MN))
    )
    block_attention_kernel(
        tma_atom, tma_tensor, query_atom, query_tensor, score_mma, score_mma, value_mma, queries, requests, work, scale, facts
    ).launch(grid=(facts.ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=facts.early_start)
    merge_kernel(requests, work, out, facts).launch(
        grid=(requests.batch * facts.row_tiles, facts.vectors * CONSUMERS // WARP, 1),
        block=(facts.merge_warps * WARP, 1, 1),
        stream=stream,
        use_pdl=facts.merge_launch != "after",
        smem=facts.merge_room,
    )


def _arguments(facts: Facts, addresses: dict[str, int], query_strides, pool, table_stride, batch, window, scale) -> tuple:
    """In `_launch`'s order, up to the stream.

    addresses: by tensor; pool: strides between pages and between tokens, number of pages.
    """
    element, wide = ELEMENTS[facts.dtype], cutlass.Int64
    types = {"page_table": (cutlass.Int32, 4), "context_lens": (wide, 8), "seq_lens": (wide, 8), "times": (wide, 8)}
    types |= {name: (element, 16) for name in ("queries", "latents", "out")}
    types |= {"parts": (PARTS[facts.part_dtype], 16), "statistics": (cutlass.Float32, 16)}
    at = {
        name: make_ptr(kind, addresses[name], cute.AddressSpace.gmem, assumed_align=align)
        for name, (kind, align) in types.items()
    }
    page_stride, token_stride, pages = pool
    return (
        Queries(at["queries"], *map(wide, query_strides)),
        Latents(at["latents"], wide(page_stride), wide(token_stride), cutlass.Int32(pages)),
        Requests(
            at["page_table"],
            wide(table_stride),
            at["context_lens"],
            at["seq_lens"],
            cutlass.Int32(batch),
            cutlass.Int32(window),
        ),
        Workspace(at["parts"], at["statistics"], at["times"]),
        at["out"],
        cutlass.Float32(scale),
    )


def _entry(facts: Facts) -> tuple:
    """`_launch` and stand-ins of its arguments."""
    names = ("queries", "latents", "page_table", "context_lens", "seq_lens", "parts", "statistics", "times", "out")
    arguments = _arguments(facts, dict.fromkeys(names, 16), (8, 8, 8), (8, 8, 1), 1, 1, NO_WINDOW, 1.0)
    return _launch, (*arguments, make_fake_stream(), facts)


def compile_block_attention(facts: Facts, architecture: str):
    """Both kernels for these facts; from the cache after the first time."""
    return compile_once(_entry, facts, architecture)


def block_attention(
    queries: torch.Tensor,
    latents: torch.Tensor,
    page_table: torch.Tensor,
    context_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_lora_rank: int,
    softmax_scale: float,
    causal: bool = False,
    window: int | None = None,
    times: torch.Tensor | None = None,
    **choices,
) -> torch.Tensor:
    """Two launches on the device's current stream, under a CUDA graph too; the lengths are read on the device only.

    queries: [B, N, heads, D], bfloat16 or float16; latents: [pages, page_size, D] of the same dtype; page_table: int32 [B, P];
    context_lens, seq_lens: int64 [B]; rows at or past seq_lens[b], and below context_lens[b] - window, have no influence.
    times: a timeline, int64 [multiprocessors + B * row tiles * C / 4, MARKS] of zeros, with float16 parts; choices: facts of
    the build beside the shape.
    Returns [B, N, heads, kv_lora_rank].

    Raises:
        ValueError: there is no build for the device, the dtype or the shape, or a stride does not suit 16-byte accesses.
    """
    batch, rows, heads, width = queries.shape
    pages, page_size, _ = latents.shape
    _check(queries, latents, page_table, context_lens, seq_lens, kv_lora_rank, softmax_scale)
    device = queries.device
    architecture = build_architecture(torch.cuda.get_device_capability(device))
    if architecture != "sm_90a":
        raise ValueError(f"block_attention=cute is built for sm_90a, and this device takes {architecture}; choose triton")
    ctas = torch.cuda.get_device_properties(device).multi_processor_count
    choices["timeline"] = times is not None
    batch_stride, row_stride, head_stride = queries.stride()[:3]
    if heads == 1:
        head_stride = row_stride
    choices["fetch_queries"] = choices.get("fetch_queries", True) and (rows == 1 or row_stride == heads * head_stride)
    facts = Facts(queries.dtype, kv_lora_rank, width, rows, heads, page_size, causal, ctas, **choices)
    slots = ctas + batch * facts.row_tiles
    out = torch.empty(batch, rows, heads, kv_lora_rank, dtype=queries.dtype, device=device)
    parts = torch.empty(slots, TILE, kv_lora_rank, dtype=facts.part_dtype, device=device)
    statistics = torch.empty(slots, 2, TILE, 2, dtype=torch.float32, device=device)
    if not out.numel():
        return out
    tensors = {"queries": queries, "latents": latents, "page_table": page_table, "context_lens": context_lens}
    tensors |= {"seq_lens": seq_lens, "parts": parts, "statistics": statistics, "out": out}
    tensors["times"] = statistics if times is None else times
    pool = (*latents.stride()[:2], pages)
    seen = NO_WINDOW if window is None else window
    with torch.cuda.device(device):
        stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        arguments = _arguments(
            facts,
            addresses,
            (batch_stride, row_stride, head_stride),
            pool,
            page_table.stride(0),
            batch,
            seen,
            softmax_scale * LOG2_E,
        )
        compile_block_attention(facts, architecture)(*arguments, stream)
    return out


def _check(queries, latents, page_table, context_lens, seq_lens, latent: int, softmax_scale: float) -> None:
    """What `block_attention` refuses."""
    width, page_size = queries.shape[3], latents.shape[1]
    if queries.dtype not in ELEMENTS or latents.dtype != queries.dtype:
        raise ValueError(
            f"block_attention=cute takes queries and latents of one dtype, {' or '.join(map(str, ELEMENTS))}, "
            f"not {queries.dtype} and {latents.dtype}; choose triton or torch"
        )
    if latent % LATENT_STEP or not 0 < latent <= 512 or width % SWIZZLE or not latent <= width <= MOST_WIDTH:
        raise ValueError(
            f"block_attention=cute takes kv_lora_rank up to 512 in steps of {LATENT_STEP} and key rows up to {MOST_WIDTH} in "
            f"steps of {SWIZZLE}, not {latent} and {width}; choose triton or torch"
        )
    if page_size % 8:
        raise ValueError(f"block_attention=cute takes pages of a multiple of 8 tokens, not {page_size}; choose triton or torch")
    for name, tensor in (("queries", queries), ("latents", latents)):
        if tensor.data_ptr() % 16 or tensor.stride(-1) != 1 or any(stride % CHUNK for stride in tensor.stride()[:-1]):
            raise ValueError(
                f"block_attention=cute reads 16 bytes at once: {name} must start at a multiple of 16 bytes, with stride 1 in "
                f"the last dimension and multiples of {CHUNK} in the others; got {tensor.stride()} at {tensor.data_ptr():#x}"
            )
    if page_table.dtype != torch.int32 or page_table.stride(-1) != 1:
        raise ValueError(f"page_table must be int32 with stride 1 in a row, not {page_table.dtype}, {page_table.stride()}")
    for name, lens in (("context_lens", context_lens), ("seq_lens", seq_lens)):
        if lens.dtype != torch.int64 or lens.dim() != 1 or not lens.is_contiguous():
            raise ValueError(f"{name} must be int64 values side by side, not {lens.dtype}, {lens.stride()}")
    if not softmax_scale > 0:
        raise ValueError(f"softmax_scale={softmax_scale}: must be positive")
