"""`gemm=persistent`: `low_m`, with all products between two attentions in one launch."""

from collections.abc import Sequence
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

from dspark_model import ops
from dspark_model.low_m import LowMPath
from dspark_model.ops import (
    MAX_BETWEEN_ROWS,
    Absorption,
    AfterAttention,
    BeforeAttention,
    BetweenSizes,
    BetweenWorkspace,
    LatentsInto,
    NormedBy,
)

if TYPE_CHECKING:
    from dspark_model.config import DrafterConfig
    from dspark_model.layers import RMSNorm
    from dspark_model.modeling import BlockContext, BlockPaths, DrafterLayer, MLADSparkForCausalLM

# The path of each device that launches early.  Such a launch need not be resident as a whole, and of two that are half each
# neither would end, so it is one of a process at a time; the others launch cooperatively.
_EARLY: WeakValueDictionary[torch.device, "PersistentPath"] = WeakValueDictionary()
_EARLY_LOCK = Lock()


EARLY_QUERIES = 64  # of a request: with more of them an early attention has not been tried


class PersistentPath(LowMPath):
    """`LowMPath`, whose blocks of at most 32 rows have `ops.between_attentions` between the attentions of their layers.

    The projections of queries and latents have to be one product, see `MLAAttention.merge_qkv_a`.

    The launches make queries over latents too where they can, and with `latent_norm_rope=cute` and a direct write into the pool
    the latents, so that the attention is the next kernel; the first one those of the context rows that a step adds, too.

    launches_early: whether its launches begin beside the kernel in front of them, and the attention beside them if it is the
    next kernel; the first living path on a device that may does so.
    """

    def __init__(self, model: "MLADSparkForCausalLM", *, may_launch_early: bool):
        super().__init__(model)
        sizes = between_sizes(model.config)
        self._absorbs = sizes.heads > 0
        self._dtype = model.dtype
        self._between = BetweenWorkspace(sizes, model.device)
        with _EARLY_LOCK:
            self.launches_early = may_launch_early and _EARLY.setdefault(model.device, self) is self
        if self.launches_early and model.device.type == "cuda":
            torch.cuda.synchronize(model.device)  # launches of a path that is gone may still be on their way

    def context_kv(self, context: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`LowMPath.context_kv`, for up to 32 rows with the bits of `ops.before_attention`."""
        if not self._absorbs or not 1 <= len(context) <= MAX_BETWEEN_ROWS:
            return super().context_kv(context, weight)
        return ops.context_kv(context, weight, backend="cute", workspace=self._between)

    def stores_context(self, rows: int, block_rows: int, paths: "BlockPaths", layer_views: Sequence[torch.Tensor]) -> bool:
        """`LowMPath.stores_context`."""
        fits = self._absorbs and 1 <= rows <= MAX_BETWEEN_ROWS and block_rows <= MAX_BETWEEN_ROWS
        return fits and self._stores_into(layer_views, paths) and ops.context_into_refusal(layer_views) is None

    def _stores_into(self, layer_views: Sequence[torch.Tensor], paths: "BlockPaths") -> bool:
        """Whether launches store latents to these layers of the pool."""
        direct = paths.direct_pool_write and paths.latent_norm_rope == "cute"
        return direct and all(view.dtype is self._dtype and ops.latents_into_refusal(view) is None for view in layer_views)

    def layers(self, layers: Sequence["DrafterLayer"], x: torch.Tensor, context: "BlockContext") -> torch.Tensor:
        """`LowMPath.layers`."""
        if x.shape[0] * x.shape[1] > MAX_BETWEEN_ROWS:
            return super().layers(layers, x, context)
        hidden, options = x.flatten(0, 1), {"backend": "cute", "workspace": self._between, "early": self.launches_early}
        fronts = [self._before(layer, view, context) for layer, view in zip(layers, context.layer_views, strict=True)]
        few_queries = x.shape[1] * layers[0].config.num_attention_heads <= EARLY_QUERIES
        made = ops.before_attention(hidden, fronts[0], context=context.new_context, **options)
        for index, layer in enumerate(layers):
            view, following = context.layer_views[index], fronts[index + 1] if index + 1 < len(layers) else None
            queries = self._write_latents_and_absorb(layer, fronts[index], made, x.shape[:2], view, context)
            # An early one may fetch context before the launch in front of it has ended, but not what the first one stores.
            late_rows = MAX_BETWEEN_ROWS if index == 0 and context.new_context is not None else 0
            early = self.launches_early and few_queries and fronts[index].latents is not None
            values = self._attend(layer, queries, view, context, early=early, late_rows=late_rows)
            made = ops.between_attentions(values, hidden, _after(layer), following, **options)
            hidden = made.hidden
        return hidden.view(x.shape)

    def _before(self, layer: "DrafterLayer", view: torch.Tensor, context: "BlockContext") -> BeforeAttention:
        """Weights in front of a layer's attention, and what its launch makes for that."""
        attn, paths, absorption, latents = layer.self_attn, context.paths, None, None
        if self._absorbs:
            absorption = Absorption(attn.key_weights, context.cos_sin.flatten(0, 1))
            if self._stores_into((view,), paths):
                latents = LatentsInto(_normed_by(attn.kv_a_layernorm), view, context.rows.where)
        return BeforeAttention(
            _normed_by(layer.input_layernorm), attn.qkv_a_weight, _normed_by(attn.q_a_layernorm), attn.q_b_proj.weight,
            absorption, latents,
        )  # fmt: skip

    @staticmethod
    def _attend(
        layer: "DrafterLayer",
        queries: torch.Tensor,
        view: torch.Tensor,
        context: "BlockContext",
        *,
        early: bool,
        late_rows: int,
    ) -> torch.Tensor | ops.AttentionParts:
        """Values [B * N, heads * v_head_dim], merged or to be merged.  early: the launch that made queries and latents was the
        one before, and stored at most late_rows rows of each context."""
        config, matrices = layer.self_attn.config, layer.self_attn.value_weights.transpose(1, 2)
        if context.paths.attention == "cute":
            reason = ops.attention_parts_refusal(
                device=queries.device, rows=queries.shape[1], heads=queries.shape[2], kv_lora_rank=config.kv_lora_rank,
                v_head_dim=config.v_head_dim, dtype=queries.dtype,
            )  # fmt: skip
            if reason is None:
                return layer.attend_parts(queries, view, context, matrices, early=early, late_rows=late_rows)
        return layer.attend(queries, view, context, matrices).flatten(0, 1).flatten(1)

    def _write_latents_and_absorb(
        self, layer: "DrafterLayer", front: BeforeAttention, made: ops.BetweenOutput | ops.BeforeOutput, block, view, context
    ) -> torch.Tensor:
        """`DrafterLayer.write_latents_and_query` of rows whose products are made, and perhaps more; block: B, N."""
        attn = layer.self_attn
        absorbed = None if made.absorbed is None else made.absorbed.unflatten(0, block)
        if front.latents is not None:
            return absorbed
        kv = made.qkv_a[:, attn.config.q_lora_rank :].unflatten(0, block)
        queries = made.queries.unflatten(0, block)

        def over_latents() -> torch.Tensor:
            return self.absorb(attn, queries, context.cos_sin) if absorbed is None else absorbed

        return layer.write_latents_beside(lambda: kv, over_latents, view, context)


def between_sizes(config: "DrafterConfig") -> BetweenSizes:
    """What the layers of a drafter have between their attentions."""
    heads = config.num_attention_heads
    sizes = BetweenSizes(
        hidden=config.hidden_size,
        values=heads * config.v_head_dim,
        intermediate=config.intermediate_size,
        q_rank=config.q_lora_rank,
        width=config.q_lora_rank + config.latent_dim,
        queries=heads * config.qk_head_dim,
        heads=heads,
        layers=config.num_hidden_layers,
    )
    return sizes if ops.absorption_refusal(sizes, config.qk_nope_head_dim) is None else replace(sizes, heads=0, layers=0)


def _normed_by(norm: "RMSNorm") -> NormedBy:
    return NormedBy(norm.weight, norm.eps)


def _after(layer: "DrafterLayer") -> AfterAttention:
    mlp = layer.mlp
    norm = _normed_by(layer.post_attention_layernorm)
    return AfterAttention(layer.self_attn.o_proj.weight, norm, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
