"""A second, independent computation of a drafter: float64, one request, no cache, keys and values expanded per head.

It shares no code with the package.  Facts come from the plain `config.json` dictionary in its usual spelling.
"""

import math
from dataclasses import dataclass

import torch


@dataclass
class DenseDraft:
    """context [n, H]; context_latents [L, n, D]; final_hidden [N, H]; base, biased [K, V]; tokens: K ids; confidence [K]."""

    context: torch.Tensor
    context_latents: torch.Tensor
    final_hidden: torch.Tensor
    base: torch.Tensor
    biased: torch.Tensor
    tokens: list[int]
    confidence: torch.Tensor | None


def norm(x, weight, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def inverse_frequencies(rope: dict, dim: int) -> list[float]:
    theta = rope["rope_theta"]
    plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    if rope.get("rope_type", "default") == "default":
        return plain

    def bound(turns):
        window = rope["original_max_position_embeddings"]
        return dim * math.log(window / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(bound(rope.get("beta_fast", 32))), 0)
    high = min(math.ceil(bound(rope.get("beta_slow", 1))), dim - 1)
    high = high + 0.001 if low == high else high
    kept = [1 - min(max((i - low) / (high - low), 0.0), 1.0) for i in range(dim // 2)]
    return [f / rope["factor"] * (1 - k) + f * k for f, k in zip(plain, kept, strict=True)]


def mscale(rope: dict, key: str, default: float) -> float:
    return 0.1 * rope.get(key, default) * math.log(rope.get("factor", 1.0)) + 1.0


def rotate(x, positions, rope, *, half_split):
    """x [n, ..., r] at integer positions [n]."""
    dim = x.shape[-1]
    ratio = mscale(rope, "mscale", 1.0) / mscale(rope, "mscale_all_dim", 0.0)
    if rope.get("rope_type", "default") == "default":
        ratio = 1.0
    angle = positions.double()[:, None] * torch.tensor(inverse_frequencies(rope, dim), dtype=torch.float64)
    angle = angle.reshape(len(positions), *[1] * (x.ndim - 2), dim // 2)
    cos, sin = angle.cos() * ratio, angle.sin() * ratio
    out = torch.empty_like(x)
    first, second = (slice(0, dim // 2), slice(dim // 2, None)) if half_split else (slice(0, None, 2), slice(1, None, 2))
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out


def dense_draft(
    config: dict,
    weights: dict[str, torch.Tensor],
    lm_head: torch.Tensor,
    target_hidden: torch.Tensor,
    anchor: int,
    num_drafts: int,
    *,
    embed_tokens: torch.Tensor | None = None,
    half_split: bool = False,
) -> DenseDraft:
    w = {name: tensor.double() for name, tensor in weights.items()}
    eps, rope = config["rms_norm_eps"], config["rope_parameters"]
    heads, nope, rank = config["num_attention_heads"], config["qk_nope_head_dim"], config["kv_lora_rank"]
    embed = w["embed_tokens.weight"] if embed_tokens is None else embed_tokens.double()
    taps = target_hidden.double().unflatten(1, (len(config["target_layer_ids"]), -1))
    if config.get("fc_norm"):
        taps = torch.stack([norm(taps[:, t], w[f"fc_norm.{t}.weight"], eps) for t in range(taps.shape[1])], dim=1)
    context = norm(taps.flatten(1) @ w["context_proj.weight"].T, w["context_norm.weight"], eps)
    shifted = config.get("sample_from_anchor", "dspark" in config["model_type"])
    rows = num_drafts + (0 if shifted else 1)
    mask = w["mask_embedding.weight"][0] if config.get("mask_embedding") else embed[config["mask_token_id"]]
    x = torch.stack([embed[anchor]] + [mask] * (rows - 1))
    n = len(context)
    where = torch.arange(n + rows)
    sees = torch.ones(rows, n + rows, dtype=torch.bool)
    if config.get("is_causal"):
        sees = where[None, :] <= where[n:, None]
    scale = 1.0 / math.sqrt(nope + config["qk_rope_head_dim"])
    if rope.get("rope_type", "default") == "yarn":
        scale *= mscale(rope, "mscale_all_dim", 0.0) ** 2
    latents = []
    for layer in range(config["num_hidden_layers"]):
        p = f"layers.{layer}."
        a = p + "self_attn."
        y = norm(x, w[p + "input_layernorm.weight"], eps)
        kv = torch.cat((context, y)) @ w[a + "kv_a_proj_with_mqa.weight"].T
        c = norm(kv[:, :rank], w[a + "kv_a_layernorm.weight"], eps)
        k_pe = rotate(kv[:, rank:], where, rope, half_split=half_split)
        latents.append(torch.cat((c, k_pe), dim=-1)[:n])
        expanded = (c @ w[a + "kv_b_proj.weight"].T).unflatten(-1, (heads, -1))
        keys, values = expanded[..., :nope], expanded[..., nope:]
        q = norm(y @ w[a + "q_a_proj.weight"].T, w[a + "q_a_layernorm.weight"], eps) @ w[a + "q_b_proj.weight"].T
        q = q.unflatten(-1, (heads, -1))
        q_pe = rotate(q[..., nope:], where[n:], rope, half_split=half_split)
        scores = torch.einsum("ihd,jhd->hij", q[..., :nope], keys) + torch.einsum("ihd,jd->hij", q_pe, k_pe)
        weight = (scores * scale).masked_fill(~sees, float("-inf")).softmax(-1)
        attended = torch.einsum("hij,jhd->ihd", weight, values).flatten(1)
        x = x + attended @ w[a + "o_proj.weight"].T
        z = norm(x, w[p + "post_attention_layernorm.weight"], eps)
        gate = z @ w[p + "mlp.gate_proj.weight"].T
        x = x + (gate / (1 + torch.exp(-gate)) * (z @ w[p + "mlp.up_proj.weight"].T)) @ w[p + "mlp.down_proj.weight"].T
    hidden = norm(x, w["final_norm.weight"], eps)
    used = hidden[:num_drafts] if shifted else hidden[1:]
    base = used @ lm_head.double()[: config["vocab_size"]].T
    biased, tokens, confidence = [], [], []
    previous = anchor
    for k in range(num_drafts):
        inputs = used[k]
        logits = base[k]
        if config.get("markov_rank"):
            row = w["markov_head.markov_w1.weight"][previous]
            logits = logits + w["markov_head.markov_w2.weight"] @ row
            if config.get("confidence_head_with_markov", True):
                inputs = torch.cat((inputs, row))
        if config.get("enable_confidence_head"):
            logit = w["confidence_head.proj.weight"][0] @ inputs + w["confidence_head.proj.bias"][0]
            confidence.append(1 / (1 + torch.exp(-logit)))
        biased.append(logits)
        previous = int(logits.argmax())
        tokens.append(previous)
    return DenseDraft(
        context,
        torch.stack(latents),
        hidden,
        base,
        torch.stack(biased),
        tokens,
        torch.stack(confidence) if confidence else None,
    )
