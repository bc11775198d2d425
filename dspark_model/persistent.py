"""`gemm=persistent`: `low_m`, with all products between two attentions in one launch."""

from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

from dspark_model import ops
from dspark_model.low_m import LowMPath
from dspark_model.ops import MAX_BETWEEN_ROWS, AfterAttention, BeforeAttention, BetweenSizes, BetweenWorkspace, NormedBy

if TYPE_CHECKING:
    from dspark_model.config import DrafterConfig
    from dspark_model.layers import RMSNorm
    from dspark_model.modeling import BlockContext, DrafterLayer, MLADSparkForCausalLM

# The path of each device that launches early.  Such a launch need not be resident as a whole, and of two that are half each
# neither would end, so it is one of a process at a time; the others launch cooperatively.
_EARLY: WeakValueDictionary[torch.device, "PersistentPath"] = WeakValueDictionary()
_EARLY_LOCK = Lock()


class PersistentPath(LowMPath):
    """`LowMPath`, whose blocks of at most 16 rows have `ops.between_attentions` between the attentions of their layers.

    The projections of queries and latents have to be one product, see `MLAAttention.merge_qkv_a`.

    launches_early: whether its launches begin beside the attention; the first living path on a device that may does so.
    """

    def __init__(self, model: "MLADSparkForCausalLM", *, may_launch_early: bool):
        super().__init__(model)
        self._between = BetweenWorkspace(between_sizes(model.config), model.device)
        with _EARLY_LOCK:
            self.launches_early = may_launch_early and _EARLY.setdefault(model.device, self) is self
        if self.launches_early and model.device.type == "cuda":
            torch.cuda.synchronize(model.device)  # launches of a path that is gone may still be on their way

    def layers(self, layers: Sequence["DrafterLayer"], x: torch.Tensor, context: "BlockContext") -> torch.Tensor:
        """`LowMPath.layers`."""
        if x.shape[0] * x.shape[1] > MAX_BETWEEN_ROWS:
            return super().layers(layers, x, context)
        views = context.layer_views
        hidden = x.flatten(0, 1)
        first = ops.before_attention(hidden, _before(layers[0]), backend="cute", workspace=self._between)
        queries = self._write_latents_and_absorb(layers[0], first, x.shape[:2], views[0], context)
        for index, layer in enumerate(layers):
            values = self._attend(layer, queries, views[index], context)
            following = layers[index + 1] if index + 1 < len(layers) else None
            made = ops.between_attentions(
                values, hidden, _after(layer), None if following is None else _before(following),
                backend="cute", workspace=self._between, early=self.launches_early,
            )  # fmt: skip
            hidden = made.hidden
            if following is not None:
                queries = self._write_latents_and_absorb(following, made, x.shape[:2], views[index + 1], context)
        return hidden.view(x.shape)

    @staticmethod
    def _attend(layer: "DrafterLayer", queries: torch.Tensor, view: torch.Tensor, context: "BlockContext"):
        """Values [B * N, heads * v_head_dim], merged or to be merged."""
        config, matrices = layer.self_attn.config, layer.self_attn.value_weights.transpose(1, 2)
        if context.paths.attention == "cute":
            reason = ops.attention_parts_refusal(
                device=queries.device, rows=queries.shape[1], heads=queries.shape[2], kv_lora_rank=config.kv_lora_rank,
                v_head_dim=config.v_head_dim, dtype=queries.dtype,
            )  # fmt: skip
            if reason is None:
                return layer.attend_parts(queries, view, context, matrices)
        return layer.attend(queries, view, context, matrices).flatten(0, 1).flatten(1)

    def _write_latents_and_absorb(
        self, layer: "DrafterLayer", made: ops.BetweenOutput | ops.BeforeOutput, block, view, context
    ) -> torch.Tensor:
        """`DrafterLayer.write_latents_and_query` of rows whose products are made; block: B, N."""
        attn = layer.self_attn
        kv = made.qkv_a[:, attn.config.q_lora_rank :].unflatten(0, block)
        queries = made.queries.unflatten(0, block)
        return layer.write_latents_beside(lambda: kv, lambda: self.absorb(attn, queries, context.cos_sin), view, context)


def between_sizes(config: "DrafterConfig") -> BetweenSizes:
    """What the layers of a drafter have between their attentions."""
    heads = config.num_attention_heads
    return BetweenSizes(
        hidden=config.hidden_size,
        values=heads * config.v_head_dim,
        intermediate=config.intermediate_size,
        q_rank=config.q_lora_rank,
        width=config.q_lora_rank + config.latent_dim,
        queries=heads * config.qk_head_dim,
    )


def _normed_by(norm: "RMSNorm") -> NormedBy:
    return NormedBy(norm.weight, norm.eps)


def _after(layer: "DrafterLayer") -> AfterAttention:
    mlp = layer.mlp
    norm = _normed_by(layer.post_attention_layernorm)
    return AfterAttention(layer.self_attn.o_proj.weight, norm, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)


def _before(layer: "DrafterLayer") -> BeforeAttention:
    attn = layer.self_attn
    return BeforeAttention(
        _normed_by(layer.input_layernorm), attn.qkv_a_weight, _normed_by(attn.q_a_layernorm), attn.q_b_proj.weight
    )
