"""Drafts that the fused Markov chain draws at a temperature, against a float64 softmax of its own logits and `invert_cdf`."""

import dataclasses
import math

import pytest
import torch
from kernel_kit import DEVICE, programs_at_once, watched_memory

from dspark_model.bench.timing import capture
from dspark_model.ops import ChainWorkspace, markov_chain, tempered_softmax
from dspark_model.ops.markov_chain import ChainPlan, invert_cdf
from dspark_model.testing import assert_bitwise_equal, poison_

NEAR = 1e-5  # of a boundary of the cumulative distribution, where rounding may decide
HIGHEST = 1 - 2**-24
MOST = 132 if DEVICE == "cuda" else 1
HERE = torch.device(DEVICE)


def held_plan(vocab: int, rank: int) -> ChainPlan:
    tile = next(tile for tile in (16, 64, 256, 1024) if tile * MOST >= vocab and (tile >= 64 or DEVICE == "cpu"))
    return ChainPlan.of_tiles(tile, MOST, vocab, max(16, 1 << (rank - 1).bit_length()))


def streaming_plan(vocab: int, rank: int) -> ChainPlan:
    """Several tiles to a program."""
    return ChainPlan.of_tiles(64, min(MOST, -(-vocab // 128)), vocab, 16, held=False)


PLANS = {"held": held_plan, "streaming": streaming_plan}


def tables(vocab: int, rank: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows apart from one another, with NaN between."""
    wide = poison_(torch.empty(2, vocab, rank + 3, dtype=dtype))
    wide[..., :rank] = torch.randn(2, vocab, rank)
    return tuple(wide.to(DEVICE)[..., :rank])


def fused(base, anchors, w1, w2, temperatures, uniforms, *, plan="held", keep_biased=True, workspace=None):
    """The fused chain on moved inputs, watched.  plan: by name, or one."""
    base, anchors = base.to(DEVICE), anchors.to(DEVICE)
    draws = [tensor if tensor is None else tensor.float().to(DEVICE) for tensor in (temperatures, uniforms)]
    batch, drafts, vocab = base.shape
    if workspace is None:
        shape = PLANS[plan](vocab, 1 if w2 is None else w2.shape[1]) if isinstance(plan, str) else plan
        shape = dataclasses.replace(shape, sampled=temperatures is not None)
        workspace = ChainWorkspace.for_plan(shape, batch, drafts, base.device)
    reads = [tensor for tensor in (base, anchors, w1, w2, *draws) if tensor is not None]
    with watched_memory(*reads, writes=(workspace.words, workspace.generation)):
        options = {"keep_biased": keep_biased, "backend": "triton", "workspace": workspace}
        return markov_chain(base, anchors, w1, w2, temperatures=draws[0], uniforms=draws[1], **options)


def draw(rows: torch.Tensor, temperature: float, uniforms: list[float] | torch.Tensor, *, plan="held") -> list[int]:
    """One draft for each uniform, at most 64, from the same logits [V]."""
    uniforms = torch.as_tensor(uniforms, dtype=torch.float32)[:, None].contiguous()
    count = len(uniforms)
    base, anchors = rows.float().expand(count, 1, -1).contiguous(), torch.zeros(count, dtype=torch.int64)
    chain = fused(base, anchors, None, None, torch.full((count,), temperature), uniforms, plan=plan)
    return chain.draft_tokens[:, 0].tolist()


def check(base, anchors, w1, w2, temperatures, uniforms, chain) -> None:
    """Logits within the bound of float64 along the chain's tokens; these are what torch draws from the same logits, unless the
    uniform lies close to a boundary, and always possible."""
    tokens, biased = chain.draft_tokens, chain.biased_logits
    base, anchors, temperatures, uniforms = (x.to(tokens.device) for x in (base, anchors, temperatures, uniforms))
    previous = torch.cat((anchors[:, None], tokens[:, :-1]), dim=1)
    assert_bitwise_equal(chain.previous_tokens, previous)
    if w1 is None:
        assert_bitwise_equal(biased, base)
    else:
        rows, columns = w1[previous].double(), w2.double().T
        bound = (w1.shape[1] + 2) * 2.0**-23 * (base.double().abs() + rows.abs() @ columns.abs())
        assert ((biased - (base + rows @ columns)).abs() <= bound).all()
    greedy = temperatures == 0
    assert_bitwise_equal(tokens[greedy], biased.argmax(-1)[greedy])
    probs = tempered_softmax(biased, temperatures)
    assert (probs.gather(-1, tokens[..., None])[~greedy] > 0).all()
    wanted = invert_cdf(probs.flatten(0, 1), uniforms.flatten()).view_as(tokens)
    exact = torch.softmax((biased / torch.where(greedy, 1.0, temperatures)[:, None, None]).double(), -1)
    running = exact.cumsum(-1)
    near = (running - uniforms[..., None]).abs().amin(-1) <= NEAR
    assert ((tokens == wanted) | near | greedy[:, None]).all()
    # Near a boundary the id is one of those that meet there.
    behind, own = (values.gather(-1, tokens[..., None])[..., 0] for values in (running, exact))
    inside = (uniforms <= behind + NEAR) & (uniforms >= behind - own - NEAR)
    assert (inside | greedy[:, None]).all()


def case(batch: int, drafts: int, vocab: int, rank: int, dtype: torch.dtype = torch.bfloat16):
    """Some requests greedy; temperatures from nearly greedy to nearly even."""
    base, anchors = 2 * torch.randn(batch, drafts, vocab), torch.randint(vocab, (batch,))
    heat = torch.tensor([1.0, 0.0, 0.6, 1e-5, 30.0, 1e30, 0.3])[torch.arange(batch) % 7]
    return base, anchors, *(tables(vocab, rank, dtype) if rank else (None, None)), heat, torch.rand(batch, drafts)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("batch", "drafts", "vocab", "rank", "dtype"),
    [
        (1, 1, 1, 1, torch.bfloat16),
        (1, 16, 33, 5, torch.float16),
        (7, 7, 129, 16, torch.bfloat16),
        (17, 2, 300, 40, torch.bfloat16),
        (20, 3, 70, 0, None),
    ],
)
def test_draws_are_those_of_torch(plan, batch, drafts, vocab, rank, dtype):
    inputs = case(batch, drafts, vocab, rank, dtype)
    check(*inputs, fused(*inputs, plan=plan))


def test_draws_with_float32_tables():
    inputs = case(4, 3, 200, 20, torch.float32)
    check(*inputs, fused(*inputs, plan="streaming"))


@pytest.mark.skipif(DEVICE == "cuda", reason="on a device programs meet anyway")
@pytest.mark.parametrize(
    ("batch", "drafts", "vocab", "plan"),
    [
        (1, 3, 61, ChainPlan.of_tiles(16, 4, 61, 16)),
        (3, 2, 200, ChainPlan.of_tiles(16, 5, 200, 16)),
        (18, 2, 45, ChainPlan.of_tiles(16, 3, 45, 16)),
    ],
)
def test_programs_that_meet_find_the_same_draws(batch, drafts, vocab, plan):
    """Programs in threads, launch after launch past the last of the 256 tags, against torch."""
    workspace = ChainWorkspace.for_plan(dataclasses.replace(plan, sampled=True), batch, drafts, HERE)
    workspace.generation.fill_(254)
    for _ in range(3):
        inputs = case(batch, drafts, vocab, 5)
        with programs_at_once():
            chain = fused(*inputs, workspace=workspace)
        check(*inputs, chain)
    assert workspace.generation.item() == 257


@pytest.mark.skipif(DEVICE == "cuda", reason="on a device programs meet anyway")
def test_draws_fall_to_the_program_that_holds_them():
    """Each of four programs gets its ids, at the boundaries too; parts without any probability get none."""
    rows = torch.zeros(64)
    rows[16:32], rows[40], rows[63] = -math.inf, -math.inf, -math.inf
    ids = rows.isfinite().nonzero()[:, 0].tolist()
    starts, some = torch.arange(len(ids)) / len(ids), slice(None, None, 3)
    bounds = torch.tensor([0, 1, 14, 15, 16, 17, 31, 32, 47, 48, 63])  # in programs and between them
    plan = ChainPlan.of_tiles(16, 4, 64, 16)
    with programs_at_once():
        assert draw(rows, 1.0, (starts + 0.5 / len(ids))[some], plan=plan) == ids[some]
        assert draw(rows, 0.1, [0.0, HIGHEST], plan=plan) == [0, 62]
        assert draw(torch.zeros(64), 1.0, bounds / 64, plan=plan) == bounds.tolist()
        assert draw(torch.zeros(64), 1.0, (bounds + 1) / 64 - 2**-24, plan=plan) == bounds.tolist()
        assert draw(torch.zeros(64), 1.0, [-1.0, 1.0, math.inf], plan=plan) == [0, 63, 63]
        assert 0 <= draw(torch.zeros(64), 1.0, [math.nan], plan=plan)[0] < 64
        rows = torch.full((64,), -math.inf)
        rows[[16, 17, 63]] = torch.tensor([-81.0, -79.0, 0.0])  # 81 below the largest has no probability
        assert draw(rows, 1.0, [0.0, HIGHEST], plan=plan) == [17, 63]
        for place, value in ((5, math.nan), (40, math.nan), (40, math.inf)):
            rows[place] = value
            assert draw(rows, 1.0, [0.0, 0.9], plan=plan) == [0, 0]


@pytest.mark.parametrize("plan", PLANS)
def test_equal_logits_change_ids_at_exact_boundaries(plan):
    """With 2^n equal logits cumulative probabilities are exact: a uniform at one belongs to the id behind."""
    for size in (1, 8, 64, 256):
        ids = torch.arange(0, size, -(-size // 8))
        uniforms = torch.cat((ids / size, (ids + 1) / size - 2**-24))
        assert draw(torch.full((size,), -7.0), 2.0, uniforms, plan=plan) == 2 * ids.tolist()


@pytest.mark.parametrize("plan", PLANS)
def test_the_one_possible_id_is_always_drawn(plan):
    for place in (0, 63, 64, 199):
        rows = torch.full((200,), -math.inf)
        rows[place] = -40.0
        for temperature in (1e-5, 1.0, 1e30):
            assert draw(rows, temperature, [0.0, 0.5, HIGHEST], plan=plan) == [place] * 3


@pytest.mark.parametrize("plan", PLANS)
def test_an_id_without_probability_is_never_drawn(plan):
    """Logits of -inf, and such as are too far below the largest; at both ends, where a draw of 0 or nearly 1 would fall."""
    rows = torch.randn(300)
    low = torch.rand(300) < 0.5
    low[[0, 1, 298, 299]] = True
    rows[low] = torch.where(torch.arange(300) % 2 == 0, -math.inf, -120.0)[low]
    possible = (~low).nonzero()[:, 0].tolist()
    uniforms = torch.cat((torch.tensor([0.0, HIGHEST, 2**-24]), torch.rand(61)))
    ids = draw(rows, 1.0, uniforms, plan=plan)
    assert set(ids) <= set(possible) and ids[:2] == [possible[0], possible[-1]]
    # The largest last: an id 79 below is possible, one 81 below is not.
    rows = torch.tensor([-81.0, -79.0, *[-100.0] * 130, 0.0])
    assert draw(rows, 1.0, [0.0, 1e-6], plan=plan) == [1, 132]
    assert draw(rows.flip(0), 1.0, [0.0, HIGHEST], plan=plan) == [0, 0]


@pytest.mark.parametrize("plan", PLANS)
def test_rows_without_a_distribution_get_the_first_id_as_in_torch(plan):
    inf, nan, vocab = math.inf, math.nan, 200
    rows = torch.randn(6, 1, vocab)
    rows[0, 0, 150], rows[1, 0, 150], rows[2], rows[3] = nan, inf, -inf, nan
    rows[4, 0, [3, 150]] = torch.tensor([inf, nan])
    rows[5, 0, 150] = 3e38  # infinite once divided
    anchors, temperatures, uniforms = torch.zeros(6, dtype=torch.int64), torch.full((6,), 0.1), torch.full((6, 1), 0.9)
    options = {"temperatures": temperatures, "uniforms": uniforms}
    assert markov_chain(rows, anchors, None, None, **options).draft_tokens.flatten().tolist() == [0] * 6
    chain = fused(rows, anchors, None, None, temperatures, uniforms, plan=plan)
    assert chain.draft_tokens.flatten().tolist() == [0] * 6


def test_temperatures_at_both_ends():
    rows = torch.tensor([1.0, 3.0, 2.999, 3.0])
    assert draw(rows, 1e-5, [0.0, 0.499, 0.5, HIGHEST]) == [1, 1, 3, 3]
    assert draw(rows, 1e30, [0.0, 0.2499, 0.25, 0.74, 0.75, HIGHEST]) == [0, 0, 1, 2, 3, 3]
    # Far from 0 a step of float32 is worth 2^10 / 1e-5.
    assert draw(rows + 2.0**34, 1e-5, [0.3]) == draw(torch.zeros(4), 1e-5, [0.3])


def test_uniforms_outside_the_range_count_as_the_nearest_inside():
    """So that whatever is passed, some program finds an id."""
    rows = torch.randn(150)
    rows[[0, 149]] = -math.inf
    assert draw(rows, 1.0, [-1.0, -math.inf, 1.0, 2.0, math.inf]) == [1, 1, 148, 148, 148]
    assert 1 <= draw(rows, 1.0, [math.nan])[0] <= 148


def test_draws_follow_the_distribution():
    """Evenly spread uniforms hit each id as often as its probability says."""
    logits, count = 1.5 * torch.randn(30), 8192 if DEVICE == "cuda" else 256
    uniforms = ((torch.arange(count) + 0.5) / count).view(-1, 16, 16)
    base, anchors = logits.expand(16, 16, -1).contiguous(), torch.zeros(16, dtype=torch.int64)
    heat = torch.full((16,), 1.5)
    tokens = [fused(base, anchors, None, None, heat, uniform).draft_tokens.cpu() for uniform in uniforms]
    shares = torch.bincount(torch.cat(tokens).flatten(), minlength=30) / count
    torch.testing.assert_close(shares, torch.softmax(logits / 1.5, -1), rtol=0.0, atol=1.01 / count)


@pytest.mark.parametrize("plan", PLANS)
def test_greedy_requests_among_drawn_ones_keep_their_drafts(plan):
    base, anchors, w1, w2, _, uniforms = case(5, 4, 130, 9)
    base[0, :, [70, 129]] = 99.0
    greedy = fused(base, anchors, w1, w2, None, None, plan=plan)
    mixed = fused(base, anchors, w1, w2, torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0]), uniforms, plan=plan)
    for name in ("draft_tokens", "previous_tokens"):
        assert_bitwise_equal(getattr(mixed, name)[::2], getattr(greedy, name)[::2], name)
    torch.testing.assert_close(mixed.biased_logits[::2], greedy.biased_logits[::2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("plan", PLANS)
def test_nan_of_one_request_does_not_reach_another(plan):
    base, anchors, w1, w2, _, uniforms = case(3, 4, 90, 8)
    anchors, heat = torch.tensor([3, 4, 5]), torch.full((3,), 0.8)
    w1[4] = math.nan
    base[:, :, 4] = -99.0
    chain = fused(base, anchors, w1, w2, heat, uniforms, plan=plan)
    assert chain.draft_tokens[1, 0] == 0 and chain.biased_logits[1, 0].isnan().all()
    kept = torch.tensor([0, 2])
    alone = fused(base[kept], anchors[kept], w1, w2, heat[kept], uniforms[kept], plan=plan)
    for name in ("draft_tokens", "previous_tokens", "biased_logits"):
        assert_bitwise_equal(getattr(chain, name).cpu()[kept], getattr(alone, name).cpu(), name)


@pytest.mark.parametrize("plan", PLANS)
def test_logits_are_kept_only_when_asked_for(plan):
    inputs = case(3, 3, 70, 6)
    kept, bare = (fused(*inputs, plan=plan, keep_biased=keep) for keep in (True, False))
    assert bare.biased_logits is None
    assert_bitwise_equal(bare.draft_tokens, kept.draft_tokens)


def test_an_empty_batch():
    workspace = ChainWorkspace.for_tables(0, 3, 9, None, HERE, sampled=True)
    chain = fused(*case(0, 3, 9, 0), workspace=workspace)
    assert chain.draft_tokens.shape == (0, 3) and chain.biased_logits.shape == (0, 3, 9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"uniforms": None}, "uniforms: float32 .2, 3. wanted"),
        ({"uniforms": torch.rand(3, 3)}, "uniforms: contiguous float32"),
        ({"uniforms": torch.rand(3, 2).T}, "uniforms: contiguous float32"),
        ({"uniforms": torch.rand(2, 3).double()}, "uniforms: contiguous float32"),
        ({"temperatures": torch.ones(3)}, "temperatures: contiguous float32"),
        ({"temperatures": torch.ones(2, dtype=torch.int64)}, "temperatures: contiguous float32"),
        ({"temperatures": None}, "a plan without temperatures wanted, got one for calls with temperatures"),
        (
            {"workspace": ChainWorkspace.for_tables(2, 3, 9, None, torch.device("cpu"))},
            "a plan for calls with temperatures wanted, got one without",
        ),
        ({"base_logits": torch.zeros(65, 3, 9)}, "at most 64 requests"),
    ],
)
def test_what_is_refused(changes, message):
    good = {
        "base_logits": torch.zeros(2, 3, 9),
        "anchors": torch.zeros(2, dtype=torch.int64),
        "markov_w1": None,
        "markov_w2": None,
        "temperatures": torch.ones(2),
        "uniforms": torch.rand(2, 3),
        "workspace": ChainWorkspace.for_tables(2, 3, 9, None, torch.device("cpu"), sampled=True),
    }
    if DEVICE == "cpu":  # the interpreter alone takes these where they are
        assert markov_chain(**good, backend="triton").draft_tokens.shape == (2, 3)
    with pytest.raises(ValueError, match=message):
        markov_chain(**(good | changes), backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "vocab"), [(1, 20480), (4, 20483), (64, 20480), (3, 40000)])
def test_programs_meet_on_the_device(batch, vocab):
    """All multiprocessors; the tags begin anew on the way.  The largest vocabulary has several tiles to a program."""
    w1, w2 = tables(vocab, 256)
    workspace = ChainWorkspace.for_tables(batch, 7, vocab, w2, HERE, sampled=True)
    assert workspace.plan.backend == "triton" and workspace.plan.programs > 60
    workspace.generation.fill_(251)
    for _ in range(4):
        base, anchors, _, _, heat, uniforms = case(batch, 7, vocab, 0)
        inputs = (base, anchors, w1, w2, heat, uniforms)
        chain = fused(*inputs, workspace=workspace)
        check(*inputs, chain)
        again = fused(*inputs, keep_biased=False, workspace=workspace)
        assert_bitwise_equal(again.draft_tokens, chain.draft_tokens)


@pytest.mark.gpu
def test_launches_with_draws_repeat_their_bits():
    """1,000 launches, past the last of the 256 tags, without waiting for the host between them; greedy ones, which meet
    elsewhere, in between."""
    base, anchors, w1, w2, heat, uniforms = (tensor.to(HERE) for tensor in case(4, 7, 20483, 256))
    workspace = ChainWorkspace.for_tables(4, 7, 20483, w2, HERE, sampled=True)
    plain = ChainWorkspace.for_tables(4, 7, 20483, w2, HERE)
    options = {"temperatures": heat, "uniforms": uniforms, "backend": "triton", "workspace": workspace}
    first, differ = markov_chain(base, anchors, w1, w2, **options), torch.zeros((), dtype=torch.int64, device=HERE)
    for _ in range(1000):
        greedy = markov_chain(base, anchors, w1, w2, backend=plain.plan.backend, workspace=plain)
        chain = markov_chain(base, anchors, w1, w2, **options)
        differ += (chain.draft_tokens != first.draft_tokens).sum() + (chain.biased_logits != first.biased_logits).sum()
        differ += (chain.draft_tokens != greedy.draft_tokens)[heat == 0].sum()
    assert differ.item() == 0 and workspace.generation.item() == 1001


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "vocab"), [(1, 20480), (4, 20483)])
def test_a_graph_with_draws_replays(batch, vocab):
    """New inputs in each replay, past the last of the 256 tags."""
    inputs = [tensor.to(HERE) for tensor in case(batch, 7, vocab, 256)]
    base, anchors, w1, w2, heat, uniforms = inputs
    workspace = ChainWorkspace.for_tables(batch, 7, vocab, w2, HERE, sampled=True)
    workspace.generation.fill_(240)
    made = {}

    def work():
        options = {"temperatures": heat, "uniforms": uniforms, "backend": "triton", "workspace": workspace}
        made["chain"] = markov_chain(base, anchors, w1, w2, **options)

    graph = capture(work)
    for _ in range(20):
        base.normal_(std=2.0)
        anchors.random_(vocab)
        uniforms.uniform_()
        graph.replay()
        check(*inputs, made["chain"])
