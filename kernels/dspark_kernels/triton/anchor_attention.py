"""Attention of many draft blocks over one row of context, forward and backward, without stored scores.

A tile of queries is as many whole blocks as fit into 64 rows.  It reads the context from the first to the last token
that one of its blocks sees, so with anchors in ascending order most of the context is skipped; its own block rows are
one more product of 64 x 64.  Backward: one program a query tile makes the gradients of queries and block rows, one
program a tile of context rows makes those of the context.  Nothing is added atomically: results repeat bit by bit.

Counts for 16 rows, 9 heads, 256 anchors x 7 rows, 576 context rows, 96-wide keys padded to 128 and 64-wide values, with
40 % of the context read by a tile: 0.03 TFLOP forward and 0.11 backward, 0.2 and 0.4 GB of operands and results a layer.
"""

import torch
import triton
import triton.language as tl

QUERY_TILE = 64
KEY_TILE = 64


@triton.jit
def _rows(base, at, used, width, WIDTH: tl.constexpr):
    """Rows `at` of a contiguous [.., width] table, zeros where not used and behind `width`."""
    columns = tl.arange(0, WIDTH)
    where = at[:, None].to(tl.int64) * width + columns[None, :]
    return tl.load(base + where, mask=used[:, None] & (columns[None, :] < width), other=0.0)


@triton.jit
def _store_rows(base, at, used, width, values, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    where = at[:, None].to(tl.int64) * width + columns[None, :]
    tl.store(base + where, values.to(base.dtype.element_ty), mask=used[:, None] & (columns[None, :] < width))


@triton.jit
def _tile(first_ptr, last_ptr, row, tile, anchors, drafts, TILE: tl.constexpr):
    """Query rows of a tile: row numbers, whether they exist, their anchor, first and last context row that they see."""
    per_tile = TILE // drafts
    lanes = tl.arange(0, TILE)
    anchor = tile * per_tile + lanes // drafts
    used = (lanes < per_tile * drafts) & (anchor < anchors)
    first = tl.load(first_ptr + row * anchors + anchor, mask=used, other=1 << 30)
    last = tl.load(last_ptr + row * anchors + anchor, mask=used, other=-1)
    return tile * per_tile * drafts + lanes, used, anchor, first, last


@triton.jit
def _forward_kernel(
    q_ptr,  # [B, N, d], B = rows x heads
    k_ptr,  # [B, L, d]
    v_ptr,  # [B, L, e]
    k_block_ptr,  # [B, N, d]
    v_block_ptr,  # [B, N, e]
    first_ptr,  # [rows, anchors] int32
    last_ptr,  # [rows, anchors] int32
    out_ptr,  # [B, N, e]
    lse_ptr,  # [B, N] float32
    heads,
    anchors,
    drafts,
    length,
    width,
    value_width,
    scale,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
):
    batch = tl.program_id(1).to(tl.int64)
    queries = anchors * drafts
    at, used, anchor, first, last = _tile(first_ptr, last_ptr, batch // heads, tl.program_id(0), anchors, drafts, TILE)
    q = _rows(q_ptr + batch * queries * width, at, used, width, WIDTH)

    # The block's own rows come first, so that every row that exists has a finite maximum from here on.
    k = _rows(k_block_ptr + batch * queries * width, at, used, width, WIDTH)
    v = _rows(v_block_ptr + batch * queries * value_width, at, used, value_width, VALUE_WIDTH)
    seen = (anchor[:, None] == anchor[None, :]) & used[None, :]
    scores = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, -1e30)
    top = tl.max(scores, 1)
    p = tl.where(seen, tl.exp(scores - top[:, None]), 0.0)
    total = tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, input_precision="ieee")

    for start in range(tl.min(first, 0) // KEYS * KEYS, tl.max(last, 0) + 1, KEYS):
        keys = start + tl.arange(0, KEYS)
        k = _rows(k_ptr + batch * length * width, keys, keys < length, width, WIDTH)
        v = _rows(v_ptr + batch * length * value_width, keys, keys < length, value_width, VALUE_WIDTH)
        seen = (keys[None, :] >= first[:, None]) & (keys[None, :] <= last[:, None])
        scores = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, -1e30)
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp(top - new_top)
        p = tl.where(seen, tl.exp(scores - new_top[:, None]), 0.0)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        top = new_top
    total = tl.where(used, total, 1.0)
    _store_rows(out_ptr + batch * queries * value_width, at, used, value_width, acc / total[:, None], VALUE_WIDTH)
    tl.store(lse_ptr + batch * queries + at, top + tl.log(total), mask=used)


@triton.jit
def _score_gradients(q, k, v, grad_out, lse, delta, seen, scale):
    """Probabilities and gradients of the scaled scores of a tile, [queries, keys] float32."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    p = tl.where(seen, tl.exp(scores - lse[:, None]), 0.0)
    grad_p = tl.dot(grad_out, tl.trans(v), input_precision="ieee")
    return p, p * (grad_p - delta[:, None]) * scale


@triton.jit
def _query_gradient_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_block_ptr,
    v_block_ptr,
    first_ptr,
    last_ptr,
    grad_out_ptr,  # [B, N, e]
    lse_ptr,  # [B, N] float32
    delta_ptr,  # [B, N] float32, sum of out x grad_out
    grad_q_ptr,  # [B, N, d]
    grad_k_block_ptr,  # [B, N, d]
    grad_v_block_ptr,  # [B, N, e]
    heads,
    anchors,
    drafts,
    length,
    width,
    value_width,
    scale,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
):
    batch = tl.program_id(1).to(tl.int64)
    queries = anchors * drafts
    at, used, anchor, first, last = _tile(first_ptr, last_ptr, batch // heads, tl.program_id(0), anchors, drafts, TILE)
    narrow, wide = batch * queries * value_width, batch * queries * width
    q = _rows(q_ptr + wide, at, used, width, WIDTH)
    grad_out = _rows(grad_out_ptr + narrow, at, used, value_width, VALUE_WIDTH)
    lse = tl.load(lse_ptr + batch * queries + at, mask=used, other=0.0)
    delta = tl.load(delta_ptr + batch * queries + at, mask=used, other=0.0)

    k = _rows(k_block_ptr + wide, at, used, width, WIDTH)
    v = _rows(v_block_ptr + narrow, at, used, value_width, VALUE_WIDTH)
    seen = (anchor[:, None] == anchor[None, :]) & used[None, :] & used[:, None]
    p, grad_scores = _score_gradients(q, k, v, grad_out, lse, delta, seen, scale)
    grad_q = tl.dot(grad_scores.to(q.dtype), k, input_precision="ieee")
    grad_k = tl.dot(tl.trans(grad_scores.to(q.dtype)), q, input_precision="ieee")
    grad_v = tl.dot(tl.trans(p.to(q.dtype)), grad_out, input_precision="ieee")
    _store_rows(grad_k_block_ptr + wide, at, used, width, grad_k, WIDTH)
    _store_rows(grad_v_block_ptr + narrow, at, used, value_width, grad_v, VALUE_WIDTH)

    for start in range(tl.min(first, 0) // KEYS * KEYS, tl.max(last, 0) + 1, KEYS):
        keys = start + tl.arange(0, KEYS)
        k = _rows(k_ptr + batch * length * width, keys, keys < length, width, WIDTH)
        v = _rows(v_ptr + batch * length * value_width, keys, keys < length, value_width, VALUE_WIDTH)
        seen = (keys[None, :] >= first[:, None]) & (keys[None, :] <= last[:, None])
        p, grad_scores = _score_gradients(q, k, v, grad_out, lse, delta, seen, scale)
        grad_q += tl.dot(grad_scores.to(q.dtype), k, input_precision="ieee")
    _store_rows(grad_q_ptr + wide, at, used, width, grad_q, WIDTH)


@triton.jit
def _context_gradient_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    first_ptr,
    last_ptr,
    grad_out_ptr,
    lse_ptr,
    delta_ptr,
    grad_k_ptr,  # [B, L, d]
    grad_v_ptr,  # [B, L, e]
    heads,
    anchors,
    drafts,
    length,
    width,
    value_width,
    scale,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
):
    batch = tl.program_id(1).to(tl.int64)
    queries = anchors * drafts
    keys = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    k = _rows(k_ptr + batch * length * width, keys, keys < length, width, WIDTH)
    v = _rows(v_ptr + batch * length * value_width, keys, keys < length, value_width, VALUE_WIDTH)
    grad_k = tl.zeros((KEYS, WIDTH), tl.float32)
    grad_v = tl.zeros((KEYS, VALUE_WIDTH), tl.float32)
    for tile in range(0, tl.cdiv(anchors, TILE // drafts)):
        at, used, _, first, last = _tile(first_ptr, last_ptr, batch // heads, tile, anchors, drafts, TILE)
        if (tl.max(last, 0) >= tl.min(keys, 0)) & (tl.min(first, 0) <= tl.max(keys, 0)):
            q = _rows(q_ptr + batch * queries * width, at, used, width, WIDTH)
            grad_out = _rows(grad_out_ptr + batch * queries * value_width, at, used, value_width, VALUE_WIDTH)
            lse = tl.load(lse_ptr + batch * queries + at, mask=used, other=0.0)
            delta = tl.load(delta_ptr + batch * queries + at, mask=used, other=0.0)
            seen = (keys[None, :] >= first[:, None]) & (keys[None, :] <= last[:, None])
            p, grad_scores = _score_gradients(q, k, v, grad_out, lse, delta, seen, scale)
            grad_k += tl.dot(tl.trans(grad_scores.to(q.dtype)), q, input_precision="ieee")
            grad_v += tl.dot(tl.trans(p.to(q.dtype)), grad_out, input_precision="ieee")
    _store_rows(grad_k_ptr + batch * length * width, keys, keys < length, width, grad_k, WIDTH)
    _store_rows(grad_v_ptr + batch * length * value_width, keys, keys < length, value_width, grad_v, VALUE_WIDTH)


def _sizes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: torch.Tensor, scale: float) -> tuple[tuple, dict]:
    """Scalar arguments shared by the kernels, and their compile-time arguments."""
    heads, anchors, drafts = q.shape[1], first.shape[1], q.shape[2] // first.shape[1]
    if drafts > QUERY_TILE:
        raise ValueError(f"blocks have {drafts} rows, wanted at most {QUERY_TILE}")
    widths = {"WIDTH": max(16, triton.next_power_of_2(q.shape[3])), "VALUE_WIDTH": max(16, triton.next_power_of_2(v.shape[3]))}
    scalars = (heads, anchors, drafts, k.shape[2], q.shape[3], v.shape[3], scale)
    return scalars, {**widths, "TILE": QUERY_TILE, "KEYS": KEY_TILE, "num_stages": 2}


def _query_grid(q: torch.Tensor, first: torch.Tensor) -> tuple[int, int]:
    drafts = q.shape[2] // first.shape[1]
    return triton.cdiv(first.shape[1], QUERY_TILE // drafts), q.shape[0] * q.shape[1]


@torch.library.custom_op("dspark_kernels::anchor_attention", mutates_args=())
def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_block: torch.Tensor,
    v_block: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    scalars, constants = _sizes(q, k, v, first, scale)
    q, k, v, k_block, v_block = (x.contiguous() for x in (q, k, v, k_block, v_block))
    out = torch.empty_like(v_block)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    _forward_kernel[_query_grid(q, first)](q, k, v, k_block, v_block, first, last, out, lse, *scalars, **constants, num_warps=4)
    return out, lse


@_forward.register_fake
def _(q, k, v, k_block, v_block, first, last, scale):
    return v_block.new_empty(v_block.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("dspark_kernels::anchor_attention_backward", mutates_args=())
def _backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_block: torch.Tensor,
    v_block: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    scalars, constants = _sizes(q, k, v, first, scale)
    # With 4 warps the query kernel spills registers on sm_90.
    constants["num_warps"] = 8
    delta = (out.float() * grad_out.float()).sum(-1)
    q, k, v, k_block, v_block, grad_out = (x.contiguous() for x in (q, k, v, k_block, v_block, grad_out))
    grads = [torch.empty_like(x) for x in (q, k, v, k_block, v_block)]
    shared = (grad_out, lse, delta)
    _query_gradient_kernel[_query_grid(q, first)](
        q, k, v, k_block, v_block, first, last, *shared, grads[0], grads[3], grads[4], *scalars, **constants
    )
    grid = (triton.cdiv(k.shape[2], KEY_TILE), q.shape[0] * q.shape[1])
    _context_gradient_kernel[grid](q, k, v, first, last, *shared, grads[1], grads[2], *scalars, **constants)
    return tuple(grads)


@_backward.register_fake
def _(grad_out, q, k, v, k_block, v_block, first, last, out, lse, scale):
    return tuple(x.new_empty(x.shape) for x in (q, k, v, k_block, v_block))


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad_out, grad_lse):
    return *_backward(grad_out, *ctx.saved_tensors, ctx.scale), None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def anchor_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_block: torch.Tensor,
    v_block: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """softmax(scale q . [k; k_block]) [v; v_block], where query n of block a = n // drafts sees the context rows
    first[a] .. last[a] and all rows of its own block.

    q, k_block: [R, heads, A * drafts, d]; v_block: [R, heads, A * drafts, e]; k: [R, heads, L, d]; v: [R, heads, L, e],
    all of one dtype; first, last: int32 [R, A] contiguous, 0 <= first and last < L; a block with last < first sees no
    context.  Scores, softmax and sums are float32; probabilities and score gradients are rounded to the tensors' dtype
    before their products.  Returns [R, heads, A * drafts, e]; differentiable in the first five.

    Raises ValueError for blocks of more than 64 rows.
    """
    return _forward(q, k, v, k_block, v_block, first, last, scale)[0]
