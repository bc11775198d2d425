"""What a build of the block attention is specialised for."""

from dataclasses import dataclass
from math import gcd

import torch

from dspark_kernels.cute.block_attention_fetch import SWIZZLE
from dspark_kernels.cute.block_attention_schedule import CHUNK, CONSUMERS, KEYS, SLICE, TILE

HEAD_WARPS = 16  # of a CTA that merges many, and multiplies
QUADS = 8  # of a CTA that merges many: for each, rows of half a tile


@dataclass(frozen=True, slots=True)
class Facts:
    """What a build is specialised for.

    dtype: of queries, latents and out; latent: values of a value row; width: values of a key row; rows: of the block; heads;
    page_size; causal; ctas: that share the list of tiles.
    slotted: requests name their rows of the page table.
    fetch_queries: query tiles come by TMA, for which the rows of a request must have one stride; else threads load them.
    value_width: columns of the heads' matrices that the merge multiplies by; 0: none, the latents are the result.
    group_rows: block rows of a head that are merged together where the merge multiplies, by a cluster, a CTA or as a unit of
    `between_attentions`: 4 or 8; the bits are the same.
    many: the merge is the one for many requests or rows, by warps that have all parts themselves; the bits are the same.
    spread: of these CTAs there are no more than processors, which take one each; the bits are the same.
    value_chunks: the values of a matrix's column lie side by side and are read 16 bytes at once; else one by one.
    two_tiles: asks for the schedule with two key tiles in flight, or for the one without; None: as `seesaw` chooses.
    merging_warps: of a CTA that merges, if not many; None: one for each of `merge_warps`, whose sums they make.
    merged: the launch merges; else another one does.
    early: the launch fetches keys before the kernel before it has ended, which makes the queries, the latents of the block and
    at most so many before them, late_rows.
    halves: where there are at least two CTAs for each tile, two of them take it, each for half of the values, as far as
    `halved` allows; the bits are the same.
    one_request: the batch has no other; the bits are the same.
    """

    dtype: torch.dtype
    latent: int
    width: int
    rows: int
    heads: int
    page_size: int
    causal: bool
    ctas: int
    slotted: bool = False
    fetch_queries: bool = True
    value_width: int = 0
    group_rows: int = 8
    many: bool = False
    spread: bool = False
    value_chunks: bool = True
    two_tiles: bool | None = None
    merging_warps: int | None = None
    merged: bool = True
    early: bool = False
    late_rows: int = 0
    halves: bool = True
    one_request: bool = False

    def __post_init__(self) -> None:
        if self.two_tiles and self.width == self.latent:
            raise ValueError(
                f"two key tiles in flight need key columns without a value, and key rows of {self.width} have none behind "
                f"{self.latent} latents; leave two_tiles out"
            )
        if self.many and (self.group_rows, self.merging_warps) != (8, None):
            raise ValueError(
                f"many merges 8 rows by {self.warps} warps, not {self.group_rows} by {self.merging_warps}; leave it out"
            )
        if self.merge_warps % self.weighing_warps:
            raise ValueError(f"{self.warps} warps cannot make the sums of {self.merge_warps}: blocks of {self.queries} queries")

    @property
    def queries(self) -> int:
        return self.rows * self.heads

    @property
    def row_tiles(self) -> int:
        return -(-self.queries // TILE)

    @property
    def one_pair(self) -> bool:
        """No two (request, tile of query rows) pairs share the CTAs."""
        return self.one_request and self.row_tiles == 1

    @property
    def seesaw(self) -> bool:
        """Two key tiles are in flight (`block_attention_seesaw`).  Not by lengths: the bits of the two schedules differ.

        With more than one tile of query rows the products are the bound, not the keys' way from the memory.  The weights lie
        where key columns without a value were.
        """
        return self.width > self.latent and (self.row_tiles > 1 if self.two_tiles is None else self.two_tiles)

    @property
    def halved(self) -> bool:
        """A short list's tiles may have two takers: each warpgroup then has whole swizzled blocks of the values."""
        return self.halves and not self.seesaw and self.latent % (4 * SWIZZLE) == 0

    @property
    def box(self) -> int:
        """Rows that one TMA box takes: they lie in one page and in one tile."""
        return gcd(self.page_size, KEYS)

    @property
    def span(self) -> int:
        """Rows that lie one behind the other in a column block of a key tile.  What a product takes of the keys is inside one
        span: half a tile, or a tile where two are in flight."""
        return self.box if self.box >= KEYS // 2 and not self.seesaw else KEYS

    @property
    def blocks(self) -> int:
        """Of 64 columns of a key row; a TMA box has one."""
        return self.width // SWIZZLE

    @property
    def vectors(self) -> int:
        """Of 16 bytes, of a thread, for one part."""
        return TILE * self.latent // CONSUMERS // CHUNK

    @property
    def merge_warps(self) -> int:
        """Each takes every so manyeth part.  Not by the batch: the bits of a request must not hang on its neighbours."""
        return 16 if self.row_tiles < 4 else 4

    @property
    def most_parts(self) -> int:
        """Of a pair: with k tiles a CTA or one more, all pairs of a request have not more than (k + 1) * ctas of them."""
        return min(self.ctas, 2 * self.ctas // self.row_tiles + 2)

    @property
    def merge_turns(self) -> int:
        """How many of `merge_warps` a merging warp stands for, one after the other."""
        return self.merge_warps // self.weighing_warps

    @property
    def weighing_warps(self) -> int:
        """The first of a merging CTA, which turn statistics into weights."""
        return self.merging_warps or self.merge_warps

    @property
    def warps(self) -> int:
        """Warps of a CTA that merges."""
        if not self.many:
            return self.weighing_warps
        return HEAD_WARPS if self.value_width else QUADS

    @property
    def slices(self) -> int:
        """Of the latents, where the merge multiplies: CTAs of a cluster take one each."""
        return self.latent // SLICE

    @property
    def paired(self) -> bool:
        """Two neighbouring block rows of a head are eight query rows apart, so every vector of theirs belongs to both."""
        return self.heads == 8

    @property
    def slot_rows(self) -> int:
        return 2 if self.paired else 1

    @property
    def slots(self) -> int:
        """Places of a group's rows in a part: each a row, or a pair of rows."""
        rows = min(self.rows, self.group_rows)
        return -(-rows // self.slot_rows)

    @property
    def slot_values(self) -> int:
        """Of a vector, that belong to the rows of a slot."""
        return CHUNK // 2 * self.slot_rows

    @property
    def slot_turns(self) -> int:
        """A warp reads two slots at once."""
        return -(-self.slots // 2)

    @property
    def turn_parts(self) -> int:
        """Parts in flight of a warp's turn: of the registers that it may have, 36 for vectors."""
        return min(9, 9 * CHUNK // self.slot_values // self.slot_turns)

    @property
    def value_tiles(self) -> int:
        """Of 8 columns."""
        return self.value_width // CHUNK

    @property
    def warp_tiles(self) -> int:
        """Of 8 columns, of a warp that multiplies."""
        return -(-self.value_tiles // self.warps)

    @property
    def fetched_values(self) -> int:
        """Places in shared memory for 64 latents of a head's matrix."""
        return self.warp_tiles * self.warps * CHUNK * SLICE

    @property
    def owned_tiles(self) -> int:
        """Of which one CTA of a cluster adds up the products."""
        return -(-self.value_tiles // self.slices)
