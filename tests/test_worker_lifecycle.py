"""Requests over their life: sampling, vocabulary, batching, re-use of slots, mixed and empty steps (faults A55 to A60)."""

import pytest
import torch
from worker_kit import TIE_MARGIN, Bench, close, make_pool, page_digests, prompt, snapshot

from dspark_model import GenerationRows, MLADSparkForCausalLM, RuntimeConfig, StepInput
from dspark_model.sampling import SamplingParams
from dspark_model.testing import assert_bitwise_equal, poison_, random_lm_head, tiny_config


def sampling_bench(**changes) -> Bench:
    return Bench(tiny_config(**changes), runtime=RuntimeConfig(draft_sampling="sample"))


def test_a55_the_draft_sampler_follows_the_temperature():
    """A low temperature gives the arg maxima, a high one other tokens; each draw comes from softmax(biased / t) of a chain
    whose next row depends on the token drawn."""
    for temperature, same in ((1e-3, True), (3.0, False)):
        bench = sampling_bench()
        bench.admit("a", prompt(17))
        params = SamplingParams(temperature=temperature, seed=4)
        output = bench.step(context=[bench.chunk("a", sampling=params)], trace=True)
        greedy = bench.dense.draft(bench.taps("a"), bench.scripts["a"].anchor, 7)["tokens"]
        assert (output.draft_tokens[0].tolist() == greedy) is same
        wanted = bench.check(output, "a", forced=True)
        kept = bench.worker._slots.draft_probs[bench.worker.slot_of("a")]
        close(kept, torch.softmax(wanted["biased"] / temperature, -1), bound=1e-3 if same is False else 0.2)
        assert bench.worker._slots.drawn[bench.worker.slot_of("a")]


def small_sampling_bench(num_drafts: int) -> Bench:
    """100 requests at a time over eight tokens."""
    config = tiny_config(vocab_size=8, mask_token_id=7)
    pool = make_pool(config, max_requests=100, num_pages=200, max_positions=8, num_drafts=num_drafts)
    return Bench(config, pool=pool, runtime=RuntimeConfig(draft_sampling="sample"))


def hundreds(bench: Bench, total: int, temperature: float):
    """Yields 100 requests at a time that differ in their seed alone, drafted for: keys, sampling, output."""
    for start in range(0, total, 100):
        keys = list(range(start, start + 100))
        sampling = [SamplingParams(temperature=temperature, seed=key) for key in keys]
        for key in keys:
            bench.admit(key, prompt(4, vocab_size=8), max_context=8)
        chunks = [bench.chunk(key, sampling=params) for key, params in zip(keys, sampling, strict=True)]
        yield keys, sampling, bench.step(context=chunks, trace=True)
        for key in keys:
            bench.release(key)


def assert_drawn_from(counts: torch.Tensor, probs: torch.Tensor) -> None:
    total = counts.sum()
    assert ((counts / total - probs).abs() <= 5 * (probs * (1 - probs) / total).sqrt()).all()


def test_a55_drafts_of_a_worker_have_the_drafters_distribution():
    """2,000 seeds: the first draft follows softmax(biased / t), the second the chain behind the commonest first."""
    first, second, follow = torch.zeros(8), torch.zeros(8), None
    for _, _, output in hundreds(small_sampling_bench(2), 2000, 2.0):
        probs = torch.softmax(output.trace.draft.biased_logits.double() / 2.0, -1)
        common = int(probs[0, 0].argmax())
        first += torch.bincount(output.draft_tokens[:, 0], minlength=8)
        behind = output.draft_tokens[:, 0] == common
        second += torch.bincount(output.draft_tokens[behind, 1], minlength=8)
        follow = probs[behind, 1][0]
    assert_drawn_from(first, probs[0, 0])
    assert_drawn_from(second, follow)


def test_a55_draws_depend_on_seed_and_position_alone():
    """Same drafts alone, in a batch, and with the prompt in one piece or three."""
    params = SamplingParams(temperature=1.5, seed=2**40 + 7)
    alone, batch, pieces, other = sampling_bench(), sampling_bench(), sampling_bench(), sampling_bench()
    for bench in (alone, batch, pieces, other):
        bench.admit("a", prompt(21))
    wanted = alone.step(context=[alone.chunk("a", sampling=params)]).draft_tokens[0].tolist()
    batch.admit("b", prompt(9, 1))
    chunks = [batch.chunk("b", sampling=SamplingParams(temperature=1.5, seed=1)), batch.chunk("a", sampling=params)]
    assert batch.step(context=chunks).draft_tokens[1].tolist() == wanted
    pieces.step(context=[pieces.chunk("a", 0, 4)])
    pieces.step(context=[pieces.chunk("a", 4, 15)])
    assert pieces.step(context=[pieces.chunk("a", 15, sampling=params)]).draft_tokens[0].tolist() == wanted
    far = SamplingParams(temperature=1.5, seed=7)
    assert other.step(context=[other.chunk("a", sampling=far)]).draft_tokens[0].tolist() != wanted


def test_a55_verified_text_has_the_targets_distribution():
    """A target that does not depend on the text: over 2,000 requests each committed token follows it."""
    bench = small_sampling_bench(2)
    logits = torch.randn(8, generator=torch.Generator().manual_seed(2)) * 1.5
    counts = torch.zeros(3, 8)
    for keys, sampling, _ in hundreds(bench, 2000, 1.3):
        rows = bench.rows(dict.fromkeys(keys, 0), kind="logits", target_logits=logits.expand(100, 3, 8), sampling=sampling)
        output = bench.step(generation=rows)
        for place in range(3):
            counts[place] += torch.bincount(output.committed_tokens[output.num_committed > place, place], minlength=8)
    assert counts[2].sum() > 200
    for place in range(3):
        assert_drawn_from(counts[place], torch.softmax(logits.double() / 1.3, -1))


def test_a56_head_with_padded_rows_never_gives_an_id_past_the_vocabulary():
    """Rows of the head and of the target's logits past the vocabulary would win every arg max."""
    config = tiny_config()
    plain = Bench(config)
    head = torch.cat((random_lm_head(config), torch.full((40, config.hidden_size), 1e3)))
    padded = MLADSparkForCausalLM(config, lm_head=head)
    padded.load_state_dict(plain.model.state_dict())
    bench = Bench(config)
    bench.worker.model = bench.model = padded.requires_grad_(False)
    for each in (plain, bench):
        each.admit("a", prompt(10))
    assert_bitwise_equal(bench.prefill("a").draft_tokens, plain.prefill("a").draft_tokens)
    logits = torch.cat((bench.rows({"a": 3}, kind="logits").target_logits, torch.full((1, 8, 40), 1e6)), -1)
    for temperature in (0.0, 1.0):
        rows = bench.rows({"a": 3}, kind="logits", target_logits=logits, sampling=[SamplingParams(temperature=temperature)])
        output = bench.step(generation=rows)
        assert output.committed_tokens.max() < 320 and output.draft_tokens.max() < 320
        logits = torch.full((1, 8, 360), 0.0).index_fill(2, torch.arange(320, 360), 1e6)


def test_a56_ids_are_in_range_for_rows_that_verify_nothing():
    """Ragged rows of width 1, empty contexts, dummies, poisoned buffers behind the widths: every id is one or a stated -1."""
    bench = Bench()
    for key, length in (("a", 0), ("b", 12), ("c", 30)):
        bench.admit(key, prompt(length, length))
    bench.prefill("a", "b", "c")
    rows = bench.rows({"a": 0, "b": 0, "c": 2}, widths=[1, 1, 3, 0], dummies={3: float("nan")})
    for index, width in enumerate((1, 1, 3)):
        poison_(rows.target_tokens[index, width:])
        poison_(rows.target_hidden[index, width:])
    output = bench.step(generation=rows)
    assert output.num_committed.tolist() == [1, 1, 3, 0]
    for tokens, real in ((output.draft_tokens[:3], torch.ones(3, 7, dtype=torch.bool)),
                         (output.committed_tokens, torch.arange(8) < output.num_committed[:, None])):  # fmt: skip
        assert ((tokens[real] >= 0) & (tokens[real] < 320)).all() and (tokens[~real] == -1).all()
    for key in "abc":
        bench.check(output, key)
        bench.check_latents(key)


def test_a57_a_batch_drafts_what_each_request_drafts_alone():
    """The guarantee: ids are equal except behind a near tie, logits agree within a stated bound; not equal bytes."""
    texts = {key: prompt(4 + 9 * key, key) for key in range(5)}
    together = Bench(num_pages=70)
    for key, text in texts.items():
        together.admit(key, text)
    outputs = [together.prefill(*texts, trace=True)]
    outputs += [together.generate({key: (key + step) % 8 for key in texts}, trace=True) for step in range(3)]
    for key, text in texts.items():
        alone = Bench()
        alone.admit(key, text)
        steps = [alone.prefill(key, trace=True)] + [alone.generate({key: (key + step) % 8}, trace=True) for step in range(3)]
        for mine, theirs in zip(steps, outputs, strict=True):
            ours, batched = mine.trace.draft.biased_logits[0], theirs.trace.draft.biased_logits[key]
            top = ours.topk(2, -1).values
            ties = (top[:, 0] - top[:, 1] < TIE_MARGIN).long().cumsum(0).bool()
            assert torch.equal(mine.draft_tokens[0][~ties], theirs.draft_tokens[key][~ties])
            close(ours[~ties], batched[~ties], bound=1e-4)
        close(alone.latents(key), together.latents(key), bound=2e-5)


@pytest.mark.parametrize("field", ["token_mask", "grammar", "bitmask", "logits_processor"])
def test_a58_asking_for_a_grammar_or_mask_raises(field):
    bench = Bench()
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{field}'"):
        SamplingParams(**{field: object()})
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{field}'"):
        GenerationRows(request_ids=[], target_hidden=torch.empty(0, 8, 144), **{field: object()})
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{field}'"):
        bench.worker.step(StepInput(), **{field: object()})


def test_a59_short_different_request_in_the_slot_of_a_long_one():
    bench, fresh = Bench(max_requests=1, num_pages=13), Bench(max_requests=1, num_pages=13)
    bench.admit("a", prompt(70))
    bench.prefill("a")
    bench.generate({"a": 7})
    slot = bench.worker.slot_of("a")
    bench.release("a")
    for each in (bench, fresh):
        each.admit("a", prompt(3, 8))
    assert bench.worker.slot_of("a") == slot
    ours, wanted = bench.prefill("a", trace=True), fresh.prefill("a", trace=True)
    assert_bitwise_equal(ours.trace.draft.biased_logits, wanted.trace.draft.biased_logits)
    for accepted in (2, 7):
        ours, wanted = bench.generate({"a": accepted}), fresh.generate({"a": accepted})
        for name in ("draft_tokens", "committed_tokens", "confidence", "num_valid_drafts"):
            assert_bitwise_equal(getattr(ours, name), getattr(wanted, name), name)
        bench.check(ours, "a")


@pytest.mark.parametrize("sample", [False, True])
def test_a59_a_released_slot_is_blank(sample):
    bench = sampling_bench() if sample else Bench()
    blank = {name: tensor.clone() for name, tensor in vars(bench.worker._slots).items() if tensor is not None}
    bench.admit("a", prompt(20))
    bench.step(context=[bench.chunk("a", sampling=SamplingParams(temperature=1.0 if sample else 0.0))])
    bench.release("a")
    for name, tensor in blank.items():
        assert_bitwise_equal(getattr(bench.worker._slots, name), tensor, name)
    assert (bench.pool.page_table == -1).all() and bench.pool.num_available_pages == 64


@pytest.mark.parametrize("stage", ["admitted", "half", "drafting"])
def test_a60_abort_at_any_stage_frees_everything(stage):
    bench = Bench()
    bench.admit("n", prompt(14, 1))
    bench.prefill("n")
    before = snapshot(bench.worker)
    bench.admit("a", prompt(30))
    if stage == "half":
        bench.step(context=[bench.chunk("a", 0, 11)])
    if stage == "drafting":
        bench.prefill("a")
        bench.generate({"a": 2})
    bench.release("a")
    after = snapshot(bench.worker)
    assert sorted(after.pop("free_pages")) == sorted(before.pop("free_pages"))
    own = bench.pool.pages_of(bench.worker.slot_of("n"))
    pool_before, pool_after = before.pop("pool"), after.pop("pool")
    assert [pool_before[page] for page in own] == [pool_after[page] for page in own]
    assert after == before
    with pytest.raises(KeyError, match="'a' is not admitted"):
        bench.worker.release("a")
    bench.check(bench.generate({"n": 5}), "n")


def test_a60_idle_step_of_zero_tokens():
    bench = Bench()
    bench.admit("a", prompt(9))
    bench.prefill("a")
    before = snapshot(bench.worker)
    nothing = GenerationRows(request_ids=[], target_hidden=torch.empty(0, 8, 144), target_tokens=torch.empty(0, 8).long())
    for step_input in (StepInput(), StepInput(generation=nothing)):
        output = bench.worker.step(step_input, trace=True)
        assert output.draft_tokens.shape == (0, 7) and output.committed_tokens.shape == (0, 8) and output.request_ids == ()
        assert output.trace.context.shape == (0, 64)
    assert snapshot(bench.worker) == before


def test_a60_five_events_in_one_script():
    """A prefix hit, a mixed step with chunked prefill, an idle step, ragged widths, an abort; after every step each live
    request drafts what the dense reference drafts, and pages of nobody keep their canary."""
    bench = Bench(num_pages=56)
    bench.pool.storage.fill_(float("nan"))
    canary = page_digests(bench.pool)[-1]
    base = prompt(21)
    bench.admit("source", base, max_context=60)
    bench.prefill("source")
    handle = bench.worker.retain_prefix("source", 21)
    bench.admit("hit", base + prompt(6, 1), max_context=60, prefix=handle)
    bench.admit("late", prompt(25, 2), max_context=60)
    output = bench.generate({"source": 3}, context=[bench.chunk("hit", 21), bench.chunk("late", 0, 10)], dummies={1: 1.0})
    _check_all(bench, output, "source", "hit")
    bench.worker.step(StepInput())
    rows = bench.rows({"source": 0, "hit": 4}, widths=[1, 5])
    poison_(rows.target_hidden[0, 1:])
    output = bench.step(context=[bench.chunk("late", 10)], generation=rows)
    _check_all(bench, output, "late", "source", "hit")
    bench.release("source")
    bench.pool.release_prefix(handle)
    bench.admit("again", base[:5] + prompt(30, 4), max_context=60)
    output = bench.generate({"hit": 7, "late": 1}, context=[bench.chunk("again")], kind="committed")
    _check_all(bench, output, "again", "hit", "late")
    bench.release("late")
    output = bench.generate({"again": 5, "hit": 0}, kind="logits")
    _check_all(bench, output, "again", "hit")
    bench.release("again")
    bench.release("hit")
    assert (bench.pool.num_held_pages, bench.pool.num_available_pages) == (0, 56)
    assert page_digests(bench.pool)[-1] == canary


def _check_all(bench: Bench, output, *keys) -> None:
    for key in keys:
        bench.check(output, key)
        bench.check_latents(key)
