"""Faults put into the package on purpose, each with a test that has to notice it.

A mutant is a file of `dspark_model` or `kernels`, a text that stands in it exactly once, what replaces it, and the test's id.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    test: str


MUTANTS = (
    Mutant(
        "rejected_rows_are_stored", "dspark_model/step_run.py",
        "self._store_rows(row_latents, self._row_lens, rows.num_committed[here], self._slots[here])",
        "self._store_rows(row_latents, self._row_lens, rows.num_committed[here] * 0 + 8, self._slots[here])",
        "test_step_modes.py::test_only_committed_rows_are_stored[3]",
    ),
    Mutant(
        "row_position_off_by_one", "dspark_model/step_run.py",
        "positions = self._row_lens[:, None] + torch",
        "positions = self._row_lens[:, None] + 1 + torch",
        "test_step_modes.py::test_verdicts_in_both_layouts[tokens-layer_major]",
    ),
    Mutant(
        "chunk_index_is_local", "dspark_model/step_run.py",
        "positions = chunk.start_position + torch.arange(context.shape[0]",
        "positions = torch.arange(context.shape[0]",
        "test_worker_limits.py::test_a30_chunks_store_what_one_piece_stores[pieces1]",
    ),
    Mutant(
        "dummy_rows_own_pages", "dspark_model/ops/step_prologue.py",
        "drafting = live & (anchors >= 0)",
        "drafting = anchors >= 0",
        "test_worker_pool.py::test_a36_padding_rows_with_nan_touch_no_page[False-tokens]",
    ),
    Mutant(
        "draft_past_the_limit", "dspark_model/ops/step_prologue.py",
        "below_limit = tables.max_context[at] - advance.context_lens - 1",
        "below_limit = tables.max_context[at] - advance.context_lens",
        "test_worker_limits.py::test_a28_block_at_the_end_of_the_context[3-True]",
    ),
    Mutant(
        "rows_without_a_page_are_written", "dspark_model/ops/row_addresses.py",
        "owned = (rows >= 0) & (index < num_pages[:, None])",
        "owned = rows >= 0",
        "test_step_external.py::test_block_is_cut_where_the_pages_end[12-True]",
    ),
    Mutant(
        "block_is_not_cut", "dspark_model/ops/block_fixup.py",
        "seq_lens = torch.minimum(context_lens + rows, pages_live * page_size)",
        "seq_lens = context_lens + rows",
        "test_step_external.py::test_block_is_cut_where_the_pages_end[12-True]",
    ),
    Mutant(
        "no_nan_guard", "dspark_model/ops/block_attention.py",
        "keys = torch.where(used[..., None], keys, 0.0)",
        "pass",
        "test_worker_pool.py::test_a38_pool_of_nan_at_every_length_of_two_pages[8-False]",
    ),
    Mutant(
        "causal_mask_hides_the_row_itself", "dspark_model/ops/block_attention.py",
        "(index <= last_seen[..., None])",
        "(index < last_seen[..., None])",
        "test_step_modes.py::test_variant_against_the_reference[causal]",
    ),
    Mutant(
        "plain_rule_reads_slot_zero", "dspark_model/slots.py",
        "slice(1, num_drafts + 1)",
        "slice(0, num_drafts)",
        "test_step_modes.py::test_variant_against_the_reference[dflash]",
    ),
    Mutant(
        "no_pages_for_the_block", "dspark_model/step_plan.py",
        "length + (self._block_rows if index in drafting else 0)",
        "length",
        "test_worker_pool.py::test_a34_prompt_that_fills_its_pages[16]",
    ),
    Mutant(
        "slot_is_not_reset", "dspark_model/worker_state.py",
        "            tensor[slot] = 0\n",
        "            pass\n",
        "test_worker_lifecycle.py::test_a59_a_released_slot_is_blank[False]",
    ),
    Mutant(
        "failed_step_keeps_its_pages", "dspark_model/worker.py",
        "            self.pool.cancel_step(before)\n            raise\n        next_tokens",
        "            raise\n        next_tokens",
        "test_worker_inputs.py::test_step_that_fails_in_the_middle_can_be_sent_again[RuntimeError-layer1]",
    ),
    Mutant(
        "prefix_tail_is_not_copied", "dspark_model/kv_pool.py",
        "self._copy_rows(prefix.tail_page, self._pages[slot][-1], prefix.num_tokens % self.config.page_size)",
        "pass",
        "test_step_modes.py::test_prefix_serves_a_request_after_its_source[source-21]",
    ),
    Mutant(
        "prefix_released_twice", "dspark_model/kv_pool.py",
        "        self._check_prefix(handle)\n        self._prefixes.remove(handle)\n",
        "",
        "test_kv_pool.py::test_prefix_cannot_be_released_twice_or_used_after",
    ),
    Mutant(
        "huge_page_number_wraps", "dspark_model/kv_pool.py",
        "torch.where(named, block_table, -1).max().item() // self.divisor",
        "table.max().item()",
        "test_kv_pool.py::test_external_table_is_refused[table5-names page 4294967296, but the pool has 40]",
    ),
    Mutant(
        "rest_of_an_unchecked_draft", "dspark_model/verify.py",
        "use_rest = (accepted < num_drafts) & (rest.sum(-1) > 0)",
        "use_rest = rest.sum(-1) > 0",
        "test_verify.py::test_a55_unchecked_drafts_are_no_evidence",
    ),
    Mutant(
        "draws_follow_the_chunking", "dspark_model/step_run.py",
        "position = chunk.start_position + chunk.target_hidden.shape[0]",
        "position = chunk.start_position",
        "test_worker_lifecycle.py::test_a55_draws_depend_on_seed_and_position_alone",
    ),
    Mutant(
        "packed_layers_drop_their_bias", "dspark_model/packing.py",
        "return ops.packed_linear(x, self.packed, self.bias)",
        "return ops.packed_linear(x, self.packed)",
        "test_packing.py::test_layers_are_replaced_at_any_depth_and_compute_the_same",
    ),
    Mutant(
        "subclasses_of_linear_are_packed", "dspark_model/packing.py",
        "if type(child) is nn.Linear and",
        "if isinstance(child, nn.Linear) and",
        "test_packing.py::test_layers_are_replaced_at_any_depth_and_compute_the_same",
    ),
    Mutant(
        "count_of_committed_rows_is_off_by_one", "dspark_model/ops/context_store.py",
        "index < count[:, None]",
        "index <= count[:, None]",
        "ops/test_context_store.py::test_edges[0-0-3-0]",
    ),
    Mutant(
        "unowned_row_repeats_row_zero", "dspark_model/ops/latent_store.py",
        "owned.int().argmax())",
        "owned.int().argmin())",
        "ops/test_latent_store.py::test_owned_rows_and_nothing_else[3-7-page_major-torch.bfloat16]",
    ),
    Mutant(
        "kernel_accepts_unchecked_drafts", "kernels/dspark_kernels/triton/step_prologue.py",
        "stands = (lanes < checked) & (lanes < DRAFTS)",
        "stands = (lanes < DRAFTS)",
        "ops/test_step_prologue.py::test_drafts_that_were_not_checked_do_not_stand[1]",
    ),
    Mutant(
        "kernel_counts_dropped_rows_of_dummies", "kernels/dspark_kernels/triton/step_prologue.py",
        "wanted = tl.where(live, old + fresh, 0)",
        "wanted = old + fresh",
        "ops/test_step_prologue.py::test_dummy_rows_take_nothing_from_slot_0",
    ),
    Mutant(
        "kernel_block_is_not_cut", "kernels/dspark_kernels/triton/step_prologue.py",
        "tl.minimum(length + ROWS, count * PAGE_SIZE)",
        "length + ROWS",
        "ops/test_step_prologue.py::test_edges[arguments3-7-0-1-8]",
    ),
    Mutant(
        "kernel_ignores_the_column_stride", "kernels/dspark_kernels/triton/step_prologue.py",
        "target_ptr + lanes * target_stride,",
        "target_ptr + lanes,",
        "ops/test_step_prologue.py::test_given_and_verified_rows[5-5-32]",
    ),
    Mutant(
        "kernel_stores_rejected_rows", "kernels/dspark_kernels/triton/context_store.py",
        "row < tl.load(count_ptr + request)",
        "row < rows",
        "ops/test_context_store.py::test_rejected_rows_of_nan_stay_out[True]",
    ),
    Mutant(
        "kernel_stores_past_the_pages", "kernels/dspark_kernels/triton/context_store.py",
        "index < tl.load(num_pages_ptr + slot)",
        "index < table_width",
        "ops/test_context_store.py::test_edges[6-4-2-2]",
    ),
    Mutant(
        "kernel_stores_rows_that_are_not_owned", "kernels/dspark_kernels/triton/latent_store.py",
        "if tl.load(owned_ptr + row) != 0:",
        "if row >= 0:",
        "ops/test_latent_store.py::test_nan_of_rows_that_are_not_owned_stays_out[torch.bfloat16-True]",
    ),
    Mutant(
        "kernel_takes_pages_for_adjacent", "kernels/dspark_kernels/triton/latent_store.py",
        "page * page_stride",
        "page * row_stride",
        "ops/test_latent_store.py::test_owned_rows_and_nothing_else[3-7-page_major-torch.bfloat16]",
    ),
    Mutant(
        "kernel_looks_up_the_whole_vocabulary", "kernels/dspark_kernels/triton/noise_block.py",
        "tl.load(anchors_ptr + request) - vocab_start",
        "tl.load(anchors_ptr + request)",
        "ops/test_noise_block.py::test_blocks_of_a_sharded_vocabulary_sum_to_the_whole[(5, 7)]",
    ),
    Mutant(
        "kernel_adds_the_mask_row_in_each_shard", "kernels/dspark_kernels/triton/noise_block.py",
        "at < width * mask_here",
        "at < width",
        "ops/test_noise_block.py::test_no_token_and_tokens_of_other_shards_give_rows_of_zero",
    ),
    Mutant(
        "kernel_decodes_behind_a_gap", "kernels/dspark_kernels/triton/decode_block_table.py",
        "tl.where(at < count, value // divisor, -1)",
        "tl.where(value >= 0, value // divisor, -1)",
        "ops/test_decode_block_table.py::test_page_0_is_a_page_and_nothing_counts_behind_the_first_gap",
    ),
    Mutant(
        "kernel_sees_the_last_tiles_gap_alone", "kernels/dspark_kernels/triton/decode_block_table.py",
        "tl.minimum(first_absent, tl.where((value < 0) & (at < width), at, width))",
        "tl.where((value < 0) & (at < width), at, width).to(tl.int64)",
        "ops/test_decode_block_table.py::test_rows_wider_than_one_tile_of_the_kernel[1025]",
    ),
    Mutant(
        "kernel_hands_on_drafts_of_dummies", "kernels/dspark_kernels/triton/step_commit.py",
        "(slot >= 0) & (anchor >= 0)",
        "(anchor >= 0)",
        "ops/test_step_commit.py::test_a_dummy_row_in_any_place_leaves_slot_0_to_its_owner[1]",
    ),
    Mutant(
        "kernel_commits_drafts_by_row", "kernels/dspark_kernels/triton/step_commit.py",
        "state_drafts_ptr + slot * DRAFTS",
        "state_drafts_ptr + row * DRAFTS",
        "ops/test_step_commit.py::test_slots_in_any_order[9-7]",
    ),
    Mutant(
        "low_m_last_weight_row_is_past_the_end", "kernels/dspark_kernels/triton/low_m_linear.py",
        "here_rows % TILE_N, out_features - 1)",
        "here_rows % TILE_N, out_features)",
        "ops/test_low_m_linear.py::test_sizes_at_and_behind_the_tiles[33-17]",
    ),
    Mutant(
        "low_m_values_behind_the_inner_dimension_count", "kernels/dspark_kernels/triton/low_m_linear.py",
        "here = lanes < in_features - k",
        "here = lanes <= in_features - k",
        "ops/test_low_m_linear.py::test_sizes_at_and_behind_the_tiles[33-17]",
    ),
    Mutant(
        "low_m_splits_start_one_block_late", "kernels/dspark_kernels/triton/low_m_linear.py",
        "first = (blocks * split // SPLITS) * TILE_K",
        "first = ((blocks * split + 1) // SPLITS) * TILE_K",
        "ops/test_low_m_linear.py::test_more_splits_than_blocks_and_uneven_ones[5]",
    ),
    Mutant(
        "low_m_counters_stay", "kernels/dspark_kernels/triton/low_m_linear.py",
        "tl.store(arrivals_ptr + tile, 0)",
        "pass",
        "ops/test_low_m_linear.py::test_one_workspace_serves_launches_of_all_sizes",
    ),
    Mutant(
        "low_m_last_arrival_but_one_finishes", "kernels/dspark_kernels/triton/low_m_linear.py",
        "finish = arrived == SPLITS - 1",
        "finish = arrived == SPLITS - 2",
        "ops/test_low_m_linear.py::test_more_splits_than_blocks_and_uneven_ones[5]",
    ),
    Mutant(
        "low_m_last_split_is_left_out", "kernels/dspark_kernels/triton/low_m_linear.py",
        "tl.static_range(1, SPLITS)",
        "tl.static_range(1, SPLITS - 1)",
        "ops/test_low_m_linear.py::test_more_splits_than_blocks_and_uneven_ones[5]",
    ),
    Mutant(
        "low_m_squares_of_all_rows_are_one_sum", "kernels/dspark_kernels/triton/low_m_linear.py",
        "tl.where(rows[:, None] == rows[None, :], squares, 0.0)",
        "squares",
        "ops/test_low_m_linear.py::test_row_counts[torch.float32-2-x_first]",
    ),
    Mutant(
        "low_m_next_norm_weight_is_this_one", "kernels/dspark_kernels/triton/low_m_linear.py",
        "ahead = lanes + k + TILE_K",
        "ahead = lanes + k",
        "ops/test_low_m_linear.py::test_row_counts[torch.float32-2-x_first]",
    ),
    Mutant(
        "low_m_sums_are_not_scaled", "kernels/dspark_kernels/triton/low_m_linear.py",
        "product *= tl.rsqrt(square_sum / in_features + eps)[:, None]",
        "product *= 1.0",
        "ops/test_low_m_linear.py::test_every_form_keeps_the_bound[torch.float32-gate_up+norm-whole]",
    ),
    Mutant(
        "low_m_workspace_for_the_most_rows_alone", "dspark_model/ops/low_m_linear.py",
        "for tile_m in (16, 32, 64, 128):",
        "for tile_m in (16,):",
        "ops/test_low_m_linear.py::test_a_workspace_for_products_serves_them_and_fewer_rows",
    ),
    Mutant(
        "low_m_gate_and_up_are_exchanged", "kernels/dspark_kernels/triton/low_m_linear.py",
        "gate, up = _halves(product, TILE_M, TILE_N)",
        "up, gate = _halves(product, TILE_M, TILE_N)",
        "ops/test_low_m_linear.py::test_every_form_keeps_the_bound[torch.float32-gate_up-whole]",
    ),
    Mutant(
        "low_m_up_rows_have_the_gates_stride", "kernels/dspark_kernels/triton/low_m_linear.py",
        "weight_rows * (up_row_stride - weight_row_stride)",
        "weight_rows * 0",
        "ops/test_low_m_linear.py::test_rows_of_gate_and_up_lie_apart_differently",
    ),
    Mutant(
        "low_m_squares_of_some_neighbours_are_left_out", "kernels/dspark_kernels/triton/low_m_linear.py",
        "squares += tl.sum(",
        "squares = tl.sum(",
        "ops/test_low_m_linear.py::test_every_form_keeps_the_bound[torch.float32-norm-whole-weight_first]",
    ),
    Mutant(
        "low_m_asks_ahead_at_every_block", "kernels/dspark_kernels/triton/low_m_linear.py",
        "tl.where(k == ask_at, sizes, 0)",
        "sizes",
        "ops/test_l2_prefetch.py::test_a_product_asks_for_every_piece_once[False-7-1]",
    ),
    Mutant(
        "low_m_asks_ahead_in_front_of_its_first_block", "kernels/dspark_kernels/triton/low_m_linear.py",
        "tl.maximum(last - pieces_left * TILE_K, first)",
        "last - pieces_left * TILE_K",
        "ops/test_l2_prefetch.py::test_a_product_asks_for_every_piece_once[False-7-1048576]",
    ),
    Mutant(
        "low_m_programs_of_a_split_ask_for_the_same", "kernels/dspark_kernels/triton/low_m_linear.py",
        "split * tl.num_programs(0) + tile, tl",
        "split + tile, tl",
        "ops/test_l2_prefetch.py::test_a_product_asks_for_every_piece_once[False-7-2]",
    ),
    Mutant(
        "l2_shares_are_rounded_down", "kernels/dspark_kernels/triton/l2_prefetch.py",
        "tl.cdiv(num_pieces, programs)",
        "num_pieces // programs",
        "ops/test_l2_prefetch.py::test_the_op_asks_for_every_piece_once[129]",
    ),
    Mutant(
        "l2_pieces_of_the_next_share_too", "kernels/dspark_kernels/triton/l2_prefetch.py",
        "(lane < share) & ",
        "",
        "ops/test_l2_prefetch.py::test_the_op_asks_for_every_piece_once[129]",
    ),
    Mutant(
        "l2_own_bytes_are_asked_for_ahead", "dspark_model/ops/l2_prefetch.py",
        "first, last = max(end, asked), end + distance",
        "first, last = asked, end + distance",
        "ops/test_l2_prefetch.py::test_launches_ask_for_each_byte_once_and_far_enough_ahead[4096-False]",
    ),
    Mutant(
        "l2_the_first_launch_asks_for_less", "dspark_model/ops/l2_prefetch.py",
        "        if index == 0 and not cyclic:\n            asked = end\n",
        "",
        "ops/test_l2_prefetch.py::test_launches_ask_for_each_byte_once_and_far_enough_ahead[60000-False]",
    ),
)  # fmt: skip
