"""Every bad input is refused with a message, changes nothing, and the right input works right after it."""

import warnings

import pytest
import torch
from worker_kit import Bench, digest, external_pool, ids, make_pool, prompt, snapshot

from dspark_model import CapacityError, ConfigError, DFlashWorker, RuntimeConfig
from dspark_model.sampling import SamplingParams
from dspark_model.step_io import StepInput
from dspark_model.testing import assert_bitwise_equal, random_model, tiny_config


def scene(**options) -> Bench:
    """`gen` and `other` generate, `new` has no row yet, `half` has a first chunk; one slot is free."""
    bench = Bench(num_pages=60, max_positions=64, **options)
    bench.admit("gen", prompt(13))
    bench.admit("other", prompt(20, 1))
    bench.admit("new", prompt(11, 2), max_context=30)
    bench.admit("half", prompt(25, 3))
    bench.step(context=[bench.chunk("gen"), bench.chunk("other"), bench.chunk("half", 0, 9)])
    return bench


def good_step(bench: Bench) -> StepInput:
    context = [bench.chunk("half", 9), bench.chunk("new")]
    return StepInput(context=context, generation=bench.rows({"gen": 4, "other": 2}))


WANTED: dict[str, torch.Tensor] = {}


def assert_good_step(bench: Bench) -> None:
    """The step does what it does on a worker that has seen no bad input: same drafts, same pool bytes."""
    if not WANTED:
        fresh = scene()
        output = fresh.step(good_step(fresh))
        for key in ("half", "new", "gen", "other"):
            fresh.check(output, key)
            fresh.check_latents(key)
        WANTED.update(drafts=output.draft_tokens, confidence=output.confidence, pool=fresh.pool.storage.clone())
    output = bench.step(good_step(bench))
    assert_bitwise_equal(output.draft_tokens, WANTED["drafts"])
    assert_bitwise_equal(output.confidence, WANTED["confidence"])
    assert digest(bench.pool.storage) == digest(WANTED["pool"])


def hidden(bench: Bench, *shape: int, dtype=torch.float32, device="cpu", width: int | None = None) -> torch.Tensor:
    return torch.zeros(*shape, width or bench.config.context_width, dtype=dtype, device=device)


def tokens(bench: Bench, place: tuple[int, int], value: int) -> torch.Tensor:
    rows = bench.rows({"gen": 4, "other": 2}).target_tokens
    rows[place] = value
    return rows


BAD_CHUNKS = {
    "dtype": (r"target_hidden is torch.bfloat16 on cpu, wanted torch.float32 on cpu; convert it",
              lambda b: b.chunk("new", target_hidden=hidden(b, 11, dtype=torch.bfloat16))),
    "device": ("target_hidden is torch.float32 on meta", lambda b: b.chunk("new", target_hidden=hidden(b, 11, device="meta"))),
    "width": (r"target_hidden has shape \[11, 143\], wanted \['n', 144\]",
              lambda b: b.chunk("new", target_hidden=hidden(b, 11, width=143))),
    "rank": (r"target_hidden has shape \[1, 11, 144\]", lambda b: b.chunk("new", target_hidden=hidden(b, 1, 11))),
    "anchor_high": ("anchor 320 is outside the vocabulary of 320 tokens", lambda b: b.chunk("new", anchor=320)),
    "anchor_low": ("anchor -1 is outside the vocabulary", lambda b: b.chunk("new", anchor=-1)),
    "anchor_float": ("anchor 3.5 is outside the vocabulary of 320 tokens, wanted an int", lambda b: b.chunk("new", anchor=3.5)),
    "unknown": ("request 'nobody' is not admitted; call worker.admit first", lambda b: b.chunk("new", request_id="nobody")),
    "dummy": ("a context chunk has request_id None", lambda b: b.chunk("new", request_id=None)),
    "gap": ("start_position is 10, but the worker holds 9 rows", lambda b: b.chunk("half", 9, start_position=10)),
    "overlap": ("start_position is 8, but the worker holds 9 rows", lambda b: b.chunk("half", 9, start_position=8)),
    "start_float": ("start_position is 9.0, but", lambda b: b.chunk("half", 9, start_position=9.0)),
    "too_long": ("rows up to position 30, but it was admitted for 30 tokens; admit it with a larger max_context",
                 lambda b: b.chunk("new", target_hidden=hidden(b, 31))),
    "nothing": ("no rows and no anchor; there is nothing to do",
                lambda b: b.chunk("new", target_hidden=hidden(b, 0), anchor=None)),
    "after_end": ("its prompt has ended already", lambda b: b.chunk("gen", start_position=13)),
}  # fmt: skip

BAD_ROWS = {
    "dtype": ("target_hidden is torch.float64", {"target_hidden": lambda b: hidden(b, 2, 8, dtype=torch.float64)}),
    "device": ("target_hidden is torch.float32 on meta", {"target_hidden": lambda b: hidden(b, 2, 8, device="meta")}),
    "short_block": (r"has shape \[2, 7, 144\], wanted \[2, 8, 144\]", {"target_hidden": lambda b: hidden(b, 2, 7)}),
    "batch": (r"target_hidden has shape \[3, 8, 144\], wanted \[2, 8, 144\]", {"target_hidden": lambda b: hidden(b, 3, 8)}),
    "token_high": (r"target_tokens\[1, 3\] is 320, outside the", {"target_tokens": lambda b: tokens(b, (1, 3), 320)}),
    "token_low": (r"target_tokens\[0, 0\] is -1, outside the vocabulary", {"target_tokens": lambda b: tokens(b, (0, 0), -1)}),
    "token_dtype": (r"target_tokens is torch.int32 \[2, 8\]", {"target_tokens": lambda b: tokens(b, (0, 0), 1).int()}),
    "token_device": ("target_tokens is torch.int64 .* on meta", {"target_tokens": lambda b: tokens(b, (0, 0), 1).to("meta")}),
    "token_shape": (r"target_tokens is torch.int64 \[2, 7\]", {"target_tokens": lambda b: tokens(b, (0, 0), 1)[:, :7]}),
    "no_verdict": ("need exactly one of target_tokens, target_logits, and", {"target_tokens": lambda b: None}),
    "two_verdicts": ("need exactly one of", {"target_logits": lambda b: torch.zeros(2, 8, 320)}),
    "logits_shape": (r"target_logits is torch.float32 \[2, 8, 319\] on cpu, wanted floating point \[2, 8, at least 320\]",
                     {"target_tokens": lambda b: None, "target_logits": lambda b: torch.zeros(2, 8, 319)}),
    "logits_dtype": ("target_logits is torch.int64",
                     {"target_tokens": lambda b: None, "target_logits": lambda b: torch.zeros(2, 8, 320).long()}),
    "logits_device": ("target_logits is .* on meta, wanted",
                      {"target_tokens": lambda b: None, "target_logits": lambda b: torch.zeros(2, 8, 320, device="meta")}),
    "twice": (r"requests \['gen'\] stand in the step more than once", {"request_ids": lambda b: ["gen", "gen"]}),
    "unknown": ("request 'nobody' is not admitted", {"request_ids": lambda b: ["gen", "nobody"]}),
    "not_begun": ("nothing has been drafted for it yet; send its last", {"request_ids": lambda b: ["gen", "new"]}),
    "mid_prefill": ("request 'half': nothing has been drafted for it yet", {"request_ids": lambda b: ["half", "gen"]}),
    "widths_count": (r"widths is \[8\], wanted 2 whole numbers", {"widths": lambda b: [8]}),
    "widths_float": (r"widths is \[8, 1.5\], wanted 2 whole numbers", {"widths": lambda b: [8, 1.5]}),
    "width_high": ("widths is 9, wanted 1 to 8", {"widths": lambda b: [8, 9]}),
    "width_zero": ("widths is 0, wanted 1 to 8", {"widths": lambda b: [0, 8]}),
    "sampling_count": ("1 sampling entries for 2 requests", {"sampling": lambda b: [SamplingParams()]}),
    "sampling_blind": ("a temperature above 0 needs target_logits",
                       {"sampling": lambda b: [SamplingParams(temperature=1.0), SamplingParams()]}),
}  # fmt: skip

BAD_COMMITS = {
    "high": ("num_committed is 9, wanted 1 to 8", lambda: ids(9, 1)),
    "zero": ("num_committed is 0, wanted 1 to 8", lambda: ids(1, 0)),
    "negative": ("num_committed is -1, wanted 1 to 8", lambda: ids(1, -1)),
    "dtype": (r"num_committed is torch.int32 \[2\]", lambda: ids(1, 1).int()),
    "shape": (r"num_committed is torch.int64 \[3\] on cpu, wanted int64 \[2\]", lambda: ids(1, 1, 1)),
    "device": ("num_committed is .* on meta", lambda: ids(1, 1).to("meta")),
    "missing": ("committed_tokens with num_committed", lambda: None),
}


def assert_refused(bench: Bench, step_input: StepInput, message: str, kind=(ValueError, KeyError), **options) -> None:
    before = snapshot(bench.worker)
    with pytest.raises(kind, match=message):
        bench.worker.step(step_input, **options)
    assert snapshot(bench.worker) == before
    assert_good_step(bench)


@pytest.mark.parametrize("name", BAD_CHUNKS)
def test_bad_context_chunk(name):
    message, make = BAD_CHUNKS[name]
    bench = scene()
    good = [] if name in ("gap", "overlap", "start_float") else [bench.chunk("half", 9)]
    assert_refused(bench, StepInput(context=[*good, make(bench)], generation=bench.rows({"other": 2})), message)


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_generation_rows(name):
    message, changes = BAD_ROWS[name]
    bench = scene()
    rows = bench.rows({"gen": 4, "other": 2}, **{field: make(bench) for field, make in changes.items()})
    context = [] if name in ("not_begun", "mid_prefill") else [bench.chunk("new")]
    assert_refused(bench, StepInput(context=context, generation=rows), message)


@pytest.mark.parametrize("name", BAD_COMMITS)
def test_bad_verdict_of_the_caller(name):
    message, make = BAD_COMMITS[name]
    bench = scene()
    rows = bench.rows({"gen": 4, "other": 2}, kind="committed", num_committed=make())
    assert_refused(bench, StepInput(generation=rows), message)


def test_committed_token_outside_the_vocabulary():
    bench = scene()
    rows = bench.rows({"gen": 4, "other": 2}, kind="committed")
    rows.committed_tokens[1, 2] = 320
    assert_refused(bench, StepInput(generation=rows), r"committed_tokens\[1, 2\] is 320")


def test_chunk_and_row_of_one_request_in_one_step():
    bench = scene()
    step = StepInput(context=[bench.chunk("half", 9)], generation=bench.rows({"gen": 1}, request_ids=["half"]))
    assert_refused(bench, step, r"requests \['half'\] stand in the step more than once")


def test_rows_of_a_request_that_is_full():
    bench = scene()
    bench.admit("full", prompt(20, 7), max_context=20)
    assert bench.prefill("full").num_valid_drafts.tolist() == [0]
    rows = bench.rows({"gen": 4, "full": 0})
    before = snapshot(bench.worker)
    with pytest.raises(ValueError, match="'full': it holds all 20 tokens that it was admitted for; release it"):
        bench.worker.step(StepInput(generation=rows))
    assert snapshot(bench.worker) == before
    bench.check(bench.generate({"gen": 4}), "gen")


def test_block_table_for_a_pool_of_its_own():
    bench = scene()
    assert_refused(bench, StepInput(generation=bench.rows({"gen": 1}), block_table=ids(0)[None]), "block_table was given")


@pytest.mark.parametrize("num_tokens", [0, 1.5, True, 1000])
def test_prefix_of_a_length_that_is_not_there(num_tokens):
    bench = scene()
    before = snapshot(bench.worker)
    with pytest.raises(ValueError, match=f"a prefix of {num_tokens} tokens was asked for"):
        bench.worker.retain_prefix("gen", num_tokens)
    assert snapshot(bench.worker) == before


def test_runtime_override_that_cannot_run():
    for runtime, message in (
        (RuntimeConfig(draft_sampling="sample"), "needs the buffer that is made at construction"),
        (RuntimeConfig(direct_pool_write="require"), "runtime.direct_pool_write=require cannot be met"),
        (RuntimeConfig(kv_dtype="bfloat16"), "wants a pool of torch.bfloat16"),
    ):
        bench = scene()
        assert_refused(bench, good_step(bench), message, kind=ConfigError, runtime=runtime)


BAD_ADMISSIONS = {
    "twice": (ValueError, "request id 'gen' is None or in use", ("gen",), {}),
    "none": (ValueError, "request id None is None or in use", (None,), {}),
    "long": (ValueError, "max_context is 65, wanted 1 to the pool's max_positions of 64", ("x",), {"max_context": 65}),
    "zero": (ValueError, "max_context is 0, wanted 1", ("x",), {"max_context": 0}),
    "bool": (ValueError, "max_context is True, wanted 1", ("x",), {"max_context": True}),
    "float": (ValueError, "max_context is 2.5, wanted 1", ("x",), {"max_context": 2.5}),
}


@pytest.mark.parametrize("name", BAD_ADMISSIONS)
def test_bad_admission(name):
    kind, message, arguments, options = BAD_ADMISSIONS[name]
    bench = scene()
    before = snapshot(bench.worker)
    with pytest.raises(kind, match=message):
        bench.worker.admit(*arguments, **options)
    assert snapshot(bench.worker) == before
    assert_good_step(bench)


def test_no_slot_left():
    bench = scene()
    bench.worker.admit("last", max_context=1)
    before = snapshot(bench.worker)
    with pytest.raises(CapacityError, match="'more': all 5 slots are taken; release a request or build the pool with more"):
        bench.worker.admit("more", max_context=1)
    assert snapshot(bench.worker) == before
    bench.worker.release("last")
    assert_good_step(bench)


@pytest.mark.parametrize("call", ["release", "context_length", "slot_of"])
def test_unknown_request(call):
    bench = scene()
    before = snapshot(bench.worker)
    with pytest.raises(KeyError, match="request 'nobody' is not admitted"):
        getattr(bench.worker, call)("nobody")
    assert snapshot(bench.worker) == before
    assert_good_step(bench)


@pytest.mark.parametrize("count", [0, 14])
def test_prefix_longer_than_held(count):
    bench = scene()
    before = snapshot(bench.worker)
    with pytest.raises(ValueError, match=f"a prefix of {count} tokens was asked for, but request 'gen' holds 13"):
        bench.worker.retain_prefix("gen", count)
    assert snapshot(bench.worker) == before
    assert_good_step(bench)


def test_prefix_longer_than_the_admission_or_gone():
    bench = scene()
    handle = bench.worker.retain_prefix("gen", 8)
    before = snapshot(bench.worker)
    with pytest.raises(ValueError, match="the prefix has 8 tokens, above max_context 7"):
        bench.worker.admit("x", max_context=7, prefix=handle)
    assert snapshot(bench.worker) == before
    bench.pool.release_prefix(handle)
    before = snapshot(bench.worker)
    with pytest.raises(ValueError, match="was released already"):
        bench.worker.admit("x", max_context=20, prefix=handle)
    assert snapshot(bench.worker) == before
    assert_good_step(bench)


def test_external_pool_keeps_no_prefixes():
    bench = Bench(pool=external_pool())
    bench.admit("a", prompt(9))
    bench.prefill("a", block_table=torch.arange(6)[None])
    before = snapshot(bench.worker)
    with pytest.raises(ValueError, match="the outside engine keeps the prefixes"):
        bench.worker.retain_prefix("a", 8)
    with pytest.raises(ValueError, match="names page 40, but the pool has 40"):
        bench.worker.step(StepInput(generation=bench.rows({"a": 1}), block_table=ids(40)[None]))
    with pytest.raises(ValueError, match="needs StepInput.block_table"):
        bench.worker.step(StepInput(generation=bench.rows({"a": 1})))
    assert snapshot(bench.worker) == before
    bench.check(bench.generate({"a": 3}, block_table=torch.arange(6)[None]), "a")


@pytest.mark.parametrize("num_drafts", [0, 8])
def test_width_that_the_pool_was_not_sized_for(num_drafts):
    with pytest.raises(ValueError, match=f"num_drafts is {num_drafts}, wanted 1 to 7, what the pool was sized for"):
        Bench(num_drafts=num_drafts)


def test_width_above_the_trained_one_warns_once():
    with pytest.warns(UserWarning, match="num_drafts 8 is above the block width 7") as seen:
        bench = Bench(num_drafts=8, pool=make_pool(num_drafts=8))
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bench.admit("a", prompt(9))
        bench.check(bench.prefill("a"), "a")
        bench.check(bench.generate({"a": 8}), "a")


def test_model_and_pool_on_two_devices():
    config = tiny_config()
    with pytest.raises(ValueError, match="the model is on meta and the pool on cpu; they must share a device"):
        DFlashWorker(random_model(config).to("meta"), make_pool(config))


@pytest.mark.parametrize("temperature", [-1.0, 1e-40, float("inf"), float("nan")])
def test_bad_temperature(temperature):
    with pytest.raises(ValueError, match="temperature is .*, wanted 0"):
        SamplingParams(temperature=temperature)


@pytest.mark.parametrize("stage", ["project", "layer0", "layer1", "head", "last"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_step_that_fails_in_the_middle_can_be_sent_again(monkeypatch, stage, error):
    bench = scene()
    before = snapshot(bench.worker)
    places = {
        "project": (bench.model, "project_context"),
        "layer0": (bench.model.layers[0], "forward"),
        "layer1": (bench.model.layers[1], "forward"),
        "head": (bench.model, "draft"),
        "last": ("dspark_model.worker.DraftedRows.of",),
    }

    def fail(*_arguments, **_options):
        raise error("broken")

    with monkeypatch.context() as patch:
        patch.setattr(*places[stage], fail)
        with pytest.raises(error, match="broken"):
            bench.worker.step(good_step(bench))
    after = snapshot(bench.worker)
    # Rows behind the known lengths may have been written; everything else is as before.
    changed = {page for page, pair in enumerate(zip(before.pop("pool"), after.pop("pool"), strict=True)) if pair[0] != pair[1]}
    held = {page for pages in before["pages"].values() for page in pages}
    assert after == before
    assert stage != "project" or not changed
    for key in ("gen", "other"):
        bench.check_latents(key)
    assert changed <= held | set(before["free_pages"])
    assert_good_step(bench)
