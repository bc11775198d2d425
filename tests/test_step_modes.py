"""Every mode of a step against the dense reference."""

import pytest
import torch
from worker_kit import Bench, close, make_pool, prompt

from dspark_model import RuntimeConfig
from dspark_model.sampling import SamplingParams
from dspark_model.serving_config import Layout
from dspark_model.slots import draft_rows
from dspark_model.testing import assert_bitwise_equal, tiny_config

VARIANTS = {
    "dspark": {},
    "dflash": {"model_type": "mla_dflash"},
    "causal": {"is_causal": True},
    "dflash_causal": {"sample_from_anchor": False, "is_causal": True},
    "no_markov": {"markov_rank": 0, "confidence_head_with_markov": False},
    "no_confidence": {"enable_confidence_head": False, "confidence_head_with_markov": None},
    "confidence_without_markov": {"confidence_head_with_markov": False},
    "fc_norm": {"fc_norm": True},
    "mask_row": {"mask_embedding": True},
    "plain_rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "one_layer": {"num_hidden_layers": 1},
}


def follow(bench: Bench, *keys, accepts=(3, 0, 7, 5), **options) -> None:
    """Prefill and four steps, each request with acceptance lengths of its own; everything against the reference."""
    output = bench.prefill(*keys, trace=True)
    for step in range(len(accepts) + 1):
        for key in keys:
            wanted = bench.check(output, key)
            rows = bench.worker.context_length(key) + torch.arange(bench.worker.block_rows)
            assert rows.numel() == wanted["latents"].shape[1]
            block = bench.latents(key, int(rows[-1]) + 1)[:, rows[0] :]
            close(block, wanted["latents"])
            bench.check_latents(key)
        if step < len(accepts):
            generate = {key: min(bench.k, accepts[(step + shift) % len(accepts)]) for shift, key in enumerate(keys)}
            output = bench.generate(generate, trace=True, **options)
            assert output.num_accepted.tolist() == list(generate.values())


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_against_the_reference(name):
    changes = dict(VARIANTS[name])
    bench = Bench(tiny_config(**changes))
    if name == "mask_row":
        row = bench.model.mask_embedding.weight[0].double()
        table = bench.dense.weights["embed_tokens.weight"].clone()
        table[bench.config.mask_token_id] = row
        bench.dense.weights["embed_tokens.weight"] = table
    for key, length in (("a", 13), ("b", 32)):
        bench.admit(key, prompt(length, length))
    follow(bench, "a", "b")


@pytest.mark.parametrize("sample_from_anchor", [True, False])
@pytest.mark.parametrize("num_drafts", range(1, 9))
@pytest.mark.filterwarnings("ignore:num_drafts 8 is above")
def test_every_width(num_drafts, sample_from_anchor):
    config = tiny_config(sample_from_anchor=sample_from_anchor)
    bench = Bench(config, num_drafts=num_drafts, pool=make_pool(config, num_drafts=8))
    assert bench.worker.block_rows == num_drafts + (not sample_from_anchor)
    for key, length in (("a", 7), ("b", 24)):
        bench.admit(key, prompt(length, length))
    follow(bench, "a", "b", accepts=(num_drafts, 0))


def test_slot_rule_reads_the_rows_that_predict():
    shifted, plain = tiny_config(), tiny_config(model_type="mla_dflash")
    assert (draft_rows(shifted, 4), draft_rows(plain, 4)) == (slice(0, 4), slice(1, 5))
    assert Bench(shifted).worker.describe()["slot_rule"] == "shifted labels, rows 0..K-1 (no key; dspark family default)"
    assert "plain DFlash, K+1 rows, rows 1..K" in Bench(plain).worker.describe()["slot_rule"]


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("kind", ["tokens", "logits", "committed"])
def test_verdicts_in_both_layouts(kind, layout):
    bench = Bench(layout=layout)
    for key, length in (("a", 5), ("b", 16)):
        bench.admit(key, prompt(length, length))
    follow(bench, "a", "b", kind=kind)


def test_the_three_verdicts_and_both_layouts_give_equal_bytes():
    seen = []
    for layout in Layout:
        for kind in ("tokens", "logits", "committed"):
            bench = Bench(layout=layout)
            bench.admit("a", prompt(12))
            bench.prefill("a")
            output = bench.generate({"a": 4}, kind=kind)
            seen.append((output.committed_tokens, output.draft_tokens, output.confidence, bench.latents("a")))
    for other in seen[1:]:
        for ours, theirs in zip(seen[0], other, strict=True):
            assert_bitwise_equal(ours, theirs)


def test_output_of_a_mixed_step():
    """Context first, generation behind: a last chunk, a middle chunk, two live rows and a dummy."""
    bench = Bench()
    for key, length in (("old", 11), ("older", 26), ("new", 9), ("long", 30)):
        bench.admit(key, prompt(length, length))
    bench.prefill("old", "older")
    context = [bench.chunk("new"), bench.chunk("long", 0, 12)]
    checked = list(bench.scripts["older"].drafts)
    output = bench.generate({"old": 0, "older": 5}, context=context, dummies={1: float("nan")}, trace=True)
    assert output.request_ids == ("new", "long", "old", None, "older")
    assert output.num_accepted.tolist() == [0, 0, 0, 0, 5] and output.num_committed.tolist() == [0, 0, 1, 0, 6]
    assert output.num_valid_drafts.tolist() == [7, 0, 7, 0, 7] and output.num_dropped.tolist() == [0] * 5
    assert output.committed_tokens[4, :5].tolist() == checked[:5] and (output.committed_tokens[4, 6:] == -1).all()
    assert output.anchor[4] == output.committed_tokens[4, 5]
    blank = torch.tensor([False, True, False, True, False])
    assert ((output.anchor == -1) == blank).all() and ((output.draft_tokens == -1).all(1) == blank).all()
    assert (output.confidence[blank] == 0).all() and (output.confidence[~blank] > 0).all()
    for key in ("new", "old", "older"):
        bench.check(output, key)
        bench.check_latents(key)
    bench.scripts["long"].tokens, rest = bench.scripts["long"].tokens[:12], bench.scripts["long"].tokens
    bench.check_latents("long")
    bench.scripts["long"].tokens = rest
    output = bench.generate({"new": 7, "older": 1}, context=[bench.chunk("long", 12)])
    for key in ("long", "new", "older"):
        bench.check(output, key)
        bench.check_latents(key)


def test_trace_is_off_unless_asked_for_and_changes_nothing():
    plain, traced = Bench(), Bench()
    for bench in (plain, traced):
        bench.admit("a", prompt(10))
    one, two = plain.prefill("a"), traced.prefill("a", trace=True)
    assert one.trace is None
    assert_bitwise_equal(one.draft_tokens, two.draft_tokens)
    close(two.trace.context, traced.dense.context(traced.taps("a")))
    output = traced.step(context=[], generation=traced.rows({"a": 2}), trace=True)
    assert output.trace.context.shape == (8, 64) and output.trace.draft.base_logits.shape == (1, 7, 320)
    traced.admit("b", prompt(20))
    output = traced.step(context=[traced.chunk("b", 0, 5)], trace=True)
    assert output.trace.draft is None and output.trace.context.shape == (5, 64)


def test_ragged_widths_verify_a_part_of_the_drafts():
    """The target agrees with everything, but only the rows that were run count."""
    bench = Bench()
    for key in "abc":
        bench.admit(key, prompt(9, ord(key)))
    bench.prefill(*"abc")
    rows = bench.rows(dict.fromkeys("abc", 7), widths=[1, 4, 8])
    output = bench.step(generation=rows)
    assert output.num_committed.tolist() == [1, 4, 8]
    for key in "abc":
        bench.check(output, key)
        bench.check_latents(key)


def test_widths_by_default_stop_at_the_valid_drafts():
    """Close to the limit fewer drafts are valid; the target rows behind them may hold anything."""
    bench = Bench()
    bench.admit("a", prompt(10), max_context=14)
    assert bench.prefill("a").num_valid_drafts.tolist() == [3]
    rows = bench.rows({"a": 7})
    rows.target_hidden[:, 4:] = float("nan")
    rows.target_tokens[:, 4:] = -(2**50)
    output = bench.step(generation=rows)
    assert output.num_committed.tolist() == [4] and bench.worker.context_length("a") == 14
    bench.check_latents("a")


@pytest.mark.parametrize("accepted", [0, 3, 7])
def test_sampled_drafts_are_verified_with_their_own_distribution(accepted):
    """The kept q is the distribution of the draft: a target equal to it accepts all, one that excludes a draft stops there."""
    bench = Bench(runtime=RuntimeConfig(draft_sampling="sample"))
    params = SamplingParams(temperature=1.7, seed=3)
    bench.admit("a", prompt(15))
    output = bench.step(context=[bench.chunk("a", sampling=params)], trace=True)
    bench.check(output, "a", forced=True)
    drafts = bench.scripts["a"].drafts
    logits = torch.zeros(1, 8, 320)
    logits[:, :7] = output.trace.draft.biased_logits
    if accepted < 7:
        logits[0, accepted, drafts[accepted]] = float("-inf")
    output = bench.step(generation=bench.rows({"a": 0}, kind="logits", target_logits=logits, sampling=[params]))
    assert output.num_accepted.tolist() == [accepted]
    assert output.committed_tokens[0, :accepted].tolist() == drafts[:accepted]
    assert accepted == 7 or output.anchor.item() != drafts[accepted]
    bench.check(output, "a", forced=True)


def test_sampling_is_decided_for_each_request_and_step():
    """A greedy request beside a sampled one, and a sampled draft that a greedy step verifies."""
    bench = Bench(runtime=RuntimeConfig(draft_sampling="sample"))
    hot = SamplingParams(temperature=2.5, seed=9)
    for key in "ab":
        bench.admit(key, prompt(12, ord(key)))
    output = bench.step(context=[bench.chunk("a", sampling=hot), bench.chunk("b")], trace=True)
    bench.check(output, "a", forced=True)
    bench.check(output, "b")
    assert bench.worker._slots.drawn[[bench.worker.slot_of(key) for key in "ab"]].tolist() == [True, False]
    output = bench.generate({"a": 4, "b": 2}, kind="logits", sampling=[SamplingParams(), hot])
    assert output.num_accepted[0] == 4
    bench.check(output, "a")
    bench.check(output, "b", forced=True)


def test_runtime_override_holds_for_one_step():
    bench = Bench(runtime=RuntimeConfig(draft_sampling="sample"))
    hot = SamplingParams(temperature=3.0, seed=1)
    bench.admit("a", prompt(18))
    bench.step(context=[bench.chunk("a", sampling=hot)])
    output = bench.generate({"a": 3}, kind="logits", sampling=[hot], runtime=RuntimeConfig.plain())
    assert output.runtime["draft_sampling"].in_force == "greedy"
    bench.check(output, "a")
    output = bench.generate({"a": 3}, kind="logits", sampling=[hot])
    assert output.runtime["draft_sampling"].in_force == "sample"
    bench.check(output, "a", forced=True)
    greedy = bench.dense.draft(bench.taps("a"), bench.scripts["a"].anchor, 7)["tokens"]
    assert output.draft_tokens[0].tolist() != greedy


def test_fallbacks_are_counted_step_by_step():
    bench = Bench(runtime=RuntimeConfig())
    bench.admit("a", prompt(6))
    fallen = {choice.name for choice in bench.prefill("a").runtime.fallbacks}
    bench.generate({"a": 1})
    bench.generate({"a": 1}, runtime=RuntimeConfig.plain())
    assert bench.worker.fallback_counts == dict.fromkeys(fallen, 2)


@pytest.mark.parametrize("length", [16, 21])
@pytest.mark.parametrize("first_out", ["source", "handle"])
def test_prefix_serves_a_request_after_its_source(length, first_out):
    """Shared whole pages and a copied last one; the source goes on writing, then goes away, and its pages are re-used."""
    bench = Bench()
    text = prompt(24)
    bench.admit("source", text)
    bench.prefill("source")
    handle = bench.worker.retain_prefix("source", length)
    bench.generate({"source": 7})
    if first_out == "source":
        bench.release("source")
        bench.admit("filler", prompt(60, 3))
        bench.prefill("filler")
    bench.admit("hit", text[:length] + prompt(9, 4), prefix=handle)
    assert bench.worker.context_length("hit") == length
    if first_out == "handle":
        bench.pool.release_prefix(handle)
    output = bench.step(context=[bench.chunk("hit", length)], trace=True)
    bench.check(output, "hit")
    for accepted in (7, 2):
        bench.check(bench.generate({"hit": accepted}), "hit")
    bench.check_latents("hit")


def test_prefix_is_the_whole_prompt():
    """A hit on every row: an empty last chunk brings the anchor."""
    bench = Bench()
    text = prompt(19)
    bench.admit("source", text)
    bench.prefill("source")
    bench.admit("hit", text, prefix=bench.worker.retain_prefix("source", 19))
    output = bench.step(context=[bench.chunk("hit", 19)])
    bench.check(output, "hit")
    bench.check(bench.generate({"hit": 7, "source": 0}), "hit")
    bench.check_latents("source")


@pytest.mark.parametrize("accepted", [0, 3, 7])
def test_only_committed_rows_are_stored(monkeypatch, accepted):
    """Stopped between the context store and the block: the pool differs in the committed rows and nowhere else."""
    bench = Bench()
    bench.admit("n", prompt(9, 1))
    bench.admit("a", prompt(9))
    bench.prefill("n", "a")
    bench.generate({"a": 0})
    before = bench.pool.storage.clone()
    held = bench.latents("a", 16)

    def stop(*_arguments, **_options):
        raise RuntimeError("stop")

    monkeypatch.setattr(bench.model, "decode_block", stop)
    with pytest.raises(RuntimeError, match="stop"):
        bench.generate({"a": accepted})
    differs = (bench.latents("a", 16).view(torch.int32) != held.view(torch.int32)).all(-1).all(0)
    assert differs.nonzero().flatten().tolist() == [row for row in range(10, 16) if row <= 10 + accepted]
    rows = (bench.pool.storage.view(torch.int32) != before.view(torch.int32)).any(-1).sum()
    assert rows == 2 * (accepted + 1)
