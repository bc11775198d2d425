"""`before_attention`: the torch form is `low_m_linear`'s products in turn; the CuTe form keeps the bound of each of them."""

import pytest
import torch
from between_kit import K3, SMALL, UNEVEN, check_product, inputs, layers
from kernel_kit import watched_memory

from dspark_model.ops import BeforeAttention, BeforeOutput, BetweenWorkspace, before_attention, between_attentions
from dspark_model.testing import assert_bitwise_equal, poison_


def check(made: BeforeOutput, hidden, before: BeforeAttention) -> None:
    """Each product of what the product before left."""
    check_product("qkv_a", hidden, before.norm, before.qkv_a, None, None, made.qkv_a)
    check_product("q_b", made.qkv_a[:, : before.q_b.shape[1]], before.q_norm, before.q_b, None, None, made.queries)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reference_matches_float64(dtype):
    _, before = layers(SMALL, "cpu", dtype)
    hidden = inputs(SMALL, 5, "cpu", dtype)[1]
    check(before_attention(hidden, before), hidden, before)
    for given, message in (
        (hidden[0], r"before_attention wants hidden \[M, H\]"),
        (hidden[:, :64], "before_attention wants the next layer's norm"),
    ):
        with pytest.raises(ValueError, match=message):
            before_attention(given, before)
    with pytest.raises(ValueError, match="no backend numpy"):
        before_attention(hidden, before, backend="numpy")
    with pytest.raises(ValueError, match="needs a BetweenWorkspace on cpu, got none"):
        before_attention(hidden, before, backend="cute")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 16, 17, 32])
@pytest.mark.parametrize("sizes", [K3, SMALL, UNEVEN], ids=["k3", "small", "uneven"])
def test_products_keep_their_bound_and_their_bits(sizes, rows):
    """Between launches of the other forms, on one workspace."""
    after, before = layers(sizes, "cuda", torch.bfloat16)
    workspace, given = BetweenWorkspace(sizes, torch.device("cuda")), inputs(sizes, rows, "cuda", torch.bfloat16)
    poison_(workspace.squares)
    hidden = given[1]
    with watched_memory(hidden, before.qkv_a, before.q_b):
        first = before_attention(hidden, before, backend="cute", workspace=workspace)
    check(first, hidden, before)
    for following in (before, None, before):
        between_attentions(*given, after, following, backend="cute", workspace=workspace)
        again = before_attention(hidden, before, backend="cute", workspace=workspace)
        assert_bitwise_equal(again.qkv_a, first.qkv_a)
        assert_bitwise_equal(again.queries, first.queries)
    some = before_attention(hidden[:1].clone(), before, backend="cute", workspace=workspace)
    assert_bitwise_equal(some.queries, first.queries[:1])
