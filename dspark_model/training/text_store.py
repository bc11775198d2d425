"""Generated conversations on disk, and packed into rows of equal length for training."""

import bisect
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file


@dataclass(frozen=True, slots=True)
class Conversations:
    """N texts, one behind the other.

    tokens: int32 [total]; answer: bool [total], True on tokens that the target sampled as an answer (its end token
    too);
    offsets: int64 [N + 1]; greedy: bool [N]; turns: int32 [N], exchanges in the text.
    """

    tokens: np.ndarray
    answer: np.ndarray
    offsets: np.ndarray
    greedy: np.ndarray
    turns: np.ndarray

    def __len__(self) -> int:
        return len(self.greedy)

    def text(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """tokens and answer flags of one text."""
        span = slice(self.offsets[index], self.offsets[index + 1])
        return self.tokens[span], self.answer[span]

    def select(self, indices: np.ndarray) -> "Conversations":
        """The texts named by int indices, in that order."""
        texts = [self.text(int(i)) for i in indices]
        return conversations_from_lists([t for t, _ in texts], [a for _, a in texts], self.greedy[indices], self.turns[indices])

    def save(self, path: Path) -> None:
        save_file({name: getattr(self, name) for name in self.__slots__}, path)

    @classmethod
    def load(cls, path: Path) -> "Conversations":
        """Raises FileNotFoundError when nothing was generated yet."""
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist; run the generate command with this --out first")
        return cls(**load_file(path))


def conversations_from_lists(tokens: list, answer: list, greedy, turns) -> Conversations:
    """Conversations of per-text arrays."""
    lengths = [len(t) for t in tokens]
    return Conversations(
        tokens=np.concatenate([np.zeros(0, np.int32), *tokens]).astype(np.int32),
        answer=np.concatenate([np.zeros(0, bool), *answer]).astype(bool),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        greedy=np.asarray(greedy, dtype=bool),
        turns=np.asarray(turns, dtype=np.int32),
    )


@dataclass(frozen=True, slots=True)
class PackedRows:
    """R rows of L tokens on the training device, several texts a row.

    tokens: int32 [R, L], 0 behind the last text; document: int32 [R, L], index where the token's text starts
    (padding is a document of its own); answer: bool [R, L].
    """

    tokens: torch.Tensor
    document: torch.Tensor
    answer: torch.Tensor

    def __len__(self) -> int:
        return self.tokens.shape[0]


def pack_rows(texts: Conversations, row_tokens: int, device: torch.device | str, seed: int) -> PackedRows:
    """Best-fit packing, longest first: a row takes the longest text that still fits until none does.

    Raises:
        ValueError: a text is longer than a row.
    """
    lengths = np.diff(texts.offsets)
    if len(lengths) == 0 or lengths.max() > row_tokens:
        longest = int(lengths.max()) if len(lengths) else 0
        raise ValueError(f"{len(lengths)} texts of up to {longest} tokens; wanted some, of at most {row_tokens} (row_tokens)")
    plan = _plan_rows(lengths, row_tokens, seed)
    tokens = np.zeros((len(plan), row_tokens), np.int32)
    document = np.zeros((len(plan), row_tokens), np.int32)
    answer = np.zeros((len(plan), row_tokens), bool)
    for row, members in enumerate(plan):
        at = 0
        for index in members:
            end = at + lengths[index]
            tokens[row, at:end], answer[row, at:end] = texts.text(index)
            document[row, at:end] = at
            at = end
        document[row, at:] = at
    return PackedRows(*(torch.from_numpy(array).to(device) for array in (tokens, document, answer)))


def _plan_rows(lengths: np.ndarray, row_tokens: int, seed: int) -> list[list[int]]:
    by_length: dict[int, list[int]] = {}
    for index in np.random.default_rng(seed).permutation(len(lengths)):
        by_length.setdefault(int(lengths[index]), []).append(int(index))
    present = sorted(by_length)
    plan = []
    while present:
        members, space = [], row_tokens
        while (at := bisect.bisect_right(present, space) - 1) >= 0:
            length = present[at]
            members.append(by_length[length].pop())
            space -= length
            if not by_length[length]:
                del present[at]
        plan.append(members)
    return plan
