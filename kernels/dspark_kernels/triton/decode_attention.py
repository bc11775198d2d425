"""Attention of one new token per slot over the slot's own cache rows, grouped query heads."""

import torch
import triton
import triton.language as tl


@triton.jit
def _decode_attention_kernel(
    q_ptr,  # [B, heads, D]
    k_ptr,  # [B, kv_heads, S, D]
    v_ptr,  # [B, kv_heads, S, D]
    lengths_ptr,  # [B]
    out_ptr,  # [B, heads, D]
    capacity,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    length = tl.load(lengths_ptr + slot).to(tl.int32)
    group = tl.arange(0, GROUP_PADDED)
    columns = tl.arange(0, WIDTH)
    lanes = tl.arange(0, BLOCK)
    head_rows = (slot * KV_HEADS + kv_head) * GROUP + group
    q = tl.load(q_ptr + head_rows[:, None] * WIDTH + columns[None, :], mask=group[:, None] < GROUP, other=0.0)
    base = (slot * KV_HEADS + kv_head) * capacity * WIDTH

    top = tl.full((GROUP_PADDED,), -1e30, tl.float32)
    total = tl.zeros((GROUP_PADDED,), tl.float32)
    acc = tl.zeros((GROUP_PADDED, WIDTH), tl.float32)
    for start in range(0, length, BLOCK):
        rows = start + lanes
        used = rows < length
        at = base + rows[:, None].to(tl.int64) * WIDTH + columns[None, :]
        k = tl.load(k_ptr + at, mask=used[:, None], other=0.0)
        v = tl.load(v_ptr + at, mask=used[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(used[None, :], scores, -1e30)
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp(top - new_top)
        p = tl.exp(scores - new_top[:, None])
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        top = new_top
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + head_rows[:, None] * WIDTH + columns[None, :], out, mask=group[:, None] < GROUP)


def decode_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, scale: float
) -> torch.Tensor:
    """softmax(scale q . k) v over the first lengths[b] >= 1 rows of slot b.

    q: [B, heads, D]; keys, values: [B, kv_heads, S, D] contiguous, same dtype, D a power of two of at least 16;
    lengths: int64 [B].
    Returns [B, heads, D] in q's dtype; float32 inside.  Rows at or past lengths[b] are not read: the bytes moved are
    those of the rows in use.
    """
    batch, heads, width = q.shape
    kv_heads, capacity = keys.shape[1], keys.shape[2]
    out = torch.empty_like(q)
    group = heads // kv_heads
    _decode_attention_kernel[(batch, kv_heads)](
        q,
        keys,
        values,
        lengths,
        out,
        capacity,
        scale,
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_PADDED=max(16, triton.next_power_of_2(group)),
        WIDTH=width,
        BLOCK=64,
        num_warps=4,
    )
    return out
