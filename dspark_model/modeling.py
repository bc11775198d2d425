"""`MLADSparkForCausalLM`: the drafter as an `nn.Module`, config-driven, in readable torch."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from dspark_model import checkpoint, checkpoint_write, ops
from dspark_model.config import DrafterConfig
from dspark_model.heads import ConfidenceHead, MarkovHead
from dspark_model.layers import GatedMLP, MLAAttention, RMSNorm
from dspark_model.low_m import LowMPath, check_stored
from dspark_model.ops import BlockRows
from dspark_model.packing import pack_linears
from dspark_model.streams import SideStream


@dataclass(frozen=True, slots=True)
class BlockPaths:
    """How the layers of a block run.  attention, latent_norm_rope: backends of those ops; low_m: makes the products, None for
    torch's own; merged_qkv_a: the projections of queries and latents are one product, which `MLAAttention.merge_qkv_a` has
    prepared; fused_store: see `ops.latent_store`; direct_pool_write: norm and rotation store into the pool themselves; side:
    the stream of the latents, None for the main one."""

    attention: str = "torch"
    latent_norm_rope: str = "torch"
    low_m: LowMPath | None = None
    merged_qkv_a: bool = False
    fused_store: bool = False
    direct_pool_write: bool = False
    side: SideStream | None = None


PLAIN_PATHS = BlockPaths()


@dataclass(frozen=True, slots=True)
class BlockContext:
    """What the layers of one block decode share.

    layer_views: L tensors [pages, page_size, D]; page_table: int32 [B, P], or the table of all slots with slots int64 [B],
    each request's row of it, -1 for dummy rows; context_lens: int64 [B]; rows: the block's own rows; cos_sin: float32
    [B, N, r] for them; max_seq_len: host bound on rows.seq_lens; window: see `ops.block_attention`; new_context: rows among
    the context whose latents the layers have to store first, only where `LowMPath.stores_context`.
    """

    layer_views: Sequence[torch.Tensor]
    page_table: torch.Tensor
    context_lens: torch.Tensor
    rows: BlockRows
    cos_sin: torch.Tensor
    max_seq_len: int
    slots: torch.Tensor | None = None
    window: int | None = None
    paths: BlockPaths = PLAIN_PATHS
    new_context: ops.ContextInto | None = None


@dataclass(frozen=True, slots=True)
class BlockDraft:
    """One drafted block; B requests, K drafts.

    draft_tokens: int64 [B, K].  base_logits, biased_logits: float32 [B, K, V], before and after the Markov bias, the latter
    None where it was not asked for.
    confidence: float32 [B, K] each, -inf and 0 for dummy rows, or None for a drafter without that head.
    """

    draft_tokens: torch.Tensor
    base_logits: torch.Tensor
    biased_logits: torch.Tensor | None
    confidence: ops.Confidence | None


class DrafterLayer(nn.Module):
    """h = x + attention(input_layernorm(x)); h + mlp(post_attention_layernorm(h)); sums in the model's dtype."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = MLAAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: torch.Tensor, layer_view: torch.Tensor, context: BlockContext) -> torch.Tensor:
        """x [B, N, H] to [B, N, H]; writes the block's latents into layer_view before attending."""
        queries = self.write_latents_and_query(self.input_layernorm(x), layer_view, context)
        h = x + self.self_attn.output(self.attend(queries, layer_view, context))
        return h + self.mlp(self.post_attention_layernorm(h))

    def attend(
        self,
        queries: torch.Tensor,
        layer_view: torch.Tensor,
        context: BlockContext,
        value_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`ops.block_attention` of queries [B, N, heads, D]: [B, N, heads, kv_lora_rank], or with value_weights [B, N, heads,
        v_head_dim]."""
        more = {"max_seq_len": context.max_seq_len, "backend": context.paths.attention}
        return self._attend_by(ops.block_attention, queries, layer_view, context, value_weights, **more)

    def attend_parts(
        self,
        queries: torch.Tensor,
        layer_view: torch.Tensor,
        context: BlockContext,
        value_weights: torch.Tensor,
        *,
        early: bool,
        late_rows: int,
    ) -> ops.AttentionParts:
        """`attend`, for `ops.between_attentions` to merge; early, late_rows: see `ops.attention_parts`."""
        more = {"early": early, "late_rows": late_rows}
        return self._attend_by(ops.attention_parts, queries, layer_view, context, value_weights, **more)

    def _attend_by(self, op, queries, layer_view, context: BlockContext, value_weights, **more):
        """Both ways: an op of `ops.block_attention`'s arguments."""
        return op(
            queries,
            layer_view,
            context.page_table,
            context.context_lens,
            context.rows.seq_lens,
            kv_lora_rank=self.config.kv_lora_rank,
            softmax_scale=self.config.softmax_scale,
            causal=self.config.is_causal,
            window=context.window,
            slots=context.slots,
            value_weights=value_weights,
            **more,
        )

    def write_latents_and_query(self, y: torch.Tensor, layer_view: torch.Tensor, context: BlockContext) -> torch.Tensor:
        """What attention needs of y, the normed rows [B, N, H]: latents in the pool, and queries [B, N, heads, D]."""
        attn, cos_sin = self.self_attn, context.cos_sin
        if context.paths.merged_qkv_a:
            q_a, kv = attn.qkv_a(y)
            return self.write_latents_beside(lambda: kv, lambda: attn.queries(q_a, cos_sin), layer_view, context)
        return self.write_latents_beside(
            lambda: attn.kv_a_proj_with_mqa(y), lambda: attn.queries(attn.q_a_proj(y), cos_sin), layer_view, context
        )

    def write_latents_beside(
        self,
        kv: Callable[[], torch.Tensor],
        queries: Callable[[], torch.Tensor],
        layer_view: torch.Tensor,
        context: BlockContext,
    ) -> torch.Tensor:
        """`_write_latents` of kv(), on the side stream where there is one, beside queries(), which are returned."""
        side = context.paths.side
        with nullcontext() if side is None else side.fork():
            self._write_latents(kv(), layer_view, context)
        made = queries()
        if side is not None:
            side.join()
        return made

    def _write_latents(self, kv: torch.Tensor, layer_view: torch.Tensor, context: BlockContext) -> None:
        """Latents of the block's own rows into the pool; kv [B, N, D], rows of `kv_a_proj_with_mqa`."""
        paths, where, attn = context.paths, context.rows.where, self.self_attn
        if paths.direct_pool_write:
            attn.store_latents(kv, context.cos_sin, layer_view, where, paths.latent_norm_rope)
            return
        latents = attn.latents(kv, context.cos_sin, paths.latent_norm_rope)
        ops.latent_store((layer_view,), latents[None], where, fused=paths.fused_store)


class MLADSparkForCausalLM(nn.Module):
    """An MLA-shaped DSpark drafter.

    Parameter names are the checkpoint's own.  The head is the target's, and so is the embedding where the checkpoint has
    none: both are held without a copy and are not part of the drafter's checkpoint.  `lm_head_source` and
    `embedding_source` say "target", or "checkpoint" for a table that was read from there and is saved with the drafter.
    """

    def __init__(self, config: DrafterConfig, *, lm_head: torch.Tensor, target_embed_tokens: torch.Tensor | None = None):
        """A drafter with torch's default initial weights; `from_pretrained` is the way to a trained one.

        lm_head: the target's output table [V', hidden_size], V' >= vocab_size; rows past vocab_size are never used.
        target_embed_tokens: the target's embedding [V', hidden_size]; None gives the drafter a table of its own.

        Raises:
            ValueError: a table has the wrong shape, or the two differ in dtype or device.
        """
        super().__init__()
        _check_table("lm_head", lm_head, config, like=lm_head)
        self.config = config
        self.lm_head_source = "target"
        self.embedding_source = "checkpoint" if target_embed_tokens is None else "target"
        self.register_buffer("lm_head", lm_head.detach()[: config.vocab_size], persistent=False)
        self._packed_lm_head: torch.Tensor | None = None
        if target_embed_tokens is None:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        else:
            _check_table("target_embed_tokens", target_embed_tokens, config, like=lm_head)
            self.embed_tokens = nn.Embedding.from_pretrained(target_embed_tokens.detach()[: config.vocab_size])
        self.mask_embedding = nn.Embedding(1, config.hidden_size) if config.mask_embedding else None
        if config.fc_norm:
            norms = (RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in config.target_layer_ids)
            self.fc_norm = nn.ModuleList(norms)
        else:
            self.fc_norm = None
        self.context_proj = nn.Linear(config.context_width, config.hidden_size, bias=False)
        self.context_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_hidden_layers))
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo_id: str | Path,
        *,
        lm_head: torch.Tensor | None = None,
        target_embed_tokens: torch.Tensor | None = None,
        embedding: checkpoint.EmbeddingChoice | str = checkpoint.EmbeddingChoice.AUTO,
        revision: str | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        ignore_config_keys: tuple[str, ...] = (),
        ignore_tensors: tuple[str, ...] = (),
    ) -> "MLADSparkForCausalLM":
        """Load a drafter from a local folder or a Hugging Face repo.

        lm_head: the target's head [V', hidden_size] in the final dtype, on `device`; not copied.  May be left out only
            when the checkpoint has an `lm_head.weight` of its own.
        target_embed_tokens: the target's embedding, used when the checkpoint has none or `embedding` says so.
        embedding: `auto` (the checkpoint's own table when present, else the target's), `own` or `target`.
        revision: branch, tag or commit of the drafter's repo.
        dtype: dtype of the weights; None keeps the checkpoint's `torch_dtype`.
        device: where the weights go, straight from the file.
        ignore_config_keys, ignore_tensors: names that are known to be harmless and would be refused otherwise.

        Raises:
            ConfigError: `config.json` is incomplete, contradictory or asks for what is not supported.
            CheckpointError: a file is missing or damaged, or tensors are missing, surplus or mis-shaped (all of them are
                named together), or a table that must come from the target was not given.
            ValueError: lm_head or target_embed_tokens has the wrong shape, dtype or device.
        """
        files = checkpoint.open_checkpoint(
            path_or_repo_id, revision=revision, cache_dir=cache_dir, local_files_only=local_files_only
        )
        config = DrafterConfig.from_file(files.folder / "config.json", ignore_keys=ignore_config_keys)
        tables = checkpoint.TargetTables(lm_head=lm_head, embed_tokens=target_embed_tokens)
        return checkpoint.load_model(
            cls, config, files, tables, embedding=embedding, dtype=dtype, device=device, ignore_tensors=ignore_tensors
        )

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        storage: checkpoint_write.WeightStorage | str = checkpoint_write.WeightStorage.PLAIN,
        max_shard_bytes: int | None = None,
    ) -> None:
        """Write `config.json` and the weights in the format that `from_pretrained` reads, creating `folder`.

        The target's tables are left out.  A checkpoint that is in the folder already is replaced.
        storage: `plain` keeps the dtype; `int8_rows` stores matrices as int8 with one float32 scale per row.
        max_shard_bytes: splits the weights into several files, with an index, when they are larger.
        """
        checkpoint_write.save_model(self, Path(folder), storage=storage, max_shard_bytes=max_shard_bytes)

    def merge_qkv_a(self) -> None:
        """Prepare `BlockPaths.merged_qkv_a` in every layer, see `MLAAttention.merge_qkv_a`."""
        for layer in self.layers:
            layer.self_attn.merge_qkv_a()

    def pack_linears(self) -> int:
        """Make the products with few rows fast on a CPU: `packing.pack_linears` on the drafter's own layers, and a packed copy
        of the head.  For inference, on this device; returns how many layers were packed, 0 where `ops.can_pack` refuses."""
        if ops.can_pack(self.lm_head):
            self._packed_lm_head = ops.pack_weight(self.lm_head)
        return pack_linears(self)

    @property
    def dtype(self) -> torch.dtype:
        return self.context_proj.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.context_proj.weight.device

    @property
    def mask_row(self) -> torch.Tensor:
        """The row of a mask slot, [hidden]: the trained one when the checkpoint has it, else the mask token's."""
        if self.mask_embedding is not None:
            return self.mask_embedding.weight[0]
        return self.embed_tokens.weight[self.config.mask_token_id]

    def project_context(self, target_hidden: torch.Tensor, low_m: LowMPath | None = None) -> torch.Tensor:
        """Context of target rows: [M, T * E] to [M, hidden]: context_norm(context_proj(taps)), taps normed first where
        the checkpoint has `fc_norm`; low_m: see `BlockPaths`."""
        return self.norm_context(self.context_product(target_hidden, low_m), low_m)

    def context_product(self, target_hidden: torch.Tensor, low_m: LowMPath | None = None) -> torch.Tensor:
        """`project_context` up to `context_norm`."""
        if self.fc_norm is not None:
            taps = target_hidden.unflatten(-1, (self.config.num_context_features, -1))
            normed = [norm(tap) for norm, tap in zip(self.fc_norm, taps.unbind(-2), strict=True)]
            target_hidden = torch.cat(normed, dim=-1)
        if low_m is None or not low_m.takes(target_hidden.shape[0]):
            return self.context_proj(target_hidden)
        return low_m.linear(target_hidden, self.context_proj.weight, on_side=True)

    def norm_context(self, product: torch.Tensor, low_m: LowMPath | None = None) -> torch.Tensor:
        """`context_norm` of `context_product`."""
        norm = self.context_norm
        if low_m is None or not low_m.takes(product.shape[0]):
            return norm(product)
        return ops.rms_norm(product, norm.weight, norm.eps, backend="triton")

    def embed_block(self, anchors: torch.Tensor, rows: int, *, fused: bool = False) -> torch.Tensor:
        """[anchor, mask, ..., mask] of anchors int64 [B]: [B, rows, hidden]; fused: see `ops.noise_block`."""
        return ops.noise_block(anchors, self.embed_tokens.weight, self.mask_row, rows, fused=fused)

    def decode_block(self, x: torch.Tensor, context: BlockContext) -> torch.Tensor:
        """The layers and `final_norm` over one block: [B, N, hidden] to [B, N, hidden]; writes the block's latents."""
        low_m, norm = context.paths.low_m, self.final_norm
        if low_m is None or not low_m.takes(x.shape[0] * x.shape[1]):
            check_stored(context)
            for layer, view in zip(self.layers, context.layer_views, strict=True):
                x = layer(x, view, context)
            return norm(x)
        x = low_m.layers(self.layers, x, context)
        return ops.rms_norm(x, norm.weight, norm.eps, backend="triton")

    def draft(
        self,
        final_hidden: torch.Tensor,
        anchors: torch.Tensor,
        *,
        slots: torch.Tensor | None = None,
        temperatures: torch.Tensor | None = None,
        uniforms: torch.Tensor | None = None,
        keep_biased: bool = True,
        low_m: LowMPath | None = None,
    ) -> BlockDraft:
        """Head, Markov chain and confidence over the rows that predict drafts.

        final_hidden: [B, K, hidden], see `slots.draft_rows`; anchors: int64 [B]; slots: int64 [B], below 0 for dummy rows, None
        without any; temperatures, uniforms and keep_biased as in `ops.markov_chain`; low_m: see `BlockPaths`; blocks that its
        chain does not take have the chain of torch.
        """
        fused, sampled = low_m is not None, temperatures is not None
        batch, drafts = final_hidden.shape[:2]
        tables = (None, None) if self.markov_head is None else self.markov_head.tables()
        base = self._base_logits(final_hidden, low_m)
        workspace = low_m.chain_workspace(batch, drafts, tables[1], sampled=sampled) if fused else None
        chain = ops.markov_chain(
            base,
            anchors,
            *tables,
            temperatures=temperatures,
            uniforms=uniforms,
            keep_biased=keep_biased,
            backend="torch" if workspace is None else workspace.plan.backend,
            workspace=workspace,
        )
        confidence = self._confidence(final_hidden, chain.previous_tokens, slots, fused=fused)
        return BlockDraft(chain.draft_tokens, base, chain.biased_logits, confidence)

    def _confidence(
        self, final_hidden: torch.Tensor, previous_tokens: torch.Tensor, slots: torch.Tensor | None, *, fused: bool
    ) -> ops.Confidence | None:
        """`ops.confidence` by the confidence head; None without one.  fused: the head's product lies between what made
        final_hidden and the chain, so it is complete when the chain lets this one begin."""
        head, backend = self.confidence_head, "triton" if fused else "torch"
        if head is None:
            return None
        w1 = self.markov_head.markov_w1.weight if self.config.confidence_head_with_markov else None
        weight, bias = head.proj.weight[0], head.proj.bias
        return ops.confidence(final_hidden, weight, bias, w1, previous_tokens, slots=slots, backend=backend, early=fused)

    def _base_logits(self, final_hidden: torch.Tensor, low_m: LowMPath | None) -> torch.Tensor:
        """lm_head of final_hidden [B, K, hidden], float32 [B, K, V]."""
        if low_m is not None and low_m.takes_head(final_hidden.shape[0] * final_hidden.shape[1]):
            return low_m.linear(final_hidden, self.lm_head, out_dtype=torch.float32)
        lm_head = self.lm_head if self._packed_lm_head is None else self._packed_lm_head
        return ops.fp32_linear(final_hidden.flatten(0, 1), lm_head).unflatten(0, final_hidden.shape[:2])


def _check_table(name: str, table: torch.Tensor, config: DrafterConfig, like: torch.Tensor) -> None:
    wanted = f"[at least {config.vocab_size}, {config.hidden_size}]"
    if table.ndim != 2 or table.shape[0] < config.vocab_size or table.shape[1] != config.hidden_size:
        raise ValueError(f"{name} has shape {list(table.shape)}, wanted {wanted}; pass the target's own table")
    if table.dtype is not like.dtype or table.device != like.device:
        raise ValueError(
            f"{name} is {table.dtype} on {table.device} but lm_head is {like.dtype} on {like.device}; convert one of them"
        )
