"""A second kernel of the block attention that also multiplies, for many requests or heads: a CTA takes up to eight block rows
of one head, with all of their latents.

It has the bits of `merge_values_kernel`, whose clusters give a few heads more processors; those of many would come one behind
the other.  A warp merges 64 latents of four rows, or of two, and has no other warp's help.

`facts` is a `block_attention_facts.Facts`.
"""

import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from dspark_kernels.cute.block_attention_merge import (
    MERGE_ROWS,
    Place,
    Shared,
    inverse_of,
    load_statistics,
    own_of,
    weigh_parts,
)
from dspark_kernels.cute.block_attention_product import ROW_STRIDE, ROWS, Matrices, fetch_matrix, multiply
from dspark_kernels.cute.block_attention_schedule import CHUNK, ELEMENTS, PART, TILE, WARP, Requests, Workspace, entry_of
from dspark_kernels.cute.block_attention_values import (
    Group,
    Source,
    first_of,
    load_part,
    parts_of_row,
    put_result,
    put_rounded,
    row_of,
    source_of,
)

MOST_MATRIX_BYTES = 128 << 10  # of shared memory
LEAST_CTAS = 32  # fewer leave too many processors alone
NO_SUMS = 4  # float32, of sums that warps would leave one another
SUMMED, UNDER_WAY = 32, 64  # of a lane: values that are summed beside one another, and values that are under way


def suits_whole_heads(batch: int, facts) -> bool:
    """Whether so many requests are merged so."""
    matrix = 2 * facts.latent * facts.value_tiles * CHUNK
    return batch * facts.heads * -(-facts.rows // ROWS) >= LEAST_CTAS and matrix <= MOST_MATRIX_BYTES


@cute.jit
def _sum_parts(work, source: Source, slot, half, shared: Shared, facts: cutlass.Constexpr):
    """A lane's values of a slot, merged in the order of `merge_rows`, where each of `merge_warps` warps sums every so manyeth
    part."""
    count, step = facts.slot_values, facts.merge_warps
    own_sums = min(step, SUMMED // count)
    turns = UNDER_WAY // count // own_sums
    merged = cute.make_rmem_tensor(count, cutlass.Float32)
    merged.fill(0.0)
    sums = [cute.make_rmem_tensor(count, cutlass.Float32) for _ in range(own_sums)]
    vectors = [[cute.make_rmem_tensor(count, PART) for _ in range(own_sums)] for _ in range(turns)]
    for begin in cutlass.range(0, step, own_sums, unroll=1):
        for one in sums:
            one.fill(0.0)
        for first in cutlass.range(begin, source.count, turns * step, unroll=1):
            for i in cutlass.range_constexpr(turns):  # all in flight together
                for j in cutlass.range_constexpr(own_sums):
                    load_part(work, source, first + i * step + j, vectors[i][j], facts)
            for i in cutlass.range_constexpr(turns):
                for j in cutlass.range_constexpr(own_sums):
                    part = first + i * step + j
                    if part < source.count:
                        for k in cutlass.range_constexpr(count):
                            weight = shared.weights[part * MERGE_ROWS + half * ROWS + row_of(slot, k, facts)]
                            sums[j][k] = cute.math.fma(weight, vectors[i][j][k].to(cutlass.Float32), sums[j][k])
        for j in cutlass.range_constexpr(own_sums):
            for k in cutlass.range_constexpr(count):
                merged[k] += sums[j][k]
    return merged


@cute.jit
def _round(rounded, merged, slot, half, has_keys, shared: Shared, facts: cutlass.Constexpr):
    """A lane's merged values, rounded, [row, latent]; zeros of rows that see no key.  Rows that the group does not have hold
    anything: a product's rows do not see one another."""
    dtype, unit = ELEMENTS[facts.dtype], cute.arch.lane_idx() % 16
    for i in cutlass.range_constexpr(facts.slot_rows):
        row, divisor = slot * facts.slot_rows + i, cutlass.Float32(0.0)
        if has_keys and slot < facts.slots:
            for j in cutlass.range_constexpr(facts.merge_warps):
                divisor += shared.sums[j * MERGE_ROWS + half * ROWS + row]
        inverse = inverse_of(divisor)
        for block in cutlass.range_constexpr(2):
            at, values = first_of(i, block, facts), cute.make_rmem_tensor(2, dtype)
            values[0], values[1] = (merged[at] * inverse).to(dtype), (merged[at + 1] * inverse).to(dtype)
            put_rounded(rounded, row, unit, block, values)


@cute.jit
def _of_slice(tensor, part_of, size: cutlass.Constexpr):
    """What a tensor of all latents has of the 64 of number `part_of`."""
    return cute.make_tensor(tensor.iterator + part_of * size, cute.make_layout(size))


@cute.jit
def _store(out, rounded, fetched, group: Group, tile, facts: cutlass.Constexpr):
    """8 columns of the product of all latents, summed in the order in which `merge_values_kernel` adds those of its CTAs."""
    lane, sums = cute.arch.lane_idx(), cute.make_rmem_tensor(2, cutlass.Float32)
    sums.fill(0.0)
    for part_of in cutlass.range_constexpr(facts.slices):
        own_rows = _of_slice(rounded, part_of, ROWS * ROW_STRIDE)
        product = multiply(own_rows, _of_slice(fetched, part_of, facts.fetched_values), tile, facts)
        sums[0] += product[0]
        sums[1] += product[1]
    block_row = group.first + lane // 4
    if tile < facts.value_tiles and block_row < facts.rows:
        put_result(out, group, block_row, tile, lane % 4 * 2, sums[0], sums[1], facts)


@cute.kernel
def merge_heads_kernel(
    requests: Requests,
    work: Workspace,
    matrices: Matrices,
    out: cute.Pointer,  # [B, N, heads, value_width]
    facts: cutlass.Constexpr,
):
    """Grid: requests, heads, groups of block rows."""
    cute.arch.griddepcontrol_launch_dependents()  # as `merge_values_kernel`
    thread, _, _ = cute.arch.thread_idx()
    request, head, group_index = cute.arch.block_idx()
    warp, lane = cute.arch.make_warp_uniform(thread // WARP), thread % WARP
    group, dtype, allocator = Group(request, head, group_index * facts.group_rows), ELEMENTS[facts.dtype], SmemAllocator()
    sizes = (facts.ctas * MERGE_ROWS, facts.merge_warps * MERGE_ROWS, facts.merge_warps * MERGE_ROWS, NO_SUMS)
    shared = Shared(*(allocator.allocate_tensor(cutlass.Float32, cute.make_layout(size), 16) for size in sizes))
    rounded = allocator.allocate_tensor(dtype, cute.make_layout(facts.slices * ROWS * ROW_STRIDE), 16)
    fetched = allocator.allocate_tensor(dtype, cute.make_layout(facts.slices * facts.fetched_values), 16)
    for part_of in cutlass.range_constexpr(facts.slices):
        for i in cutlass.range_constexpr(facts.warp_tiles):
            own = _of_slice(fetched, part_of, facts.fetched_values)
            fetch_matrix(matrices, own, head, part_of, warp + i * facts.warps, facts)
    cute.arch.cp_async_commit_group()

    entry, own = entry_of(requests, request, facts), own_of(thread)
    # Both halves of the latents have statistics of their own: those of the second in rows 8 to 15.
    query, part, count, own_count = parts_of_row(group, entry, own.row % ROWS, facts)
    at = Place(cutlass.Int32(0), own.row // ROWS, query % TILE - own.row, part, own_count)
    cute.arch.griddepcontrol_wait()  # nothing above reads what the attention writes

    if count > 0 and warp < facts.weighing_warps:
        weigh_parts(load_statistics(work, at, own, facts), shared, own_count, own, facts)
    if cutlass.const_expr(facts.weighing_warps < facts.warps):
        cute.arch.sync_threads()
    for number in cutlass.range(warp, facts.slices * facts.slot_turns, facts.warps, unroll=1):
        part_of, slot = number // facts.slot_turns, number % facts.slot_turns * 2 + lane // 16
        half, source = part_of // (facts.slices // 2), source_of(group, entry, part_of, slot, facts)
        merged = _sum_parts(work, source, slot, half, shared, facts)
        _round(_of_slice(rounded, part_of, ROWS * ROW_STRIDE), merged, slot, half, count > 0, shared, facts)
    cute.arch.cp_async_wait_group(0)  # a lane reads what it has fetched itself
    cute.arch.sync_threads()
    for i in cutlass.range_constexpr(facts.warp_tiles):
        _store(out, rounded, fetched, group, warp + i * facts.warps, facts)
