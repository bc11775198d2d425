"""Pool rows of context rows, for all layers in one product."""

from collections.abc import Sequence

import torch
from torch import nn

from dspark_model import ops
from dspark_model.low_m import LowMPath
from dspark_model.modeling import MLADSparkForCausalLM
from dspark_model.packing import PackedLinear


class ContextLatents:
    """The latent projections of every layer as one matrix: a context row is the same for all layers, so their products with it
    are one product, and norm and rotation of all layers one op.

    The layers' own `kv_a_proj_with_mqa` and `kv_a_layernorm` weights become views of the joined ones, so that they are held
    once, and a change of the one changes the other.
    """

    def __init__(self, model: MLADSparkForCausalLM):
        attentions = [layer.self_attn for layer in model.layers]
        self._num_layers, self._eps = len(attentions), model.config.rms_norm_eps
        with torch.no_grad():
            joined = _join([attention.kv_a_proj_with_mqa.weight for attention in attentions]).flatten(0, 1)
            self._norm_weight = _join([attention.kv_a_layernorm.weight for attention in attentions])
        packed = isinstance(attentions[0].kv_a_proj_with_mqa, PackedLinear)
        self._weight = ops.pack_weight(joined) if packed else joined

    def __call__(
        self, context: torch.Tensor, cos_sin: torch.Tensor, backend: str = "torch", low_m: LowMPath | None = None
    ) -> torch.Tensor:
        """context [M, hidden] and cos_sin float32 [M, r] to [L, M, D]; backend: see `ops.latent_norm_rope`; low_m: see
        `BlockPaths`.  There is no input_layernorm on this path."""
        if low_m is not None and low_m.takes(context.shape[0]):
            kv = low_m.context_kv(context, self._weight)
        else:
            kv = (ops.packed_linear if self._weight.is_mkldnn else nn.functional.linear)(context, self._weight)
        kv = kv.unflatten(-1, (self._num_layers, -1)).transpose(0, 1)
        return ops.latent_norm_rope(kv, self._norm_weight, self._eps, cos_sin, backend=backend)

    def into(
        self, context: torch.Tensor, cos_sin: torch.Tensor, layer_views: Sequence[torch.Tensor], where: ops.RowAddresses
    ) -> ops.ContextInto:
        """The same rows, for a launch that makes their latents and stores them to the pool's layers."""
        norm = ops.NormedBy(self._norm_weight, self._eps)
        return ops.ContextInto(context, self._weight, norm, cos_sin, layer_views, where)


def _join(weights: list[nn.Parameter]) -> torch.Tensor:
    """The weights as one tensor [L, ...] of which they are views, made so now unless they are already."""
    first, size = weights[0], weights[0].numel()
    storage, start = first.untyped_storage().data_ptr(), first.storage_offset()
    places = [(w.untyped_storage().data_ptr(), w.storage_offset()) for w in weights]
    if places == [(storage, start + index * size) for index in range(len(weights))]:
        return first.detach().as_strided((len(weights), *first.shape), (size, *first.stride()))
    # Ordinary weights stay ordinary tensors, wherever a worker is made, and inference tensors stay those.
    with torch.inference_mode(first.is_inference()):
        joined = torch.stack([weight.detach() for weight in weights])
        for weight, own in zip(weights, joined, strict=True):
            weight.data = own
    return joined
