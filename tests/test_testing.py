"""The test kit itself."""

import pytest
import torch

from dspark_model.testing import assert_bitwise_equal, poison_, random_model, random_tensors, tiny_config

NAN = float("nan")


@pytest.mark.parametrize("values", [torch.tensor([NAN, 1.0]), torch.zeros(0, 3), torch.tensor(2), torch.ones(2, 3).T], ids=str)
def test_equal_bits_pass(values):
    assert_bitwise_equal(values, values.clone())


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.zeros(2, 3), -torch.zeros(2, 3), r"t: 6 of 6 values differ, the first at \[0, 0\]: 0.0 and -0.0"),
        (torch.arange(6).view(2, 3), torch.tensor([[0, 1, 2], [3, 9, 9]]), r"t: 2 of 6 .* first at \[1, 1\]: 4 and 9"),
        (torch.tensor(1.0), torch.tensor(2.0), r"t: 1 of 1 values differ, the first at \[\]: 1.0 and 2.0"),
        (torch.zeros(2), torch.zeros(3), r"t: torch.float32 \[2\] is not torch.float32 \[3\]"),
        (torch.zeros(2), torch.zeros(2).bfloat16(), "t: torch.float32 .* is not torch.bfloat16"),
    ],
)
def test_other_bits_are_counted_and_located(a, b, message):
    with pytest.raises(AssertionError, match=message):
        assert_bitwise_equal(a, b, "t")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
def test_poison_is_nan_in_every_float_dtype_and_in_strided_views(dtype):
    whole = torch.zeros(4, 6).to(dtype)
    assert poison_(whole[:, 1:3]).float().isnan().all()
    assert whole[:, 3:].float().eq(0).all()
    assert poison_(torch.zeros(2, dtype=torch.int64)).tolist() == [-(2**63)] * 2


def test_random_weights_depend_on_the_seed_and_the_name_alone():
    small, large = random_tensors(tiny_config(markov_rank=0, confidence_head_with_markov=False)), random_tensors(tiny_config())
    for name in set(small) & set(large) - {"confidence_head.proj.weight"}:
        assert_bitwise_equal(small[name], large[name], name)
    other = random_tensors(tiny_config(), seed=1)
    assert not any(torch.equal(large[name], other[name]) for name in large)
    rounded = random_model(tiny_config(), dtype=torch.bfloat16).state_dict()
    for name, tensor in large.items():
        assert_bitwise_equal(rounded[name], tensor.bfloat16(), name)


def test_norm_weights_are_away_from_1():
    for name, tensor in random_tensors(tiny_config(fc_norm=True)).items():
        if "norm" in name:
            assert (tensor - 1).abs().mean() > 0.1, name
