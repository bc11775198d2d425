"""One planned step, computed: from target rows to drafts, without changing the worker's state.

The pool is written only in rows at or behind each request's known length, which no later step reads unless the worker takes
over the new lengths.  So a run that fails halfway leaves nothing behind that counts.
"""

from dataclasses import dataclass

import torch

from dspark_model import ops, verify
from dspark_model.kv_pool import PagedLatents
from dspark_model.modeling import BlockContext, BlockDraft, MLADSparkForCausalLM
from dspark_model.ops import BlockRows
from dspark_model.rope import RopeTable
from dspark_model.sampling import DrawKind, SamplingParams
from dspark_model.slots import draft_rows
from dspark_model.step_plan import StepPlan
from dspark_model.verify import NO_TOKEN, Acceptance
from dspark_model.worker_state import SlotState


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """B output rows, R of them drafted.  drafted: int64 [R].  context: [M, hidden], all rows that were projected.
    draft_probs: float32 [R, K, V] and drawn: bool [B] where drafts were drawn, else None and all False."""

    context_lens: torch.Tensor
    num_dropped: torch.Tensor
    committed_tokens: torch.Tensor
    num_accepted: torch.Tensor
    num_committed: torch.Tensor
    anchors: torch.Tensor
    num_valid_drafts: torch.Tensor
    drafted: torch.Tensor
    draft: BlockDraft | None
    draft_probs: torch.Tensor | None
    drawn: torch.Tensor
    context: torch.Tensor


class StepRun:
    """The computation of one `StepPlan`; `run` goes through the step's stages in order."""

    def __init__(
        self,
        model: MLADSparkForCausalLM,
        pool: PagedLatents,
        rope: RopeTable,
        slots: SlotState,
        plan: StepPlan,
        *,
        num_drafts: int,
        draw_drafts: bool,
    ):
        self._model, self._pool, self._rope, self._state, self._plan = model, pool, rope, slots, plan
        self._num_drafts = num_drafts
        self._draw_drafts = draw_drafts
        self._device = model.device
        requests = plan.requests
        self._live = torch.tensor([request is not None for request in requests], dtype=torch.bool, device=self._device)
        self._slots = self._integers([0 if request is None else request.slot for request in requests])
        self._num_pages = torch.where(self._live, pool.num_pages[self._slots], 0)
        self._page_table = pool.page_table[self._slots]
        self._old_lens = torch.where(self._live, slots.context_lens[self._slots], 0)
        self._first_row = len(plan.context)

    def run(self) -> StepResult:
        context, chunk_latents, row_latents = self._project()
        acceptance = self._accept()
        num_new = torch.cat((self._chunk_sizes(), acceptance.num_accepted + 1))
        capacity = self._num_pages * self._pool.config.page_size
        advance = ops.length_advance(self._old_lens, num_new, capacity, self._live)
        self._store(chunk_latents, row_latents, num_new)
        return self._draft(context, acceptance, advance)

    def _integers(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _chunk_sizes(self) -> torch.Tensor:
        return self._integers([chunk.target_hidden.shape[0] for chunk in self._plan.context])

    def _row_positions(self) -> torch.Tensor:
        """Positions of the K + 1 target rows of each generation row: [Bg, K + 1]."""
        return self._old_lens[self._first_row :, None] + torch.arange(self._num_drafts + 1, device=self._device)

    def _project(self) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor | None]:
        """Context and latents: those of each chunk [L, n, D], and of all K + 1 rows of the generation rows
        [L, Bg, K + 1, D]."""
        model, contexts, chunk_latents, row_latents = self._model, [], [], None
        for chunk in self._plan.context:
            context = model.project_context(chunk.target_hidden)
            positions = chunk.start_position + torch.arange(context.shape[0], device=self._device)
            chunk_latents.append(model.context_latents(context, self._rope.rows(positions)))
            contexts.append(context)
        if self._plan.generation is not None:
            context = model.project_context(self._plan.generation.target_hidden.flatten(0, 1))
            positions = self._row_positions()
            latents = model.context_latents(context, self._rope.rows(positions.flatten()))
            row_latents = latents.unflatten(1, positions.shape)
            contexts.append(context)
        empty = torch.empty(0, model.config.hidden_size, dtype=model.dtype, device=self._device)
        return torch.cat([empty, *contexts]), chunk_latents, row_latents

    def _accept(self) -> Acceptance:
        """The verdict on each generation row's drafts; dummy rows commit nothing that is used."""
        rows, state = self._plan.generation, self._state
        width = self._num_drafts + 1
        if rows is None:
            empty = self._integers([])
            return Acceptance(empty, empty.reshape(0, width), empty)
        slots, live = self._slots[self._first_row :], self._live[self._first_row :]
        checked = torch.where(live, state.num_valid_drafts[slots], 0)
        if rows.widths is not None:
            checked = torch.minimum(checked, self._integers([max(int(n) - 1, 0) for n in rows.widths]))
        drafts = state.draft_tokens[slots].clamp(min=0)
        if rows.committed_tokens is not None:
            acceptance = verify.accept_given(rows.committed_tokens, torch.where(live, rows.num_committed, 1))
        elif rows.target_tokens is not None:
            acceptance = verify.accept_exact(drafts, checked, rows.target_tokens)
        else:
            acceptance = self._accept_logits(drafts, checked, rows.target_logits)
        return Acceptance(
            num_accepted=acceptance.num_accepted,
            committed_tokens=torch.where(live[:, None], acceptance.committed_tokens, NO_TOKEN),
            anchor=torch.where(live, acceptance.anchor, 0),
        )

    def _accept_logits(self, drafts: torch.Tensor, checked: torch.Tensor, logits: torch.Tensor) -> Acceptance:
        logits = logits[..., : self._model.config.vocab_size].float()
        greedy = verify.accept_exact(drafts, checked, logits.argmax(-1))
        params = self._plan.sampling[self._first_row :]
        if all(entry.temperature == 0 for entry in params):
            return greedy
        temperatures = self._temperatures(params)
        drawn = temperatures > 0
        target_probs = ops.tempered_softmax(logits, temperatures)
        draft_probs = verify.one_hot(drafts, logits.shape[-1])
        slots = self._slots[self._first_row :]
        if self._state.draft_probs is not None:
            kept = self._state.drawn[slots][:, None, None]
            draft_probs = torch.where(kept, self._state.draft_probs[slots], draft_probs)
        kinds = dict.fromkeys(range(self._first_row, len(self._plan.requests)), DrawKind.ACCEPT)
        uniforms = self._uniforms(kinds, self._num_drafts + 1)
        sampled = verify.accept_sampled(drafts, checked, target_probs, draft_probs, uniforms)
        return Acceptance(
            num_accepted=torch.where(drawn, sampled.num_accepted, greedy.num_accepted),
            committed_tokens=torch.where(drawn[:, None], sampled.committed_tokens, greedy.committed_tokens),
            anchor=torch.where(drawn, sampled.anchor, greedy.anchor),
        )

    def _store(self, chunk_latents: list[torch.Tensor], row_latents: torch.Tensor | None, num_new: torch.Tensor) -> None:
        """Latents of the new context rows into the pool: a chunk's whole, of a generation row the accepted ones."""
        page_size = self._pool.config.page_size
        for index, (chunk, latents) in enumerate(zip(self._plan.context, chunk_latents, strict=True)):
            here = slice(index, index + 1)
            rows = chunk.start_position + torch.arange(latents.shape[1], device=self._device)[None]
            where = ops.row_addresses(rows, self._page_table[here], self._num_pages[here], page_size)
            ops.latent_store(self._pool.layer_views, latents[:, None], where)
        if row_latents is None:
            return
        here = slice(self._first_row, None)
        accepted = torch.arange(self._num_drafts + 1, device=self._device) < num_new[here, None]
        rows = torch.where(accepted, self._row_positions(), -1)
        where = ops.row_addresses(rows, self._page_table[here], self._num_pages[here], page_size)
        ops.latent_store(self._pool.layer_views, row_latents, where)

    def _draft(self, context: torch.Tensor, acceptance: Acceptance, advance: ops.LengthAdvance) -> StepResult:
        plan, batch = self._plan, len(self._plan.requests)
        chunk_anchors = self._integers([NO_TOKEN if c.anchor is None else c.anchor for c in plan.context])
        anchors = torch.cat((chunk_anchors, acceptance.anchor))
        drafted = self._integers(list(plan.drafted))
        valid = self._integers([0] * batch)
        draft, probs = None, None
        if plan.drafted:
            rows = ops.block_fixup(
                advance.context_lens[drafted],
                self._page_table[drafted],
                self._num_pages[drafted],
                self._live[drafted],
                rows=self._model.config.block_rows(self._num_drafts),
                page_size=self._pool.config.page_size,
            )
            draft, probs = self._decode(anchors[drafted], drafted, rows, advance.context_lens[drafted])
            valid[drafted] = self._valid_drafts(drafted, rows, advance)
        no_chunk = self._integers([0] * len(plan.context))
        committed = torch.where(self._live[self._first_row :], acceptance.num_accepted + 1, 0)
        filler = torch.full((len(plan.context), self._num_drafts + 1), NO_TOKEN, device=self._device)
        drawn = torch.zeros(batch, dtype=torch.bool, device=self._device)
        if probs is not None:
            drawn[drafted] = self._temperatures([plan.sampling[index] for index in plan.drafted]) > 0
        return StepResult(
            context_lens=advance.context_lens,
            num_dropped=advance.num_dropped,
            committed_tokens=torch.cat((filler, acceptance.committed_tokens)),
            num_accepted=torch.cat((no_chunk, acceptance.num_accepted)),
            num_committed=torch.cat((no_chunk, committed)),
            anchors=anchors,
            num_valid_drafts=valid,
            drafted=drafted,
            draft=draft,
            draft_probs=probs,
            drawn=drawn,
            context=context,
        )

    def _decode(
        self, anchors: torch.Tensor, drafted: torch.Tensor, rows: BlockRows, context_lens: torch.Tensor
    ) -> tuple[BlockDraft, torch.Tensor | None]:
        model = self._model
        block = BlockContext(
            layer_views=self._pool.layer_views,
            page_table=self._page_table[drafted],
            context_lens=context_lens,
            rows=rows,
            cos_sin=self._rope.rows(rows.positions),
            max_seq_len=min(self._plan.max_length, self._pool.max_rows),
        )
        hidden = model.decode_block(model.embed_block(anchors, rows.positions.shape[1]), block)
        hidden = hidden[:, draft_rows(model.config, self._num_drafts)]
        params = [self._plan.sampling[index] for index in self._plan.drafted]
        if not self._draw_drafts or all(entry.temperature == 0 for entry in params):
            return model.draft(hidden, anchors), None
        temperatures = self._temperatures(params)
        kinds = {index: DrawKind.FIRST_DRAFT if index < self._first_row else DrawKind.DRAFT for index in self._plan.drafted}
        draft = model.draft(hidden, anchors, temperatures=temperatures, uniforms=self._uniforms(kinds, self._num_drafts))
        return draft, ops.tempered_softmax(draft.biased_logits, temperatures)

    def _valid_drafts(self, drafted: torch.Tensor, rows: BlockRows, advance: ops.LengthAdvance) -> torch.Tensor:
        """Drafts that may be verified: those whose token fits below the request's limit, whose block row has a page, and
        none where context rows were dropped."""
        limits = [request.max_context if request else 0 for request in self._plan.requests]
        lens = advance.context_lens[drafted]
        below_limit = self._integers(limits)[drafted] - lens - 1
        with_page = rows.seq_lens - lens - draft_rows(self._model.config, self._num_drafts).start
        valid = torch.minimum(below_limit, with_page).clamp(0, self._num_drafts)
        return torch.where(self._live[drafted] & (advance.num_dropped[drafted] == 0), valid, 0)

    def _temperatures(self, params: list[SamplingParams] | tuple[SamplingParams, ...]) -> torch.Tensor:
        return torch.tensor([entry.temperature for entry in params], dtype=torch.float32, device=self._device)

    def _uniforms(self, kinds: dict[int, DrawKind], count: int) -> torch.Tensor:
        """Draws of the output rows in `kinds`, float32 [len(kinds), count].

        Keyed by the end of the prompt for the first block, however the prompt was cut into chunks, and by the length before
        the step for all others.
        """
        rows = []
        for index, kind in kinds.items():
            request = self._plan.requests[index]
            if index < self._first_row:
                chunk = self._plan.context[index]
                position = chunk.start_position + chunk.target_hidden.shape[0]
            else:
                position = 0 if request is None else request.length
            rows.append(self._plan.sampling[index].uniforms(position, kind, count))
        return torch.stack(rows).to(self._device)
