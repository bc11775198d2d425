"""A needle in the context: one row decides what the block sees, wherever it lies, on every path."""

import importlib.util

import pytest
import torch
from switch_matrix import Duel, make_worker, small_model, switches_of, with_switches

from dspark_model import ContextChunk, StepInput, ops
from dspark_model.serving_config import Layout
from dspark_model.testing import assert_bitwise_equal

ON_DEVICE = torch.cuda.is_available()
DEVICE = "cuda" if ON_DEVICE else "cpu"
# heads, kv_lora_rank, rotary, page size, context, dtype
SIZES = (8, 512, 64, 32, 5000, torch.bfloat16) if ON_DEVICE else (2, 32, 16, 16, 300, torch.float32)
BACKENDS = ["torch", "triton"] + (["cute"] if ON_DEVICE and importlib.util.find_spec("cutlass") else [])
PLACES = ["first", "end_of_page", "start_of_page", "middle", "last", "block"]


def place_of(name: str, page: int, context: int) -> int:
    places = {"first": 0, "end_of_page": page - 1, "start_of_page": page, "middle": context // 2 + 1, "last": context - 1}
    return places.get(name, context + 3)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_returns_the_value_of_the_only_row_that_matches(backend, place):
    heads, latent, rotary, page, context, dtype = SIZES
    width, block = latent + rotary, 7
    pages = -(-(context + block) // page)
    pool = (torch.randn(pages, page, width, device=DEVICE) * 0.1).to(dtype)
    table = torch.randperm(pages, device=DEVICE).int()[None]
    needle = place_of(place, page, context)
    row = (torch.randn(width, device=DEVICE).sign() * 1.5).to(dtype)
    pool[table[0, needle // page], needle % page] = row
    queries = row.expand(1, block, heads, width).contiguous()
    lens = torch.tensor([context], device=DEVICE)
    out = ops.block_attention(queries, pool, table, lens, lens + block, kv_lora_rank=latent, softmax_scale=0.5,
                              max_seq_len=context + block, backend=backend)  # fmt: skip
    torch.testing.assert_close(out, row[:latent].expand_as(out), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("place", [0, 7, 8, 17])
def test_a_changed_row_of_the_context_changes_the_drafts_logits_alike_on_every_path(place):
    """18 rows of context in pages of 8: plain and with all switches, with the needle and without it."""
    profile = "triton"
    model = small_model(device=DEVICE)
    runtimes = with_switches((), profile), with_switches(switches_of(profile), profile)
    hidden = torch.randn(18, model.config.context_width, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    seen = {}
    for needle in (False, True):
        duel = Duel(*(make_worker(model, runtime, Layout.PAGE_MAJOR) for runtime in runtimes))
        rows = hidden.clone()
        rows[place] *= -8 if needle else 1
        outputs = []
        for worker in (duel.plain, duel.fast):
            worker.admit("a")
            chunk = ContextChunk(request_id="a", target_hidden=rows, start_position=0, anchor=5)
            outputs.append(worker.step(StepInput(context=[chunk]), trace=True))
        seen[needle] = outputs[0].trace.draft.base_logits
        assert_bitwise_equal(outputs[1].trace.draft.base_logits, seen[needle], "logits")
        assert_bitwise_equal(outputs[1].next_tokens, outputs[0].next_tokens, "drafts")
    assert (seen[True] - seen[False]).abs().amax(-1).min() > 1e-3, "some row of the block does not see the needle"
