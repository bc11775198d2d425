"""`SlotWriter`: many conversations written at once, one per slot, entirely on the device."""

from dataclasses import dataclass

import numpy as np
import torch

from dspark_model.training.chat_format import ChatFormat, Job
from dspark_model.training.decode_model import DecodeModel
from dspark_model.training.settings import GenerationConfig


@dataclass(frozen=True, slots=True)
class WrittenText:
    """tokens: int32 [n]; answer: bool [n], the tokens sampled as an answer; greedy: whether they were all greedy;
    turns: exchanges."""

    tokens: np.ndarray
    answer: np.ndarray
    greedy: bool
    turns: int


class SlotWriter:
    """Static buffers of B slots of S tokens and the step that advances all of them by one token.

    A slot's stage is even while a user turn is written and odd while an answer is.  A turn ends with the end-of-turn
    token or at its limit; the template's tokens in between are forced.  A finished slot repeats its last position
    until it is refilled.  `step` reads nothing back, so a CUDA graph can hold it.
    """

    def __init__(self, decode: DecodeModel, chat: ChatFormat, config: GenerationConfig, device: torch.device):
        self.decode, self.chat, self.config, self.device = decode, chat, config, device
        count, length = config.slots, config.sequence_length
        self.tokens = torch.zeros(count, length, dtype=torch.int64, device=device)
        self.forced = torch.full((count, length), -1, dtype=torch.int64, device=device)
        self.answer = torch.zeros(count, length, dtype=torch.bool, device=device)
        names = ("position", "stage", "stages", "stage_end", "variant", "lengths")
        self.state = {name: torch.zeros(count, dtype=torch.int64, device=device) for name in names}
        # An idle slot repeats the head's last token, so that its cache rows stay those of the head.
        self.tokens[:, : len(chat.head)] = torch.tensor(chat.head, device=device)
        self.state["position"].fill_(len(chat.head) - 1)
        self.temperatures = torch.zeros(count, 2, dtype=torch.float32, device=device)
        self.done = torch.ones(count, dtype=torch.bool, device=device)
        self.seed = torch.full((1,), config.seed * 1_000_003, dtype=torch.int64, device=device)
        self.jobs: list[Job | None] = [None] * count
        self._sample = _load_sampler(config.sampler)
        self._set_transitions()
        self._limits = torch.tensor([config.max_user_tokens, config.max_answer_tokens], device=device)

    def _set_transitions(self) -> None:
        """Row 0: user turn to answer; row 1: the same behind the suffix; row 2: answer to user turn."""
        chat = self.chat
        rows = (
            (chat.end_of_turn, *chat.to_assistant),
            (*chat.suffix, chat.end_of_turn, *chat.to_assistant),
            (chat.end_of_turn, *chat.to_user),
        )
        width = max(map(len, rows))
        padded = [[*row, *[-1] * (width - len(row))] for row in rows]
        self._transitions = torch.tensor(padded, device=self.device)
        self._transition_lengths = torch.tensor([len(row) for row in rows], device=self.device)

    @torch.inference_mode()
    def prefill_head(self) -> None:
        """Write the cache rows of the template's head, which every conversation shares, into all slots."""
        for at, token in enumerate(self.chat.head):
            full = torch.full_like(self.state["position"], token)
            self.decode.step(full, torch.full_like(full, at))

    @torch.inference_mode()
    def refill(self, slots: list[int], jobs: list[Job]) -> None:
        """Start jobs[i] in slots[i].  Every job begins with the template's head, of which the last token is fed
        again."""
        width = self.config.sequence_length
        given = np.full((len(jobs), width), -1, np.int64)
        facts = np.zeros((len(jobs), 5), np.int64)
        for row, (slot, job) in enumerate(zip(slots, jobs, strict=True)):
            given[row, : len(job.tokens)] = job.tokens
            limit = self.config.max_answer_tokens if job.first_stage else self.config.max_user_tokens
            end = min(len(job.tokens) + limit, width - 1)
            facts[row] = (job.first_stage, job.stages, end, int(job.suffix), len(self.chat.head) - 1)
            self.jobs[slot] = job
        index = torch.tensor(slots, device=self.device)
        forced, device_facts = torch.from_numpy(given).to(self.device), torch.from_numpy(facts).to(self.device)
        self.forced[index] = forced
        self.tokens[index] = forced.clamp(min=0)
        self.answer[index] = False
        for column, name in enumerate(("stage", "stages", "stage_end", "variant", "position")):
            self.state[name][index] = device_facts[:, column]
        pairs = [(job.user_temperature, job.answer_temperature) for job in jobs]
        self.temperatures[index] = torch.tensor(pairs, device=self.device)
        self.done[index] = False

    @torch.inference_mode()
    def step(self) -> None:
        """Advance every slot by one token."""
        state = self.state
        position, stage = state["position"], state["stage"]
        logits = self.decode.step(self.tokens.gather(1, position[:, None])[:, 0], position)
        parity = stage % 2
        temperature = self.temperatures.gather(1, parity[:, None])[:, 0]
        self.seed += 1
        drawn = self._sample(logits, temperature, self.seed)
        at = (position + 1).clamp(max=self.config.sequence_length - 1)
        forced = self.forced.gather(1, at[:, None])[:, 0]
        free, active = forced < 0, ~self.done
        last = stage + 1 >= state["stages"]
        at_end = free & (at >= state["stage_end"])
        chosen = torch.where(at_end & ~last, self.chat.end_of_turn, torch.where(free, drawn, forced))
        ended = active & free & (at_end | (chosen == self.chat.end_of_turn))
        turning = ended & ~last & self._has_room(at)
        chosen = torch.where(turning, self._turn(turning, at, parity), chosen)
        self._put(self.tokens, at, chosen, active)
        self._put(self.answer, at, free & (parity == 1) & ~(at_end & ~last), active)
        state["lengths"].copy_(torch.where(active, at + 1, state["lengths"]))
        self.done |= ended & ~turning
        state["position"].copy_(torch.where(active & ~self.done, at, position))

    def _has_room(self, at: torch.Tensor) -> torch.Tensor:
        """Whether the template's tokens and a few of the next turn still fit behind `at`."""
        return at + self._transitions.shape[1] + 16 < self.config.sequence_length

    def _turn(self, turning: torch.Tensor, at: torch.Tensor, parity: torch.Tensor) -> torch.Tensor:
        """Force the template's tokens from `at` on for the slots that are turning; returns the first of them, [B]."""
        state = self.state
        row = torch.where(parity == 0, state["variant"], 2)
        values, lengths = self._transitions[row], self._transition_lengths[row]
        columns = at[:, None] + torch.arange(values.shape[1], device=self.device)
        columns = columns.clamp(max=self.config.sequence_length - 1)
        put = turning[:, None] & (values >= 0)
        self.forced.scatter_(1, columns, torch.where(put, values, self.forced.gather(1, columns)))
        end = at + lengths - 1 + self._limits[1 - parity]
        end = end.clamp(max=self.config.sequence_length - 1)
        state["stage_end"].copy_(torch.where(turning, end, state["stage_end"]))
        state["variant"].mul_(torch.where(turning, 0, 1))
        state["stage"] += turning
        return values[:, 0]

    @staticmethod
    def _put(table: torch.Tensor, at: torch.Tensor, values: torch.Tensor, where: torch.Tensor) -> None:
        old = table.gather(1, at[:, None])[:, 0]
        table.scatter_(1, at[:, None], torch.where(where, values, old)[:, None])

    @torch.inference_mode()
    def finished(self) -> tuple[list[int], list[WrittenText]]:
        """Slots that are done (one read-back), and the texts of those that held a job."""
        slots = torch.nonzero(self.done.cpu())[:, 0]
        index = slots.to(self.device)
        tokens = self.tokens[index].to(torch.int32).cpu().numpy()
        answer, lengths = self.answer[index].cpu().numpy(), self.state["lengths"][index].cpu().tolist()
        texts = []
        for row, slot in enumerate(slots.tolist()):
            job, n = self.jobs[slot], lengths[row]
            if job is not None and answer[row, :n].any():
                greedy = job.answer_temperature == 0.0
                texts.append(WrittenText(tokens[row, :n].copy(), answer[row, :n].copy(), greedy, job.stages // 2))
            self.jobs[slot] = None
        return slots.tolist(), texts


def _sample_torch(logits: torch.Tensor, temperatures: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """argmax(logits + temperature x Gumbel noise), with the noise of torch's own generator."""
    noise = -torch.empty_like(logits, dtype=torch.float32).exponential_().log()
    return (logits.float() + temperatures[:, None] * noise).argmax(-1)


def _load_sampler(name: str):
    if name == "torch":
        return _sample_torch
    from dspark_kernels.triton.sample_rows import sample_rows

    return sample_rows
