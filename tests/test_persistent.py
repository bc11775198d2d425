"""`gemm=persistent`: which blocks have one call between two attentions, of what, and that the layers are the same model.

The kernel is for Hopper; here the calls go to the op's torch form.
"""

import dataclasses
import gc
from types import SimpleNamespace
from weakref import WeakValueDictionary

import pytest
import torch
from switch_matrix import make_worker, small_model

from dspark_model import ContextChunk, GenerationRows, RuntimeConfig, StepInput, ops
from dspark_model.low_m import LowMPath
from dspark_model.modeling import BlockContext, BlockPaths
from dspark_model.ops.before_attention import _check as _check_before
from dspark_model.ops.between_attentions import _check
from dspark_model.ops.between_workspace import MAX_BETWEEN_ROWS
from dspark_model.persistent import PersistentPath
from dspark_model.serving_config import Layout

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernel has these steps, in test_switch_matrix")
PLAIN = dataclasses.replace(RuntimeConfig.plain(), merged_qkv_a="on")


@pytest.fixture
def calls(monkeypatch) -> list[tuple[int, bool, bool]]:
    """Rows of each call, whether a layer follows, and whether it is early."""
    made, torch_form, torch_front, torch_context = [], ops.between_attentions, ops.before_attention, ops.context_kv

    def between_attentions(values, residual, after, before, *, backend, workspace, early):
        assert backend == "cute"
        sizes = _check(values, residual, after, before)
        front = {"layers": 0} if before is not None else dict.fromkeys(("q_rank", "width", "queries", "heads", "layers"), 0)
        assert sizes == dataclasses.replace(workspace, **front)
        for tensor in (values, residual):
            assert tensor.is_contiguous()
        made.append((values.shape[0], before is not None, early))
        return torch_form(values, residual, after, before)

    def before_attention(hidden, before, *, backend, workspace, early, context):
        assert backend == "cute" and hidden.is_contiguous()
        sizes = dataclasses.replace(workspace, values=0, intermediate=0, layers=0 if context is None else workspace.layers)
        assert _check_before(hidden, before, context) == sizes
        return torch_front(hidden, before, context=context)

    def context_kv(rows, weight, *, backend, workspace):
        assert (
            backend == "cute"
            and rows.is_contiguous()
            and weight.shape[0] == workspace.layers * (workspace.width - workspace.q_rank)
        )
        return torch_context(rows, weight)

    for name in ("merged_qkv_a_obstacle", "persistent_obstacle"):
        monkeypatch.setattr(f"dspark_model.fast_paths.{name}", lambda model: None)
    monkeypatch.setattr("dspark_model.persistent.BetweenWorkspace", lambda sizes, device: sizes)
    monkeypatch.setattr(ops, "between_attentions", between_attentions)
    monkeypatch.setattr(ops, "before_attention", before_attention)
    monkeypatch.setattr(ops, "context_kv", context_kv)
    return made


def first_blocks(model, runtime: RuntimeConfig, requests: int) -> torch.Tensor:
    """Logits of the first blocks of requests of 3, 10, 17, ... context rows."""
    worker = make_worker(model, runtime, Layout.PAGE_MAJOR)
    draw, chunks = torch.Generator().manual_seed(3), []
    for request in range(requests):
        worker.admit(request)
        hidden = torch.randn(3 + 7 * request, model.config.context_width, generator=draw).to(model.dtype)
        chunks.append(ContextChunk(request_id=request, target_hidden=hidden, start_position=0, anchor=5 + request))
    return worker.step(StepInput(context=chunks), trace=True).trace.draft.base_logits


@pytest.mark.parametrize("requests", [1, 2])
def test_layers_are_the_plain_models(calls, requests):
    model = small_model()
    rows, layers = requests * model.config.block_rows(7), len(model.layers)
    wanted = first_blocks(model, PLAIN, requests)
    assert not calls
    ours = first_blocks(model, dataclasses.replace(PLAIN, gemm="persistent"), requests)
    assert rows <= MAX_BETWEEN_ROWS and layers > 1
    assert [(count, follows) for count, follows, _ in calls] == [(rows, True)] * (layers - 1) + [(rows, False)]
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)


def test_launches_make_queries_over_latents_for_heads_that_they_take(calls):
    """The same model by `between_attentions`' torch form, queries over latents by its absorption."""
    for nope, absorbs in ((128, True), (64, False)):
        calls.clear()
        model = small_model(qk_nope_head_dim=nope, qk_rope_head_dim=192 - nope, qk_head_dim=192, kv_lora_rank=64)
        ours = first_blocks(model, dataclasses.replace(PLAIN, gemm="persistent"), 1)
        assert len(calls) == len(model.layers) and PersistentPath(model, may_launch_early=False)._absorbs == absorbs
        torch.testing.assert_close(ours, first_blocks(model, PLAIN, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("overlap", ["off", "require"])
def test_the_layers_store_the_context_of_generation_rows(calls, monkeypatch, overlap):
    """As on a GPU with a direct write: no row of them is stored before, and pool and drafts are the plain model's."""
    model = small_model(qk_nope_head_dim=128, qk_rope_head_dim=64, qk_head_dim=192, kv_lora_rank=64)
    monkeypatch.setattr("dspark_model.persistent._EARLY", WeakValueDictionary())  # workers of other tests
    monkeypatch.setattr(PersistentPath, "_stores_into", lambda *_: True)
    stored, store, attend, early_ones = [], ops.context_store, PersistentPath._attend, []

    def _attend(*given, early, late_rows):
        early_ones.append((early, late_rows))
        return attend(*given, early=early, late_rows=late_rows)

    monkeypatch.setattr(PersistentPath, "_attend", staticmethod(_attend))

    def context_store(views, latents, *rest, **options):
        stored.append(latents.shape[1:3])
        store(views, latents, *rest, **options)

    monkeypatch.setattr(ops, "context_store", context_store)
    fast = dataclasses.replace(PLAIN, gemm="persistent", fused_prologue="require", overlap_context_projection=overlap)
    pools, drafts, order, norm = [], [], [], model.norm_context
    monkeypatch.setattr(model, "norm_context", lambda *given: order.append("norm") or norm(*given))
    for runtime in (PLAIN, fast):
        worker, made = make_worker(model, runtime, Layout.PAGE_MAJOR), []
        join = worker._side.join
        monkeypatch.setattr(worker._side, "join", lambda join=join: order.append("join") or join())
        draw = torch.Generator().manual_seed(7)

        def hidden(*shape, draw=draw):
            return torch.randn(*shape, model.config.context_width, generator=draw)

        worker.admit("a")
        chunk = ContextChunk(request_id="a", target_hidden=hidden(11), start_position=0, anchor=5)
        tokens = worker.step(StepInput(context=[chunk])).draft_tokens
        for accepted in (2, 7, 0):
            stored.clear()
            early_ones.clear()
            order.clear()
            target = torch.full((1, 8), 3)
            target[:, :accepted] = tokens[:, :accepted]
            rows = GenerationRows(request_ids=["a"], target_hidden=hidden(1, 8), target_tokens=target)
            tokens = worker.step(StepInput(generation=rows)).draft_tokens
            made.append(tokens)
            assert stored == ([] if runtime is fast else [(1, 8)])
            # The first attention reads context that the launch in front of it has stored.
            assert early_ones == ([(True, MAX_BETWEEN_ROWS), (True, 0)] if runtime is fast else [])
            # The norm reads what the other stream has made.
            assert order == (["join", "norm"] if runtime is fast and overlap == "require" else ["norm"])
        pools.append(worker.pool.storage.clone())
        drafts.append(torch.cat(made))
    assert torch.equal(*drafts)
    torch.testing.assert_close(*pools, rtol=1e-4, atol=1e-5)


def test_layers_that_do_not_store_context_refuse_it():
    model = small_model()
    x, new = torch.zeros(1, 7, model.config.hidden_size), SimpleNamespace(rows=torch.zeros(3, 4))
    context = BlockContext([], None, None, None, None, 0, new_context=new)
    for paths in (BlockPaths(), BlockPaths(low_m=LowMPath(model))):
        with pytest.raises(ValueError, match="3 rows of context are left to layers that do not store them"):
            model.decode_block(x, dataclasses.replace(context, paths=paths))


def test_larger_blocks_store_their_context_before(calls, monkeypatch):
    model = small_model(qk_nope_head_dim=128, qk_rope_head_dim=64, qk_head_dim=192, kv_lora_rank=64)
    path, paths, pool = PersistentPath(model, may_launch_early=False), SimpleNamespace(), torch.zeros(2, 3, 4, 128)
    monkeypatch.setattr(PersistentPath, "_stores_into", lambda *_: True)
    most = MAX_BETWEEN_ROWS
    for rows, block, stores in ((most, most, True), (1, 1, True), (0, 0, False), (most + 1, most, False), (8, most + 1, False)):
        assert path.stores_context(rows, block, paths, pool.unbind()) == stores
    assert not path.stores_context(8, 7, paths, (pool[0], torch.zeros(3, 4, 129)[..., :128])), "rows off 16 bytes"
    other = PersistentPath(small_model(), may_launch_early=False)
    assert not other.stores_context(8, 7, paths, pool.unbind()), "its launches make no queries over latents"


def test_launches_store_latents_where_the_pool_is_written_directly(calls):
    """By what `_before` asks for."""
    model = small_model(qk_nope_head_dim=128, qk_rope_head_dim=64, qk_head_dim=192, kv_lora_rank=64)
    model.merge_qkv_a()
    path, where = PersistentPath(model, may_launch_early=True), object()
    pool = torch.zeros(len(model.layers), 3, 4, 128)
    for direct, backend, view, stored in (
        (True, "cute", pool[1], True),
        (False, "cute", pool[1], False),
        (True, "triton", pool[1], False),
        (True, "cute", pool.bfloat16()[1], False),
        (True, "cute", torch.zeros(3, 4, 129)[..., :128], False),
    ):
        paths = SimpleNamespace(direct_pool_write=direct, latent_norm_rope=backend)
        context = SimpleNamespace(
            paths=paths, cos_sin=torch.zeros(1, 7, 64), rows=SimpleNamespace(where=where), layer_views=pool
        )
        front = path._before(model.layers[1], view, context)
        assert front.absorption.cos_sin.shape == (7, 64) and (front.latents is not None) == stored
        if stored:
            assert front.latents.layer_view is view and front.latents.where is where
            assert front.latents.norm.weight is model.layers[1].self_attn.kv_a_layernorm.weight


def test_larger_blocks_are_those_of_low_m(calls):
    model = small_model()
    requests = MAX_BETWEEN_ROWS // model.config.block_rows(7) + 1
    ours = first_blocks(model, dataclasses.replace(PLAIN, gemm="persistent"), requests)
    assert not calls
    assert torch.equal(ours, first_blocks(model, dataclasses.replace(PLAIN, gemm="low_m"), requests))


def test_one_path_of_a_device_launches_early(calls):
    model, runtime = small_model(), dataclasses.replace(PLAIN, gemm="persistent")

    def early(worker) -> bool:
        """What its launches are, by what it says and by what it does."""
        calls.clear()
        worker.admit(0)
        hidden = torch.zeros(3, model.config.context_width, dtype=model.dtype)
        worker.step(StepInput(context=[ContextChunk(request_id=0, target_hidden=hidden, start_position=0, anchor=5)]))
        worker.release(0)
        (found,) = {early for _, _, early in calls}
        said = worker.describe()["persistent_launches"]
        assert said == "begin beside the kernel before" if found else said.startswith("cooperative: when it was made, another")
        return found

    gc.collect()  # workers of other tests
    plain = make_worker(model, PLAIN, Layout.PAGE_MAJOR)  # which could take it for a step, but was not made for it
    assert "persistent_launches" not in plain.describe()
    first, second = (make_worker(model, runtime, Layout.PAGE_MAJOR) for _ in range(2))
    assert early(first) and not early(second)
    del first
    gc.collect()
    assert early(make_worker(model, runtime, Layout.PAGE_MAJOR)), "the first is gone, so the next one may"
    assert not early(second), "what it may have captured stays as it is"


def test_the_launch_merges_where_the_attention_leaves_parts(monkeypatch):
    """By what `_attend` calls: parts for `cute` alone, if nothing speaks against it."""
    layer, queries = small_model().layers[0], torch.zeros(1, 7, 2, 3)
    monkeypatch.setattr(type(layer), "attend", lambda *_: queries)
    monkeypatch.setattr(type(layer), "attend_parts", lambda *_, early, late_rows: "parts")
    for attention, reason, wanted in (("cute", None, "parts"), ("cute", "no", "values"), ("triton", None, "values")):
        monkeypatch.setattr(ops, "attention_parts_refusal", lambda reason=reason, **_: reason)
        context = SimpleNamespace(paths=SimpleNamespace(attention=attention))
        found = PersistentPath._attend(layer, queries, None, context, early=False, late_rows=0)
        assert found == "parts" if wanted == "parts" else found.shape == (7, 6)
