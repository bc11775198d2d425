"""Products of a tile in `between_attentions`: a warp has 16 of its rows, and 64 columns of each box.

`facts` is a `Facts` of `between_attentions_schedule`, `product` one of its products.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from dspark_kernels.cute.between_attentions_meet import Shared, pass_on
from dspark_kernels.cute.between_attentions_schedule import BOX, ELEMENTS, SUM_ROW
from dspark_kernels.cute.block_attention_fetch import SWIZZLE

MULTIPLY = "mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
UNROLL = 2  # boxes: a block decode takes 270 us so, 274 with one
KINDS = {cutlass.BFloat16: "bf16"}


class Places(NamedTuple):
    """A lane's, in values: of its row in its warp's part of a box of weights, and of x, behind a stage's first; the part of its
    first chunk's number that the swizzle turns, and that which says which chunk."""

    weights: cutlass.Int32
    x: cutlass.Int32
    swizzle: cutlass.Int32
    weights_chunk: cutlass.Int32
    x_chunk: cutlass.Int32


@cute.jit
def _places_of(product: cutlass.Constexpr, facts: cutlass.Constexpr):
    """Of this lane.  `ldmatrix` takes four blocks of 8 x 8 values, and a row's address of each from eight lanes."""
    warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
    group, block = warp % product.groups, warp // product.groups
    if cutlass.const_expr(product.gated):
        sides = product.groups // 2  # groups of one weight, whose half of a box is a block of its own
        at = group // sides * (BOX // 2) + block * sides * 16 * 64 + group % sides * 16 * 64
    else:
        at = block * product.rows * 64 + group * 16 * 64
    weights = at + (lane // 8 % 2 * 8 + lane % 8) * 64
    if cutlass.const_expr(product.by_head):  # rows of a box are values of a query, and `ldmatrix` turns the blocks
        weights = (block * 64 + lane // 16 * 8 + lane % 8) * SWIZZLE + ((2 * group + lane // 8 % 2) ^ (lane % 8)) * 8
    x = block * facts.lanes * 64 + lane % 8 * 64
    return Places(weights, x, lane % 8, lane // 16, lane // 8)


@cute.jit
def _load_matrices(pointer, turned: cutlass.Constexpr = ""):
    """Four blocks of 8 x 8 values: of each a lane has two of a row, or of a column if turned is ".trans"."""
    return cute.arch.inline_ptx(
        f"ldmatrix.sync.aligned.m8n8.x4{turned}.shared.b16" + " {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[cutlass.Int32] * 4,
        read_only_args=[pointer],
    )


@cute.jit
def multiply(sums, weights, left, right, facts: cutlass.Constexpr):
    """sums += 16 rows of weights times 8 of x, over 16 columns."""
    name = MULTIPLY.format(kind=KINDS[ELEMENTS[facts.dtype]])
    sums[0], sums[1], sums[2], sums[3] = cute.arch.inline_ptx(
        name + " {{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[cutlass.Float32] * 4,
        read_only_args=[*weights, left, right, sums[0], sums[1], sums[2], sums[3]],
    )


@cute.jit
def _load_box(shared: Shared, at: Places, done, product: cutlass.Constexpr, facts: cutlass.Constexpr):
    """A warp's part of a box, once that is there, as four pieces of 16 columns of the product; done: boxes before it."""
    stage = done % facts.stages
    cute.arch.mbarrier_wait(shared.landed + stage, done // facts.stages % 2)
    own = shared.weights.iterator + (stage * BOX + at.weights)
    if cutlass.const_expr(product.by_head):
        return [_load_matrices(own + piece * 16 * SWIZZLE, ".trans") for piece in range(4)]
    return [_load_matrices(own + ((piece * 2 + at.weights_chunk) ^ at.swizzle) * 8) for piece in range(4)]


@cute.jit
def _multiply_box(sums, pieces, shared: Shared, at: Places, x_done, box, product: cutlass.Constexpr, facts: cutlass.Constexpr):
    """A box of a tile, once its x is there; pieces: the warp's part of it; x_done: stages of x before the tile."""
    vectors, x_at, part = facts.lanes // 8, x_done + box // product.x_boxes, box % product.x_boxes
    x_stage = x_at % facts.x_stages
    cute.arch.mbarrier_wait(shared.met + x_stage, x_at // facts.x_stages % 2)
    own = shared.x.iterator + (x_stage * facts.x_values + part * product.columns * facts.lanes + at.x)
    for pair in cutlass.range_constexpr(2):
        chunk = (pair * 4 + at.x_chunk) ^ at.swizzle
        rows = [_load_matrices(own + (v * 8 * 64 + chunk * 8)) for v in range(vectors)]
        for half in cutlass.range_constexpr(2):
            for v in cutlass.range_constexpr(vectors):
                multiply(sums[v], pieces[2 * pair + half], rows[v][2 * half], rows[v][2 * half + 1], facts)


@cute.jit
def _give_back(shared: Shared, done, x_done, box, product: cutlass.Constexpr, facts: cutlass.Constexpr):
    """The x of a box, if that was the last that it meets; and the stage of a box in shared memory."""
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        if cutlass.const_expr(done is not None):
            cute.arch.mbarrier_arrive(shared.empty + done % facts.stages)
        if box % product.x_boxes == product.x_boxes - 1:
            cute.arch.mbarrier_arrive(shared.x_empty + (x_done + box // product.x_boxes) % facts.x_stages)


@cute.jit
def hold(shared: Shared, done, facts: cutlass.Constexpr):
    """The first boxes of this CTA's tile of the first product, in registers: so others have room while these wait for their x.

    As many as `Facts.held` says; what that is of a CTA without a tile is not set.  done: boxes before the tile.
    """
    cta, _, _ = cute.arch.block_idx()
    held = cute.make_rmem_tensor(max(1, facts.held) * 16, cutlass.Int32)
    if cta < facts.products[0].tiles:
        at = _places_of(facts.products[0], facts)
        for box in cutlass.range_constexpr(facts.held):
            pieces = _load_box(shared, at, done + box, facts.products[0], facts)
            for i in cutlass.range_constexpr(16):
                held[box * 16 + i] = pieces[i // 4][i % 4]
            pass_on(shared.empty + (done + box) % facts.stages)
    return held


@cute.jit
def multiply_tile(shared: Shared, held, done, x_done, product: cutlass.Constexpr, facts: cutlass.Constexpr):
    """A tile's products into shared memory, of each warp its own; held: its first boxes, of `hold`, or None; done, x_done:
    boxes and stages of x before the tile."""
    at, first = _places_of(product, facts), facts.held if held is not None else 0
    sums = [cute.make_rmem_tensor(4, cutlass.Float32) for _ in range(facts.lanes // 8)]
    for total in sums:
        total.fill(0.0)
    for box in cutlass.range_constexpr(first):
        own = [[held[box * 16 + piece * 4 + i] for i in range(4)] for piece in range(4)]
        _multiply_box(sums, own, shared, at, x_done, box, product, facts)
        _give_back(shared, None, x_done, box, product, facts)
    for box in cutlass.range(first, product.boxes, unroll=UNROLL):
        _multiply_box(sums, _load_box(shared, at, done + box, product, facts), shared, at, x_done, box, product, facts)
        _give_back(shared, done + box, x_done, box, product, facts)
    _store_sums(shared, sums, facts)


@cute.jit
def _store_sums(shared: Shared, sums, facts: cutlass.Constexpr):
    """[warp, row of x, feature]: a lane has two rows of x and two features, eight apart."""
    warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
    for v in cutlass.range_constexpr(facts.lanes // 8):
        at = (warp * facts.lanes + 8 * v + lane % 4 * 2) * SUM_ROW + lane // 4
        for i in cutlass.range_constexpr(4):
            shared.sums[at + i % 2 * SUM_ROW + i // 2 * 8] = sums[v][i]


@cute.jit
def sum_of(shared: Shared, row, feature, product: cutlass.Constexpr, facts: cutlass.Constexpr):
    """Two neighbouring features of a tile in one row of x: the sums of the warps that have columns of them, in their order."""
    group, own = feature // 16, feature % 16
    left, right = cutlass.Float32(0.0), cutlass.Float32(0.0)
    for part in cutlass.range_constexpr(8 // product.groups):
        at = ((part * product.groups + group) * facts.lanes + row) * SUM_ROW + own
        if cutlass.const_expr(part == 0):
            left, right = shared.sums[at], shared.sums[at + 1]
        else:
            left += shared.sums[at]
            right += shared.sums[at + 1]
    return left, right
