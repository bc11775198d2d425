"""`latent_norm_rope` against float64; its form that stores into the pool against the plain one."""

import importlib.util

import pytest
import torch
from kernel_kit import recorded_stores

from dspark_model.ops import (
    RowAddresses,
    dequantise_rows,
    latent_norm_rope,
    latent_norm_rope_store,
    latent_store,
    pool_row_width,
)
from dspark_model.testing import assert_bitwise_equal, poison_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter does not round to bf16 as torch does, so there float32 alone is held to a bound.
DTYPES = [(torch.float32, 1e-6), (torch.bfloat16, 4.1e-3)]
BACKENDS = [("torch", *DTYPES[0]), ("torch", *DTYPES[1]), ("triton", *DTYPES[0])]
BACKENDS += [("triton", *DTYPES[1])] if DEVICE == "cuda" else []
FP8 = torch.float8_e4m3fn
KERNELS = ["triton"]
if DEVICE == "cuda" and importlib.util.find_spec("cutlass"):
    BACKENDS += [("cute", *DTYPES[0]), ("cute", *DTYPES[1])]
    KERNELS += ["cute"]


def inputs(layers: int, rows: int, rank: int, rotary: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Products of all layers side by side, as one joined product leaves them; weights; rotations."""
    angles = torch.rand(rows, rotary // 2) * 1000
    kv = torch.randn(rows, layers * (rank + rotary)).to(dtype).unflatten(-1, (layers, -1)).transpose(0, 1)
    weight = (torch.rand(layers, rank) + 0.5).to(dtype)
    return kv.to(DEVICE), weight.to(DEVICE), torch.cat((angles.cos(), angles.sin()), dim=-1).to(DEVICE)


@pytest.mark.parametrize(("backend", "dtype", "bound"), BACKENDS, ids=str)
@pytest.mark.parametrize(("rank", "rotary"), [(32, 16), (7, 2), (512, 64)])
@pytest.mark.parametrize(("layers", "rows"), [(1, 1), (1, 5), (3, 7), (2, 0)])
def test_matches_float64(backend, dtype, bound, rank, rotary, layers, rows):
    kv, weight, cos_sin = inputs(layers, rows, rank, rotary, dtype)
    ours = latent_norm_rope(kv, weight, 1e-5, cos_sin, backend=backend)
    assert (ours.dtype, ours.shape) == (dtype, kv.shape) and ours.is_contiguous()
    wide, table = kv.double(), cos_sin.double()
    for layer in range(layers):
        for row in range(rows):
            own, got = wide[layer, row], ours[layer, row].double()
            latent = own[:rank] * weight[layer].double() / torch.sqrt((own[:rank] ** 2).mean() + 1e-5)
            torch.testing.assert_close(got[:rank], latent, rtol=bound, atol=1e-9)
            for i in range(rotary // 2):
                a, b, cos, sin = own[rank + 2 * i], own[rank + 2 * i + 1], table[row, i], table[row, rotary // 2 + i]
                pair = torch.stack((a * cos - b * sin, b * cos + a * sin))
                atol = bound * float(a.hypot(b))
                torch.testing.assert_close(got[rank + 2 * i : rank + 2 * i + 2], pair, rtol=bound, atol=atol)


@pytest.mark.parametrize("backend", ["torch", *KERNELS])
def test_the_rotary_values_are_not_normed_and_the_latent_not_rotated(backend):
    kv, weight, cos_sin = inputs(1, 3, 8, 4, torch.float32)
    before = latent_norm_rope(kv, weight, 1e-5, cos_sin, backend=backend)
    scaled = kv.clone()
    scaled[..., :8] *= 4
    after = latent_norm_rope(scaled, weight, 1e-5, cos_sin, backend=backend)
    assert_bitwise_equal(after[..., 8:], before[..., 8:])
    other = latent_norm_rope(kv, weight, 1e-5, cos_sin.flip(0).contiguous(), backend=backend)
    assert_bitwise_equal(other[..., :8], before[..., :8])
    assert not torch.equal(other[..., 8:], before[..., 8:])


@pytest.mark.parametrize("backend", ["torch", *KERNELS])
def test_rows_and_layers_do_not_see_each_other(backend):
    kv, weight, cos_sin = inputs(3, 4, 8, 4, torch.float32)
    before = latent_norm_rope(kv, weight, 1e-5, cos_sin, backend=backend)
    kv[:, [0, 3]] = float("nan")
    kv[2] = float("nan")
    weight[2] = float("nan")
    after = latent_norm_rope(kv, weight, 1e-5, cos_sin, backend=backend)
    assert_bitwise_equal(after[:2, 1:3], before[:2, 1:3])


@pytest.mark.parametrize("layout", ["layer_major", "page_major"])
@pytest.mark.parametrize("order", ["in_order", "reversed", "scattered"])
@pytest.mark.parametrize(("rank", "rotary"), [(32, 16), (7, 2), (512, 64)])
@pytest.mark.parametrize("batch", [1, 4, 9])
@pytest.mark.parametrize("backend", KERNELS)
def test_the_direct_store_is_the_plain_kernel_and_a_store_behind_it(backend, batch, rank, rotary, order, layout):
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    rows, page_size = 7, 5
    kv, weight, cos_sin = inputs(1, batch * rows, rank, rotary, dtype)
    pages = torch.arange(2 * batch)
    pages = {"in_order": pages, "reversed": pages.flip(0), "scattered": torch.randperm(2 * batch)}[order].view(batch, 2)
    index = torch.arange(rows) + 2
    owned = torch.rand(batch, rows) > 0.2
    where = RowAddresses(
        torch.where(owned, pages[:, index // page_size], 0).to(DEVICE),
        torch.where(owned, (index % page_size).expand(batch, -1), 0).to(DEVICE),
        owned.to(DEVICE),
    )
    shape = (2, 2 * batch, page_size, rank + rotary) if layout == "layer_major" else (2 * batch, 2, page_size, rank + rotary)
    staged = poison_(torch.empty(shape, dtype=dtype, device=DEVICE))
    direct = staged.clone()
    kv[:, ~owned.flatten().to(DEVICE)] = float("nan")
    view, other = (pool.unbind(0 if layout == "layer_major" else 1)[1] for pool in (staged, direct))
    plain = latent_norm_rope(kv, weight, 1e-5, cos_sin, backend=backend)
    latent_store((view,), plain.view(1, batch, rows, -1), where)
    latent_norm_rope_store(kv[0], weight[0], 1e-5, cos_sin, other, where, backend=backend)
    assert_bitwise_equal(direct, staged)
    assert int(direct.isnan().sum()) == direct.numel() - int(owned.sum()) * (rank + rotary)


@pytest.mark.parametrize(("rank", "rotary"), [(32, 16), (7, 2), (512, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_direct_store_into_an_fp8_pool_is_the_plain_kernel_and_a_store_behind_it(dtype, rank, rotary):
    kv, weight, cos_sin = inputs(1, 12, rank, rotary, dtype)
    # Rows of which either part has the largest value.
    kv[:, ::2, rank:] *= 9
    kv[:, 5] = float("nan")
    places = torch.randperm(15, device=DEVICE)[:12].view(3, 4)
    where = RowAddresses(places // 5, places % 5, (torch.arange(12, device=DEVICE) != 5).view(3, 4))
    staged, direct = poison_(torch.empty(2, 3, 5, pool_row_width(rank + rotary, FP8), dtype=FP8, device=DEVICE)).unbind(0)
    plain = latent_norm_rope(kv, weight, 1e-5, cos_sin, backend="triton")
    latent_store((staged,), plain.view(1, 3, 4, -1), where)
    latent_norm_rope_store(kv[0], weight[0], 1e-5, cos_sin, direct, where, backend="triton")
    assert_bitwise_equal(direct, staged)
    rows = dequantise_rows(direct[where.pages, where.offsets], rank + rotary)[where.owned]
    wanted = plain.view(3, 4, -1)[where.owned].float()
    assert ((rows - wanted).norm(dim=-1) <= wanted.norm(dim=-1) / 16).all()


def test_cute_has_no_form_for_an_fp8_pool():
    kv, weight, cos_sin = inputs(1, 1, 8, 4, torch.bfloat16)
    view, place = torch.zeros(1, 1, 32, dtype=FP8, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="latent_norm_rope=cute has no form that stores into an fp8 pool; choose triton"):
        latent_norm_rope_store(kv[0], weight[0], 1e-5, cos_sin, view, RowAddresses(place, place, place == 0), backend="cute")


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["layer_major", "page_major"])
@pytest.mark.parametrize("backend", KERNELS)
def test_the_last_page_of_a_pool_of_more_than_2_to_the_31_values(backend, layout):
    """Of a bf16 pool of 4.5 GB, in a zone of zeros: a wrapped offset would miss the page, and the pool's other values count."""
    rank, rotary, page_size, layers = 512, 64, 32, 1 if layout == "layer_major" else 2
    width = rank + rotary
    pages = 2**31 // (layers * page_size * width) + 5000
    pool = torch.zeros(pages, layers, page_size, width, dtype=torch.bfloat16, device=DEVICE)
    view = pool[:, layers - 1]
    assert (pages - 1) * view.stride(0) > 2**31
    rows = 7
    kv, weight, cos_sin = inputs(1, rows, rank, rotary, torch.bfloat16)
    index = torch.arange(rows, device=DEVICE)
    where = RowAddresses(torch.full_like(index, pages - 1), page_size - 1 - index, index != 2)
    plain = latent_norm_rope(kv, weight, 1e-5, cos_sin, backend=backend)[0]
    latent_norm_rope_store(kv[0], weight[0], 1e-5, cos_sin, view, where, backend=backend)
    wanted = torch.zeros_like(view[-1])
    wanted[page_size - 1 - index[where.owned]] = plain[where.owned]
    assert_bitwise_equal(view[-1], wanted)
    view[-1] = 0
    assert not bool(pool.any()), "a value outside the last page was written"


@pytest.mark.skipif(DEVICE != "cpu", reason="reads the interpreter's addresses")
def test_distances_past_2_to_the_31_do_not_wrap():
    from dspark_kernels.triton.latent_norm_rope import latent_norm_rope_kernel

    kv, weight, cos_sin = inputs(2, 2, 4, 2, torch.float32)
    kv, out, uses = kv.contiguous(), torch.zeros(12), torch.ones(2, dtype=torch.uint8)
    pages, offsets = torch.tensor([3, 2**20 + 1]), torch.tensor([1, 2])
    layer_stride, page_stride, row_stride = 2**40 + 8, 2**31 + 4, 2**33
    sizes = {"LATENT": 4, "LATENT_LANES": 4, "PAIRS": 1, "PAIR_LANES": 1, "POOL": True}
    with recorded_stores() as stores:
        latent_norm_rope_kernel[(2, 2)](
            kv,
            *kv.stride()[:2],
            weight,
            cos_sin,
            out,
            layer_stride,
            page_stride,
            row_stride,
            pages,
            offsets,
            uses,
            1e-5,
            **sizes,
        )
    wanted = {
        out.data_ptr() + 4 * (layer * layer_stride + page * page_stride + offset * row_stride + value)
        for page, offset in zip(pages.tolist(), offsets.tolist(), strict=True)
        for layer in range(2)
        for value in range(6)
    }
    assert len(stores) == len(wanted) == 24
    assert set(stores) == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shift", [1, 2, 4])
def test_rows_at_odd_addresses_give_the_same_bits(dtype, shift):
    pytest.importorskip("cutlass")
    kv, weight, cos_sin = inputs(2, 9, 512, 64, dtype)
    shifted = poison_(kv.new_empty(2, 9, 576 + 8))[..., shift : shift + 576]
    shifted.copy_(kv)
    even, odd = (latent_norm_rope(rows, weight, 1e-5, cos_sin, backend="cute") for rows in (kv, shifted))
    assert_bitwise_equal(odd, even)


def test_cute_refuses_rows_that_are_not_on_a_device():
    kv, weight, cos_sin = (tensor.cpu() for tensor in inputs(1, 2, 8, 4, torch.float32))
    with pytest.raises(ValueError, match="latent_norm_rope=cute runs on CUDA devices, got rows on cpu"):
        latent_norm_rope(kv, weight, 1e-5, cos_sin, backend="cute")


def test_a_store_that_no_kernel_makes_is_refused():
    kv, weight, cos_sin = inputs(1, 2, 8, 4, torch.float32)
    zero = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    where = RowAddresses(zero, zero, zero.bool())
    view = torch.zeros(1, 4, 12, device=DEVICE)
    with pytest.raises(ValueError, match="latent_norm_rope=torch has no kernel that stores into the pool"):
        latent_norm_rope_store(kv[0], weight[0], 1e-5, cos_sin, view, where, backend="torch")
    with pytest.raises(ValueError, match="wants"):
        latent_norm_rope_store(kv[0], weight[0], 1e-5, cos_sin, view.bfloat16(), where, backend="triton")
