"""Linear map with a weight that lies in oneDNN's blocks: the fast product for the few rows of a decoding pass on a CPU."""

import torch

# Rows that oneDNN is told to expect; the blocks that it chooses for 8 serve every count. On two AVX2 cores [49152, 576] takes
# 4.0 ms for 1 row and 7.0 ms for 8, against 9.1 and 19.7 ms with the plain weight; told 1 row it keeps the plain layout (4.3
# and 10.6 ms).
_EXPECTED_ROWS = 8


def can_pack(weight: torch.Tensor) -> bool:
    """Whether `pack_weight` takes a weight: a float32 matrix with values on an x86 CPU with AVX2 or better, which is where
    the product has been measured, and a torch that has oneDNN."""
    fits = weight.device.type == "cpu" and weight.dtype is torch.float32 and weight.ndim == 2 and weight.numel() > 0
    vectors = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    return fits and vectors and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """A copy of weight [N, K] in oneDNN's blocks: an opaque tensor (`is_mkldnn`) of the same shape, for `packed_linear` and
    `fp32_linear`.  Later changes of `weight` do not reach it.

    Raises:
        ValueError: `can_pack` refuses the weight.
    """
    if not can_pack(weight):
        raise ValueError(
            f"a {weight.dtype} weight {list(weight.shape)} on {weight.device} cannot be packed; wanted a float32 matrix on an "
            "x86 CPU with AVX2, and a torch with oneDNN"
        )
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _EXPECTED_ROWS)


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias in float32, without gradients.

    x: float32 [..., K] on the CPU, any strides; packed: `pack_weight` of weight [N, K]; bias: float32 [N].
    Returns [..., N].
    """
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
