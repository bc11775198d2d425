"""Which backends serve which calls of `block_attention`; `causal_fixup` and `flashinfer`."""

import re
import sys
import types

import pytest
import torch
from attention_kit import RANK, SCALE, WIDTH, attend, exact, kernel, kernel_like_float64, lse_in_float64, make, table_of_slots
from kernel_kit import DEVICE

from dspark_model.ops import (
    attention_flashinfer,
    block_attention_refusal,
)
from dspark_model.ops.attention_fixup import add_upper_triangle
from dspark_model.testing import assert_bitwise_equal

SERVED = {
    "device": torch.device(DEVICE), "dtype": torch.bfloat16, "kv_lora_rank": 512, "width": 576, "page_size": 32, "heads": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "change", "reason"),
    [
        ("torch", {}, None),
        ("triton", {"causal": True, "window": 4, "captured": True}, None),
        ("causal_fixup", {"window": 4, "captured": True}, None),
        ("flashinfer", {}, None),
        ("fast", {}, "no backend 'fast'"),
        ("torch", {"width": 512}, "rows of 512 values with kv_lora_rank=512"),
        ("torch", {"page_size": 0}, "page_size=0"),
        ("triton", {"device": torch.device("meta")}, "CUDA devices, got meta"),
        ("triton", {"dtype": torch.float8_e4m3fn}, "got torch.float8_e4m3fn"),
        ("triton", {"fp8_pool": True}, None),
        ("triton", {"fp8_pool": True, "dtype": torch.float16}, "bfloat16 or float32 with fp8 pools, got torch.float16"),
        ("cute", {"fp8_pool": True}, "cute does not read fp8 pools; triton and torch do"),
        ("causal_fixup", {"fp8_pool": True}, "causal_fixup does not read fp8 pools"),
        ("flashinfer", {"fp8_pool": True}, "flashinfer does not read fp8 pools"),
        ("causal_fixup", {"causal": True}, "this block is causal"),
        ("flashinfer", {"causal": True}, "this block is causal"),
        ("flashinfer", {"captured": True}, "run the step eagerly"),
        ("flashinfer", {"dtype": torch.float32}, "got torch.float32"),
        ("flashinfer", {"width": 560}, r"got 512 \+ 48"),
        ("flashinfer", {"window": 3}, "window=3"),
        ("flashinfer", {"device": torch.device("cpu")}, "CUDA devices, got cpu"),
    ],
)
def test_refusal_says_why(monkeypatch, backend, change, reason):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # all packages are installed
    if reason is None and backend == "flashinfer":
        change = {"device": torch.device("cuda")}
    said = block_attention_refusal(backend, **{**SERVED, **change})
    if reason is None:
        assert said is None
    else:
        assert re.search(reason, said)


@pytest.mark.parametrize("backend", ["triton", "causal_fixup", "flashinfer"])
def test_a_missing_package_is_said(monkeypatch, backend):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"block_attention={backend}: {backend} needs the package.* installed"):
        attend(make([3], rows=2, page_size=4), backend=backend)


@pytest.mark.parametrize("block_rows", [0, 1, 4])
@pytest.mark.parametrize("page_size", [2, 16])
def test_upper_triangle_completes_a_causal_result(block_rows, page_size):
    """A causal result in float64; also of blocks that were cut at their pages, and without keys."""
    inputs = make([6, 0, 1, 17], rows=4, page_size=page_size, block_rows=block_rows)
    inputs[4][2] = 0
    seen, lse = exact(*inputs, causal=True).float(), lse_in_float64(inputs, causal=True).float()
    of_slots, slots = table_of_slots(inputs)
    for (queries, *pool), where in ((inputs, None), (of_slots, slots)):
        ours = add_upper_triangle(seen, lse, queries, *pool, softmax_scale=SCALE, slots=where)
        torch.testing.assert_close(ours.double(), exact(*inputs, causal=False), rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("window", [None, 3])
def test_causal_fixup_is_the_whole_block(window):
    inputs = make([20, 0, 6], rows=2, page_size=16)
    inputs[4][1] = 0
    ours = kernel_like_float64(inputs, window=window, backend="causal_fixup", bound=5e-6)
    torch.testing.assert_close(ours, attend(inputs, window=window), rtol=5e-6, atol=5e-6)
    of_slots, slots = table_of_slots(inputs)
    assert_bitwise_equal(kernel(of_slots, slots=slots, window=window, backend="causal_fixup"), ours)


class PlannedLikeFlashInfer:
    """What FlashInfer's documentation says of `plan` and `run`, in float64, one request and row at a time."""

    def __init__(self, workspace, backend):
        assert backend == "auto"

    def plan(self, rows_end, pages_end, pages, lens, heads, rank, rope, page_size, causal, scale, q_dtype, kv_dtype):
        assert all(value.dtype is torch.int32 for value in (rows_end, pages_end, pages, lens))
        assert (rank, rope, causal, len(pages)) == (RANK, WIDTH - RANK, False, int(pages_end[-1]))
        self.rows_end, self.pages_end, self.pages, self.lens = rows_end, pages_end, pages, lens
        self.scale = scale

    def run(self, absorbed, rotary, values, turned):
        assert absorbed.is_contiguous() and rotary.is_contiguous()
        queries, keys = torch.cat((absorbed, rotary), -1).double(), torch.cat((values, turned), -1).double()
        out = torch.empty_like(absorbed)
        for b, length in enumerate(self.lens.tolist()):
            assert length > 0
            held = keys[self.pages[self.pages_end[b] : self.pages_end[b + 1]].long()].flatten(0, 1)[:length]
            for row in range(self.rows_end[b], self.rows_end[b + 1]):
                out[row] = torch.softmax(self.scale * queries[row] @ held.T, -1) @ held[:, :RANK]
        return out


@pytest.mark.parametrize("slotted", [False, True])
def test_flashinfer_gets_the_pages_of_requests_with_keys(monkeypatch, slotted):
    package = types.ModuleType("flashinfer.mla")
    package.BatchMLAPagedAttentionWrapper = PlannedLikeFlashInfer
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.mla", package)
    monkeypatch.setattr(attention_flashinfer, "_wrapper", attention_flashinfer._wrapper.__wrapped__)
    inputs = make([9, 0, 30, 1], rows=3, page_size=4)
    inputs[4][1] = 0
    (queries, latents, table, _, seq), slots = table_of_slots(inputs) if slotted else (inputs, None)
    ours = attention_flashinfer.planned_attention(
        queries, latents, table, seq, kv_lora_rank=RANK, softmax_scale=SCALE, slots=slots
    )
    torch.testing.assert_close(ours.double(), exact(*inputs, causal=False), rtol=2e-6, atol=2e-6)
    nobody = attention_flashinfer.planned_attention(
        queries, latents, table, seq * 0, kv_lora_rank=RANK, softmax_scale=SCALE, slots=slots
    )
    assert_bitwise_equal(nobody, torch.zeros_like(ours))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "heads", "bound"), [("cute", 8, 1.3), ("cute", 64, 1.3), ("causal_fixup", 8, 1.6), ("flashinfer", 8, 2)]
)
def test_other_backends_on_the_device(backend, heads, bound):
    """Error against float64 over that of float64 attention whose weights and result are rounded: two roundings of the result,
    of which the first is of a part of it, are less than 1.5 times one; FlashInfer's was at most 1.05 times on an H200."""
    if backend != "causal_fixup":
        pytest.importorskip({"cute": "cutlass"}.get(backend, backend))
    from dspark_model.bench.attention_cases import error_against_float64, make_case

    case = make_case(2, 3000, heads)
    rounded = error_against_float64(case, case.rounded_reference())
    assert error_against_float64(case, case.run(backend=backend)) <= bound * rounded
