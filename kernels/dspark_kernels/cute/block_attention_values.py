"""A second kernel of the block attention that also multiplies: merges each head's rows, and applies the head's matrix to them.

A cluster takes up to `group_rows` block rows of one head of a request.  Each of its CTAs merges 64 latents of them to the bits
that `merge_kernel` has, rounds them, multiplies them by its rows of the matrix, and sends the products to the CTAs that add up
those of all, each for some columns.

`facts` is a `block_attention_facts.Facts`.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from dspark_kernels.cute.block_attention_merge import (
    MERGE_ROWS,
    Place,
    Shared,
    inverse_of,
    load_statistics,
    meet_merging,
    own_of,
    weigh_parts,
)
from dspark_kernels.cute.block_attention_product import ROW_STRIDE, ROWS, Matrices, fetch_matrix, multiply, send
from dspark_kernels.cute.block_attention_schedule import (
    CHUNK,
    CONSUMERS,
    ELEMENTS,
    PART,
    SLICE,
    TILE,
    WARP,
    Requests,
    Workspace,
    entry_of,
    parts_of,
    values_at,
    vector_place,
)


class Group(NamedTuple):
    """Of a cluster, or of units: its request, its head and the first of its block rows."""

    request: cutlass.Int32
    head: cutlass.Int32
    first: cutlass.Int32


class Source(NamedTuple):
    """Of a thread, for one slot: its first value in the first part, and how many parts."""

    first: cutlass.Int64
    count: cutlass.Int32


@cute.jit
def _query_of(group: Group, row, facts: cutlass.Constexpr):
    """The query row of a group's row.  A row, or a pair of them, past the block's last one stands for that."""
    if cutlass.const_expr(facts.paired):
        block_row = cutlass.min(group.first + row // 2 * 2, (facts.rows - 1) // 2 * 2) + row % 2
    else:
        block_row = cutlass.min(group.first + row, facts.rows - 1)
    return block_row * facts.heads + group.head


@cute.jit
def _row_tile_of(query, facts: cutlass.Constexpr):
    """The tile of a query row; where there is one only, the compiler sees that all rows have the same parts."""
    return query // TILE if facts.row_tiles > 1 else cutlass.Int32(0)


@cute.jit
def source_of(group: Group, entry, part_of, slot, facts: cutlass.Constexpr):
    """Where the vectors of a slot begin, for a lane, of the 64 latents of number `part_of`; none of a slot that the group does
    not have."""
    lane = cute.arch.lane_idx()
    query = _query_of(group, slot * facts.slot_rows, facts)
    part, count = parts_of(group.request, _row_tile_of(query, facts), entry, facts)
    row = query % TILE
    warpgroup_ctas = facts.slices // 2
    vector = part_of % warpgroup_ctas * 4 + lane % 16 // 4
    thread = part_of // warpgroup_ctas * (CONSUMERS // 2) + row // 16 * WARP + row % 8 * 4 + lane % 4
    first = (part * facts.vectors * CONSUMERS + vector_place(vector, thread, facts)) * CHUNK
    if cutlass.const_expr(not facts.paired):
        first += row % 16 // 8 * 2
    if slot >= facts.slots:
        count = cutlass.Int32(0)
    return Source(first, count)


@cute.jit
def parts_of_row(group: Group, entry, row, facts: cutlass.Constexpr):
    """Of a group's row: its query row, the first part, how many there are, and how many of them are its own: none of a row that
    the group does not have."""
    query = _query_of(group, row, facts)
    part, count = parts_of(group.request, _row_tile_of(query, facts), entry, facts)
    return query, part, count, count if row < facts.slots * facts.slot_rows else cutlass.Int32(0)


def row_of(slot, k: int, facts):
    """The group's row of a lane's value number k of a slot."""
    return slot * 2 + k // 2 % 2 if facts.paired else slot


@cute.jit
def load_part(work, source: Source, part, vector, facts: cutlass.Constexpr):
    """This lane's values of a part of a slot, if it has so many."""
    if part < source.count:
        at = source.first + cutlass.Int64(part) * (facts.vectors * CONSUMERS * CHUNK)
        if cutlass.const_expr(facts.paired):
            cute.autovec_copy(values_at(work.parts, at, PART, CHUNK, cute.AddressSpace.gmem), vector)
        else:  # those of one row, and not of the row eight apart
            for k in cutlass.range_constexpr(2):
                pair = cute.make_tensor(vector.iterator + 2 * k, cute.make_layout(2))
                cute.autovec_copy(values_at(work.parts, at + 4 * k, PART, 2, cute.AddressSpace.gmem), pair)


@cute.jit
def _load_batch(work, sources, begin, vectors, facts: cutlass.Constexpr):
    """This lane's values of the parts begin, begin + warps, ... of its slots, as far as there are some."""
    for j in cutlass.range_constexpr(len(vectors)):
        for i in cutlass.range_constexpr(facts.slot_turns):
            load_part(work, sources[i], begin + j * facts.merge_warps, vectors[j][i], facts)


@cute.jit
def _sum_parts(work, sources, vectors, longest, warp, lane, shared: Shared, facts: cutlass.Constexpr):
    """The weighted sums of the parts of one of `merge_warps`; the first batch is loaded.  Into shared memory."""
    count, warps, lanes = facts.slot_values, facts.merge_warps, facts.slot_turns * WARP
    merged = cute.make_rmem_tensor(facts.slot_turns * count, cutlass.Float32)
    merged.fill(0.0)
    for begin in cutlass.range(warp, longest, warps * len(vectors), unroll=1):
        if begin > warp:
            _load_batch(work, sources, begin, vectors, facts)
        for j in cutlass.range_constexpr(len(vectors)):
            part = begin + j * warps
            for i in cutlass.range_constexpr(facts.slot_turns):
                if part < sources[i].count:
                    slot = i * 2 + lane // 16
                    for k in cutlass.range_constexpr(count):
                        weight = shared.weights[part * MERGE_ROWS + row_of(slot, k, facts)]
                        at = i * count + k
                        merged[at] = cute.math.fma(weight, vectors[j][i][k].to(cutlass.Float32), merged[at])
    for i in cutlass.range_constexpr(facts.slot_turns):
        for k in cutlass.range_constexpr(count):
            shared.out[(warp * count + k) * lanes + i * WARP + lane] = merged[i * count + k]


def first_of(row, block, facts):
    """Of a slot's values that a lane has, the first of the two of a row in one of two blocks of 8 latents."""
    return block * 4 + row % 2 * 2 if facts.paired else block * 2


@cute.jit
def put_rounded(rounded, row, unit, block, values):
    """Two neighbouring latents of a row, which lane unit (of 16) has; block: as in `first_of`."""
    to = row * ROW_STRIDE + unit // 4 * 16 + block * 8 + unit % 4 * 2
    cute.autovec_copy(values, values_at(rounded.iterator, to, values.element_type, 2, cute.AddressSpace.smem))


@cute.jit
def _round_rows(rounded, shared: Shared, has_keys, thread, facts: cutlass.Constexpr):
    """The merged rows of a CTA's latents, from the sums of all warps, [row, latent]; zeros in rows that see no key, and in
    those that the group does not have."""
    dtype = ELEMENTS[facts.dtype]
    threads, lanes, count = facts.warps * WARP, facts.slot_turns * WARP, facts.slot_values
    pairs = ROWS * SLICE // 2
    for i in cutlass.range_constexpr(-(-pairs // threads)):
        pair = thread + i * threads
        if pair < pairs:
            unit, row, block = pair % 16, pair // 16 % ROWS, pair // (16 * ROWS)
            slot, first = row // facts.slot_rows, first_of(row, block, facts)
            values = cute.make_rmem_tensor(2, dtype)
            values.fill(0.0)
            if has_keys and slot < facts.slots:
                divisor, left, right = cutlass.Float32(0.0), cutlass.Float32(0.0), cutlass.Float32(0.0)
                for j in cutlass.range_constexpr(facts.merge_warps):
                    at = (j * count + first) * lanes + slot * 16 + unit
                    divisor += shared.sums[j * MERGE_ROWS + row]
                    left += shared.out[at]
                    right += shared.out[at + lanes]
                inverse = inverse_of(divisor)
                values[0], values[1] = (left * inverse).to(dtype), (right * inverse).to(dtype)
            put_rounded(rounded, row, unit, block, values)
    meet_merging(facts)


@cute.jit
def merge_rows(rounded, shared: Shared, requests: Requests, work: Workspace, group: Group, part_of, facts: cutlass.Constexpr):
    """A group's rows of the 64 latents of number `part_of`, once the attention has ended, into `rounded`; all warps end
    together.

    The warps take turns with the parts, as in `merge_kernel`, so the sums have its order.
    """
    thread, _, _ = cute.arch.thread_idx()
    warp, lane, turns = cute.arch.make_warp_uniform(thread // WARP), thread % WARP, facts.slot_turns
    entry, own = entry_of(requests, group.request, facts), own_of(thread)
    query, part, count, own_count = parts_of_row(group, entry, own.row, facts)
    at = Place(cutlass.Int32(0), part_of // (facts.slices // 2), query % TILE - own.row, part, own_count)
    sources = [source_of(group, entry, part_of, i * 2 + lane // 16, facts) for i in range(turns)]
    longest = sources[0].count
    for i in cutlass.range_constexpr(1, turns):
        longest = cutlass.max(longest, sources[i].count)
    cute.arch.griddepcontrol_wait()  # nothing above reads what the attention writes

    if count > 0:
        # All loads are in flight before the first value is used.
        loaded = load_statistics(work, at, own, facts)
        vectors = [
            [[cute.make_rmem_tensor(facts.slot_values, PART) for _ in range(turns)] for _ in range(facts.turn_parts)]
            for _ in range(facts.merge_turns)
        ]
        for turn in cutlass.range_constexpr(facts.merge_turns):
            _load_batch(work, sources, turn * facts.warps + warp, vectors[turn], facts)
        weigh_parts(loaded, shared, own_count, own, facts)
        for turn in cutlass.range_constexpr(facts.merge_turns):
            _sum_parts(work, sources, vectors[turn], longest, turn * facts.warps + warp, lane, shared, facts)
        meet_merging(facts)
    _round_rows(rounded, shared, count > 0, thread, facts)


def shared_sizes(facts) -> tuple[int, int, int, int]:
    """Values of each tensor of `Shared`, for `merge_rows`."""
    warps = facts.merge_warps
    sums = warps * facts.slot_values * facts.slot_turns * WARP
    return facts.ctas * MERGE_ROWS, warps * MERGE_ROWS, warps * MERGE_ROWS, sums


@cute.jit
def put_result(out, group: Group, block_row, tile, column, left, right, facts: cutlass.Constexpr):
    """Two neighbouring columns of a tile of 8, of a row of the result, rounded."""
    dtype = ELEMENTS[facts.dtype]
    values = cute.make_rmem_tensor(2, dtype)
    values[0], values[1] = left.to(dtype), right.to(dtype)
    to = (cutlass.Int64(group.request) * facts.rows + block_row) * facts.heads + group.head
    to = to * facts.value_width + tile * CHUNK + column
    cute.autovec_copy(values, values_at(out, to, dtype, 2, cute.AddressSpace.gmem))


@cute.jit
def _store(out, received, group: Group, cta, thread, facts: cutlass.Constexpr):
    """The columns that this CTA owns, from the products of all, in their order."""
    threads, pairs = facts.warps * WARP, facts.owned_tiles * ROWS * CHUNK // 2
    for i in cutlass.range_constexpr(-(-pairs // threads)):
        pair = thread + i * threads
        own_tile, row, column = pair // WARP, pair // 4 % ROWS, pair % 4 * 2
        tile, block_row = cta * facts.owned_tiles + own_tile, group.first + row
        inside = pair < pairs and tile < facts.value_tiles
        if inside and row < facts.group_rows and block_row < facts.rows:
            left, right = cutlass.Float32(0.0), cutlass.Float32(0.0)
            for j in cutlass.range_constexpr(facts.slices):
                at = (own_tile * facts.slices + j) * ROWS * CHUNK + row * CHUNK + column
                left += received[at]
                right += received[at + 1]
            put_result(out, group, block_row, tile, column, left, right, facts)


@cute.kernel
def merge_values_kernel(
    requests: Requests,
    work: Workspace,
    matrices: Matrices,
    out: cute.Pointer,  # [B, N, heads, value_width]
    facts: cutlass.Constexpr,
):
    """Grid: requests times CTAs of a cluster, heads, groups of block rows."""
    warps = facts.merge_warps
    cute.arch.griddepcontrol_launch_dependents()  # all of its CTAs have their places, which the next kernel cannot take
    thread, _, _ = cute.arch.thread_idx()
    place, head, group_index = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(thread // WARP)
    request, cta = place // facts.slices, place % facts.slices
    group = Group(request, head, group_index * facts.group_rows)
    cute.arch.cluster_arrive_relaxed()  # nothing is sent before all CTAs of the cluster are there
    allocator = SmemAllocator()
    shared = Shared(*(allocator.allocate_tensor(cutlass.Float32, cute.make_layout(size), 16) for size in shared_sizes(facts)))
    received_size = facts.owned_tiles * facts.slices * ROWS * CHUNK
    received = allocator.allocate_tensor(cutlass.Float32, cute.make_layout(received_size), 16)
    rounded = allocator.allocate_tensor(ELEMENTS[facts.dtype], cute.make_layout(ROWS * ROW_STRIDE), 16)

    fetched = allocator.allocate_tensor(ELEMENTS[facts.dtype], cute.make_layout(facts.fetched_values), 16)
    for i in cutlass.range_constexpr(facts.warp_tiles):
        fetch_matrix(matrices, fetched, head, cta, warp + i * warps, facts)
    cute.arch.cp_async_commit_group()
    merge_rows(rounded, shared, requests, work, group, cta, facts)
    cute.arch.cp_async_wait_group(0)  # a lane reads what it has fetched itself
    products = [multiply(rounded, fetched, warp + i * warps, facts) for i in range(facts.warp_tiles)]
    cute.arch.cluster_wait()
    for i in cutlass.range_constexpr(facts.warp_tiles):
        send(products[i], received, cta, warp + i * warps, facts)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    _store(out, received, group, cta, thread, facts)
