"""`markov_chain` and `invert_cdf` against a loop in float64."""

import math

import pytest
import torch

from dspark_model.ops import markov_chain
from dspark_model.ops.markov_chain import invert_cdf
from dspark_model.testing import assert_bitwise_equal, poison_


def exact(base, anchors, w1, w2, tokens):
    """Biased logits along given tokens."""
    biased = base.double().clone()
    if w1 is not None:
        for b, anchor in enumerate(anchors.tolist()):
            for k, previous in enumerate([anchor, *tokens[b].tolist()[:-1]]):
                biased[b, k] += w2.double() @ w1[previous].double()
    return biased


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
