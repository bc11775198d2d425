"""Texts to train on: generated, packed, and where blocks begin."""

import dataclasses

import numpy as np
import pytest
import torch
from training_kit import CHAT, GENERATION, some_jobs

from dspark_model.training.anchors import block_labels, eligible_anchors, sample_anchors
from dspark_model.training.chat_format import Job
from dspark_model.training.generate_text import write_texts
from dspark_model.training.overlap import ExcludedRuns, remove_overlap, run_hashes
from dspark_model.training.text_store import conversations_from_lists, pack_rows

pytest_plugins = ["training_kit"]


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
