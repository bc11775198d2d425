"""Absorbed MLA attention of one block over paged context, for Hopper: TMA, wgmma, mbarriers.

The keys of all (request, tile of 64 query rows) pairs, in tiles of 64, form one list.  Each CTA takes an equal part of it, one
after the other, and writes what it has of each pair, not yet normalised, to a workspace; a second kernel merges the parts of a
pair in the order of the list.  A request without keys has no tile, so it moves no boundary.

In a CTA one warp fetches key tiles into two stages, and two warpgroups work on the same tile: each scores half of its keys,
they exchange row maxima and weights through shared memory, and each gathers half of the value columns.
"""

from dataclasses import dataclass
from math import gcd

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
WARP = 32
TILE = 64  # keys of a tile, and query rows of a tile
STAGES = 2
CONSUMERS = 256  # two warpgroups
THREADS = CONSUMERS + 128  # and one for the fetching warp: registers move between whole warpgroups
FETCH_REGISTERS, CONSUME_REGISTERS = 40, 232
CHUNK = 8  # 16-bit values in 16 bytes
SWIZZLE = 64  # 16-bit values in one row of a 128-byte swizzle
STATISTICS = 3  # for each row of a part: maximum, and the two warpgroups' sums
MERGE_GROUPS = 16  # warps, each taking every sixteenth part of a pair
MERGE_THREADS = MERGE_GROUPS * WARP
MERGE_VALUES = 4  # neighbouring columns of a thread
MERGE_COLUMNS = WARP * MERGE_VALUES  # of a CTA
MERGE_BATCH = 4  # loads in flight of a thread
EVICT_NORMAL = 0x1000000000000000  # cache policy of the fetches: row tiles of one request read the same keys
NO_WINDOW = 2**31 - 1
MOST_WIDTH = 576  # of a key row: a query tile and two key tiles fill the shared memory
LOG2_E = 1.4426950408889634
MAXIMA, WEIGHTS, QUERIES = 1, 2, 3  # named barriers; 0 is the whole CTA's


@dataclass(frozen=True, slots=True)
class Facts:
    """What a build is specialised for.

    dtype: of queries, latents and out; latent: values of a value row; width: values of a key row; rows: of the block; heads;
    page_size; causal; ctas: that share the list of tiles; early_merge: the CTAs of the merging kernel may start
    while the last parts are written.
    """

    dtype: torch.dtype
    latent: int
    width: int
    rows: int
    heads: int
    page_size: int
    causal: bool
    ctas: int
    early_merge: bool = True

    @property
    def queries(self) -> int:
        return self.rows * self.heads

    @property
    def row_tiles(self) -> int:
        return -(-self.queries // TILE)

    @property
    def box(self) -> int:
        """Rows that one TMA box takes: they lie in one page and in one tile."""
        return gcd(self.page_size, TILE)

    @property
    def span(self) -> int:
        """Rows that lie one behind the other in a column block of a key tile; half a tile is inside one span."""
        return self.box if self.box >= TILE // 2 else TILE

    @property
    def box_columns(self) -> int:
        """A box is a whole span where it can be, so that few are asked for."""
        return self.width if self.box == self.span else SWIZZLE


@cute.jit
def _range(seq_lens, context_lens, request, window):
    """First key and end of a request's keys."""
    end = cutlass.Int32((seq_lens + request).load())
    first = cutlass.Int32((context_lens + request).load()) - window
    return cutlass.max(first, cutlass.Int32(0)), end


@cute.jit
def _tiles(seq_lens, context_lens, request, batch, window):
    """Key tiles of one request; none past the batch."""
    tiles = cutlass.Int32(0)
    if request < batch:
        first, end = _range(seq_lens, context_lens, request, window)
        if first < end:
            tiles = (end + TILE - 1) // TILE - first // TILE
    return tiles


@cute.jit
def _count(seq_lens, context_lens, until, batch, window, facts: cutlass.Constexpr):
    """Tiles in the list of the requests in front of `until`, and of all; for each lane of a whole warp."""
    lane = cute.arch.lane_idx()
    before, total = cutlass.Int32(0), cutlass.Int32(0)
    for start in cutlass.range(0, batch, WARP, unroll=1):
        tiles = _tiles(seq_lens, context_lens, start + lane, batch, window) * facts.row_tiles
        total += cute.arch.warp_reduction_sum(tiles)
        before += cute.arch.warp_reduction_sum(tiles if start + lane < until else cutlass.Int32(0))
    return before, total


@cute.jit
def _locate(seq_lens, context_lens, tile, batch, window, facts: cutlass.Constexpr):
    """The request that a tile of the list belongs to, its tiles' start in the list, and its key tiles; for each lane."""
    lane = cute.arch.lane_idx()
    request, start, tiles = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
    base = cutlass.Int32(0)
    for first in cutlass.range(0, batch, WARP, unroll=1):
        own = _tiles(seq_lens, context_lens, first + lane, batch, window)
        end = own * facts.row_tiles
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(end, 1 << step, mask_and_clamp=0)
            if lane >= 1 << step:
                end += other
        end += base
        here = end - own * facts.row_tiles
        found = cute.arch.vote_ballot_sync(here <= tile and tile < end)
        if found != 0:
            at = cute.arch.popc(found - 1)
            request = first + at
            start = cute.arch.shuffle_sync(here, at)
            tiles = cute.arch.shuffle_sync(own, at)
        base = cute.arch.shuffle_sync(end, WARP - 1)
    return request, start, tiles


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
def _load_queries(queries, strides, shared, request, row_tile, thread, dtype: cutlass.Constexpr, facts: cutlass.Constexpr):
    """One tile of query rows into shared memory, swizzled.  The last row stands in the rows that the tile has too many."""
    chunks = facts.width // CHUNK
    per_thread = TILE * chunks // CONSUMERS
    loaded = [cute.make_rmem_tensor(CHUNK, dtype) for _ in range(per_thread)]
    for i in cutlass.range_constexpr(per_thread):  # no branch and no store in between: all loads are in flight together
        at = thread + i * CONSUMERS
        query = cutlass.min(row_tile * TILE + at // chunks, facts.queries - 1)
        where = cutlass.Int64(request) * strides[0] + cutlass.Int64(query // facts.heads) * strides[1]
        where += cutlass.Int64(query % facts.heads) * strides[2] + at % chunks * CHUNK
        cute.autovec_copy(_place(queries, where, dtype, CHUNK, cute.AddressSpace.gmem), loaded[i])
    for i in cutlass.range_constexpr(per_thread):
        at = thread + i * CONSUMERS
        row, chunk = at // chunks, at % chunks
        to = (chunk // 8) * TILE * SWIZZLE + row * SWIZZLE + ((chunk % 8) ^ (row % 8)) * CHUNK
        cute.autovec_copy(loaded[i], _place(shared, to, dtype, CHUNK, cute.AddressSpace.smem))


@cute.jit
def _clear_rows(shared, first, end, thread, dtype: cutlass.Constexpr, facts: cutlass.Constexpr):
    """Zeros in the value columns of a tile's rows outside first..end.  The swizzle stays inside a row's 128 bytes."""
    chunks = facts.latent // CHUNK
    zeros = cute.make_rmem_tensor(CHUNK, dtype)
    zeros.fill(0.0)
    for i in cutlass.range_constexpr(TILE * chunks // CONSUMERS):
        at = thread + i * CONSUMERS
        row, chunk = at // chunks, at % chunks
        if row < first or row >= end:
            to = row // facts.span * facts.span * facts.width + row % facts.span * SWIZZLE
            to += (chunk // 8) * facts.span * SWIZZLE + (chunk % 8) * CHUNK
            cute.autovec_copy(zeros, _place(shared, to, dtype, CHUNK, cute.AddressSpace.smem))


@cute.kernel
def block_attention_kernel(
    tma_atom: cute.CopyAtom,
    tma_tensor: cute.Tensor,  # [page_size, D, pages]
    score_mma: cute.TiledMma,
    value_mma: cute.TiledMma,
    queries: cute.Pointer,
    query_batch_stride: cutlass.Int64,
    query_row_stride: cutlass.Int64,
    query_head_stride: cutlass.Int64,
    page_table: cute.Pointer,  # int32 [B, P]
    table_stride: cutlass.Int64,
    context_lens: cute.Pointer,  # int64 [B]
    seq_lens: cute.Pointer,  # int64 [B]
    parts: cute.Pointer,  # float32 [part, 64, C]
    statistics: cute.Pointer,  # float32 [part, 3, 64]
    batch: cutlass.Int32,
    window: cutlass.Int32,
    scale: cutlass.Float32,  # times log2(e)
    facts: cutlass.Constexpr,
):
    dtype = ELEMENTS[facts.dtype]
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane = cute.arch.lane_idx()
    blocks = facts.width // SWIZZLE  # of 64 columns

    allocator = SmemAllocator()
    swizzle = cute.make_swizzle(3, 4, 3)
    span = facts.span
    tokens = (8, span // 8, TILE // span)
    token_strides = (SWIZZLE, 8 * SWIZZLE, span * facts.width)
    keys_outer = cute.make_layout(
        (tokens, (SWIZZLE, blocks), STAGES), stride=(token_strides, (1, span * SWIZZLE), TILE * facts.width)
    )
    values_outer = cute.make_layout(
        ((SWIZZLE, facts.latent // SWIZZLE), tokens, STAGES),
        stride=((1, span * SWIZZLE), token_strides, TILE * facts.width),
    )
    queries_outer = cute.make_layout(((8, TILE // 8), (SWIZZLE, blocks)), stride=((SWIZZLE, 8 * SWIZZLE), (1, TILE * SWIZZLE)))
    weights_outer = cute.make_layout(((8, TILE // 8), (SWIZZLE, 1)), stride=((SWIZZLE, 8 * SWIZZLE), (1, TILE * SWIZZLE)))
    s_queries = allocator.allocate_tensor(dtype, queries_outer, 1024, swizzle)
    s_keys = allocator.allocate_tensor(dtype, keys_outer, 1024, swizzle)
    s_weights = allocator.allocate_tensor(dtype, weights_outer, 1024, swizzle)
    s_maxima = allocator.allocate_tensor(cutlass.Float32, cute.make_layout(2 * TILE), 16)
    full = allocator.allocate_array(cutlass.Int64, STAGES)
    empty = allocator.allocate_array(cutlass.Int64, STAGES)
    s_values = cute.make_tensor(s_keys.iterator, values_outer)

    if warp == CONSUMERS // WARP:
        cpasync.prefetch_descriptor(tma_atom)
    if thread == 0:
        for stage in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_init(full + stage, 1)
            cute.arch.mbarrier_init(empty + stage, CONSUMERS // WARP)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if cutlass.const_expr(facts.early_merge):
        cute.arch.griddepcontrol_launch_dependents()

    _, total = _count(seq_lens, context_lens, 0, batch, window, facts)
    tile, last = _share(total, cta, facts), _share(total, cta + 1, facts)
    done = cutlass.Int32(0)  # tiles since the start: gives stage and phase

    if warp >= CONSUMERS // WARP:
        cute.arch.setmaxregister_decrease(FETCH_REGISTERS)
        if warp > CONSUMERS // WARP:
            tile = last
        boxes = TILE // facts.box
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
        while tile < last:
            request, start, tiles = _locate(seq_lens, context_lens, tile, batch, window, facts)
            first, end = _range(seq_lens, context_lens, request, window)
            begin = (tile - start) % tiles
            count = cutlass.min(tiles - begin, last - tile)
            table = page_table + cutlass.Int64(request) * table_stride
            for key_tile in cutlass.range(begin, begin + count, unroll=1):
                token = (first // TILE + key_tile) * TILE
                stage = done % STAGES
                pages = cute.make_rmem_tensor(boxes, cutlass.Int32)
                for box in cutlass.range_constexpr(boxes):
                    # A page outside the keys is none: its rows are masked, so any page with keys stands for it.
                    known = cutlass.min(cutlass.max(token + box * facts.box, first), end - 1)
                    pages[box] = cutlass.max((table + known // facts.page_size).load(), cutlass.Int32(0))
                if done >= STAGES:
                    cute.arch.mbarrier_wait(empty + stage, (done // STAGES - 1) % 2)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, TILE * facts.width * dtype.width // 8)
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
                done += 1
            tile += count
    else:
        cute.arch.setmaxregister_increase(CONSUME_REGISTERS)
        group = cute.arch.make_warp_uniform(thread // 128)
        own_warp, quad, column = warp % 4, lane // 4, lane % 4
        row = own_warp * 16 + quad  # and row + 8
        score_slice = score_mma.get_slice(group * 128)
        value_slice = value_mma.get_slice(group * 128)
        f_queries = score_mma.make_fragment_A(score_slice.partition_A(s_queries))
        f_keys = score_mma.make_fragment_B(score_slice.partition_B(cute.make_tensor(s_keys.iterator, keys_outer)))
        f_weights = value_mma.make_fragment_A(value_slice.partition_A(s_weights))
        f_values = value_mma.make_fragment_B(value_slice.partition_B(s_values))
        scores = cute.make_rmem_tensor(score_mma.partition_shape_C((TILE, TILE)), cutlass.Float32)
        out = cute.make_rmem_tensor(value_mma.partition_shape_C((TILE, facts.latent)), cutlass.Float32)
        score_values = cute.size(scores)
        out_values = cute.size(out)
        highest = cute.make_rmem_tensor(2, cutlass.Float32)
        sums = cute.make_rmem_tensor(2, cutlass.Float32)
        raw_queries = cute.recast_ptr(s_queries.iterator, dtype=dtype)
        half = TILE // 2

        while tile < last:
            request, start, tiles = _locate(seq_lens, context_lens, tile, batch, window, facts)
            first, end = _range(seq_lens, context_lens, request, window)
            row_tile, begin = (tile - start) // tiles, (tile - start) % tiles
            count = cutlass.min(tiles - begin, last - tile)
            limits = [end, end]
            if cutlass.const_expr(facts.causal):
                context = cutlass.Int32((context_lens + request).load())
                for i in cutlass.range_constexpr(2):
                    block_row = (row_tile * TILE + row + 8 * i) // facts.heads
                    limits[i] = cutlass.min(end, context + block_row + 1)
                unmasked_end = cutlass.min(end, context + row_tile * TILE // facts.heads + 1)
            else:
                unmasked_end = end
            strides = (query_batch_stride, query_row_stride, query_head_stride)
            _load_queries(queries, strides, raw_queries, request, row_tile, thread, dtype, facts)
            out.fill(0.0)
            highest.fill(-cutlass.Float32.inf)
            sums.fill(0.0)
            cute.arch.fence_proxy("async.shared", space="cta")
            _barrier(QUERIES)

            for key_tile in cutlass.range(begin, begin + count, unroll=1):
                token = (first // TILE + key_tile) * TILE
                stage = done % STAGES
                cute.arch.mbarrier_wait(full + stage, (done // STAGES) % 2)

                warpgroup.fence()
                for k in cutlass.range_constexpr(facts.width // 16):
                    score_mma.set(warpgroup.Field.ACCUMULATE, k > 0)
                    cute.gemm(score_mma, scores, f_queries[None, None, k], f_keys[None, None, k, stage], scores)
                warpgroup.commit_group()
                warpgroup.wait_group(0)

                masked = token < first or token + TILE > unmasked_end
                if masked:
                    for i in cutlass.range_constexpr(score_values):
                        key = token + group * half + i // 4 * 8 + column * 2 + i % 2
                        if key < first or key >= limits[i // 2 % 2]:
                            scores[i] = -cutlass.Float32.inf
                peaks = cute.make_rmem_tensor(2, cutlass.Float32)
                for i in cutlass.range_constexpr(2):
                    peak = scores[2 * i]
                    for j in cutlass.range_constexpr(score_values // 4):
                        peak = cute.arch.fmax(peak, cute.arch.fmax(scores[4 * j + 2 * i], scores[4 * j + 2 * i + 1]))
                    peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, 1))
                    peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, 2))
                    peaks[i] = peak
                    if column == 0:
                        s_maxima[group * TILE + row + 8 * i] = peak
                _barrier(MAXIMA)

                shrink = cute.make_rmem_tensor(2, cutlass.Float32)
                weights = cute.make_rmem_tensor(scores.layout, dtype)
                for i in cutlass.range_constexpr(2):
                    other = s_maxima[(1 - group) * TILE + row + 8 * i]
                    new = cute.arch.fmax(highest[i], cute.arch.fmax(peaks[i], other) * scale)
                    base = cutlass.Float32(0.0) if new == -cutlass.Float32.inf else new
                    shrink[i] = cute.math.exp2(highest[i] - base, fastmath=True)
                    highest[i] = new
                    added = cutlass.Float32(0.0)
                    for j in cutlass.range_constexpr(score_values // 2):
                        at = j // 2 * 4 + 2 * i + j % 2
                        weight = cute.math.exp2(cute.math.fma(scores[at], scale, -base), fastmath=True)
                        added += weight
                        weights[at] = weight.to(dtype)
                    sums[i] = sums[i] * shrink[i] + added
                for j in cutlass.range_constexpr(score_values // 4):
                    for i in cutlass.range_constexpr(2):
                        # Eight rows and four lanes a row meet all 32 banks once.
                        block = (group * (half // CHUNK) + j) ^ quad
                        to = (row + 8 * i) * SWIZZLE + block * CHUNK + column * 2
                        pair = cute.make_rmem_tensor(2, dtype)
                        pair[0], pair[1] = weights[4 * j + 2 * i], weights[4 * j + 2 * i + 1]
                        cute.autovec_copy(pair, _place(s_weights.iterator, to, dtype, 2, cute.AddressSpace.smem))
                if token < first or token + TILE > end:
                    # A weight of zero does not undo a NaN or an infinity of what a page holds outside the keys.
                    shared = cute.recast_ptr(s_keys.iterator, dtype=dtype) + stage * TILE * facts.width
                    _clear_rows(shared, first - token, end - token, thread, dtype, facts)
                cute.arch.fence_proxy("async.shared", space="cta")
                if cute.arch.vote_any_sync(shrink[0] != 1.0 or shrink[1] != 1.0):
                    for i in cutlass.range_constexpr(out_values):
                        out[i] = out[i] * shrink[i // 2 % 2]
                _barrier(WEIGHTS)

                warpgroup.fence()
                value_mma.set(warpgroup.Field.ACCUMULATE, True)
                for k in cutlass.range_constexpr(TILE // 16):
                    cute.gemm(value_mma, out, f_weights[None, None, k], f_values[None, None, k, stage], out)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                if lane == 0:
                    cute.arch.mbarrier_arrive(empty + stage)
                done += 1

            part = cutlass.Int64(cta + request * facts.row_tiles + row_tile)
            for i in cutlass.range_constexpr(2):
                total_sum = sums[i] + cute.arch.shuffle_sync_bfly(sums[i], 1)
                total_sum += cute.arch.shuffle_sync_bfly(total_sum, 2)
                if column == 0:
                    at = part * STATISTICS * TILE + row + 8 * i
                    (statistics + at + (1 + group) * TILE).store(total_sum)
                    if group == 0:
                        (statistics + at).store(highest[i])
                if row_tile * TILE + row + 8 * i < facts.queries:
                    for j in cutlass.range_constexpr(out_values // 4):
                        at = part * TILE * facts.latent + (row + 8 * i) * facts.latent
                        at += group * (facts.latent // 2) + 8 * j + column * 2
                        pair = cute.make_rmem_tensor(2, cutlass.Float32)
                        pair[0], pair[1] = out[4 * j + 2 * i], out[4 * j + 2 * i + 1]
                        cute.autovec_copy(pair, _place(parts, at, cutlass.Float32, 2, cute.AddressSpace.gmem))
            tile += count


@cute.kernel
def merge_kernel(
    parts: cute.Pointer,
    statistics: cute.Pointer,
    context_lens: cute.Pointer,
    seq_lens: cute.Pointer,
    out: cute.Pointer,  # [B, N, heads, C]
    batch: cutlass.Int32,
    window: cutlass.Int32,
    facts: cutlass.Constexpr,
):
    dtype = ELEMENTS[facts.dtype]
    thread, _, _ = cute.arch.thread_idx()
    at, columns, _ = cute.arch.block_idx()
    group, lane = thread // WARP, thread % WARP
    request, query = at // facts.queries, at % facts.queries
    row_tile, row = query // TILE, query % TILE
    column = columns * MERGE_COLUMNS + lane * MERGE_VALUES

    allocator = SmemAllocator()
    s_weights = allocator.allocate_tensor(cutlass.Float32, cute.make_layout(MERGE_THREADS), 16)
    s_peaks = allocator.allocate_tensor(cutlass.Float32, cute.make_layout(MERGE_GROUPS), 16)
    s_sums = allocator.allocate_tensor(cutlass.Float32, cute.make_layout(MERGE_GROUPS), 16)
    s_out = allocator.allocate_tensor(cutlass.Float32, cute.make_layout(MERGE_GROUPS * MERGE_COLUMNS), 16)

    before, total = _count(seq_lens, context_lens, request, batch, window, facts)
    tiles = _tiles(seq_lens, context_lens, request, batch, window)
    if cutlass.const_expr(facts.early_merge):
        cute.arch.griddepcontrol_wait()

    merged = cute.make_rmem_tensor(MERGE_VALUES, cutlass.Float32)
    merged.fill(0.0)
    if tiles > 0:
        start = before + row_tile * tiles
        first = _owner(total, start, facts)
        count = _owner(total, start + tiles - 1, facts) - first + 1
        part = cutlass.Int64(first + request * facts.row_tiles + row_tile)

        # A thread a part: the parts' weights, and the one divisor.
        peak, summed = -cutlass.Float32.inf, cutlass.Float32(0.0)
        if thread < count:
            own = statistics + (part + thread) * STATISTICS * TILE + row
            peak = own.load()
            summed = (own + TILE).load() + (own + 2 * TILE).load()
        warp_peak = cute.arch.warp_reduction_max(peak)
        if lane == 0:
            s_peaks[group] = warp_peak
        cute.arch.sync_threads()
        highest = s_peaks[0]
        for i in cutlass.range_constexpr(1, MERGE_GROUPS):
            highest = cute.arch.fmax(highest, s_peaks[i])
        base = cutlass.Float32(0.0) if highest == -cutlass.Float32.inf else highest
        weight = cute.math.exp2(peak - base, fastmath=True)
        s_weights[thread] = weight
        warp_sum = cute.arch.warp_reduction_sum(weight * summed)
        if lane == 0:
            s_sums[group] = warp_sum
        cute.arch.sync_threads()

        for i in cutlass.range(group, count, MERGE_GROUPS * MERGE_BATCH, unroll=1):
            loaded = [cute.make_rmem_tensor(MERGE_VALUES, cutlass.Float32) for _ in range(MERGE_BATCH)]
            weights = cute.make_rmem_tensor(MERGE_BATCH, cutlass.Float32)
            for j in cutlass.range_constexpr(MERGE_BATCH):
                known = cutlass.min(i + j * MERGE_GROUPS, count - 1)
                weights[j] = s_weights[known] if i + j * MERGE_GROUPS < count else cutlass.Float32(0.0)
                place = ((part + known) * TILE + row) * facts.latent + column
                cute.autovec_copy(_place(parts, place, cutlass.Float32, MERGE_VALUES, cute.AddressSpace.gmem), loaded[j])
            for j in cutlass.range_constexpr(MERGE_BATCH):
                for v in cutlass.range_constexpr(MERGE_VALUES):
                    merged[v] = cute.math.fma(weights[j], loaded[j][v], merged[v])
        own_place = group * MERGE_COLUMNS + lane * MERGE_VALUES
        cute.autovec_copy(merged, _place(s_out.iterator, own_place, cutlass.Float32, MERGE_VALUES, cute.AddressSpace.smem))
        cute.arch.sync_threads()
        if group == 0:
            divisor = s_sums[0]
            for i in cutlass.range_constexpr(1, MERGE_GROUPS):
                divisor += s_sums[i]
                for v in cutlass.range_constexpr(MERGE_VALUES):
                    merged[v] = merged[v] + s_out[i * MERGE_COLUMNS + lane * MERGE_VALUES + v]
            for v in cutlass.range_constexpr(MERGE_VALUES):
                merged[v] = merged[v] / divisor if divisor > 0.0 else cutlass.Float32(0.0)
    if group == 0:
        rounded = cute.make_rmem_tensor(MERGE_VALUES, dtype)
        rounded.store(merged.load().to(dtype))
        place = cutlass.Int64(at) * facts.latent + column
        cute.autovec_copy(rounded, _place(out, place, dtype, MERGE_VALUES, cute.AddressSpace.gmem))


@cute.jit
def _launch(
    queries: cute.Pointer,
    query_batch_stride: cutlass.Int64,
    query_row_stride: cutlass.Int64,
    query_head_stride: cutlass.Int64,
    latents: cute.Pointer,
    page_stride: cutlass.Int64,
    token_stride: cutlass.Int64,
    pages: cutlass.Int32,
    page_table: cute.Pointer,
    table_stride: cutlass.Int64,
    context_lens: cute.Pointer,
    seq_lens: cute.Pointer,
    parts: cute.Pointer,
    statistics: cute.Pointer,
    out: cute.Pointer,
    batch: cutlass.Int32,
    window: cutlass.Int32,
    scale: cutlass.Float32,
    stream: cuda.CUstream,
    facts: cutlass.Constexpr,
):
    dtype = ELEMENTS[facts.dtype]
    token_stride, page_stride = cute.assume(token_stride, divby=CHUNK), cute.assume(page_stride, divby=CHUNK)
    pool = cute.make_tensor(
        latents,
        cute.make_layout(
            (facts.page_size, (SWIZZLE, facts.width // SWIZZLE), pages), stride=(token_stride, (1, SWIZZLE), page_stride)
        ),
    )
    blocks = facts.box_columns // SWIZZLE
    box_outer = cute.make_layout((facts.box, (SWIZZLE, blocks)), stride=(SWIZZLE, (1, facts.box * SWIZZLE)))
    box = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, box_outer)
    tma_atom, tma_tensor = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(), pool, box, (facts.box, facts.box_columns)
    )
    score_mma, value_mma = (
        cute.make_tiled_mma(
            cute.make_mma_atom(
                warpgroup.MmaF16BF16Op(
                    dtype, cutlass.Float32, (TILE, columns, 16), warpgroup.OperandSource.SMEM, OperandMajorMode.K, major
                )
            ),
            (1, 2, 1),
        )
        for columns, major in ((TILE // 2, OperandMajorMode.K), (facts.latent // 2, OperandMajorMode.MN))
    )
    block_attention_kernel(
        tma_atom,
        tma_tensor,
        score_mma,
        value_mma,
        queries,
        query_batch_stride,
        query_row_stride,
        query_head_stride,
        page_table,
        table_stride,
        context_lens,
        seq_lens,
        parts,
        statistics,
        batch,
        window,
        scale,
        facts,
    ).launch(grid=(facts.ctas, 1, 1), block=(THREADS, 1, 1), stream=stream)
    merge_kernel(parts, statistics, context_lens, seq_lens, out, batch, window, facts).launch(
        grid=(batch * facts.queries, facts.latent // MERGE_COLUMNS, 1),
        block=(MERGE_THREADS, 1, 1),
        stream=stream,
        use_pdl=facts.early_merge,
    )


def _arguments(facts: Facts, addresses, query_strides, pool, table_stride, batch, window, scale) -> tuple:
    """In `_launch`'s order, up to the stream.

    addresses: of queries, latents, page_table, context_lens, seq_lens, parts, statistics, out; pool: strides between pages and
    between tokens, number of pages.
    """
    element, wide, single = ELEMENTS[facts.dtype], cutlass.Int64, cutlass.Float32
    types = (element, element, cutlass.Int32, wide, wide, single, single, element)
    align = [16 if kind is not wide and kind is not cutlass.Int32 else kind.width // 8 for kind in types]
    queries, latents, table, context, seq, parts, statistics, out = (
        make_ptr(kind, address, cute.AddressSpace.gmem, assumed_align=to)
        for kind, address, to in zip(types, addresses, align, strict=True)
    )
    page_stride, token_stride, pages = pool
    return (
        queries,
        *map(wide, query_strides),
        latents,
        wide(page_stride),
        wide(token_stride),
        cutlass.Int32(pages),
        table,
        wide(table_stride),
        context,
        seq,
        parts,
        statistics,
        out,
        cutlass.Int32(batch),
        cutlass.Int32(window),
        single(scale),
    )


def _entry(facts: Facts) -> tuple:
    """`_launch` and stand-ins of its arguments."""
    arguments = _arguments(facts, (16,) * 8, (8, 8, 8), (8, 8, 1), 1, 1, NO_WINDOW, 1.0)
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
    early_merge: bool = True,
) -> torch.Tensor:
    """Two launches on the device's current stream, under a CUDA graph too; the lengths are read on the device only.

    queries: [B, N, heads, D], bfloat16 or float16; latents: [pages, page_size, D] of the same dtype; page_table: int32 [B, P];
    context_lens, seq_lens: int64 [B]; rows at or past seq_lens[b], and below context_lens[b] - window, have no influence.
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
    facts = Facts(queries.dtype, kv_lora_rank, width, rows, heads, page_size, causal, ctas, early_merge)
    slots = ctas + batch * facts.row_tiles
    out = torch.empty(batch, rows, heads, kv_lora_rank, dtype=queries.dtype, device=device)
    parts = torch.empty(slots, TILE, kv_lora_rank, dtype=torch.float32, device=device)
    statistics = torch.empty(slots, STATISTICS, TILE, dtype=torch.float32, device=device)
    if not out.numel():
        return out
    tensors = (queries, latents, page_table, context_lens, seq_lens, parts, statistics, out)
    pool = (*latents.stride()[:2], pages)
    seen = NO_WINDOW if window is None else window
    with torch.cuda.device(device):
        stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
        addresses = [tensor.data_ptr() for tensor in tensors]
        arguments = _arguments(
            facts, addresses, queries.stride()[:3], pool, page_table.stride(0), batch, seen, softmax_scale * LOG2_E
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
    if latent % MERGE_COLUMNS or not 0 < latent <= 512 or width % SWIZZLE or not latent <= width <= MOST_WIDTH:
        raise ValueError(
            f"block_attention=cute takes kv_lora_rank up to 512 in steps of {MERGE_COLUMNS} and key rows up to {MOST_WIDTH} in "
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
