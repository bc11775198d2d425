"""A dense drafter in float64 to hold the worker against."""

import math

import torch


class DenseDrafter:
    """The drafter in float64 from its weights alone: dense attention, keys and values per head, no cache.

    Written from the published definition of the model, for one request at a time, and without any part of the package.
    """

    def __init__(self, model: torch.nn.Module):
        self.weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
        self.head = model.lm_head.double()
        self.c = model.config
        self.layers = range(self.c.num_hidden_layers)

    def context(self, taps: torch.Tensor) -> torch.Tensor:
        """Taps [n, T * E] to context rows [n, H]."""
        taps = taps.double()
        if self.c.fc_norm:
            parts = taps.chunk(len(self.c.target_layer_ids), -1)
            taps = torch.cat([self._norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], -1)
        return self._norm(taps @ self.weights["context_proj.weight"].T, "context_norm")

    def latents(self, x: torch.Tensor, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """What a pool keeps of rows x: [..., C + r]."""
        rows = x @ self._w(layer, "self_attn.kv_a_proj_with_mqa").T
        c, k_pe = rows[..., : self.c.kv_lora_rank], rows[..., self.c.kv_lora_rank :]
        return torch.cat((self._norm(c, f"layers.{layer}.self_attn.kv_a_layernorm"), self._rotate(k_pe, positions)), -1)

    def context_latents(self, taps: torch.Tensor) -> torch.Tensor:
        """[L, n, C + r] of a whole context that starts at position 0."""
        context, positions = self.context(taps), torch.arange(taps.shape[0])
        return torch.stack([self.latents(context, layer, positions) for layer in self.layers])

    def draft(self, taps: torch.Tensor, anchor: int, num_drafts: int, forced: list[int] | None = None) -> dict:
        """One block behind a context of n rows; `forced` replaces the greedy chain's tokens.

        Returns tokens [K], base and biased logits [K, V], margins [K], confidence [K] (or None), latents [L, N, C + r].
        """
        shifted = self.c.sample_from_anchor
        rows = num_drafts if shifted else num_drafts + 1
        embed = self.weights["embed_tokens.weight"]
        x = embed[torch.tensor([anchor] + [self.c.mask_token_id] * (rows - 1))]
        positions = taps.shape[0] + torch.arange(rows)
        past, latents = self.context_latents(taps), []
        for layer in self.layers:
            y = self._norm(x, f"layers.{layer}.input_layernorm")
            own = self.latents(y, layer, positions)
            h = x + self._attention(layer, y, torch.cat((past[layer], own)), positions)
            z = self._norm(h, f"layers.{layer}.post_attention_layernorm")
            gate, up = z @ self._w(layer, "mlp.gate_proj").T, z @ self._w(layer, "mlp.up_proj").T
            x = h + (gate * torch.sigmoid(gate) * up) @ self._w(layer, "mlp.down_proj").T
            latents.append(own)
        hidden = self._norm(x, "final_norm")[0 if shifted else 1 :]
        return self._chain(hidden, anchor, forced) | {"latents": torch.stack(latents)}

    def _chain(self, hidden: torch.Tensor, anchor: int, forced: list[int] | None) -> dict:
        base, previous, tokens, biased, confidence = hidden @ self.head.T, anchor, [], [], []
        for k in range(hidden.shape[0]):
            row, inputs = base[k], hidden[k]
            if self.c.markov_rank:
                w1 = self.weights["markov_head.markov_w1.weight"][previous]
                row = row + self.weights["markov_head.markov_w2.weight"] @ w1
                inputs = torch.cat((inputs, w1)) if self.c.confidence_head_with_markov else inputs
            if self.c.enable_confidence_head:
                logit = self.weights["confidence_head.proj.weight"][0] @ inputs + self.weights["confidence_head.proj.bias"][0]
                confidence.append(torch.sigmoid(logit))
            previous = int(row.argmax()) if forced is None else forced[k]
            tokens.append(previous)
            biased.append(row)
        top = torch.stack(biased).topk(2, -1).values
        return {
            "tokens": tokens,
            "base": base,
            "biased": torch.stack(biased),
            "margins": (top[:, 0] - top[:, 1]).tolist(),
            "confidence": torch.stack(confidence) if confidence else None,
        }

    def _attention(self, layer: int, y: torch.Tensor, latents: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        c, heads = self.c, self.c.num_attention_heads
        nope, rope, value = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
        q = self._norm(y @ self._w(layer, "self_attn.q_a_proj").T, f"layers.{layer}.self_attn.q_a_layernorm")
        q = (q @ self._w(layer, "self_attn.q_b_proj").T).reshape(-1, heads, nope + rope).transpose(0, 1)
        q = torch.cat((q[..., :nope], self._rotate(q[..., nope:], positions)), -1)
        kv = (latents[:, : c.kv_lora_rank] @ self._w(layer, "self_attn.kv_b_proj").T).reshape(-1, heads, nope + value)
        kv = kv.transpose(0, 1)
        k = torch.cat((kv[..., :nope], latents[None, :, c.kv_lora_rank :].expand(heads, -1, -1)), -1)
        m = 1.0
        if c.rope.rope_type == "yarn":
            m = 0.1 * c.rope.mscale_all_dim * math.log(c.rope.factor) + 1.0
        scores = q @ k.transpose(1, 2) * (m * m / math.sqrt(nope + rope))
        if c.is_causal:
            hidden = torch.arange(k.shape[1])[None] > positions[:, None]
            scores = scores.masked_fill(hidden, float("-inf"))
        out = torch.softmax(scores, -1) @ kv[..., nope:]
        return out.transpose(0, 1).flatten(1) @ self._w(layer, "self_attn.o_proj").T

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        frequencies, multiplier = self._frequencies()
        angles = positions.double()[:, None] * frequencies
        cos, sin = angles.cos() * multiplier, angles.sin() * multiplier
        out = torch.empty_like(x)
        out[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
        out[..., 1::2] = x[..., 1::2] * cos + x[..., 0::2] * sin
        return out

    def _frequencies(self) -> tuple[torch.Tensor, float]:
        rope, dim = self.c.rope, self.c.qk_rope_head_dim
        plain = torch.tensor([rope.theta ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)
        if rope.rope_type != "yarn":
            return plain, 1.0

        def bound(beta: float) -> float:
            return dim * math.log(rope.original_max_position_embeddings / (2 * math.pi * beta)) / (2 * math.log(rope.theta))

        low, high = max(math.floor(bound(rope.beta_fast)), 0), min(math.ceil(bound(rope.beta_slow)), dim - 1)
        ramp = torch.tensor([min(max((i - low) / (high - low), 0.0), 1.0) for i in range(dim // 2)], dtype=torch.float64)

        def attention_factor(scale: float) -> float:
            return 0.1 * scale * math.log(rope.factor) + 1.0

        multiplier = attention_factor(rope.mscale) / attention_factor(rope.mscale_all_dim)
        return plain * (1 - ramp + ramp / rope.factor), multiplier

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.c.rms_norm_eps) * self.weights[name + ".weight"]

    def _w(self, layer: int, name: str) -> torch.Tensor:
        return self.weights[f"layers.{layer}.{name}.weight"]
