"""Latents of context rows in `before_attention`, and their products apart: the bits are the same."""

import dataclasses

import pytest
import torch
from between_kit import ABSORBING, check_product, context_of, inputs, into_attention, layers
from kernel_kit import watched_memory

from dspark_model.ops import (
    BetweenWorkspace,
    before_attention,
    between_attentions,
    context_kv,
    latent_norm_rope,
    latent_store,
)
from dspark_model.testing import assert_bitwise_equal


def check_pool(context, kv, sizes, backend: str) -> None:
    """The pool as norm, rotation and a store of their own would leave it."""
    apart = kv.unflatten(-1, (sizes.layers, -1)).transpose(0, 1)
    latents = latent_norm_rope(apart, context.norm.weight, context.norm.eps, context.cos_sin, backend=backend)
    wanted = torch.full_like(torch.stack(context.layer_views, 1), float("nan"))
    latent_store(wanted.unbind(1), latents[:, None], context.where)
    for own, other in zip(context.layer_views, wanted.unbind(1), strict=True):
        assert_bitwise_equal(own, other, "pool")
    assert not bool(torch.stack(context.layer_views).isnan().all())


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("sizes", ["small", "wide"])
def test_reference(sizes, rows):
    sizes = ABSORBING[sizes]
    before = into_attention(sizes, layers(sizes, "cpu", torch.float32)[1], 3)
    hidden, context = inputs(sizes, 3, "cpu", torch.float32)[1], context_of(sizes, rows, "cpu", torch.float32)
    made = before_attention(hidden, before, context=context)
    check_product("context", context.rows, None, context.weight, None, None, made.context_kv)
    assert_bitwise_equal(made.context_kv, context_kv(context.rows, context.weight))
    check_pool(context, made.context_kv, sizes, "torch")
    assert_bitwise_equal(made.absorbed, before_attention(hidden, before).absorbed)


def test_what_does_not_fit_is_refused():
    sizes = ABSORBING["wide"]
    plain = layers(sizes, "cpu", torch.float32)[1]
    before, context = into_attention(sizes, plain, 3), context_of(sizes, 4, "cpu", torch.float32)
    hidden, where = inputs(sizes, 3, "cpu", torch.float32)[1], context.where
    with pytest.raises(ValueError, match="with an absorption, and there is none"):
        before_attention(hidden, plain, context=context)
    for change, message in (
        ({"rows": context.rows[:, :64]}, r"wants rows \[4, 256\]"),
        ({"weight": context.weight[:-1]}, r"wants weight \[3456, 256\]"),
        ({"weight": context.weight.double()}, "float64"),
        ({"norm": dataclasses.replace(context.norm, weight=context.norm.weight[0])}, r"wants norm \[3, 1024\]"),
        ({"cos_sin": context.cos_sin[:3]}, r"wants cos_sin \[4, 128\]"),
        ({"layer_views": context.layer_views[:2]}, r"wants weight \[2304, 256\]"),
        ({"layer_views": [*context.layer_views[:2], context.layer_views[2][..., :64]]}, r"layer_views\[2\]"),
        ({"where": dataclasses.replace(where, owned=where.owned[:3])}, r"wants owned \[4\]"),
        ({"where": dataclasses.replace(where, offsets=where.offsets.int())}, "wants offsets .* got .*int32"),
    ):
        with pytest.raises(ValueError, match=message):
            before_attention(hidden, before, context=dataclasses.replace(context, **change))
    with pytest.raises(ValueError, match=r"wants rows \[M, H\] and weight"):
        context_kv(context.rows, context.weight[:, :64])
    with pytest.raises(ValueError, match="no backend numpy"):
        context_kv(context.rows, context.weight, backend="numpy")
    with pytest.raises(ValueError, match="needs a BetweenWorkspace on cpu, got none"):
        context_kv(context.rows, context.weight, backend="cute")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 13, 16, 29, 32])
@pytest.mark.parametrize("sizes", ABSORBING)
def test_the_launches_keep_bounds_and_bits(sizes, rows):
    """With blocks of other numbers of rows, early and not, between launches of other forms on one workspace."""
    sizes = ABSORBING[sizes]
    after, before = layers(sizes, "cuda", torch.bfloat16)
    workspace, options = BetweenWorkspace(sizes, torch.device("cuda")), {"backend": "cute"}
    options["workspace"] = workspace
    first = context_of(sizes, rows, "cuda", torch.bfloat16)
    alone = context_kv(first.rows, first.weight, **options)
    check_product("context", first.rows, None, first.weight, None, None, alone)
    for turn, block in enumerate((7, 1, 16, 28, 7, 32)):
        given, front = inputs(sizes, block, "cuda", torch.bfloat16), into_attention(sizes, before, block)
        fresh = context_of(sizes, rows, "cuda", torch.bfloat16)
        context = dataclasses.replace(fresh, rows=first.rows, weight=first.weight)
        plain = before_attention(given[1], front, **options)
        with watched_memory():
            made = before_attention(given[1], front, context=context, early=turn % 2 == 1, **options)
        assert_bitwise_equal(made.context_kv, alone)
        assert_bitwise_equal(context_kv(first.rows, first.weight, **options), alone)
        check_pool(context, alone, sizes, "cute")
        assert_bitwise_equal(made.absorbed, plain.absorbed)
        assert_bitwise_equal(made.qkv_a, plain.qkv_a)
        between_attentions(*given, after, front, **options)
    some = context_kv(first.rows[-1:].clone(), first.weight, **options)
    assert_bitwise_equal(some, alone[-1:])


@pytest.mark.gpu
def test_what_the_kernel_does_not_take_is_refused():
    sizes = ABSORBING["small"]
    workspace = BetweenWorkspace(sizes, torch.device("cuda"))
    before = into_attention(sizes, layers(sizes, "cuda", torch.bfloat16)[1], 3)
    hidden, context = inputs(sizes, 3, "cuda", torch.bfloat16)[1], context_of(sizes, 33, "cuda", torch.bfloat16)
    with pytest.raises(ValueError, match="1 to 32 rows, got 33"):
        before_attention(hidden, before, backend="cute", workspace=workspace, context=context)
    with pytest.raises(ValueError, match="1 to 32 rows, got 33"):
        context_kv(context.rows, context.weight, backend="cute", workspace=workspace)
    context = context_of(sizes, 5, "cuda", torch.bfloat16)
    with pytest.raises(ValueError, match="make one with its layers"):
        context_kv(context.rows, context.weight[:64], backend="cute", workspace=workspace)
    shifted = torch.zeros(7, 16, 193, dtype=torch.bfloat16, device="cuda")[..., :192]
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        before_attention(
            hidden, before, backend="cute", workspace=workspace, context=dataclasses.replace(context, layer_views=(shifted,))
        )
