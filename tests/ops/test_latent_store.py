"""`latent_store`: owned rows are written, and not one other byte, by the kernel as by the reference."""

from contextlib import nullcontext

import pytest
import torch
from kernel_kit import DEVICE, LAYOUTS, POOL_DTYPES, make_pool, random_bits, recorded_stores, watched_memory

from dspark_model.ops import PoolGeometry, dequantise_rows, latent_store, pool_row_width, quantise_rows
from dspark_model.ops.row_addresses import RowAddresses
from dspark_model.testing import assert_bitwise_equal, poison_

FP8 = torch.float8_e4m3fn


def addresses(batch: int, rows: int, pages: int, page_size: int, share: float = 0.5) -> RowAddresses:
    """Distinct places, a share of them owned; the others point at page 0, row 0."""
    places = torch.randperm(pages * page_size, device=DEVICE)[: batch * rows].view(batch, rows)
    owned = torch.rand(batch, rows, device=DEVICE) < share
    return RowAddresses(torch.where(owned, places // page_size, 0), torch.where(owned, places % page_size, 0), owned)


def tensors(where: RowAddresses) -> list[torch.Tensor]:
    return [where.pages, where.offsets, where.owned]


def check(storage: torch.Tensor, views, latents: torch.Tensor, where: RowAddresses, *, watched: bool = True) -> None:
    """Kernel first, then the reference on the same bytes, then a loop; all of the storage counts."""
    before = storage.clone()
    with watched_memory(latents, *tensors(where), writes=views) if watched else nullcontext():
        latent_store(views, latents, where, fused=True)
    fused = storage.clone()
    storage.copy_(before)
    latent_store(views, latents, where)
    assert_bitwise_equal(fused, storage, "kernel")
    reference = storage.clone()
    storage.copy_(before)
    for layer, view in enumerate(views):
        for b, n in where.owned.nonzero().tolist():
            view[int(where.pages[b, n]), int(where.offsets[b, n])] = latents[layer, b, n]
    assert_bitwise_equal(reference, storage, "reference")


@pytest.mark.parametrize("dtype", POOL_DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (3, 7), (0, 4), (2, 0)])
def test_owned_rows_and_nothing_else(dtype, layout, batch, rows):
    storage, views = make_pool(3, 6, 4, 5, layout, dtype)
    check(storage, views, random_bits(3, batch, rows, 5, dtype=dtype), addresses(batch, rows, 6, 4))


@pytest.mark.parametrize(
    ("layers", "pages", "page_size", "width"), [(1, 1, 1, 1), (1, 1, 16, 64), (2, 5, 20, 24), (3, 2, 32, 576)]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sizes_of_the_pool(layers, pages, page_size, width, layout):
    storage, views = make_pool(layers, pages, page_size, width, layout, torch.bfloat16)
    rows = min(4, pages * page_size)
    check(storage, views, random_bits(layers, 1, rows, width, dtype=torch.bfloat16), addresses(1, rows, pages, page_size, 0.9))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nan_of_rows_that_are_not_owned_stays_out(pool_dtype, fused):
    storage, views = make_pool(2, 6, 4, 5, "page_major", pool_dtype)
    storage.zero_()
    where = addresses(3, 7, 6, 4)
    latents = torch.randn(2, 3, 7, 5, device=DEVICE, dtype=pool_dtype if fused else torch.float32)
    latent_store(views, latents.masked_fill_(~where.owned[None, ..., None], float("nan")), where, fused=fused)
    assert not storage.isnan().any()


def test_the_reference_rounds_to_the_pools_dtype():
    storage, views = make_pool(1, 1, 2, 5, "layer_major", torch.bfloat16)
    latents, there = torch.randn(1, 1, 1, 5, device=DEVICE), torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    latent_store(views, latents, RowAddresses(there, there + 1, there == 0))
    assert_bitwise_equal(views[0][0, 1], latents[0, 0, 0].bfloat16())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [5, 48, 576])
def test_an_fp8_pool_gets_its_own_form_of_the_owned_rows(width, layout, dtype, fused):
    storage, views = make_pool(2, 6, 4, pool_row_width(width, FP8), layout, FP8)
    before, where = storage.clone(), addresses(3, 7, 6, 4)
    latents = random_latents(2, 3, 7, width).to(dtype)
    latents[0].masked_fill_(~where.owned[..., None], float("nan"))
    latent_store(views, quantise_rows(latents), where)
    wanted = storage.clone()
    storage.copy_(before)
    with watched_memory(latents, *tensors(where), writes=views):
        latent_store(views, latents, where, fused=fused)
    assert_bitwise_equal(storage, wanted)


@pytest.mark.parametrize("fused", [False, True])
def test_ties_between_two_values_of_an_fp8_pool_go_to_the_even_one(fused):
    """448 keeps the scale 1; between 16 and 18 to 16, 18 and 20 to 20; between 0, 2^-9 and 2^-8 to 0 and 2^-8."""
    _, views = make_pool(1, 1, 1, 32, "layer_major", FP8)
    there = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    latents = torch.tensor([448, 17, -19, 2.0**-10, -3 * 2.0**-10], device=DEVICE)
    latent_store(views, latents[None, None, None], RowAddresses(there, there, there == 0), fused=fused)
    assert dequantise_rows(views[0][0, 0], 5).tolist() == [448, 16, -20, 0, -(2.0**-8)]


def random_latents(*shape: int) -> torch.Tensor:
    """Rows of very different sizes, one of zeros and one that is not finite among them."""
    latents = torch.randn(shape, device=DEVICE) * torch.exp2(torch.randint(-9, 9, (*shape[:-1], 1), device=DEVICE).float())
    latents[-1, -1, 0] = 0
    latents[-1, -1, 1, -1] = float("inf")
    return latents


@pytest.mark.parametrize("fused", [False, True])
def test_an_fp8_pool_with_rows_of_another_width_is_refused(fused):
    _, views = make_pool(1, 6, 4, 64, "layer_major", FP8)
    with pytest.raises(ValueError, match="rows of 64 bytes, wanted 32 for latents of 5 values"):
        latent_store(views, torch.zeros(1, 1, 1, 5, device=DEVICE), addresses(1, 1, 6, 4, share=1), fused=fused)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("garbage", [0, 10**9])
def test_no_owned_row_leaves_the_pool_alone(garbage, fused):
    storage, views = make_pool(2, 6, 4, 5, "page_major", torch.float32)
    before = storage.clone()
    nothing = torch.zeros(2, 3, dtype=torch.int64, device=DEVICE)
    where = RowAddresses(nothing + (garbage if fused else 0), nothing, nothing.bool())
    latent_store(views, poison_(torch.empty(2, 2, 3, 5, device=DEVICE)), where, fused=fused)
    assert_bitwise_equal(storage, before)


def test_layers_in_reverse_order_and_in_memory_of_their_own():
    storage, views = make_pool(3, 6, 4, 5, "page_major", torch.float16)
    check(storage, views[::-1], random_bits(3, 2, 3, 5, dtype=torch.float16), addresses(2, 3, 6, 4))
    pools = [random_bits(6, 4, 5, dtype=torch.float16) for _ in range(2)]
    latents, where = random_bits(2, 2, 3, 5, dtype=torch.float16), addresses(2, 3, 6, 4)
    wanted = [pool.clone() for pool in pools]
    latent_store(pools, latents, where, fused=True)
    latent_store(wanted, latents, where)
    for pool, want in zip(pools, wanted, strict=True):
        assert_bitwise_equal(pool, want)


def test_rows_of_latents_and_places_with_gaps():
    storage, views = make_pool(2, 6, 4, 5, "layer_major", torch.float32)
    latents = random_bits(2, 4, 6, 9, dtype=torch.float32)[:, ::2, 1:4, 2:7]
    where = addresses(3, 2, 6, 4)
    turned = RowAddresses(*(tensor.T for tensor in tensors(where)))
    check(storage, views, latents, turned, watched=False)  # the kernel reads copies


@pytest.mark.skipif(DEVICE != "cpu", reason="reads the interpreter's addresses")
def test_distances_past_2_to_the_31_do_not_wrap():
    from dspark_kernels.triton.latent_store import latent_store_kernel

    pool, latents = torch.zeros(4, dtype=torch.int16), torch.zeros(2, 2, 4, dtype=torch.int16)
    pages, offsets = torch.tensor([3, 1]), torch.tensor([1, 2])
    strides = {"layer_stride": 2**40 + 8, "page_stride": 2**31 + 4, "row_stride": 2**33}
    with recorded_stores() as stores:
        latent_store_kernel[(2, 2)](
            pool,
            *strides.values(),
            latents,
            *latents.stride()[:2],
            pages,
            offsets,
            torch.ones(2, dtype=torch.uint8),
            WIDTH=4,
            WIDTH_LANES=4,
        )
    wanted = [
        pool.data_ptr() + 2 * (layer * (2**40 + 8) + page * (2**31 + 4) + offset * 2**33 + lane)
        for page, offset in ((3, 1), (1, 2))
        for layer in range(2)
        for lane in range(4)
    ]
    assert stores == wanted


@pytest.mark.parametrize("fused", [False, True])
def test_layers_must_match(fused):
    _, views = make_pool(2, 6, 4, 5, "layer_major", torch.float32)
    message = r"\(layers, D\) = \(3, 5\) in torch.float32.* wants \(2, 5\)" if fused else "zip"
    with pytest.raises(ValueError, match=message):
        latent_store(views, torch.zeros(3, 1, 1, 5, device=DEVICE), addresses(1, 1, 6, 4), fused=fused)


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its strides, which a plain copy to a device does not keep."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=DEVICE).copy_(tensor)


@pytest.mark.parametrize(
    "latents",
    [torch.zeros(2, 1, 1, 6), torch.zeros(2, 1, 1, 5).bfloat16(), torch.zeros(2, 1, 5, 2)[..., :1].mT],
    ids=["width", "dtype", "gaps"],
)
def test_latents_that_the_kernel_cannot_copy_are_refused(latents):
    storage, views = make_pool(2, 6, 4, 5, "layer_major", torch.float32)
    before = storage.clone()
    with pytest.raises(ValueError, match="latents have"):
        latent_store(views, on_device(latents), addresses(1, 1, 6, 4, share=1), fused=True)
    assert_bitwise_equal(storage, before)


def uneven_views(reason: str) -> list[torch.Tensor]:
    storage, memory = torch.zeros(4, 6, 4, 8), bytearray(4000)
    return {
        "differ in their strides or distances": [storage[0], storage[1], storage[3]],
        "differ in their strides": [storage[0], storage[1].transpose(0, 1).contiguous().transpose(0, 1)],
        "no multiple of 4": [
            torch.frombuffer(memory, dtype=torch.float32, count=192, offset=at).view(6, 4, 8) for at in (0, 802)
        ],
        "lie 2 apart, wanted side by side": [view[..., ::2] for view in storage],
    }[reason]


@pytest.mark.parametrize(
    "reason",
    ["differ in their strides or distances", "differ in their strides", "no multiple of 4", "lie 2 apart, wanted side by side"],
)
def test_views_without_one_geometry_are_refused(reason):
    views = uneven_views(reason)
    with pytest.raises(ValueError, match=reason):
        PoolGeometry.of(views)
    with pytest.raises(ValueError, match=reason):
        latent_store(views, torch.zeros(len(views), 1, 1, views[0].shape[2]), addresses(1, 1, 6, 4), fused=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_geometry_of_both_layouts(layout):
    _, views = make_pool(3, 6, 4, 5, layout, torch.bfloat16)
    wanted = PoolGeometry(7 * 20, 20, 5) if layout == "layer_major" else PoolGeometry(20, 4 * 20, 5)
    assert PoolGeometry.of(views) == wanted
    assert PoolGeometry.of(views[:1]) == PoolGeometry(0, wanted.page_stride, 5)
    assert PoolGeometry.of(views[::-1]).layer_stride == -wanted.layer_stride
