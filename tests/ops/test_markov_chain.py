"""`markov_chain` and `invert_cdf` against a loop in float64; the fused chain also against `torch`."""

import dataclasses
import importlib.util
import math
import types

import pytest
import torch
from kernel_kit import DEVICE, watched_memory

from dspark_model.bench.timing import capture
from dspark_model.ops import ChainWorkspace, fused_chain_refusal, markov_chain
from dspark_model.ops.markov_chain import ChainPlan, cute_chain_refusal, invert_cdf
from dspark_model.testing import assert_bitwise_equal, poison_


def exact(base, anchors, w1, w2, tokens):
    """Biased logits along given tokens."""
    if w1 is None:
        return base.double()
    previous = torch.cat((anchors[:, None], tokens[:, :-1]), dim=1)
    return base.double() + w1[previous].double() @ w2.double().T


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_head", [True, False])
@pytest.mark.parametrize(("batch", "drafts", "vocab", "rank"), [(1, 1, 2, 1), (3, 7, 33, 5), (0, 3, 9, 2), (2, 8, 257, 16)])
def test_greedy_chain_matches_float64(dtype, with_head, batch, drafts, vocab, rank):
    base, anchors = torch.randn(batch, drafts, vocab), torch.randint(vocab, (batch,))
    w1, w2 = (torch.randn(vocab, rank).to(dtype), torch.randn(vocab, rank).to(dtype)) if with_head else (None, None)
    chain = markov_chain(base, anchors, w1, w2)
    assert (chain.draft_tokens.dtype, chain.draft_tokens.shape) == (torch.int64, (batch, drafts))
    assert chain.biased_logits.dtype is torch.float32
    wanted = exact(base, anchors, w1, w2, chain.draft_tokens)
    torch.testing.assert_close(chain.biased_logits.double(), wanted, rtol=1e-6, atol=1e-5)
    assert_bitwise_equal(chain.draft_tokens, chain.biased_logits.argmax(-1) if batch else chain.draft_tokens)
    assert_bitwise_equal(chain.previous_tokens, torch.cat((anchors[:, None], chain.draft_tokens[:, :-1]), dim=1))
    if not with_head:
        assert_bitwise_equal(chain.biased_logits, base)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ties_take_the_lowest_id(dtype):
    base = torch.tensor([[[1.0, 5.0, 5.0, 0.0], [3.0, 3.0, 3.0, 3.0]]])
    zeros = torch.zeros(4, 2, dtype=dtype)
    assert markov_chain(base, torch.tensor([0]), zeros, zeros).draft_tokens.tolist() == [[1, 0]]


def test_only_rows_of_previous_tokens_are_read():
    w1 = poison_(torch.empty(6, 2))
    w1[3], w1[4] = 0.0, 0.0
    base = torch.zeros(1, 3, 6)
    base[0, :, 4] = 9.0
    assert markov_chain(base, torch.tensor([3]), w1, torch.ones(6, 2)).draft_tokens.tolist() == [[4, 4, 4]]


def test_each_draft_depends_on_the_one_before():
    """W2 W1[x] puts all weight on x + 1, so the chain counts up from the anchor."""
    count = 20.0 * torch.eye(8).roll(1, 0)
    chain = markov_chain(torch.randn(2, 5, 8), torch.tensor([1, 6]), torch.eye(8), count)
    assert chain.draft_tokens.tolist() == [[2, 3, 4, 5, 6], [7, 0, 1, 2, 3]]


@pytest.mark.parametrize("with_head", [True, False])
def test_rows_of_temperature_0_stay_greedy_and_others_are_drawn(with_head):
    base, anchors = torch.randn(3, 4, 11), torch.tensor([0, 5, 10])
    tables = (torch.randn(11, 3), torch.randn(11, 3)) if with_head else (None, None)
    temperatures, uniforms = torch.tensor([0.0, 0.7, 0.0]), torch.rand(3, 4)
    greedy = markov_chain(base, anchors, *tables)
    drawn = markov_chain(base, anchors, *tables, temperatures=temperatures, uniforms=uniforms)
    for row in (0, 2):
        assert_bitwise_equal(drawn.draft_tokens[row], greedy.draft_tokens[row])
    biased = exact(base, anchors, *tables, drawn.draft_tokens)[1]
    for k in range(4):
        running = torch.softmax(biased[k] / 0.7, -1).cumsum(-1)
        token, uniform = int(drawn.draft_tokens[1, k]), float(uniforms[1, k])
        assert uniform < float(running[token]) + 1e-6
        assert token == 0 or uniform >= float(running[token - 1]) - 1e-6


def test_draws_follow_the_distribution():
    """20,000 evenly spread uniforms hit each token as often as its probability says."""
    logits, count = torch.randn(7), 20_000
    uniforms = ((torch.arange(count) + 0.5) / count)[:, None]
    base = logits.expand(count, 1, 7)
    tokens = markov_chain(
        base, torch.zeros(count, dtype=torch.int64), None, None, temperatures=torch.full((count,), 1.5), uniforms=uniforms
    ).draft_tokens
    shares = torch.bincount(tokens.flatten(), minlength=7) / count
    torch.testing.assert_close(shares, torch.softmax(logits / 1.5, -1), rtol=0.0, atol=2 / count)


@pytest.mark.parametrize("total", [1.0, 0.25, 3.0])
def test_inversion_never_returns_an_impossible_index(total):
    probs = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0]) * total
    highest = math.nextafter(1.0, 0.0)
    uniforms = [0.0, 0.25, 0.49999, 0.5, 0.75, 1 - 2**-24, highest]
    index = invert_cdf(probs.expand(7, 5), torch.tensor(uniforms, dtype=torch.float64))
    assert index.tolist() == [1, 1, 1, 3, 3, 3, 3]


def test_inversion_finds_probabilities_below_a_float32_step_of_the_sum():
    """1e-8 behind 0.9 vanishes in a float32 running sum."""
    probs = torch.tensor([[0.9, 1e-8, 0.1]])
    wide = probs[0].double()
    inside = (wide[0] + wide[1] / 2) / wide.sum()
    assert int(invert_cdf(probs, inside[None])) == 1


def test_inversion_of_many_probabilities():
    probs = torch.full((1, 100_000), 1e-5)
    for wanted in (0, 31_234, 99_999):
        assert int(invert_cdf(probs, torch.tensor([(wanted + 0.5) / 100_000], dtype=torch.float64))) == wanted


def test_a_uniform_that_was_rounded_up_to_1_gives_the_last_possible_index():
    assert invert_cdf(torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([1.0])).tolist() == [1]


def test_inversion_of_an_empty_batch():
    assert invert_cdf(torch.zeros(0, 4), torch.zeros(0)).shape == (0,)


# The fused chain.  In the interpreter programs run one after the other, so that there one program has to do it all.
MOST = 132 if DEVICE == "cuda" else 1
FLOAT32_STEP = 2.0**-23


def tables(vocab: int, rank: int, dtype: torch.dtype, *, gap: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows apart from one another, with NaN between."""
    wide = poison_(torch.empty(2, vocab, rank + gap, dtype=dtype))
    wide[..., :rank] = torch.randn(2, vocab, rank)
    return tuple(wide.to(DEVICE)[..., :rank])


def held_plan(vocab: int, rank: int) -> ChainPlan:
    """All rows of W2 in one tile, or in tiles of as many programs as can be resident."""
    tile = next(tile for tile in (16, 64, 256, 1024) if tile * MOST >= vocab and (tile >= 64 or DEVICE == "cpu"))
    return ChainPlan.of_tiles(tile, MOST, vocab, max(16, 1 << (rank - 1).bit_length()))


def streaming_plan(vocab: int, rank: int) -> ChainPlan:
    """Several tiles to a program, of 16 columns at a time."""
    return ChainPlan.of_tiles(64, min(MOST, -(-vocab // 128)), vocab, 16, held=False)


PLANS = {"held": held_plan, "streaming": streaming_plan}


def fused(base, anchors, w1, w2, *, plan: str = "held", keep_biased: bool = True, workspace=None):
    """The fused chain on moved inputs, watched."""
    base, anchors = base.to(DEVICE), anchors.to(DEVICE)
    batch, drafts, vocab = base.shape
    if workspace is None:
        shape = PLANS[plan](vocab, 1 if w2 is None else w2.shape[1])
        workspace = ChainWorkspace.for_plan(shape, batch, drafts, base.device)
    reads = [tensor for tensor in (base, anchors, w1, w2) if tensor is not None]
    with watched_memory(*reads, writes=(workspace.words, workspace.generation)):
        backend = workspace.plan.backend
        return markov_chain(base, anchors, w1, w2, keep_biased=keep_biased, backend=backend, workspace=workspace)


def check_fused(base, anchors, w1, w2, chain) -> None:
    """Biased logits within the stated bound of float64 along the chain's own tokens, and these its largest logits."""
    tokens = chain.draft_tokens.cpu()
    base, w1, w2 = base.cpu(), *(None if w is None else w.cpu() for w in (w1, w2))
    wanted = exact(base, anchors, w1, w2, tokens)
    rank, w1, w2 = (-2, None, None) if w1 is None else (w1.shape[1], w1.abs(), w2.abs())
    bound = (rank + 2) * FLOAT32_STEP * exact(base.abs(), anchors, w1, w2, tokens)
    assert (chain.biased_logits.cpu().double() - wanted).abs().le(bound).all()
    assert_bitwise_equal(tokens, chain.biased_logits.cpu().argmax(-1))
    assert_bitwise_equal(chain.previous_tokens.cpu(), torch.cat((anchors[:, None], tokens[:, :-1]), dim=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("batch", "drafts", "vocab", "rank"), [(1, 1, 1, 1), (1, 7, 2, 3), (3, 16, 33, 5), (17, 2, 129, 16), (2, 3, 300, 40)]
)
def test_fused_chain_matches_float64(dtype, plan, batch, drafts, vocab, rank):
    base, anchors, (w1, w2) = torch.randn(batch, drafts, vocab), torch.randint(vocab, (batch,)), tables(vocab, rank, dtype)
    if plan == "held" and dtype is torch.float32 and DEVICE == "cuda":
        pytest.skip("W2 in float32 is not held")
    chain = fused(base, anchors, w1, w2, plan=plan)
    assert (chain.draft_tokens.dtype, chain.draft_tokens.shape) == (torch.int64, (batch, drafts))
    check_fused(base, anchors, w1, w2, chain)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("vocab", [1, 64, 131])
def test_fused_chain_without_a_head_is_equal_to_the_bit(plan, vocab):
    base, anchors = torch.randn(5, 4, vocab), torch.randint(vocab, (5,))
    chain, wanted = fused(base, anchors, None, None, plan=plan), markov_chain(base, anchors, None, None)
    for name in ("draft_tokens", "previous_tokens", "biased_logits"):
        assert_bitwise_equal(getattr(chain, name).cpu(), getattr(wanted, name), name)


@pytest.mark.parametrize("plan", PLANS)
def test_fused_chain_counts_up_and_wraps_around(plan):
    """W2 W1[x] puts all weight on x + 1."""
    count = 20.0 * torch.eye(80).roll(1, 0)
    w1, w2 = torch.eye(80).bfloat16().to(DEVICE), count.bfloat16().to(DEVICE)
    anchors = torch.tensor([1, 77])
    chain = fused(torch.randn(2, 5, 80), anchors, w1, w2, plan=plan)
    assert chain.draft_tokens.tolist() == [[2, 3, 4, 5, 6], [78, 79, 0, 1, 2]]
    assert chain.previous_tokens.tolist() == [[1, 2, 3, 4, 5], [77, 78, 79, 0, 1]]


@pytest.mark.parametrize("plan", PLANS)
def test_fused_ties_nan_and_infinities_are_chosen_as_argmax_does(plan):
    """Rows of one vocabulary each, with the winner in any tile; negative, since their bits order the other way round."""
    vocab, inf, nan = 200, math.inf, math.nan
    rows = torch.full((8, vocab), -3.0)
    rows[0, [70, 150, 199]] = -2.0  # tie across tiles
    rows[1, [5, 6]] = 7.0  # tie within one
    rows[2, [130, 190]] = torch.tensor([-0.0, 0.0])  # a tie too
    rows[3, [10, 120, 180]] = torch.tensor([inf, nan, nan])
    rows[4] = -inf
    rows[5, [100, 101]] = inf
    rows[6] = -rows[3]
    rows[6, 180] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)  # a NaN with its sign set
    rows[7] = nan
    base, anchors = rows[None].expand(2, -1, -1).contiguous(), torch.tensor([0, 1])
    chain = fused(base, anchors, None, None, plan=plan)
    assert chain.draft_tokens[0].tolist() == [70, 5, 130, 120, 0, 100, 120, 0]
    assert_bitwise_equal(chain.draft_tokens.cpu(), base.argmax(-1))


@pytest.mark.parametrize("plan", PLANS)
def test_nan_of_one_request_does_not_reach_another(plan):
    base, anchors, (w1, w2) = torch.randn(3, 4, 90), torch.tensor([3, 4, 5]), tables(90, 8, torch.float32)
    if DEVICE == "cuda":
        w1, w2 = w1.bfloat16(), w2.bfloat16()
    w1[4] = math.nan
    base[:, :, 4] = -99.0
    chain = fused(base, anchors, w1, w2, plan=plan)
    assert chain.draft_tokens[1, 0] == 0 and chain.biased_logits[1, 0].isnan().all()
    kept = torch.tensor([0, 2])
    alone = fused(base[kept], anchors[kept], w1, w2, plan=plan)
    assert alone.biased_logits.isfinite().all()
    for name in ("draft_tokens", "previous_tokens", "biased_logits"):
        assert_bitwise_equal(getattr(chain, name).cpu()[kept], getattr(alone, name).cpu(), name)


@pytest.mark.parametrize("plan", PLANS)
def test_fused_logits_are_kept_only_when_asked_for(plan):
    base, anchors, (w1, w2) = torch.randn(2, 3, 70), torch.tensor([3, 69]), tables(70, 6, torch.bfloat16)
    kept, bare = (fused(base, anchors, w1, w2, plan=plan, keep_biased=keep) for keep in (True, False))
    assert bare.biased_logits is None
    assert markov_chain(base, anchors, w1.cpu(), w2.cpu(), keep_biased=False).biased_logits is None
    assert_bitwise_equal(bare.draft_tokens, kept.draft_tokens)
    assert_bitwise_equal(bare.previous_tokens, kept.previous_tokens)


def test_fused_chain_reads_logits_of_any_row_stride():
    base, anchors, (w1, w2) = torch.randn(3, 4, 70), torch.tensor([3, 69, 0]), tables(70, 6, torch.bfloat16)
    wide = poison_(torch.empty(4, 3, 90)).to(DEVICE)
    wide[..., :70] = base.transpose(0, 1)
    chain, wanted = fused(wide.transpose(0, 1)[..., :70], anchors, w1, w2), fused(base, anchors, w1, w2)
    assert_bitwise_equal(chain.biased_logits, wanted.biased_logits)


@pytest.mark.parametrize("plan", PLANS)
def test_a_workspace_serves_launch_after_launch(plan):
    """Past the last of the 256 tags; each launch must use its own words, not those of the launch before."""
    vocab, drafts = 12, 2
    (w1, w2), device = tables(vocab, 3, torch.bfloat16), torch.device(DEVICE)
    workspace = ChainWorkspace.for_plan(PLANS[plan](vocab, 3), 1, drafts, device)
    workspace.generation.fill_(250)
    for launch in range(12):
        base = torch.zeros(1, drafts, vocab)
        base[0, 0, launch], base[0, 1, launch % 11] = 99.0, 99.0
        chain = fused(base, torch.tensor([launch]), w1, w2, workspace=workspace)
        assert chain.draft_tokens.tolist() == [[launch, launch % 11]]
    assert workspace.generation.item() == 262


@pytest.mark.parametrize(
    ("batch", "vocab", "rank", "dtype", "shared", "wanted"),
    [
        (1, 20480, 256, torch.bfloat16, 232_448, ChainPlan(80, 256, 1, 256, True, 8)),
        (64, 20480, 256, torch.bfloat16, 232_448, ChainPlan(80, 256, 1, 256, True, 8)),
        (4, 4099, 48, torch.float16, 232_448, ChainPlan(65, 64, 1, 64, True, 4)),
        (1, 20480, 256, torch.bfloat16, 101_376, ChainPlan(80, 256, 1, 128, False, 8)),
        (1, 163840, 256, torch.bfloat16, 232_448, ChainPlan(128, 256, 5, 128, False, 8)),
        (1, 20480, 256, torch.float32, 232_448, ChainPlan(107, 64, 3, 16, False, 4)),
        (1, 1, 0, torch.bfloat16, 232_448, ChainPlan(1, 64, 1, 16, True, 4)),
    ],
)
def test_plans_put_one_program_on_a_multiprocessor_and_cover_the_vocabulary(
    monkeypatch, batch, vocab, rank, dtype, shared, wanted
):
    chip = types.SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=shared)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    plan = ChainPlan.of_triton(batch, vocab, rank, dtype, torch.device("cuda"))
    assert plan == wanted
    assert (
        plan.programs <= 132 and (plan.programs - 1) * plan.tiles * plan.tile < vocab <= plan.programs * plan.tiles * plan.tile
    )


@pytest.fixture
def h200(monkeypatch):
    """What the choice of a plan asks for, as on an H200 with all packages."""
    chip = types.SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=232_448)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    return torch.device("cuda")


@pytest.mark.parametrize(
    ("batch", "vocab", "rank", "programs", "warps", "copies"),
    [
        (1, 20480, 256, 128, 10, 4),
        (4, 20480, 256, 128, 10, 4),
        (16, 20480, 256, 128, 10, 1),
        (5, 4099, 96, 129, 2, 1),
        (1, 1, 32, 1, 1, 4),
        (1, 33792, 32, 132, 16, 4),
    ],
)
def test_few_requests_have_rows_in_registers(h200, batch, vocab, rank, programs, warps, copies):
    plan = ChainPlan.choose(batch, vocab, rank, torch.bfloat16, h200)
    wanted = ChainPlan(programs, 16 * warps, 1, rank, True, warps, prefetch=True, backend="cute", copies=copies)
    assert plan == wanted
    assert plan.programs <= 132 and (plan.programs - 1) * plan.tile < vocab <= plan.programs * plan.tile
    assert ChainWorkspace.for_plan(plan, batch, 7, torch.device("cpu")).words.shape == (copies * 7, batch, programs)
    assert ChainPlan.choose(batch, vocab, rank, torch.bfloat16, h200, chunked=False).backend == "triton"
    drawn = ChainPlan.choose(batch, vocab, rank, torch.bfloat16, h200, sampled=True)
    assert drawn == dataclasses.replace(ChainPlan.of_triton(batch, vocab, rank, torch.bfloat16, h200), sampled=True)
    assert ChainWorkspace.for_plan(drawn, batch, 7, torch.device("cpu")).words.shape == (7, batch, 2 * drawn.programs + 1)


@pytest.mark.parametrize(
    ("batch", "vocab", "rank", "dtype", "message"),
    [
        (0, 9, 32, torch.bfloat16, "1 to 16 requests, got 0"),
        (17, 9, 32, torch.bfloat16, "1 to 16 requests, got 17"),
        (1, 9, 0, torch.bfloat16, "ranks of up to 256 in steps of 32, got 0"),
        (1, 9, 48, torch.bfloat16, "steps of 32, got 48"),
        (1, 9, 288, torch.bfloat16, "steps of 32, got 288"),
        (1, 33793, 32, torch.bfloat16, "at most 33792 ids on this device, got 33793"),
        (1, 9, 32, torch.float32, "bfloat16 or float16, got torch.float32"),
    ],
)
def test_blocks_that_registers_do_not_hold_have_the_other_form(h200, batch, vocab, rank, dtype, message):
    assert message in cute_chain_refusal(batch, vocab, rank, dtype, h200)
    assert ChainPlan.choose(batch, vocab, rank, dtype, h200).backend == "triton"


def test_a_device_without_a_build_has_the_other_form(h200, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "not built for compute capability 8.0" in cute_chain_refusal(1, 9, 32, torch.float16, h200)
    assert "on CUDA devices, got cpu" in cute_chain_refusal(1, 9, 32, torch.float16, torch.device("cpu"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "cutlass" else name)
    assert "nvidia-cutlass-dsl" in cute_chain_refusal(1, 9, 32, torch.float16, h200)


DRAWN = dataclasses.replace(ChainPlan.of_warps(2, 9, 32, 1), sampled=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "runs on CUDA devices, got cpu; choose triton"),
        ({"markov_w1": None, "markov_w2": None}, "takes a drafter with a Markov head"),
        (
            {"workspace": ChainWorkspace.for_tables(2, 3, 9, None, torch.device("cpu"))},
            "a plan of cute wanted, got one of triton",
        ),
        (
            {"workspace": ChainWorkspace.for_plan(DRAWN, 2, 3, torch.device("cpu"))},
            "draws no drafts at a temperature; choose triton",
        ),
    ],
)
def test_what_the_form_in_registers_refuses(monkeypatch, changes, message):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    good = {
        "base_logits": torch.zeros(2, 3, 9),
        "anchors": torch.zeros(2, dtype=torch.int64),
        "markov_w1": torch.zeros(9, 32).bfloat16(),
        "markov_w2": torch.zeros(9, 32).bfloat16(),
        "workspace": ChainWorkspace.for_plan(ChainPlan.of_warps(2, 9, 32, 1), 2, 3, torch.device("cpu")),
    }
    with pytest.raises(ValueError, match=message):
        markov_chain(**(good | changes), backend="cute")


def test_a_fused_empty_batch():
    workspace = ChainWorkspace.for_tables(0, 3, 9, None, torch.device(DEVICE))
    chain = fused(torch.empty(0, 3, 9), torch.empty(0, dtype=torch.int64), None, None, workspace=workspace)
    assert chain.draft_tokens.shape == (0, 3) and chain.biased_logits.shape == (0, 3, 9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperatures": torch.ones(2), "uniforms": torch.rand(2, 3)}, "a plan for calls with temperatures wanted"),
        ({"base_logits": torch.zeros(65, 3, 9)}, "at most 64 requests"),
        ({"base_logits": torch.zeros(2, 17, 9)}, "at most 64 requests, 16 drafts"),
        ({"base_logits": torch.zeros(2, 3, 9).double()}, "base_logits"),
        ({"base_logits": torch.zeros(2, 9, 3).transpose(1, 2)}, "base_logits"),
        ({"anchors": torch.zeros(2, dtype=torch.int32)}, "anchors"),
        ({"anchors": torch.zeros(3, dtype=torch.int64)}, "anchors"),
        ({"markov_w1": None}, "both or neither"),
        ({"markov_w1": torch.zeros(9, 3)}, "markov_w1"),
        ({"markov_w2": torch.zeros(9, 4).double()}, "tables of bfloat16"),
        ({"markov_w2": torch.zeros(4, 9).T}, "markov_w2"),
        ({"workspace": None}, "workspace"),
        ({"workspace": ChainWorkspace.for_tables(1, 3, 9, None, torch.device("cpu"))}, "workspace"),
        ({"workspace": ChainWorkspace.for_plan(ChainPlan.of_tiles(4, 1, 4, 16), 2, 3, torch.device("cpu"))}, "does not cover"),
        ({"workspace": ChainWorkspace.for_plan(ChainPlan.of_tiles(16, 1, 9, 2), 2, 3, torch.device("cpu"))}, "does not cover"),
    ],
)
def test_what_the_fused_chain_refuses(changes, message):
    good = {
        "base_logits": torch.zeros(2, 3, 9),
        "anchors": torch.zeros(2, dtype=torch.int64),
        "markov_w1": torch.zeros(9, 4),
        "markov_w2": torch.zeros(9, 4),
        "workspace": ChainWorkspace.for_tables(2, 3, 9, torch.zeros(9, 4), torch.device("cpu")),
    }
    with pytest.raises(ValueError, match=message):
        markov_chain(**(good | changes), backend="triton")


def test_refusals_are_known_beforehand():
    assert fused_chain_refusal(64, 16, 1 << 24, torch.zeros(1, 1).bfloat16()) is None
    assert "ids" in fused_chain_refusal(1, 1, (1 << 24) + 1, None)


@pytest.mark.gpu
def test_plans_of_the_launch_change_no_bit():
    base, anchors, (w1, w2) = torch.randn(3, 7, 20480), torch.tensor([0, 77, 20479]), tables(20480, 256, torch.bfloat16)
    plan = ChainPlan.of_triton(3, 20480, 256, torch.bfloat16, torch.device(DEVICE))
    chains = []
    for changes in ({}, {"prefetch": not plan.prefetch}, {"cooperative": False}):
        workspace = ChainWorkspace.for_plan(dataclasses.replace(plan, **changes), 3, 7, torch.device(DEVICE))
        chains.append(fused(base, anchors, w1, w2, workspace=workspace))
    check_fused(base, anchors, w1, w2, chains[0])
    for chain in chains[1:]:
        assert_bitwise_equal(chain.biased_logits, chains[0].biased_logits)


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "keep_biased"), [(1, True), (4, False), (16, True), (64, True)])
@pytest.mark.parametrize(("vocab", "gap"), [(20480, 3), (20483, 3), (40000, 3), (20480, 8), (20483, 8)])
def test_programs_meet_on_the_device(batch, keep_biased, vocab, gap):
    """All multiprocessors, at Kimi K3's shape per rank, and vocabularies that one tile a program does not cover."""
    w1, w2 = tables(vocab, 256, torch.bfloat16, gap=gap)
    workspace = ChainWorkspace.for_tables(batch, 7, vocab, w2, torch.device(DEVICE))
    held = gap == 8 and batch <= 16 and importlib.util.find_spec("cutlass") is not None
    assert workspace.plan.backend == ("cute" if held else "triton")
    workspace.generation.fill_(240)  # the tags begin anew on the way
    for _ in range(20):
        base, anchors = torch.randn(batch, 7, vocab), torch.randint(vocab, (batch,))
        base[:, :, [100, vocab - 1]] = 400.0
        chain = fused(base, anchors, w1, w2, keep_biased=keep_biased, workspace=workspace)
        if keep_biased:
            check_fused(base, anchors, w1, w2, chain)
        again = fused(base, anchors, w1, w2, workspace=workspace)
        assert_bitwise_equal(again.draft_tokens, chain.draft_tokens)


def in_registers(base, anchors, w1, w2, *, keep_biased: bool = True, copies: int = 4, workspace=None):
    """The chain of the backend `cute`, watched."""
    batch, drafts, vocab = base.shape
    if workspace is None:
        plan = dataclasses.replace(ChainPlan.of_warps(batch, vocab, w2.shape[1], MOST), copies=copies)
        workspace = ChainWorkspace.for_plan(plan, batch, drafts, torch.device(DEVICE))
    return fused(base, anchors, w1, w2, keep_biased=keep_biased, workspace=workspace)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "drafts", "vocab", "rank", "dtype", "copies"),
    [
        (1, 1, 1, 32, torch.bfloat16, 1),
        (2, 16, 33, 96, torch.float16, 4),
        (3, 2, 4099, 256, torch.bfloat16, 8),
        (8, 3, 300, 128, torch.bfloat16, 2),
        (16, 4, 33792, 32, torch.bfloat16, 1),
        (11, 3, 257, 160, torch.float16, 4),
    ],
)
def test_rows_in_registers_match_float64(batch, drafts, vocab, rank, dtype, copies):
    pytest.importorskip("cutlass")
    base, anchors, (w1, w2) = (
        torch.randn(batch, drafts, vocab),
        torch.randint(vocab, (batch,)),
        tables(vocab, rank, dtype, gap=8),
    )
    chain, bare = (in_registers(base, anchors, w1, w2, keep_biased=keep, copies=copies) for keep in (True, False))
    check_fused(base, anchors, w1, w2, chain)
    for name in ("draft_tokens", "previous_tokens"):
        assert_bitwise_equal(getattr(bare, name), getattr(chain, name), name)


@pytest.mark.gpu
def test_rows_in_registers_choose_as_argmax_does():
    """As for the other form: ties within a thread, a warp, a program and between programs; NaN, infinities, -0."""
    pytest.importorskip("cutlass")
    vocab, inf, nan = 3000, math.inf, math.nan
    rows = torch.full((8, vocab), -3.0)
    rows[0, [70, 150, 2999]] = -2.0
    rows[1, [5, 6, 13]] = 7.0
    rows[2, [130, 1900]] = torch.tensor([-0.0, 0.0])
    rows[3, [10, 120, 1800]] = torch.tensor([inf, nan, nan])
    rows[4] = -inf
    rows[5, [100, 101]] = inf
    rows[6] = -rows[3]
    rows[6, 1800] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)  # a NaN with its sign set
    rows[7] = nan
    base, zeros = rows[None].expand(2, -1, -1).contiguous(), torch.zeros(2, vocab, 32, dtype=torch.bfloat16, device=DEVICE)
    chain = in_registers(base, torch.tensor([0, 1]), *zeros)
    assert chain.draft_tokens[0].tolist() == [70, 5, 130, 120, 0, 100, 120, 0]
    assert_bitwise_equal(chain.draft_tokens.cpu(), base.argmax(-1))


@pytest.mark.gpu
def test_nan_of_one_request_stays_its_own_in_registers():
    pytest.importorskip("cutlass")
    base, anchors = torch.randn(3, 4, 900), torch.tensor([3, 4, 5])
    w1, w2 = tables(900, 64, torch.bfloat16, gap=8)
    w1[4] = math.nan
    base[:, :, 4] = -99.0
    chain, kept = in_registers(base, anchors, w1, w2), torch.tensor([0, 2])
    assert chain.draft_tokens[1, 0] == 0 and chain.biased_logits[1, 0].isnan().all()
    alone = in_registers(base[kept], anchors[kept], w1, w2)
    assert alone.biased_logits.isfinite().all()
    for name in ("draft_tokens", "previous_tokens", "biased_logits"):
        assert_bitwise_equal(getattr(chain, name).cpu()[kept], getattr(alone, name).cpu(), name)


@pytest.mark.gpu
def test_a_graph_of_the_form_in_registers_replays():
    """New inputs in each replay, past the last of the 256 tags."""
    pytest.importorskip("cutlass")
    base, anchors = torch.randn(2, 7, 20480, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    w1, w2 = tables(20480, 256, torch.bfloat16, gap=8)
    workspace = ChainWorkspace.for_tables(2, 7, 20480, w2, torch.device(DEVICE))
    workspace.generation.fill_(240)
    made = {}

    def work():
        made["chain"] = markov_chain(base, anchors, w1, w2, backend="cute", workspace=workspace)

    graph = capture(work)
    for _ in range(20):
        base.normal_()
        anchors.random_(20480)
        graph.replay()
        check_fused(base.cpu(), anchors.cpu(), w1, w2, made["chain"])
    assert workspace.generation.item() == 263
