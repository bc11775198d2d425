"""One planned step, computed: from target rows to drafts, without changing the worker's state.

The pool is written only in rows at or behind each request's known length, which no later step reads unless the worker takes
over the new lengths.  So a run that fails halfway leaves nothing behind that counts.
"""

import dataclasses
from dataclasses import dataclass

import torch

from dspark_model import ops, verify
from dspark_model.context_latents import ContextLatents
from dspark_model.kv_pool import PagedLatents
from dspark_model.low_m import LowMPath
from dspark_model.modeling import BlockContext, BlockDraft, BlockPaths, MLADSparkForCausalLM
from dspark_model.ops import BlockShape, ContextRows, GivenRows, StepRows
from dspark_model.rope import RopeTable
from dspark_model.runtime import ResolvedRuntime
from dspark_model.sampling import DrawKind, SamplingParams
from dspark_model.serving_config import DraftSampling
from dspark_model.slots import draft_rows
from dspark_model.step_plan import StepPlan
from dspark_model.streams import SideStream
from dspark_model.verify import NO_TOKEN, Acceptance
from dspark_model.worker_state import SlotState


@dataclass(frozen=True, slots=True)
class StepPaths:
    """What a step takes: the fields of `RuntimeConfig` of the same names, whether drafts are drawn at the request's
    temperature, and whether the logits that they are chosen from are kept."""

    fused_prologue: bool
    overlap_context_projection: bool
    split_qkv_streams: bool
    direct_pool_write: bool
    attention: str
    latent_norm_rope: str
    merged_qkv_a: bool
    draw_drafts: bool
    keep_logits: bool

    @classmethod
    def of(cls, resolved: ResolvedRuntime, keep_logits: bool) -> "StepPaths":
        return cls(
            fused_prologue=resolved.takes("fused_prologue"),
            overlap_context_projection=resolved.takes("overlap_context_projection"),
            split_qkv_streams=resolved.takes("split_qkv_streams"),
            direct_pool_write=resolved.takes("direct_pool_write"),
            attention=resolved["attention"].in_force,
            latent_norm_rope=resolved["latent_norm_rope"].in_force,
            merged_qkv_a=resolved.takes("merged_qkv_a"),
            draw_drafts=resolved["draft_sampling"].in_force == DraftSampling.SAMPLE,
            keep_logits=keep_logits,
        )

    def of_block(self, low_m: LowMPath | None, side: SideStream) -> BlockPaths:
        """What the layers take; low_m: as in `BlockPaths`; side: the second stream, for those that split."""
        return BlockPaths(
            attention=self.attention,
            low_m=low_m,
            latent_norm_rope=self.latent_norm_rope,
            merged_qkv_a=self.merged_qkv_a,
            fused_store=self.fused_prologue,
            direct_pool_write=self.direct_pool_write,
            side=side if self.split_qkv_streams else None,
        )


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """slots: int64 [B], NO_TOKEN for dummy rows; rows: the bookkeeping of the B output rows, R of which drafted.  drafted:
    int64 [R], None when all or none did.  context: [M, hidden], all rows that were projected.  draft_probs: float32 [R, K, V]
    where drafts were drawn, else None."""

    slots: torch.Tensor
    rows: StepRows
    drafted: torch.Tensor | None
    draft: BlockDraft | None
    draft_probs: torch.Tensor | None
    context: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DraftedRows:
    """The R drafted rows of a step spread over the B output rows: tokens int64 [B, K], NO_TOKEN where nothing was drafted and
    anything for dummy rows; confidence float32 [B, K], 0 for both, or None."""

    tokens: torch.Tensor
    confidence: torch.Tensor | None

    @classmethod
    def of(cls, result: StepResult, num_drafts: int) -> "DraftedRows":
        draft, drafted, batch = result.draft, result.drafted, result.slots.shape[0]
        if draft is None:
            return cls(torch.full((batch, num_drafts), NO_TOKEN, dtype=torch.int64, device=result.slots.device), None)
        tokens = _spread(draft.draft_tokens, drafted, batch, NO_TOKEN)
        if draft.confidence is None:
            return cls(tokens, None)
        return cls(tokens, _spread(draft.confidence.probability, drafted, batch, 0.0))


def _spread(rows: torch.Tensor, drafted: torch.Tensor | None, batch: int, filler: float) -> torch.Tensor:
    """The drafted rows [R, K] as [B, K], `filler` in rows that drafted nothing; drafted: int64 [R], None when R = B."""
    if drafted is None:
        return rows
    values = torch.full((batch, rows.shape[1]), filler, dtype=rows.dtype, device=rows.device)
    values[drafted] = rows
    return values


@dataclass(frozen=True, slots=True, eq=False)
class _Projected:
    """context: [M, hidden]; chunk_latents: of each chunk [L, n, D]; row_latents: of all K + 1 rows of the generation rows
    [L, Bg, K + 1, D], None if the layers make them; and where these rows stand; None for both without such rows."""

    context: torch.Tensor
    chunk_latents: list[torch.Tensor]
    row_latents: torch.Tensor | None
    places: ContextRows | None


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """The R rows that draft.  drafted: int64 [R], None for all rows; slots: int64 [R]; rows: their bookkeeping; x: [R, N,
    hidden], the embedded block; new_rows: where the latents of the generation rows go, if the layers store them."""

    drafted: torch.Tensor | None
    slots: torch.Tensor
    rows: StepRows
    x: torch.Tensor
    new_rows: ops.RowAddresses | None


class StepRun:
    """The computation of one `StepPlan`; `run` goes through the step's stages in order."""

    def __init__(
        self,
        model: MLADSparkForCausalLM,
        pool: PagedLatents,
        rope: RopeTable,
        state: SlotState,
        plan: StepPlan,
        shape: BlockShape,
        paths: StepPaths,
        *,
        slots: torch.Tensor,
        side: SideStream,
        context_latents: ContextLatents,
        low_m: LowMPath | None,
    ):
        """slots: int64 [B], the slot of each output row, NO_TOKEN for dummy rows; the plan's requests are not looked at where
        all drafts are arg maxima, so that a captured run serves others too."""
        self._model, self._pool, self._rope, self._state, self._plan = model, pool, rope, state, plan
        self._shape, self._paths, self._slots, self._side = shape, paths, slots, side
        self._context_latents, self._low_m = context_latents, low_m
        self._num_drafts = shape.num_drafts
        self._device = model.device
        self._first_row = len(plan.context)
        self._defers = self._layers_store_context()

    def run(self) -> StepResult:
        overlapped = self._paths.overlap_context_projection and self._plan.is_pure_generation
        projected, rows, block = self._begin_overlapped() if overlapped else self._begin()
        self._store(projected, rows)
        return self._draft(projected, rows, block)

    def _begin(self) -> tuple["_Projected", StepRows, "_Block | None"]:
        """What needs no row of the pool, one after the other; without a block where nothing is drafted."""
        projected, rows = self._project(), self._advance()
        return projected, rows, self._embed(rows, projected.places)

    def _begin_overlapped(self) -> tuple["_Projected", StepRows, "_Block | None"]:
        """`_begin` of generation rows alone, the projection on the side stream, but for its norm where the layers store the
        context.  The places of its rows are made beside its long product, and so is all that follows the verdict."""
        model, low_m, context, latents = self._model, self._low_m, None, None
        with self._side.fork():
            product = model.context_product(self._generation_taps(), low_m)
            if not self._defers:
                context = model.norm_context(product, low_m)
        places = self._places()
        if not self._defers:
            with self._side.fork(places.cos_sin):
                latents = self._row_latents(context, places)
        rows = self._advance()
        block = self._embed(rows, places)
        self._side.join()
        if self._defers:
            # Of this stream: the layers' first launch may begin beside it.
            context = model.norm_context(product, low_m)
        projected = _Projected(context, [], latents, places)
        if not self._paths.fused_prologue:
            # The plain step is the specification: it projects where it says so.
            projected = self._project()
        return projected, rows, block

    def _integers(self, values: list[int]) -> torch.Tensor:
        if not values:
            return torch.empty(0, dtype=torch.int64, device=self._device)
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _project(self) -> "_Projected":
        model, contexts, chunk_latents, row_latents, places = self._model, [], [], None, None
        for chunk in self._plan.context:
            context = model.project_context(chunk.target_hidden, self._low_m)
            positions = chunk.start_position + torch.arange(context.shape[0], device=self._device)
            chunk_latents.append(self._latents(context, self._rope.rows(positions)))
            contexts.append(context)
        if self._plan.generation is not None:
            context, places = model.project_context(self._generation_taps(), self._low_m), self._places()
            row_latents = None if self._defers else self._row_latents(context, places)
            contexts.append(context)
        if not contexts:
            contexts = [torch.empty(0, model.config.hidden_size, dtype=model.dtype, device=self._device)]
        context = contexts[0] if len(contexts) == 1 else torch.cat(contexts)
        return _Projected(context, chunk_latents, row_latents, places)

    def _generation_taps(self) -> torch.Tensor:
        """Of all K + 1 rows of the generation rows, [Bg * (K + 1), T * E]."""
        return self._plan.generation.target_hidden.flatten(0, 1)

    def _places(self) -> ContextRows:
        """Where these rows stand."""
        slots, lens, fused = self._slots[self._first_row :], self._state.context_lens, self._paths.fused_prologue
        return ops.context_rows(slots, lens, self._rope.cos_sin, self._num_drafts + 1, fused=fused)

    def _row_latents(self, context: torch.Tensor, places: ContextRows) -> torch.Tensor:
        latents = self._latents(context, places.cos_sin.flatten(0, 1))
        return latents.unflatten(1, places.cos_sin.shape[:2])

    def _latents(self, context: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        return self._context_latents(context, cos_sin, self._paths.latent_norm_rope, self._low_m)

    def _advance(self) -> StepRows:
        """Verdict, lengths and places of all rows.  Only a uniform exact verdict is part of `ops.step_prologue`; others are
        reached here and handed to it."""
        rows, state, pool = self._plan.generation, self._state, self._pool
        tables = state.tables(pool.page_table, pool.num_pages)
        sizes = self._integers([chunk.target_hidden.shape[0] for chunk in self._plan.context])
        anchors = self._integers([NO_TOKEN if chunk.anchor is None else chunk.anchor for chunk in self._plan.context])
        verdict, tokens = None, torch.empty((0, self._num_drafts + 1), dtype=torch.int64, device=self._device)
        if rows is not None and rows.target_tokens is not None and rows.widths is None:
            tokens = rows.target_tokens
        elif rows is not None:
            verdict = self._accept()
            sizes, anchors = torch.cat((sizes, verdict.num_accepted + 1)), torch.cat((anchors, verdict.anchor))
        given = GivenRows(num_new=sizes, anchors=anchors)
        fused = self._paths.fused_prologue
        result = ops.step_prologue(self._slots, tables, given, tokens, self._rope.cos_sin, self._shape, fused=fused)
        return result if verdict is None else self._with_verdict(result, verdict)

    def _with_verdict(self, rows: StepRows, verdict: Acceptance) -> StepRows:
        first, live = self._first_row, self._slots >= 0
        committed, accepted, count = rows.committed_tokens.clone(), rows.num_accepted.clone(), rows.num_committed.clone()
        committed[first:], accepted[first:] = verdict.committed_tokens, verdict.num_accepted
        count[first:] = torch.where(live[first:], verdict.num_accepted + 1, 0)
        return dataclasses.replace(rows, committed_tokens=committed, num_accepted=accepted, num_committed=count)

    def _accept(self) -> Acceptance:
        """The verdict on each generation row's drafts; dummy rows commit nothing that is used."""
        rows, state = self._plan.generation, self._state
        slots = self._slots[self._first_row :]
        slots, live = slots.clamp(min=0), slots >= 0
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
        slots = self._slots[self._first_row :].clamp(min=0)
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

    def _store(self, projected: "_Projected", rows: StepRows) -> None:
        """Latents of the new context rows into the pool: a chunk's whole, of a generation row the committed ones."""
        row_latents = projected.row_latents
        for index, (chunk, latents) in enumerate(zip(self._plan.context, projected.chunk_latents, strict=True)):
            start, count = self._integers([chunk.start_position]), self._integers([latents.shape[1]])
            self._store_rows(latents[:, None], start, count, self._slots[index : index + 1])
        if row_latents is not None:
            here = slice(self._first_row, None)
            self._store_rows(row_latents, projected.places.start, rows.num_committed[here], self._slots[here])

    def _store_rows(self, latents: torch.Tensor, start: torch.Tensor, count: torch.Tensor, slots: torch.Tensor) -> None:
        pool = self._pool
        fused = self._paths.fused_prologue
        ops.context_store(pool.layer_views, latents, start, count, slots, pool.page_table, pool.num_pages, fused=fused)

    def _layers_store_context(self) -> bool:
        """Whether the latents of the generation rows are left to the layers of their blocks."""
        plan, low_m, batch = self._plan, self._low_m, len(self._plan.requests)
        if low_m is None or not self._paths.fused_prologue or not plan.is_pure_generation or len(plan.drafted) < batch:
            return False
        counts = batch * (self._num_drafts + 1), batch * self._shape.rows
        return low_m.stores_context(*counts, self._paths.of_block(low_m, self._side), self._pool.layer_views)

    def _new_rows(self, rows: StepRows, places: ContextRows) -> ops.RowAddresses:
        """Where the latents of the generation rows go; of each the committed ones."""
        pool = self._pool
        return ops.context_addresses(
            places.start, rows.num_committed, self._slots, pool.page_table, pool.num_pages, rows=self._num_drafts + 1,
            page_size=pool.config.page_size, fused=True,
        )  # fmt: skip

    def _embed(self, rows: StepRows, places: ContextRows | None) -> "_Block | None":
        """The block of the rows that draft; None where none does.  places: of the generation rows, if the layers store them."""
        plan, slots, drafted = self._plan, self._slots, None
        if not plan.drafted:
            return None
        if len(plan.drafted) < len(plan.requests):
            drafted = self._integers(list(plan.drafted))
            rows, slots = rows.select(drafted), slots[drafted]
        x = self._model.embed_block(rows.anchors, self._shape.rows, fused=self._paths.fused_prologue)
        return _Block(drafted, slots, rows, x, self._new_rows(rows, places) if self._defers else None)

    def _draft(self, projected: "_Projected", rows: StepRows, block: "_Block | None") -> StepResult:
        if block is None:
            return StepResult(self._slots, rows, None, None, None, projected.context)
        draft, probs = self._decode(block, projected)
        return StepResult(self._slots, rows, block.drafted, draft, probs, projected.context)

    def _decode(self, block: "_Block", projected: "_Projected") -> tuple[BlockDraft, torch.Tensor | None]:
        model, pool, rows, new_context = self._model, self._pool, block.rows, None
        if block.new_rows is not None:
            cos_sin = projected.places.cos_sin.flatten(0, 1)
            new_context = self._context_latents.into(projected.context, cos_sin, pool.layer_views, block.new_rows)
        context = BlockContext(
            layer_views=pool.layer_views,
            page_table=pool.page_table,
            slots=block.slots,
            context_lens=rows.context_lens,
            rows=rows.block,
            cos_sin=rows.cos_sin,
            max_seq_len=min(self._plan.max_length, pool.max_rows),
            window=pool.config.context_window,
            paths=self._paths.of_block(self._low_m, self._side),
            new_context=new_context,
        )
        hidden = model.decode_block(block.x, context)[:, draft_rows(model.config, self._num_drafts)]
        params = [self._plan.sampling[index] for index in self._plan.drafted]
        options = {"slots": block.slots, "low_m": self._low_m}
        if not self._paths.draw_drafts or all(entry.temperature == 0 for entry in params):
            return model.draft(hidden, rows.anchors, keep_biased=self._paths.keep_logits, **options), None
        temperatures = self._temperatures(params)
        kinds = {index: DrawKind.FIRST_DRAFT if index < self._first_row else DrawKind.DRAFT for index in self._plan.drafted}
        uniforms = self._uniforms(kinds, self._num_drafts)
        draft = model.draft(hidden, rows.anchors, temperatures=temperatures, uniforms=uniforms, **options)
        return draft, ops.tempered_softmax(draft.biased_logits, temperatures)

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
