"""RMSNorm over the latent and RoPE over its rotary slice: what the pool stores of one row."""

import torch

from dspark_model.ops.rms_norm import rms_norm
from dspark_model.ops.rope_rotate import rope_rotate


def latent_norm_rope(kv: torch.Tensor, weight: torch.Tensor, eps: float, cos_sin: torch.Tensor) -> torch.Tensor:
    """[RMSNorm(kv[:C]) * weight | RoPE(kv[C:])], C = kv_lora_rank, both in float32 and rounded once.

    kv: [..., C + r], the output of `kv_a_proj_with_mqa`; weight: [C] of one `kv_a_layernorm`, or [..., C] of several, to
    broadcast; cos_sin: float32 [..., r], the table rows of the rows' absolute positions.  Returns [..., C + r] in kv's dtype.
    """
    latent, k_pe = kv.split((weight.shape[-1], kv.shape[-1] - weight.shape[-1]), dim=-1)
    return torch.cat((rms_norm(latent, weight, eps), rope_rotate(k_pe, cos_sin)), dim=-1)
