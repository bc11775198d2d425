"""Training a drafter: loss gradient, anchors, equality with inference, and the whole path on a tiny random target."""

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

from dspark_model import ops
from dspark_model.context_latents import ContextLatents
from dspark_model.modeling import BlockContext, MLADSparkForCausalLM
from dspark_model.rope import RopeTable
from dspark_model.training import block_forward as blocks
from dspark_model.training.acceptance import measure_acceptance
from dspark_model.training.anchors import anchor_batch, block_labels, eligible_anchors, sample_anchors
from dspark_model.training.chat_format import ChatFormat, Job
from dspark_model.training.draft_loss import LossWeights, VocabularyRows, draft_loss_torch_, vocabulary_loss
from dspark_model.training.generate_text import TEXT_FILE, pack_texts, write_texts
from dspark_model.training.muon import StackedMuon
from dspark_model.training.new_drafter import export_drafter, new_drafter
from dspark_model.training.overlap import ExcludedRuns, remove_overlap, run_hashes
from dspark_model.training.run import DRAFTER_FOLDER, STATE_FILE, split_texts, train
from dspark_model.training.settings import DrafterShape, GenerationConfig, TrainingConfig, default_taps
from dspark_model.training.target_pass import TargetPass
from dspark_model.training.text_store import Conversations, conversations_from_lists, pack_rows
from dspark_model.training.trainer import Trainer

ROOT = Path(__file__).resolve().parents[1]
VOCAB, HIDDEN, DRAFTS = 97, 48, 5
CHAT = ChatFormat(head=(5, 6, 7), to_assistant=(8, 9), to_user=(10, 11), end_of_turn=2, suffix=(12, 13))
SHAPE = DrafterShape(
    layers=2,
    heads=4,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    intermediate_size=64,
    markov_rank=8,
)
GENERATION = GenerationConfig(
    slots=16,
    sequence_length=72,
    max_prompt_tokens=20,
    max_user_tokens=10,
    max_answer_tokens=30,
    seconds=60.0,
    check_every=5,
    decode_attention="sdpa",
    sampler="torch",
    cuda_graph=False,
)
TRAINING = TrainingConfig(
    rows=2,
    row_tokens=80,
    anchors=12,
    drafts=DRAFTS,
    seconds_total=None,
    steps=12,
    vocab_chunk_rows=1,
    loss_kernel="torch",
    log_every=4,
    eval_sequences=6,
    warmup_steps=4,
    eval_every_seconds=1e9,
)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)


def some_jobs(count: int):
    random = np.random.default_rng(0)
    for i in range(count):
        given = (*CHAT.head, *random.integers(20, 90, random.integers(1, 9)))
        if i % 3 == 0:
            yield Job(np.asarray((*given, 2, *CHAT.to_assistant), np.int32), 1, 2, False, 0.0, 0.0)
        else:
            stages = 4 if i % 3 == 2 else 2
            yield Job(np.asarray(given, np.int32), 0, stages, i % 2 == 0, 0.9, 1.0 if i % 4 == 1 else 0.0)


@pytest.fixture(scope="module")
def texts(model) -> Conversations:
    torch.manual_seed(0)
    return pack_texts(write_texts(model, CHAT, some_jobs(90), GENERATION, max_texts=90, progress=False).texts)


@pytest.fixture
def drafter(model) -> MLADSparkForCausalLM:
    """A drafter with every part at work: W2 is not 0."""
    torch.manual_seed(1)
    result = new_drafter(model, SHAPE, drafts=DRAFTS, markov_init_std=1.0)
    torch.nn.init.normal_(result.markov_head.markov_w2.weight)
    return result


# Generation


def test_every_job_is_written_once_and_greedy_answers_are_the_targets_choice(model, texts):
    assert len(texts) == 90
    assert sorted(np.unique(texts.turns)) == [1, 2]
    for index in np.flatnonzero(texts.greedy):
        tokens, answer = texts.text(index)
        best = model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].argmax(-1)
        answered = np.flatnonzero(answer)
        assert len(answered) and np.array_equal(best.numpy()[answered - 1], tokens[answered])


def test_turns_follow_the_template(texts):
    for index in range(len(texts)):
        tokens, answer = texts.text(index)
        assert tuple(tokens[:3]) == CHAT.head
        first = int(np.flatnonzero(answer)[0])
        assert tuple(tokens[first - 3 : first]) == (2, 8, 9)


def test_suffix_stands_before_the_end_of_the_user_turn(model):
    job = Job(np.asarray((*CHAT.head, 30, 31), np.int32), 0, 2, True, 0.9, 0.0)
    text = write_texts(model, CHAT, [job], GENERATION, max_texts=1, progress=False).texts[0]
    first = int(np.flatnonzero(text.answer)[0])
    assert tuple(text.tokens[first - 5 : first]) == (12, 13, 2, 8, 9)


def test_triton_attention_on_a_cpu_is_refused(model):
    config = dataclasses.replace(GENERATION, decode_attention="triton")
    with pytest.raises(ValueError, match="needs CUDA"):
        write_texts(model, CHAT, some_jobs(1), config, max_texts=1)


def test_overlap_is_found_in_prompts_and_answers_and_not_across_texts():
    shared = np.arange(100, 110)
    lists = [
        np.concatenate(([1], shared)),
        np.concatenate((shared, [1, 2])),
        shared[:6],
        np.concatenate((shared[6:], [4, 5])),
        np.arange(12),
    ]
    answer = [np.zeros(len(t), bool) for t in lists]
    answer[1][:] = True
    texts = conversations_from_lists(lists, answer, [True] * 5, [1] * 5)
    kept, report = remove_overlap(texts, [ExcludedRuns("eval", np.unique(run_hashes(shared, 10)))], 10)
    assert (len(kept), report.removed, report.total_removed, report.in_prompt) == (3, {"eval": 2}, 2, 1)
    assert np.array_equal(kept.text(0)[0], lists[2])


def test_runs_that_reach_into_the_files_wrapper_do_not_count(tmp_path):
    from dspark_model.training.overlap import excluded_runs

    def tokenizer(text, add_special_tokens):
        return {"input_ids": [int(word) for word in text.split()]}

    wrapper = " ".join(map(str, range(50, 65)))
    path = tmp_path / "eval.jsonl"
    path.write_text(
        "".join(f'{{"turns": ["{" ".join(map(str, range(i, i + 12)))} {wrapper}"]}}\n' for i in range(0, 4000, 100))
    )
    runs = excluded_runs(path, tokenizer, 10).hashes
    prompt = np.concatenate((np.arange(100, 112), np.arange(50, 65)))
    # Runs of the prompt's own tokens count; the wrapper's runs, and those that reach into it, do not.
    assert np.isin(run_hashes(prompt, 10), runs).tolist() == [True] * 3 + [False] * 15


# Packing and anchors


def test_packed_rows_hold_every_text_once(texts):
    packed = pack_rows(texts, 80, "cpu", seed=0)
    found = []
    for row in range(len(packed)):
        for start in packed.document[row].unique().tolist():
            at = packed.document[row] == start
            if packed.answer[row][at].any():
                found.append(tuple(packed.tokens[row][at].tolist()))
    assert sorted(found) == sorted(tuple(texts.text(i)[0].tolist()) for i in range(len(texts)))


def test_too_long_texts_are_refused(texts):
    with pytest.raises(ValueError, match="row_tokens"):
        pack_rows(texts, 20, "cpu", seed=0)


def test_anchors_and_labels():
    answer = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 1, 1, 1]]).bool()
    document = torch.tensor([[0, 0, 0, 0, 0, 0, 6, 6, 6, 6]])
    tokens = torch.arange(10)[None] + 10
    eligible = eligible_anchors(document, answer)
    assert eligible[0].nonzero()[:, 0].tolist() == [1, 2, 3, 6, 7]
    at, valid = sample_anchors(eligible, 7, torch.Generator().manual_seed(0))
    assert sorted(at[valid].tolist()) == [1, 2, 3, 6, 7] and int(valid.sum()) == 5
    at = torch.tensor([[1, 3, 7, 0]])
    labels = block_labels(tokens, document, answer, at, torch.tensor([[True, True, True, False]]), 3)
    assert labels.counted[0].tolist() == [[True] * 3, [True, False, False], [True, False, False], [False] * 3]
    assert labels.tokens[0, 0].tolist() == [13, 14, 15]
    assert labels.previous[0, 0].tolist() == [12, 13, 14]
    assert labels.source[0, 0].tolist() == [2, 3, 4]


# Loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vocabulary_gradient_equals_autograd(dtype):
    torch.manual_seed(0)
    chunks, m, u, h, r, v = 2, 7, 5, 12, 4, 31
    hidden = torch.randn(chunks, m, h, dtype=dtype, requires_grad=True)
    markov = torch.randn(chunks, m, r, dtype=dtype, requires_grad=True)
    w2 = torch.randn(v, r, dtype=dtype, requires_grad=True)
    head = torch.randn(v, h, dtype=dtype)
    weights = torch.rand(chunks, m)
    weights[0, 3] = 0
    rows = VocabularyRows(
        torch.randn(chunks, u, h, dtype=dtype), torch.randint(u, (chunks, m)), torch.randint(v, (chunks, m)), weights
    )
    loss, ce, l1 = vocabulary_loss(hidden, markov, w2, head, rows, LossWeights(0.1, 0.9), draft_loss_torch_)
    got = torch.autograd.grad(loss * 3.0, (hidden, markov, w2))
    log_p = torch.log_softmax(hidden @ head.T + markov @ w2.T, -1)
    q = torch.softmax(rows.target_hidden @ head.T, -1).gather(1, rows.target_rows[..., None].expand(-1, -1, v))
    ce_want = -log_p.gather(-1, rows.labels[..., None])[..., 0]
    l1_want = (log_p.exp() - q).abs().sum(-1)
    want_loss = ((0.1 * ce_want + 0.9 * l1_want) * weights).sum()
    want = torch.autograd.grad(want_loss * 3.0, (hidden, markov, w2))
    tolerance = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(loss.double(), want_loss.double(), **tolerance)
    torch.testing.assert_close(ce.double(), ce_want.double(), **tolerance)
    torch.testing.assert_close(l1.double(), l1_want.double(), **tolerance)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def test_stacked_muon_equals_torch_muon():
    torch.manual_seed(0)
    start = [torch.randn(24, 16), torch.randn(24, 16), torch.randn(8, 32)]
    ours = [torch.nn.Parameter(p.clone()) for p in start]
    theirs = [torch.nn.Parameter(p.clone()) for p in start]
    optimisers = (
        StackedMuon(ours, 1e-2, weight_decay=0.1),
        torch.optim.Muon(theirs, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    )
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for optimiser in optimisers:
            optimiser.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


# The forward over anchors


def packed_batch(model, drafter, texts, anchors=12):
    data = pack_rows(texts, 80, "cpu", seed=0)
    tokens, document, answer = data.tokens[:3].long(), data.document[:3].long(), data.answer[:3]
    rows = TargetPass(model, drafter.config.target_layer_ids, compile_model=False)(tokens, document)
    at, valid = sample_anchors(eligible_anchors(document, answer), anchors, torch.Generator().manual_seed(0))
    rope = RopeTable(drafter.config.rope, drafter.config.qk_rope_head_dim, 128)
    return tokens, document, at, valid, rows, anchor_batch(tokens, document, at, DRAFTS, rope), rope


def dense(drafter, taps, batch):
    return blocks.block_forward(drafter, taps, batch, blocks.DenseAttention(batch, DRAFTS), DRAFTS)


def test_packed_target_equals_each_text_alone(model, texts, drafter):
    tokens, document, *_, rows, _, _ = packed_batch(model, drafter, texts)
    start = int(document[0].unique()[-2])
    span = (document[0] == start).nonzero()[:, 0]
    alone = model.model(input_ids=tokens[0, span][None]).last_hidden_state[0]
    torch.testing.assert_close(rows.final[0, span], alone, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_training_forward_equals_inference(model, texts, drafter):
    tokens, document, at, valid, rows, batch, rope = packed_batch(model, drafter, texts)
    hidden = dense(drafter, rows.taps, batch).unflatten(1, (-1, DRAFTS))
    page_size, pages = 4, 40
    for row in range(3):
        for a in range(0, 12, 3):
            p, start = int(at[row, a]), int(document[row, at[row, a]])
            length = p + 1 - start
            pool = [torch.full((pages, page_size, drafter.config.latent_dim), float("nan")) for _ in drafter.layers]
            table = torch.randperm(pages)[None].int()
            pages_owned = torch.tensor([-(-(length + DRAFTS) // page_size)])
            where = ops.row_addresses(torch.arange(length)[None], table, pages_owned, page_size)
            context = drafter.project_context(rows.taps[row, start : p + 1])
            latents = ContextLatents(drafter)(context, rope.rows(torch.arange(length)))
            ops.latent_store(pool, latents[:, None], where)
            lens = torch.tensor([length])
            block_rows = ops.block_fixup(lens, table, pages_owned, torch.tensor([True]), rows=DRAFTS, page_size=page_size)
            block = BlockContext(pool, table, lens, block_rows, rope.rows(block_rows.positions), length + DRAFTS)
            anchor = tokens[row, p + 1][None]
            out = drafter.decode_block(drafter.embed_block(anchor, DRAFTS), block)
            torch.testing.assert_close(hidden[row, a], out[0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_flex_equals_dense(model, texts, drafter):
    *_, rows, batch, _ = packed_batch(model, drafter, texts)
    flex = blocks.FlexAttention(blocks.flex_block_mask(batch, DRAFTS), blocks.flex_attention)
    out = blocks.block_forward(drafter, rows.taps, batch, flex, DRAFTS)
    torch.testing.assert_close(out, dense(drafter, rows.taps, batch), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_triton_attention_equals_dense_on_the_device(model, texts, drafter, dtype, bound):
    batch = packed_batch(model, drafter, texts)[5]
    batch = blocks.AnchorBatch(*(tensor.cuda() for tensor in batch.tensors()))
    rows, queries, length = batch.anchor_at.shape[0], batch.anchor_at.shape[1] * DRAFTS, batch.document.shape[1]
    shapes = ((queries, 96), (length, 96), (length, 64), (queries, 96), (queries, 64))
    inputs = [torch.randn(rows, 3, n, w, dtype=dtype, device="cuda", requires_grad=True) for n, w in shapes]
    grad = torch.randn(rows, 3, queries, 64, dtype=dtype, device="cuda")
    out = blocks.TritonAttention(batch)(*inputs, 96**-0.5)
    wide = [x.detach().float().requires_grad_() for x in inputs]
    out_wide = blocks.DenseAttention(batch, DRAFTS)(*wide, 96**-0.5)
    torch.testing.assert_close(out.float(), out_wide, rtol=bound, atol=bound)
    grads = zip(torch.autograd.grad(out, inputs, grad), torch.autograd.grad(out_wide, wide, grad.float()), strict=True)
    for got, want in grads:
        torch.testing.assert_close(got.float(), want, rtol=bound, atol=bound)


@torch.no_grad()
def test_nothing_behind_the_anchor_or_of_other_texts_leaks(model, texts, drafter):
    tokens, document, at, valid, rows, batch, rope = packed_batch(model, drafter, texts)
    want = dense(drafter, rows.taps, batch).unflatten(1, (-1, DRAFTS))
    for a in (0, 5, 11):
        changed, other = rows.taps.clone(), tokens.clone()
        for row in range(3):
            p, start = int(at[row, a]), int(document[row, at[row, a]])
            changed[row, p + 1 :] = torch.randn_like(changed[row, p + 1 :]) * 9
            changed[row, :start] = 7.0
            other[row, p + 2 :] = (other[row, p + 2 :] + 1) % VOCAB
        got = dense(drafter, changed, anchor_batch(other, document, at, DRAFTS, rope)).unflatten(1, (-1, DRAFTS))
        torch.testing.assert_close(got[:, a], want[:, a], rtol=0, atol=0)
        changed[torch.arange(3), at[:, a]] += 1.0
        moved = dense(drafter, changed, batch).unflatten(1, (-1, DRAFTS))
        assert (moved[:, a] - want[:, a]).abs().amax((1, 2)).min() > 1e-4


@torch.no_grad()
def test_exported_drafter_equals_scaled_taps(model, texts, drafter, tmp_path):
    scale = torch.rand(drafter.config.context_width) + 0.5
    export_drafter(drafter, scale).save_pretrained(tmp_path)
    loaded = MLADSparkForCausalLM.from_pretrained(
        tmp_path, lm_head=model.lm_head.weight, target_embed_tokens=model.model.embed_tokens.weight
    )
    *_, rows, batch, _ = packed_batch(model, drafter, texts)
    torch.testing.assert_close(dense(loaded, rows.taps, batch), dense(drafter, rows.taps * scale, batch), rtol=1e-4, atol=1e-4)


# Acceptance


def walk_by_hand(model, drafter, target, texts) -> tuple[int, int]:
    """Committed tokens and passes of a loop that drafts one block at a time."""
    committed = passes = 0
    rope = RopeTable(drafter.config.rope, drafter.config.qk_rope_head_dim, 128)
    for index in range(len(texts)):
        tokens, answer = (torch.from_numpy(a) for a in texts.text(index))
        tokens = tokens.long()
        document = torch.zeros(1, len(tokens), dtype=torch.int64)
        taps = target(tokens[None], document).taps
        p = int(answer.nonzero()[0, 0]) - 1
        while p + 2 < len(tokens):
            batch = anchor_batch(tokens[None], document, torch.tensor([[p]]), DRAFTS, rope)
            draft = drafter.draft(dense(drafter, taps, batch), tokens[p + 1][None]).draft_tokens[0]
            count = 0
            while count < DRAFTS and p + 2 + count < len(tokens) and draft[count] == tokens[p + 2 + count]:
                count += 1
            committed += min(count + 1, len(tokens) - p - 2)
            passes += 1
            p += count + 1
    return committed, passes


@torch.no_grad()
def test_acceptance_equals_a_loop_by_hand(model, texts, drafter):
    # A Markov table that copies the target's most frequent pairs makes some drafts right.
    part = texts.select(np.flatnonzero(texts.greedy & (texts.turns == 1))[:6])
    pairs = torch.zeros(VOCAB, VOCAB)
    for index in range(0, 6, 2):
        tokens = torch.from_numpy(part.text(index)[0]).long()
        pairs[tokens[1:], tokens[:-1]] = 60.0
    u, s, vh = torch.linalg.svd(pairs)
    drafter.markov_head.markov_w1.weight.copy_((vh[:8] * s[:8, None]).T)
    drafter.markov_head.markov_w2.weight.copy_(u[:, :8])
    target = TargetPass(model, drafter.config.target_layer_ids, compile_model=False)
    ones = torch.ones(drafter.config.context_width)
    result = measure_acceptance(
        drafter, target, ones, part, drafts=DRAFTS, autocast_dtype=None, texts_at_once=4, anchors_at_once=7
    )
    committed, passes = walk_by_hand(model, drafter, target, part)
    assert committed > passes
    assert (result.passes, round(result.committed * passes)) == (passes, committed)


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
