"""`fp32_linear` against float64."""

import pytest
import torch

from dspark_model.ops import fp32_linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "width", "vocab"), [(1, 1, 1), (7, 33, 65), (0, 8, 5), (3, 16, 8191), (3, 16, 8192), (3, 16, 16385)]
)
def test_matches_float64_without_a_rounding_of_the_result(dtype, rows, width, vocab):
    x, weight = torch.randn(rows, width).to(dtype), torch.randn(vocab, width).to(dtype)
    ours = fp32_linear(x, weight)
    assert (ours.dtype, ours.shape) == (torch.float32, (rows, vocab))
    exact = x.double() @ weight.double().T
    magnitude = x.double().abs() @ weight.double().abs().T
    # width additions of float32; a result rounded to bf16 or fp16 would be off by 2^-9 or 2^-12.
    assert ((ours.double() - exact).abs() <= 2.0**-23 * (width + 1) * magnitude).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logits_closer_than_a_low_precision_step_keep_their_order(dtype):
    """256 and 256.5 are one number in bf16; their order decides a drafted token."""
    weight = torch.tensor([[256.0, 0.0], [256.0, 0.03125]]).to(dtype)
    logits = fp32_linear(torch.tensor([[1.0, 1.0]]).to(dtype), weight)
    assert logits.tolist() == [[256.0, 256.03125]]
