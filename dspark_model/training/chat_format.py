"""The target's chat template as token ids, and the conversations that the target is asked to write."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dspark_model.training.prefixes import CHAT_PREFIXES, CODE_PREFIXES, MATHS_PREFIXES, MATHS_SUFFIX
from dspark_model.training.settings import GenerationConfig


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Token ids around the turns of a conversation.

    head: up to where the first user turn starts.  to_assistant, to_user: what follows the end-of-turn token of a user
    turn (an answer), up to where the next turn starts.  end_of_turn: the token that ends a turn.  suffix: put behind
    the user turn of a job that asks for it.
    """

    head: tuple[int, ...]
    to_assistant: tuple[int, ...]
    to_user: tuple[int, ...]
    end_of_turn: int
    suffix: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """One conversation to write.

    tokens: ids that are given, from the start.  first_stage: 0 when the target goes on with a user turn, 1 when it
    answers.
    stages: number of turns in the end (even).  suffix: the first user turn gets the format's suffix.  Temperatures of
    user turns and answers, 0 = greedy.
    """

    tokens: np.ndarray
    first_stage: int
    stages: int
    suffix: bool
    user_temperature: float
    answer_temperature: float


def read_chat_format(tokenizer) -> ChatFormat:
    """The format of a tokenizer with a chat template.

    Raises:
        ValueError: the template changes what is put in, or its turns do not all end in one token.
    """
    user, answer, second = "<<first>>", "<<answer>>", "<<second>>"
    messages = [
        {"role": "user", "content": user},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": second},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    pieces = []
    for mark in (user, answer, second):
        before, found, text = text.partition(mark)
        if not found:
            raise ValueError(f"the chat template does not keep the message {mark!r} as it is; it cannot be used here")
        pieces.append(tuple(tokenizer(before, add_special_tokens=False)["input_ids"]))
    head, to_assistant, to_user = pieces
    if not to_assistant or to_assistant[:1] != to_user[:1]:
        raise ValueError(
            f"in the chat template a user turn is followed by ids {to_assistant[:3]} and an answer by {to_user[:3]}; wanted "
            "one and the same end-of-turn token first"
        )
    end = to_assistant[0]
    suffix = tuple(tokenizer(MATHS_SUFFIX, add_special_tokens=False)["input_ids"])
    return ChatFormat(head=head, to_assistant=to_assistant[1:], to_user=to_user[1:], end_of_turn=end, suffix=suffix)


def read_turns(path: Path) -> list[list[str]]:
    """The `turns` of each line of a JSONL file.

    Raises:
        ValueError: a line is not an object with a list of strings under `turns`.
    """
    result = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        row = json.loads(line)
        turns = row.get("turns") if isinstance(row, dict) else None
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise ValueError(f'{path}:{number} is not of the form {{"turns": ["text", ...]}}')
        result.append(turns)
    return result


class JobSource:
    """An endless stream of conversations in the shares that `GenerationConfig` asks for; given prompts come once each,
    always greedy, spread over the stream."""

    def __init__(self, chat: ChatFormat, tokenizer, prompts: list[str], config: GenerationConfig):
        self.chat, self.config = chat, config
        self.random = np.random.default_rng(config.seed)

        def encode(texts) -> list[np.ndarray]:
            return [np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32) for text in texts]

        self.pools = [encode(texts) for texts in (CHAT_PREFIXES, MATHS_PREFIXES, CODE_PREFIXES)]
        self.prompts = encode(prompts)
        self._order = iter(self.random.permutation(len(self.prompts)))

    def __iter__(self) -> Iterator[Job]:
        return self

    def __next__(self) -> Job:
        config, random = self.config, self.random
        if self.prompts and random.random() < config.prompt_share:
            index = next(self._order, None)
            if index is not None:
                content = self.prompts[index][: config.max_prompt_tokens]
                given = (*self.chat.head, *content, self.chat.end_of_turn, *self.chat.to_assistant)
                return Job(np.asarray(given, np.int32), 1, 2, False, 0.0, 0.0)
        prefix, suffix = self._prefix()
        given = np.concatenate((np.asarray(self.chat.head, np.int32), prefix))
        stages = 4 if random.random() < config.two_turn_share else 2
        return Job(given, 0, stages, suffix, random.uniform(0.8, 1.0), self._answer_temperature())

    def _prefix(self) -> tuple[np.ndarray, bool]:
        """First tokens of a user turn, and whether the suffix follows it."""
        config, random = self.config, self.random
        if self.prompts and random.random() < config.prefix_share:
            prompt = self.prompts[random.integers(len(self.prompts))]
            return prompt[: random.integers(4, 61)], False
        task_share = (1.0 - config.chat_share) / 2
        kind = random.choice(3, p=(config.chat_share, task_share, task_share))
        pool = self.pools[kind]
        return pool[random.integers(len(pool))], bool(kind == 1 and random.random() < 0.6)

    def _answer_temperature(self) -> float:
        draw = self.random.random()
        if draw < self.config.greedy_share:
            return 0.0
        return 0.5 if draw < (1.0 + self.config.greedy_share) / 2 else 1.0
