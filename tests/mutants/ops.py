"""Mutants of the ops: references, checks and choices."""

from mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "row_position_off_by_one", "dspark_model/ops/context_rows.py",
        "positions = start[:, None] + torch",
        "positions = start[:, None] + 1 + torch",
        "test_step_modes.py::test_verdicts_in_both_layouts[tokens-layer_major]",
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
        "count_of_committed_rows_is_off_by_one", "dspark_model/ops/context_addresses.py",
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
        "fp8_scale_is_too_small", "dspark_model/ops/fp8_rows.py",
        "exponent - 9 + (mantissa > 0.875)",
        "exponent - 9",
        "ops/test_fp8_rows.py::test_the_scale_changes_just_above_448[0]",
    ),
    Mutant(
        "fp8_rows_hide_what_is_not_finite", "dspark_model/ops/fp8_rows.py",
        "torch.where(finite, _power_of_two(exponent), torch.nan)",
        "_power_of_two(exponent)",
        "ops/test_fp8_rows.py::test_a_row_that_is_not_finite_comes_back_as_nan[0-nan]",
    ),
    Mutant(
        "low_m_workspace_for_the_most_rows_alone", "dspark_model/ops/low_m_linear.py",
        "for tile_m in (16, 32, 64, 128):",
        "for tile_m in (16,):",
        "ops/test_low_m_linear.py::test_a_workspace_for_products_serves_them_and_fewer_rows",
    ),
    Mutant(
        "between_adds_the_first_residual_twice", "dspark_model/ops/between_attentions.py",
        "low_m_linear(gated, after.down, residual=h)",
        "low_m_linear(gated, after.down, residual=residual)",
        "ops/test_between_attentions.py::test_reference_matches_float64[1-True-torch.float32]",
    ),
    Mutant(
        "between_takes_the_queries_norm_as_it_is", "dspark_model/ops/before_attention.py",
        '"q_norm": (before.q_norm.weight, (q_rank,)),',
        "",
        "ops/test_between_attentions.py::test_weights_of_the_next_layer_that_do_not_fit_are_refused[norm dtype]",
    ),
    Mutant(
        "between_takes_sizes_of_nothing", "dspark_model/ops/between_workspace.py",
        "(size := getattr(sizes, name)) < 1 or size % step",
        "(size := getattr(sizes, name)) % step",
        "ops/test_between_attentions.py::test_refusals_name_the_reason",
    ),
    Mutant(
        "context_into_takes_layers_of_other_pools", "dspark_model/ops/context_into.py",
        "f\"layer_views[{i}]\": (view, (*view.shape[:2], latent))",
        "f\"layer_views[{i}]\": (view, view.shape)",
        "ops/test_context_into.py::test_what_does_not_fit_is_refused",
    ),
    Mutant(
        "into_takes_heads_of_any_size", "dspark_model/ops/between_workspace.py",
        "if nope != NOPE or sizes",
        "if sizes",
        "ops/test_into_attention.py::test_what_does_not_fit_is_refused",
    ),
    Mutant(
        "into_takes_latents_without_their_turn", "dspark_model/ops/into_attention.py",
        "        _check_latents(into, rows, latent, latent - rotary, like)",
        "        pass",
        "ops/test_into_attention.py::test_what_does_not_fit_is_refused",
    ),
    Mutant(
        "chain_in_registers_for_rows_off_16_bytes", "dspark_model/ops/markov_chain.py",
        "if chunked and cute_chain_refusal(batch, vocab, rank, dtype, device) is None:",
        "if cute_chain_refusal(batch, vocab, rank, dtype, device) is None:",
        "ops/test_markov_chain.py::test_few_requests_have_rows_in_registers[1-20480-256-128-10-4]",
    ),
    Mutant(
        "attention_tiles_follow_the_batch", "dspark_model/ops/block_attention.py",
        "choose_tuning(block * heads,",
        "choose_tuning(batch * block * heads,",
        "ops/test_block_attention_kernel.py::test_no_launch_shape_follows_padding_or_a_bound",
    ),
    Mutant(
        "reference_takes_the_request_for_its_slot", "dspark_model/ops/block_attention.py",
        "page_table = page_table[slots.clamp(min=0)]  # what",
        "page_table = page_table[: len(slots)]  # what",
        "ops/test_block_attention.py::test_table_of_all_slots",
    ),
    Mutant(
        "values_are_multiplied_by_any_matrices", "dspark_model/ops/block_attention.py",
        "value_weights.dim() != 3 or value_weights.shape[:2] != (heads, kv_lora_rank)",
        "value_weights.dim() != 3",
        "ops/test_block_attention.py::test_matrices_that_do_not_fit_are_refused[heads]",
    ),
    Mutant(
        "page_of_no_key_is_looked_up", "dspark_model/ops/block_attention.py",
        "pages = torch.where(held, pages, 0)",
        "pages = pages.clamp(min=0)",
        "ops/test_block_attention.py::test_table_of_all_slots",
    ),
    Mutant(
        "upper_triangle_has_its_diagonal", "dspark_model/ops/attention_fixup.py",
        "(offsets > offsets[:, None])",
        "(offsets >= offsets[:, None])",
        "ops/test_block_attention_backends.py::test_upper_triangle_completes_a_causal_result[16-4]",
    ),
    Mutant(
        "upper_triangle_of_a_cut_block", "dspark_model/ops/attention_fixup.py",
        "behind = present[:, None, :] & (offsets",
        "behind = (present | True)[:, None, :] & (offsets",
        "ops/test_block_attention_backends.py::test_upper_triangle_completes_a_causal_result[16-1]",
    ),
    Mutant(
        "flashinfer_loses_the_last_page", "dspark_model/ops/attention_flashinfer.py",
        "counts = (lens + page_size - 1) // page_size",
        "counts = lens // page_size",
        "ops/test_block_attention_backends.py::test_flashinfer_gets_the_pages_of_requests_with_keys[False]",
    ),
    Mutant(
        "flashinfer_gets_requests_without_keys", "dspark_model/ops/attention_flashinfer.py",
        "live = (seq_lens > 0)",
        "live = (seq_lens >= 0)",
        "ops/test_block_attention_backends.py::test_flashinfer_gets_the_pages_of_requests_with_keys[False]",
    ),
    Mutant(
        "window_is_one_row_longer", "dspark_model/ops/block_attention.py",
        "(index >= context_lens[:, None] - window)",
        "(index >= context_lens[:, None] - window - 1)",
        "ops/test_block_attention.py::test_window_hides_older_context_and_never_uses_its_pages[False-3]",
    ),
)  # fmt: skip
