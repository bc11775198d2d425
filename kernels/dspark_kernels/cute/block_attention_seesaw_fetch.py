"""The block attention with two key tiles in flight: its shared memory, and the warp that fills it by TMA.

A stage has three sections of columns, which are fetched, and become free, one by one: the value columns of each warpgroup, and
those behind the values, where the weights of a tile lie as soon as its scores are known.

`facts` is a `block_attention_facts.Facts`.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from dspark_kernels.cute.block_attention_fetch import (
    STAGES,
    SWIZZLE,
    fetch_blocks,
    keys_layout,
    rows_layout,
)
from dspark_kernels.cute.block_attention_schedule import CONSUMERS, ELEMENTS, KEYS, TILE, WARP

SECTIONS = 3  # of a stage's columns: values of the first warpgroup, of the second, and what is no value
REST = 2  # the last of them


class Shared(NamedTuple):
    """queries [64, D], keys [64, D, stage], the same bytes as values [C, 64, stage], and as weights [64, 64, stage]; float32:
    bases, sums of weights and peaks of values behind them, each [warpgroup, 64]; mbarriers: full and empty of each [stage,
    section], and of the queries."""

    queries: cute.Tensor
    keys: cute.Tensor
    values: cute.Tensor
    weights: cute.Tensor
    bases: cute.Tensor
    sums: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer
    queries_full: cute.Pointer
    queries_empty: cute.Pointer


def weights_begin(facts) -> int:
    """Where the weights lie in a stage: in its first column block without a value, a swizzled row of 64 for each query row."""
    return KEYS * facts.latent


@cute.jit
def allocate(facts: cutlass.Constexpr):
    """The CTA's shared memory."""
    dtype, allocator, swizzle = ELEMENTS[facts.dtype], SmemAllocator(), cute.make_swizzle(3, 4, 3)
    values_layout = cute.make_layout(
        ((SWIZZLE, facts.latent // SWIZZLE), (8, KEYS // 8), STAGES),
        stride=((1, KEYS * SWIZZLE), (SWIZZLE, 8 * SWIZZLE), KEYS * facts.width),
    )
    weights_layout = cute.make_layout(((8, TILE // 8), SWIZZLE, STAGES), stride=((SWIZZLE, 8 * SWIZZLE), 1, KEYS * facts.width))
    queries = allocator.allocate_tensor(dtype, rows_layout(facts.blocks), 1024, swizzle)
    keys = allocator.allocate_tensor(dtype, keys_layout(facts), 1024, swizzle)
    weights = cute.make_tensor(keys.iterator + weights_begin(facts), weights_layout)
    bases, sums = (allocator.allocate_tensor(cutlass.Float32, cute.make_layout(size * TILE), 16) for size in (2, 4))
    barriers = [allocator.allocate_array(cutlass.Int64, count) for count in (STAGES * SECTIONS, STAGES * SECTIONS, 1, 1)]
    return Shared(
        queries,
        keys,
        cute.make_tensor(keys.iterator, values_layout),
        weights,
        bases,
        sums,
        *barriers,
    )


@cute.jit
def set_up_barriers(shared: Shared, facts: cutlass.Constexpr):
    """One thread; the others meet it before they use them.  A warpgroup gives back its value columns, both the rest."""
    for i in cutlass.range_constexpr(STAGES * SECTIONS):
        cute.arch.mbarrier_init(shared.full + i, 1)
        cute.arch.mbarrier_init(shared.empty + i, CONSUMERS // WARP // (1 if i % SECTIONS == REST else 2))
    cute.arch.mbarrier_init(shared.queries_full, 1)
    cute.arch.mbarrier_init(shared.queries_empty, CONSUMERS // WARP)
    cute.arch.mbarrier_init_fence()


@cute.jit
def fetch_tile(atom, from_global, to_shared, shared: Shared, pages, token, done, facts: cutlass.Constexpr):
    """A key tile, section after section."""
    stage, half = done % STAGES, facts.latent // SWIZZLE // 2
    here = (atom, from_global, to_shared, pages, token, done)
    # The scorer, whose number is the stage's, begins with its own value columns, which it also gives back first.
    for section in (stage, 1 - stage):
        place = stage * SECTIONS + section
        fetch_blocks(*here, shared.full + place, shared.empty + place, section * half, half, facts)
    place = stage * SECTIONS + REST
    rest = facts.blocks - 2 * half
    fetch_blocks(*here, shared.full + place, shared.empty + place, 2 * half, rest, facts)
