"""What the CTAs of `between_attentions` agree on: the products, who multiplies which part of a weight, and who finishes a tile.

A weight [N, K] is cut into tiles of 64 rows, and a tile into boxes of 64 x 128 values.  The boxes of a product form one list,
tile after tile, of which each CTA takes an equal part; what it has of a tile goes to a workspace, and one CTA finishes it.

The first product is cut otherwise, into pieces of two boxes: each CTA has one, and takes more of them as long as it has room
and some are left.  An early launch (`Facts.early`) has CTAs that come when the kernel before it ends; the others have the
product's weights by then.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch

ELEMENTS = {torch.bfloat16: cutlass.BFloat16}
ROWS, DEPTH = 64, 128  # of a box
LINE = 32  # int32 from one counter to the next: in one line of L2 they would delay one another
PIECE = 2  # boxes of the first product that a CTA takes at once
LANES = (8, 16, 32)  # classes of row counts
SHARED_BYTES = 227 << 10  # of a CTA that has a multiprocessor for itself


@dataclass(frozen=True, slots=True)
class Product:
    """One weight, or two where it is gated: then a tile holds 32 rows of each.

    tiles; boxes: of a tile; ctas: that share boxes and tiles, each with one box or more; of the first product only the tiles.
    normed: x is RMSNormed, which the product before has prepared.
    """

    name: str
    tiles: int
    boxes: int
    ctas: int
    normed: bool = False
    gated: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """What a build is specialised for.

    lanes: rows of x, one of `LANES`; values: o_proj's inner dimension; queries: q_b_proj's outer one; following: whether the
    next layer's latents and queries are made; ctas: one for each multiprocessor; early: the launch begins beside the kernel
    before it, each CTA when there is room, else when there is room for all of them.
    """

    dtype: torch.dtype
    lanes: int
    hidden: int
    values: int
    intermediate: int
    q_rank: int
    latent: int
    queries: int
    following: bool
    ctas: int
    early: bool = False

    @property
    def products(self) -> tuple[Product, ...]:
        def product(name: str, rows: int, depth: int, **kind) -> Product:
            tiles, boxes = rows // ROWS, depth // DEPTH
            return Product(name, tiles, boxes, min(self.ctas, tiles * boxes), **kind)

        own = (
            product("o", self.hidden, self.values),
            product("gate_up", 2 * self.intermediate, self.hidden, normed=True, gated=True),
            product("down", self.hidden, self.intermediate),
        )
        next_layers = (
            product("qkv_a", self.q_rank + self.latent, self.hidden, normed=True),
            product("q_b", self.queries, self.q_rank, normed=True),
        )
        return own + next_layers if self.following else own

    @property
    def tile_pieces(self) -> int:
        """Pieces of a tile of the first product."""
        return -(-self.products[0].boxes // PIECE)

    @property
    def first_pieces(self) -> int:
        """Pieces of the first product."""
        return self.products[0].tiles * self.tile_pieces

    @property
    def asks(self) -> int:
        """How often the CTAs of a launch ask for a piece: for each that is nobody's own, and each CTA once in vain."""
        return max(self.first_pieces, self.ctas)

    @property
    def parts(self) -> tuple[int, ...]:
        """The most parts of a tile, by product."""
        return (
            self.tile_pieces,
            *(
                max(owner((tile + 1) * p.boxes - 1, p) - owner(tile * p.boxes, p) + 1 for tile in range(p.tiles))
                for p in self.products[1:]
            ),
        )

    @property
    def squares(self) -> int:
        """Tiles whose sums of squares a product leaves for the next, at most."""
        return max(self.hidden, self.q_rank) // ROWS

    @property
    def num_squares(self) -> int:
        return len(self.products) * self.squares * self.lanes

    @property
    def stages(self) -> int:
        """Boxes that are under way in a CTA, with the rows of x that meet them."""
        return (SHARED_BYTES - (4 << 10)) // (2 * DEPTH * (ROWS + self.lanes))

    @property
    def asked_at(self) -> int:
        """Place of the counter of pieces asked for, behind those of finished tiles."""
        return LINE * len(self.products)

    @property
    def launches_at(self) -> int:
        """Place of the counter of launches, the last one."""
        return self.asked_at + LINE

    @property
    def num_counters(self) -> int:
        return self.launches_at + 1

    @property
    def num_parts(self) -> int:
        """Words of the workspace: products take turns with it."""
        most = max(p.tiles * parts for p, parts in zip(self.products, self.parts, strict=True))
        return most * ROWS * self.lanes


def piece_boxes(piece, facts: Facts):
    """The tile of a piece of the first product; the first of its boxes in the tile, and the end.  Here and below: ints, or the
    DSL's integers."""
    first = piece % facts.tile_pieces * PIECE
    return piece // facts.tile_pieces, first, cutlass.min(first + PIECE, facts.products[0].boxes)


def share(cta, length: int, product: Product):
    """Where a CTA's part of a list of a product's boxes or tiles begins, and where it ends; both at the list's end for a CTA
    that has none."""
    first, last = cta * length // product.ctas, (cta + 1) * length // product.ctas
    return cutlass.min(first, length), cutlass.min(last, length)


def owner(at, product: Product):
    """The CTA whose part of a product's boxes holds this one: the inverse of `share`."""
    return ((at + 1) * product.ctas - 1) // (product.tiles * product.boxes)


def tag(launch, index: int, facts: Facts):
    """What marks the parts of a product, of all that lie in a workspace; launch: counts from 1 in each of the two forms.

    int32, so that a form's tags return after 2**28 launches: a word that was left alone just as long would pass for a new one.
    """
    return launch * 16 + 8 * facts.following + index


class Weights(NamedTuple):
    """[N, K], of norms [K], contiguous.  input_norm, qkv_a, q_a_norm and q_b are the next layer's."""

    o: cute.Pointer
    post_norm: cute.Pointer
    gate: cute.Pointer
    up: cute.Pointer
    down: cute.Pointer
    input_norm: cute.Pointer
    qkv_a: cute.Pointer
    q_a_norm: cute.Pointer
    q_b: cute.Pointer


class Rows(NamedTuple):
    """Contiguous rows.  values, residual: inputs; h, gated, hidden, qkv_a, queries: results; the others: rows times the weight
    of the norm that follows, which only this launch reads."""

    values: cute.Pointer  # [M, values]
    residual: cute.Pointer  # [M, hidden]
    h: cute.Pointer  # [M, hidden]
    scaled_h: cute.Pointer  # [M, hidden]
    gated: cute.Pointer  # [M, intermediate]
    hidden: cute.Pointer  # [M, hidden]
    scaled_hidden: cute.Pointer  # [M, hidden]
    qkv_a: cute.Pointer  # [M, q_rank + latent]
    scaled_q_a: cute.Pointer  # [M, q_rank]
    queries: cute.Pointer  # [M, queries]


class Eps(NamedTuple):
    """Of the norms in front of the MLP, of the next layer's attention and of its queries."""

    mlp: cutlass.Float32
    attention: cutlass.Float32
    q_a: cutlass.Float32


class Workspace(NamedTuple):
    """parts: int64 [tile, part, vector, thread, 4], in the order of the multiplying threads' registers: in each word a float32
    and, above it, the tag of launch and product.  squares: float32 [product, tile, lane].  counters: int32, of finished tiles
    by product; of pieces asked for, 0 between launches; of launches.  The others only grow, and wrap around.
    `LINE` apart."""

    parts: cute.Pointer
    squares: cute.Pointer
    counters: cute.Pointer
