"""Training from texts to a drafter that drafts, from Python and from the command line; the Triton kernels of it."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from training_kit import DRAFTS, ROOT, SHAPE, TRAINING, VOCAB, dense, packed_batch

from dspark_model.modeling import MLADSparkForCausalLM
from dspark_model.training.generate_text import TEXT_FILE
from dspark_model.training.new_drafter import export_drafter
from dspark_model.training.run import DRAFTER_FOLDER, STATE_FILE, split_texts, train
from dspark_model.training.settings import GenerationConfig, TrainingConfig, default_taps
from dspark_model.training.text_store import Conversations, pack_rows
from dspark_model.training.trainer import Trainer

pytest_plugins = ["training_kit"]


# The whole path


def test_generate_train_save_load_draft(model, texts, tmp_path):
    texts.save(tmp_path / TEXT_FILE)
    result = train(model, tmp_path, SHAPE, TRAINING, stop_after=None, called_at=time.perf_counter(), progress=False)
    assert result.finished and result.steps == TRAINING.steps and result.acceptance.passes > 0
    assert (tmp_path / "training_curves.png").stat().st_size > 0
    loaded = MLADSparkForCausalLM.from_pretrained(
        tmp_path / DRAFTER_FOLDER, lm_head=model.lm_head.weight, target_embed_tokens=model.model.embed_tokens.weight
    )
    *_, rows, batch, _ = packed_batch(model, loaded, texts)
    hidden = dense(loaded, rows.taps, batch)[:, :DRAFTS]
    draft = loaded.draft(hidden, batch.anchor_tokens[:, 0])
    assert draft.draft_tokens.shape == (3, DRAFTS) and torch.isfinite(draft.biased_logits).all()


def test_a_run_in_two_calls_equals_one(model, texts, tmp_path):
    states = []
    for name, first_steps in (("whole", 0), ("pieces", 5)):
        folder = tmp_path / name
        folder.mkdir()
        texts.save(folder / TEXT_FILE)
        if first_steps:
            take_steps(model, folder, first_steps)
        result = train(model, folder, SHAPE, TRAINING, stop_after=None, called_at=time.perf_counter(), progress=False)
        assert result.steps == TRAINING.steps
        states.append(torch.load(folder / STATE_FILE, weights_only=True)["drafter"])
    for name, tensor in states[0].items():
        torch.testing.assert_close(tensor, states[1][name], rtol=0, atol=0, msg=name)


def test_a_run_starts_from_a_drafter_of_its_shape(model, texts, tmp_path):
    data = pack_rows(texts, TRAINING.row_tokens, "cpu", TRAINING.seed)
    first = Trainer(model, data, SHAPE, TRAINING)
    for _ in range(3):
        first.step()
    folder = tmp_path / "first"
    exported = export_drafter(first.drafter, first.tap_scale)
    exported.save_pretrained(folder)
    second = Trainer(model, data, SHAPE, dataclasses.replace(TRAINING, seed=7))
    assert not torch.equal(first.tap_scale, second.tap_scale)
    second.start_from(folder)
    # The other run's scale is in the checkpoint's context_proj, this run's is taken out of it: the same function of taps.
    again = dict(export_drafter(second.drafter, second.tap_scale).named_parameters())
    for name, want in exported.named_parameters():
        close = {"rtol": 1e-6, "atol": 0.0} if name == "context_proj.weight" else {"rtol": 0.0, "atol": 0.0}
        torch.testing.assert_close(again[name], want, **close, msg=name)
    assert torch.isfinite(second.step().loss)


def test_a_run_does_not_start_from_a_drafter_of_another_shape(model, texts, drafter, tmp_path):
    export_drafter(drafter, torch.ones(drafter.config.context_width)).save_pretrained(tmp_path)
    data = pack_rows(texts, TRAINING.row_tokens, "cpu", TRAINING.seed)
    trainer = Trainer(model, data, dataclasses.replace(SHAPE, layers=1, markov_rank=4), TRAINING)
    with pytest.raises(ValueError, match="other markov_rank, num_hidden_layers; pass the same shape"):
        trainer.start_from(tmp_path)


def take_steps(model, folder: Path, steps: int) -> None:
    """A call that is cut off after `steps` steps."""
    texts, _ = split_texts(Conversations.load(folder / TEXT_FILE), TRAINING.eval_sequences, TRAINING.seed)
    trainer = Trainer(model, pack_rows(texts, TRAINING.row_tokens, "cpu", TRAINING.seed), SHAPE, TRAINING)
    for _ in range(steps):
        trainer.step()
    trainer.save(folder / STATE_FILE)


@pytest.mark.parametrize("attention", ["flex", "triton"])
def test_training_with_a_device_kernel_on_a_cpu_is_refused(model, texts, attention):
    config = dataclasses.replace(TRAINING, attention=attention)
    with pytest.raises(ValueError, match="use attention=dense"):
        Trainer(model, pack_rows(texts, 80, "cpu", 0), SHAPE, config)


def test_state_of_other_settings_is_refused(model, texts, tmp_path):
    texts.save(tmp_path / TEXT_FILE)
    train(model, tmp_path, SHAPE, TRAINING, stop_after=0.0, called_at=time.perf_counter(), progress=False)
    other = dataclasses.replace(TRAINING, gamma=5.0)
    with pytest.raises(ValueError, match="other gamma"):
        train(model, tmp_path, SHAPE, other, stop_after=0.0, called_at=time.perf_counter(), progress=False)


@pytest.mark.parametrize(("layers", "taps"), [(30, (2, 8, 15, 22, 28)), (4, (2,)), (1, (0,)), (8, (2, 3, 4, 5, 6))])
def test_default_taps(layers, taps):
    assert default_taps(layers) == taps


def test_settings_refuse_what_cannot_work():
    with pytest.raises(ValueError, match="exactly one"):
        TrainingConfig(steps=5)
    with pytest.raises(ValueError, match="attention is 'fast'"):
        TrainingConfig(attention="fast")
    with pytest.raises(ValueError, match="sequence_length"):
        GenerationConfig(sequence_length=64)


# The command line

TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} end {% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)
DECODING = ("--decode-attention", "sdpa", "--sampler", "torch", "--max-prompt-tokens", 20, "--sequence-length", 64)
LENGTHS = ("--max-user-tokens", 8, "--max-answer-tokens", 30, "--slots", 8)


def command(name: str, *arguments) -> None:
    spec = importlib.util.spec_from_file_location("train_drafter", ROOT / "scripts" / "train_drafter.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.main([name, "--device", "cpu", "--dtype", "float32", *map(str, arguments)]) == 0


@pytest.fixture
def target_folder(model, tmp_path) -> Path:
    """The tiny target with a tokenizer of words w0, w1, ... and a chat template."""
    names = [*(f"w{i}" for i in range(VOCAB - 3)), "user", "assistant", "end"]
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, "w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="end", unk_token="w0")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "target")
    model.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def test_generate_train_and_evaluate_from_the_command_line(target_folder, tmp_path):
    random = np.random.default_rng(0)
    for name, count in (("train", 6), ("first", 3), ("second", 4)):
        turns = [" ".join(f"w{i}" for i in random.integers(3, VOCAB - 3, 6)) for _ in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"turns": [turn]}) + "\n" for turn in turns))
    kept = (tmp_path / "first.jsonl", tmp_path / "second.jsonl")
    run = ("--target", target_folder, "--out", tmp_path / "run")
    command(
        "generate", *run, "--prompts", tmp_path / "train.jsonl", "--exclude", *kept, "--max-sequences", 24, *DECODING, *LENGTHS
    )
    sizes = [(f"--{name.replace('_', '-')}", value) for name, value in dataclasses.asdict(SHAPE).items() if name != "taps"]
    budget = ("--steps", 3, "--rows", 2, "--row-tokens", 64, "--anchors", 8, "--drafts", DRAFTS, "--vocab-chunk-rows", 1)
    flat = [item for pair in sizes for item in pair]
    command("train", *run, *flat, *budget, "--loss-kernel", "torch", "--eval-sequences", 4)
    command("evaluate", *run, "--prompts", *kept, "--num-prompts", 3, *DECODING, *LENGTHS)
    report = json.loads((tmp_path / "run" / "acceptance.json").read_text())
    sets = [report[path.stem] for path in kept]
    assert [one["texts"] for one in sets] == [3, 3] and all(len(one["conditional"]) == DRAFTS for one in sets)
    assert all(1.0 <= one["committed"] <= DRAFTS + 1 and one["passes"] > 0 for one in sets)
    assert report["macro_mean"] == pytest.approx(sum(one["committed"] for one in sets) / 2)


def test_prompts_that_are_all_too_long_are_refused(target_folder, tmp_path):
    (tmp_path / "long.jsonl").write_text(json.dumps({"turns": ["w5 " * 30]}) + "\n")
    arguments = ("--target", target_folder, "--out", tmp_path, "--prompts", tmp_path / "long.jsonl")
    with pytest.raises(ValueError, match="none of 1 prompts has at most 20 tokens"):
        command("evaluate", *arguments, *DECODING)


# Triton kernels, in Triton's interpreter.  Half precision stands in for bf16, which the interpreter cannot multiply.

KERNELS = """
import torch
from dspark_kernels.triton.anchor_attention import anchor_attention
from dspark_kernels.triton.decode_attention import decode_attention
from dspark_kernels.triton.draft_loss import draft_loss_
from dspark_kernels.triton.sample_rows import sample_rows
from dspark_model.training.draft_loss import draft_loss_torch_
torch.manual_seed(0)
for dtype, bound in ((torch.float32, 1e-5), (torch.float16, 2e-3)):
    q, lengths = torch.randn(3, 6, 16, dtype=dtype), torch.tensor([1, 70, 90])
    k, v = (torch.randn(3, 2, 90, 16, dtype=dtype) for _ in range(2))
    for b, n in enumerate(lengths):
        k[b, :, n:] = v[b, :, n:] = float("nan")
    out = decode_attention(q, k, v, lengths, 0.25)
    for b, n in enumerate(lengths):
        keys, values = (x[b, :, :n].repeat_interleave(3, 0).float() for x in (k, v))
        want = torch.softmax((q[b, :, None].float() @ keys.mT) * 0.25, -1) @ values
        torch.testing.assert_close(out[b].float(), want[:, 0], rtol=bound, atol=bound)
for dtype in (torch.float32, torch.bfloat16):
    logits, temperatures = torch.randn(3, 5000, dtype=dtype), torch.tensor([0.0, 0.0, 1.0])
    logits[1, 77] = logits[1, 4500] = 9
    tokens = sample_rows(logits, temperatures, torch.tensor([3]))
    assert tokens[:2].tolist() == [int(logits[0].float().argmax()), 77]
    assert sample_rows(logits, temperatures, torch.tensor([4]))[2] != tokens[2]
    z, t = (torch.randn(n, 5000).mul(3).to(dtype) for n in (4, 3))
    rows, labels = torch.tensor([0, 2, 1, 1]), torch.tensor([3, 4999, 7, 4096])
    weights = torch.tensor([1.0, 0.5, 0.0, 0.2])
    a, b = z.clone(), z.clone()
    got = draft_loss_(a, t, rows, labels, weights, ce_weight=0.1, l1_weight=0.9)
    want = draft_loss_torch_(b, t, rows, labels, weights, ce_weight=0.1, l1_weight=0.9)
    for x, y in zip(got, want): torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(a, b, rtol=1e-2 if dtype is torch.bfloat16 else 1e-4, atol=1e-6)
logits = torch.log(torch.tensor([0.5, 0.3, 0.2])).expand(150, 3).contiguous()
share = torch.bincount(sample_rows(logits, torch.ones(150), torch.tensor([5])), minlength=3) / 150
assert (share - torch.tensor([0.5, 0.3, 0.2])).abs().max() < 0.15, share

def dense(q, k, v, k_block, v_block, first, last, scale):
    at, drafts = torch.arange(k.shape[2]), q.shape[2] // first.shape[1]
    block = torch.arange(q.shape[2]) // drafts
    seen = ((at >= first[..., None]) & (at <= last[..., None])).repeat_interleave(drafts, 1)[:, None]
    own = (block[:, None] == block).expand(q.shape[0], 1, -1, -1)
    scores = (q @ torch.cat((k, k_block), 2).mT * scale).masked_fill(~torch.cat((seen, own), -1), float("-inf"))
    return torch.softmax(scores, -1) @ torch.cat((v, v_block), 2)
# More than a tile of queries and of keys, a last tile in part, widths that are no powers of 2, a block without context.
for anchors, drafts, length, width, value_width in ((11, 7, 70, 24, 12), (3, 64, 20, 16, 16)):
    last = torch.randint(length, (2, anchors)).sort(1).values.int()
    first = (last - torch.randint(50, (2, anchors))).clamp(min=0).int()
    first[0, 0] = last[0, 0] + 1
    sizes = (anchors * drafts, width), (length, width), (length, value_width), (anchors * drafts, width)
    sizes = *sizes, (anchors * drafts, value_width)
    inputs = [torch.randn(2, n, 3, w).transpose(1, 2).requires_grad_() for n, w in sizes]
    got, want = (f(*inputs, first, last, 0.3) for f in (anchor_attention, dense))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    grad = torch.randn_like(want)
    for a, b in zip(torch.autograd.grad(got, inputs, grad), torch.autograd.grad(want, inputs, grad)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
"""


def test_triton_kernels_in_the_interpreter():
    path = os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", KERNELS], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_package_imports_neither_triton_nor_transformers():
    code = (
        "import sys, dspark_model, dspark_model.training; assert not {'triton', 'cutlass', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
