"""Faults put into the package on purpose, each with a test that has to notice it.

A mutant is a file of `dspark_model` or `kernels`, a text that stands in it exactly once, what replaces it, the test's id, and
what that test needs: None, "cutlass" for nvidia-cutlass-dsl, "gpu" for a CUDA device and that package.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    test: str
    needs: str | None = None


MUTANTS = (
    Mutant(
        "rejected_rows_are_stored", "dspark_model/step_run.py",
        "self._store_rows(row_latents, projected.row_start, rows.num_committed[here], self._slots[here])",
        "self._store_rows(row_latents, projected.row_start, rows.num_committed[here] * 0 + 8, self._slots[here])",
        "test_step_modes.py::test_only_committed_rows_are_stored[3]",
    ),
    Mutant(
        "row_position_off_by_one", "dspark_model/ops/context_rows.py",
        "positions = start[:, None] + torch",
        "positions = start[:, None] + 1 + torch",
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
        "kernel_commits_ids_outside_the_vocabulary", "kernels/dspark_kernels/triton/step_prologue.py",
        "stands = live & (final >= 0) & (final < vocab_size)",
        "stands = live & (final >= 0)",
        "ops/test_step_prologue.py::test_a_verdict_that_ends_outside_the_vocabulary_is_void[3-8]",
    ),
    Mutant(
        "kernel_takes_pages_that_are_not_there", "kernels/dspark_kernels/triton/decode_block_table.py",
        "absent = (value < 0) | (value // divisor >= limit)",
        "absent = value < 0",
        "ops/test_decode_block_table.py::test_pages_past_the_limit_are_none",
    ),
    Mutant(
        "kernel_refreshes_other_slots", "kernels/dspark_kernels/triton/decode_block_table.py",
        "slot = tl.load(slots_ptr + row) if SLOTS else row",
        "slot = row",
        "ops/test_decode_block_table.py::test_refresh_writes_the_rows_of_its_slots[9-6]",
    ),
    Mutant(
        "kernel_turns_queries_backwards", "kernels/dspark_kernels/triton/absorb_queries.py",
        "(even * cos - odd * sin)",
        "(even * cos + odd * sin)",
        "ops/test_absorb_queries.py::test_matches_float64[1-7-3-16-32-8-torch.float32-1e-05-triton]",
    ),
    Mutant(
        "kernel_leaves_out_the_end_of_the_depth", "kernels/dspark_kernels/triton/per_head_product.py",
        "for start in range(0, DEPTH, DEPTH_TILE):",
        "for start in range(0, DEPTH_TILE, DEPTH_TILE):",
        "ops/test_per_head_product.py::test_every_head_has_its_own_matrix[2-7-3-0-130-40-False-triton]",
    ),
    Mutant(
        "kernel_rotates_dummies_of_slot_0", "kernels/dspark_kernels/triton/context_rows.py",
        "tl.load(context_lens_ptr + slot, mask=slot >= 0, other=0)",
        "tl.load(context_lens_ptr + tl.maximum(slot, 0))",
        "ops/test_context_rows.py::test_dummy_rows_start_at_0_and_read_no_slot",
    ),
    Mutant(
        "kernel_norms_by_the_padded_width", "kernels/dspark_kernels/triton/rms_norm.py",
        "tl.sum(x * x, 0) / WIDTH",
        "tl.sum(x * x, 0) / LANES",
        "ops/test_rms_norm.py::test_matches_float64_to_one_rounding[1e-06-(3, 7)-triton-torch.float32]",
    ),
    Mutant(
        "kernel_sees_the_last_tiles_gap_alone", "kernels/dspark_kernels/triton/decode_block_table.py",
        "tl.minimum(first_absent, tl.where(absent & (at < used), at, used))",
        "tl.where(absent & (at < used), at, used).to(tl.int64)",
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
        "merged_rows_in_the_other_order", "dspark_model/layers.py",
        "torch.cat((q, kv))",
        "torch.cat((kv, q))",
        "test_merged_qkv_a.py::test_the_product_is_that_of_both_layers[1-torch.float32]",
    ),
    Mutant(
        "merged_latents_go_stale", "dspark_model/layers.py",
        "self._qkv_a_weight[q.shape[0] :] = kv",
        "pass",
        "test_merged_qkv_a.py::test_later_workers_find_the_joined_weights_and_take_over_changes",
    ),
    Mutant(
        "merged_projects_again", "dspark_model/modeling.py",
        "attn.kv_a_proj_with_mqa(y) if kv is None else kv",
        "attn.kv_a_proj_with_mqa(y)",
        "test_merged_qkv_a.py::test_a_step_computes_one_product_and_agrees_with_the_reference",
    ),
    Mutant(
        "moved_weights_are_freed_under_a_captured_step", "dspark_model/worker.py",
        "self._weights = [parameter.detach() for parameter in model.parameters()]",
        "self._weights = []",
        "test_merged_qkv_a.py::test_weights_that_a_captured_step_reads_outlive_a_worker_that_joins_them",
    ),
    Mutant(
        "a_step_takes_joined_weights_that_are_not_there", "dspark_model/worker.py",
        'and not own.takes("merged_qkv_a")',
        'and False',
        "test_merged_qkv_a.py::test_a_step_cannot_ask_for_joined_weights_that_are_not_there",
    ),
    Mutant(
        "direct_write_ignores_its_backend", "dspark_model/runtime.py",
        'return surroundings.backends["latent_norm_rope"][backend]',
        'return None',
        "test_fast_paths.py::test_the_direct_write_runs_where_its_backend_and_the_pool_allow[None-triton-obstacle2]",
    ),
    Mutant(
        "cute_on_any_device", "dspark_model/fast_paths.py",
        "build_architecture(torch.cuda.get_device_capability(device))",
        "pass",
        "test_fast_paths.py::test_cute_without_a_device_or_a_build",
    ),
    Mutant(
        "direct_write_wraps_at_32_bits", "kernels/dspark_kernels/triton/latent_norm_rope.py",
        "tl.load(pages_ptr + row) * out_page_stride",
        "(tl.load(pages_ptr + row) * out_page_stride).to(tl.int32)",
        "ops/test_latent_norm_rope.py::test_distances_past_2_to_the_31_do_not_wrap",
    ),
    Mutant(
        "cute_loads_value_by_value", "kernels/dspark_kernels/cute/latent_norm_rope.py",
        "assumed_align=count * size if aligned else size",
        "assumed_align=size",
        "test_cute_compile.py::test_both_forms_compile_to_machine_code[sm_90a]",
        needs="cutlass",
    ),
    Mutant(
        "cute_sums_the_pool_form_in_another_order", "kernels/dspark_kernels/cute/latent_norm_rope.py",
        "math.gcd(WIDEST // self.dtype.itemsize, self.latent, self.rotary)",
        "math.gcd(2 if self.pool else WIDEST // self.dtype.itemsize, self.latent, self.rotary)",
        "test_cute_compile.py::test_both_forms_compile_to_machine_code[sm_90a]",
        needs="cutlass",
    ),
    Mutant(
        "cute_weighs_with_layer_0", "kernels/dspark_kernels/cute/latent_norm_rope.py",
        "weight = weight + layer * facts.latent",
        "weight = weight + layer * 0",
        "ops/test_latent_norm_rope.py::test_matches_float64[3-7-512-64-cute-torch.float32-1e-06]",
        needs="gpu",
    ),
    Mutant(
        "cute_turns_the_other_way", "kernels/dspark_kernels/cute/latent_norm_rope.py",
        "-(odd * sin[i])",
        "odd * sin[i]",
        "ops/test_latent_norm_rope.py::test_matches_float64[1-5-512-64-cute-torch.float32-1e-06]",
        needs="gpu",
    ),
    Mutant(
        "cute_forgets_eps", "kernels/dspark_kernels/cute/latent_norm_rope.py",
        "cutlass.Float32(1.0 / facts.latent), eps)",
        "cutlass.Float32(1.0 / facts.latent), eps * 0)",
        "ops/test_latent_norm_rope.py::test_matches_float64[1-5-7-2-cute-torch.float32-1e-06]",
        needs="gpu",
    ),
    Mutant(
        "cute_stores_rows_that_are_not_owned", "kernels/dspark_kernels/cute/latent_norm_rope.py",
        "stored = (owned + row).load() != 0",
        "stored = cutlass.Boolean(True)",
        "ops/test_latent_norm_rope.py::test_the_direct_store_is_the_plain_kernel_and_a_store_behind_it[cute-4-512-64-scattered-layer_major]",
        needs="gpu",
    ),
    Mutant(
        "cute_turns_pages_into_rows", "kernels/dspark_kernels/cute/latent_norm_rope.py",
        "(pages + row).load() * out_page_stride",
        "(pages + row).load() * out_row_stride",
        "ops/test_latent_norm_rope.py::test_the_direct_store_is_the_plain_kernel_and_a_store_behind_it[cute-4-512-64-reversed-page_major]",
        needs="gpu",
    ),
    Mutant(
        "cute_wraps_at_32_bits", "kernels/dspark_kernels/cute/latent_norm_rope.py",
        "(pages + row).load() * out_page_stride",
        "cutlass.Int64(cutlass.Int32((pages + row).load() * out_page_stride))",
        "ops/test_latent_norm_rope.py::test_the_last_page_of_a_pool_of_more_than_2_to_the_31_values[cute-layer_major]",
        needs="gpu",
    ),
    Mutant(
        "layers_do_not_join", "dspark_model/modeling.py",
        "paths.side.join()",
        "pass",
        "test_streams_and_graphs.py::test_split_streams_wait_for_each_other[plain-LateSide]",
        needs="gpu",
    ),
    Mutant(
        "side_stream_does_not_wait", "dspark_model/streams.py",
        "self._stream.wait_stream(torch.cuda.current_stream())",
        "pass",
        "test_streams_and_graphs.py::test_split_streams_wait_for_each_other[plain-LateMain]",
        needs="gpu",
    ),
    Mutant(
        "low_m_last_weight_row_is_past_the_end", "kernels/dspark_kernels/triton/low_m_linear.py",
        "tl.minimum(columns, out_features - 1)",
        "tl.minimum(columns, out_features)",
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
        "ops/test_low_m_linear.py::test_row_counts[torch.float32-2]",
    ),
    Mutant(
        "low_m_next_norm_weight_is_this_one", "kernels/dspark_kernels/triton/low_m_linear.py",
        "ahead = lanes + k + TILE_K",
        "ahead = lanes + k",
        "ops/test_low_m_linear.py::test_row_counts[torch.float32-2]",
    ),
    Mutant(
        "low_m_up_is_not_normed", "kernels/dspark_kernels/triton/low_m_linear.py",
        "up_product *= inverse",
        "pass",
        "ops/test_low_m_linear.py::test_every_form_keeps_the_bound[torch.float32-gate_up+norm-whole]",
    ),
    Mutant(
        "low_m_workspace_for_the_most_rows_alone", "dspark_model/ops/low_m_linear.py",
        "for tile_m in (16, 32, 64, 128):",
        "for tile_m in (16,):",
        "ops/test_low_m_linear.py::test_a_workspace_for_products_serves_them_and_fewer_rows",
    ),
)  # fmt: skip
