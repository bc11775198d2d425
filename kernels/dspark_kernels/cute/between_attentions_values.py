"""The first product's x, where `between_attentions` makes it: the attention's parts merged, times each head's matrix.

The work is a list of units: `Facts.group_rows` block rows of a head, and 64 of their latents.  The CTA of a unit merges the
rows to the bits that `merge_values_kernel` has, multiplies them by the unit's part of the matrix, and leaves the products in
words that say themselves that they are there.  Then each unit adds up those of all latents for some of the columns.

`facts` is a `Facts` of `between_attentions_schedule`, whose `attention` is there; `attention` is that.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from dspark_kernels.cute.between_attentions_latents import store_context
from dspark_kernels.cute.between_attentions_meet import (
    Shared,
    load_words,
    meet,
    pass_on,
    raise_counter,
    store_words,
    this_launch,
)
from dspark_kernels.cute.between_attentions_multiply import multiply
from dspark_kernels.cute.between_attentions_schedule import BOX, ELEMENTS, WARPS, Context, Rows, Workspace
from dspark_kernels.cute.block_attention_checks import values_refusal
from dspark_kernels.cute.block_attention_merge import Shared as Merging
from dspark_kernels.cute.block_attention_product import ROW_STRIDE
from dspark_kernels.cute.block_attention_product import ROWS as MERGED_ROWS
from dspark_kernels.cute.block_attention_schedule import TILE, WARP, Requests, values_at
from dspark_kernels.cute.block_attention_schedule import Workspace as Parts
from dspark_kernels.cute.block_attention_values import Group, merge_rows, shared_sizes

MOST_QUERIES = 3 * TILE  # with more of them the parts are summed by fewer warps than there are
FEATURES = 16  # of a warp, of a unit's products


class Unit(NamedTuple):
    """Its number; its rows; which 64 latents."""

    number: cutlass.Int32
    group: Group
    slice: cutlass.Int32


def num_units(batch, attention):
    """Units of a launch."""
    return batch * attention.heads * -(-attention.rows // attention.group_rows) * attention.slices


def unit_of(number, attention) -> Unit:
    """Units of the same rows are neighbours.  Here and above: ints, or the DSL's integers."""
    rows, groups = number // attention.slices, -(-attention.rows // attention.group_rows)
    heads = rows // groups
    return Unit(
        number,
        Group(heads // attention.heads, heads % attention.heads, rows % groups * attention.group_rows),
        number % attention.slices,
    )


def merge_refusal(dtype, rows: int, heads: int, latent: int, value_width: int) -> str | None:
    """Why a launch does not merge the attention of blocks of so many rows; None where it does."""
    reason = values_refusal(dtype, latent, value_width)
    if reason is None and (dtype not in ELEMENTS or value_width % FEATURES or value_width > WARPS * FEATURES):
        reason = (
            f"it merges bfloat16 with heads of up to {WARPS * FEATURES} values in steps of {FEATURES}, not {dtype} with "
            f"{value_width}"
        )
    if reason is None and rows * heads > MOST_QUERIES:
        reason = f"it merges blocks of up to {MOST_QUERIES} rows times heads, not {rows} times {heads}"
    return reason


def merging_bytes(attention) -> int:
    """Of shared memory, that merging takes."""
    return 4 * sum(shared_sizes(attention)) + 2 * MERGED_ROWS * ROW_STRIDE


@cute.jit
def _merging(shared: Shared, facts: cutlass.Constexpr):
    """What merging needs, and the merged rows, where x of the first product comes later."""
    if cutlass.const_expr(facts.attention.warps != WARPS):
        raise ValueError(f"{WARPS} warps merge, and the attention's facts have {facts.attention.warps}")
    if cutlass.const_expr(merging_bytes(facts.attention) > facts.x_bytes):
        raise ValueError(f"merging takes {merging_bytes(facts.attention)} bytes, and x {facts.x_bytes}")
    at, tensors = cute.recast_ptr(shared.x.iterator, dtype=cutlass.Float32), []
    for size in shared_sizes(facts.attention):
        tensors.append(cute.make_tensor(at, cute.make_layout(size)))
        at = at + size
    rounded = cute.recast_ptr(at, dtype=ELEMENTS[facts.dtype])
    return Merging(*tensors), cute.make_tensor(rounded, cute.make_layout(MERGED_ROWS * ROW_STRIDE))


def tag(launch, facts):
    """What marks a launch's words, of all that lie in a workspace; launch: counts from 1 in each of the three forms: following
    or not, and then with queries over latents or without.  int32, so that tags return after 2**30 launches."""
    return launch * 4 + facts.following + 2 * (facts.heads > 0)


@cute.jit
def _words_of(work: Workspace, number, feature, row, attention: cutlass.Constexpr):
    """The words of two neighbouring rows of a unit, of one column of its matrix."""
    return work.words + ((number * attention.value_width + feature) * attention.group_rows + row)


@cute.jit
def _pairs(pointer):
    """Eight neighbouring values in shared memory, as pairs."""
    words = cute.make_rmem_tensor(4, cutlass.Int32)
    cute.autovec_copy(values_at(pointer, 0, pointer.dtype, 8, cute.AddressSpace.smem), cute.recast_tensor(words, pointer.dtype))
    return words


@cute.jit
def _multiply_unit(shared: Shared, rounded, work: Workspace, number, done, own_tag, facts: cutlass.Constexpr):
    """Leaves a unit's products.  A warp has 16 columns of the matrix; done: boxes before that with the unit's part of it."""
    warp, lane, width = cute.arch.warp_idx(), cute.arch.lane_idx(), facts.attention.value_width
    stage, phase = done % facts.stages, done // facts.stages % 2
    cute.arch.mbarrier_wait(shared.landed + stage, phase)
    if warp < width // FEATURES:
        sums = cute.make_rmem_tensor(4, cutlass.Float32)
        sums.fill(0.0)
        row, chunk = warp * FEATURES + lane // 4, lane % 4
        for i in cutlass.range_constexpr(2):  # halves of the latents
            # In `block_attention_product.multiply`'s order: a lane's four latents of a step are neighbours.
            own = _pairs(rounded.iterator + (lane // 4 * ROW_STRIDE + i * 32 + chunk * 8))
            left_at = stage * BOX + row * 64 + ((4 * i + chunk) ^ (lane // 4)) * 8
            left, right = (_pairs(shared.weights.iterator + (left_at + 8 * j * 64)) for j in range(2))
            for h in cutlass.range_constexpr(2):
                matrix = (left[2 * h], right[2 * h], left[2 * h + 1], right[2 * h + 1])
                multiply(sums, matrix, own[2 * h], own[2 * h + 1], facts)
        if lane % 4 < facts.attention.group_rows // 2:
            for i in cutlass.range_constexpr(2):
                feature = warp * FEATURES + lane // 4 + 8 * i
                words = _words_of(work, number, feature, lane % 4 * 2, facts.attention)
                store_words(words, sums[2 * i], sums[2 * i + 1], own_tag)
    pass_on(shared.empty + stage)


@cute.jit
def _add_up(rows: Rows, work: Workspace, unit: Unit, own_tag, attention: cutlass.Constexpr):
    """One warp: x of the columns that a unit adds up, as soon as the products of all latents are there."""
    lane, group, slices, pairs = cute.arch.lane_idx(), unit.group, attention.slices, attention.group_rows // 2
    owned = attention.value_width // slices
    for first in cutlass.range_constexpr(0, owned, WARP // pairs):
        column, row = first + lane // pairs, lane % pairs * 2
        feature = unit.slice * owned + cutlass.min(column, owned - 1)
        loaded = [cute.make_rmem_tensor(2, cutlass.Float32) for _ in range(slices)]
        complete = cutlass.Boolean(False)
        while not complete:
            complete = cutlass.Boolean(True)
            for i in cutlass.range_constexpr(slices):
                words = _words_of(work, unit.number - unit.slice + i, feature, row, attention)
                there = load_words(words, loaded[i], own_tag)
                complete = there and complete
        for i in cutlass.range_constexpr(2):
            total = cutlass.Float32(0.0)
            for j in cutlass.range_constexpr(slices):
                total += loaded[j][i]
            block_row = group.first + row + i
            if column < owned and block_row < attention.rows:
                at = (group.request * attention.rows + block_row) * attention.heads + group.head
                (rows.values + (at * attention.value_width + feature)).store(total.to(rows.values.dtype))


@cute.jit
def multiply_units(
    shared: Shared, requests: Requests, parts: Parts, work: Workspace, facts: cutlass.Constexpr
):  # fmt: skip
    """Eight warps: the products of this CTA's units, once the attention has ended; how many units."""
    cta, _, _ = cute.arch.block_idx()
    units, done = num_units(requests.batch, facts.attention), cutlass.Int32(0)
    merging, rounded = _merging(shared, facts)
    for number in cutlass.range(cta, units, facts.ctas, unroll=1):
        unit = unit_of(number, facts.attention)
        merge_rows(rounded, merging, requests, parts, unit.group, unit.slice, facts.attention)
        cute.arch.mbarrier_wait(shared.known, 0)
        _multiply_unit(shared, rounded, work, number, done, tag(shared.launch[0], facts), facts)
        meet()  # the next unit's rows have the same place
        done += 1
    cute.arch.fence_proxy("async.shared", space="cta")  # x comes by TMA to where rows were merged
    pass_on(shared.multiplied)
    return done


@cute.jit
def tell_launch(shared: Shared, work: Workspace, facts: cutlass.Constexpr):
    """One warp: the number of the launch, for it and the other warps.  The attention before may begin, and a CTA of it end,
    beside the launch before that, so the number is known when all of it has ended."""
    cute.arch.griddepcontrol_wait()
    launch = this_launch(work, facts)
    if cute.arch.lane_idx() == 0:
        shared.launch[0] = launch
    pass_on(shared.known)
    return launch


@cute.jit
def add_units(
    shared: Shared, batch, rows: Rows, context: Context, work: Workspace, eps_context, facts: cutlass.Constexpr
):  # fmt: skip
    """One warp: the sums of this CTA's units, or none; then it tells the other CTAs, which count on it without units too.
    Given rows have to be prepared first.  Then the context's latents."""
    cta, _, _ = cute.arch.block_idx()
    if cutlass.const_expr(facts.attention is not None):
        launch = tell_launch(shared, work, facts)
        # The other CTAs are about as far: from here on it pays to look for their products.
        cute.arch.mbarrier_wait(shared.multiplied, 0)
        for number in cutlass.range(cta, num_units(batch, facts.attention), facts.ctas, unroll=1):
            _add_up(rows, work, unit_of(number, facts.attention), tag(launch, facts), facts.attention)
        cute.arch.fence_proxy("async.global")  # x is fetched by TMA
        cute.arch.sync_warp()
    else:
        cute.arch.griddepcontrol_wait()
        launch = this_launch(work, facts)
    if cutlass.const_expr(not facts.behind and facts.following):
        cute.arch.mbarrier_wait(shared.multiplied, 0)
    if cute.arch.lane_idx() == 0:
        raise_counter(work.counters + facts.made_at, cutlass.Int32(1))
        cute.arch.mbarrier_arrive(shared.added)
    if cutlass.const_expr(facts.context > 0 and facts.following):
        store_context(rows, context, work, launch, eps_context, facts)
