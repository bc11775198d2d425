"""`between_attentions`: the torch form is `low_m_linear`'s products in turn; the CuTe form keeps the bound of each of them."""

import dataclasses
import importlib.util
import itertools
import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from between_kit import (
    ABSORBING,
    EPS,
    K3,
    SMALL,
    UNEVEN,
    WIDE,
    check_product,
    context_of,
    inputs,
    into_attention,
    layers,
    results,
)
from cute_kit import run_compiling, stack_bytes
from kernel_kit import watched_memory

from dspark_model.ops import (
    AfterAttention,
    BeforeAttention,
    BetweenOutput,
    BetweenSizes,
    BetweenWorkspace,
    NormedBy,
    before_attention,
    between_attentions,
    between_attentions_refusal,
    between_workspace,
)
from dspark_model.ops.between_workspace import _sizes_refusal
from dspark_model.testing import assert_bitwise_equal, poison_

needs_cute = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed")


def stages(made: BetweenOutput, values, residual, after: AfterAttention, before: BeforeAttention | None):
    """Of each product: name, what it was given, its norm, weights, residual and result."""
    yield "o", values, None, after.o, None, residual, made.h
    yield "gate_up", made.h, after.norm, after.gate, after.up, None, made.gated
    yield "down", made.gated, None, after.down, None, made.h, made.hidden
    if before is not None:
        yield "qkv_a", made.hidden, before.norm, before.qkv_a, None, None, made.qkv_a
        yield "q_b", made.qkv_a[:, : before.q_b.shape[1]], before.q_norm, before.q_b, None, None, made.queries


def check(made: BetweenOutput, values, residual, after, before) -> None:
    """Each product of what the product before left."""
    for stage in stages(made, values, residual, after, before):
        check_product(*stage)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("following", [True, False])
@pytest.mark.parametrize("rows", [1, 9])
def test_reference_matches_float64(rows, following, dtype):
    after, before = layers(SMALL, "cpu", dtype)
    given = inputs(SMALL, rows, "cpu", dtype)
    made = between_attentions(*given, after, before if following else None)
    check(made, *given, after, before if following else None)
    assert (made.queries is not None) == (made.qkv_a is not None) == following


@pytest.mark.parametrize(
    ("field", "shape", "message"),
    [
        ("o", (128, 64), "wants o"),
        ("gate", (128, 64), "wants gate"),
        ("up", (64, 128), "wants up"),
        ("down", (128, 64), "wants down"),
    ],
)
def test_weights_that_do_not_fit_are_refused(field, shape, message):
    after, before = layers(SMALL, "cpu", torch.float32)
    with pytest.raises(ValueError, match=message):
        between_attentions(
            *inputs(SMALL, 2, "cpu", torch.float32), dataclasses.replace(after, **{field: torch.zeros(shape)}), before
        )


def test_rows_that_do_not_fit_are_refused():
    after, before = layers(SMALL, "cpu", torch.float32)
    values, residual = inputs(SMALL, 2, "cpu", torch.float32)
    for rows, added, message in (
        (values, residual[:1], "wants residual"),
        (values, residual.bfloat16(), "bfloat16"),
        (values[0], residual, r"values \[M, V\]"),
    ):
        with pytest.raises(ValueError, match=message):
            between_attentions(rows, added, after, before)
    with pytest.raises(ValueError, match="no backend numpy"):
        between_attentions(values, residual, after, before, backend="numpy")
    with pytest.raises(ValueError, match="needs a BetweenWorkspace on cpu, got none"):
        between_attentions(values, residual, after, before, backend="cute")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("qkv_a", torch.zeros(64, 128), r"wants qkv_a \[128, 128\]"),
        ("qkv_a", torch.zeros(192), r"wants qkv_a \[Q \+ D, H\], got \[192\]"),
        ("q_b", torch.zeros(()), r"wants q_b \[N, Q\], got \[\]"),
        ("q_b", torch.zeros(64, 128, dtype=torch.bfloat16), "wants q_b .* got .*bfloat16"),
        ("norm", NormedBy(torch.ones(64), 1e-5), "wants the next layer's norm"),
        # A kernel that takes the bytes of these as they are would read other numbers.
        ("q_norm", NormedBy(torch.ones(128, dtype=torch.bfloat16), 1e-5), "wants q_norm .* got .*bfloat16"),
        ("q_norm", NormedBy(torch.ones(64), 1e-5), r"wants q_norm \[128\]"),
        ("q_norm", NormedBy(torch.ones(128, device="meta"), 1e-5), "wants q_norm .* on meta"),
    ],
    ids=["short", "vector", "number", "dtype", "norm", "norm dtype", "norm size", "norm device"],
)
def test_weights_of_the_next_layer_that_do_not_fit_are_refused(field, value, message):
    after, before = layers(SMALL, "cpu", torch.float32)
    with pytest.raises(ValueError, match=message):
        between_attentions(*inputs(SMALL, 2, "cpu", torch.float32), after, dataclasses.replace(before, **{field: value}))


def test_refusals_name_the_reason():
    assert _sizes_refusal(K3) is None
    assert "hidden=7200, no positive multiple of 128" in _sizes_refusal(dataclasses.replace(K3, hidden=7200))
    assert "width=2100" in _sizes_refusal(dataclasses.replace(K3, width=2100))
    assert "queries=0" in _sizes_refusal(dataclasses.replace(K3, queries=0))
    reason = between_attentions_refusal(K3, torch.bfloat16, torch.device("cpu"))
    assert "CUDA" in reason or "not installed" in reason
    with pytest.raises(ValueError, match="choose torch, which needs no workspace"):
        BetweenWorkspace(K3, torch.device("cpu"))


def facts_of(sizes: BetweenSizes, lanes: int, following: bool, ctas: int):
    from dspark_kernels.cute.between_attentions_schedule import Facts

    return Facts(
        torch.bfloat16, lanes, sizes.hidden, sizes.values, sizes.intermediate, sizes.q_rank, sizes.width - sizes.q_rank,
        sizes.queries, following, ctas, heads=sizes.heads if following else 0,
    )  # fmt: skip


@needs_cute
@pytest.mark.parametrize("sizes", ABSORBING)
def test_a_context_is_a_product_among_the_others(sizes):
    from dspark_kernels.cute.between_attentions_schedule import MADE, NOPE

    sizes = ABSORBING[sizes]
    assert NOPE == between_workspace.NOPE
    facts = dataclasses.replace(facts_of(sizes, 8, True, 132), behind=False, context=sizes.layers)
    context = facts.products[facts.place("context")]
    assert context.tiles * context.rows == sizes.layers * (sizes.width - sizes.q_rank)
    assert [product.name for product in facts.products] == ["qkv_a", "q_b", "context", "absorb"]
    assert [facts.awaited(index) for index in range(4)] == [MADE, 0, None, 1]
    alone = dataclasses.replace(facts, following=False, heads=0)
    assert alone.products == (context,) and alone.awaited(0) is None


@needs_cute
@pytest.mark.parametrize(
    "sizes",
    [K3, SMALL, UNEVEN, ABSORBING["k3"], ABSORBING["many"]],
    ids=["k3", "small", "uneven", "k3 over latents", "many over latents"],
)
@pytest.mark.parametrize("ctas", [132, 114, 7])
def test_tiles_and_boxes_cover_each_weight(sizes, ctas):
    from dspark_kernels.cute.between_attentions_schedule import (
        BOX,
        LANES,
        SHARED_BYTES,
        SUM_ROW,
        WARPS,
        first_tile,
        tiles_of,
    )

    for lanes, following in itertools.product(LANES, (False, True)):
        facts = facts_of(sizes, lanes, following, ctas)
        counts = [sizes.hidden, 2 * sizes.intermediate, sizes.hidden, sizes.width, sizes.queries]
        depths = [sizes.values, sizes.hidden, sizes.intermediate, sizes.hidden, sizes.q_rank]
        if facts.heads:
            counts, depths = [*counts, sizes.heads * (sizes.width - sizes.q_rank - sizes.rotary)], [*depths, 128]
        names = ["o", "gate_up", "down", "qkv_a", "q_b", "absorb"]
        assert [p.name for p in facts.products] == names[: len(counts) if following else 3]
        barriers = 2 * facts.stages + 2 * facts.x_stages + 2 * len(facts.products) + 3
        small = 4 * (WARPS * lanes * SUM_ROW + lanes + 4) + 8 * barriers
        assert facts.held == 0 or facts.products[0].tiles <= ctas
        assert small + 1024 <= facts.small_bytes  # 1024: to align boxes
        assert facts.stages * 2 * BOX + facts.x_bytes + facts.small_bytes <= SHARED_BYTES and facts.x_stages > 1
        for index in range(len(facts.products)):
            tiles = [range(first_tile(cta, index, facts), facts.products[index].tiles, ctas) for cta in range(ctas)]
            assert sorted(tile for own in tiles for tile in own) == list(range(facts.products[index].tiles))
            assert [max(0, tiles_of(cta, index, facts)) for cta in range(ctas)] == [len(own) for own in tiles]
        for product, count, depth in zip(facts.products, counts, depths, strict=False):
            assert product.tiles * product.rows == count
            assert product.boxes * product.columns == depth == product.depth
            assert product.depth % product.x_columns == 0 == product.x_columns % product.columns
            # Eight warps, each with 16 rows and 64 columns.
            assert 8 % product.groups == 0 and product.columns // 64 == 8 // product.groups
            assert product.rows // (2 if product.gated else 1) % 16 == 0
            summed = sizes.q_rank if product.name == "qkv_a" else count  # of qkv_a's tiles those of queries leave squares
            assert facts.squares >= summed // product.rows or product.name in ("gate_up", "q_b", "absorb")


COMPILE = r"""
import base64, json, re
import torch
from dspark_kernels.cute.between_attentions import compile_between_attentions
from dspark_kernels.cute.between_attentions_schedule import Facts
from dspark_kernels.cute.block_attention import unit_rows
from dspark_kernels.cute.block_attention_facts import Facts as AttentionFacts

few, many = (
    AttentionFacts(
        torch.bfloat16, 512, 576, 7, 8, 32, False, 132, value_width=128, group_rows=rows, merging_warps=8, merged=False
    )
    for rows in (unit_rows(1, 7), unit_rows(4, 7))
)
results = []
kinds = ((8, True, None, 0), (32, False, None, 0), (8, True, few, 8), (32, True, many, 8))
for lanes, following, merged, heads in kinds:
    sizes = (7168, 1024, 1792, 1536, 576, 1536)
    facts = Facts(torch.bfloat16, lanes, *sizes, following, 132, attention=merged, heads=heads, stored=heads > 0)
    compiled = compile_between_attentions(facts, "sm_90a")
    ptx = compiled.__ptx__
    results.append(
        {
            "target": re.search(r"\.target (\w+)", ptx)[1],
            "products": ptx.count("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"),
            "waits": ptx.count("griddepcontrol.wait"),
            "cached_weights": "ld.global.nc" in ptx,
            "arrays_in_memory": ".local" in ptx,
            "code": base64.b64encode(compiled.__cubin__).decode(),
        }
    )
print(json.dumps(results))
"""


@needs_cute
def test_compiles_to_mma_without_a_gpu(tmp_path):
    done = run_compiling(COMPILE, tmp_path)
    assert done.returncode == 0, done.stderr
    # A warp has 16 rows and 64 columns of a box: 4 instructions for 8 rows of x, 16 for 32.  The eight boxes of the first
    # product wait in registers; each other product's loop over boxes has its body twice and nothing behind it: the last of
    # q_b's three boxes leaves it in the middle.  A unit of an attention that is merged takes 4 steps, and a tile of the
    # heads' matrices is one box.
    wanted = ((4 * (8 + 4 * 2), 3), (16 * (8 + 2 * 2), 3), (4 * (8 + 4 * 2 + 1) + 4, 4), (16 * (8 + 4 * 2 + 1) + 4, 4))
    results = json.loads(done.stdout.splitlines()[-1])
    for result, (products, waits) in zip(results, wanted, strict=True):
        assert (result["target"], result["products"]) == ("sm_90a", products)
        # The warp that fetches x, the one that adds up and tells others, those that finish tiles and those that merge wait for
        # the kernel before; the one that fetches weights does not.
        assert result["waits"] == waits
        assert not result["arrays_in_memory"] and stack_bytes(result["code"], tmp_path) == [0]
        # What other CTAs write during the launch must not be read through the cache for constants.
        assert not result["cached_weights"]


@needs_cute
@pytest.mark.parametrize(
    "form", ["both", "behind", "front", "both over latents", "front over latents", "front over latents, with context"]
)
def test_the_launch_gets_each_tensor_under_its_name(form, monkeypatch):
    """Up to the kernel's arguments, as on a GPU."""
    from dspark_kernels.cute import between_attentions as kernel

    given = {}

    def arguments(facts, merge, weights, rows, into, context, work, num_rows, eps):
        weights = dict(zip(kernel.Weights._fields, weights, strict=True))
        rows = dict(zip(kernel.Rows._fields, rows, strict=True))
        into = dict(zip(kernel.Into._fields, into, strict=True))
        context = dict(zip(kernel.Context._fields, context, strict=True))
        given.update(facts=facts, weights=weights, rows=rows, into=into, context=context, work=work, num_rows=num_rows, eps=eps)
        return ()

    cpu = torch.device("cpu")
    monkeypatch.setattr("dspark_model.ops.between_workspace.between_attentions_refusal", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(kernel, "_arguments", arguments)
    monkeypatch.setattr(kernel, "compile_between_attentions", lambda *_: lambda *_: None)
    absorbs, context, form = "over latents" in form, None, form.split()[0] if "context" not in form else "context"
    sizes = ABSORBING["small"] if absorbs else SMALL
    (after, before), (values, residual) = layers(sizes, "cpu", torch.bfloat16), inputs(sizes, 9, "cpu", torch.bfloat16)
    before = into_attention(sizes, before, 9) if absorbs else before
    workspace, following = BetweenWorkspace(sizes, cpu), None if form == "behind" else before
    weights, rows, eps = {}, {"residual": residual}, [0.0, 0.0, 0.0, 0.0, 0.0]
    if form in ("front", "context"):
        context = context_of(sizes, 12, "cpu", torch.bfloat16) if form == "context" else None
        form = "front"
        made = before_attention(residual, before, backend="cute", workspace=workspace, context=context)
    else:
        made = between_attentions(values, residual, after, following, backend="cute", workspace=workspace, early=True)
        weights |= {"o": after.o, "post_norm": after.norm.weight, "gate": after.gate, "up": after.up, "down": after.down}
        rows |= {"values": values, "h": made.h, "gated": made.gated, "hidden": made.hidden}
        eps[0] = EPS["mlp"]
    if following is not None:
        weights |= {
            "input_norm": before.norm.weight,
            "qkv_a": before.qkv_a,
            "q_a_norm": before.q_norm.weight,
            "q_b": before.q_b,
        }
        rows |= {"qkv_a": made.qkv_a, "queries": made.queries}
        eps[1:3] = EPS["attention"], EPS["queries"]
    if absorbs:
        latents, absorption = before.latents, before.absorption
        weights |= {"latent_norm": latents.norm.weight}
        rows |= {"absorbed": made.absorbed}
        eps[3] = EPS["latents"]
        assert given["into"] == {
            "keys": absorption.keys.data_ptr(), "keys_stride": 256 * 128, "cos_sin": absorption.cos_sin.data_ptr(),
            "pool": latents.layer_view.data_ptr(), "page_stride": 2 * 32 * 192, "row_stride": 192,
            "pages": latents.where.pages.data_ptr(), "offsets": latents.where.offsets.data_ptr(),
            "owned": latents.where.owned.data_ptr(),
        }  # fmt: skip
    for wanted, found in ((weights, given["weights"]), (rows, given["rows"])):
        assert {name: found[name] for name in wanted} == {name: tensor.data_ptr() for name, tensor in wanted.items()}
    kind = (form != "front", following is not None, absorbs, context is not None)
    assert given["work"] == [t.data_ptr() for t in (workspace.words, workspace.squares, workspace.counters[kind])]
    facts, scratch = given["facts"], [given["rows"][name] for name in ("scaled_h", "scaled_hidden", "scaled_q_a")]
    assert (facts.lanes, facts.behind, facts.following, facts.early) == (16, *kind[:2], form != "front")
    if context is not None:
        weights, rows = {"context": context.weight}, {"context": context.rows, "context_kv": made.context_kv}
        for wanted, found in ((weights, given["weights"]), (rows, given["rows"])):
            assert {name: found[name] for name in wanted} == {name: tensor.data_ptr() for name, tensor in wanted.items()}
        where, pool = context.where, context.layer_views[0]
        assert given["context"] == {
            "rows": 12, "norms": context.norm.weight.data_ptr(), "cos_sin": context.cos_sin.data_ptr(),
            "pool": pool.data_ptr(), "layer_stride": 0, "page_stride": 16 * 192, "row_stride": 192,
            "pages": where.pages.data_ptr(), "offsets": where.offsets.data_ptr(), "owned": where.owned.data_ptr(),
        }  # fmt: skip
        assert facts.context == 1
        eps[4] = EPS["context"]
    assert (facts.heads, facts.stored) == ((1, True) if absorbs else (0, False))
    assert (given["num_rows"], list(given["eps"])) == (9, eps)
    used = [where for where in scratch if where not in (residual.data_ptr(), values.data_ptr())]
    assert len(set(used)) == len(used) == {"both": 3, "behind": 1, "front": 2}[form]


CUDA = torch.device("cuda")


def cute(given, after, before, workspace) -> BetweenOutput:
    return between_attentions(*given, after, before, backend="cute", workspace=workspace)


@pytest.mark.gpu
@pytest.mark.parametrize("following", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 16, 17, 28, 32])
@pytest.mark.parametrize("sizes", [K3, SMALL, UNEVEN, WIDE], ids=["k3", "small", "uneven", "wide"])
def test_each_product_keeps_its_bound(sizes, rows, following):
    after, before = layers(sizes, "cuda", torch.bfloat16)
    before = before if following else None
    workspace = BetweenWorkspace(sizes, CUDA)
    poison_(workspace.squares)
    given = inputs(sizes, rows, "cuda", torch.bfloat16)
    weights = [after.o, after.gate, after.up, after.down, after.norm.weight]
    with watched_memory(*given, *weights):
        made = cute(given, after, before, workspace)
    check(made, *given, after, before)


@pytest.mark.gpu
def test_launches_of_all_forms_share_a_workspace_and_repeat_their_bits():
    """Beside a stream that keeps the memory busy, so that programs arrive in many orders."""
    workspace, cases = BetweenWorkspace(K3, CUDA), []
    weights = [layers(K3, "cuda", torch.bfloat16) for _ in range(2)]
    for rows, following in ((7, True), (16, True), (7, False), (28, True), (13, True), (16, False), (32, False)):
        given = inputs(K3, rows, "cuda", torch.bfloat16)
        cases += [(given, after, before if following else None) for after, before in weights]
    first = [cute(*case, workspace) for case in cases]
    for made, (given, after, before) in zip(first, cases, strict=True):
        check(made, *given, after, before)
    noise, side = torch.zeros(1 << 24, device=CUDA), torch.cuda.Stream()
    differing = torch.zeros((), dtype=torch.int64, device=CUDA)
    for turn in range(1000):
        if turn % 10 == 0:
            with torch.cuda.stream(side):
                noise.mul_(1.0)
        index = (7 * turn + turn // 3) % len(cases)
        again = cute(*cases[index], workspace)
        for name, wanted in results(first[index]).items():
            differing += (getattr(again, name) != wanted).sum()
    assert int(differing) == 0


@pytest.mark.gpu
def test_a_rows_bits_do_not_depend_on_the_others():
    after, before = layers(K3, "cuda", torch.bfloat16)
    workspace, (values, residual) = BetweenWorkspace(K3, CUDA), inputs(K3, 32, "cuda", torch.bfloat16)
    values[9], residual[11] = float("nan"), float("inf")
    all_rows = cute((values, residual), after, before, workspace)
    for first, count in ((0, 1), (0, 8), (3, 6), (2, 10), (5, 11), (1, 17), (4, 28)):
        rows = slice(first, first + count)
        some = cute((values[rows].clone(), residual[rows].clone()), after, before, workspace)
        for name in ("h", "gated", "hidden", "qkv_a", "queries"):
            assert_bitwise_equal(getattr(some, name), getattr(all_rows, name)[rows], name)
    # The last row stands for those behind it; here it is NaN.
    some = cute((values[4:10].clone(), residual[4:10].clone()), after, before, workspace)
    for name in ("h", "gated", "hidden", "qkv_a", "queries"):
        assert_bitwise_equal(getattr(some, name)[:-1], getattr(all_rows, name)[4:9], name)
        assert getattr(some, name)[-1].isnan().all(), name


@pytest.mark.gpu
def test_a_graph_replays_with_changed_inputs():
    after, before = layers(K3, "cuda", torch.bfloat16)
    workspace, given = BetweenWorkspace(K3, CUDA), inputs(K3, 7, "cuda", torch.bfloat16)
    cute(given, after, before, workspace)
    cute(given, after, None, workspace)  # both forms are compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = cute(given, after, before, workspace)
        again = cute((given[0], made.hidden), after, None, workspace)
    for _ in range(50):
        for tensor in given:
            tensor.copy_(torch.randn(tensor.shape))
        graph.replay()
        wanted = cute(given, after, before, workspace)
        assert_bitwise_equal(made.queries, wanted.queries)
        assert_bitwise_equal(again.hidden, cute((given[0], wanted.hidden), after, None, workspace).hidden)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [K3, SMALL], ids=["k3", "small"])
def test_an_early_launch_waits_for_its_rows(sizes):
    """The kernel before it lets it begin at once and writes its rows, NaN until then, 30 us later."""
    from late_kit import check_waits

    after, before = layers(sizes, "cuda", torch.bfloat16)
    workspace, (values, residual) = BetweenWorkspace(sizes, CUDA), inputs(sizes, 7, "cuda", torch.bfloat16)
    wanted = cute((values, residual), after, before, workspace)
    late = torch.empty_like(values)

    def call() -> list[torch.Tensor]:
        options = {"backend": "cute", "workspace": workspace, "early": True}
        return list(results(between_attentions(late, residual, after, before, **options)).values())

    check_waits(late, values, call, list(results(wanted).values()))


@pytest.mark.gpu
def test_counters_wrap_around():
    after, before = layers(SMALL, "cuda", torch.bfloat16)
    workspace, given = BetweenWorkspace(SMALL, CUDA), inputs(SMALL, 3, "cuda", torch.bfloat16)
    wanted = cute(given, after, before, workspace)
    launches = 2**31 - 2
    counts = workspace.counters[True, True, False, False].tolist()  # each finished tile once, and each CTA
    assert counts[-1] == 1 and sum(count > 0 for count in counts) == 7
    wrapped = [(launches * count + 2**31) % 2**32 - 2**31 for count in counts]
    workspace.counters[True, True, False, False].copy_(torch.tensor(wrapped))
    for _ in range(5):
        made = cute(given, after, before, workspace)
        assert_bitwise_equal(made.queries, wanted.queries)


@pytest.mark.gpu
def test_what_the_kernel_does_not_take_is_refused():
    after, before = layers(SMALL, "cuda", torch.bfloat16)
    workspace, (values, residual) = BetweenWorkspace(SMALL, CUDA), inputs(SMALL, 3, "cuda", torch.bfloat16)
    for given, message in (
        ((values.float(), residual.float()), "wants o .*float32"),
        (inputs(SMALL, 33, "cuda", torch.bfloat16), "1 to 32 rows, got 33"),
        (inputs(SMALL, 0, "cuda", torch.bfloat16), "1 to 32 rows, got 0"),
        ((torch.stack((values, values), 1)[:, 0], residual), "values contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            cute(given, after, before, workspace)
    with pytest.raises(ValueError, match="make one for them"):
        cute((values, residual), after, before, BetweenWorkspace(UNEVEN, CUDA))
    other = dataclasses.replace(SMALL, queries=128)
    with pytest.raises(ValueError, match="make one for them"):
        cute((values, residual), after, before, BetweenWorkspace(other, CUDA))
    with pytest.raises(ValueError, match="hidden=192, no positive multiple of 128"):
        BetweenWorkspace(dataclasses.replace(SMALL, hidden=192), CUDA)
    # Behind the last layer nothing says what the workspace's next layers have.
    wanted = cute((values, residual), after, None, workspace)
    assert_bitwise_equal(cute((values, residual), after, None, BetweenWorkspace(other, CUDA)).hidden, wanted.hidden)
