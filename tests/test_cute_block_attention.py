"""The CuTe DSL block attention compiles to Hopper's instructions without a GPU, and on one agrees with float64."""

import importlib.util
import json
from dataclasses import replace

import cute_attention_kit as kit
import pytest
import torch
from cute_kit import CUDA, ELF, products_wait, run_compiling, stack_bytes
from kernel_kit import watched_memory

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed")

PROGRAM = r"""
import base64, json, re, sys
from collections import Counter
import torch
from dspark_kernels.cute.block_attention import Facts, compile_block_attention

few = (
    Facts(torch.bfloat16, 512, 576, 7, 8, 32, False, 132),
    Facts(torch.bfloat16, 256, 320, 1, 1, 16, True, 132, slotted=True, fetch_queries=False),
    Facts(torch.bfloat16, 512, 576, 7, 8, 32, False, 132, value_width=128, group_rows=4, one_request=True),
    Facts(torch.float16, 256, 320, 9, 24, 32, True, 132, value_width=72, value_chunks=False),
    Facts(torch.bfloat16, 512, 576, 7, 64, 16, False, 132),
    Facts(torch.bfloat16, 512, 576, 7, 8, 32, False, 132, fetch_queries=False),
)
many = (
    Facts(torch.bfloat16, 512, 576, 7, 8, 32, False, 132, slotted=True, value_width=128, many=True),
    Facts(torch.bfloat16, 384, 448, 7, 8, 32, False, 132, many=True),
)
results = []
for facts in {"few": few, "many": many}[sys.argv[1]]:
    compiled = compile_block_attention(facts, "sm_90a")
    machine_code, ptx = compiled.__cubin__, compiled.__ptx__
    results.append(
        {
            "magic": machine_code[:4].hex(),
            "machine": int.from_bytes(machine_code[18:20], "little"),
            "target": re.search(r"\.target (\w+)", ptx)[1],
            "wgmma": dict(Counter(map(int, re.findall(r"wgmma.mma_async.sync.aligned.m64n(\d+)k16.f32", ptx)))),
            "waits": ptx.count("wgmma.wait_group"),
            "boxes": ptx.count("cp.async.bulk.tensor.4d.shared"),
            "spilled": ".local" in ptx,
            "code": base64.b64encode(machine_code).decode(),
            "programmatic": [re.findall(r"griddepcontrol.(\w+)|(ld.global)", entry) for entry in ptx.split(".entry")[1:]],
            "products": ptx.count("mma.sync.aligned.m16n8k16.row.col.f32"),
            "sends": ptx.count("st.shared::cluster.v2.b32"),
            "fetches": ptx.count("cp.async.ca.shared.global") + ptx.count("cp.async.cg.shared.global"),
        }
    )
print(json.dumps(results))
"""


# One tile in flight: each warpgroup has half of a tile's keys, and both have one build.  Two: a build for each, with a pair's
# first tile apart; the values behind the scores, and those of the other's tiles, in the loop and behind it.
ONE_TILE = [{32: 36, 256: 4, 128: 4}, {32: 20, 128: 4, 64: 4}]
TWO_TILES = [{64: 4 * 36, 256: 8 * 4}, {64: 4 * 20, 128: 8 * 4}]
# Products of a tile; boxes; of the merge's product, tiles of eight columns that a warp has, of 64 latents or of all, which no
# other adds up; what it sends to other CTAs, and fetches.
COMPILED = {
    "few": [
        (ONE_TILE[0], 4, 0, 0, 0), (ONE_TILE[1], 4, 0, 0, 0), (ONE_TILE[0], 4, 1, 1, 2), (TWO_TILES[1], 8, 3, 3, 0),
        (TWO_TILES[0], 14, 0, 0, 0), (ONE_TILE[0], 2, 0, 0, 0),
    ],
    "many": [(ONE_TILE[0], 4, 8, 0, 16), ({32: 28, 192: 4}, 4, 0, 0, 2)],
}  # fmt: skip


@pytest.mark.parametrize("builds", COMPILED)
def test_compiles_to_wgmma_and_tma(builds, tmp_path):
    done = run_compiling(PROGRAM, tmp_path, builds)
    assert done.returncode == 0, done.stderr
    results, wanted = json.loads(done.stdout.splitlines()[-1]), COMPILED[builds]
    for result, (products, boxes, tiles, sends, fetches) in zip(results, wanted, strict=True):
        assert (result["magic"], result["machine"], result["target"]) == (ELF, CUDA, "sm_90a")
        assert result["wgmma"] == {str(columns): count for columns, count in products.items()}
        assert products_wait(result["code"], tmp_path) == result["waits"]  # of products that follow one another none waits
        assert result["boxes"] == boxes
        assert not result["spilled"] and stack_bytes(result["code"], tmp_path) == [0, 0]
        # The attention waits for the kernel before it, and then lets the merge begin and reads.  The merge lets the next kernel
        # begin at once, reads lengths, and waits.
        attention, merge = ([kind or "read" for kind, _ in entry] for entry in result["programmatic"])
        assert attention[:3] == ["wait", "launch_dependents", "read"]
        assert merge[:2] == ["launch_dependents", "read"] and merge.count("wait") == 1 < merge.index("wait") < len(merge) - 1
        assert (result["products"], result["sends"], result["fetches"]) == (4 * tiles, sends, fetches)


@pytest.mark.parametrize(
    ("rows", "heads", "width", "two_tiles", "wanted"),
    [
        (8, 8, 576, None, False),
        (9, 8, 576, None, True),
        (1, 65, 576, None, True),
        (7, 64, 512, None, False),
        (7, 8, 576, True, True),
        (7, 64, 576, False, False),
    ],
)
def test_the_schedule_is_by_the_rows_of_the_block(rows, heads, width, two_tiles, wanted):
    from dspark_kernels.cute.block_attention_facts import Facts

    for page_size, box, span in ((16, 16, 64), (32, 32, 64 if wanted else 32), (128, 64, 64)):
        facts = Facts(torch.bfloat16, 512, width, rows, heads, page_size, False, 132, two_tiles=two_tiles)
        assert (facts.seesaw, facts.box, facts.span) == (wanted, box, span)
        assert facts.halved == (not wanted)


def test_halves_are_whole_blocks_of_each_warpgroups_values():
    from dspark_kernels.cute.block_attention_facts import Facts

    for latent, halved in ((512, True), (384, False), (256, True), (128, False)):
        assert Facts(torch.bfloat16, latent, latent + 64, 7, 8, 32, False, 132).halved == halved, latent


def test_many_heads_have_a_cta_each():
    from dspark_kernels.cute.block_attention_facts import Facts
    from dspark_kernels.cute.block_attention_heads import suits_whole_heads

    for batch, rows, heads, width, wanted in (
        (4, 7, 8, 128, True), (3, 7, 8, 128, False), (4, 7, 8, 136, False), (2, 9, 8, 128, True), (1, 7, 64, 128, True),
        (1, 7, 24, 8, False),
    ):  # fmt: skip
        facts = Facts(torch.bfloat16, 512, 576, rows, heads, 32, False, 132, value_width=width)
        assert suits_whole_heads(batch, facts) == wanted, (batch, rows, heads, width)


def test_many_pairs_have_a_warp_for_their_rows():
    """Of 132 processors each has one of 16 CTAs of eight pairs, but of nine some would have two."""
    from dspark_kernels.cute.block_attention_facts import Facts
    from dspark_kernels.cute.block_attention_warps import are_spread, suits_warps

    for batch, heads, latent, many, spread in (
        (3, 8, 512, False, True), (4, 8, 512, True, True), (8, 8, 512, True, True), (9, 8, 512, True, False),
        (9, 8, 256, True, True), (17, 8, 256, True, False), (1, 64, 512, True, True), (2, 64, 512, True, False),
    ):  # fmt: skip
        facts = Facts(torch.bfloat16, latent, latent + 64, 7, heads, 32, False, 132)
        assert (suits_warps(batch, facts), are_spread(batch, facts)) == (many, spread), (batch, heads, latent)


def test_many_have_rows_and_warps_of_their_own():
    from dspark_kernels.cute.block_attention_facts import Facts

    for form, message in (
        ({"group_rows": 4, "value_width": 128}, "many merges 8 rows by 16 warps, not 4 by None"),
        ({"merging_warps": 8, "value_width": 128}, "by 16 warps, not 8 by 8; leave it out"),
        ({"merging_warps": 8}, "by 8 warps, not 8 by 8; leave it out"),
    ):
        with pytest.raises(ValueError, match=message):
            Facts(torch.bfloat16, 512, 576, 7, 8, 32, False, 132, many=True, **form)


@pytest.mark.parametrize("heads", [1, 10, 19, 28, 64])
def test_no_pair_has_more_parts_than_room_for_their_statistics(heads):
    """All pairs of a request are equally long, wherever they lie in a list of whatever length."""
    from dspark_kernels.cute.block_attention_facts import Facts

    for ctas in (1, 2, 7, 24):
        facts = Facts(torch.bfloat16, 512, 576, 7, heads, 32, False, ctas)
        for places in range(facts.row_tiles, 3 * ctas * facts.row_tiles):
            each, more = divmod(places, ctas)
            owners = torch.arange(ctas).repeat_interleave(torch.tensor([each + 1] * more + [each] * (ctas - more)))
            tiles = places // facts.row_tiles
            assert int((owners[tiles - 1 :] - owners[: places - tiles + 1]).max()) + 1 <= facts.most_parts


def test_two_tiles_in_flight_need_room_for_weights():
    from dspark_kernels.cute.block_attention_facts import Facts

    with pytest.raises(ValueError, match="key rows of 512 have none behind 512 latents; leave two_tiles out"):
        Facts(torch.bfloat16, 512, 512, 7, 64, 32, False, 132, two_tiles=True)


def assert_close_to_float64(out: torch.Tensor, wanted: torch.Tensor) -> None:
    error = out.double() - wanted
    bound = 2.2e-3 if out.dtype is torch.bfloat16 else 4e-4  # the rounding of weights and outputs alone: 1.8e-3 and 2.2e-4
    assert error.norm() <= bound * wanted.norm()
    assert error.abs().max() <= 4 * bound * wanted.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("case", kit.cases(), ids=lambda case: case.name)
def test_agrees_with_float64_and_repeats_its_bits(case):
    """Again, among requests without keys, and in a graph."""
    from dspark_model.bench.timing import capture

    inputs = kit.make_inputs(case, "cuda")
    out = kit.launch(case, inputs)
    assert_close_to_float64(out, kit.expected(case, inputs))
    for _ in range(5):
        assert torch.equal(kit.launch(case, inputs), out)
    assert torch.equal(kit.launch(case, kit.add_dummies(case, inputs))[1:-2], out)
    kept: list[torch.Tensor] = []
    graph = capture(lambda: kept.append(kit.launch(case, inputs)))
    kept[-1].fill_(float("nan"))
    graph.replay()
    assert torch.equal(kept[-1], out)


@pytest.mark.parametrize("case", kit.cases(), ids=lambda case: case.name)
def test_the_float64_answer_is_the_torch_reference(case):
    from dspark_model.ops.block_attention import block_attention

    if case.window is not None or max(case.seq_lens) > 3000 or len(case.seq_lens) > 10:
        pytest.skip("the reference has no window, or the case is large")
    inputs = kit.make_inputs(case, "cpu")
    inputs.page_table.masked_fill_(inputs.page_table == kit.NO_PAGE, 0)
    options = {"kv_lora_rank": kit.LATENT, "softmax_scale": kit.WIDTH**-0.5, "causal": case.causal, "slots": inputs.slots}
    reference = block_attention(*inputs.arguments(), **options, max_seq_len=max(case.seq_lens))
    expected = kit.expected(case, inputs).to(reference.dtype)
    torch.testing.assert_close(expected, reference, rtol=1e-2, atol=1e-2 * case.scale)


@pytest.mark.gpu
def test_the_op_hands_over_slots_and_all_options():
    from dspark_model.ops.block_attention import block_attention

    case = kit.Case("", (2055, 0, 70), causal=True, window=100, slotted=True)
    inputs = kit.make_inputs(case, "cuda")
    ours = block_attention(
        *inputs.arguments(), kv_lora_rank=kit.LATENT, softmax_scale=kit.WIDTH**-0.5, max_seq_len=4096, causal=True,
        window=100, slots=inputs.slots, backend="cute",
    )  # fmt: skip
    assert torch.equal(ours, kit.launch(case, inputs))


RAGGED = kit.Case("8 heads, ragged, dummies", (0, 100, 2055, 0, 7))
ALONE = kit.Case("one request", (2055,))  # in groups of other sizes than several
ALL_PARTS = kit.Case("8 heads, a part of each CTA", (40000, 3, 131))
MANY = kit.Case("many requests", tuple(range(0, 3000, 83)), slotted=True)
CAUSAL = kit.Case("16 heads, causal", (515, 0, 70), heads=16, causal=True)
APART = kit.Case("12 heads, apart", (515, 0, 70), heads=12, apart=True)
ONE = kit.Case("1 head, float16", (2055, 9), heads=1, dtype="float16")
PAGE_64 = kit.Case("64 heads, page 64", (2055, 0, 70), heads=64, page_size=64)
WINDOW = kit.Case("64 heads, window", (2055, 0, 70), heads=64, window=100)
SIX = (515, 0, 70, 300, 7, 2055)
LONG = kit.Case("one long request and short ones", (40000, 3, 131, 0, 64, 700))
OF_SIX = (
    kit.Case("16 heads, causal, six", SIX, heads=16, causal=True), kit.Case("12 heads, apart, six", SIX, heads=12, apart=True),
    kit.Case("1 head, float16, six", SIX, heads=1, dtype="float16"),
)  # fmt: skip
WHOLE_HEADS = [(RAGGED, 1), (RAGGED, 3), (RAGGED, 7), (RAGGED, 16), (MANY, 7), (LONG, 7)]
WHOLE_HEADS += [(case, rows) for case, rows in zip(OF_SIX, (7, 9, 16), strict=True)]
WHOLE_HEADS += [(WINDOW, 7), (PAGE_64, 7)]
# Each tile is a part: as many as `merge_kernel` has warps (16, or 4 with many heads), one less and one more, twice as many.
TURNS = kit.Case("parts of one turn, and of more", tuple(64 * tiles for tiles in (15, 16, 17, 0, 32, 33, 1)))
TURNS_64 = kit.Case("64 heads, parts of one turn, and of more", (256, 192, 320, 0, 64))
BY_WARPS = [(case, 7) for case in (ALONE, RAGGED, ALL_PARTS, MANY, CAUSAL, APART, ONE, PAGE_64, LONG, TURNS)]
BY_WARPS += [(case, 7) for case in kit.cases() if case.heads == 64 and case.two_tiles is None]
BY_WARPS += [(TURNS_64, 7), (RAGGED, 1), (RAGGED, 16), (MANY, 3), (OF_SIX[1], 9), (OF_SIX[2], 16)]
# Few builds: each takes seconds.
OF_ROWS = [(case, kit.BLOCK) for case in (ALONE, RAGGED, ALL_PARTS, MANY, CAUSAL, WINDOW, PAGE_64)]
OF_ROWS += [(RAGGED, 1), (ALONE, 5), (RAGGED, 16), (APART, 9), (ONE, 16)]
OF_MATRICES = [(RAGGED, 128, "rows of kv_b_proj"), (ALL_PARTS, 128, "rows of kv_b_proj"), (CAUSAL, 128, "rows of kv_b_proj")]
OF_MATRICES += [
    (ALONE, 128, "rows of kv_b_proj"),
    (WINDOW, 128, "rows of kv_b_proj"),
    (RAGGED, 72, "columns"),
    (APART, 72, "columns"),
    (ONE, 128, "columns"),
    (MANY, 128, "rows of kv_b_proj"),
    (LONG, 128, "columns"),
]


def named(value) -> str:
    return value.name if isinstance(value, kit.Case) else str(value)


def values_of(case, inputs, value_weights, **options) -> torch.Tensor:
    """The fused result, out of poisoned memory and with nothing written outside."""
    with watched_memory():
        return kit.launch(case, inputs, value_weights=value_weights, **options)


def with_block_rows(case, inputs, count: int):
    """The same requests with another number of query rows; the first ones come again behind the seventh."""
    queries = inputs.queries[:, torch.arange(count) % kit.BLOCK].contiguous()
    return replace(inputs, queries=kit.lay_out(case, queries))


HALVED = [kit.Case(f"seq {length}", (length,)) for length in (1, 65, 2055, 4000)] + [
    RAGGED,
    kit.Case("page 128, causal, page major", (2055, 9, 64), page_size=128, causal=True, page_major=True),
    kit.Case("page 16, float16, causal, window", (515, 8), page_size=16, dtype="float16", causal=True, window=33),
    kit.Case("large values", (2055, 70), scale=1e6),
    kit.Case("slots", (0, 100, 1500, 0, 7), slotted=True),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", HALVED, ids=named)
def test_two_takers_of_a_tile_have_the_bits_of_one(case):
    inputs = kit.make_inputs(case, "cuda")
    one = kit.launch(case, inputs, halves=False)
    assert not one.isnan().any()
    with watched_memory():
        assert torch.equal(kit.launch(case, inputs), one)


@pytest.mark.gpu
@pytest.mark.parametrize(("latent", "width"), [(128, 192), (256, 320), (384, 448), (512, 512)])
def test_other_ranks_have_the_same_bits_however_tiles_are_taken_and_merged(latent, width):
    case = kit.Case("", (0, 100, 1500, 0, 7, 515))
    inputs = kit.narrowed(case, kit.make_inputs(case, "cuda"), width)
    out = kit.launch(case, inputs, latent)
    assert_close_to_float64(out, kit.expected(case, inputs, latent))
    for options in ({"halves": False}, {"many": False}):
        assert torch.equal(kit.launch(case, inputs, latent, **options), out), options


@pytest.mark.gpu
def test_how_many_take_a_tile_follows_the_lengths():
    """Of 132 CTAs two take each of 66 tiles, and one each of 67."""
    from dspark_model.bench.timing import capture

    case = kit.Case("", (9000,))
    inputs, kept = kit.make_inputs(case, "cuda"), []
    graph = capture(lambda: kept.append(kit.launch(case, inputs)))
    for length in (9000, 4224, 4225, 33, 0, 4287, 64):
        inputs.seq_lens[0], inputs.context_lens[0] = length, max(0, length - kit.BLOCK)
        kept[-1].fill_(float("nan"))
        graph.replay()
        assert torch.equal(kept[-1], kit.launch(case, inputs, halves=False)), length


def plain_merge(case, inputs) -> torch.Tensor:
    """What the kernel without matrices, whose CTAs merge 16 rows of a pair, leaves."""
    plain = kit.launch(case, inputs, many=False)
    assert not plain.isnan().any()
    return plain


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "rows"), OF_ROWS, ids=named)
def test_merged_values_are_the_plain_merge_to_the_bit(case, rows):
    """Each head's matrix is the identity, so a latent that any lane takes for another, or sums otherwise, shows."""
    inputs = with_block_rows(case, kit.make_inputs(case, "cuda"), rows)
    identity = torch.eye(kit.LATENT, dtype=inputs.queries.dtype, device="cuda").mT.expand(case.heads, -1, -1)
    assert torch.equal(values_of(case, inputs, identity, many=False), plain_merge(case, inputs))


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "rows"), BY_WARPS, ids=named)
def test_merged_by_warps_is_the_plain_merge_to_the_bit(case, rows):
    inputs = with_block_rows(case, kit.make_inputs(case, "cuda"), rows)
    plain = plain_merge(case, inputs)
    with watched_memory():
        assert torch.equal(kit.launch(case, inputs, many=True), plain)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "rows"), WHOLE_HEADS, ids=named)
def test_whole_heads_are_the_plain_merge_to_the_bit(case, rows):
    """Matrices that take 128 latents of 512 as they are."""
    inputs = with_block_rows(case, kit.make_inputs(case, "cuda"), rows)
    plain = plain_merge(case, inputs)
    for first in range(0, kit.LATENT, 128):
        part = slice(first, first + 128)
        some = torch.eye(kit.LATENT, dtype=inputs.queries.dtype, device="cuda")[part].mT.expand(case.heads, -1, -1)
        assert torch.equal(values_of(case, inputs, some, many=True), plain[..., part])


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "width", "layout"), OF_MATRICES, ids=named)
def test_values_are_the_plain_merge_and_a_product(case, width, layout):
    """NaN between the heads' matrices; the rounding of the result is all that may differ, and bits repeat."""
    inputs = kit.make_inputs(case, "cuda")
    dtype = inputs.queries.dtype
    drawn = torch.randn(case.heads, 2 * width, kit.LATENT, device="cuda").to(dtype)
    drawn[:, :width] = float("nan")
    weights = drawn[:, width:].mT if layout == "rows of kv_b_proj" else drawn[:, width:].mT.contiguous()
    ours, plain = values_of(case, inputs, weights), kit.launch(case, inputs).double()
    wanted = torch.einsum("bnhc,hcv->bnhv", plain, weights.double())
    magnitudes = torch.einsum("bnhc,hcv->bnhv", plain.abs(), weights.double().abs())
    half_step = torch.finfo(dtype).eps / 2
    assert ((ours.double() - wanted).abs() <= half_step * wanted.abs() + 4e-6 * magnitudes).all()
    exact = torch.einsum("bnhc,hcv->bnhv", kit.expected(case, inputs), weights.double())
    assert (ours.double() - exact).norm() <= (3.2e-3 if dtype is torch.bfloat16 else 6e-4) * exact.norm()
    assert (ours[[length == 0 for length in case.seq_lens]] == 0).all()
    assert all(torch.equal(values_of(case, inputs, weights), ours) for _ in range(3))
    assert torch.equal(values_of(case, kit.add_dummies(case, inputs), weights)[1:-2], ours)


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [(2055, 0, 70), (2055, 0, 70, 3, 900)], ids=str)
def test_values_under_a_graph_follow_the_lengths(requests):
    from dspark_model.bench.timing import capture

    case = kit.Case("", requests)
    inputs = kit.make_inputs(case, "cuda")
    weights = torch.randn(8, 128, kit.LATENT, device="cuda").bfloat16().mT
    kept = []
    graph = capture(lambda: kept.append(kit.launch(case, inputs, value_weights=weights)))
    for length in (2055, 64, 0, 1300):
        inputs.seq_lens[0] = length
        kept[-1].fill_(float("nan"))
        graph.replay()
        assert torch.equal(kept[-1], values_of(case, inputs, weights))


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "fused"), [(128, True), (100, False)])
def test_the_op_hands_over_matrices_and_multiplies_what_the_merge_does_not_take(width, fused):
    from dspark_model.ops import block_attention, per_head_product

    case = kit.Case("", (2055, 0, 70))
    inputs = kit.make_inputs(case, "cuda")
    weights = torch.randn(8, width, kit.LATENT, device="cuda").bfloat16().mT
    options = {"kv_lora_rank": kit.LATENT, "softmax_scale": kit.WIDTH**-0.5, "max_seq_len": 4096}
    ours = block_attention(*inputs.arguments(), **options, value_weights=weights, backend="cute")
    if fused:
        wanted = kit.launch(case, inputs, value_weights=weights)
    else:
        wanted = torch.empty_like(ours)
        per_head_product(kit.launch(case, inputs), weights, out=wanted, backend="triton")
    assert torch.equal(ours, wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.update(queries=a["queries"].float()), "one dtype"),
        (lambda a: a.update(kv_lora_rank=500), "kv_lora_rank up to 512 in steps of 128"),
        (lambda a: a.update(latents=a["latents"][:, :12]), "multiple of 8 tokens, not 12"),
        (lambda a: a.update(latents=a["latents"].as_strided((3, 16, 576), (16 * 580, 580, 1))), "multiples of 8"),
        (lambda a: a.update(page_table=a["page_table"].long()), "page_table must be int32"),
        (lambda a: a.update(seq_lens=a["seq_lens"].int()), "seq_lens must be int64"),
        (lambda a: a.update(slots=torch.zeros(2, dtype=torch.int32)), "slots must be int64"),
        (lambda a: a.update(slots=torch.zeros(3, dtype=torch.int64)), "one a request"),
        (lambda a: a.update(softmax_scale=0.0), "softmax_scale=0.0: must be positive"),
        (lambda a: a.update(value_weights=torch.zeros(8, 512, 128)), "value_weights are torch.float32 on cpu"),
        (lambda a: a.update(value_weights=torch.zeros(8, 128, 512).bfloat16()), r"wanted \(8, 512, v_head_dim\)"),
        (lambda a: a.update(value_weights=torch.zeros(8, 512, 100).bfloat16()), "columns in steps of 8, not 100"),
        (lambda a: a.update(value_weights=torch.zeros(8, 512, 520).bfloat16()), "up to 512 columns in steps of 8, not 520"),
        (lambda a: a.update(kv_lora_rank=384, value_weights=torch.zeros(8, 384, 8).bfloat16()), "128, 256, 512 latents"),
    ],
)
def test_bad_input_is_refused_before_the_device_is_asked(change, message):
    from dspark_kernels.cute.block_attention import block_attention

    arguments = {
        "queries": torch.zeros(2, 7, 8, 576, dtype=torch.bfloat16),
        "latents": torch.zeros(4, 16, 576, dtype=torch.bfloat16),
        "page_table": torch.zeros(2, 2, dtype=torch.int32),
        "context_lens": torch.zeros(2, dtype=torch.int64),
        "seq_lens": torch.zeros(2, dtype=torch.int64),
        "kv_lora_rank": 512,
        "softmax_scale": 0.1,
    }
    change(arguments)
    with pytest.raises(ValueError, match=message):
        block_attention(**arguments)
