"""The Markov chain of a block in one launch: all programs are resident and meet once a draft.

A candidate is one int64 word, so that it is published and read whole: bits 63 to 32 the logit as an integer of the same order,
31 to 8 the complement of its id, 7 to 0 the launch's tag.  The largest word is the largest logit with the lowest id.

Where drafts are drawn, the programs meet twice a draft.  Each publishes with its candidate how much its ids weigh beside it:
the sum of exp(logit / temperature - the candidate's), a float64 whose lowest 8 bits are the launch's tag.  From these all
programs find, by the same sums in the same order, the one program among whose ids the draw falls.  It finds the id and
publishes that: bits 31 to 8 the id, 7 to 0 the tag.
"""

import torch
import triton
import triton.language as tl

_MAX_ID = tl.constexpr((1 << 24) - 1)
_LOWEST = tl.constexpr(-(1 << 63))  # below the word of -inf
_NAN = tl.constexpr(0x7FFFFFFE)  # above inf
_PENDING = tl.constexpr((1 << 63) - 1)  # above the words of NaN
_TAGS = tl.constexpr((1 << 8) - 1)
_WEIGHTLESS = tl.constexpr(-80.0)  # exp of it is far above the smallest float32, and 2^24 of it weigh nothing
_MOST_DRAWS = 16  # found together: with more, registers spill


@triton.jit(do_not_specialize=["batch"])  # one compilation for all batches of as many lanes
def markov_chain_kernel(
    base_ptr,  # [B, K, V] float32, values of a row side by side
    base_batch_stride,
    base_step_stride,
    anchors_ptr,  # [B] int64
    w1_ptr,  # [V, R], or None
    w1_stride,
    w2_ptr,  # [V, R], or None
    w2_stride,
    temperatures_ptr,  # [B] float32, or None
    uniforms_ptr,  # [B, K] float32, or None
    words_ptr,  # [K, B, WORDS] int64, the words of the launch before or zeros
    generation_ptr,  # [1] int64, launches before this one
    drafts_ptr,  # [B, K] int64
    previous_ptr,  # [B, K] int64
    biased_ptr,  # [B, K, V] float32; None for logits that are not kept, unless drafts are drawn
    batch,
    vocab,
    rank,
    tiles,  # of each program; 1 where HELD
    DRAFTS: tl.constexpr,
    TILE: tl.constexpr,
    BATCH_LANES: tl.constexpr,
    DRAW_LANES: tl.constexpr,  # requests whose draws are found together
    RANK_LANES: tl.constexpr,  # the whole rank where HELD
    PROGRAM_LANES: tl.constexpr,
    HELD: tl.constexpr,  # each program's rows of W2 stay on the chip
    WIDEN: tl.constexpr,  # multiply in float32
    PREFETCH_LINES: tl.constexpr,  # cache lines of a row of W1, or 0
):
    program = tl.program_id(0)
    rows = tl.arange(0, BATCH_LANES)
    live = rows < batch
    # Every word is written in every launch, so that any tag but the last one's tells a new word from an old one.
    tag = (tl.load(generation_ptr) + 1) & _TAGS
    previous = tl.load(anchors_ptr + rows, mask=live, other=0)
    base_rows = base_ptr + rows.to(tl.int64) * base_batch_stride
    first = program * tiles * TILE + tl.arange(0, TILE)
    if HELD:
        if w2_ptr is not None:
            w2 = _w2_part(w2_ptr, w2_stride, first, vocab, 0, rank, RANK_LANES)
        base = _base_tile(base_rows, live, first, vocab)
    for step in range(DRAFTS):
        if program == 0:
            tl.store(previous_ptr + rows * DRAFTS + step, previous, mask=live)
        if HELD:
            if w2_ptr is not None:
                part = _w1_part(w1_ptr, w1_stride, previous, live, 0, rank, RANK_LANES)
                base += _product(w2, part, WIDEN)
            best = _choose(base, first, vocab, live, biased_ptr, step, DRAFTS)
        else:
            best = tl.full((BATCH_LANES,), _LOWEST, tl.int64)
            for tile in range(tiles):
                ids = first + tile * TILE
                biased = _base_tile(base_rows + step * base_step_stride, live, ids, vocab)
                if w2_ptr is not None:
                    bias = tl.zeros((TILE, BATCH_LANES), tl.float32)
                    for start in range(0, rank, RANK_LANES):
                        part = _w1_part(w1_ptr, w1_stride, previous, live, start, rank, RANK_LANES)
                        bias += _product(_w2_part(w2_ptr, w2_stride, ids, vocab, start, rank, RANK_LANES), part, WIDEN)
                    biased += bias
                best = tl.maximum(best, _choose(biased, ids, vocab, live, biased_ptr, step, DRAFTS))
        if temperatures_ptr is not None:
            words = words_ptr + step * batch * (2 * tl.num_programs(0) + 1)
            logits = biased_ptr + step * vocab
            # Other threads read the logits than those that stored them.
            tl.debug_barrier()
            for start in range(0, batch, DRAW_LANES):
                requests = start + tl.arange(0, DRAW_LANES)
                heat, _ = _temperatures(temperatures_ptr, requests, batch)
                _publish_weights(words, logits, DRAFTS * vocab, requests, batch, heat, vocab, tiles * TILE, tag, TILE)
            for start in range(0, batch, DRAW_LANES):
                requests = start + tl.arange(0, DRAW_LANES)
                heat, drawn = _temperatures(temperatures_ptr, requests, batch)
                uniform = tl.load(uniforms_ptr + requests * DRAFTS + step, mask=requests < batch, other=0.0)
                _draw(
                    words,
                    logits,
                    DRAFTS * vocab,
                    requests,
                    batch,
                    heat,
                    drawn,
                    uniform,
                    vocab,
                    tiles * TILE,
                    tag,
                    TILE,
                    PROGRAM_LANES,
                )
        else:
            words = words_ptr + (step * batch + rows) * tl.num_programs(0)
            # The word carries all that the others need, so that no order with other memory is asked for.
            tl.atomic_xchg(words + program, best | tag, mask=live, sem="relaxed", scope="gpu")
            if PREFETCH_LINES:
                _prefetch_rows(w1_ptr, w1_stride, best, live, PREFETCH_LINES)
        if HELD:
            # On its way while the programs meet.
            base = _base_tile(base_rows + (step + 1) * base_step_stride, live & (step + 1 < DRAFTS), first, vocab)
        if temperatures_ptr is not None:
            if (step + 1 < DRAFTS) | (program == 0):
                previous = _meet_again(words, live, tag)
        elif (step + 1 < DRAFTS) | (program == 0):
            previous = _meet(words, live, tag, PROGRAM_LANES)
        if program == 0:
            tl.store(drafts_ptr + rows * DRAFTS + step, previous, mask=live)
    if program == 0:
        # All have published the last word, and so have read the generation.
        tl.store(generation_ptr, tl.load(generation_ptr) + 1)


@triton.jit
def _w2_part(w2_ptr, w2_stride, ids, vocab, start, rank, LANES: tl.constexpr):
    """[TILE, LANES]; rows and columns that do not exist are 0."""
    columns = start + tl.arange(0, LANES)
    pointers = w2_ptr + ids.to(tl.int64)[:, None] * w2_stride + columns[None, :]
    return tl.load(pointers, mask=(ids < vocab)[:, None] & (columns < rank)[None, :], other=0.0)


@triton.jit
def _w1_part(w1_ptr, w1_stride, tokens, live, start, rank, LANES: tl.constexpr):
    """[BATCH_LANES, LANES]"""
    columns = start + tl.arange(0, LANES)
    pointers = w1_ptr + tokens[:, None] * w1_stride + columns[None, :]
    return tl.load(pointers, mask=live[:, None] & (columns < rank)[None, :], other=0.0)


@triton.jit
def _product(w2, w1, WIDEN: tl.constexpr):
    """[TILE, BATCH_LANES] in float32."""
    if WIDEN:
        return tl.dot(w2.to(tl.float32), tl.trans(w1.to(tl.float32)), input_precision="ieee")
    return tl.dot(w2, tl.trans(w1))


@triton.jit
def _base_tile(base_rows, live, ids, vocab):
    """[TILE, BATCH_LANES]"""
    return tl.load(base_rows[None, :] + ids[:, None], mask=(ids < vocab)[:, None] & live[None, :], other=0.0)


@triton.jit
def _choose(biased, ids, vocab, live, biased_ptr, step, DRAFTS: tl.constexpr):
    """The best word of each request, without a tag; keeps the logits where `biased_ptr` says so."""
    if biased_ptr is not None:
        rows = tl.arange(0, biased.shape[1]).to(tl.int64) * DRAFTS + step
        exists = (ids < vocab)[:, None] & live[None, :]
        tl.store(biased_ptr + rows[None, :] * vocab + ids[:, None], biased, mask=exists)
    return _best(biased, ids, vocab)


@triton.jit
def _best(biased, ids, vocab):
    bits = biased.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(biased == 0, 0, order)  # -0 is no smaller than 0
    order = tl.where(biased != biased, _NAN, order)
    words = (order.to(tl.int64) << 32) | ((ids ^ _MAX_ID).to(tl.int64) << 8)[:, None]
    return tl.max(tl.where((ids < vocab)[:, None], words, _LOWEST), 0)


@triton.jit
def _meet(words, live, tag, LANES: tl.constexpr):
    """Waits for all programs' words of a draft; the chosen ids, int64 [BATCH_LANES]."""
    programs = tl.arange(0, LANES)
    pointers = words[:, None] + programs[None, :]
    mask = live[:, None] & (programs < tl.num_programs(0))[None, :]
    best = _best_or_pending(pointers, mask, tag)
    while tl.max(best, 0) == _PENDING:
        best = _best_or_pending(pointers, mask, tag)
    return ((best >> 8) & _MAX_ID) ^ _MAX_ID


@triton.jit
def _best_or_pending(pointers, mask, tag):
    found = tl.load(pointers, mask=mask, other=tag | _LOWEST, volatile=True)
    return tl.max(tl.where((found & _TAGS) == tag, found, _PENDING), 1)


@triton.jit
def _logit(words):
    """Of candidates; -0 comes back as 0, and _LOWEST as NaN."""
    order = (words >> 32).to(tl.int32)
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def _exp(distance):
    """Of a distance from the largest: 0 for NaN and where it is far below."""
    return tl.where(distance >= _WEIGHTLESS, tl.exp(distance), 0.0)


@triton.jit
def _temperatures(temperatures_ptr, requests, batch):
    """Of requests, 1 for those that are not drawn; and which are."""
    heat = tl.load(temperatures_ptr + requests, mask=requests < batch, other=0.0)
    return tl.where(heat > 0, heat, 1.0), heat > 0


@triton.jit
def _publish_weights(words, logits, row_stride, requests, batch, heat, vocab, size, tag, TILE: tl.constexpr):
    """Publishes the candidates among this program's ids, and what these ids weigh beside them."""
    program, programs, live = tl.program_id(0), tl.num_programs(0), requests < batch
    best, weight = _weigh(logits + requests.to(tl.int64) * row_stride, live, program * size, size, vocab, heat, TILE)
    own_words = words + requests * (2 * programs + 1) + program
    # The words carry all that the others need, so that no order with other memory is asked for.
    tl.atomic_xchg(own_words, best | tag, mask=live, sem="relaxed", scope="gpu")
    weight_words = (weight.to(tl.int64, bitcast=True) & ~_TAGS) | tag
    tl.atomic_xchg(own_words + programs, weight_words, mask=live, sem="relaxed", scope="gpu")


@triton.jit
def _draw(
    words,
    logits,
    row_stride,
    requests,
    batch,
    heat,
    drawn,
    uniform,
    vocab,
    size,
    tag,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Waits for all programs' words.  Publishes the ids of the requests whose draw falls among this program's own; program 0
    those of the requests that are not drawn."""
    program, programs, live = tl.program_id(0), tl.num_programs(0), requests < batch
    words += requests * (2 * programs + 1)
    candidates, weights = _meet_with_weights(words, live, tag, LANES)
    best = tl.max(candidates, 1)
    top = tl.div_rn(_logit(best), heat)
    tops = tl.div_rn(_logit(candidates), tl.broadcast_to(heat[:, None], candidates.shape))
    owner, rest, own_top = _owner(weights, tops, top, uniform)
    chosen = tl.where(drawn, 0, ((best >> 8) & _MAX_ID) ^ _MAX_ID)
    # Of a row whose largest logit is not finite nothing has a weight: program 0 finds its first id, id 0.
    mine = live & (tl.where(drawn, owner, 0) == program)
    left = mine & drawn
    while tl.max(left.to(tl.int32), 0) > 0:
        request = tl.min(tl.where(left, requests, batch), 0)
        this = requests == request
        found = _search(
            logits + request.to(tl.int64) * row_stride,
            program * size,
            size,
            vocab,
            tl.sum(tl.where(this, heat, 0.0), 0),
            tl.sum(tl.where(this, own_top, 0.0), 0),
            tl.sum(tl.where(this, top, 0.0), 0),
            tl.sum(tl.where(this, rest, 0.0), 0),
            TILE,
        )
        chosen = tl.where(this, found, chosen)
        left = left & (requests != request)
    tl.atomic_xchg(words + 2 * programs, (chosen << 8) | tag, mask=mine, sem="relaxed", scope="gpu")


@triton.jit
def _weigh(logits, live, start, size, vocab, heat, TILE: tl.constexpr):
    """The best word of each request among `size` ids, without a tag, and what these ids weigh beside it, float64."""
    best = tl.full(live.shape, _LOWEST, tl.int64)
    weight = tl.zeros(live.shape, tl.float64)
    for offset in range(0, size, TILE):
        ids = start + offset + tl.arange(0, TILE)
        biased = _base_tile(logits, live, ids, vocab)
        before = tl.div_rn(_logit(best), heat)
        best = tl.maximum(best, _best(biased, ids, vocab))
        top = tl.div_rn(_logit(best), heat)
        tile = _exp(tl.div_rn(biased, tl.broadcast_to(heat[None, :], biased.shape)) - top[None, :])
        tile = tl.where((ids < vocab)[:, None], tile, 0.0).to(tl.float64)
        weight = weight * _exp(before - top).to(tl.float64) + tl.sum(tile, 0)
    return best, weight


@triton.jit
def _meet_with_weights(words, live, tag, LANES: tl.constexpr):
    """Waits for all programs' words of a draft: candidates, and what their ids weigh beside them, [DRAW_LANES, LANES]."""
    programs = tl.arange(0, LANES)
    pointers = words[:, None] + programs[None, :]
    mask = live[:, None] & (programs < tl.num_programs(0))[None, :]
    more = pointers + tl.num_programs(0)
    while tl.max(tl.ravel(_missing(pointers, mask, tag) | _missing(more, mask, tag)), 0) != 0:
        pass
    # Threads that hold the same word loaded it at different times, and some of them alone may have ended the loop.
    candidates = tl.load(pointers, mask=mask, other=_LOWEST, volatile=True)
    weights = tl.load(more, mask=mask, other=0, volatile=True)
    return candidates, (weights & ~_TAGS).to(tl.float64, bitcast=True)


@triton.jit
def _missing(pointers, mask, tag):
    """Not 0 where a word is not there yet."""
    return (tl.load(pointers, mask=mask, other=tag, volatile=True) ^ tag) & _TAGS


@triton.jit
def _owner(weights, tops, top, uniform):
    """Of each request: the program among whose ids the draw falls, the part of that program's weight in front of the draw, and
    its largest logit / temperature.  All programs do the same sums, and so find the same."""
    programs = tl.arange(0, tops.shape[1])[None, :]
    factors = _exp(tops - top[:, None])
    parts = weights * factors.to(tl.float64)
    running = tl.cumsum(parts, 1)
    wanted = uniform.to(tl.float64) * tl.max(running, 1)
    some = parts > 0
    owner = tl.min(tl.where(some & (running > wanted[:, None]), programs, tops.shape[1]), 1)
    owner = tl.where(owner == tops.shape[1], tl.max(tl.where(some, programs, 0), 1), owner)
    before = tl.max(tl.where(programs < owner[:, None], running, 0.0), 1)
    own = programs == owner[:, None]
    factor = tl.max(tl.where(own, factors, 0.0), 1)
    rest = tl.maximum(wanted - before, 0.0) / factor.to(tl.float64)
    return owner, rest, tl.sum(tl.where(own, tops, 0.0), 1)


@triton.jit
def _search(logits, start, size, vocab, heat, own_top, top, rest, TILE: tl.constexpr):
    """The smallest of `size` ids whose running weight exceeds `rest`; where rounding makes none exceed, the last with any."""
    running = tl.full((), 0.0, tl.float64)
    found = tl.full((), _MAX_ID + 1, tl.int32)
    last = tl.full((), 0, tl.int32)
    for offset in range(0, size, TILE):
        ids = start + offset + tl.arange(0, TILE)
        cooled = tl.load(logits + ids, mask=ids < vocab, other=float("-inf"))
        cooled = tl.div_rn(cooled, tl.broadcast_to(heat, cooled.shape))
        weights = tl.where(cooled - top >= _WEIGHTLESS, _exp(cooled - own_top), 0.0).to(tl.float64)
        reached = (weights > 0) & (running + tl.cumsum(weights, 0) > rest)
        found = tl.minimum(found, tl.min(tl.where(reached, ids, _MAX_ID + 1), 0))
        last = tl.maximum(last, tl.max(tl.where(weights > 0, ids, 0), 0))
        running += tl.sum(weights, 0)
    return tl.where(found > _MAX_ID, last, found)


@triton.jit
def _meet_again(words, live, tag):
    """Waits for the chosen ids of a draft, int64 [BATCH_LANES]."""
    programs = tl.num_programs(0)
    picks = words + tl.arange(0, live.shape[0]) * (2 * programs + 1) + 2 * programs
    while tl.max(_missing(picks, live, tag), 0) != 0:
        pass
    return tl.load(picks, mask=live, other=0, volatile=True) >> 8  # again, as above


@triton.jit
def _prefetch_rows(w1_ptr, w1_stride, words, live, LINES: tl.constexpr):
    """Brings the W1 rows of this program's candidates into the L2 cache: one of them is read next, by all."""
    ids = tl.where(live, ((words >> 8) & _MAX_ID) ^ _MAX_ID, 0)
    columns = tl.arange(0, LINES) * (128 // (w1_ptr.dtype.element_ty.primitive_bitwidth // 8))
    pointers = w1_ptr + ids[:, None] * w1_stride + columns[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


def launch_markov_chain(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    draws: tuple[torch.Tensor | None, torch.Tensor | None],
    meeting: tuple[torch.Tensor, torch.Tensor],
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    *,
    programs: int,
    tile: int,
    tiles: int,
    rank_lanes: int,
    batch_lanes: int,
    held: bool,
    warps: int,
    cooperative: bool,
    prefetch: bool,
) -> None:
    """inputs: base [B, K, V], anchors, W1, W2; draws: temperatures [B] and uniforms [B, K], or None twice; meeting: words
    [K, B, programs], or [K, B, 2 * programs + 1] where drafts are drawn, and generation; outputs: drafts, previous, biased or,
    where none are drawn, None; see the kernel for dtypes."""
    (base, anchors, w1, w2), (words, generation), (drafts, previous, biased) = inputs, meeting, outputs
    batch, steps, vocab = base.shape
    # The interpreter has no caches.  Whole lines alone, so that nothing behind the row is asked for.
    line_values = 128 if w1 is None else 128 // w1.element_size()
    whole = w1 is not None and w1.shape[1] % line_values == 0 and not triton.knobs.runtime.interpret
    lines = w1.shape[1] // line_values if prefetch and whole else 0
    markov_chain_kernel[(programs,)](
        base,
        base.stride(0),
        base.stride(1),
        anchors,
        w1,
        0 if w1 is None else w1.stride(0),
        w2,
        0 if w2 is None else w2.stride(0),
        *draws,
        words,
        generation,
        drafts,
        previous,
        biased,
        batch,
        vocab,
        0 if w2 is None else w2.shape[1],
        tiles,
        DRAFTS=steps,
        TILE=tile,
        BATCH_LANES=batch_lanes,
        DRAW_LANES=min(triton.next_power_of_2(batch), _MOST_DRAWS),
        RANK_LANES=rank_lanes,
        PROGRAM_LANES=triton.next_power_of_2(programs),
        HELD=held,
        # The interpreter multiplies in float32 alone.
        WIDEN=triton.knobs.runtime.interpret or (w2 is not None and w2.dtype == torch.float32),
        PREFETCH_LINES=lines if lines & (lines - 1) == 0 else 0,
        num_warps=warps,
        num_stages=1,
        launch_cooperative_grid=cooperative,
    )
