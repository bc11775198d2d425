"""The package's operations, one per file: contract, torch reference, checks.

A reference is plain torch, spells out every rounding point and is the specification of its op: any faster
implementation is held to it.  Rounding rule throughout: norms, weights, rotations, logits and softmax are computed in
float32, and a result is rounded once, when it is stored in the tensor's dtype.
"""

from dspark_model.ops.absorb_queries import absorb_queries
from dspark_model.ops.accept_exact import NO_TOKEN, Acceptance, accept_exact
from dspark_model.ops.before_attention import BeforeAttention, BeforeOutput, before_attention
from dspark_model.ops.between_attentions import AfterAttention, BetweenOutput, between_attentions
from dspark_model.ops.between_workspace import (
    MAX_BETWEEN_ROWS,
    BetweenSizes,
    BetweenWorkspace,
    absorption_refusal,
    between_attentions_refusal,
)
from dspark_model.ops.block_attention import (
    AttentionParts,
    attention_parts,
    attention_parts_refusal,
    block_attention,
    block_attention_refusal,
)
from dspark_model.ops.block_fixup import BlockRows, block_fixup
from dspark_model.ops.confidence import Confidence, confidence, confidence_logits
from dspark_model.ops.context_addresses import context_addresses
from dspark_model.ops.context_into import ContextInto, context_into_refusal, context_kv
from dspark_model.ops.context_rows import ContextRows, context_rows
from dspark_model.ops.context_store import context_store
from dspark_model.ops.decode_block_table import decode_block_table, refresh_block_table
from dspark_model.ops.fp8_rows import dequantise_rows, pool_row_width, quantise_rows
from dspark_model.ops.fp32_linear import fp32_linear
from dspark_model.ops.into_attention import Absorption, LatentsInto, NormedBy, latents_into_refusal
from dspark_model.ops.latent_norm_rope import latent_norm_rope, latent_norm_rope_store
from dspark_model.ops.latent_store import PoolGeometry, latent_store
from dspark_model.ops.length_advance import LengthAdvance, length_advance
from dspark_model.ops.low_m_linear import LowMProduct, LowMTile, LowMWorkspace, low_m_linear, low_m_tile
from dspark_model.ops.markov_chain import (
    ChainWorkspace,
    MarkovChainOutput,
    fused_chain_refusal,
    markov_chain,
    tempered_softmax,
)
from dspark_model.ops.noise_block import noise_block
from dspark_model.ops.packed_linear import can_pack, pack_weight, packed_linear
from dspark_model.ops.per_head_product import per_head_product
from dspark_model.ops.rms_norm import rms_norm
from dspark_model.ops.rope_rotate import rope_rotate
from dspark_model.ops.row_addresses import RowAddresses, row_addresses
from dspark_model.ops.step_commit import SlotDrafts, step_commit
from dspark_model.ops.step_prologue import BlockShape, GivenRows, SlotTables, StepRows, step_prologue

__all__ = [
    "MAX_BETWEEN_ROWS",
    "NO_TOKEN",
    "Absorption",
    "Acceptance",
    "AfterAttention",
    "AttentionParts",
    "BeforeAttention",
    "BeforeOutput",
    "BetweenOutput",
    "BetweenSizes",
    "BetweenWorkspace",
    "BlockRows",
    "BlockShape",
    "ChainWorkspace",
    "Confidence",
    "ContextInto",
    "ContextRows",
    "GivenRows",
    "LatentsInto",
    "LengthAdvance",
    "LowMProduct",
    "LowMTile",
    "LowMWorkspace",
    "MarkovChainOutput",
    "NormedBy",
    "PoolGeometry",
    "RowAddresses",
    "SlotDrafts",
    "SlotTables",
    "StepRows",
    "absorb_queries",
    "absorption_refusal",
    "accept_exact",
    "attention_parts",
    "attention_parts_refusal",
    "before_attention",
    "between_attentions",
    "between_attentions_refusal",
    "block_attention",
    "block_attention_refusal",
    "block_fixup",
    "can_pack",
    "confidence",
    "confidence_logits",
    "context_addresses",
    "context_into_refusal",
    "context_kv",
    "context_rows",
    "context_store",
    "decode_block_table",
    "dequantise_rows",
    "fp32_linear",
    "fused_chain_refusal",
    "latent_norm_rope",
    "latent_norm_rope_store",
    "latent_store",
    "latents_into_refusal",
    "length_advance",
    "low_m_linear",
    "low_m_tile",
    "markov_chain",
    "noise_block",
    "pack_weight",
    "packed_linear",
    "per_head_product",
    "pool_row_width",
    "quantise_rows",
    "refresh_block_table",
    "rms_norm",
    "rope_rotate",
    "row_addresses",
    "step_commit",
    "step_prologue",
    "tempered_softmax",
]
