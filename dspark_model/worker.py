"""`DFlashWorker`: one step of drafting for a batch of requests."""

import logging
import warnings
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch

from dspark_model import ops
from dspark_model.config_keys import ConfigError
from dspark_model.context_latents import ContextLatents
from dspark_model.external_pool import ExternalLatentPool
from dspark_model.fast_paths import backends, obstacles
from dspark_model.graph_runner import DecodeOutputs, GraphRunner, why_not_captured
from dspark_model.in_flight import StepsInFlight
from dspark_model.kv_pool import LatentKVPool, PagedLatents, PrefixHandle
from dspark_model.low_m import LowMPath
from dspark_model.modeling import MLADSparkForCausalLM
from dspark_model.ops import NO_TOKEN, BlockShape
from dspark_model.packing import PackedLinear
from dspark_model.page_allocator import CapacityError
from dspark_model.persistent import PersistentPath
from dspark_model.rope import RopeTable
from dspark_model.runtime import ResolvedRuntime, Surroundings, resolve_runtime
from dspark_model.serving_config import DraftSampling, Gemm, MergedQkvA, RuntimeConfig
from dspark_model.slots import draft_rows
from dspark_model.step_io import StepInput, StepOutput, StepTrace
from dspark_model.step_plan import StepChecker, StepPlan, is_whole
from dspark_model.step_run import DraftedRows, StepPaths, StepResult, StepRun
from dspark_model.streams import SideStream
from dspark_model.worker_state import RequestState, SlotState

logger = logging.getLogger("dspark_model")


class DFlashWorker:
    """Drafts blocks of K tokens for up to `PoolConfig.max_requests` requests at a time.

    Per step and in this order: project the context of all new target rows, accept, advance the lengths, embed the block, store
    the accepted rows' latents, run the layers, the head, the Markov chain and the confidence head.  All state is there after
    construction and is sized by the pool's config, not by the model's `max_position_embeddings`.
    """

    def __init__(
        self,
        model: MLADSparkForCausalLM,
        pool: LatentKVPool | ExternalLatentPool,
        runtime: RuntimeConfig | None = None,
        *,
        num_drafts: int | None = None,
        graph_batch_sizes: Sequence[int] | None = None,
    ):
        """num_drafts: K; None takes the pool's `num_drafts`.
        graph_batch_sizes: rows that decode steps are captured for; a step is padded to the next size, and one with more rows
            is not captured.  None takes the powers of two below the pool's `max_requests`, and that.

        Raises:
            ValueError: K is above what the pool was sized for, model and pool are on different devices, or a batch size is
                below 1.
            ConfigError: `runtime` requires what cannot run here.
        """
        self.model = model
        self.pool = pool
        self.runtime = runtime or RuntimeConfig()
        self.num_drafts = pool.config.num_drafts if num_drafts is None else num_drafts
        _check_fit(model, pool, self.num_drafts)
        self.block_rows = model.config.block_rows(self.num_drafts)
        self._surroundings = Surroundings(
            model_dtype=model.dtype,
            pool_dtype=pool.dtype,
            obstacles=obstacles(model, pool),
            backends=backends(model, pool),
        )
        self.resolved = self._resolve(self.runtime)
        self.fallback_counts: Counter[str] = Counter()
        # Rejected and block rows reach past the served limit; the table covers them, so that no position is ever clamped.
        table_rows = pool.config.max_positions + self.num_drafts + 1 + self.block_rows
        self.rope = RopeTable(model.config.rope, model.config.qk_rope_head_dim, table_rows, model.device)
        sampled_vocab = model.config.vocab_size if self.runtime.draft_sampling is DraftSampling.SAMPLE else None
        self._slots = SlotState(pool.config.max_requests, self.num_drafts, sampled_vocab, model.device)
        self._free_slots = list(range(pool.config.max_requests - 1, -1, -1))
        self._requests: dict[Hashable, RequestState] = {}
        rows = draft_rows(model.config, self.num_drafts)
        self._shape = BlockShape(
            num_drafts=self.num_drafts,
            vocab_size=model.config.vocab_size,
            rows=self.block_rows,
            first_draft_row=rows.start,
            page_size=pool.config.page_size,
            mask_token=model.config.mask_token_id,
        )
        self._checker = StepChecker(model.config, self.num_drafts, model.dtype, model.device)
        self._context_latents = ContextLatents(model)
        self._products = {Gemm.LOW_M: LowMPath(model)} if self._may_take(Gemm.LOW_M) else {}
        if self._may_take(Gemm.PERSISTENT):
            by_default = self.resolved["gemm"].in_force == Gemm.PERSISTENT
            self._products[Gemm.PERSISTENT] = PersistentPath(model, may_launch_early=by_default)
        if self.resolved.takes("merged_qkv_a"):
            model.merge_qkv_a()
        # Captured steps read the weights where they lie now; a later worker on this model may move them.
        self._weights = [parameter.detach() for parameter in model.parameters()]
        self._side = SideStream(model.device)
        self._in_flight = StepsInFlight()
        self._graphs = GraphRunner(
            self._decode,
            _batch_sizes(pool.config.max_requests, graph_batch_sizes),
            self.num_drafts,
            model.config.context_width,
            model.dtype,
            model.device,
        )
        if self.resolved.fallbacks:
            names = ", ".join(choice.name for choice in self.resolved.fallbacks)
            logger.warning("fast paths set to auto but not in use: %s; DFlashWorker.describe() says why", names)

    def describe(self) -> dict[str, str]:
        """What is in force and why, as text by subject."""
        config, pool = self.model.config, self.pool
        packed = any(isinstance(module, PackedLinear) for module in self.model.modules())
        slot = "shifted labels, rows 0..K-1" if config.sample_from_anchor else "plain DFlash, K+1 rows, rows 1..K"
        report = {
            "model": f"{config.model_type}, {config.num_hidden_layers} layers, {self.model.dtype} on {self.model.device}",
            "linear_layers": "weights packed for few rows on a CPU" if packed else "torch's own product",
            "slot_rule": f"{slot} ({config.slot_rule_source})",
            "block": f"{self.num_drafts} drafts, {'causal' if config.is_causal else 'non-causal'}",
            "embedding": f"from the {self.model.embedding_source}",
            "mask_row": "trained row" if config.mask_embedding else f"embedding of token {config.mask_token_id}",
            "taps": f"target layers {list(config.target_layer_ids)} (0-based, after the layer), {config.aux_hidden_stream}",
            "pool": f"{type(pool).__name__}, {pool.layer_views[0].shape[0]} pages of {pool.config.page_size} tokens, "
            f"{pool.dtype}, served limit {pool.config.max_positions}"
            + ("" if pool.config.context_window is None else f", the last {pool.config.context_window} rows of a context"),
        }
        graphs, megabytes = self._graphs.num_graphs, self._graphs.memory_bytes / 2**20
        report["graphs"] = f"{graphs} captured, {megabytes:.1f} MiB, {self.num_replays} replays"
        if self.resolved["gemm"].in_force == Gemm.PERSISTENT:
            early = "begin beside the kernel before"
            late = "cooperative: when it was made, another one on this GPU launched early"
            report["persistent_launches"] = early if self._products[Gemm.PERSISTENT].launches_early else late
        for choice in self.resolved.choices:
            report[f"runtime.{choice.name}"] = f"{choice.in_force} (asked for {choice.requested}: {choice.reason})"
        return report

    def context_length(self, request_id: Hashable) -> int:
        """Context rows that the worker holds of a request; waits for steps in flight."""
        self.synchronize()
        return self._request(request_id).length

    def slot_of(self, request_id: Hashable) -> int:
        """The slot of a request: its row in the pool's page table."""
        return self._request(request_id).slot

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def num_replays(self) -> int:
        """Steps that were replayed from a captured graph."""
        return self._graphs.replays.total()

    def synchronize(self) -> None:
        """Wait for the steps in flight and take over their lengths; captured steps return before they are done."""
        self._in_flight.settle(wait=True)

    def admit(self, request_id: Hashable, *, max_context: int | None = None, prefix: PrefixHandle | None = None) -> None:
        """Take on a request that will hold at most `max_context` tokens (None: the served limit).

        With `prefix` the first rows are there already, and its first chunk starts behind them.

        Raises:
            ValueError: the id is None or in use, max_context is out of range, or the prefix was released already.
            CapacityError: no slot or not enough pages are left; nothing was changed.
        """
        limit = self.pool.config.max_positions
        max_context = limit if max_context is None else max_context
        if request_id is None or request_id in self._requests:
            raise ValueError(f"request id {request_id!r} is None or in use; release it first or take another id")
        if not is_whole(max_context) or not 1 <= max_context <= limit:
            raise ValueError(f"max_context is {max_context!r}, wanted 1 to the pool's max_positions of {limit}")
        if prefix is not None and prefix.num_tokens > max_context:
            raise ValueError(f"the prefix has {prefix.num_tokens} tokens, above max_context {max_context}")
        if not self._free_slots:
            raise CapacityError(
                f"request {request_id!r}: all {self.pool.config.max_requests} slots are taken; release a request or build "
                "the pool with more max_requests"
            )
        slot = self._free_slots[-1]
        self.pool.open(slot, max_context + self.block_rows, prefix, f"request {request_id!r} of {max_context} tokens")
        self._free_slots.pop()
        self._slots.reset(slot)
        length = prefix.num_tokens if prefix else 0
        self._slots.context_lens[slot] = length
        self._slots.max_context[slot] = max_context
        self._requests[request_id] = RequestState(request_id, slot, max_context, length)

    def release(self, request_id: Hashable) -> None:
        """Forget a request, in whatever state it is, and free its pages."""
        request = self._request(request_id)
        self.pool.close(request.slot)
        self._slots.reset(request.slot)
        del self._requests[request_id]
        self._free_slots.append(request.slot)

    def retain_prefix(self, request_id: Hashable, num_tokens: int) -> PrefixHandle:
        """Keep the first `num_tokens` context rows of a request for later ones; give the handle to `admit`, and to
        `pool.release_prefix` when it is not needed any more.

        Raises:
            ValueError: the request does not hold that many rows.
            CapacityError: the page for a partly filled last page is not there.
        """
        self.synchronize()
        request = self._request(request_id)
        if not isinstance(self.pool, LatentKVPool):
            raise ValueError("the outside engine keeps the prefixes of an external pool")
        if not is_whole(num_tokens) or not 1 <= num_tokens <= request.length:
            raise ValueError(
                f"a prefix of {num_tokens!r} tokens was asked for, but request {request_id!r} holds {request.length}"
            )
        return self.pool.retain_prefix(request.slot, num_tokens)

    @torch.inference_mode()
    def step(self, step_input: StepInput, *, runtime: RuntimeConfig | None = None, trace: bool = False) -> StepOutput:
        """Run one step; see `StepInput` and `StepOutput`.

        runtime: choices for this step alone.  trace: keep intermediate results in the output.

        Raises:
            KeyError, ValueError: the input does not fit the worker's state.
            ConfigError: `runtime` requires what cannot run here.
        A step that raises changes nothing: lengths, drafts and pages are as before, and it can be sent again.

        With `cuda_graph` on, a pure generation step with exact verdicts of uniform width is captured once and then replayed:
        it returns before it is done, and its output tensors are overwritten by the next replay of the same batch size.  A token
        id outside the vocabulary, or a page that an external pool does not have, then drops the rows concerned and ends that
        request (`num_dropped`) instead of raising.
        """
        resolved = self.resolved if runtime is None else self._resolve(runtime)
        if resolved.takes("cuda_graph"):
            reason = why_not_captured(step_input, resolved, self._graphs.batch_sizes[-1], trace)
            if reason is None:
                return self._step_captured(step_input, resolved)
            resolved = resolved.without("cuda_graph", reason)
        return self._step_eager(step_input, resolved, trace)

    def _step_captured(self, step_input: StepInput, resolved: ResolvedRuntime) -> StepOutput:
        rows_per_step = self.num_drafts + 1
        keys = [key for key in step_input.generation.request_ids if key in self._requests]
        near_the_limit = any(self._requests[k].length_bound(rows_per_step) >= self._requests[k].max_context for k in keys)
        self._in_flight.settle(wait=near_the_limit)
        plan = self._plan(step_input, read_values=False)
        if any(self.pool.lacks_pages(slot, rows) for slot, rows in plan.rows_needed.items()):
            self._in_flight.settle(wait=True)  # what is known to be longer gives older pages back, and needs fewer in doubt
            plan = self._plan(step_input, read_values=False)
        fused = resolved.takes("fused_prologue")
        before = self.pool.begin_step(plan.rows_needed, step_input.block_table, read_values=False, fused=fused)
        try:
            outputs = self._graphs.run(plan, resolved)
        except BaseException:
            self.pool.cancel_step(before)
            raise
        self._in_flight.add(plan.requests, outputs.counts)
        return self._output(plan, outputs, resolved, None)

    def _plan(self, step_input: StepInput, *, read_values: bool = True) -> StepPlan:
        """The checked step; what no later block of its requests sees is given back."""
        plan = self._checker.plan(step_input, self._requests, read_values=read_values)
        self._forget(plan.requests)
        return plan

    def _forget(self, requests: Sequence[RequestState | None]) -> None:
        for request in requests:
            if request is not None:
                self.pool.forget(request.slot, request.length)

    def _decode(self, plan: StepPlan, slots: torch.Tensor, resolved: ResolvedRuntime) -> DecodeOutputs:
        """A whole decode step on the device, the slots' state included."""
        result = self._run(plan, slots, resolved, keep_logits=False)
        drafts = DraftedRows.of(result, self.num_drafts)
        next_tokens = self._commit_drafts(result, drafts, fused=resolved.takes("fused_prologue"))
        return _decode_outputs(result, drafts, next_tokens)

    def _step_eager(self, step_input: StepInput, resolved: ResolvedRuntime, trace: bool) -> StepOutput:
        self.synchronize()
        plan = self._plan(step_input)
        fused = resolved.takes("fused_prologue")
        before = self.pool.begin_step(plan.rows_needed, step_input.block_table, fused=fused)
        try:
            slots = [NO_TOKEN if request is None else request.slot for request in plan.requests]
            at = torch.tensor(slots, dtype=torch.int64, device=self.model.device)
            result = self._run(plan, at, resolved, keep_logits=trace)
            drafts = DraftedRows.of(result, self.num_drafts)
            # Reading the lengths waits for the device, so that a failure there still finds the old state.
            lengths, dropped, valid = result.rows.counts.tolist()
        except BaseException:
            self.pool.cancel_step(before)
            raise
        next_tokens = self._commit(plan, result, drafts, fused=fused)
        for index, request in enumerate(plan.requests):
            if request is not None:
                request.length, request.num_valid_drafts = lengths[index], valid[index]
                request.num_dropped += dropped[index]
                request.drafting = request.drafting or index in plan.drafted
        self._forget(plan.requests)
        outputs = _decode_outputs(result, drafts, next_tokens)
        kept = StepTrace(context=result.context, draft=result.draft) if trace else None
        return self._output(plan, outputs, resolved, kept)

    def _output(self, plan: StepPlan, outputs: DecodeOutputs, resolved: ResolvedRuntime, trace: StepTrace | None) -> StepOutput:
        self.fallback_counts.update(choice.name for choice in resolved.fallbacks)
        return StepOutput(
            request_ids=tuple(None if request is None else request.request_id for request in plan.requests),
            committed_tokens=outputs.committed_tokens,
            num_accepted=outputs.num_accepted,
            num_committed=outputs.num_committed,
            next_tokens=outputs.next_tokens,
            num_valid_drafts=outputs.counts[2],
            confidence=outputs.confidence,
            num_dropped=outputs.counts[1],
            runtime=resolved,
            trace=trace,
        )

    def _run(self, plan: StepPlan, slots: torch.Tensor, resolved: ResolvedRuntime, *, keep_logits: bool) -> StepResult:
        return StepRun(
            self.model,
            self.pool,
            self.rope,
            self._slots,
            plan,
            self._shape,
            StepPaths.of(resolved, keep_logits),
            slots=slots,
            side=self._side,
            context_latents=self._context_latents,
            low_m=self._products.get(resolved["gemm"].in_force),
        ).run()

    def _commit_drafts(self, result: StepResult, drafts: DraftedRows, *, fused: bool) -> torch.Tensor:
        rows, state = result.rows, self._slots.drafts()
        lens, valid = rows.context_lens, rows.num_valid_drafts
        return ops.step_commit(state, result.slots, rows.anchors, lens, valid, drafts.tokens, fused=fused)

    def _commit(self, plan: StepPlan, result: StepResult, drafts: DraftedRows, *, fused: bool) -> torch.Tensor:
        """The one place where a step changes the slots' lengths, anchors and drafts; returns the next target tokens."""
        state = self._slots
        next_tokens = self._commit_drafts(result, drafts, fused=fused)
        if state.draft_probs is None:
            return next_tokens
        for index, request in enumerate(plan.requests):
            if request is not None:
                drawn = result.draft_probs is not None and index in plan.drafted and plan.sampling[index].temperature > 0
                state.drawn[request.slot] = drawn
        if result.draft_probs is not None:
            for row, index in enumerate(plan.drafted):
                if plan.requests[index] is not None:
                    state.draft_probs[plan.requests[index].slot] = result.draft_probs[row]
        return next_tokens

    def _may_take(self, gemm: Gemm) -> bool:
        """Whether some step's runtime can choose this backend of the products."""
        obstacle = self._surroundings.backends["gemm"][gemm]
        return obstacle is None or obstacle.avoidable

    def _request(self, request_id: Hashable) -> RequestState:
        if request_id not in self._requests:
            raise KeyError(f"request {request_id!r} is not admitted (admitted: {list(self._requests)})")
        return self._requests[request_id]

    def _resolve(self, runtime: RuntimeConfig) -> ResolvedRuntime:
        resolved = resolve_runtime(runtime, self._surroundings)
        if runtime.draft_sampling is DraftSampling.SAMPLE and self.runtime.draft_sampling is not DraftSampling.SAMPLE:
            raise ConfigError(
                "runtime.draft_sampling=sample needs the buffer that is made at construction; build the worker with it"
            )
        own = resolved if runtime is self.runtime else self.resolved
        if resolved.takes("merged_qkv_a") and not own.takes("merged_qkv_a"):
            reason = "the joined weights are made at construction; build the worker with merged_qkv_a=on"
            if runtime.merged_qkv_a is MergedQkvA.ON:
                raise ConfigError(f"runtime.merged_qkv_a=on cannot run: {reason}")
            left = resolved.without("merged_qkv_a", reason)["merged_qkv_a"]
            # What needs them is decided once more, without them.
            others = resolve_runtime(replace(runtime, merged_qkv_a=MergedQkvA.OFF), self._surroundings)
            resolved = ResolvedRuntime(tuple(left if choice.name == left.name else choice for choice in others.choices))
        return resolved


def _decode_outputs(result: StepResult, drafts: DraftedRows, next_tokens: torch.Tensor) -> DecodeOutputs:
    rows = result.rows
    return DecodeOutputs(
        committed_tokens=rows.committed_tokens,
        num_accepted=rows.num_accepted,
        num_committed=rows.num_committed,
        next_tokens=next_tokens,
        confidence=drafts.confidence,
        counts=rows.counts,
    )


def _check_fit(model: MLADSparkForCausalLM, pool: PagedLatents, num_drafts: int) -> None:
    config = model.config
    if not 1 <= num_drafts <= pool.config.num_drafts:
        raise ValueError(
            f"num_drafts is {num_drafts}, wanted 1 to {pool.config.num_drafts}, what the pool was sized for; build the pool "
            "with a larger PoolConfig.num_drafts"
        )
    if model.device != pool.device:
        raise ValueError(f"the model is on {model.device} and the pool on {pool.device}; they must share a device")
    if config.block_size is not None and num_drafts > config.block_size:
        warnings.warn(
            f"num_drafts {num_drafts} is above the block width {config.block_size} that the drafter was trained at; "
            "acceptance of the later drafts is not to be expected",
            stacklevel=3,
        )
    if pool.config.max_positions > config.max_position_embeddings:
        warnings.warn(
            f"the pool serves {pool.config.max_positions} positions, but the drafter was made for "
            f"{config.max_position_embeddings}; rotations past that are computed, not clamped, and acceptance may fall",
            stacklevel=3,
        )


def _batch_sizes(max_requests: int, given: Sequence[int] | None) -> tuple[int, ...]:
    if given is None:
        return (*(1 << bit for bit in range(max_requests.bit_length()) if 1 << bit < max_requests), max_requests)
    if not given or not all(is_whole(size) and size >= 1 for size in given):
        raise ValueError(f"graph_batch_sizes is {list(given)}, wanted one or more whole numbers of at least 1")
    return tuple(sorted(set(given)))
