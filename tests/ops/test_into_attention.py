"""What `between_attentions` and `before_attention` make for an attention: queries over latents, and latents in the pool."""

import dataclasses

import pytest
import torch
from between_kit import ABSORBING, context_of, inputs, into_attention, layers
from kernel_kit import watched_memory
from late_kit import check_waits

from dspark_model.ops import (
    BeforeAttention,
    BetweenOutput,
    BetweenSizes,
    BetweenWorkspace,
    RowAddresses,
    attention_parts,
    before_attention,
    between_attentions,
    latent_norm_rope,
    latent_norm_rope_store,
)
from dspark_model.ops.between_workspace import MAX_BETWEEN_ROWS, absorption_refusal
from dspark_model.testing import assert_bitwise_equal

K3_HEADS = ABSORBING["k3"]
LAYERS = BetweenSizes(1024, 8 * 128, 256, 256, 256 + 576, 8 * 192, heads=8, layers=3)  # with K3's attention


def check_absorbed(made, before: BeforeAttention) -> None:
    """Within `absorb_queries`' bound of float64, of the queries that were made."""
    keys, cos_sin = before.absorption.keys.double(), before.absorption.cos_sin.double()
    unit, (heads, nope, _) = torch.finfo(made.queries.dtype).eps / 2, keys.shape
    queries = made.queries.view(len(made.queries), heads, -1).double()
    own, turned = queries[..., :nope], queries[..., nope:]
    cos, sin = (part[:, None] for part in cos_sin.chunk(2, -1))
    even, odd = turned[..., 0::2], turned[..., 1::2]
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    length = torch.stack(((even * cos).abs() + (odd * sin).abs(), (odd * cos).abs() + (even * sin).abs()), -1).flatten(-2)
    wanted = torch.cat((torch.einsum("mhn,hnc->mhc", own, keys), rotated), -1)
    bound = torch.cat((nope * 2.0**-23 * torch.einsum("mhn,hnc->mhc", own.abs(), keys.abs()), 2.0**-22 * length), -1)
    bound += 1.01 * unit * wanted.abs()
    distance = (made.absorbed.double() - wanted).abs()
    assert (distance <= bound + 1e-12).all(), float((distance / bound).max())
    assert float(distance.norm() / wanted.norm()) < 2 * unit + 2.0**-20


def check_latents(made, before: BeforeAttention, sizes, backend: str) -> None:
    """The pool as `latent_norm_rope` and a store would leave it."""
    into, kv = before.latents, made.qkv_a[:, sizes.q_rank :].contiguous()
    wanted = torch.full_like(into.layer_view, float("nan"))
    if backend == "cute":
        norm = into.norm
        latent_norm_rope_store(kv, norm.weight, norm.eps, before.absorption.cos_sin, wanted, into.where, backend="cute")
    else:
        latents = latent_norm_rope(kv[None], into.norm.weight[None], into.norm.eps, before.absorption.cos_sin)[0]
        owned = into.where.owned
        wanted[into.where.pages[owned], into.where.offsets[owned]] = latents[owned]
    assert_bitwise_equal(into.layer_view, wanted, "pool")
    assert bool((~wanted.isnan()).any())


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("sizes", ["small", "wide"])
def test_reference(sizes, rows):
    sizes = ABSORBING[sizes]
    after, before = layers(sizes, "cpu", torch.float32)
    values, hidden = inputs(sizes, rows, "cpu", torch.float32)
    for following in (
        into_attention(sizes, before, rows),
        dataclasses.replace(into_attention(sizes, before, rows), latents=None),
    ):
        front = before_attention(hidden, following)
        made = between_attentions(values, hidden, after, following)
        for result in (front, made):
            check_absorbed(result, following)
            plain = before_attention(hidden if result is front else made.hidden, before)
            assert plain.absorbed is None
            assert_bitwise_equal(result.queries, plain.queries)
        if following.latents is not None:
            check_latents(made, following, sizes, "torch")


def test_what_does_not_fit_is_refused():
    sizes = ABSORBING["small"]
    _, before = layers(sizes, "cpu", torch.float32)
    hidden, whole = inputs(sizes, 3, "cpu", torch.float32)[1], into_attention(sizes, before, 3)
    absorption, latents = whole.absorption, whole.latents
    for change, message in (
        ({"absorption": None}, "there is no absorption; give one"),
        ({"absorption": dataclasses.replace(absorption, keys=absorption.keys[:, :64])}, r"heads \* \(nope \+ 64\) = 192"),
        ({"absorption": dataclasses.replace(absorption, keys=absorption.keys.double())}, "float64"),
        ({"absorption": dataclasses.replace(absorption, keys=absorption.keys[0])}, r"wants keys \[heads, nope, 128\]"),
        ({"absorption": dataclasses.replace(absorption, cos_sin=absorption.cos_sin[:2])}, r"wants cos_sin \[3, r\]"),
        ({"absorption": dataclasses.replace(absorption, cos_sin=absorption.cos_sin.double())}, "cos_sin .* got .*float64"),
        ({"latents": dataclasses.replace(latents, norm=before.norm.__class__(torch.ones(64), 0.1))}, r"want a norm \[128\]"),
        ({"latents": dataclasses.replace(latents, layer_view=latents.layer_view[..., :64])}, r"page_size, 192\]"),
        ({"latents": dataclasses.replace(latents, layer_view=latents.layer_view.bfloat16())}, "got .*bfloat16"),
        (
            {"latents": dataclasses.replace(latents, where=dataclasses.replace(latents.where, owned=latents.where.owned[:2]))},
            "of 3 rows",
        ),
        (
            {
                "latents": dataclasses.replace(
                    latents, where=dataclasses.replace(latents.where, pages=latents.where.pages.int())
                )
            },
            "want int64 pages",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            before_attention(hidden, dataclasses.replace(whole, **change))
    for change in ({"heads": 5}, {"queries": 128}, {"width": 128 + 64 + 32}, {"queries": 260}):
        assert "got" in absorption_refusal(dataclasses.replace(sizes, **change))
    assert "192 with 64 not turned" in absorption_refusal(K3_HEADS, 64)
    assert all(absorption_refusal(sizes) is None for sizes in ABSORBING.values())


@pytest.mark.gpu
@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 16, 17, 32])
@pytest.mark.parametrize("sizes", ABSORBING)
def test_the_launches_keep_bounds_and_bits(sizes, rows, stored):
    """Both launches, early ones and others, between those without queries over latents, on one workspace."""
    sizes = ABSORBING[sizes]
    after, before = layers(sizes, "cuda", torch.bfloat16)
    workspace, given = BetweenWorkspace(sizes, torch.device("cuda")), inputs(sizes, rows, "cuda", torch.bfloat16)
    options, first = {"backend": "cute", "workspace": workspace}, {}
    for turn in range(6):
        for front in (True, False):
            following = into_attention(sizes, before, rows)
            following = dataclasses.replace(following, absorption=first.get("absorption", following.absorption))
            first.setdefault("absorption", following.absorption)
            if not stored:
                following = dataclasses.replace(following, latents=None)
            pool_memory = () if not stored else (following.latents.layer_view,)
            with watched_memory(writes=pool_memory):
                early = turn % 2 == 1
                if front:
                    made = before_attention(given[1], following, early=early, **options)
                    plain = before_attention(given[1], before, **options)
                else:
                    made = between_attentions(*given, after, following, early=early, **options)
                    plain = between_attentions(*given, after, before, **options)
            check_absorbed(made, following)
            if stored:
                check_latents(made, following, sizes, "cute")
            assert_bitwise_equal(made.qkv_a, plain.qkv_a)
            assert_bitwise_equal(made.queries, plain.queries)
            assert_bitwise_equal(made.absorbed, first.setdefault(front, made.absorbed))
    some = between_attentions(
        *(g[:1].clone() for g in given),
        after,
        dataclasses.replace(
            before, absorption=dataclasses.replace(first["absorption"], cos_sin=first["absorption"].cos_sin[:1].clone())
        ),
        **options,
    )
    assert_bitwise_equal(some.absorbed, first[False][:1])


class Layers:
    """Layers over a pool with a context, whose attention begins beside the products in front of it, or not."""

    def __init__(self, contexts: list[int], rows: int, *, new_rows: int = 0):
        """new_rows: of the end of the only request's context, which the first launch stores."""
        self.contexts, self.rows, self.new_rows, latent = contexts, rows, new_rows, LAYERS.width - LAYERS.q_rank
        self.context = context_of(LAYERS, new_rows, "cuda", torch.bfloat16) if new_rows else None
        self.weights = [layers(LAYERS, "cuda", torch.bfloat16) for _ in range(LAYERS.layers)]
        self.values = (torch.randn(8, 128, 512) * 512**-0.5).to("cuda", torch.bfloat16).transpose(1, 2)
        pages = max(contexts) // 32 + 2
        self.pool = torch.randn(len(contexts) * pages, LAYERS.layers, 32, latent, device="cuda").bfloat16()
        self.table = torch.randperm(len(contexts) * pages).view(len(contexts), pages).int().cuda()
        self.context_lens = torch.tensor(contexts, device="cuda")
        self.seq_lens = self.context_lens + rows
        total = len(contexts) * rows
        self.hidden = torch.randn(total, LAYERS.hidden).to("cuda", torch.bfloat16)
        self.fronts = [into_attention(LAYERS, before, total) for _, before in self.weights]
        self.workspace = BetweenWorkspace(LAYERS, torch.device("cuda"))
        self.offsets, self.pages = (torch.empty(total, dtype=torch.int64, device="cuda") for _ in range(2))
        self.place()

    def place(self) -> None:
        """The block's rows behind the lengths."""
        rows = (self.context_lens[:, None] + torch.arange(self.rows, device="cuda")).clamp(max=self.table.shape[1] * 32 - 1)
        self.pages.copy_(self.table.long().gather(1, rows // 32).flatten())
        self.offsets.copy_((rows % 32).flatten())

    def run(self, *, early: bool) -> list[BetweenOutput]:
        options, made = {"backend": "cute", "workspace": self.workspace, "early": early}, []
        fronts = []
        for index, front in enumerate(self.fronts):
            where = dataclasses.replace(front.latents.where, pages=self.pages, offsets=self.offsets)
            latents = dataclasses.replace(front.latents, layer_view=self.pool[:, index], where=where)
            fronts.append(dataclasses.replace(front, latents=latents))
        hidden, context = self.hidden, None
        if self.new_rows:
            at = torch.arange(self.contexts[0] - self.new_rows, self.contexts[0], device="cuda")
            pages, owned = self.table[0].long()[at // 32], torch.ones(self.new_rows, dtype=torch.bool, device="cuda")
            where = RowAddresses(pages, at % 32, owned)
            context = dataclasses.replace(self.context, layer_views=self.pool.unbind(1), where=where)
        last = before_attention(hidden, fronts[0], context=context, **options)
        for index, (after, _) in enumerate(self.weights):
            queries = last.absorbed.unflatten(0, (len(self.contexts), self.rows))
            parts = attention_parts(
                queries, self.pool[:, index], self.table, self.context_lens, self.seq_lens, kv_lora_rank=512,
                softmax_scale=0.1, value_weights=self.values, early=early, late_rows=0 if index else self.new_rows,
            )  # fmt: skip
            following = fronts[index + 1] if index + 1 < len(fronts) else None
            last = between_attentions(parts, hidden, after, following, **options)
            hidden = last.hidden
            made.append(last)
        return made


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("contexts", "rows"),
    [([2041], 7), ([0], 7), ([33], 1), ([32768], 7), ([300, 4000], 7), ([300, 0, 4000, 57], 7), ([64] * MAX_BETWEEN_ROWS, 1)],
)
def test_attentions_that_begin_beside_the_products_change_no_bit(contexts, rows):
    work = Layers(contexts, rows)
    wanted, pool = work.run(early=False), work.pool.clone()
    for _ in range(10):
        assert_bitwise_equal(work.pool, pool)
        for own, other in zip(work.run(early=True), wanted, strict=True):
            assert_bitwise_equal(own.hidden, other.hidden)


@pytest.mark.gpu
@pytest.mark.parametrize("context", [8, 63, 64, 71, 72, 2048, 32768])
def test_the_first_attention_waits_for_the_context_that_is_stored_in_front_of_it(context):
    """Rows that are NaN until then.  Under a graph too, where no launch waits for the host."""
    work = Layers([context], 7, new_rows=8)
    wanted, pool = work.run(early=False), work.pool.clone()
    assert not wanted[-1].hidden.isnan().any()
    at, before = torch.arange(context - 8, context, device="cuda"), pool.clone()
    before[work.table[0].long()[at // 32], :, at % 32] = float("nan")

    def run() -> list:
        work.pool.copy_(before)
        return work.run(early=True)

    def check(made: list) -> None:
        for own, other in zip(made, wanted, strict=True):
            assert_bitwise_equal(own.hidden, other.hidden)
        assert_bitwise_equal(work.pool, pool)

    for _ in range(3):
        check(run())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run()
    for _ in range(10):
        graph.replay()
        check(made)


@pytest.mark.gpu
def test_a_graph_of_early_launches_replays_with_other_rows_and_lengths():
    """No context at all among them: then no CTA of an attention has work, and the launch behind it still waits."""
    work = Layers([5000], 7)
    work.run(early=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = work.run(early=True)
    for turn, context in enumerate((5000, 0, -7, 63, 4096, -7, -7, 1, 64, 57, 4999)):
        work.context_lens.fill_(max(context, 0))
        work.seq_lens.fill_(context + 7)
        work.hidden.copy_(torch.randn(work.hidden.shape, generator=torch.Generator().manual_seed(turn)))
        work.place()
        for _ in range(20):
            graph.replay()
        found, pool = [one.hidden.clone() for one in made], work.pool.clone()
        for own, other in zip(found, work.run(early=False), strict=True):
            assert_bitwise_equal(own, other.hidden, f"context {context}")
        assert_bitwise_equal(pool, work.pool)


@pytest.mark.gpu
@pytest.mark.parametrize(("context", "late_rows"), [(2041, 0), (2048, 32)])
def test_an_early_attention_waits_for_its_queries_and_rows(context, late_rows):
    """The kernel before it lets it begin at once, and writes queries and a page, NaN until then, 30 us later: that with the
    block's first rows, or the last one of the context."""
    work, at = Layers([context], 7), (context - 1) // 32
    after, _ = work.weights[0]
    rows = torch.randn(7 * 8 + 32, 576).to("cuda", torch.bfloat16)  # queries, and the page
    pool, held = work.pool[:, 0].contiguous(), context - at * 32
    rows[56 : 56 + held] = pool[int(work.table[0, at]), :held]
    # Page 0 of this memory is written late, with the queries in front of it.
    memory = torch.empty(rows.numel() + pool.numel(), dtype=rows.dtype, device="cuda")
    late, pages = memory[: rows.numel()], memory[56 * 576 :].view(-1, 32, 576)
    pages[1:] = pool
    table = (work.table + 1).int()
    table[0, at] = 0
    queries = memory[: 56 * 576].view(1, 7, 8, 576)

    def attend(*, early: bool) -> torch.Tensor:
        parts = attention_parts(
            queries, pages, table, work.context_lens, work.seq_lens, kv_lora_rank=512, softmax_scale=0.1,
            value_weights=work.values, early=early, late_rows=late_rows,
        )  # fmt: skip
        return between_attentions(parts, work.hidden, after, None, backend="cute", workspace=work.workspace).values

    late.copy_(rows.flatten())
    wanted = attend(early=False)
    assert not wanted.isnan().any()
    check_waits(late, rows.flatten(), lambda: [attend(early=True)], [wanted])


@pytest.mark.gpu
def test_early_launches_of_one_form_follow_each_other():
    """With values that are given, and nothing between them: each has its own number."""
    after, before = layers(LAYERS, "cuda", torch.bfloat16)
    workspace, given = BetweenWorkspace(LAYERS, torch.device("cuda")), inputs(LAYERS, 7, "cuda", torch.bfloat16)
    options = {"backend": "cute", "workspace": workspace, "early": True}
    wanted = between_attentions(*given, after, before, **options)
    for _ in range(300):
        made = between_attentions(*given, after, before, **options)
    assert_bitwise_equal(made.queries, wanted.queries)
    assert workspace.counters[True, True, False, False][-1] == 301
