"""Removing texts that share a run of tokens with prompts kept for evaluation."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dspark_model.training.chat_format import read_turns
from dspark_model.training.text_store import Conversations

# Tokens of a run that more than this share of a file's prompts has are the file's own wrapper, not a prompt's content.
COMMON_SHARE = 0.05
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class ExcludedRuns:
    """name of the file; hashes: sorted uint64, of the n-token runs of its prompts, without those of its wrapper."""

    name: str
    hashes: np.ndarray


@dataclass(frozen=True, slots=True)
class OverlapReport:
    """removed: texts that share a run with a file, by file (a text may count for several); total_removed: distinct
    texts; in_prompt: those of them that share it outside the answers."""

    removed: dict[str, int]
    total_removed: int
    in_prompt: int


def run_hashes(tokens: np.ndarray, n: int) -> np.ndarray:
    """uint64 hash of each run of n tokens, [len - n + 1], empty for shorter texts."""
    count = len(tokens) - n + 1
    if count <= 0:
        return np.zeros(0, np.uint64)
    wide = tokens.astype(np.uint64) + np.uint64(1)
    result = np.zeros(count, np.uint64)
    for i in range(n):
        result = (result ^ wide[i : i + count]) * _MULTIPLIER
        result ^= result >> np.uint64(29)
    return result


def excluded_runs(path: Path, tokenizer, n: int) -> ExcludedRuns:
    """Runs of every turn in a JSONL file of prompts, without those that hold a token of the file's wrapper.

    The wrapper is every token in a run that more than 5 % of the prompts have.  A run that reaches into it says little:
    `... are there?` and a fixed instruction stand in many unrelated texts.  Turns of fewer than n tokens have no run.
    """
    turns_of = [
        [np.asarray(tokenizer(turn, add_special_tokens=False)["input_ids"], np.int64) for turn in turns]
        for turns in read_turns(path)
    ]
    runs_of = [[run_hashes(turn, n) for turn in turns] for turns in turns_of]
    hashes, counts = np.unique(np.concatenate([np.unique(np.concatenate(runs)) for runs in runs_of]), return_counts=True)
    wrapper = hashes[counts > max(1.0, COMMON_SHARE * len(runs_of))]
    own = [runs[_without_wrapper(np.isin(runs, wrapper), n)] for prompt in runs_of for runs in prompt]
    return ExcludedRuns(path.stem, np.unique(np.concatenate(own)))


def _without_wrapper(in_wrapper: np.ndarray, n: int) -> np.ndarray:
    """bool: runs of one turn that share no token with a run of the wrapper, i.e. start at least n tokens from each."""
    starts = np.flatnonzero(in_wrapper)
    at = np.arange(len(in_wrapper))
    after = np.searchsorted(starts, at)
    padded = np.concatenate(([-n], starts, [len(in_wrapper) + n]))
    return (at - padded[after] >= n) & (padded[after + 1] - at >= n)


def remove_overlap(texts: Conversations, excluded: list[ExcludedRuns], n: int) -> tuple[Conversations, OverlapReport]:
    """The texts that share no run of n tokens with any excluded prompt, neither in a user turn nor in an answer."""
    owner = np.repeat(np.arange(len(texts)), np.diff(texts.offsets))
    hashes = run_hashes(texts.tokens, n)
    inside = owner[: len(hashes)] == owner[len(owner) - len(hashes) :]
    # The last token of a run tells whether the run ends in a user turn or in an answer.
    in_answer = texts.answer[len(owner) - len(hashes) :]
    dirty, dirty_prompt, removed = np.zeros(len(texts), bool), np.zeros(len(texts), bool), {}
    for runs in excluded:
        hit = inside & np.isin(hashes, runs.hashes)
        touched = np.unique(owner[: len(hashes)][hit])
        removed[runs.name] = len(touched)
        dirty[touched] = True
        dirty_prompt[owner[: len(hashes)][hit & ~in_answer]] = True
    kept = texts.select(np.flatnonzero(~dirty)) if dirty.any() else texts
    return kept, OverlapReport(removed, int(dirty.sum()), int(dirty_prompt.sum()))
