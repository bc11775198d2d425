"""Generation with and without a drafter, by the same target code, and what it says about acceptance."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch

from dspark_model.sampling import GREEDY, SamplingParams
from dspark_model.step_io import ContextChunk, GenerationRows, StepInput, StepOutput
from dspark_model.target import Target, TargetOutput
from dspark_model.verify import draw_token
from dspark_model.worker import DFlashWorker

# Two best logits that are closer than this may swap places when the same tokens are run in another number of rows: float32
# sums of a few hundred terms of order 1 differ by about 1e-5 between row counts.
TIE_MARGIN = 1e-3


@dataclass(slots=True)
class Generation:
    """One generated text and its account.

    tokens: new tokens, the one after the prompt included, up to and with the end token or the limit.
    margins: the target's largest minus second largest logit at each of them.
    num_passes: target passes after the prefill; committed: tokens that each of them added to `tokens`.
    offered, accepted: by block position k, passes in which draft k was checked with all drafts before it accepted, and in
        which it was accepted too; drafts past the end of the text are not counted.
    confidence: pairs (estimate, accepted) of the drafts in `offered`, where the drafter has that head.
    seconds: wall time of all passes after the prefill; a pass of a batch is shared out evenly among its texts.
    """

    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    num_passes: int = 0
    committed: list[int] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    confidence: list[tuple[float, bool]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def committed_per_pass(self) -> float:
        """Mean tokens per target pass, the prefill's token left out; 0 without a pass."""
        return sum(self.committed) / self.num_passes if self.num_passes else 0.0

    def near_ties(self, margin: float = TIE_MARGIN) -> int:
        """Tokens at which the target's two best logits are closer than `margin`."""
        return sum(value < margin for value in self.margins)


@dataclass(frozen=True, slots=True)
class GreedyComparison:
    """Plain greedy text against drafted text.  first_difference: index of the first differing token, None when equal.
    margin: the smaller of the two runs' margins there.  excused: whether that is a tie within the stated margin."""

    equal: bool
    first_difference: int | None
    margin: float | None
    excused: bool


def compare_greedy(plain: Generation, drafted: Generation, margin: float = TIE_MARGIN) -> GreedyComparison:
    """The guarantee of greedy drafting: equal texts, except from a token on at which the target's two best logits tie
    within `margin`."""
    for index, (left, right) in enumerate(zip(plain.tokens, drafted.tokens, strict=False)):
        if left != right:
            found = min(plain.margins[index], drafted.margins[index])
            return GreedyComparison(False, index, found, found < margin)
    equal = len(plain.tokens) == len(drafted.tokens)
    return GreedyComparison(equal, None if equal else min(len(plain.tokens), len(drafted.tokens)), None, equal)


def generate(
    target: Target,
    worker: DFlashWorker,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    end_tokens: Collection[int] = (),
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
    prefill_chunk: int = 512,
) -> list[Generation]:
    """Generate for a batch of prompts, drafting with `worker` and verifying with `target`.

    The prompts take slots 0 .. B - 1 of the target.  Greedy text equals `generate_plain`'s up to ties (`compare_greedy`);
    with a temperature the tokens follow the target's own distribution.
    sampling: of all prompts, or one for each.  A draw hangs on the seed and the position alone, so equal prompts need seeds of
        their own for texts of their own.

    Raises:
        ValueError: a prompt is empty or too long for target or worker, there are more prompts than slots, another number of
            `sampling` than prompts, or the target taps other layers than the drafter was made for.
        CapacityError: the worker cannot admit the prompts.
    """
    _check_made_for(target, worker)
    _check_prompts(target, prompts, max_new_tokens, worker.num_drafts, prefill_chunk)
    texts = _texts(prompts, max_new_tokens, end_tokens, sampling)
    requests = [("generate", index) for index in range(len(prompts))]
    admitted = []
    try:
        for text, request in zip(texts, requests, strict=True):
            worker.admit(request, max_context=len(text.prompt) + max_new_tokens)
            admitted.append(request)
        outputs = [_prefill(target, worker, text, requests[text.slot], prefill_chunk) for text in texts]
        drafts = {text.slot: _Drafts.of(output)[0] for text, output in zip(texts, outputs, strict=True)}
        while active := [text for text in texts if not text.finished]:
            started = time.perf_counter()
            output = _verify(target, worker, active, [requests[text.slot] for text in active], drafts)
            drafts = {text.slot: own for text, own in zip(active, _Drafts.of(output), strict=True)}
            elapsed = time.perf_counter() - started
            for text in active:
                text.result.seconds += elapsed / len(active)
    finally:
        for request in admitted:
            worker.release(request)
    return [text.result for text in texts]


@torch.inference_mode()
def generate_plain(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    end_tokens: Collection[int] = (),
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
    prefill_chunk: int = 512,
) -> list[Generation]:
    """Generate token by token with the target alone; arguments as in `generate`."""
    _check_prompts(target, prompts, max_new_tokens, 0, prefill_chunk)
    texts = _texts(prompts, max_new_tokens, end_tokens, sampling)
    for text in texts:
        text.begin(_run_prompt(target, text, prefill_chunk)[1].logits[0, -1])
    while active := [text for text in texts if not text.finished]:
        started = time.perf_counter()
        tokens = torch.tensor([[text.result.tokens[-1]] for text in active], device=target.device)
        output = target.forward(tokens, _integers(target, [text.slot for text in active]), _starts(target, active))
        chosen, margins = _choose(active, output.logits[:, 0]), _margins(output.logits[:, 0])
        for text, token, margin in zip(active, chosen, margins, strict=True):
            text.extend([token], [margin])
        elapsed = time.perf_counter() - started
        for text in active:
            text.result.seconds += elapsed / len(active)
    return [text.result for text in texts]


class _Text:
    """One text in the making, in one slot of the target."""

    def __init__(self, slot: int, prompt: list[int], max_new_tokens: int, end_tokens: frozenset[int], sampling: SamplingParams):
        self.slot, self.prompt, self.sampling = slot, prompt, sampling
        self._limit, self._end_tokens = max_new_tokens, end_tokens
        self.result = Generation()

    @property
    def finished(self) -> bool:
        tokens = self.result.tokens
        return len(tokens) >= self._limit or bool(tokens and tokens[-1] in self._end_tokens)

    @property
    def known(self) -> int:
        """Tokens whose cache rows are there: all but the newest, which the next pass runs."""
        return len(self.prompt) + len(self.result.tokens) - 1

    def begin(self, logits: torch.Tensor) -> int:
        """Take the token after the prompt from logits [V]."""
        token = _choose([self], logits[None])[0]
        self.result.tokens.append(token)
        self.result.margins.append(_margins(logits[None])[0])
        return token

    def extend(self, tokens: list[int], margins: list[float]) -> int:
        """Add one pass's tokens with their margins, cut at the end token and the limit.  Returns how many were added."""
        end = next((i + 1 for i, token in enumerate(tokens) if token in self._end_tokens), len(tokens))
        count = min(end, self._limit - len(self.result.tokens))
        self.result.tokens += tokens[:count]
        self.result.margins += margins[:count]
        self.result.num_passes += 1
        self.result.committed.append(count)
        return count


def _texts(
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    end_tokens: Collection[int],
    sampling: SamplingParams | Sequence[SamplingParams],
) -> list[_Text]:
    """In slots 0 .. B - 1.  Raises ValueError for another number of `sampling` than prompts."""
    given = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
    if len(given) != len(prompts):
        raise ValueError(f"sampling has {len(given)} entries for {len(prompts)} prompts; give one for each, or one for all")
    ends = frozenset(end_tokens)
    return [_Text(index, list(prompt), max_new_tokens, ends, given[index]) for index, prompt in enumerate(prompts)]


@dataclass(frozen=True, slots=True)
class _Drafts:
    """One request's last drafts; what is counted of them is on the host."""

    tokens: torch.Tensor
    num_valid: int
    confidence: list[float] | None

    @classmethod
    def of(cls, output: StepOutput) -> list["_Drafts"]:
        """Those of each output row, read from the device at once."""
        valid = output.num_valid_drafts.tolist()
        confidence = [None] * len(valid) if output.confidence is None else output.confidence.tolist()
        return [cls(*row) for row in zip(output.draft_tokens, valid, confidence, strict=True)]


def _run_prompt(target: Target, text: _Text, chunk: int) -> tuple[list[torch.Tensor], TargetOutput]:
    """The prompt through the target in chunks: hidden rows of each chunk [n, T * E], and the last output."""
    slots, parts = _integers(target, [text.slot]), []
    for start in range(0, len(text.prompt), chunk):
        tokens = _integers(target, text.prompt[start : start + chunk])[None]
        output = target.forward(tokens, slots, _integers(target, [start]), last_logits_only=True)
        parts.append(output.hidden[0])
    return parts, output


@torch.inference_mode()
def _prefill(target: Target, worker: DFlashWorker, text: _Text, request: tuple[str, int], chunk: int) -> StepOutput:
    parts, last = _run_prompt(target, text, chunk)
    anchor = text.begin(last.logits[0, -1])
    start = 0
    for index, hidden in enumerate(parts):
        piece = ContextChunk(
            request_id=request,
            target_hidden=hidden,
            start_position=start,
            anchor=anchor if index == len(parts) - 1 else None,
            sampling=text.sampling,
        )
        output = worker.step(StepInput(context=[piece]))
        start += hidden.shape[0]
    text.result.offered = [0] * worker.num_drafts
    text.result.accepted = [0] * worker.num_drafts
    return output


@torch.inference_mode()
def _verify(
    target: Target,
    worker: DFlashWorker,
    active: list[_Text],
    requests: list[tuple[str, int]],
    drafts: dict[int, _Drafts],
) -> StepOutput:
    """One target pass over the drafts of all active texts, and the worker's step on it."""
    anchors = _integers(target, [text.result.tokens[-1] for text in active])
    checked = torch.stack([drafts[text.slot].tokens for text in active])
    tokens = torch.cat((anchors[:, None], checked), dim=1)
    seen = target.forward(tokens, _integers(target, [text.slot for text in active]), _starts(target, active))
    greedy = all(text.sampling.temperature == 0 for text in active)
    output = worker.step(
        StepInput(
            generation=GenerationRows(
                request_ids=requests,
                target_hidden=seen.hidden,
                target_tokens=seen.logits.argmax(-1) if greedy else None,
                target_logits=None if greedy else seen.logits,
                sampling=[text.sampling for text in active],
            )
        )
    )
    committed, counts = output.committed_tokens.tolist(), output.num_committed.tolist()
    margins = iter(_margins(torch.cat([seen.logits[row, :count] for row, count in enumerate(counts)])))
    for row, text in enumerate(active):
        added = text.extend(committed[row][: counts[row]], list(islice(margins, counts[row])))
        _count(text.result, drafts[text.slot], counts[row] - 1, added)
    return output


def _count(result: Generation, drafts: _Drafts, num_accepted: int, num_added: int) -> None:
    """Account for one pass: draft k was offered if those before it stood and its token lies within the text."""
    for k in range(min(drafts.num_valid, num_accepted + 1, num_added)):
        stands = k < num_accepted
        result.offered[k] += 1
        result.accepted[k] += stands
        if drafts.confidence is not None:
            result.confidence.append((drafts.confidence[k], stands))


def _choose(texts: list[_Text], logits: torch.Tensor) -> list[int]:
    """The target's next token of each text from logits [B, V]; a draw depends on the seed and the position alone."""
    tokens = logits.argmax(-1).tolist()
    for index, text in enumerate(texts):
        if text.sampling.temperature > 0:
            tokens[index] = draw_token(logits[index], text.sampling, text.known + 1)
    return tokens


def _margins(logits: torch.Tensor) -> list[float]:
    """Largest minus second largest logit of each row of [M, V]."""
    top = logits.float().topk(2, dim=-1).values
    return (top[:, 0] - top[:, 1]).tolist()


def _integers(target: Target, values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=target.device)


def _starts(target: Target, active: list[_Text]) -> torch.Tensor:
    return _integers(target, [text.known for text in active])


def _check_made_for(target: Target, worker: DFlashWorker) -> None:
    """Refuse a target that the drafter was not made for.  Taps of other layers would have the right width and cost acceptance
    silently; a token that the drafter does not know would stop the run halfway."""
    vocab_size = worker.model.config.vocab_size
    if target.vocab_size > vocab_size:
        raise ValueError(
            f"the target has {target.vocab_size} tokens, but the drafter only {vocab_size}: tokens past that could be neither "
            "drafted nor anchored; use a drafter made for this target"
        )
    wanted = worker.model.config.target_layer_ids
    if tuple(target.target_layer_ids) != wanted:
        raise ValueError(
            f"the target taps layers {list(target.target_layer_ids)}, but the drafter was made for {list(wanted)}; build the "
            "target with the drafter's target_layer_ids"
        )


def _check_prompts(target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int, num_drafts: int, chunk: int) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}, wanted at least 1")
    if len(prompts) > target.max_requests:
        raise ValueError(f"{len(prompts)} prompts were given, but the target has {target.max_requests} slots; give fewer")
    if chunk < 1:
        raise ValueError(f"prefill_chunk is {chunk}, wanted at least 1")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {index} is empty; it needs at least one token")
        extra = max_new_tokens + num_drafts
        if len(prompt) + extra > target.max_positions:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens and may grow by {extra} (new tokens and drafts), but the target "
                f"holds {target.max_positions} positions; shorten it or build the target with more max_positions"
            )
