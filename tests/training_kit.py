"""A tiny random target, texts of it and a drafter for it, to train on."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from dspark_model.modeling import MLADSparkForCausalLM
from dspark_model.rope import RopeTable
from dspark_model.training import block_forward as blocks
from dspark_model.training.anchors import anchor_batch, eligible_anchors, sample_anchors
from dspark_model.training.chat_format import ChatFormat, Job
from dspark_model.training.generate_text import pack_texts, write_texts
from dspark_model.training.new_drafter import new_drafter
from dspark_model.training.settings import DrafterShape, GenerationConfig, TrainingConfig
from dspark_model.training.target_pass import TargetPass
from dspark_model.training.text_store import Conversations, pack_rows

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


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
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


def packed_batch(model, drafter, texts, anchors=12):
    data = pack_rows(texts, 80, "cpu", seed=0)
    tokens, document, answer = data.tokens[:3].long(), data.document[:3].long(), data.answer[:3]
    rows = TargetPass(model, drafter.config.target_layer_ids, compile_model=False)(tokens, document)
    at, valid = sample_anchors(eligible_anchors(document, answer), anchors, torch.Generator().manual_seed(0))
    rope = RopeTable(drafter.config.rope, drafter.config.qk_rope_head_dim, 128)
    return tokens, document, at, valid, rows, anchor_batch(tokens, document, at, DRAFTS, rope), rope


def dense(drafter, taps, batch):
    return blocks.block_forward(drafter, taps, batch, blocks.DenseAttention(batch, DRAFTS), DRAFTS)
