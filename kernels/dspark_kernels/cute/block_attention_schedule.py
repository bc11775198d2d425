"""The work that both kernels of the block attention share: a call's arguments, and the list of its key tiles.

The keys of all (request, tile of 64 query rows) pairs, in tiles of 64, form one list.  Each CTA takes an equal share of it, one
after the other.  A request without keys has no tile, so it moves no boundary.

A CTA with the end of one pair and the begin of the next stores two parts, which takes as long as some tiles.  So a pair has
places without a tile in front of its tiles, as far as the largest share does not grow; shares end in front of them.

Of a list so short that half of the CTAs suffice, two take the same tile, each for half of the values, and write half of the
same part.

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
PAIR_COST = 2  # tiles that take about as long as a CTA's second part: storing one, and other queries


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
    tile, counted from the request's first, and how many; how many places of the list they are."""

    request: cutlass.Int32
    row_tile: cutlass.Int32
    first: cutlass.Int32
    end: cutlass.Int32
    begin: cutlass.Int32
    count: cutlass.Int32
    places: cutlass.Int32


class List(NamedTuple):
    """Of a lane, for the request of its number: key tiles, and where its places in the list end.  Of all: places without a tile
    in front of a pair's tiles, and the list's length."""

    own: cutlass.Int32
    end: cutlass.Int32
    pair_cost: cutlass.Int32
    places: cutlass.Int32


class Entry(NamedTuple):
    """Of a request: its start in the list, and key tiles; pair_cost and places as in `List`."""

    start: cutlass.Int32
    tiles: cutlass.Int32
    pair_cost: cutlass.Int32
    places: cutlass.Int32


@cute.jit
def _range(requests, request):
    """First key and end of a request's keys."""
    end = cutlass.Int32((requests.seq_lens + request).load())
    first = cutlass.Int32((requests.context_lens + request).load()) - requests.window
    return cutlass.max(first, cutlass.Int32(0)), end


@cute.jit
def _tiles_of(requests, request):
    """Key tiles of a request."""
    first, end = _range(requests, request)
    return (end + KEYS - 1) // KEYS - first // KEYS if first < end else cutlass.Int32(0)


@cute.jit
def _places_of(tiles, pair_cost, facts: cutlass.Constexpr):
    """Places of a request with so many key tiles."""
    return (tiles + pair_cost) * facts.row_tiles if tiles > 0 else cutlass.Int32(0)


@cute.jit
def _scan(requests, first_request, base, pair_cost, facts: cutlass.Constexpr):
    """Of request first_request + lane, none past the batch: key tiles, and where its places end in a list that goes on at
    base."""
    lane = cute.arch.lane_idx()
    own = cutlass.Int32(0)
    if first_request + lane < requests.batch:
        own = _tiles_of(requests, first_request + lane)
    end = _places_of(own, pair_cost, facts)
    for step in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(end, 1 << step, mask_and_clamp=0)
        if lane >= 1 << step:
            end += other
    return own, end + base


@cute.jit
def list_of(requests, facts: cutlass.Constexpr):
    """The list of a call."""
    zero = cutlass.Int32(0)
    if cutlass.const_expr(facts.one_pair):
        tiles = _tiles_of(requests, zero)
        return List(tiles, tiles, zero, tiles)
    own, end = _scan(requests, 0, zero, zero, facts)
    tiles, with_keys = cute.arch.shuffle_sync(end, WARP - 1), cute.arch.vote_ballot_sync(own > 0)
    pairs = cute.arch.popc(with_keys)
    for first in cutlass.range(WARP, requests.batch, WARP, unroll=1):
        more, later = _scan(requests, first, tiles, zero, facts)
        tiles = cute.arch.shuffle_sync(later, WARP - 1)
        pairs += cute.arch.popc(cute.arch.vote_ballot_sync(more > 0))
    pairs *= facts.row_tiles
    each, pair_cost = (tiles + facts.ctas - 1) // facts.ctas, zero
    if pairs > 1 and each > 1:
        spare = each * facts.ctas - tiles
        for cost in cutlass.range_constexpr(1, PAIR_COST + 1):  # a division would take longer
            if cost * pairs <= spare:
                pair_cost = cutlass.Int32(cost)
        so_far = with_keys & (-1 - (-2 << cute.arch.lane_idx()))  # of lanes up to this one
        end += cute.arch.popc(so_far) * facts.row_tiles * pair_cost
    return List(own, end, pair_cost, tiles + pairs * pair_cost)


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
def taker_of(places, cta, facts: cutlass.Constexpr):
    """CTAs that take the same tiles: one, or two; the number of those that this CTA is one of; which half of the values it has
    of two.  places: the list's length."""
    takers = cutlass.Int32(1)
    if cutlass.const_expr(facts.halved):  # noqa: SIM102 (decided when it is built, the next on the device)
        if 2 * places <= facts.ctas:
            takers = cutlass.Int32(2)
    return takers, cta >> (takers - 1), cta & (takers - 1)


@cute.jit
def _locate(requests, place, listed: List, facts: cutlass.Constexpr):
    """The request that a place of the list belongs to, its start in the list, and its key tiles."""
    request, start, tiles = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
    own, ends = listed.own, listed.end
    for first in cutlass.range(0, requests.batch, WARP, unroll=1):
        if first > 0:
            own, ends = _scan(requests, first, cute.arch.shuffle_sync(ends, WARP - 1), listed.pair_cost, facts)
        starts = ends - _places_of(own, listed.pair_cost, facts)
        found = cute.arch.vote_ballot_sync(starts <= place and place < ends)
        if found != 0:
            at = cute.arch.popc(found - 1)
            request = first + at
            start = cute.arch.shuffle_sync(starts, at)
            tiles = cute.arch.shuffle_sync(own, at)
    return request, start, tiles


@cute.jit
def share_of(requests, listed: List, taker, facts: cutlass.Constexpr):
    """First place and end of a taker's share of the list.  It does not end among the places that a pair has in front of its
    tiles: then it ends before them, and is empty where it also began there."""
    begin, end = share(listed.places, taker, facts), share(listed.places, taker + 1, facts)
    if cutlass.const_expr(facts.one_pair):
        return begin, end
    if listed.pair_cost > 0 and end < listed.places:
        _, start, tiles = _locate(requests, end, listed, facts)
        inside = (end - start) % (tiles + listed.pair_cost)
        if inside <= listed.pair_cost:
            end -= inside
    return begin, end


@cute.jit
def next_pair(requests, place, last, listed: List, facts: cutlass.Constexpr):
    """What a CTA whose part of the list goes on from `place` to `last` takes next."""
    if cutlass.const_expr(facts.one_pair):
        zero = cutlass.Int32(0)
        first, end = _range(requests, zero)
        return Pair(zero, zero, first, end, place, last - place, last - place)
    request, start, tiles = _locate(requests, place, listed, facts)
    first, end = _range(requests, request)
    length = tiles + listed.pair_cost
    row_tile, inside = (place - start) // length, (place - start) % length
    places = cutlass.min(length - inside, last - place)
    begin = cutlass.max(inside - listed.pair_cost, cutlass.Int32(0))
    return Pair(request, row_tile, first, end, begin, inside + places - listed.pair_cost - begin, places)


@cute.jit
def entry_of(requests, request, facts: cutlass.Constexpr):
    """A request's entry in the list."""
    listed, start, tiles = list_of(requests, facts), cutlass.Int32(0), cutlass.Int32(0)
    if cutlass.const_expr(facts.one_pair):
        return Entry(start, listed.own, listed.pair_cost, listed.places)
    own, ends = listed.own, listed.end
    for first in cutlass.range(0, requests.batch, WARP, unroll=1):
        if first > 0:
            own, ends = _scan(requests, first, cute.arch.shuffle_sync(ends, WARP - 1), listed.pair_cost, facts)
        if first <= request and request < first + WARP:
            tiles = cute.arch.shuffle_sync(own, request - first)
            start = cute.arch.shuffle_sync(ends, request - first) - _places_of(tiles, listed.pair_cost, facts)
    return Entry(start, tiles, listed.pair_cost, listed.places)


@cute.jit
def share(places, taker, facts: cutlass.Constexpr):
    """First place of a taker's share of the list."""
    return taker * (places // facts.ctas) + cutlass.min(taker, places % facts.ctas)


@cute.jit
def owner_of(places, place, facts: cutlass.Constexpr):
    """The taker whose share holds this place: the inverse of `share`."""
    each, more = places // facts.ctas, places % facts.ctas
    long = more * (each + 1)
    owner = place // (each + 1)
    if place >= long:
        owner = more + (place - long) // cutlass.max(each, cutlass.Int32(1))
    return owner


@cute.jit
def parts_of(request, row_tile, entry: Entry, facts: cutlass.Constexpr):
    """First part of a (request, tile of query rows) pair, and how many."""
    end = entry.start + (row_tile + 1) * (entry.tiles + entry.pair_cost)
    first = owner_of(entry.places, end - entry.tiles, facts)
    count = owner_of(entry.places, end - 1, facts) - first + 1 if entry.tiles > 0 else cutlass.Int32(0)
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
