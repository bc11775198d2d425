"""Absorbed MLA attention of one block over paged context: a kernel over equal shares of all key tiles, and one that merges what
the shares leave of a request."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Launch shape.

    row_tile, key_tile: query rows and keys of one product, powers of two of at least 16; min_tiles: how few key tiles are worth
    a share of their own; merge_columns, merge_pieces: what a merging program reads at once; by_hand: the kernel of
    `block_attention_hopper`, for tiles of 64 x 64, 8 warps and latents of 512 + 64 in 16 bits.
    """

    row_tile: int
    key_tile: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    min_tiles: int = 1
    merge_columns: int = 128
    merge_pieces: int = 32
    by_hand: bool = False


@triton.jit
def _tile_list(
    seq_lens_ptr, context_lens_ptr, batch, window, WINDOWED: tl.constexpr, KEY_TILE: tl.constexpr, BATCH_LANES: tl.constexpr
):
    """Key tiles of each request, [BATCH_LANES], and where they end in the list of all.  A window drops the tiles before it."""
    lanes = tl.arange(0, BATCH_LANES)
    seq_lens = tl.load(seq_lens_ptr + lanes, mask=lanes < batch, other=0).to(tl.int32)
    counts = (seq_lens + KEY_TILE - 1) // KEY_TILE
    if WINDOWED:
        context_lens = tl.load(context_lens_ptr + lanes, mask=seq_lens > 0, other=0).to(tl.int32)
        counts = tl.maximum(counts - tl.maximum(context_lens - window, 0) // KEY_TILE, 0)
    return counts, tl.cumsum(counts, 0)


@triton.jit
def _shares(total, shares, MIN_TILES: tl.constexpr):
    """(short, longer): the first `longer` shares have short + 1 tiles, those behind them `short`; shares not used are empty."""
    used = tl.maximum(tl.minimum(shares, (total + MIN_TILES - 1) // MIN_TILES), 1)
    return total // used, total % used


@triton.jit
def _share_of(tile, short, longer):
    """The share in which a tile of the list lies."""
    front = longer * (short + 1)
    return tl.where(tile < front, tile // (short + 1), longer + (tile - front) // tl.maximum(short, 1))


@triton.jit
def _load_rows(places, COLUMNS: tl.constexpr, LANES: tl.constexpr):
    """COLUMNS values of each row and zeros up to LANES.  places: [rows, 1] pointers."""
    lanes = tl.arange(0, LANES)[None, :]
    if COLUMNS == LANES:
        return tl.load(places + lanes)
    return tl.load(places + lanes, mask=lanes < COLUMNS, other=0.0)


# Not specialised: one build serves every batch, block and number of heads.
@triton.jit(do_not_specialize=["batch", "window", "rows_used", "heads"])
def block_attention_kernel(
    queries_ptr,  # [B, N, heads, LATENT + ROPE], any strides but 1 between values
    queries_request_stride,
    queries_block_stride,
    queries_head_stride,
    latents_ptr,  # [pages, PAGE_SIZE, LATENT + ROPE], any strides but 1 between values; fp8: a row goes on behind them
    page_stride,
    latent_stride,
    page_table_ptr,  # [slots, P] int32
    page_table_stride,
    slots_ptr,  # [B]; read if SLOTTED, else request b has row b of the table
    context_lens_ptr,  # [B]
    seq_lens_ptr,  # [B]
    out_ptr,  # [B, N x heads, LATENT] contiguous
    partial_ptr,  # float32 [shares, 2, row tiles, ROW_TILE, LATENT]
    stats_ptr,  # float32 [shares, 2, row tiles, 2, ROW_TILE]: largest score in bits, sum of the weights
    lse_ptr,  # float32 [B, N x heads], written if WITH_LSE
    batch,
    window,
    scale_bits,  # softmax scale x log2(e)
    rows_used,  # N x heads
    heads,
    LATENT: tl.constexpr,
    LATENT_LANES: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_LANES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    ROW_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    BATCH_LANES: tl.constexpr,
    MIN_TILES: tl.constexpr,
    SLOTTED: tl.constexpr,
    WITH_LSE: tl.constexpr,
    SCALE_AT: tl.constexpr,  # where the scale stands in a row of an fp8 pool; 0: the latents are of the queries' type
):
    # The row tiles of one share run side by side and meet the same keys in L2.
    row_tile, share = tl.program_id(0), tl.program_id(1)
    row_tiles, shares = tl.num_programs(0), tl.num_programs(1)
    counts, ends = _tile_list(seq_lens_ptr, context_lens_ptr, batch, window, WINDOWED, KEY_TILE, BATCH_LANES)
    total = tl.sum(counts, 0)
    short, longer = _shares(total, shares, MIN_TILES)
    share_start = tl.minimum(share * short + tl.minimum(share, longer), total)
    share_end = tl.minimum(share_start + short + (share < longer).to(tl.int32), total)
    first_request = tl.sum((ends <= share_start).to(tl.int32), 0)
    end_request = tl.minimum(tl.sum((ends < share_end).to(tl.int32), 0) + 1, batch)

    lanes = tl.arange(0, BATCH_LANES)
    rows = row_tile * ROW_TILE + tl.arange(0, ROW_TILE)
    real = rows < rows_used
    columns = tl.arange(0, LATENT_LANES)
    keys = tl.arange(0, KEY_TILE)
    kind = queries_ptr.dtype.element_ty
    out_mask = real[:, None] if LATENT == LATENT_LANES else real[:, None] & (columns < LATENT)[None, :]

    for step in range(end_request - first_request):
        request = first_request + step
        list_end = tl.sum(tl.where(lanes == request, ends, 0), 0)
        list_start = list_end - tl.sum(tl.where(lanes == request, counts, 0), 0)
        piece_start, piece_end = tl.maximum(share_start, list_start), tl.minimum(share_end, list_end)
        if piece_start < piece_end:
            seq_len = tl.load(seq_lens_ptr + request).to(tl.int32)
            first_key = 0
            context_len = 0
            if WINDOWED or CAUSAL:
                context_len = tl.load(context_lens_ptr + request).to(tl.int32)
            if WINDOWED:
                first_key = tl.maximum(context_len - window, 0)
            start = (piece_start - list_start + first_key // KEY_TILE) * KEY_TILE
            end = start + (piece_end - piece_start) * KEY_TILE
            slot = request.to(tl.int64)
            if SLOTTED:
                slot = tl.load(slots_ptr + request).to(tl.int64)
            table = page_table_ptr + slot * page_table_stride
            query = queries_ptr + request.to(tl.int64) * queries_request_stride
            # Lanes without a row repeat the last row.
            row = tl.minimum(rows, rows_used - 1)
            query += row // heads * queries_block_stride + row % heads * queries_head_stride
            query_latent = _load_rows(query[:, None], LATENT, LATENT_LANES)
            query_rope = _load_rows(query[:, None] + LATENT, ROPE, ROPE_LANES)

            top = tl.full((ROW_TILE,), float("-inf"), tl.float32)
            weight_sum = tl.zeros((ROW_TILE,), tl.float32)
            acc = tl.zeros((ROW_TILE, LATENT_LANES), tl.float32)
            # Keys that no row sees repeat a key that is there, so that no tile reads, or multiplies by 0, what may be NaN.
            last_key = seq_len - 1
            at = tl.minimum(start + keys, last_key)
            if WINDOWED:
                at = tl.maximum(at, first_key)
            page = tl.load(table + at // PAGE_SIZE)
            for tile in range(start, end, KEY_TILE):
                place = latents_ptr + page.to(tl.int64) * page_stride + at % PAGE_SIZE * latent_stride
                latent = _load_rows(place[:, None], LATENT, LATENT_LANES)
                rope = _load_rows(place[:, None] + LATENT, ROPE, ROPE_LANES)
                if SCALE_AT:
                    # A scale is a power of two: on scores and weights it gives the bits that it would give on the keys.
                    scale = tl.load((place + SCALE_AT).to(tl.pointer_type(tl.float32)))
                    latent = latent.to(kind)
                    rope = rope.to(kind)
                # A tile ahead, so that the loads of the latents never wait for it.
                at = tl.minimum(tile + KEY_TILE + keys, last_key)
                if WINDOWED:
                    at = tl.maximum(at, first_key)
                page = tl.load(table + at // PAGE_SIZE)

                scores = tl.dot(query_latent, tl.trans(latent), input_precision="ieee")
                scores = tl.dot(query_rope, tl.trans(rope), scores, input_precision="ieee")
                if SCALE_AT:
                    scores = scores * scale[None, :]
                key = tile + keys
                seen = key < seq_len
                if WINDOWED:
                    seen = seen & (key >= first_key)
                if CAUSAL:
                    visible = seen[None, :] & (key[None, :] <= (context_len + rows // heads)[:, None])
                    scores = tl.where(visible, scores * scale_bits, float("-inf"))
                else:
                    scores = scores * scale_bits + tl.where(seen, 0.0, float("-inf"))[None, :]
                new_top = tl.maximum(top, tl.max(scores, 1))
                # A row that has seen no key has no largest score; 0 keeps -inf - -inf out.
                base = tl.where(new_top == float("-inf"), 0.0, new_top)
                shrink = tl.exp2(top - base)
                weights = tl.exp2(scores - base[:, None])
                weight_sum = weight_sum * shrink + tl.sum(weights, 1)
                if SCALE_AT:
                    weights = weights * scale[None, :]
                acc = tl.dot(weights.to(kind), latent, acc * shrink[:, None], input_precision="ieee")
                top = new_top

            begins, finishes = piece_start == list_start, piece_end == list_end
            if begins & finishes:
                out = acc / tl.where(weight_sum > 0.0, weight_sum, 1.0)[:, None]
                place = out_ptr + (request.to(tl.int64) * rows_used + rows)[:, None] * LATENT + columns[None, :]
                tl.store(place, out.to(out_ptr.dtype.element_ty), mask=out_mask)
                if WITH_LSE:
                    lse = (top + tl.log2(weight_sum)) * 0.6931471805599453
                    tl.store(lse_ptr + request.to(tl.int64) * rows_used + rows, lse, mask=real)
            else:
                # A share leaves at most two pieces: one whose request began before it, one whose request goes on behind it.
                piece = (share * 2 + begins.to(tl.int32)) * row_tiles + row_tile
                lines = piece.to(tl.int64) * ROW_TILE + tl.arange(0, ROW_TILE)
                tl.store(partial_ptr + lines[:, None] * LATENT + columns[None, :], acc, mask=out_mask)
                stats = stats_ptr + piece * (2 * ROW_TILE) + tl.arange(0, ROW_TILE)
                tl.store(stats, top, mask=real)
                tl.store(stats + ROW_TILE, weight_sum, mask=real)


@triton.jit(do_not_specialize=["batch", "window", "shares", "row_tiles", "rows_used"])
def block_attention_merge_kernel(
    context_lens_ptr,
    seq_lens_ptr,
    out_ptr,  # [B, N x heads, LATENT]
    partial_ptr,  # as above
    stats_ptr,
    lse_ptr,
    batch,
    window,
    shares,
    row_tiles,
    rows_used,
    LATENT: tl.constexpr,
    WINDOWED: tl.constexpr,
    ROW_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    BATCH_LANES: tl.constexpr,
    MIN_TILES: tl.constexpr,
    WITH_LSE: tl.constexpr,
    SHARE_LANES: tl.constexpr,  # at least `shares`; sets the order in which the pieces' weights are summed
    PIECES: tl.constexpr,  # read at once
    COLUMNS: tl.constexpr,
):
    row, request = tl.program_id(0), tl.program_id(2)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    lanes = tl.arange(0, BATCH_LANES)
    counts, ends = _tile_list(seq_lens_ptr, context_lens_ptr, batch, window, WINDOWED, KEY_TILE, BATCH_LANES)
    short, longer = _shares(tl.sum(counts, 0), shares, MIN_TILES)
    count = tl.sum(tl.where(lanes == request, counts, 0), 0)
    list_end = tl.sum(tl.where(lanes == request, ends, 0), 0)
    first_share = _share_of(list_end - count, short, longer)
    pieces = _share_of(list_end - 1, short, longer) - first_share + 1
    inside = columns < LATENT
    out = out_ptr + (request.to(tl.int64) * rows_used + row) * LATENT + columns
    kind = out_ptr.dtype.element_ty
    lse = lse_ptr + request.to(tl.int64) * rows_used + row
    if count == 0:
        tl.store(out, tl.zeros((COLUMNS,), tl.float32).to(kind), mask=inside)
        if WITH_LSE:
            tl.store(lse, float("-inf"), mask=tl.program_id(1) == 0)
    elif pieces > 1:
        row_tile, line = row // ROW_TILE, row % ROW_TILE
        piece = tl.arange(0, SHARE_LANES)
        slot = ((first_share + piece) * 2 + (piece == 0).to(tl.int32)) * row_tiles + row_tile
        stats = stats_ptr + slot * (2 * ROW_TILE) + line
        tops = tl.load(stats, mask=piece < pieces, other=float("-inf"))
        sums = tl.load(stats + ROW_TILE, mask=piece < pieces, other=0.0)
        top = tl.max(tops, 0)
        top = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.exp2(tops - top) * sums, 0)
        acc = tl.zeros((COLUMNS,), tl.float32)
        for start in range(0, pieces, PIECES):
            some = start + tl.arange(0, PIECES)
            used = some < pieces
            some_slot = ((first_share + some) * 2 + (some == 0).to(tl.int32)) * row_tiles + row_tile
            factors = tl.exp2(tl.load(stats_ptr + some_slot * (2 * ROW_TILE) + line, mask=used, other=float("-inf")) - top)
            place = partial_ptr + (some_slot.to(tl.int64) * ROW_TILE + line)[:, None] * LATENT + columns[None, :]
            values = tl.load(place, mask=used[:, None] & inside[None, :], other=0.0)
            acc += tl.sum(values * factors[:, None], 0)
        tl.store(out, (acc / tl.where(total > 0.0, total, 1.0)).to(kind), mask=inside)
        if WITH_LSE:
            tl.store(lse, (top + tl.log2(total)) * 0.6931471805599453, mask=tl.program_id(1) == 0)


def hopper_kernel_takes(capability: tuple[int, int], kv_lora_rank: int, width: int, dtype: torch.dtype) -> bool:
    """Whether `block_attention_hopper_kernel` was written for such a device and such latents."""
    return capability == (9, 0) and (kv_lora_rank, width) == (512, 576) and dtype in (torch.bfloat16, torch.float16)


SHARED_BYTES_64_ROWS = 221184  # of the plain kernel with tiles of 64 x 64 and latents of 512 + 64 in 16 bits, built for sm_90


def choose_tuning(rows: int, dtype: torch.dtype, *, by_hand: bool, shared_bytes: int) -> Tuning:
    """The launch shape for `rows` query rows a request.  shared_bytes: shared memory that the device has for one program.

    Neither the batch nor a bound on the lengths has a part in it, so that no padding and no looser bound changes a bit.  One
    layer of Kimi K3 in us on an H200 (rows; context), the best of the shapes tried at each size first:

        shape        56; 2048  56; 32768  56; 131072  56; 393216  448; 2048  448; 32768  4 requests of 56; 2048
        by hand          13.5       34.1        67.4       156.7       25.0        96.4                    22.8
        64 x 64          21.8       73.4       154.9       366.0       37.4       212.3                    33.9
        16 x 64          19.2       71.5       229.4       649.2       42.1       428.9                    28.8

    Where the kernel by hand cannot run it is 64 x 64, which gains 75 us at 131072 keys and loses 3 to 5 at 2048; 16 x 64
    (94208 bytes) where those tiles do not fit, or at most 16 rows would leave them three quarters empty.  Tiles for float32,
    which these products do without tensor cores, are small to fit.
    """
    if by_hand:
        return Tuning(row_tile=64, key_tile=64, num_warps=8, num_stages=2, by_hand=True)
    if dtype.itemsize > 2:
        return Tuning(row_tile=16, key_tile=16, num_warps=4, num_stages=2)
    narrow = rows <= 16 or shared_bytes < SHARED_BYTES_64_ROWS
    return Tuning(row_tile=16 if narrow else 64, key_tile=64, num_warps=8, num_stages=2)


def block_attention(
    queries: torch.Tensor,
    latents: torch.Tensor,
    page_table: torch.Tensor,
    context_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_lora_rank: int,
    softmax_scale: float,
    max_seq_len: int,
    causal: bool,
    window: int | None,
    processors: int,
    tuning: Tuning,
    slots: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `dspark_model.ops.block_attention`, arguments checked.

    processors: streaming multiprocessors to fill.  lse: float32 [B, N, heads] contiguous, gets the logarithm of the sum of
    exp(scale * q . k) over the keys that a row sees, -inf without one.
    """
    batch, block, heads, width = queries.shape
    rows, page_size = block * heads, latents.shape[1]
    row_tiles = triton.cdiv(rows, tuning.row_tile)
    shares = max(1, processors * tuning.programs_per_sm // row_tiles)
    tiles = max(1, batch * triton.cdiv(max_seq_len, tuning.key_tile))
    # A share more than there are tiles is empty.  Leaving such shares out may change the grid and the memory, and nothing else.
    launched = min(shares, tiles)
    out = torch.empty((batch, block, heads, kv_lora_rank), dtype=queries.dtype, device=queries.device)
    partial = torch.empty((launched, 2, row_tiles, tuning.row_tile, kv_lora_rank), dtype=torch.float32, device=queries.device)
    stats = torch.empty((launched, 2, row_tiles, 2, tuning.row_tile), dtype=torch.float32, device=queries.device)
    shared = {
        "LATENT": kv_lora_rank,
        "WINDOWED": window is not None,
        "ROW_TILE": tuning.row_tile,
        "KEY_TILE": tuning.key_tile,
        "BATCH_LANES": max(8, triton.next_power_of_2(batch)),
        "MIN_TILES": tuning.min_tiles,
        "WITH_LSE": lse is not None,
    }
    # A pointer that a kernel does not follow is another tensor's.
    lse = stats if lse is None else lse
    window = 0 if window is None else window
    arguments = (
        queries,
        *queries.stride()[:3],
        latents,
        *latents.stride()[:2],
        page_table,
        page_table.stride(0),
        seq_lens if slots is None else slots,
        context_lens,
        seq_lens,
        out,
        partial,
        stats,
        lse,
        batch,
        window,
        softmax_scale * 1.4426950408889634,
        rows,
        heads,
    )
    if tuning.by_hand:
        from dspark_kernels.triton.block_attention_hopper import block_attention_hopper_kernel

        block_attention_hopper_kernel[(row_tiles, launched)](
            *arguments,
            PAGE_SIZE=page_size,
            CAUSAL=causal,
            WINDOWED=shared["WINDOWED"],
            MIN_TILES=tuning.min_tiles,
            SLOTTED=slots is not None,
            WITH_LSE=shared["WITH_LSE"],
            num_warps=8,
        )
    else:
        block_attention_kernel[(row_tiles, launched)](
            *arguments,
            LATENT_LANES=max(16, triton.next_power_of_2(kv_lora_rank)),
            ROPE=width - kv_lora_rank,
            ROPE_LANES=max(16, triton.next_power_of_2(width - kv_lora_rank)),
            PAGE_SIZE=page_size,
            CAUSAL=causal,
            SLOTTED=slots is not None,
            SCALE_AT=latents.shape[2] - 16 if latents.dtype is torch.float8_e4m3fn else 0,
            num_warps=tuning.num_warps,
            num_stages=tuning.num_stages,
            **shared,
        )
    columns = min(tuning.merge_columns, triton.next_power_of_2(kv_lora_rank))
    block_attention_merge_kernel[(rows, triton.cdiv(kv_lora_rank, columns), batch)](
        context_lens,
        seq_lens,
        out,
        partial,
        stats,
        lse,
        batch,
        window,
        launched,
        row_tiles,
        rows,
        # Of all shares, not of those launched: a sum over more lanes has another order.  256 serves most, for few builds.
        SHARE_LANES=max(256, triton.next_power_of_2(shares)),
        PIECES=tuning.merge_pieces,
        COLUMNS=columns,
        num_warps=4,
        **shared,
    )
    return out
