"""`merged_qkv_a`: q_a and kv_a of a layer as one product, over weights that stay the checkpoint's own."""

import copy
import dataclasses

import pytest
import torch
from switch_matrix import Duel, Step, make_worker, small_model, steady, with_switches

from dspark_model import ConfigError, ContextChunk, DFlashWorker, MLADSparkForCausalLM, RuntimeConfig, StepInput
from dspark_model import runtime as runtime_module
from dspark_model.serving_config import Layout
from dspark_model.testing import assert_bitwise_equal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MERGED = with_switches((), "merged")


def worker_of(model, runtime: RuntimeConfig = MERGED) -> DFlashWorker:
    return make_worker(model, runtime, Layout.LAYER_MAJOR)


def weights(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def prefilled(model, runtime: RuntimeConfig) -> tuple[DFlashWorker, torch.Tensor]:
    """A worker after the prefill of a request, and the logits of its first block."""
    worker = worker_of(model, runtime)
    worker.admit("a")
    draw = torch.Generator().manual_seed(3)
    hidden = torch.randn(19, model.config.context_width, generator=draw).to(model.dtype).to(model.device)
    chunk = ContextChunk(request_id="a", target_hidden=hidden, start_position=0, anchor=5)
    return worker, worker.step(StepInput(context=[chunk]), trace=True).trace.draft.base_logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [1, 4])
def test_the_product_is_that_of_both_layers(dtype, batch):
    model = small_model(dtype, DEVICE)
    model.merge_qkv_a()
    y = torch.randn(batch, 7, model.config.hidden_size).to(dtype).to(DEVICE)
    for layer in model.layers:
        attn = layer.self_attn
        for ours, linear in zip(attn.qkv_a(y), (attn.q_a_proj, attn.kv_a_proj_with_mqa), strict=True):
            exact = y.double() @ linear.weight.double().T
            # Float32 sums of 64 products, rounded once.
            scale = y.double().abs() @ linear.weight.double().abs().T
            bound = scale * 64 * torch.finfo(torch.float32).eps + exact.abs() * torch.finfo(dtype).eps / 2
            assert ours.shape == exact.shape
            assert ((ours.double() - exact).abs() <= bound).all()


def test_a_step_computes_one_product_and_agrees_with_the_reference(monkeypatch):
    model = small_model(device=DEVICE)
    _, reference = prefilled(model, RuntimeConfig.plain())
    worker = worker_of(model)
    with monkeypatch.context() as patch:
        for layer in model.layers:
            for name in ("q_a_proj", "kv_a_proj_with_mqa"):
                patch.setattr(getattr(layer.self_attn, name), "forward", lambda y: pytest.fail("a product of its own"))
        _, merged = prefilled(model, MERGED)
    torch.testing.assert_close(merged, reference, rtol=1e-4, atol=1e-4)
    _, again = prefilled(model, dataclasses.replace(MERGED, merged_qkv_a="off"))
    assert_bitwise_equal(again, reference)
    assert worker.resolved.takes("merged_qkv_a")


def test_weights_are_the_checkpoints_and_q_a_is_held_once(tmp_path):
    model = small_model(device=DEVICE)
    before = weights(model)
    worker_of(model)
    assert list(model.state_dict()) == list(before)
    for name, tensor in model.state_dict().items():
        assert_bitwise_equal(tensor, before[name], name)
    for layer in model.layers:
        joined, q_a = layer.self_attn._qkv_a_weight, layer.self_attn.q_a_proj.weight
        assert q_a.untyped_storage().data_ptr() == joined.untyped_storage().data_ptr()
        assert q_a.untyped_storage().nbytes() == joined.nbytes
    model.save_pretrained(tmp_path)
    loaded = MLADSparkForCausalLM.from_pretrained(tmp_path, lm_head=model.lm_head, device=DEVICE)
    for name, tensor in loaded.state_dict().items():
        assert_bitwise_equal(tensor, before[name], name)


@pytest.mark.parametrize("worker_inside", [False, True])
@pytest.mark.parametrize("model_inside", [False, True])
def test_models_and_workers_may_be_made_in_inference_mode(model_inside, worker_inside):
    with torch.inference_mode(model_inside):
        model = small_model(device=DEVICE)
    for _ in range(2):
        with torch.inference_mode(worker_inside):
            prefilled(model, MERGED)
            prefilled(model, RuntimeConfig.plain())
    assert model.layers[0].self_attn.q_a_proj.weight.is_inference() == model_inside


def test_later_workers_find_the_joined_weights_and_take_over_changes():
    model = small_model(device=DEVICE)
    worker_of(model)
    attn = model.layers[0].self_attn
    place, kv_place = attn._qkv_a_weight.data_ptr(), attn.kv_a_proj_with_mqa.weight.data_ptr()
    attn.q_a_proj.weight[3] = 2.0
    attn.kv_a_proj_with_mqa.weight[5] = 3.0
    worker_of(model)
    assert (attn._qkv_a_weight.data_ptr(), attn.kv_a_proj_with_mqa.weight.data_ptr()) == (place, kv_place)
    joined = torch.cat((attn.q_a_proj.weight, attn.kv_a_proj_with_mqa.weight))
    assert_bitwise_equal(attn._qkv_a_weight, joined)
    assert bool((joined[3] == 2).all()) and bool((joined[model.config.q_lora_rank + 5] == 3).all())


def test_a_copied_model_joins_weights_of_its_own():
    model = small_model(device=DEVICE)
    worker_of(model)
    other = copy.deepcopy(model)
    other.layers[0].self_attn.q_a_proj.weight.fill_(4.0)
    worker_of(other)
    assert bool((other.layers[0].self_attn._qkv_a_weight[: model.config.q_lora_rank] == 4).all())
    assert not bool((model.layers[0].self_attn._qkv_a_weight == 4).any())


def test_weights_that_a_captured_step_reads_outlive_a_worker_that_joins_them():
    model = small_model(device=DEVICE)
    plain = worker_of(model, RuntimeConfig.plain())
    weight = model.layers[0].self_attn.q_a_proj.weight
    place = weight.data_ptr()
    worker_of(model)
    assert weight.data_ptr() != place
    assert place in [tensor.data_ptr() for tensor in plain._weights]


@pytest.mark.gpu
def test_captured_steps_of_an_older_worker_go_on_after_the_weights_moved():
    model = small_model(device=DEVICE)
    captured = worker_of(model, with_switches(("cuda_graph",)))
    duel = Duel(worker_of(model, RuntimeConfig.plain()), captured)
    script = steady(2, 8)
    duel.run(script[:5])
    worker_of(model)
    torch.cuda.empty_cache()
    held = [torch.full_like(layer.self_attn.q_a_proj.weight, float("nan")) for layer in model.layers for _ in range(8)]
    duel.run(script[5:])
    assert held and captured.num_replays >= 3


def test_packed_layers_refuse_it():
    model = small_model()
    if not model.pack_linears():
        pytest.skip("this CPU cannot pack")
    with pytest.raises(ConfigError, match="merged_qkv_a=on cannot run: the linear layers are packed"):
        worker_of(model)


def test_layers_that_are_packed_afterwards_keep_their_values():
    model = small_model()
    _, reference = prefilled(model, MERGED)
    if not model.pack_linears():
        pytest.skip("this CPU cannot pack")
    _, packed = prefilled(model, RuntimeConfig.plain())
    torch.testing.assert_close(packed, reference, rtol=1e-4, atol=1e-4)


def test_a_step_cannot_ask_for_joined_weights_that_are_not_there(monkeypatch):
    monkeypatch.setattr("dspark_model.fast_paths.merged_qkv_a_obstacle", lambda model: None)  # as on a CUDA device
    model = small_model(device=DEVICE)
    worker, _ = prefilled(model, RuntimeConfig.plain())
    length = worker.context_length("a")
    with pytest.raises(ConfigError, match="merged_qkv_a=on cannot run: the joined weights are made at construction"):
        worker.step(StepInput(), runtime=MERGED)
    assert worker.context_length("a") == length
    monkeypatch.setitem(runtime_module._AUTO, "merged_qkv_a", (("on", "measured"),))
    choice = worker.step(StepInput(), runtime=dataclasses.replace(MERGED, merged_qkv_a="auto")).runtime["merged_qkv_a"]
    assert choice.in_force == "off" and "made at construction" in choice.reason
    chosen = worker_of(model, dataclasses.replace(MERGED, merged_qkv_a="auto")).resolved["merged_qkv_a"]
    assert (chosen.in_force, chosen.reason) == ("on", "measured")


def test_a_step_does_not_take_what_needs_joined_weights_that_are_not_there(monkeypatch):
    monkeypatch.setattr("dspark_model.fast_paths.merged_qkv_a_obstacle", lambda model: None)  # as on a CUDA device
    worker = worker_of(small_model(device=DEVICE), RuntimeConfig.plain())
    none = {"gemm": {"low_m": None, "persistent": None}}  # as on Hopper
    worker._surroundings = dataclasses.replace(worker._surroundings, backends=worker._surroundings.backends | none)
    runtime = dataclasses.replace(RuntimeConfig.plain(), gemm="persistent", merged_qkv_a="auto")
    with pytest.raises(ConfigError, match="gemm=persistent cannot run: .* merged_qkv_a is off"):
        worker.step(StepInput(), runtime=runtime)
    entries = (("persistent", "measured"), ("low_m", "next"), ("cublas", "the reference"))
    monkeypatch.setitem(runtime_module._AUTO, "gemm", entries)
    resolved = worker._resolve(dataclasses.replace(runtime, gemm="auto"))
    assert (resolved["gemm"].in_force, resolved["merged_qkv_a"].in_force) == ("low_m", "off")
    assert "made at construction" in resolved["merged_qkv_a"].reason
    assert [choice.name for choice in resolved.choices] == [field.name for field in dataclasses.fields(RuntimeConfig)]


def test_a_step_can_leave_the_joined_weights():
    model = small_model(device=DEVICE)
    duel = Duel(worker_of(model, RuntimeConfig.plain()), worker_of(model))
    duel.plain.admit(0)
    duel.fast.admit(0)
    step_input = duel._input(Step(prefill={0: (0, 5, True)}))
    ours = duel.fast.step(step_input, runtime=RuntimeConfig.plain())
    assert not ours.runtime.takes("merged_qkv_a") and duel.fast.resolved.takes("merged_qkv_a")
    assert_bitwise_equal(ours.confidence, duel.plain.step(step_input).confidence)
