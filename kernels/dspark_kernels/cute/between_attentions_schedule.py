"""What the CTAs of `between_attentions` agree on: the products, their tiles, and who makes which.

A weight [N, K] is cut into tiles of 16, 32 or 64 rows over its whole depth, and a tile into boxes of 16 KB.  A CTA makes its
tiles from their first box to what is stored, so what CTAs tell one another are finished rows only.  Of the heads' key matrices,
[K, C] each, a tile is 64 columns, and one box.

The tiles of the products belong to CTAs in turn, all products behind one another.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch

from dspark_kernels.cute.block_attention_facts import Facts as AttentionFacts
from dspark_kernels.cute.block_attention_fetch import SWIZZLE

ELEMENTS = {torch.bfloat16: cutlass.BFloat16}
BOX = 8192  # values of a box
X_COLUMNS = (512, 256, 128)  # of x that are fetched at once; a stage has room for the first
LANES = (8, 16, 32)  # classes of row counts
WARPS = 8  # that multiply: each has 16 rows and 64 columns of a box
LINE = 32  # int32 from one counter to the next: in one line of L2 they would delay one another
SHARED_BYTES = 227 << 10  # of a CTA that has a multiprocessor for itself
X_VALUES = 1 << 15  # of all stages of x, at most
X_STAGES = 4  # at most: a block decode with 2K took 274 us so, 278 with 3, 277 with 6
HELD = 8  # boxes of a tile that wait in registers: a block decode with 2K takes 251 us so, 255 without
SUM_ROW = 18  # floats from one row of x to the next in the sums of a warp: 16 features, and room against bank conflicts
NOPE = BOX // SWIZZLE  # values of a head's query that meet its key matrix: their matrix for 64 latents is a box


@dataclass(frozen=True, slots=True)
class Product:
    """One weight, or two where it is gated: then a tile holds as many rows of each.

    rows: of a tile, of both weights together; depth: columns of the weight; x_columns: fetched at once.
    normed: x is RMSNormed, which the product before has prepared.  by_head: the weight is the heads' key matrices, and a tile's
    x the columns of its head.
    """

    name: str
    tiles: int
    rows: int
    depth: int
    normed: bool = False
    gated: bool = False
    by_head: bool = False

    @property
    def columns(self) -> int:
        """Of a box."""
        return BOX // self.rows

    @property
    def boxes(self) -> int:
        return self.depth // self.columns

    @property
    def x_columns(self) -> int:
        return next(columns for columns in X_COLUMNS if self.depth % columns == 0)

    @property
    def x_boxes(self) -> int:
        """Boxes of the weight that meet the columns of x that are fetched at once."""
        return self.x_columns // self.columns

    @property
    def x_fetches(self) -> int:
        """How often columns of x are fetched for a tile."""
        return self.depth // self.x_columns

    @property
    def groups(self) -> int:
        """Of 16 rows of a tile."""
        return self.rows // 16

    @property
    def features(self) -> int:
        """Columns of the result that a tile makes."""
        return self.rows // 2 if self.gated else self.rows


def tile_rows(count: int, depth: int, ctas: int, *, gated: bool) -> int:
    """Rows of a tile of a weight [count, depth]: so that the CTA with the most has the fewest, and then as many as can be,
    since each tile takes all of x.  16 rows are of one weight."""
    sizes = (64, 32) if gated else (64, 32, 16)
    fitting = [rows for rows in sizes if depth % (BOX // rows) == 0]
    return min(fitting, key=lambda rows: -(-(count // rows) // ctas) * rows)


BEFORE = {"gate_up": "o", "down": "gate_up", "qkv_a": "down", "q_b": "qkv_a", "absorb": "q_b"}  # whose result is x
MADE = -1
BLOCK = Product("", 0, 64, 0)  # columns of given rows that are prepared together, as if they were a tile's result


@dataclass(frozen=True, slots=True)
class Facts:
    """What a build is specialised for.

    lanes: rows of x, one of `LANES`; values: o_proj's inner dimension; queries: q_b_proj's outer one; following: whether the
    next layer's latents and queries are made; ctas: all of them resident; early: the launch begins beside the kernel before
    it, and the next attention may begin beside it; attention: of the kernel before it,
    whose parts are merged first; None: the first product's x is given; behind: whether the products behind an attention are
    made, else only those in front of the next layer's, of the rows in `Rows.residual`; heads: of queries, which become queries
    over latents; 0: they stay as they are; stored: whether the latents go to the pool; context: of how many layers the products
    of context rows with their latent projections are made too, as one product, or alone if nothing follows; then they stay as
    they are, else they go to the pool.  It comes while others wait for what is in front of them.
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
    attention: AttentionFacts | None = None
    behind: bool = True
    heads: int = 0
    stored: bool = False
    context: int = 0

    @property
    def products(self) -> tuple[Product, ...]:
        def product(name: str, count: int, depth: int, **kind) -> Product:
            rows = tile_rows(count, depth, self.ctas, gated=kind.get("gated", False))
            return Product(name, count // rows, rows, depth, **kind)

        own = (
            product("o", self.hidden, self.values),
            product("gate_up", 2 * self.intermediate, self.hidden, normed=True, gated=True),
            product("down", self.hidden, self.intermediate),
        )
        next_layers = (
            product("qkv_a", self.q_rank + self.latent, self.hidden, normed=True),
            product("q_b", self.queries, self.q_rank, normed=True),
        )
        absorb = (Product("absorb", self.heads * self.slices, SWIZZLE, NOPE, by_head=True),) if self.heads else ()
        if self.behind:
            return (*own, *next_layers, *absorb) if self.following else own
        context = (product("context", self.context * self.latent, self.hidden),) if self.context else ()
        return (*next_layers, *context, *absorb) if self.following else context

    def place(self, name: str) -> int:
        """Of a product among the build's."""
        return [product.name for product in self.products].index(name)

    def awaited(self, index: int) -> int | None:
        """The product whose tiles have to be finished before one's x is there; `MADE`: that is once all CTAs have made what
        they make of what is given; None: x is given."""
        name = self.products[index].name
        if name == "context" or (name == "o" and self.attention is None):
            return None
        return MADE if name == "o" or (name == "qkv_a" and not self.behind) else self.place(BEFORE[name])

    @property
    def rotary(self) -> int:
        """Values of a head's query, and of a latent row, that are turned."""
        return self.queries // self.heads - NOPE

    @property
    def slices(self) -> int:
        """Tiles of a head's key matrix."""
        return (self.latent - self.rotary) // SWIZZLE

    @property
    def held(self) -> int:
        """Boxes of a CTA's tile of the first product that wait in registers for their x, if no CTA has two tiles."""
        first = self.products[0]
        return min(HELD, first.boxes) if first.tiles <= self.ctas else 0

    @property
    def squares(self) -> int:
        """Tiles whose sums of squares a product leaves for the next, at most."""
        return max(self.hidden, self.q_rank) // 16

    @property
    def num_squares(self) -> int:
        return len(self.products) * self.squares * self.lanes

    @property
    def prepared_at(self) -> int:
        """Where the squares of given rows lie, among those of tiles: the last product leaves none."""
        return (len(self.products) - 1) * self.squares

    @property
    def x_values(self) -> int:
        """Of a stage of x."""
        return self.lanes * X_COLUMNS[0]

    @property
    def x_stages(self) -> int:
        return min(X_STAGES, X_VALUES // self.x_values)

    @property
    def x_bytes(self) -> int:
        """Of all stages of x."""
        return 2 * self.x_stages * self.x_values

    @property
    def small_bytes(self) -> int:
        """Of shared memory that is neither boxes nor x: sums, and 4 KB for what is smaller."""
        return 4 * WARPS * self.lanes * SUM_ROW + (4 << 10)

    @property
    def stages(self) -> int:
        """Boxes that a CTA has room for."""
        return (SHARED_BYTES - self.small_bytes - self.x_bytes) // (2 * BOX)

    @property
    def made_at(self) -> int:
        """Place of the counter of CTAs that have made what they make of the first product's x, behind those of finished
        tiles."""
        return LINE * len(self.products)

    @property
    def launches_at(self) -> int:
        """Place of the counter of launches, the last one."""
        return self.made_at + LINE

    @property
    def num_counters(self) -> int:
        return self.launches_at + 1


def first_tile(cta, index: int, facts: Facts):
    """The first tile of a CTA, of a product; the next ones follow facts.ctas apart.  Past the last for a CTA that
    has none: it is among the first of the next product then.  Here and below: ints, or the DSL's integers."""
    before = sum(product.tiles for product in facts.products[:index])
    return (cta + -before % facts.ctas) % facts.ctas


def tiles_of(cta, index: int, facts: Facts):
    """How many tiles of a product a CTA has."""
    return (facts.products[index].tiles - first_tile(cta, index, facts) + facts.ctas - 1) // facts.ctas


class Weights(NamedTuple):
    """[N, K], of norms [K], contiguous.  From input_norm on they are the next layer's."""

    o: cute.Pointer
    post_norm: cute.Pointer
    gate: cute.Pointer
    up: cute.Pointer
    down: cute.Pointer
    input_norm: cute.Pointer
    qkv_a: cute.Pointer
    q_a_norm: cute.Pointer
    q_b: cute.Pointer
    latent_norm: cute.Pointer
    context: cute.Pointer  # [layers * latent, hidden]


class Rows(NamedTuple):
    """Contiguous rows.  values, residual: inputs; h, gated, hidden, qkv_a, queries, absorbed: results; the others: rows times
    the weight of the norm that follows, which only this launch reads."""

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
    absorbed: cute.Pointer  # [M, heads, latent]
    context: cute.Pointer  # [M', hidden], given
    context_kv: cute.Pointer  # [M', layers * latent]


class Into(NamedTuple):
    """How queries and latents become what the next attention takes.  keys: [heads, NOPE, C], rows side by side; cos_sin:
    float32 [M, r], r / 2 cosines, r / 2 sines; pool: [pages, page_size, latent]; pages, offsets: int64 [M], owned: uint8 [M];
    strides in values."""

    keys: cute.Pointer
    keys_stride: cutlass.Int64
    cos_sin: cute.Pointer
    pool: cute.Pointer
    page_stride: cutlass.Int64
    row_stride: cutlass.Int64
    pages: cute.Pointer
    offsets: cute.Pointer
    owned: cute.Pointer


class Context(NamedTuple):
    """Where the latents of context rows go.  rows: M'; norms: [layers, C]; the others as in `Into`, of M' rows and of layer 0;
    layer_stride: from a layer's pool to the next."""

    rows: cutlass.Int32
    norms: cute.Pointer
    cos_sin: cute.Pointer
    pool: cute.Pointer
    layer_stride: cutlass.Int64
    page_stride: cutlass.Int64
    row_stride: cutlass.Int64
    pages: cute.Pointer
    offsets: cute.Pointer
    owned: cute.Pointer


class Eps(NamedTuple):
    """Of the norms in front of the MLP, of the next layer's attention, of its queries and latents, and of the context's
    latents."""

    mlp: cutlass.Float32
    attention: cutlass.Float32
    q_a: cutlass.Float32
    latent: cutlass.Float32
    context: cutlass.Float32


class Workspace(NamedTuple):
    """words: int64 [unit, column, row], each a float32 and above it the tag of the launch.  squares: float32 [product,
    tile, lane].  counters: int32, of finished tiles by product; of CTAs that have made x; of launches; they only grow, and wrap
    around.  `LINE` apart."""

    words: cute.Pointer
    squares: cute.Pointer
    counters: cute.Pointer
