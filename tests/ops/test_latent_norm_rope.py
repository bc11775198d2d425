"""`latent_norm_rope` against float64."""

import pytest
import torch

from dspark_model.ops import latent_norm_rope
from dspark_model.testing import assert_bitwise_equal


def inputs(rows: tuple[int, ...], rank: int, rotary: int, dtype: torch.dtype):
    angles = torch.rand(*rows, rotary // 2) * 1000
    return (
        torch.randn(*rows, rank + rotary).to(dtype),
        (torch.rand(rank) + 0.5).to(dtype),
        torch.cat((angles.cos(), angles.sin()), dim=-1),
    )


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 4.1e-3)], ids=str)
@pytest.mark.parametrize(("rank", "rotary"), [(32, 16), (7, 2), (512, 64)])
@pytest.mark.parametrize("rows", [(1,), (5,), (2, 7), (0,)], ids=str)
def test_matches_float64(dtype, bound, rank, rotary, rows):
    kv, weight, cos_sin = inputs(rows, rank, rotary, dtype)
    ours = latent_norm_rope(kv, weight, 1e-5, cos_sin)
    assert (ours.dtype, ours.shape) == (dtype, kv.shape)
    for where in torch.cartesian_prod(*(torch.arange(size) for size in rows)).view(-1, len(rows)).tolist():
        row, table, got = kv[tuple(where)].double(), cos_sin[tuple(where)].double(), ours[tuple(where)].double()
        latent = row[:rank] * weight.double() / torch.sqrt((row[:rank] ** 2).mean() + 1e-5)
        torch.testing.assert_close(got[:rank], latent, rtol=bound, atol=1e-9)
        for i in range(rotary // 2):
            a, b, cos, sin = row[rank + 2 * i], row[rank + 2 * i + 1], table[i], table[rotary // 2 + i]
            pair = torch.stack((a * cos - b * sin, b * cos + a * sin))
            torch.testing.assert_close(got[rank + 2 * i : rank + 2 * i + 2], pair, rtol=bound, atol=bound * float(a.hypot(b)))


def test_the_rotary_values_are_not_normed_and_the_latent_not_rotated():
    kv, weight, cos_sin = inputs((3,), 8, 4, torch.float32)
    before = latent_norm_rope(kv, weight, 1e-5, cos_sin)
    scaled = kv.clone()
    scaled[:, :8] *= 4
    after = latent_norm_rope(scaled, weight, 1e-5, cos_sin)
    assert_bitwise_equal(after[:, 8:], before[:, 8:])
    other = latent_norm_rope(kv, weight, 1e-5, cos_sin.flip(0))
    assert_bitwise_equal(other[:, :8], before[:, :8])
    assert not torch.equal(other[:, 8:], before[:, 8:])


def test_rows_do_not_see_each_other():
    kv, weight, cos_sin = inputs((4,), 8, 4, torch.float32)
    before = latent_norm_rope(kv, weight, 1e-5, cos_sin)
    kv[[0, 3]] = float("nan")
    assert_bitwise_equal(latent_norm_rope(kv, weight, 1e-5, cos_sin)[1:3], before[1:3])
