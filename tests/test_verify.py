"""Which drafts stand."""

import pytest
import torch
from worker_kit import ids

from dspark_model import verify
from dspark_model.ops.markov_chain import invert_cdf
from dspark_model.sampling import DrawKind, SamplingParams

TRIALS = 200_000


def counts(tokens: torch.Tensor, size: int) -> torch.Tensor:
    return torch.bincount(tokens, minlength=size).double() / tokens.numel()


def assert_distribution(tokens: torch.Tensor, probs: torch.Tensor) -> None:
    """Within five standard deviations of each probability."""
    deviation = (probs.double() * (1 - probs.double()) / tokens.numel()).sqrt()
    assert ((counts(tokens, probs.shape[0]) - probs.double()).abs() <= 5 * deviation + 1e-12).all()


@pytest.mark.parametrize("stands", range(5))
def test_exact_accepts_the_leading_equal_drafts(stands):
    drafts = ids(5, 6, 7, 8)[None]
    target = torch.tensor([[5, 6, 7, 8, 9]])
    target[0, stands] = 1 if stands < 4 else 9
    got = verify.accept_exact(drafts, ids(4), target)
    assert got.num_accepted.tolist() == [stands]
    assert got.anchor.tolist() == [1 if stands < 4 else 9]
    assert got.committed_tokens.tolist() == [[*[5, 6, 7, 8][:stands], int(got.anchor), *[-1] * (4 - stands)]]


def test_exact_a_match_behind_a_miss_does_not_count():
    got = verify.accept_exact(torch.tensor([[5, 6, 7]]), ids(3), torch.tensor([[5, 0, 7, 9]]))
    assert got.committed_tokens.tolist() == [[5, 0, -1, -1]]


def test_exact_ragged_widths_stop_at_the_checked_drafts():
    drafts = torch.tensor([[5, 6, 7]]).expand(4, 3)
    target = torch.tensor([[5, 6, 7, 9]]).expand(4, 4)
    got = verify.accept_exact(drafts, ids(0, 1, 2, 3), target)
    assert got.num_accepted.tolist() == [0, 1, 2, 3]
    assert got.anchor.tolist() == [5, 6, 7, 9]
    assert got.committed_tokens.tolist() == [[5, -1, -1, -1], [5, 6, -1, -1], [5, 6, 7, -1], [5, 6, 7, 9]]


def test_exact_tokens_past_the_width_may_hold_anything():
    target = torch.tensor([[5, -(2**60), 2**60, -1]])
    got = verify.accept_exact(torch.tensor([[5, 6, 7]]), ids(0), target)
    assert (got.num_accepted.item(), got.anchor.item()) == (0, 5)


def test_exact_empty_batch():
    got = verify.accept_exact(torch.empty(0, 3).long(), torch.empty(0).long(), torch.empty(0, 4).long())
    assert got.committed_tokens.shape == (0, 4) and got.anchor.shape == (0,)


def test_given_is_taken_over_and_its_tail_is_cut():
    got = verify.accept_given(torch.tensor([[4, 5, 6, 7], [8, -9, -9, -9], [1, 2, 3, 4]]), ids(2, 1, 4))
    assert got.num_accepted.tolist() == [1, 0, 3]
    assert got.anchor.tolist() == [5, 8, 4]
    assert got.committed_tokens.tolist() == [[4, 5, -1, -1], [8, -1, -1, -1], [1, 2, 3, 4]]


@pytest.mark.parametrize(("threshold", "wanted"), [(0.5, [2, 0, 4, 0]), (0.0, [4] * 4), (-1.0, [4] * 4), (1.0, [0] * 4)])
def test_confident_prefix(threshold, wanted):
    rows = [[0.9, 0.5, 0.4, 0.9], [0.49, 1.0, 1.0, 1.0], [0.5] * 4, [float("nan"), 0.9, 0.9, 0.9]]
    assert verify.confident_prefix_length(torch.tensor(rows), threshold).tolist() == wanted


def distributions(seed: int, count: int, vocab: int, sharpness: float = 1.5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(torch.randn(count, vocab, generator=generator) * sharpness, -1)


def sampled_trials(p: torch.Tensor, q: torch.Tensor, drafts: torch.Tensor, checked: int, seed: int) -> verify.Acceptance:
    uniforms = torch.rand(TRIALS, drafts.shape[1] + 1, generator=torch.Generator().manual_seed(seed))
    return verify.accept_sampled(
        drafts, torch.full((TRIALS,), checked), p.expand(TRIALS, -1, -1), q.expand(TRIALS, -1, -1), uniforms
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_a55_sampled_acceptance_has_the_targets_marginals(seed):
    p, q = distributions(seed, 3, 6), distributions(seed + 100, 2, 6)
    drawn = torch.rand(2, TRIALS, generator=torch.Generator().manual_seed(seed + 7))
    drafts = torch.stack([invert_cdf(q[i].expand(TRIALS, -1), drawn[i]) for i in range(2)], 1)
    got = sampled_trials(p, q, drafts, 2, seed + 50)
    assert_distribution(got.committed_tokens[:, 0], p[0])
    for position in (1, 2):
        reached = got.num_accepted >= position
        assert_distribution(got.committed_tokens[reached, position], p[position])
    # A draft stands with probability sum(min(p, q)), the most that any rule can reach.
    rate = torch.minimum(p[0], q[0]).sum().item()
    assert abs((got.num_accepted >= 1).double().mean().item() - rate) < 5 * (rate * (1 - rate) / TRIALS) ** 0.5


def test_a55_one_hot_drafts_keep_the_targets_distribution():
    p, draft = distributions(3, 2, 5), 2
    drafts = torch.full((TRIALS, 1), draft)
    got = sampled_trials(p, verify.one_hot(ids(draft), 5), drafts, 1, 9)
    assert_distribution(got.committed_tokens[:, 0], p[0])
    assert abs((got.num_accepted == 1).double().mean().item() - p[0, draft].item()) < 0.006
    assert_distribution(got.committed_tokens[got.num_accepted == 1, 1], p[1])


def test_a55_unchecked_drafts_are_no_evidence():
    """With nothing checked the token comes from the target itself, not from what is left of it behind the draft."""
    p, q = distributions(4, 2, 5), distributions(5, 1, 5)
    got = sampled_trials(p, q, torch.zeros(TRIALS, 1, dtype=torch.int64), 0, 10)
    assert got.num_accepted.max() == 0
    assert_distribution(got.committed_tokens[:, 0], p[0])


def test_sampled_equal_distributions_accept_everything():
    p = distributions(6, 3, 5)
    drafts = torch.randint(5, (TRIALS, 2), generator=torch.Generator().manual_seed(1))
    got = sampled_trials(p, p[:2], drafts, 2, 11)
    assert got.num_accepted.min() == 2


def test_sampled_impossible_draft_is_never_accepted():
    p = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])
    got = verify.accept_sampled(ids(0)[None], ids(1), p, torch.tensor([[[1.0, 0.0]]]), torch.zeros(1, 2))
    assert (got.num_accepted.item(), got.committed_tokens.tolist()) == (0, [[1, -1]])


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24])
def test_a56_edges_of_a_draw_stay_inside_the_distribution(uniform):
    probs = torch.tensor([[0.0, 0.3, 0.7, 0.0]])
    assert invert_cdf(probs, torch.tensor([uniform])).item() == (1 if uniform == 0 else 2)


def test_a55_draft_and_accept_draws_of_a_worker_are_independent():
    """Draws for drafting at one position and for accepting a few positions on must not be correlated."""
    seeds = [SamplingParams(temperature=1.0, seed=seed) for seed in (*range(2000), *(i << 32 for i in range(1, 2001)))]
    draft = torch.stack([params.uniforms(10, DrawKind.DRAFT, 8) for params in seeds])
    accept = torch.stack([params.uniforms(13, DrawKind.ACCEPT, 8) for params in seeds])
    both = torch.cat((draft, accept), 1)
    assert (torch.corrcoef(both.T) - torch.eye(16)).abs().max() < 5 / len(seeds) ** 0.5
    assert len({tuple(row) for row in both.tolist()}) == len(seeds)
    assert both.min() >= 0 and both.max() < 1
