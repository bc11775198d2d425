"""The shares of `block_attention` with layouts set by hand for sm_90: 64 query rows, 64 keys, latent 512 + 64 in 16 bits.

Each warp group makes the scores of half the keys, then half the columns of the result; the next tile is copied meanwhile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

# Triton 3.6 has the second name, 3.9 the first.
_copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


@gluon.jit
def _copy_tile(
    latent,
    rope,
    latents_ptr,
    table,
    start,
    first_key,
    last_key,
    page_stride,
    latent_stride,
    PAGE_SIZE: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Starts the copy of 64 keys.  Keys that no row sees repeat a key that is there."""
    at = gl.minimum(start + gl.arange(0, 64, gl.SliceLayout(1, ROWS)), last_key)
    at = gl.maximum(at, first_key)
    page = gl.load(table + at // PAGE_SIZE)
    place = gl.expand_dims(latents_ptr + page.to(gl.int64) * page_stride + at % PAGE_SIZE * latent_stride, 1)
    columns = gl.expand_dims(gl.arange(0, 512, gl.SliceLayout(0, ROWS)), 0)
    turned = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, ROWS)), 0)
    _copy(latent, place + columns)
    _copy(rope, place + 512 + turned)


@gluon.jit(do_not_specialize=["batch", "window", "rows_used", "heads"])
def block_attention_hopper_kernel(
    queries_ptr,  # arguments as those of `block_attention_kernel`
    queries_request_stride,
    queries_block_stride,
    queries_head_stride,
    latents_ptr,
    page_stride,
    latent_stride,
    page_table_ptr,
    page_table_stride,
    slots_ptr,
    context_lens_ptr,
    seq_lens_ptr,
    out_ptr,
    partial_ptr,
    stats_ptr,
    lse_ptr,
    batch,
    window,
    scale_bits,
    rows_used,
    heads,
    PAGE_SIZE: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr,
    MIN_TILES: gl.constexpr,
    SLOTTED: gl.constexpr,
    WITH_LSE: gl.constexpr,
):
    # A warp copies 4 rows of 128 bytes at a time: a thread keeps the addresses of 2 rows.
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    result_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, result_layout, 2)
    shared_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    kind: gl.constexpr = latents_ptr.dtype.element_ty
    row_tile, share = gl.program_id(0), gl.program_id(1)
    row_tiles, shares = gl.num_programs(0), gl.num_programs(1)

    total = 0
    for request in range(0, batch):
        seq_len = gl.load(seq_lens_ptr + request).to(gl.int32)
        count = (seq_len + 63) // 64
        if WINDOWED:
            context_len = gl.load(context_lens_ptr + request).to(gl.int32)
            count = gl.maximum(count - gl.maximum(context_len - window, 0) // 64, 0)
        total += gl.where(seq_len > 0, count, 0)
    used = gl.maximum(gl.minimum(shares, (total + MIN_TILES - 1) // MIN_TILES), 1)
    short, longer = total // used, total % used
    share_start = gl.minimum(share * short + gl.minimum(share, longer), total)
    share_end = gl.minimum(share_start + short + (share < longer).to(gl.int32), total)

    query_latent = gl.allocate_shared_memory(kind, [64, 512], shared_layout)
    query_rope = gl.allocate_shared_memory(kind, [64, 64], shared_layout)
    latents = gl.allocate_shared_memory(kind, [2, 64, 512], shared_layout)
    ropes = gl.allocate_shared_memory(kind, [2, 64, 64], shared_layout)
    list_start = 0
    for request in range(0, batch):
        seq_len = gl.load(seq_lens_ptr + request).to(gl.int32)
        count = (seq_len + 63) // 64
        context_len = 0
        first_key = 0
        if WINDOWED or CAUSAL:
            context_len = gl.load(context_lens_ptr + request).to(gl.int32)
        if WINDOWED:
            first_key = gl.maximum(context_len - window, 0)
            count = gl.maximum(count - first_key // 64, 0)
        count = gl.where(seq_len > 0, count, 0)
        list_end = list_start + count
        piece_start, piece_end = gl.maximum(share_start, list_start), gl.minimum(share_end, list_end)
        if piece_start < piece_end:
            start = (piece_start - list_start + first_key // 64) * 64
            end = start + (piece_end - piece_start) * 64
            last_key = seq_len - 1
            long_request = gl.to_tensor(request).to(gl.int64)
            slot = long_request
            if SLOTTED:
                slot = gl.load(slots_ptr + request).to(gl.int64)
            table = page_table_ptr + slot * page_table_stride
            _copy_tile(latents.index(0), ropes.index(0), latents_ptr, table, start, first_key, last_key, page_stride,
                       latent_stride, PAGE_SIZE, copied)  # fmt: skip
            row = gl.minimum(row_tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, copied)), rows_used - 1)
            query = queries_ptr + long_request * queries_request_stride
            query = gl.expand_dims(query + row // heads * queries_block_stride + row % heads * queries_head_stride, 1)
            columns = gl.expand_dims(gl.arange(0, 512, gl.SliceLayout(0, copied)), 0)
            turned = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, copied)), 0)
            _copy(query_latent, query + columns)
            _copy(query_rope, query + 512 + turned)
            async_copy.commit_group()

            top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, score_layout))
            weight_sum = gl.zeros([64], gl.float32, gl.SliceLayout(1, score_layout))
            acc = gl.zeros([64, 512], gl.float32, result_layout)
            held = 0
            for tile in range(start, end, 64):
                async_copy.wait_group(0)
                fence_async_shared()
                latent, rope = latents.index(held), ropes.index(held)
                if tile + 64 < end:
                    _copy_tile(latents.index(1 - held), ropes.index(1 - held), latents_ptr, table, tile + 64, first_key,
                               last_key, page_stride, latent_stride, PAGE_SIZE, copied)  # fmt: skip
                async_copy.commit_group()
                scores = gl.zeros([64, 64], gl.float32, score_layout)
                scores = warpgroup_mma(query_latent, latent.permute((1, 0)), scores, use_acc=False, is_async=True)
                scores = warpgroup_mma(query_rope, rope.permute((1, 0)), scores, is_async=True)
                scores = warpgroup_mma_wait(0, deps=(scores,))
                key = tile + gl.arange(0, 64, gl.SliceLayout(0, score_layout))
                seen = (key < seq_len) & (key >= first_key)
                scores = scores * scale_bits + gl.expand_dims(gl.where(seen, 0.0, float("-inf")), 0)
                if CAUSAL:
                    block_row = (row_tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, score_layout))) // heads
                    visible = gl.expand_dims(key, 0) <= gl.expand_dims(context_len + block_row, 1)
                    scores = gl.where(visible, scores, float("-inf"))
                new_top = gl.maximum(top, gl.max(scores, 1))
                base = gl.where(new_top == float("-inf"), 0.0, new_top)
                shrink = gl.exp2(top - base)
                weights = gl.exp2(scores - gl.expand_dims(base, 1))
                weight_sum = weight_sum * shrink + gl.sum(weights, 1)
                acc = acc * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, result_layout)), 1)
                acc = warpgroup_mma(gl.convert_layout(weights.to(kind), weight_layout), latent, acc)
                top = new_top
                held = 1 - held

            rows = row_tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, result_layout))
            mask = gl.expand_dims(rows < rows_used, 1)
            values = gl.expand_dims(gl.arange(0, 512, gl.SliceLayout(0, result_layout)), 0)
            if (piece_start == list_start) & (piece_end == list_end):
                divisor = gl.convert_layout(gl.where(weight_sum > 0.0, weight_sum, 1.0), gl.SliceLayout(1, result_layout))
                place = out_ptr + gl.expand_dims((long_request * rows_used + rows) * 512, 1) + values
                gl.store(place, (acc / gl.expand_dims(divisor, 1)).to(out_ptr.dtype.element_ty), mask=mask)
                if WITH_LSE:
                    line = row_tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, score_layout))
                    lse = (top + gl.log2(weight_sum)) * 0.6931471805599453
                    gl.store(lse_ptr + long_request * rows_used + line, lse, mask=line < rows_used)
            else:
                piece = (share * 2 + (piece_start == list_start).to(gl.int32)) * row_tiles + row_tile
                lines = piece.to(gl.int64) * 64 + gl.arange(0, 64, gl.SliceLayout(1, result_layout))
                gl.store(partial_ptr + gl.expand_dims(lines * 512, 1) + values, acc, mask=mask)
                line = gl.arange(0, 64, gl.SliceLayout(1, score_layout))
                real = row_tile * 64 + line < rows_used
                gl.store(stats_ptr + piece * 128 + line, top, mask=real)
                gl.store(stats_ptr + piece * 128 + 64 + line, weight_sum, mask=real)
        list_start = list_end
