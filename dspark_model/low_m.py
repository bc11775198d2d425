"""`gemm=low_m`: the drafter's products of few rows by kernels that stream their weights, with what surrounds them fused in."""

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from dspark_model import ops
from dspark_model.ops import ChainWorkspace, L2Pieces, LowMProduct, LowMWorkspace

if TYPE_CHECKING:
    from dspark_model.modeling import BlockContext, DrafterLayer, MLADSparkForCausalLM

MAX_ROWS = 128
# Of later weights, asked for while a product still runs: what L2 (50 MB on an H200) holds beside the current ones.
AHEAD_BYTES = 16 << 20
# A context that attention reads between two products, from which on it would displace what was asked for.
LONG_CONTEXT_BYTES = 16 << 20


class LowMPath:
    """Products of at most 128 rows by `ops.low_m_linear`, and the Markov chain of a block in one launch.

    It owns what those kernels share on a device: a workspace for each of the two streams, and for each batch size one in which
    the programs of the chain meet.  It serves one step at a time.
    """

    def __init__(self, model: "MLADSparkForCausalLM", context_weight: torch.Tensor):
        """context_weight: the latent projections of all layers as one matrix.  To be made after `merge_qkv_a`, if that is
        called: weights that have moved since are not asked for ahead."""
        self._vocab_size, self._bytes_per_row = model.config.vocab_size, model.config.latent_dim * model.dtype.itemsize
        products = _products(model)
        self._main = LowMWorkspace.for_products(model.device, products)
        self._side = LowMWorkspace.for_products(model.device, products)
        self._chains: dict[tuple[int, int], ChainWorkspace] = {}
        can_prefetch = model.device.type == "cuda" and torch.cuda.get_device_capability(model.device) >= (9, 0)
        self._ahead = {near: _pieces(model, context_weight, near) if can_prefetch else {} for near in (True, False)}

    @staticmethod
    def takes(rows: int) -> bool:
        """Whether products of so many rows are made here; torch's own are for the others."""
        return rows <= MAX_ROWS

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, *, on_side: bool = False, near: bool = True, **options
    ) -> torch.Tensor:
        """`ops.low_m_linear` of x [..., K], a residual [..., N] among the options: [..., N].  on_side: with the workspace of
        what may run on the second stream; near: attention reads a context that leaves later weights in L2."""
        if "residual" in options:
            options["residual"] = options["residual"].flatten(0, -2)
        workspace, pieces = self._side if on_side else self._main, self._ahead[near].get(_key(weight))
        out = ops.low_m_linear(x.flatten(0, -2), weight, backend="triton", workspace=workspace, pieces=pieces, **options)
        return out.view(*x.shape[:-1], weight.shape[0])

    def chain_workspace(self, batch: int, drafts: int, markov_w2: torch.Tensor | None) -> ChainWorkspace | None:
        """Where the chain of such blocks meets; None for blocks that the fused chain does not take."""
        if ops.fused_chain_refusal(batch, drafts, self._vocab_size, markov_w2) is not None:
            return None
        key = (batch, drafts)
        if key not in self._chains:
            device = self._main.sums.device
            self._chains[key] = ChainWorkspace.for_tables(batch, drafts, self._vocab_size, markov_w2, device)
        return self._chains[key]

    def layer(self, layer: "DrafterLayer", x: torch.Tensor, layer_view: torch.Tensor, context: "BlockContext") -> torch.Tensor:
        """`DrafterLayer.forward` in as many launches as it has products, and those of attention and the latents."""
        attn, mlp, norm = layer.self_attn, layer.mlp, layer.post_attention_layernorm
        attended = layer.attend(self.write_latents_and_query(layer, x, layer_view, context), layer_view, context)
        values = attended.new_empty((*attended.shape[:-1], attn.config.v_head_dim))
        ops.per_head_product(attended, attn.value_weights.transpose(1, 2), out=values, backend="triton")
        near = self._is_near(context)
        h = self.linear(values.flatten(-2), attn.o_proj.weight, near=near, residual=x)
        gated = self.linear(
            h, mlp.gate_proj.weight, near=near, up_weight=mlp.up_proj.weight, norm_weight=norm.weight, eps=norm.eps
        )
        return self.linear(gated, mlp.down_proj.weight, near=near, residual=h)

    def _is_near(self, context: "BlockContext") -> bool:
        rows = context.page_table.shape[0] * context.max_seq_len
        return rows * self._bytes_per_row <= LONG_CONTEXT_BYTES

    def write_latents_and_query(
        self, layer: "DrafterLayer", x: torch.Tensor, layer_view: torch.Tensor, context: "BlockContext"
    ) -> torch.Tensor:
        """`DrafterLayer.write_latents_and_query` of rows x that are not normed yet."""
        attn, paths = layer.self_attn, context.paths
        norm = {"norm_weight": layer.input_layernorm.weight, "eps": layer.input_layernorm.eps}
        near = self._is_near(context)
        q_a = kv = None
        if paths.merged_qkv_a:
            qkv = self.linear(x, attn.qkv_a_weight, near=near, **norm)
            q_a, kv = qkv.split((attn.config.q_lora_rank, attn.config.latent_dim), -1)
        with nullcontext() if paths.side is None else paths.side.fork():
            if kv is None:
                kv = self.linear(x, attn.kv_a_proj_with_mqa.weight, on_side=True, near=near, **norm)
            layer.write_latents(kv, layer_view, context)
        if q_a is None:
            q_a = self.linear(x, attn.q_a_proj.weight, near=near, **norm)
        q_norm = attn.q_a_layernorm
        q = self.linear(q_a, attn.q_b_proj.weight, near=near, norm_weight=q_norm.weight, eps=q_norm.eps)
        q = q.unflatten(-1, (attn.config.num_attention_heads, attn.config.qk_head_dim))
        queries = ops.absorb_queries(q, attn.key_weights, context.cos_sin, backend="triton")
        if paths.side is not None:
            paths.side.join()
        return queries


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


def _key(weight: torch.Tensor) -> tuple[int, int]:
    """A weight by its place: joined weights begin where the first of them does."""
    return weight.data_ptr(), weight.shape[0]


def _pieces(model: "MLADSparkForCausalLM", context_weight: torch.Tensor, near: bool) -> dict[tuple[int, int], L2Pieces]:
    """For each product of a step, by its weight, what it asks for ahead: the weights of the products behind it, and with `near`
    also of those behind attention."""
    stretches: list[list[list[torch.Tensor]]] = [[[model.context_proj.weight], [context_weight]]]
    for layer in model.layers:
        attn, mlp = layer.self_attn, layer.mlp
        joined = attn.joined_qkv_a
        first = [[attn.kv_a_proj_with_mqa.weight], [attn.q_a_proj.weight]] if joined is None else [[joined]]
        stretches[-1] += [*first, [attn.q_b_proj.weight]]
        if not near:
            stretches.append([])
        stretches[-1] += [[attn.o_proj.weight], [mlp.gate_proj.weight, mlp.up_proj.weight], [mlp.down_proj.weight]]
    stretches[-1].append([model.lm_head])
    return {
        _key(launch[0]): pieces
        for launches in stretches
        for launch, pieces in zip(launches, ops.l2_pieces_ahead(launches, AHEAD_BYTES), strict=True)
    }
