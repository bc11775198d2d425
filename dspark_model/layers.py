"""Building blocks of a drafter layer: norm, gated MLP, MLA projections."""

import torch
from torch import nn

from dspark_model import ops
from dspark_model.config import DrafterConfig
from dspark_model.ops import RowAddresses


class RMSNorm(nn.Module):
    """`ops.rms_norm` with its weight."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, self.weight, self.eps)


class GatedMLP(nn.Module):
    """down(silu(gate(z)) * up(z)); the product is computed in float32 and rounded once."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(z), self.up_proj(z)
        product = nn.functional.silu(gate.float()) * up.float()
        return self.down_proj(product.to(z.dtype))


class MLAAttention(nn.Module):
    """The projections of multi-head latent attention, with W_UK absorbed into the query and W_UV applied after attention.

    Rows of the weights: `q_b_proj` per head nope then rope; `kv_a_proj_with_mqa` latent then k_pe; `kv_b_proj` per head
    key then value.
    """

    def __init__(self, config: DrafterConfig):
        super().__init__()
        heads, eps = config.num_attention_heads, config.rms_norm_eps
        self.config = config
        self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps)
        self.q_b_proj = nn.Linear(config.q_lora_rank, heads * config.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(config.hidden_size, config.latent_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, eps)
        kv_b_rows = heads * (config.qk_nope_head_dim + config.v_head_dim)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, kv_b_rows, bias=False)
        self.o_proj = nn.Linear(heads * config.v_head_dim, config.hidden_size, bias=False)
        self._qkv_a_weight: torch.Tensor | None = None

    @torch.no_grad()
    def merge_qkv_a(self) -> None:
        """Make `qkv_a` one product.  `q_a_proj.weight` becomes a view of the joined weight.  `kv_a_proj_with_mqa.weight` stays
        among those of all layers, which `ContextLatents` needs side by side, and is copied: after a change of it call this
        again."""
        q, kv = self.q_a_proj.weight.detach(), self.kv_a_proj_with_mqa.weight.detach()
        # So that ordinary weights stay ordinary tensors, wherever a worker is made, and inference tensors stay those.
        with torch.inference_mode(q.is_inference()):
            if self._qkv_a_weight is None or self._qkv_a_weight.data_ptr() != q.data_ptr():
                self._qkv_a_weight = torch.cat((q, kv))
                self.q_a_proj.weight.data = self._qkv_a_weight[: q.shape[0]]
            else:
                self._qkv_a_weight[q.shape[0] :] = kv

    def qkv_a(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`q_a_proj` and `kv_a_proj_with_mqa` of y [B, N, hidden] as one product, after `merge_qkv_a`: rows for `queries`
        [B, N, q_lora_rank] and for `latents` [B, N, D], which lie side by side.  Each value is the sum that its own layer
        would form, in the order of a wider product."""
        product = nn.functional.linear(y, self.qkv_a_weight)
        return product.split((self.config.q_lora_rank, self.config.latent_dim), dim=-1)

    def latents(self, kv: torch.Tensor, cos_sin: torch.Tensor, backend: str = "torch") -> torch.Tensor:
        """Pool rows of kv [B, N, D], rows of `kv_a_proj_with_mqa`, with cos_sin float32 [B, N, r]: [B, N, D]; backend: see
        `ops.latent_norm_rope`."""
        norm = self.kv_a_layernorm
        rows = ops.latent_norm_rope(
            kv.flatten(0, -2)[None], norm.weight[None], norm.eps, cos_sin.flatten(0, -2), backend=backend
        )
        return rows.view(kv.shape)

    def store_latents(
        self, kv: torch.Tensor, cos_sin: torch.Tensor, layer_view: torch.Tensor, where: RowAddresses, backend: str
    ) -> None:
        """`latents` of kv straight into the pool, see `ops.latent_norm_rope_store`."""
        rows, norm = kv.flatten(0, -2), self.kv_a_layernorm
        ops.latent_norm_rope_store(rows, norm.weight, norm.eps, cos_sin.flatten(0, -2), layer_view, where, backend=backend)

    def queries(self, q_a: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        """Absorbed queries of q_a [B, N, q_lora_rank], rows of `q_a_proj`, with cos_sin float32 [B, N, r]: [B, N, heads, D]."""
        config = self.config
        q = self.q_b_proj(self.q_a_layernorm(q_a))
        q = q.unflatten(-1, (config.num_attention_heads, config.qk_head_dim))
        return ops.absorb_queries(q, self.key_weights, cos_sin)

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        """W_UV and o_proj over attended latents [B, N, heads, kv_lora_rank]: [B, N, hidden]."""
        values = attended.new_empty((*attended.shape[:-1], self.config.v_head_dim))
        ops.per_head_product(attended, self.value_weights.transpose(1, 2), out=values)
        return self.o_proj(values.flatten(-2))

    @property
    def key_weights(self) -> torch.Tensor:
        """W_UK, a view of kv_b_proj: [heads, nope, kv_lora_rank]."""
        return self._kv_b_per_head[:, : self.config.qk_nope_head_dim]

    @property
    def value_weights(self) -> torch.Tensor:
        """W_UV, a view of kv_b_proj: [heads, v_head_dim, kv_lora_rank]."""
        return self._kv_b_per_head[:, self.config.qk_nope_head_dim :]

    @property
    def qkv_a_weight(self) -> torch.Tensor:
        """Rows of q_a_proj, then of kv_a_proj_with_mqa, after `merge_qkv_a`: [q_lora_rank + D, hidden]."""
        if self._qkv_a_weight is None:
            raise ValueError("the projections of queries and latents are not joined; call merge_qkv_a first")
        return self._qkv_a_weight

    @property
    def _kv_b_per_head(self) -> torch.Tensor:
        return self.kv_b_proj.weight.unflatten(0, (self.config.num_attention_heads, -1))
