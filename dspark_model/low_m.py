"""`gemm=low_m`: the drafter's products of few rows by kernels that stream their weights, with what surrounds them fused in."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from dspark_model import ops
from dspark_model.ops import ChainWorkspace, LowMProduct, LowMWorkspace

if TYPE_CHECKING:
    from dspark_model.layers import MLAAttention
    from dspark_model.modeling import BlockContext, BlockPaths, DrafterLayer, MLADSparkForCausalLM

MAX_ROWS = 128
# With more rows torch's product of the head is faster: 78 us with 32 rows against 105 on an H200, 80 against 76 with 8.
MAX_HEAD_ROWS = 16


class LowMPath:
    """Products of at most 128 rows by `ops.low_m_linear`, and the Markov chain of a block in one launch.

    It owns what those kernels share on a device: a workspace for each of the two streams, and for each batch size one in which
    the programs of the chain meet.  It serves one step at a time.
    """

    def __init__(self, model: "MLADSparkForCausalLM"):
        self._vocab_size = model.config.vocab_size
        products = _products(model)
        self._main = LowMWorkspace.for_products(model.device, products)
        self._side = LowMWorkspace.for_products(model.device, products)
        self._chains: dict[tuple[int, int, bool], ChainWorkspace] = {}

    @staticmethod
    def takes(rows: int) -> bool:
        """Whether products of so many rows are made here; torch's own are for the others."""
        return rows <= MAX_ROWS

    @staticmethod
    def takes_head(rows: int) -> bool:
        """The same for the head's product."""
        return rows <= MAX_HEAD_ROWS

    def linear(self, x: torch.Tensor, weight: torch.Tensor, *, on_side: bool = False, **options) -> torch.Tensor:
        """`ops.low_m_linear` of x [..., K], a residual [..., N] among the options: [..., N].  on_side: with the workspace of
        what may run on the second stream."""
        if "residual" in options:
            options["residual"] = options["residual"].flatten(0, -2)
        workspace = self._side if on_side else self._main
        out = ops.low_m_linear(x.flatten(0, -2), weight, backend="triton", workspace=workspace, early=True, **options)
        return out.view(*x.shape[:-1], weight.shape[0])

    def context_kv(self, context: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Latent projections of all layers, weight [L * D, hidden], of context rows [M, hidden]: [M, L * D]."""
        return self.linear(context, weight, on_side=True)

    def stores_context(self, rows: int, block_rows: int, paths: "BlockPaths", layer_views: Sequence[torch.Tensor]) -> bool:
        """Whether `layers` of blocks of so many rows store the latents of so many context rows, `BlockContext.new_context`."""
        return False

    def chain_workspace(
        self, batch: int, drafts: int, markov_w2: torch.Tensor | None, *, sampled: bool
    ) -> ChainWorkspace | None:
        """Where the chain of such blocks meets, with temperatures or without; None for blocks that the fused chain does not
        take."""
        if ops.fused_chain_refusal(batch, drafts, self._vocab_size, markov_w2) is not None:
            return None
        key = (batch, drafts, sampled)
        if key not in self._chains:
            device = self._main.sums.device
            self._chains[key] = ChainWorkspace.for_tables(batch, drafts, self._vocab_size, markov_w2, device, sampled=sampled)
        return self._chains[key]

    def layers(self, layers: Sequence["DrafterLayer"], x: torch.Tensor, context: "BlockContext") -> torch.Tensor:
        """The layers over one block: [B, N, hidden] to [B, N, hidden]; writes the block's latents.

        Raises:
            ValueError: there is new context, which these layers do not store.
        """
        check_stored(context)
        for layer, view in zip(layers, context.layer_views, strict=True):
            x = self.layer(layer, x, view, context)
        return x

    def layer(self, layer: "DrafterLayer", x: torch.Tensor, layer_view: torch.Tensor, context: "BlockContext") -> torch.Tensor:
        """`DrafterLayer.forward` in as many launches as it has products, norms that are apart, and those of attention and the
        latents."""
        attn, mlp, norm = layer.self_attn, layer.mlp, layer.post_attention_layernorm
        queries = self.write_latents_and_query(layer, x, layer_view, context)
        values = layer.attend(queries, layer_view, context, attn.value_weights.transpose(1, 2))
        h = self.linear(values.flatten(-2), attn.o_proj.weight, residual=x)
        gated = self.linear(h, mlp.gate_proj.weight, up_weight=mlp.up_proj.weight, norm_weight=norm.weight, eps=norm.eps)
        return self.linear(gated, mlp.down_proj.weight, residual=h)

    def write_latents_and_query(
        self, layer: "DrafterLayer", x: torch.Tensor, layer_view: torch.Tensor, context: "BlockContext"
    ) -> torch.Tensor:
        """`DrafterLayer.write_latents_and_query` of rows x that are not normed yet."""
        attn = layer.self_attn
        norm = {"norm_weight": layer.input_layernorm.weight, "eps": layer.input_layernorm.eps}
        if context.paths.merged_qkv_a:
            qkv_a = self.linear(x, attn.qkv_a_weight, **norm)
            q_a, kv = qkv_a.split((attn.config.q_lora_rank, attn.config.latent_dim), -1)
            return layer.write_latents_beside(
                lambda: kv, lambda: self._queries(attn, q_a, context.cos_sin), layer_view, context
            )
        return layer.write_latents_beside(
            lambda: self.linear(x, attn.kv_a_proj_with_mqa.weight, on_side=True, **norm),
            lambda: self._queries(attn, self.linear(x, attn.q_a_proj.weight, **norm), context.cos_sin),
            layer_view,
            context,
        )

    def _queries(self, attn: "MLAAttention", q_a: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        """`MLAAttention.queries`."""
        norm = attn.q_a_layernorm
        return self.absorb(attn, self.linear(q_a, attn.q_b_proj.weight, norm_weight=norm.weight, eps=norm.eps), cos_sin)

    @staticmethod
    def absorb(attn: "MLAAttention", q: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        """Absorbed queries of q [B, N, heads * qk_head_dim], rows of `q_b_proj`: [B, N, heads, D]."""
        q = q.unflatten(-1, (attn.config.num_attention_heads, attn.config.qk_head_dim))
        return ops.absorb_queries(q, attn.key_weights, cos_sin, backend="triton")


def check_stored(context: "BlockContext") -> None:
    """Raises ValueError for new context, where the layers do not store it."""
    if context.new_context is not None:
        raise ValueError(
            f"{len(context.new_context.rows)} rows of context are left to layers that do not store them; store them before, or "
            "ask `stores_context`"
        )


def _products(model: "MLADSparkForCausalLM") -> list[LowMProduct]:
    """Every product of the path, with the most rows that it takes."""
    config, dtype = model.config, model.dtype
    hidden, heads = config.hidden_size, config.num_attention_heads
    sizes = [
        (config.q_lora_rank + config.latent_dim, hidden),
        (config.q_lora_rank, hidden),
        (config.latent_dim, hidden),
        (heads * config.qk_head_dim, config.q_lora_rank),
        (hidden, heads * config.v_head_dim),
        (hidden, config.intermediate_size),
        (config.num_hidden_layers * config.latent_dim, hidden),
        (hidden, config.context_width),
        (config.vocab_size, hidden),
    ]
    products = [LowMProduct(MAX_ROWS, out, inner, dtype) for out, inner in sizes]
    return [*products, LowMProduct(MAX_ROWS, config.intermediate_size, hidden, dtype, gate_up=True)]
