"""`pack_linears`: the linear layers of a model, made fast for a few rows on a CPU."""

import torch
from torch import nn

from dspark_model import ops


class PackedLinear(nn.Module):
    """An `nn.Linear` for inference that multiplies by a packed copy of its weight; `ops.packed_linear` says what that is.

    `weight` and `bias` stay the layer's own, under the same names, so that tied tables and saved checkpoints are as before.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.packed = ops.pack_weight(linear.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: float32 [..., in_features] to [..., out_features]."""
        return ops.packed_linear(x, self.packed, self.bias)


def pack_linears(model: nn.Module) -> int:
    """Replace the linear layers of `model` by `PackedLinear`, in place; returns how many were replaced.

    The weights of such a layer are held twice, may not change any more, and have no gradients.  Layers that
    `ops.can_pack` refuses (another device or dtype, no AVX2) stay as they are, and so do subclasses of `nn.Linear`.
    """
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and ops.can_pack(child.weight):
                setattr(parent, name, PackedLinear(child))
                count += 1
    return count
