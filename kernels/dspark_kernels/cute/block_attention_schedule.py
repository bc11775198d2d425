"""The work that both kernels of the block attention share: a call's arguments, and the list of its key tiles.

The keys of all (request, tile of 64 query rows) pairs, in tiles of 64, form one list.  Each CTA takes an equal part of it, one
after the other.  A request without keys has no tile, so it moves no boundary.  Of a list so short that half of the CTAs suffice,
two take the same tile, each for half of the values, and write half of the same part.

`facts` is a `block_attention_facts.Facts`.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch

ELEMENTS = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}
WARP = 32
TILE = 64  # query rows of a tile
KEYS = 64  # of a tile
CONSUMERS = 256  # threads that multiply: two warpgroups
CHUNK = 8  # 16-bit values in 16 bytes
PART = cutlass.Float16  # of the parts between the kernels
SLICE = 64  # latents that a CTA merges, where the merge multiplies


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
    """page_table: int32 [S, P]; context_lens, seq_lens: int64 [B]; slots: int64 [B], the table's row of each request, read if
    the build is slotted and only for requests with keys."""

    page_table: cute.Pointer
    table_stride: cutlass.Int64
    slots: cute.Pointer
    context_lens: cute.Pointer
    seq_lens: cute.Pointer
    batch: cutlass.Int32
    window: cutlass.Int32


class Workspace(NamedTuple):
    """What the attention leaves for the merge.  Of (request, row tile), taker c's part is c + request * row tiles + row tile.

    parts: float16 in vectors of 16 bytes, [part, vectors * 256], of a thread's registers, at `vector_place`; a vector belongs
    to two rows, eight apart.
    statistics: float32 [part, warpgroup, 64 rows, 2]: base-2 logarithm of the row's sum of weights, and factor of the row's
    values.
    """

    parts: cute.Pointer
    statistics: cute.Pointer


class Pair(NamedTuple):
    """The part of a (request, tile of query rows) pair that a CTA takes: first key and end of the request's keys; first key
    tile, counted from the request's first, and how many."""

    request: cutlass.Int32
    row_tile: cutlass.Int32
    first: cutlass.Int32
    end: cutlass.Int32
    begin: cutlass.Int32
    count: cutlass.Int32


@cute.jit
def _range(requests, request):
    """First key and end of a request's keys."""
    end = cutlass.Int32((requests.seq_lens + request).load())
    first = cutlass.Int32((requests.context_lens + request).load()) - requests.window
    return cutlass.max(first, cutlass.Int32(0)), end


@cute.jit
def scan(requests, first_request, base, facts: cutlass.Constexpr):
    """Key tiles of request first_request + lane, none past the batch, and where they end in a list that goes on at base."""
    lane = cute.arch.lane_idx()
    own = cutlass.Int32(0)
    if first_request + lane < requests.batch:
        first, end = _range(requests, first_request + lane)
        if first < end:
            own = (end + KEYS - 1) // KEYS - first // KEYS
    tiles_end = own * facts.row_tiles
    for step in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(tiles_end, 1 << step, mask_and_clamp=0)
        if lane >= 1 << step:
            tiles_end += other
    return own, tiles_end + base


@cute.jit
def first_slots(requests, facts: cutlass.Constexpr):
    """The table's row of the request of each lane's number: asked for with the lengths, so that pages wait for one load
    less."""
    lane, slot = cute.arch.lane_idx(), cutlass.Int32(0)
    if cutlass.const_expr(facts.slotted):  # noqa: SIM102 (decided when it is built, the next on the device)
        if lane < requests.batch:
            slot = cutlass.Int32((requests.slots + lane).load())
    return slot


@cute.jit
def total_tiles(requests, tiles_end, facts: cutlass.Constexpr):
    """Length of the list, from the first scan."""
    total = cute.arch.shuffle_sync(tiles_end, WARP - 1)
    for first in cutlass.range(WARP, requests.batch, WARP, unroll=1):
        _, more = scan(requests, first, total, facts)
        total = cute.arch.shuffle_sync(more, WARP - 1)
    return total


@cute.jit
def takers_of(total, facts: cutlass.Constexpr):
    """CTAs that take the same tiles: one, or two."""
    takers = cutlass.Int32(1)
    if cutlass.const_expr(facts.halved):  # noqa: SIM102 (decided when it is built, the next on the device)
        if 2 * total <= facts.ctas:
            takers = cutlass.Int32(2)
    return takers


@cute.jit
def _locate(requests, tile, own, tiles_end, facts: cutlass.Constexpr):
    """The request that a tile of the list belongs to, its tiles' start in the list, and its key tiles.

    own, tiles_end: of the first scan, so that 32 requests take no load.
    """
    request, start, tiles = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
    base = cutlass.Int32(0)
    for first in cutlass.range(0, requests.batch, WARP, unroll=1):
        if first > 0:
            own, tiles_end = scan(requests, first, base, facts)
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
def next_pair(requests, tile, last, own, tiles_end, facts: cutlass.Constexpr):
    """What a CTA whose part of the list goes on from `tile` to `last` takes next.  own, tiles_end: of the first scan."""
    request, start, tiles = _locate(requests, tile, own, tiles_end, facts)
    first, end = _range(requests, request)
    row_tile, begin = (tile - start) // tiles, (tile - start) % tiles
    count = cutlass.min(tiles - begin, last - tile)
    return Pair(request, row_tile, first, end, begin, count)


@cute.jit
def entry_of(requests, request, facts: cutlass.Constexpr):
    """Start of a request's tiles in the list, its key tiles, and the list's length."""
    start, tiles, total = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
    for first in cutlass.range(0, requests.batch, WARP, unroll=1):
        own, tiles_end = scan(requests, first, total, facts)
        if first <= request and request < first + WARP:
            start = cute.arch.shuffle_sync(tiles_end - own * facts.row_tiles, request - first)
            tiles = cute.arch.shuffle_sync(own, request - first)
        total = cute.arch.shuffle_sync(tiles_end, WARP - 1)
    return start, tiles, total


@cute.jit
def share(total, cta, facts: cutlass.Constexpr):
    """First tile of a CTA's part of the list."""
    return cta * (total // facts.ctas) + cutlass.min(cta, total % facts.ctas)


@cute.jit
def owner_of(total, tile, facts: cutlass.Constexpr):
    """The CTA whose part holds this tile: the inverse of `share`."""
    each, more = total // facts.ctas, total % facts.ctas
    long = more * (each + 1)
    owner = tile // (each + 1)
    if tile >= long:
        owner = more + (tile - long) // cutlass.max(each, cutlass.Int32(1))
    return owner


@cute.jit
def parts_of(request, row_tile, start, tiles, total, facts: cutlass.Constexpr):
    """First part of a (request, tile of query rows) pair, and how many; start, tiles, total: of `entry_of`."""
    start += row_tile * tiles
    first = owner_of(total, start, facts)
    count = owner_of(total, start + tiles - 1, facts) - first + 1 if tiles > 0 else cutlass.Int32(0)
    return cutlass.Int64(first + request * facts.row_tiles + row_tile), count


def vector_place(v, thread, facts):
    """Of a thread's vector v in a part: neighbours are those of four threads, four vectors and two warps.  With 8 heads these
    512 bytes are 64 latents of four block rows of a head, which `merge_rows` reads with one load of a warp."""
    group, warp, quad, column = thread // (CONSUMERS // 2), thread // WARP % 4, thread % WARP // 4, thread % 4
    own = group * (facts.vectors // 4) * 512 + warp // 2 * 256 + quad * 32 + warp % 2 * 16 + column
    return own + (v // 4 * 512 + v % 4 * 4)


@cute.jit
def values_at(pointer, offset, dtype: cutlass.Constexpr, count: cutlass.Constexpr, space: cutlass.Constexpr):
    """count values, offset values behind a pointer, as a tensor that one access reads or writes."""
    address = pointer.toint() + offset * (dtype.width // 8)
    values = cute.make_ptr(dtype, address, space, assumed_align=count * dtype.width // 8)
    return cute.make_tensor(values, cute.make_layout(count))
