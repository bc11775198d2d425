"""Faults put into the package on purpose, each with a test that has to notice it.

A mutant is a file of `dspark_model`, a text that stands in it exactly once, what replaces it, and the test's id.
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
        "rejected_rows_are_stored", "step_run.py",
        "self._store_rows(row_latents, self._row_lens, rows.num_committed[here], self._slots[here])",
        "self._store_rows(row_latents, self._row_lens, rows.num_committed[here] * 0 + 8, self._slots[here])",
        "test_step_modes.py::test_only_committed_rows_are_stored[3]",
    ),
    Mutant(
        "row_position_off_by_one", "step_run.py",
        "positions = self._row_lens[:, None] + torch",
        "positions = self._row_lens[:, None] + 1 + torch",
        "test_step_modes.py::test_verdicts_in_both_layouts[tokens-layer_major]",
    ),
    Mutant(
        "chunk_index_is_local", "step_run.py",
        "positions = chunk.start_position + torch.arange(context.shape[0]",
        "positions = torch.arange(context.shape[0]",
        "test_worker_limits.py::test_a30_chunks_store_what_one_piece_stores[pieces1]",
    ),
    Mutant(
        "dummy_rows_own_pages", "ops/step_prologue.py",
        "drafting = live & (anchors >= 0)",
        "drafting = anchors >= 0",
        "test_worker_pool.py::test_a36_padding_rows_with_nan_touch_no_page[False-tokens]",
    ),
    Mutant(
        "draft_past_the_limit", "ops/step_prologue.py",
        "below_limit = tables.max_context[at] - advance.context_lens - 1",
        "below_limit = tables.max_context[at] - advance.context_lens",
        "test_worker_limits.py::test_a28_block_at_the_end_of_the_context[3-True]",
    ),
    Mutant(
        "rows_without_a_page_are_written", "ops/row_addresses.py",
        "owned = (rows >= 0) & (index < num_pages[:, None])",
        "owned = rows >= 0",
        "test_step_external.py::test_block_is_cut_where_the_pages_end[12-True]",
    ),
    Mutant(
        "block_is_not_cut", "ops/block_fixup.py",
        "seq_lens = torch.minimum(context_lens + rows, pages_live * page_size)",
        "seq_lens = context_lens + rows",
        "test_step_external.py::test_block_is_cut_where_the_pages_end[12-True]",
    ),
    Mutant(
        "no_nan_guard", "ops/block_attention.py",
        "keys = torch.where(used[..., None], keys, 0.0)",
        "pass",
        "test_worker_pool.py::test_a38_pool_of_nan_at_every_length_of_two_pages[8-False]",
    ),
    Mutant(
        "causal_mask_hides_the_row_itself", "ops/block_attention.py",
        "(index <= last_seen[..., None])",
        "(index < last_seen[..., None])",
        "test_step_modes.py::test_variant_against_the_reference[causal]",
    ),
    Mutant(
        "plain_rule_reads_slot_zero", "slots.py",
        "slice(1, num_drafts + 1)",
        "slice(0, num_drafts)",
        "test_step_modes.py::test_variant_against_the_reference[dflash]",
    ),
    Mutant(
        "no_pages_for_the_block", "step_plan.py",
        "length + (self._block_rows if index in drafting else 0)",
        "length",
        "test_worker_pool.py::test_a34_prompt_that_fills_its_pages[16]",
    ),
    Mutant(
        "slot_is_not_reset", "worker_state.py",
        "            tensor[slot] = 0\n",
        "            pass\n",
        "test_worker_lifecycle.py::test_a59_a_released_slot_is_blank[False]",
    ),
    Mutant(
        "failed_step_keeps_its_pages", "worker.py",
        "self.pool.cancel_step(before)",
        "pass",
        "test_worker_inputs.py::test_step_that_fails_in_the_middle_can_be_sent_again[RuntimeError-layer1]",
    ),
    Mutant(
        "prefix_tail_is_not_copied", "kv_pool.py",
        "self._copy_rows(prefix.tail_page, self._pages[slot][-1], prefix.num_tokens % self.config.page_size)",
        "pass",
        "test_step_modes.py::test_prefix_serves_a_request_after_its_source[source-21]",
    ),
    Mutant(
        "prefix_released_twice", "kv_pool.py",
        "        self._check_prefix(handle)\n        self._prefixes.remove(handle)\n",
        "",
        "test_kv_pool.py::test_prefix_cannot_be_released_twice_or_used_after",
    ),
    Mutant(
        "huge_page_number_wraps", "kv_pool.py",
        "torch.where(named, block_table, -1).max().item() // self.divisor",
        "table.max().item()",
        "test_kv_pool.py::test_external_table_is_refused[table5-names page 4294967296, but the pool has 40]",
    ),
    Mutant(
        "rest_of_an_unchecked_draft", "verify.py",
        "use_rest = (accepted < num_drafts) & (rest.sum(-1) > 0)",
        "use_rest = rest.sum(-1) > 0",
        "test_verify.py::test_a55_unchecked_drafts_are_no_evidence",
    ),
    Mutant(
        "draws_follow_the_chunking", "step_run.py",
        "position = chunk.start_position + chunk.target_hidden.shape[0]",
        "position = chunk.start_position",
        "test_worker_lifecycle.py::test_a55_draws_depend_on_seed_and_position_alone",
    ),
    Mutant(
        "packed_layers_drop_their_bias", "packing.py",
        "return ops.packed_linear(x, self.packed, self.bias)",
        "return ops.packed_linear(x, self.packed)",
        "test_packing.py::test_layers_are_replaced_at_any_depth_and_compute_the_same",
    ),
    Mutant(
        "subclasses_of_linear_are_packed", "packing.py",
        "if type(child) is nn.Linear and",
        "if isinstance(child, nn.Linear) and",
        "test_packing.py::test_layers_are_replaced_at_any_depth_and_compute_the_same",
    ),
)  # fmt: skip
