"""`rope_rotate` against complex multiplication in float64."""

import pytest
import torch

from dspark_model.ops import rope_rotate
from dspark_model.testing import assert_bitwise_equal


def tables(shape: tuple[int, ...]) -> torch.Tensor:
    angles = torch.rand(*shape[:-1], shape[-1] // 2) * 100
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def exact(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Each adjacent pair as a complex number times cos + i sin."""
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    half = cos_sin.shape[-1] // 2
    turn = torch.complex(cos_sin[..., :half].double(), cos_sin[..., half:].double())
    return torch.view_as_real(pairs * turn).flatten(-2)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 4e-7), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)], ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (5, 6), (3, 4, 64), (0, 8)], ids=str)
def test_matches_complex_multiplication(dtype, bound, shape):
    x, cos_sin = torch.randn(shape).to(dtype), tables(shape)
    ours = rope_rotate(x, cos_sin)
    wanted = exact(x, cos_sin) if x.numel() else x.double()
    assert (ours.dtype, ours.shape) == (dtype, x.shape)
    length = x.double().unflatten(-1, (-1, 2)).norm(dim=-1, keepdim=True).expand(*x.shape[:-1], -1, 2).flatten(-2)
    assert ((ours.double() - wanted).abs() <= bound * length).all()


def test_one_table_row_is_shared_by_all_heads():
    x, cos_sin = torch.randn(2, 3, 5, 8), tables((2, 3, 8))
    ours = rope_rotate(x, cos_sin[..., None, :])
    for head in range(5):
        assert_bitwise_equal(ours[:, :, head], rope_rotate(x[:, :, head], cos_sin))


def test_position_0_changes_nothing():
    x = torch.randn(3, 8)
    assert_bitwise_equal(rope_rotate(x, torch.cat((torch.ones(3, 4), torch.zeros(3, 4)), -1)), x)


def test_a_quarter_turn_moves_each_pair_onto_itself():
    """(a, b) becomes (-b, a), in place order."""
    quarter = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    assert rope_rotate(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), quarter).tolist() == [[-2.0, 1.0, -4.0, 3.0]]


def test_pairs_do_not_see_each_other():
    x, cos_sin = torch.randn(2, 8), tables((2, 8))
    before = rope_rotate(x, cos_sin)
    x[:, 4:6] = float("nan")
    after = rope_rotate(x, cos_sin)
    assert_bitwise_equal(after[:, :4], before[:, :4])
    assert_bitwise_equal(after[:, 6:], before[:, 6:])
