"""The drafter over many anchors of the same rows at once: equal to inference in result, with keys and values unfolded.

Inference absorbs W_UK and W_UV into query and output; here `kv_b_proj` is applied to the latents instead, since a
context row serves hundreds of queries and 96-wide keys cost a third of 288-wide ones.
"""

from dataclasses import dataclass

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dspark_model.layers import MLAAttention
from dspark_model.modeling import DrafterLayer, MLADSparkForCausalLM
from dspark_model.ops import rope_rotate


@dataclass(frozen=True, slots=True)
class AnchorBatch:
    """R packed rows of L tokens, A anchors a row, blocks of K rows.

    anchor_tokens: int64 [R, A]; anchor_at: int64 [R, A], index P of the last context token in the packed row; document:
    int64 [R, L], index at which the token's own text starts.  context_cos_sin: float32 [R, L, r]; block_cos_sin:
    float32 [R, A * K, r].
    """

    anchor_tokens: torch.Tensor
    anchor_at: torch.Tensor
    document: torch.Tensor
    context_cos_sin: torch.Tensor
    block_cos_sin: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The fields in order."""
        return self.anchor_tokens, self.anchor_at, self.document, self.context_cos_sin, self.block_cos_sin

    def first_visible(self) -> torch.Tensor:
        """int64 [R, A]: an anchor's block sees the context from here, the start of its own text, up to P."""
        return self.document.gather(1, self.anchor_at)

    def visible(self) -> torch.Tensor:
        """bool [R, A, L]: the context that an anchor's block sees, tokens of its own text up to P."""
        index = torch.arange(self.document.shape[1], device=self.document.device)
        return (index <= self.anchor_at[..., None]) & (index >= self.first_visible()[..., None])


class DenseAttention:
    """Scores against the whole row, masked: plain torch, any device.  Memory: R x heads x A x K x (L + K) scores."""

    def __init__(self, batch: AnchorBatch, drafts: int):
        self.visible, self.drafts = batch.visible(), drafts

    def __call__(self, q, k, v, k_block, v_block, scale: float) -> torch.Tensor:
        """q, k_block: [R, heads, A * K, d]; v_block: [R, heads, A * K, e]; k: [R, heads, L, d]; v: [R, heads, L, e]."""
        rows, heads, queries, _ = q.shape
        blocks = (-1, self.drafts)
        context_scores = (q @ k.transpose(-1, -2)).unflatten(2, blocks)
        block_scores = q.unflatten(2, blocks) @ k_block.unflatten(2, blocks).transpose(-1, -2)
        context_scores = context_scores.float().masked_fill(~self.visible[:, None, :, None, :], float("-inf"))
        scores = torch.cat((context_scores, block_scores.float()), dim=-1) * scale
        probs = torch.softmax(scores, dim=-1).to(v.dtype)
        context_probs, block_probs = probs.split((k.shape[2], self.drafts), dim=-1)
        out = (context_probs.flatten(2, 3) @ v).unflatten(2, blocks) + block_probs @ v_block.unflatten(2, blocks)
        return out.reshape(rows, heads, queries, -1)


class FlexAttention:
    """`flex_attention` over context and block rows together, skipping tiles that no query sees.

    mask: see `flex_block_mask`; call: flex_attention or its compiled form.
    """

    def __init__(self, mask: BlockMask, call):
        self.mask, self.call = mask, call

    def __call__(self, q, k, v, k_block, v_block, scale: float) -> torch.Tensor:
        """Shapes as in DenseAttention."""
        keys, values = torch.cat((k, k_block), dim=2), torch.cat((v, v_block), dim=2)
        return self.call(q.contiguous(), keys, values, block_mask=self.mask, scale=scale)


class TritonAttention:
    """The kernel of `dspark_kernels.triton.anchor_attention`: no stored scores, tiles that no query sees are skipped."""

    def __init__(self, batch: AnchorBatch):
        from dspark_kernels.triton.anchor_attention import anchor_attention

        self.call = anchor_attention
        self.first, self.last = batch.first_visible().int(), batch.anchor_at.int()

    def __call__(self, q, k, v, k_block, v_block, scale: float) -> torch.Tensor:
        """Shapes as in DenseAttention."""
        return self.call(q, k, v, k_block, v_block, self.first, self.last, scale)


def flex_block_mask(batch: AnchorBatch, drafts: int) -> BlockMask:
    """What each block row sees, over the L context rows and then the A * K block rows."""
    anchor_at, length = batch.anchor_at, batch.document.shape[1]
    starts = batch.first_visible()

    def mask(row, head, query, key):
        block = query // drafts
        in_context = (key <= anchor_at[row, block]) & (key >= starts[row, block]) & (key < length)
        return in_context | ((key >= length) & ((key - length) // drafts == block))

    rows, anchors = anchor_at.shape
    queries = anchors * drafts
    return create_block_mask(mask, rows, None, queries, length + queries, device=anchor_at.device)


def compiled_flex_attention():
    """flex_attention compiled for fixed shapes, as it needs to be on CUDA."""
    return torch.compile(flex_attention, dynamic=False)


def _heads(attn: MLAAttention, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [R, heads, N, nope + rope] and values [R, heads, N, v] of latents [R, N, D]."""
    config = attn.config
    latent, k_pe = latents.split((config.kv_lora_rank, config.qk_rope_head_dim), dim=-1)
    unfolded = attn.kv_b_proj(latent).unflatten(-1, (config.num_attention_heads, -1)).transpose(1, 2)
    k_nope, v = unfolded.split((config.qk_nope_head_dim, config.v_head_dim), dim=-1)
    k_pe = k_pe[:, None].expand(-1, config.num_attention_heads, -1, -1).to(k_nope.dtype)
    return torch.cat((k_nope, k_pe), dim=-1), v


def _layer(layer: DrafterLayer, x: torch.Tensor, context: torch.Tensor, batch: AnchorBatch, attention) -> torch.Tensor:
    """One layer over block rows x [R, A * K, H] with context [R, L, H]."""
    attn, config = layer.self_attn, layer.config
    y = layer.input_layernorm(x)
    q = attn.q_b_proj(attn.q_a_layernorm(attn.q_a_proj(y)))
    q = q.unflatten(-1, (config.num_attention_heads, config.qk_head_dim))
    q_nope, q_pe = q.split((config.qk_nope_head_dim, config.qk_rope_head_dim), dim=-1)
    q = torch.cat((q_nope, rope_rotate(q_pe, batch.block_cos_sin[..., None, :])), dim=-1).transpose(1, 2)
    k, v = _heads(attn, attn.latents(attn.kv_a_proj_with_mqa(context), batch.context_cos_sin))
    k_block, v_block = _heads(attn, attn.latents(attn.kv_a_proj_with_mqa(y), batch.block_cos_sin))
    attended = attention(q, k, v, k_block, v_block, config.softmax_scale)
    h = x + attn.o_proj(attended.transpose(1, 2).flatten(-2))
    return h + layer.mlp(layer.post_attention_layernorm(h))


def block_forward(model: MLADSparkForCausalLM, taps: torch.Tensor, batch: AnchorBatch, attention, drafts: int) -> torch.Tensor:
    """Hidden rows after `final_norm`, [R, A * K, H], of the blocks of every anchor; row j of a block predicts token P
    + 2 + j.

    taps: [R, L, T * E], scaled as `model.context_proj` expects; attention: a DenseAttention, FlexAttention or
    TritonAttention of `batch`.
    """
    rows, anchors = batch.anchor_tokens.shape
    context = model.project_context(taps)
    x = model.embed_block(batch.anchor_tokens.flatten(), drafts).reshape(rows, anchors * drafts, -1)
    for layer in model.layers:
        x = _layer(layer, x, context, batch, attention)
    return model.final_norm(x)
