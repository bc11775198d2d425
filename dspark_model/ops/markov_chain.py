"""The sequential Markov bias over one block and the choice of its draft tokens."""

from dataclasses import dataclass, replace

import torch

from dspark_model.ops.alignment import in_steps_of_16_bytes
from dspark_model.ops.cute_device import cute_device_refusal
from dspark_model.ops.fp32_linear import fp32_linear

MAX_FUSED_BATCH = 64
MAX_FUSED_DRAFTS = 16
MAX_FUSED_VOCAB = 1 << 24  # ids in a candidate's word
_FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Of the form that keeps rows of W2 in registers: 16 rows of up to 256 values a warp, 64 registers a thread.
MAX_CUTE_BATCH = 16
MAX_CUTE_RANK = 256
MAX_CUTE_WARPS = 16


@dataclass(frozen=True, slots=True)
class MarkovChainOutput:
    """draft_tokens: int64 [B, K].  previous_tokens: int64 [B, K], the token before each draft: the anchor, then the drafts
    themselves.  biased_logits: float32 [B, K, V], what each draft was chosen from; None where they were not asked for."""

    draft_tokens: torch.Tensor
    previous_tokens: torch.Tensor
    biased_logits: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """How the fused chain covers a vocabulary.

    programs: all of them resident at once.  tile: vocabulary rows that one looks at in one go; tiles: of each program.
    rank_lanes: columns of the tables in one go.  held: each program reads its rows of W2 once and keeps them on the chip
    (tiles = 1); otherwise it reads them for each draft.  cooperative: the driver refuses a grid that cannot be resident at
    once; without it such a grid never ends.
    prefetch: each program asks for the W1 rows of its candidates before it knows which one is chosen.
    sampled: for calls with temperatures, in which the programs exchange more words; served by `triton`.
    backend: of `markov_chain`.  `cute`: for few requests; each warp holds 16 rows of W2 (tile = 16 * warps), and there are
    `copies` of each word that the programs exchange, so that fewer of them look at the same.
    """

    programs: int
    tile: int
    tiles: int
    rank_lanes: int
    held: bool
    warps: int
    cooperative: bool = True
    prefetch: bool = False
    sampled: bool = False
    backend: str = "triton"
    copies: int = 1

    @property
    def words(self) -> int:
        """That are exchanged for a draft: a candidate of each program; where drafts are drawn also its weight, and the id."""
        return 2 * self.programs + 1 if self.sampled else self.programs

    @classmethod
    def choose(
        cls,
        batch: int,
        vocab: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        chunked: bool = True,
        sampled: bool = False,
    ) -> "ChainPlan":
        """`cute` where it serves, otherwise `triton`.  rank: 0 without a Markov head; chunked: rows of the tables start at
        multiples of 16 bytes."""
        if sampled:
            return replace(cls.of_triton(batch, vocab, rank, dtype, device), sampled=True)
        if chunked and cute_chain_refusal(batch, vocab, rank, dtype, device) is None:
            return cls.of_warps(batch, vocab, rank, torch.cuda.get_device_properties(device).multi_processor_count)
        return cls.of_triton(batch, vocab, rank, dtype, device)

    @classmethod
    def of_warps(cls, batch: int, vocab: int, rank: int, most: int) -> "ChainPlan":
        """`cute` with the fewest warps that cover the vocabulary on at most `most` multiprocessors."""
        warps = -(-vocab // (16 * most))
        # With few requests all programs wait for the same few cache lines.
        copies = 4 if batch <= 4 else 1
        tile = 16 * warps
        return cls(-(-vocab // tile), tile, 1, rank, True, warps, prefetch=True, backend="cute", copies=copies)

    @classmethod
    def of_triton(cls, batch: int, vocab: int, rank: int, dtype: torch.dtype, device: torch.device) -> "ChainPlan":
        """Held where the whole of W2 fits on the device's multiprocessors, one program on each."""
        if device.type != "cuda":
            return cls.of_tiles(_power_of_2(min(vocab, 1024), 16), 1, vocab, _power_of_2(max(rank, 16)))
        chip = torch.cuda.get_device_properties(device)
        width, lanes = _power_of_2(max(rank, 16)), _batch_lanes(batch)
        for tile in (64, 128, 256):
            shared = (tile + lanes) * width * dtype.itemsize + 4 * tile * lanes
            fits = shared + 2048 <= chip.shared_memory_per_block_optin
            if dtype.itemsize == 2 and fits and tile * chip.multi_processor_count >= vocab:
                return cls.of_tiles(tile, chip.multi_processor_count, vocab, width)
        # 64 KB of W2 on their way to each multiprocessor; in float32 a thread keeps its operands in registers.
        tile, columns = (64, 16) if dtype.itemsize == 4 else (256, 128)
        return cls.of_tiles(tile, chip.multi_processor_count, vocab, min(width, columns), held=False)

    @classmethod
    def of_tiles(cls, tile: int, most: int, vocab: int, rank_lanes: int, *, held: bool | None = None) -> "ChainPlan":
        """Tiles spread evenly over at most `most` programs; held, unless said otherwise, where each has one."""
        count = -(-vocab // tile)
        tiles = -(-count // most)
        held = tiles == 1 if held is None else held
        return cls(-(-count // tiles), tile, tiles, rank_lanes, held, warps=8 if tile >= 256 else 4)


@dataclass(frozen=True, slots=True, eq=False)
class ChainWorkspace:
    """Where the programs of a fused chain meet: for one batch and K, and for one launch at a time.

    plan: of the launch.  words: int64 [copies * K, B, plan.words], those of the launch before.  generation: int64 [1],
    launches so far; both zero at first, and left to the kernel from then on.
    """

    plan: ChainPlan
    words: torch.Tensor
    generation: torch.Tensor

    @classmethod
    def for_plan(cls, plan: ChainPlan, batch: int, drafts: int, device: torch.device) -> "ChainWorkspace":
        words = torch.zeros((plan.copies * drafts, batch, plan.words), dtype=torch.int64, device=device)
        return cls(plan, words, torch.zeros(1, dtype=torch.int64, device=device))

    @classmethod
    def for_tables(
        cls,
        batch: int,
        drafts: int,
        vocab: int,
        markov_w2: torch.Tensor | None,
        device: torch.device,
        *,
        sampled: bool = False,
    ) -> "ChainWorkspace":
        """For K drafts of B requests, with `markov_w2` [V, R] or without a Markov head; sampled: with temperatures."""
        rank, dtype = (0, torch.bfloat16) if markov_w2 is None else (markov_w2.shape[1], markov_w2.dtype)
        chunked = markov_w2 is not None and in_steps_of_16_bytes(markov_w2)
        plan = ChainPlan.choose(batch, vocab, rank, dtype, device, chunked=chunked, sampled=sampled)
        return cls.for_plan(plan, batch, drafts, device)


def fused_chain_refusal(batch: int, drafts: int, vocab: int, markov_w2: torch.Tensor | None) -> str | None:
    """Why the fused backends of `markov_chain` do not take such blocks; None where `ChainPlan.choose` finds one that does."""
    if batch > MAX_FUSED_BATCH or drafts > MAX_FUSED_DRAFTS or vocab > MAX_FUSED_VOCAB:
        return (
            f"the fused chain takes at most {MAX_FUSED_BATCH} requests, {MAX_FUSED_DRAFTS} drafts and {MAX_FUSED_VOCAB} ids, "
            f"got {batch}, {drafts} and {vocab}"
        )
    if markov_w2 is not None and markov_w2.is_mkldnn:
        return "the fused chain reads plain tables, and W2 is packed for the CPU"
    if markov_w2 is not None and markov_w2.dtype not in _FUSED_DTYPES:
        return f"the fused chain takes tables of bfloat16, float16 or float32, got {markov_w2.dtype}"
    return None


def cute_chain_refusal(batch: int, vocab: int, rank: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the backend `cute` does not take such blocks on this device; None where it does."""
    reason = cute_device_refusal("cute", device)
    if reason is not None:
        return reason
    if not 0 < batch <= MAX_CUTE_BATCH:
        return f"cute takes 1 to {MAX_CUTE_BATCH} requests, got {batch}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"cute takes tables of bfloat16 or float16, got {dtype}"
    if not 0 < rank <= MAX_CUTE_RANK or rank % 32:
        return f"cute takes ranks of up to {MAX_CUTE_RANK} in steps of 32, got {rank}"
    most = torch.cuda.get_device_properties(device).multi_processor_count * MAX_CUTE_WARPS * 16
    if vocab > most:
        return f"cute takes at most {most} ids on this device, got {vocab}"
    from dspark_kernels.cute.builds import build_architecture

    try:
        build_architecture(torch.cuda.get_device_capability(device))
    except ValueError as error:
        return str(error)
    return None


def markov_chain(
    base_logits: torch.Tensor,
    anchors: torch.Tensor,
    markov_w1: torch.Tensor | None,
    markov_w2: torch.Tensor | None,
    *,
    temperatures: torch.Tensor | None = None,
    uniforms: torch.Tensor | None = None,
    keep_biased: bool = True,
    backend: str = "torch",
    workspace: ChainWorkspace | None = None,
) -> MarkovChainOutput:
    """For k = 0 .. K-1: biased_k = base_k + W2 W1[x_{k-1}], x_k chosen from biased_k, x_{-1} the anchor
    (DSpark, arXiv 2607.05147).

    base_logits: float32 [B, K, V]; anchors: int64 [B], ids of the vocabulary; markov_w1, markov_w2: [V, R], W2 packed or not
    (`fp32_linear`), both None for a drafter without a Markov head (bias 0).  The bias accumulates in float32.  Greedy: the
    largest biased logit, lowest id on ties; NaN is larger than all else, so that the first NaN of a row is chosen; a row of
    -inf gives id 0.  With `temperatures` (float32 [B], 0 = greedy) and `uniforms` (float32 [B, K] in [0, 1)) a row of
    temperature t draws from softmax(biased / t) by inversion (`tempered_softmax`, `invert_cdf`); where that is NaN, id 0.
    keep_biased: whether `biased_logits` are returned.
    backend: `torch`; or one launch for the block: `triton`, or, without temperatures, `cute` (see `cute_chain_refusal`).  A
    launch sums a base logit and its R products in another order: within (R + 2) x 2^-23 of the sum of their magnitudes, so that
    ids are those of `torch` unless the two largest logits lie closer than twice that; without a Markov head equal to the bit.
    Same input and plan, same bits.
    A launch draws from probabilities that are within (16 + d) x 2^-22 of those of its own biased logits, as a share of them,
    where biased / t is d below the largest of the row; they are 0 for d above 80.  An index to which `tempered_softmax` gives 0
    is never drawn, whatever the uniform.
    workspace: for a launch, of its backend, this B, K, V and these tables, on their device, with or without temperatures as
    the call.  All programs of the launch wait for one another: it is a cooperative launch of at most one program per
    multiprocessor, which the driver refuses where they cannot all be resident.  Two launches with the same workspace must not
    overlap.  One of `cute` begins while the kernel before it on the stream still runs, if that one allows it (programmatic
    dependent launch), and reads W2, which must have been complete then.

    Raises:
        ValueError: another backend than `torch`, and `fused_chain_refusal` gives a reason, or tensors or the workspace do not
            fit.
    """
    if backend != "torch":
        tables, draws = (markov_w1, markov_w2), (temperatures, uniforms)
        return _fused(backend, base_logits, anchors, tables, draws, keep_biased, workspace)
    previous = anchors
    tokens, biased_rows, previous_rows = [], [], []
    for step, base in enumerate(base_logits.unbind(1)):
        biased = base if markov_w1 is None else base + fp32_linear(markov_w1[previous], markov_w2)
        token = biased.argmax(-1)
        if temperatures is not None:
            token = torch.where(temperatures > 0, _draw(biased, temperatures, uniforms[:, step]), token)
        previous_rows.append(previous)
        if keep_biased:
            biased_rows.append(biased)
        tokens.append(token)
        previous = token
    kept = torch.stack(biased_rows, 1) if keep_biased else None
    return MarkovChainOutput(torch.stack(tokens, 1), torch.stack(previous_rows, 1), kept)


def _fused(backend: str, base, anchors, tables, draws, keep_biased: bool, workspace) -> MarkovChainOutput:
    batch, drafts, vocab = base.shape
    reason = fused_chain_refusal(batch, drafts, vocab, tables[1])
    if reason is not None:
        raise ValueError(f"markov_chain={backend}: {reason}; choose torch")
    _check_fused(backend, base, anchors, *tables, workspace)
    _check_draws(base, *draws, workspace.plan)
    tokens, previous = (torch.empty((batch, drafts), dtype=torch.int64, device=base.device) for _ in range(2))
    # A draw is found among the logits that were stored.
    stored = keep_biased or workspace.plan.sampled
    biased = torch.empty(base.shape, dtype=torch.float32, device=base.device) if stored else None
    if tokens.numel():
        meeting = (workspace.words, workspace.generation)
        _LAUNCHES[backend]((base, anchors, *tables), draws, meeting, (tokens, previous, biased), workspace.plan)
    return MarkovChainOutput(tokens, previous, biased if keep_biased else None)


def _triton(inputs: tuple, draws: tuple, meeting: tuple, outputs: tuple, plan: ChainPlan) -> None:
    from dspark_kernels.triton.markov_chain import launch_markov_chain

    launch_markov_chain(
        inputs,
        draws,
        meeting,
        outputs,
        programs=plan.programs,
        tile=plan.tile,
        tiles=plan.tiles,
        rank_lanes=plan.rank_lanes,
        batch_lanes=_batch_lanes(inputs[0].shape[0]),
        held=plan.held,
        warps=plan.warps,
        cooperative=plan.cooperative,
        prefetch=plan.prefetch,
    )


def _cute(inputs: tuple, draws: tuple, meeting: tuple, outputs: tuple, plan: ChainPlan) -> None:
    from dspark_kernels.cute.markov_chain import launch_markov_chain

    launch_markov_chain(
        inputs,
        meeting,
        outputs,
        warps=plan.warps,
        lanes=_power_of_2(inputs[0].shape[0]),
        copies=plan.copies,
        prefetch=plan.prefetch,
        cooperative=plan.cooperative,
    )


_LAUNCHES = {"triton": _triton, "cute": _cute}


def _check_fused(backend: str, base, anchors, markov_w1, markov_w2, workspace: ChainWorkspace | None) -> None:
    batch, drafts, vocab = base.shape
    if base.dtype is not torch.float32 or base.stride(-1) != 1:
        raise ValueError(
            f"base_logits: float32 with values of a row side by side wanted, got {base.dtype} with strides {base.stride()}"
        )
    if anchors.dtype is not torch.int64 or anchors.shape != (batch,) or not anchors.is_contiguous():
        raise ValueError(f"anchors: contiguous int64 [{batch}] wanted, got {anchors.dtype} {list(anchors.shape)}")
    if (markov_w1 is None) != (markov_w2 is None):
        raise ValueError("markov_w1 and markov_w2: both or neither wanted, got one")
    for name, table in (("markov_w1", markov_w1), ("markov_w2", markov_w2)):
        if table is None:
            continue
        wanted = (vocab, markov_w2.shape[-1])
        if table.shape != wanted or table.dtype is not markov_w2.dtype or table.stride(-1) != 1:
            raise ValueError(
                f"{name}: {markov_w2.dtype} {list(wanted)} with values of a row side by side wanted, got {table.dtype} "
                f"{list(table.shape)} with strides {table.stride()}"
            )
    if workspace is None:
        raise ValueError(f"markov_chain={backend} needs a workspace; make one with ChainWorkspace.for_tables")
    plan = workspace.plan
    if plan.backend != backend:
        raise ValueError(f"workspace: a plan of {backend} wanted, got one of {plan.backend}; choose that backend")
    shape = (plan.copies * drafts, batch, plan.words)
    if workspace.words.shape != shape or workspace.words.device != base.device:
        raise ValueError(
            f"workspace: words {list(shape)} on {base.device} wanted, got {list(workspace.words.shape)} on "
            f"{workspace.words.device}; make one for this batch and K"
        )
    rank = 0 if markov_w2 is None else markov_w2.shape[1]
    if not plan.programs * plan.tiles * plan.tile >= vocab or (plan.held and (plan.tiles > 1 or plan.rank_lanes < rank)):
        raise ValueError(f"workspace: {plan} does not cover tables [{vocab}, {rank}]; make one for them")
    if backend == "cute":
        _check_cute(plan, batch, vocab, markov_w1, markov_w2)


def _check_draws(base, temperatures, uniforms, plan: ChainPlan) -> None:
    if plan.sampled != (temperatures is not None):
        kinds = ("without temperatures", "for calls with temperatures")
        raise ValueError(f"workspace: a plan {kinds[not plan.sampled]} wanted, got one {kinds[plan.sampled]}; see `sampled`")
    if temperatures is None:
        return
    batch, drafts, _ = base.shape
    for name, draws, shape in (("temperatures", temperatures, (batch,)), ("uniforms", uniforms, (batch, drafts))):
        if draws is None:
            raise ValueError(f"{name}: float32 {list(shape)} wanted beside temperatures, got None")
        if draws.dtype is not torch.float32 or draws.shape != shape or not draws.is_contiguous() or draws.device != base.device:
            raise ValueError(
                f"{name}: contiguous float32 {list(shape)} on {base.device} wanted, got {draws.dtype} {list(draws.shape)} with "
                f"strides {draws.stride()} on {draws.device}"
            )


def _check_cute(plan: ChainPlan, batch: int, vocab: int, markov_w1, markov_w2) -> None:
    if plan.sampled:
        raise ValueError("markov_chain=cute: it draws no drafts at a temperature; choose triton")
    if markov_w2 is None:
        raise ValueError("markov_chain=cute: it takes a drafter with a Markov head; choose triton")
    rank = markov_w2.shape[1]
    reason = cute_chain_refusal(batch, vocab, rank, markov_w2.dtype, markov_w2.device)
    if reason is None and plan.rank_lanes != rank:
        reason = f"the plan is for rank {plan.rank_lanes}, got {rank}"
    if reason is None and not (in_steps_of_16_bytes(markov_w1) and in_steps_of_16_bytes(markov_w2)):
        reason = "cute wants rows of the tables at multiples of 16 bytes"
    if reason is not None:
        raise ValueError(f"markov_chain=cute: {reason}; choose triton, with a plan of ChainPlan.of_triton")


def _batch_lanes(batch: int) -> int:
    return _power_of_2(max(batch, 16))


def _power_of_2(value: int, least: int = 1) -> int:
    """The smallest power of 2 from `least` on that is not below `value`."""
    return max(least, 1 << (value - 1).bit_length())


def _draw(logits: torch.Tensor, temperatures: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """One draw a row from softmax(logits / temperature) by inverting the cumulative distribution."""
    return invert_cdf(tempered_softmax(logits, temperatures), uniform)


def tempered_softmax(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """softmax(logits / temperature) of each row, with temperature 1 where it is 0 (a greedy row, whose result is not used).

    logits: float32 [B, ..., V]; temperatures: float32 [B].  Drafts are drawn from it and verified against it: one formula for
    both, since rejection sampling needs the exact distribution.
    """
    scale = torch.where(temperatures > 0, temperatures, 1.0)
    return torch.softmax(logits / scale.reshape(-1, *[1] * (logits.ndim - 1)), -1)


def invert_cdf(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Smallest index whose cumulative probability exceeds `uniform` times the total.

    probs: float32 [B, V], rows need not sum to 1 but must have a positive sum; uniform: float32 [B] in [0, 1).
    Returns int64 [B]; an index of probability 0 is never returned.
    """
    # float64: over 100,000 float32 terms the running sum would be off by more than small probabilities.
    cumulative = probs.double().cumsum(-1)
    wanted = uniform.double()[:, None] * cumulative[:, -1:]
    index = (cumulative <= wanted).sum(-1)
    # wanted can round up to the total; then the last index with any probability is the answer.
    last = probs.shape[-1] - 1 - (probs.flip(-1) > 0).int().argmax(-1)
    return torch.minimum(index, last)
