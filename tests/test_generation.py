"""Generation with a drafter against plain generation, on a tiny random target."""

import pytest
import torch
import transformers

from dspark_model import (
    DFlashWorker,
    LatentKVPool,
    PoolConfig,
    RuntimeConfig,
    SamplingParams,
    compare_greedy,
    generate,
    generate_plain,
)
from dspark_model.generation import Generation
from dspark_model.modeling import BlockDraft
from dspark_model.testing import random_model, tiny_config
from dspark_model.transformers_target import TransformersTarget

VOCAB, HIDDEN, NEW_TOKENS = 97, 48, 21
PROMPTS = ([5, 8, 13, 21, 34], [3], [2, 4, 8, 16, 32, 64, 31, 62, 27])


@pytest.fixture(scope="module")
def target() -> TransformersTarget:
    torch.manual_seed(11)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.4,
    )
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    return TransformersTarget(model, (1, 3), max_requests=3, max_positions=64)


@pytest.fixture
def worker(target) -> DFlashWorker:
    config = tiny_config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        target_hidden_size=HIDDEN,
        target_layer_ids=(1, 3),
        target_num_hidden_layers=5,
        mask_token_id=VOCAB - 1,
    )
    drafter = random_model(config, 3, torch.float32, "cpu")
    pool_config = PoolConfig(page_size=4, num_pages=60, max_requests=3, max_positions=60, num_drafts=5)
    pool = LatentKVPool(pool_config, config, dtype=torch.float32)
    return DFlashWorker(drafter, pool, RuntimeConfig.plain())


def draft_the_truth(worker: DFlashWorker, monkeypatch, text: list[int], wrong_every: int = 0) -> None:
    """Make the model draft what stands in `text` (prompt, answer and some more), each `wrong_every`-th token wrong.  The one
    request's anchor is the first of its kind behind the rows that the worker held before the step."""
    real = worker.model.draft

    def draft(final_hidden, anchors, **options):
        honest = real(final_hidden, anchors, **options)
        (request,) = worker._requests.values()
        at = text.index(int(anchors[0]), max(request.length + 1, len(PROMPTS[0])))
        following = text[at + 1 : at + 1 + worker.num_drafts]
        wrong = [bool(wrong_every) and (at + 1 + k) % wrong_every == 0 for k in range(len(following))]
        tokens = [(token + is_wrong) % VOCAB for token, is_wrong in zip(following, wrong, strict=True)]
        return BlockDraft(torch.tensor([tokens]), honest.base_logits, honest.biased_logits, honest.confidence)

    monkeypatch.setattr(worker.model, "draft", draft)


def plain(target, prompts=PROMPTS, **options) -> list[Generation]:
    return generate_plain(target, prompts, max_new_tokens=NEW_TOKENS, **options)


def long_text(target) -> list[int]:
    """The first prompt and more of its greedy answer than any test asks for."""
    (answer,) = generate_plain(target, PROMPTS[:1], max_new_tokens=NEW_TOKENS + 12)
    return [*PROMPTS[0], *answer.tokens]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_greedy_text_equals_plain_greedy(target, worker, count):
    drafted = generate(target, worker, PROMPTS[:count], max_new_tokens=NEW_TOKENS)
    for ours, theirs in zip(drafted, plain(target, PROMPTS[:count]), strict=True):
        assert compare_greedy(theirs, ours).equal
        assert len(ours.tokens) == NEW_TOKENS
        assert sum(ours.committed) == NEW_TOKENS - 1


@pytest.mark.parametrize("wrong_every", [0, 3, 4, 7])
def test_good_drafts_are_committed_and_leave_the_text_as_it_is(target, worker, monkeypatch, wrong_every):
    (truth,) = plain(target, PROMPTS[:1])
    draft_the_truth(worker, monkeypatch, long_text(target), wrong_every)
    (drafted,) = generate(target, worker, PROMPTS[:1], max_new_tokens=NEW_TOKENS)
    assert compare_greedy(truth, drafted).equal
    assert drafted.num_passes < truth.num_passes
    assert max(drafted.committed) > 1
    if not wrong_every:
        assert drafted.committed == [6, 6, 6, 2]
        assert drafted.offered == drafted.accepted == [4, 4, 3, 3, 3]


def test_an_end_token_inside_a_block_cuts_the_text_there(target, worker, monkeypatch):
    (truth,) = plain(target, PROMPTS[:1])
    end = truth.tokens[9]
    wanted = truth.tokens[: truth.tokens.index(end) + 1]
    draft_the_truth(worker, monkeypatch, long_text(target))
    (drafted,) = generate(target, worker, PROMPTS[:1], max_new_tokens=NEW_TOKENS, end_tokens={end})
    assert drafted.tokens == wanted
    assert sum(drafted.committed) == len(wanted) - 1
    assert plain(target, PROMPTS[:1], end_tokens={end})[0].tokens == wanted


@pytest.mark.parametrize("chunk", [1, 2, 5, 512])
def test_prefill_chunks_do_not_change_the_text(target, worker, chunk):
    drafted = generate(target, worker, PROMPTS, max_new_tokens=8, prefill_chunk=chunk)
    whole = generate_plain(target, PROMPTS, max_new_tokens=8)
    assert [g.tokens for g in drafted] == [g.tokens for g in whole]


@pytest.mark.parametrize("new_tokens", [1, 2, 6, 7, 51])
def test_short_and_longest_texts(target, worker, new_tokens):
    prompts = PROMPTS[:1]
    if len(prompts[0]) + new_tokens > 55:
        new_tokens = 55 - len(prompts[0])
    (drafted,) = generate(target, worker, prompts, max_new_tokens=new_tokens)
    (truth,) = generate_plain(target, prompts, max_new_tokens=new_tokens)
    assert drafted.tokens == truth.tokens
    assert len(drafted.tokens) == new_tokens


def test_requests_and_pages_are_given_back_even_after_a_failure(target, worker, monkeypatch):
    generate(target, worker, PROMPTS, max_new_tokens=4)
    assert (worker.num_requests, worker.pool.num_held_pages) == (0, 0)

    def broken(*_arguments, **_options):
        raise RuntimeError("target lost")

    monkeypatch.setattr(target, "forward", broken)
    with pytest.raises(RuntimeError, match="target lost"):
        generate(target, worker, PROMPTS, max_new_tokens=4)
    assert (worker.num_requests, worker.pool.num_held_pages) == (0, 0)
    assert worker.pool.num_available_pages == 60


def test_sampled_text_depends_on_the_seed_alone(target, worker):
    def run(seed: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0.9, seed=seed)
        return [g.tokens for g in generate(target, worker, PROMPTS, max_new_tokens=12, sampling=sampling)]

    assert run(1) == run(1)
    assert run(1) != run(2)


@pytest.mark.parametrize("drafted", [True, False])
def test_each_prompt_has_its_own_sampling(target, worker, drafted):
    """Equal prompts under their own seeds, and a greedy one among them; each as it is with these parameters for all."""
    params = [SamplingParams(temperature=0.9, seed=1), SamplingParams(), SamplingParams(temperature=0.9, seed=2)]

    def run(sampling) -> list[list[int]]:
        options = {"max_new_tokens": 12, "sampling": sampling}
        prompts = [PROMPTS[0]] * 3
        texts = generate(target, worker, prompts, **options) if drafted else generate_plain(target, prompts, **options)
        return [text.tokens for text in texts]

    found = run(params)
    assert found[1] == run(SamplingParams())[1] and found[0] != found[2]
    for index in (0, 2):
        assert found[index] == run(params[index])[index]
    with pytest.raises(ValueError, match="sampling has 2 entries for 3 prompts; give one for each, or one for all"):
        run(params[:2])
    assert (worker.num_requests, worker.pool.num_held_pages) == (0, 0)


def test_a_tie_is_excused_and_a_real_difference_is_not():
    def text(tokens, margins):
        return Generation(tokens=tokens, margins=margins)

    tied = compare_greedy(text([1, 2, 3], [1.0, 5e-4, 1.0]), text([1, 7, 8], [1.0, 6e-4, 1.0]))
    assert (tied.equal, tied.first_difference, tied.excused) == (False, 1, True)
    wrong = compare_greedy(text([1, 2, 3], [1.0, 0.5, 1.0]), text([1, 7, 8], [1.0, 0.4, 1.0]))
    assert (wrong.equal, wrong.excused) == (False, False)
    short = compare_greedy(text([1, 2, 3], [1.0] * 3), text([1, 2], [1.0] * 2))
    assert (short.equal, short.excused, short.first_difference) == (False, False, 2)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1]] * 4, {}, "4 prompts were given, but the target has 3 slots"),
        ([[]], {}, "prompt 0 is empty"),
        ([[1] * 50], {}, "50 tokens and may grow by"),
        ([[1]], {"prefill_chunk": 0}, "prefill_chunk is 0"),
    ],
)
def test_bad_prompts_are_refused(target, worker, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        generate(target, worker, prompts, max_new_tokens=NEW_TOKENS, **options)
    assert worker.num_requests == 0


@pytest.mark.parametrize("count", [0, -1])
def test_no_new_tokens_are_refused(target, worker, count):
    with pytest.raises(ValueError, match=f"max_new_tokens is {count}, wanted at least 1"):
        generate(target, worker, [[1]], max_new_tokens=count)
    with pytest.raises(ValueError, match=f"max_new_tokens is {count}, wanted at least 1"):
        generate_plain(target, [[1]], max_new_tokens=count)


def test_a_target_that_taps_other_layers_is_refused(target, worker):
    other = TransformersTarget(target.model, (0, 3), max_requests=1, max_positions=64)
    with pytest.raises(ValueError, match=r"taps layers \[0, 3\], but the drafter was made for \[1, 3\]"):
        generate(other, worker, PROMPTS[:1], max_new_tokens=4)


def test_a_target_with_tokens_that_the_drafter_does_not_know_is_refused(target, worker, monkeypatch):
    monkeypatch.setattr(target, "vocab_size", VOCAB + 5)
    with pytest.raises(ValueError, match="the target has 102 tokens, but the drafter only 97"):
        generate(target, worker, PROMPTS[:1], max_new_tokens=4)
