"""A kernel that writes down how CTAs of the CuTe block attention share its key tiles: what `block_attention_schedule` says."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream, make_ptr
from dspark_kernels.cute.block_attention_schedule import (
    Requests,
    entry_of,
    list_of,
    next_pair,
    parts_of,
    share_of,
    taker_of,
)

FIELDS = 8  # of a pair that a CTA takes: taker, half, request, row tile, first key, end, first tile, tiles


@cute.kernel
def walk_kernel(
    context_lens: cute.Pointer, seq_lens: cute.Pointer, taken: cute.Pointer, parts: cute.Pointer, batch: cutlass.Int32,
    window: cutlass.Int32, most: cutlass.Int32, facts: cutlass.Constexpr,
):  # fmt: skip
    """One warp a CTA.  taken: [cta, most, FIELDS]; parts: [request, row tile, 2], the first part, and how many."""
    cta, _, _ = cute.arch.block_idx()
    lane = cute.arch.lane_idx()
    requests = Requests(taken, cutlass.Int64(0), seq_lens, context_lens, seq_lens, batch, window)
    listed = list_of(requests, facts)
    _, taker, half = taker_of(listed.places, cta, facts)
    place, last = share_of(requests, listed, taker, facts)
    number = cta * most
    while place < last:
        pair = next_pair(requests, place, last, listed, facts)
        if lane == 0:
            fields = (taker, half, pair.request, pair.row_tile, pair.first, pair.end, pair.begin, pair.count)
            for i in cutlass.range_constexpr(FIELDS):
                (taken + (number * FIELDS + i)).store(cutlass.Int32(fields[i]))
        number += 1
        place += pair.places
    for request in cutlass.range(cta, batch, facts.ctas, unroll=1):
        entry = entry_of(requests, request, facts)
        for row_tile in cutlass.range_constexpr(facts.row_tiles):
            first, count = parts_of(request, cutlass.Int32(row_tile), entry, facts)
            if lane == 0:
                at = parts + (request * facts.row_tiles + row_tile) * 2
                at.store(cutlass.Int32(first))
                (at + 1).store(count)


@cute.jit
def _launch(
    context_lens: cute.Pointer, seq_lens: cute.Pointer, taken: cute.Pointer, parts: cute.Pointer, batch: cutlass.Int32,
    window: cutlass.Int32, most: cutlass.Int32, stream, facts: cutlass.Constexpr,
):  # fmt: skip
    walk_kernel(context_lens, seq_lens, taken, parts, batch, window, most, facts).launch(
        grid=(facts.ctas, 1, 1), block=(32, 1, 1), stream=stream
    )


def compile_walk(facts) -> str:
    """The kernel's PTX."""
    kinds = (cutlass.Int64, cutlass.Int64, cutlass.Int32, cutlass.Int32)
    pointers = [make_ptr(kind, 16, cute.AddressSpace.gmem, assumed_align=kind.width // 8) for kind in kinds]
    numbers = [cutlass.Int32(1)] * 3
    return cute.compile[cute.GPUArch("sm_90a")](_launch, *pointers, *numbers, make_fake_stream(), facts).__ptx__
