"""Checking a step's input against the worker's state, before anything changes."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch

from dspark_model.config import DrafterConfig
from dspark_model.sampling import GREEDY, SamplingParams
from dspark_model.step_io import ContextChunk, GenerationRows, StepInput
from dspark_model.worker_state import RequestState


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A checked step.  requests: the request of each output row, None for dummy rows; drafted: which output rows draft;
    max_length: `key_bound` of the rows that any request can have in it."""

    context: tuple[ContextChunk, ...]
    generation: GenerationRows | None
    requests: tuple[RequestState | None, ...]
    drafted: tuple[int, ...]
    sampling: tuple[SamplingParams, ...]
    rows_needed: Mapping[int, int]
    max_length: int

    @property
    def is_pure_generation(self) -> bool:
        return self.generation is not None and not self.context


class StepChecker:
    """Turns a `StepInput` into a `StepPlan`, or raises with nothing changed."""

    def __init__(self, config: DrafterConfig, num_drafts: int, dtype: torch.dtype, device: torch.device):
        self._config = config
        self._num_drafts = num_drafts
        self._block_rows = config.block_rows(num_drafts)
        self._dtype = dtype
        self._device = device

    def plan(self, step_input: StepInput, known: Mapping[Hashable, RequestState], *, read_values: bool = True) -> StepPlan:
        """read_values: False leaves out the checks that would wait for the device; `ops.step_prologue` then drops a verdict
        that ends in an id outside the vocabulary.

        Raises:
        KeyError: a request id is not admitted.
        ValueError: anything else about the input; the message says what, what was wanted and what to do.
        """
        rows = step_input.generation
        ids = [chunk.request_id for chunk in step_input.context] + (list(rows.request_ids) if rows else [])
        if any(chunk.request_id is None for chunk in step_input.context):
            raise ValueError("a context chunk has request_id None; only generation rows can be dummies")
        live = [request_id for request_id in ids if request_id is not None]
        for request_id in live:
            if request_id not in known:
                raise KeyError(f"request {request_id!r} is not admitted; call worker.admit first (admitted: {list(known)})")
            if known[request_id].num_dropped:
                raise ValueError(
                    f"request {request_id!r}: {known[request_id].num_dropped} rows of it had no page, or came with a token id "
                    "outside the vocabulary, and were dropped, so that its context has a gap; release it and admit it again"
                )
        if len(set(live)) != len(live):
            twice = sorted({str(request_id) for request_id in live if live.count(request_id) > 1})
            raise ValueError(f"requests {twice} stand in the step more than once; one row or chunk per request and step")
        for chunk in step_input.context:
            self._check_chunk(chunk, known[chunk.request_id])
        if rows is not None:
            self._check_rows(rows, known, read_values)
        return self._build(step_input, ids, known)

    def _build(self, step_input: StepInput, ids: list, known: Mapping[Hashable, RequestState]) -> StepPlan:
        context, rows = tuple(step_input.context), step_input.generation
        requests = tuple(None if request_id is None else known[request_id] for request_id in ids)
        drafted = [index for index, chunk in enumerate(context) if chunk.anchor is not None]
        drafted += range(len(context), len(ids))
        sampling = [chunk.sampling for chunk in context]
        if rows is not None:
            sampling += rows.sampling or [GREEDY] * len(rows.request_ids)
        needed, drafting = {}, set(drafted)
        for index, request in enumerate(requests):
            if request is None:
                continue
            if index < len(context):
                length = context[index].start_position + context[index].target_hidden.shape[0]
            else:
                length = min(self._bound(request) + self._num_drafts + 1, request.max_context)
            needed[request.slot] = length + (self._block_rows if index in drafting else 0)
        longest = max((self._bound(request) for request in requests if request is not None), default=0)
        chunk_rows = max((chunk.target_hidden.shape[0] for chunk in context), default=0)
        max_length = key_bound(longest + max(chunk_rows, self._num_drafts + 1) + self._block_rows)
        return StepPlan(context, rows, requests, tuple(drafted), tuple(sampling), needed, max_length)

    def _bound(self, request: RequestState) -> int:
        return request.length_bound(self._num_drafts + 1)

    def _check_chunk(self, chunk: ContextChunk, request: RequestState) -> None:
        name = f"context chunk of request {chunk.request_id!r}"
        hidden = chunk.target_hidden
        self._check_tensor(f"{name}: target_hidden", hidden, (None, self._config.context_width))
        if request.drafting:
            raise ValueError(f"{name}: its prompt has ended already (an anchor was given); send generation rows instead")
        if not is_whole(chunk.start_position) or chunk.start_position != request.length:
            raise ValueError(
                f"{name}: start_position is {chunk.start_position!r}, but the worker holds {request.length} rows of it; "
                "chunks follow each other without gap or overlap"
            )
        end = chunk.start_position + hidden.shape[0]
        if end > request.max_context:
            raise ValueError(
                f"{name}: rows up to position {end - 1}, but it was admitted for {request.max_context} tokens; "
                "admit it with a larger max_context"
            )
        if chunk.anchor is None and hidden.shape[0] == 0:
            raise ValueError(f"{name}: no rows and no anchor; there is nothing to do")
        if chunk.anchor is not None and not (is_whole(chunk.anchor) and 0 <= chunk.anchor < self._config.vocab_size):
            raise ValueError(
                f"{name}: anchor {chunk.anchor!r} is outside the vocabulary of {self._config.vocab_size} tokens, wanted an int"
            )

    def _check_rows(self, rows: GenerationRows, known: Mapping[Hashable, RequestState], read_values: bool) -> None:
        batch, width = len(rows.request_ids), self._num_drafts + 1
        self._check_tensor("generation rows: target_hidden", rows.target_hidden, (batch, width, self._config.context_width))
        given = [rows.target_tokens is not None, rows.target_logits is not None, rows.committed_tokens is not None]
        if sum(given) != 1 or (rows.committed_tokens is None) != (rows.num_committed is None):
            raise ValueError(
                "generation rows need exactly one of target_tokens, target_logits, and committed_tokens with num_committed"
            )
        self._check_counts(rows, batch)
        live = torch.tensor([request_id is not None for request_id in rows.request_ids], dtype=torch.bool)
        for name, tokens in (("target_tokens", rows.target_tokens), ("committed_tokens", rows.committed_tokens)):
            if tokens is not None:
                self._check_form(name, tokens, (batch, width))
                if read_values:
                    self._check_ids(name, tokens, live, self._used_widths(rows, known))
        if rows.target_logits is not None:
            self._check_logits(rows.target_logits, batch, width)
        for index, request_id in enumerate(rows.request_ids):
            if request_id is not None:
                self._check_generating(rows, index, known[request_id])
        if rows.sampling is not None and len(rows.sampling) != batch:
            raise ValueError(f"generation rows: {len(rows.sampling)} sampling entries for {batch} requests")
        for params in rows.sampling or ():
            if not isinstance(params, SamplingParams):
                raise ValueError(
                    f"generation rows: a sampling entry is {params!r}, wanted SamplingParams (greedy: SamplingParams())"
                )
        drawn = any(params.temperature > 0 for params in rows.sampling or ())
        if drawn and rows.target_tokens is not None:
            raise ValueError("a temperature above 0 needs target_logits: target_tokens alone cannot be resampled")

    def _check_counts(self, rows: GenerationRows, batch: int) -> None:
        """Forms of widths and num_committed; `_check_generating` looks at the values."""
        if rows.widths is not None and (len(rows.widths) != batch or not all(is_whole(width) for width in rows.widths)):
            raise ValueError(f"generation rows: widths is {list(rows.widths)}, wanted {batch} whole numbers, 0 for a dummy row")
        counts = rows.num_committed
        if counts is not None:
            fits = tuple(counts.shape) == (batch,) and counts.dtype is torch.int64 and counts.device == self._device
            if not fits:
                raise ValueError(
                    f"generation rows: num_committed is {counts.dtype} {list(counts.shape)} on {counts.device}, wanted int64 "
                    f"[{batch}] on {self._device}"
                )

    def _used_widths(self, rows: GenerationRows, known: Mapping[Hashable, RequestState]) -> list[int]:
        """Rows of each request whose token ids matter."""
        if rows.num_committed is not None:
            return rows.num_committed.tolist()
        if rows.widths is not None:
            return list(rows.widths)
        return [0 if key is None else known[key].num_valid_drafts + 1 for key in rows.request_ids]

    def _check_generating(self, rows: GenerationRows, index: int, request: RequestState) -> None:
        name = f"generation row of request {request.request_id!r}"
        if not request.drafting:
            raise ValueError(f"{name}: nothing has been drafted for it yet; send its last context chunk with an anchor first")
        if request.length >= request.max_context:
            raise ValueError(f"{name}: it holds all {request.max_context} tokens that it was admitted for; release it")
        most = request.num_valid_drafts + 1
        for what, values in (("widths", rows.widths), ("num_committed", rows.num_committed)):
            if values is None:
                continue
            if not 1 <= int(values[index]) <= most:
                raise ValueError(
                    f"{name}: {what} is {int(values[index])}, wanted 1 to {most} (its last step had "
                    f"{request.num_valid_drafts} valid drafts)"
                )

    def _check_tensor(self, name: str, tensor: torch.Tensor, shape: tuple[int | None, ...]) -> None:
        fits = tensor.ndim == len(shape) and all(w in (None, g) for g, w in zip(tensor.shape, shape, strict=True))
        if not fits:
            wanted = ["n" if size is None else size for size in shape]
            raise ValueError(f"{name} has shape {list(tensor.shape)}, wanted {wanted}")
        if tensor.dtype is not self._dtype or tensor.device != self._device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, wanted {self._dtype} on {self._device}; convert it first"
            )

    def _check_form(self, name: str, ids: torch.Tensor, shape: tuple[int, int]) -> None:
        if tuple(ids.shape) != shape or ids.dtype is not torch.int64 or ids.device != self._device:
            raise ValueError(
                f"generation rows: {name} is {ids.dtype} {list(ids.shape)} on {ids.device}, wanted int64 {list(shape)} "
                f"on {self._device}"
            )

    def _check_ids(self, name: str, ids: torch.Tensor, live: torch.Tensor, used: list[int]) -> None:
        columns = torch.arange(ids.shape[1]) < torch.tensor(used, dtype=torch.int64)[:, None]
        outside = ((ids < 0) | (ids >= self._config.vocab_size)).cpu() & columns & live[:, None]
        if outside.any():
            row, column = outside.nonzero()[0].tolist()
            raise ValueError(
                f"generation rows: {name}[{row}, {column}] is {int(ids[row, column])}, outside the vocabulary of "
                f"{self._config.vocab_size} tokens"
            )

    def _check_logits(self, logits: torch.Tensor, batch: int, width: int) -> None:
        fits = logits.ndim == 3 and logits.shape[:2] == (batch, width) and logits.shape[2] >= self._config.vocab_size
        if not fits or not logits.is_floating_point() or logits.device != self._device:
            raise ValueError(
                f"generation rows: target_logits is {logits.dtype} {list(logits.shape)} on {logits.device}, wanted floating "
                f"point [{batch}, {width}, at least {self._config.vocab_size}] on {self._device}"
            )


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def key_bound(length: int) -> int:
    """The next power of two from 256 on: one captured step then serves many lengths, and an eager step sums over as many keys
    as the captured one, which equality to the bit asks for."""
    return max(256, 1 << (length - 1).bit_length())
