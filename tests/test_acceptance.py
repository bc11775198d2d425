"""Acceptance figures on hand-made texts, and the whole measurement on a tiny target and a random drafter."""

import importlib
import importlib.util
import json
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

from dspark_model.acceptance import (
    calibrate,
    check_lossless,
    lookup_passes,
    lookup_per_pass,
    macro_means,
    repeated_share,
    speed,
    summarize,
)
from dspark_model.acceptance_run import AcceptanceSettings, load_bench, read_prompts, row_faults
from dspark_model.generation import Generation, generate_plain
from dspark_model.testing import tiny_config, write_checkpoint

VOCAB = 97
SCRIPT = Path(__file__).parents[1] / "scripts" / "check_acceptance.py"
TEMPLATE = "{{ messages[0]['content'] }}{% if add_generation_prompt %} answer{% endif %}"


def script_main(*arguments) -> int:
    spec = importlib.util.spec_from_file_location("check_acceptance", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main([str(argument) for argument in arguments])


@pytest.mark.parametrize(
    ("prompt", "answer", "num_drafts", "passes"),
    [
        ([1, 2, 3], [4, 5, 6], 7, [1, 1]),  # nothing occurs twice
        ([1, 2, 3, 4, 5], [1, 2, 3, 4, 9], 7, [4]),  # 2 3 4 copied from behind 1; 9 is the target's own
        ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 1], 2, [3, 2]),  # K = 2: two drafts and one more, then 1 behind nothing new
        ([1, 2, 1, 3], [1, 3, 1, 3], 1, [2, 1]),  # the most recent 1 is followed by 3, not the first, which has 2
        ([5, 1, 7, 6, 1, 8, 5], [1, 7, 9], 1, [2]),  # the longest suffix (5 1) wins over the most recent 1
        ([1, 2, 3, 4, 9], [1, 2, 3, 4], 7, [3]),  # the last draft ends the text: no token of the target's follows
        ([9], [4, 4, 4, 4, 4, 4, 4, 4, 4, 4], 7, [1, 8]),  # a loop is drafted in full from one earlier token
        ([9, 8], [7], 7, []),  # the prefill's token alone
    ],
)
def test_lookup_on_known_sequences(prompt, answer, num_drafts, passes):
    assert lookup_passes(prompt, answer, num_drafts) == passes


def test_lookup_equals_a_search_from_scratch():
    generator = torch.Generator().manual_seed(3)
    for _ in range(40):
        prompt, answer = (torch.randint(3, (size,), generator=generator).tolist() for size in (12, 40))
        assert lookup_passes(prompt, answer, 5) == slow_lookup(prompt, answer, 5)


def slow_lookup(prompt: list[int], answer: list[int], num_drafts: int) -> list[int]:
    known, rest, counts = prompt + answer[:1], answer[1:], []
    while rest:
        drafts, agreed = copy_of_match(known, num_drafts), 0
        while agreed < min(len(drafts), len(rest)) and drafts[agreed] == rest[agreed]:
            agreed += 1
        count = min(agreed + 1, len(rest))
        counts.append(count)
        known, rest = known + rest[:count], rest[count:]
    return counts


def copy_of_match(known: list[int], num_drafts: int) -> list[int]:
    for size in (4, 3, 2, 1):
        for start in range(len(known) - size - 1, -1, -1):
            if known[start : start + size] == known[-size:]:
                text = list(known)
                for k in range(num_drafts):
                    text.append(text[start + size + k])
                return text[len(known) :]
    return []


def test_lookup_is_pooled_over_passes():
    prompts, answers = [[1, 2, 3, 4, 5], [1, 2, 3]], [[1, 2, 3, 4, 9], [4, 5, 6]]
    assert lookup_per_pass(prompts, answers, 7) == pytest.approx((4 + 1 + 1) / 3)


def test_repeats():
    assert repeated_share([list(range(20))]) == 0
    assert repeated_share([list(range(10)) * 2]) == pytest.approx(3 / 13)
    assert repeated_share([[7] * 12, list(range(12))]) == pytest.approx(4 / 10)
    assert repeated_share([[1, 2, 3]]) == 0


def test_calibration_on_known_numbers():
    pairs = [(0.95, True)] * 3 + [(0.95, False)] + [(0.25, False)] * 3 + [(0.25, True)] + [(1.0, True), (0.0, False)]
    found = calibrate(pairs)
    # Bin 9 holds 0.95 four times and 1.0: predicted 0.96, observed 0.8.  Bin 2: 0.25 and 0.25.  Bin 0: 0 and 0.
    assert found.ece == pytest.approx(5 / 10 * 0.16)
    assert [part.count for part in found.bins] == [1, 0, 4, 0, 0, 0, 0, 0, 0, 5]
    assert (found.mean_predicted, found.mean_observed) == (pytest.approx(0.58), pytest.approx(0.5))
    assert calibrate([]) is None


def text(tokens, committed, offered, accepted, confidence=(), margins=None, seconds=1.0) -> Generation:
    margins = [5.0] * len(tokens) if margins is None else margins
    return Generation(
        tokens=list(tokens),
        margins=margins,
        num_passes=len(committed),
        committed=list(committed),
        offered=list(offered),
        accepted=list(accepted),
        confidence=list(confidence),
        seconds=seconds,
    )


def test_figures_of_a_set():
    texts = [
        text([5, 1, 2, 3, 4], [3, 1], [2, 1], [1, 1], [(0.9, True)]),
        text([6, 7, 0], [1, 1], [2, 0], [0, 0]),
        text([0], [], [0, 0], [0, 0]),
    ]
    report = summarize("some", [[9]] * 3, texts, end_tokens={0}, num_skipped=2)
    assert (report.num_prompts, report.num_skipped, report.num_passes, report.num_tokens) == (3, 2, 4, 9)
    assert report.committed_per_pass == pytest.approx(6 / 4)
    assert report.committed_by_prompt == pytest.approx((2 + 1) / 2)
    assert (report.offered, report.accepted) == ((4, 1), (1, 1))
    assert report.conditional == (0.25, 1.0) and report.unconditional == (0.25, 0.25)
    assert report.ended == pytest.approx(2 / 3)
    other = summarize("other", [[9]], [text([1, 2], [1], [1, 0], [0, 0])], end_tokens={0})
    macro = macro_means([report, other])
    assert macro.committed_per_pass == pytest.approx((1.5 + 1) / 2) and macro.pooled == pytest.approx(7 / 5)
    assert macro.conditional == (0.125, 0.5) and macro.speed_up is None


def test_speed_counts_committed_tokens_over_seconds():
    plain, drafted = text(range(9), [1] * 8, [], [], seconds=4.0), text(range(9), [4, 4], [2], [1], seconds=1.0)
    timing = speed([plain], [drafted], 1)
    assert (timing.plain, timing.drafted, timing.speed_up) == (2.0, 8.0, 4.0)


def test_lossless_tells_ties_from_wrong_texts():
    plain = [text([1, 2, 3], [1, 1], [], [], margins=[9, 0.1, 9]) for _ in range(3)]
    drafted = [text(tokens, [1, 1], [], [], margins=[9, 0.2, 9]) for tokens in ([1, 2, 3], [1, 7, 3], [1, 2, 8])]
    found = check_lossless(plain, drafted, margin=0.25)
    assert (found.equal, found.tied, found.near_ties, found.holds) == (1, 1, 3, False)
    assert [(one.prompt, one.index) for one in found.unexcused] == [(2, 2)]
    assert not check_lossless(plain, drafted, margin=0.05).tied
    assert not check_lossless(plain[:1], drafted[:1], 0.25, row_faults=1).holds


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A tiny chat model, a random drafter for it, and two prompt files."""
    root = tmp_path_factory.mktemp("acceptance")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        initializer_range=0.3,
        eos_token_id=1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(root / "target")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCAB - 1)} | {"answer": VOCAB - 1}, "w0")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", unk_token="w0")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(root / "target")
    taps = {"target_layer_ids": [0, 2, 3], "target_num_hidden_layers": 4}
    drafter = tiny_config(hidden_size=48, target_hidden_size=None, vocab_size=VOCAB, mask_token_id=VOCAB - 1, **taps)
    write_checkpoint(root / "drafter", drafter, seed=1)
    for name, seed in (("first", 5), ("second", 6)):
        turns = torch.randint(3, VOCAB - 1, (4, 6), generator=torch.Generator().manual_seed(seed)).tolist()
        turns[1] *= 5
        lines = [json.dumps({"turns": [" ".join(f"w{i}" for i in turn), "not this one"]}) for turn in turns]
        (root / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {"root": root, **{name: root / name for name in ("target", "drafter", "first.jsonl", "second.jsonl")}}


def run(folders, out: Path, *more) -> int:
    fixed = ["--target", folders["target"], "--drafter", folders["drafter"], "--max-new-tokens", 24, "--out", out]
    return script_main(*fixed, "--prompts", folders["first.jsonl"], folders["second.jsonl"], *more)


@pytest.mark.parametrize("batch", [1, 3])
def test_measurement_from_the_command_line(folders, tmp_path, capsys, batch):
    more = ["--batch", batch, "--timed", 2, "--max-prompt-tokens", 20, "--lossless", "verify-rows"]
    assert run(folders, tmp_path / "out", *more) == 0
    shown = capsys.readouterr().out
    assert "3/0/0" in shown and "2 prompts of more than 20 tokens were skipped" in shown and "mean of sets" in shown
    data = json.loads((tmp_path / "out" / "acceptance.json").read_text(encoding="utf-8"))
    assert set(data) == {"lossless", "sets", "macro", "settings", "machine", "config", "seconds"}
    assert data["lossless"] is True and [one["name"] for one in data["sets"]] == ["first", "second"]
    one = data["sets"][0]
    assert (one["num_prompts"], one["num_skipped"], one["lossless"]["equal"], one["lossless"]["row_faults"]) == (3, 1, 3, 0)
    assert len(one["conditional"]) == 7 and one["calibration"]["count"] == sum(one["offered"])
    assert one["single"]["batch"] == 1 and one["single"]["num_prompts"] == (3 if batch == 1 else 2)
    assert one["batched"]["batch"] == batch and one["single"]["speed_up"] > 0
    assert {"cpu", "gpu", "torch", "transformers", "python", "commit", "date"} <= set(data["machine"])
    assert data["settings"]["dtype"] == "float32" and data["settings"]["drafter"] == str(folders["drafter"])
    assert len(data["settings"]["prompts"][1]["sha256"]) == 64
    assert data["config"]["end_tokens"] == [1, 2] and data["config"]["tie_margin"] == 1e-3
    assert data["config"]["drafter"]["markov_rank"] == 16 and data["config"]["in_force"]["runtime.attention"]
    table = (tmp_path / "out" / "acceptance.md").read_text(encoding="utf-8").splitlines()
    assert table[1].startswith("| ---") and len({line.count("|") for line in table[:5]}) == 1
    assert (tmp_path / "out" / "acceptance.png").read_bytes()[:4] == b"\x89PNG"


def test_with_a_temperature_texts_are_not_compared(folders, tmp_path, capsys):
    more = ["--temperature", 0.7, "--seed", 4, "--limit", 1, "--num-drafts", 3, "--set", "runtime.draft_sampling=sample"]
    assert run(folders, tmp_path, *more) == 0
    assert "texts are not compared" in capsys.readouterr().out
    data = json.loads((tmp_path / "acceptance.json").read_text(encoding="utf-8"))
    assert data["lossless"] is None and data["sets"][0]["lossless"] is None and data["sets"][0]["single"] is None
    assert len(data["macro"]["conditional"]) == 3 and data["config"]["runtime"]["draft_sampling"] == "sample"


def test_a_worker_that_accepts_everything_is_caught(folders, tmp_path, monkeypatch, capsys):
    module = importlib.import_module("dspark_model.ops.step_prologue")
    honest = module.accept_exact
    monkeypatch.setattr(module, "accept_exact", lambda drafts, counts, tokens: honest(drafts, counts, pretend(drafts, tokens)))
    assert run(folders, tmp_path, "--lossless", "verify-rows", "--limit", 2) == 1
    data = json.loads((tmp_path / "acceptance.json").read_text(encoding="utf-8"))
    assert data["lossless"] is False and len(data["sets"][0]["lossless"]["unexcused"]) == 2
    assert data["sets"][0]["lossless"]["row_faults"] > 0
    assert "0/0/4" in capsys.readouterr().out


def pretend(drafts: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.cat((drafts, tokens[:, -1:]), dim=1)


@pytest.mark.parametrize("wrong", [None, 0, 9, 23])
def test_rows_run_again_find_a_wrong_token(folders, wrong):
    settings = AcceptanceSettings(
        target=str(folders["target"]),
        drafter=folders["drafter"],
        prompts=(folders["first.jsonl"],),
        batch=4,
        max_new_tokens=24,
    )
    bench = load_bench(settings)
    prompts = bench.sets[0].prompts
    texts = generate_plain(bench.target, prompts, max_new_tokens=24)
    # Passes of several tokens, as if the drafts had been right; the texts are the target's own.
    splits = ([8, 8, 7], [1, 2, 8, 5, 7], [7, 1, 8, 7], [3] * 7 + [2])
    for one, committed in zip(texts, splits, strict=True):
        one.committed, one.num_passes = list(committed), len(committed)
    if wrong is not None:
        texts[2].tokens[wrong] = (texts[2].tokens[wrong] + 1) % VOCAB
    faults = row_faults(bench.target, prompts, texts, num_drafts=7)
    assert faults == 0 if wrong is None else faults >= 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--max-prompt-tokens", 3], "none of 4 prompts has at most 3 tokens"),
        (["--set", "pool.page_size=8"], "only runtime.KEY=VALUE"),
        (["--set", "runtime.direct_pool_write=require"], "cannot be met"),
        (["--batch", 0], "batch is 0"),
        (["--temperature", 1, "--lossless", "verify-rows"], "temperature 0"),
        (["--gguf", "some.gguf"], "for target smollm2 only"),
    ],
)
def test_what_does_not_fit_is_refused(folders, tmp_path, capsys, more, message):
    assert run(folders, tmp_path, *more) == 2
    assert message in capsys.readouterr().err


def test_prompt_files_are_checked(folders, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders["target"])
    for line in ("{}", '{"turns": []}', '{"turns": [3]}', '["turns"]', "no json"):
        (tmp_path / "bad.jsonl").write_text('{"turns": ["w1"]}\n' + line + "\n", encoding="utf-8")
        with pytest.raises(ValueError, match="line 2: wanted"):
            read_prompts(tmp_path / "bad.jsonl", tokenizer, limit=9, max_tokens=9)
    assert read_prompts(folders["first.jsonl"], tokenizer, limit=1, max_tokens=9).prompts[0][-1] == VOCAB - 1
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        read_prompts(folders["first.jsonl"], tokenizer, limit=1, max_tokens=9)
