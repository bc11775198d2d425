"""What a training step computes: loss and gradients, the forward over anchors, and acceptance."""

import numpy as np
import pytest
import torch
from training_kit import DRAFTS, VOCAB, dense, packed_batch

from dspark_model import ops
from dspark_model.context_latents import ContextLatents
from dspark_model.modeling import BlockContext, MLADSparkForCausalLM
from dspark_model.rope import RopeTable
from dspark_model.training import block_forward as blocks
from dspark_model.training.acceptance import measure_acceptance
from dspark_model.training.anchors import anchor_batch
from dspark_model.training.draft_loss import LossWeights, VocabularyRows, draft_loss_torch_, vocabulary_loss
from dspark_model.training.muon import StackedMuon
from dspark_model.training.new_drafter import export_drafter
from dspark_model.training.target_pass import TargetPass

pytest_plugins = ["training_kit"]


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
