"""Every reason for which a fast path is not taken, what `auto` and `require` make of it, and where it can be read."""

import dataclasses
import importlib.util
import logging

import pytest
import torch
from switch_matrix import make_worker, small_model

from dspark_model import ConfigError, ContextChunk, DFlashWorker, LatentKVPool, PoolConfig, RuntimeConfig, StepInput, fast_paths
from dspark_model import runtime as runtime_module
from dspark_model.external_pool import ExternalLatentPool
from dspark_model.runtime import Obstacle, Surroundings, resolve_runtime
from dspark_model.serving_config import Layout, Switch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CUDA = torch.device("cuda")  # the name alone; nothing here needs the device
POOL = PoolConfig(page_size=8, num_pages=20, max_requests=2, max_positions=40)
SWITCHES = {field.name for field in dataclasses.fields(RuntimeConfig) if isinstance(field.default, Switch)}
AUTO, REQUIRE = (dataclasses.replace(RuntimeConfig.plain(), fused_prologue=value) for value in ("auto", "require"))


@pytest.fixture
def model():
    return small_model(device=DEVICE)


@pytest.fixture
def triton_runs(monkeypatch):
    """As on a CUDA device."""
    monkeypatch.setattr(fast_paths, "triton_obstacle", lambda device: None)


@pytest.fixture
def no_triton(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "triton" else find(name, *rest))


def external_pool(model, views) -> ExternalLatentPool:
    return ExternalLatentPool(POOL, model.config, views)


def own_pool(model, layout: Layout = Layout.LAYER_MAJOR, dtype: torch.dtype | None = None) -> LatentKVPool:
    config = dataclasses.replace(POOL, layout=layout)
    return LatentKVPool(config, model.config, dtype=dtype or model.dtype, device=DEVICE)


def pages(model, *lead: int) -> torch.Tensor:
    return torch.zeros(*lead, POOL.page_size, model.config.latent_dim, dtype=model.dtype, device=DEVICE)


def test_triton_that_is_not_installed(no_triton):
    wanted = Obstacle("triton is not installed; install dspark_model[gpu]")
    assert fast_paths.triton_obstacle(torch.device("cpu")) == fast_paths.triton_obstacle(CUDA) == wanted


@pytest.fixture
def with_cutlass(monkeypatch):
    """As where nvidia-cutlass-dsl is installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name == "cutlass" or find(name, *rest))


def test_cute_that_is_not_installed(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "cutlass" else find(name, *rest))
    wanted = Obstacle("nvidia-cutlass-dsl is not installed; install dspark_model[gpu]")
    assert fast_paths.cute_obstacle(torch.device("cpu")) == fast_paths.cute_obstacle(CUDA) == wanted


def test_cute_without_a_device_or_a_build(with_cutlass, monkeypatch):
    wanted = Obstacle("its kernels run on a CUDA device, and the model is on cpu")
    assert fast_paths.cute_obstacle(torch.device("cpu")) == wanted
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert fast_paths.cute_obstacle(CUDA) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    obstacle = fast_paths.cute_obstacle(CUDA)
    assert "not built for compute capability 8.9, only for 9.0 (sm_90a)" in obstacle.reason and not obstacle.avoidable


@pytest.mark.skipif(DEVICE != "cpu", reason="about a model on the CPU")
def test_cute_that_is_asked_for_and_cannot_run_is_refused(model, with_cutlass):
    runtime = dataclasses.replace(RuntimeConfig.plain(), latent_norm_rope="cute")
    with pytest.raises(ConfigError, match="latent_norm_rope=cute cannot run: its kernels run on a CUDA device"):
        make_worker(model, runtime, Layout.LAYER_MAJOR)


@pytest.mark.parametrize(
    ("interpret", "reason", "avoidable"),
    [
        ("1", "the model is on cpu, where its kernels run in Triton's interpreter", True),
        ("0", "its kernels run on a CUDA device, and the model is on cpu", False),
    ],
)
def test_triton_without_a_device(monkeypatch, interpret, reason, avoidable):
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    assert fast_paths.triton_obstacle(torch.device("cpu")) == Obstacle(reason, avoidable)
    assert fast_paths.triton_obstacle(CUDA) is None


@pytest.mark.parametrize(
    ("obstacle", "reason"),
    [
        (fast_paths.stream_obstacle, "the model is on cpu, which has no streams"),
        (fast_paths.graph_obstacle, "the model is on cpu, which has no graphs: steps are computed again instead"),
    ],
)
def test_streams_and_graphs_without_a_device(obstacle, reason):
    assert obstacle(torch.device("cpu")) == Obstacle(reason, avoidable=True)
    assert obstacle(CUDA) is None


@pytest.mark.parametrize("layout", Layout)
def test_nothing_stands_in_the_way_of_the_prologue(model, triton_runs, layout):
    assert fast_paths.fused_prologue_obstacle(model, own_pool(model, layout)) is None


FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("layout", Layout)
def test_nothing_stands_in_the_way_of_triton_on_an_fp8_pool(model, triton_runs, layout):
    pool = own_pool(model, layout, FP8)
    assert fast_paths.fused_prologue_obstacle(model, pool) is None
    assert fast_paths.direct_write_obstacle(model, pool) is None
    assert fast_paths.attention_obstacle("triton", model, pool) is None


@pytest.mark.parametrize("backend", ["cute", "causal_fixup", "flashinfer"])
def test_other_attention_does_not_read_fp8_pools(model, backend):
    pool = own_pool(model, dtype=FP8)
    wanted = Obstacle(f"{backend} does not read fp8 pools; triton and torch do")
    assert fast_paths.attention_obstacle(backend, model, pool) == wanted
    runtime = dataclasses.replace(RuntimeConfig.plain(), kv_dtype="fp8_e4m3", attention=backend)
    with pytest.raises(ConfigError, match=f"attention={backend} cannot run: {backend} does not read fp8 pools"):
        DFlashWorker(model, pool, runtime)


def test_attention_wants_rows_of_an_fp8_pool_at_16_bytes(model, triton_runs):
    memory = torch.zeros(2, POOL.num_pages, POOL.page_size * 64 + 8, dtype=FP8, device=DEVICE)
    views = memory[..., : POOL.page_size * 64].unflatten(-1, (POOL.page_size, 64)).unbind(0)
    pool = external_pool(model, views)
    assert fast_paths.attention_obstacle("triton", model, pool) == Obstacle(
        "triton wants rows of an fp8 pool at multiples of 16 bytes"
    )
    assert fast_paths.fused_prologue_obstacle(model, pool) is None


def test_cute_does_not_write_into_an_fp8_pool():
    free = dict.fromkeys(SWITCHES)
    surroundings = Surroundings(torch.bfloat16, FP8, free, {"latent_norm_rope": {"triton": None, "cute": None}})
    runtime = RuntimeConfig(kv_dtype="fp8_e4m3", latent_norm_rope="cute")
    choice = resolve_runtime(runtime, surroundings)["direct_pool_write"]
    assert choice.fell_back and choice.reason == "latent_norm_rope=cute has no form that stores into an fp8 pool"
    with pytest.raises(ConfigError, match="direct_pool_write=require cannot be met: latent_norm_rope=cute has no form"):
        resolve_runtime(dataclasses.replace(runtime, direct_pool_write="require"), surroundings)
    assert resolve_runtime(dataclasses.replace(runtime, latent_norm_rope="triton"), surroundings).takes("direct_pool_write")


def test_auto_takes_cute_norms_where_the_launches_of_persistent_store_them(model, monkeypatch):
    def found(dtype=torch.float32, persistent=None):
        return fast_paths.cute_norm_obstacle(model, own_pool(model, dtype=dtype), persistent)

    assert found() == fast_paths.cute_obstacle(model.device)
    monkeypatch.setattr(fast_paths, "cute_obstacle", lambda _: None)
    assert found() is None
    assert found(FP8) == Obstacle("it has no form that stores into an fp8 pool", avoidable=True)
    wanted = Obstacle("it helps only gemm=persistent, which cannot run: no Hopper", avoidable=True)
    assert found(persistent=Obstacle("no Hopper")) == wanted
    for obstacle, backend in ((None, "cute"), (wanted, "triton")):
        against = {"latent_norm_rope": {"triton": None, "cute": obstacle}}
        surroundings = Surroundings(torch.bfloat16, torch.bfloat16, dict.fromkeys(SWITCHES), against)
        assert resolve_runtime(RuntimeConfig(), surroundings)["latent_norm_rope"].in_force == backend
        asked = RuntimeConfig(latent_norm_rope="cute")
        assert resolve_runtime(asked, surroundings)["latent_norm_rope"].in_force == "cute"


def test_persistent_products_need_the_merged_projections():
    against = {
        "latent_norm_rope": {"triton": None, "cute": None},
        "gemm": {"low_m": None, "persistent": None},
        "merged_qkv_a": {"on": None},
    }
    surroundings = Surroundings(torch.bfloat16, torch.bfloat16, dict.fromkeys(SWITCHES), against)
    runtime = RuntimeConfig(gemm="persistent")
    for merged in ("auto", "on"):
        resolved = resolve_runtime(dataclasses.replace(runtime, merged_qkv_a=merged), surroundings)
        assert (resolved["gemm"].in_force, resolved["merged_qkv_a"].in_force) == ("persistent", "on")
    with pytest.raises(ConfigError, match="gemm=persistent cannot run: .* merged_qkv_a is off, set it on"):
        resolve_runtime(dataclasses.replace(runtime, merged_qkv_a="off"), surroundings)
    no_merge = dataclasses.replace(surroundings, backends=against | {"merged_qkv_a": {"on": Obstacle("packed")}})
    with pytest.raises(ConfigError, match="gemm=persistent cannot run"):
        resolve_runtime(runtime, no_merge)
    # What stands in the way anyway is named first.
    no_hopper = dataclasses.replace(surroundings, backends=against | {"gemm": {"persistent": Obstacle("no Hopper")}})
    with pytest.raises(ConfigError, match="gemm=persistent cannot run: no Hopper"):
        resolve_runtime(dataclasses.replace(runtime, merged_qkv_a="off"), no_hopper)


def test_every_switch_is_asked_about(model):
    assert set(fast_paths.obstacles(model, own_pool(model))) == SWITCHES


def test_every_backend_is_asked_about(model):
    backends = fast_paths.backends(model, own_pool(model))
    assert backends["latent_norm_rope"] == {
        "triton": fast_paths.triton_obstacle(model.device),
        "cute": fast_paths.cute_norm_obstacle(model, own_pool(model), fast_paths.persistent_obstacle(model)),
    }
    assert backends["merged_qkv_a"] == {"on": fast_paths.merged_qkv_a_obstacle(model)}
    assert backends["attention"] == {
        name: fast_paths.attention_obstacle(name, model, own_pool(model))
        for name in ("triton", "cute", "causal_fixup", "flashinfer")
    }
    assert backends["gemm"] == {"low_m": fast_paths.low_m_obstacle(model), "persistent": fast_paths.persistent_obstacle(model)}


def test_attention_of_a_pool_in_another_dtype(model):
    pool = LatentKVPool(own_pool(model).config, model.config, dtype=torch.float16, device=model.device)
    reason = "the pool is torch.float16 while the model is torch.float32"
    backends = fast_paths.backends(model, pool)["attention"]
    assert set(backends.values()) == {Obstacle(reason)}


def test_products_of_few_rows_that_no_kernel_makes(model):
    half = small_model(torch.float16)
    assert "takes bfloat16 and float32 weights, and the model is torch.float16" in fast_paths.low_m_obstacle(half).reason
    packed = small_model()
    if packed.pack_linears():
        assert fast_paths.low_m_obstacle(packed) == Obstacle("the linear layers are packed for few rows on a CPU")


@pytest.mark.parametrize(
    ("backend", "obstacle"),
    [
        ("torch", Obstacle("latent_norm_rope=torch has no kernel that stores into the pool")),
        ("triton", None),
        ("triton", Obstacle("slow", avoidable=True)),
        ("cute", None),
    ],
)
@pytest.mark.parametrize("pool_obstacle", [None, Obstacle("the pool is of another dtype")])
def test_the_direct_write_runs_where_its_backend_and_the_pool_allow(backend, obstacle, pool_obstacle):
    surroundings = Surroundings(
        model_dtype=torch.float32,
        pool_dtype=torch.float32,
        obstacles=dict.fromkeys(SWITCHES) | {"direct_pool_write": pool_obstacle},
        backends={"latent_norm_rope": {} if backend == "torch" else {backend: obstacle}},
    )
    runtime = dataclasses.replace(RuntimeConfig.plain(), latent_norm_rope=backend, direct_pool_write="auto")
    choice = resolve_runtime(runtime, surroundings)["direct_pool_write"]
    reason = pool_obstacle or obstacle
    assert (choice.in_force, choice.reason) == (("on", "its preconditions hold") if reason is None else ("off", reason.reason))


def test_auto_takes_the_first_backend_that_nothing_stands_in_the_way_of(monkeypatch):
    order = (("cute", "measured"), ("triton", "measured too"))
    monkeypatch.setitem(runtime_module._AUTO, "latent_norm_rope", order)
    asked = dataclasses.replace(RuntimeConfig.plain(), latent_norm_rope="auto")
    results = []
    for cute, triton in ((None, None), (Obstacle("no"), None), (Obstacle("no"), Obstacle("slow", avoidable=True))):
        surroundings = Surroundings(
            model_dtype=torch.float32,
            pool_dtype=torch.float32,
            obstacles=dict.fromkeys(SWITCHES),
            backends={"latent_norm_rope": {"cute": cute, "triton": triton}},
        )
        choice = resolve_runtime(asked, surroundings)["latent_norm_rope"]
        results.append((choice.in_force, choice.reason))
    assert results == [*order, ("torch", "the reference")]


@pytest.mark.parametrize("form", ["layers of one tensor", "every second page", "pages of one tensor", "two tensors"])
def test_views_of_an_outside_engine_with_one_geometry_are_served(model, triton_runs, form):
    views = {
        "layers of one tensor": pages(model, 2, 20).unbind(0),
        "every second page": pages(model, 2, 40)[:, ::2].unbind(0),
        "pages of one tensor": pages(model, 20, 5)[:, 1:3].unbind(1),
        "two tensors": [pages(model, 20), pages(model, 20)],
    }[form]
    assert fast_paths.fused_prologue_obstacle(model, external_pool(model, views)) is None


def unequal_distances(model) -> list[torch.Tensor]:
    """Three layers, the third one behind a gap."""
    layers = pages(model, 4, 20)
    return [layers[0], layers[1], layers[3]]


def test_a_pool_of_unequal_distances_is_refused(triton_runs):
    model = small_model(device=DEVICE, num_hidden_layers=3)
    obstacle = fast_paths.fused_prologue_obstacle(model, external_pool(model, unequal_distances(model)))
    assert obstacle == Obstacle("the layers' views of the pool differ in their strides or distances")


def test_a_pool_whose_layers_have_other_strides_is_refused(model, triton_runs):
    views = [pages(model, 20), pages(model, 40)[::2]]
    obstacle = fast_paths.fused_prologue_obstacle(model, external_pool(model, views))
    assert obstacle == Obstacle("the layers' views of the pool differ in their strides or distances")


def other_mask_row() -> torch.nn.Module:
    """A trained mask row in float32 beside a bf16 embedding."""
    model = small_model(torch.bfloat16, DEVICE, mask_embedding=True)
    model.mask_embedding.float()
    return model


def column_major_embedding() -> torch.nn.Module:
    model = small_model(device=DEVICE)
    model.embed_tokens.weight.data = model.embed_tokens.weight.data.T.contiguous().T
    return model


def strided_mask_row() -> torch.nn.Module:
    model = small_model(device=DEVICE, mask_embedding=True)
    wide = torch.zeros(1, 2 * model.config.hidden_size, device=DEVICE)
    model.mask_embedding.weight.data = wide[:, ::2]
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (other_mask_row, "the mask row is torch.float32 and the embedding torch.bfloat16"),
        (column_major_embedding, "rows of the embedding or the mask row are not contiguous"),
        (strided_mask_row, "rows of the embedding or the mask row are not contiguous"),
    ],
)
def test_a11_drafters_that_the_noise_block_does_not_know(triton_runs, make, reason):
    model = make()
    assert fast_paths.fused_prologue_obstacle(model, own_pool(model)) == Obstacle(reason)


def test_a11_a_trained_mask_row_of_the_embeddings_dtype_is_served(triton_runs):
    model = small_model(torch.bfloat16, DEVICE, mask_embedding=True)
    assert fast_paths.fused_prologue_obstacle(model, own_pool(model)) is None


def test_a_pool_of_another_dtype(model, triton_runs):
    obstacle = fast_paths.fused_prologue_obstacle(model, own_pool(model, dtype=torch.bfloat16))
    assert obstacle == Obstacle("its stores copy bits, and the pool is torch.bfloat16 while the model is torch.float32")
    obstacle = fast_paths.direct_write_obstacle(model, own_pool(model, dtype=torch.bfloat16))
    assert obstacle == Obstacle("the pool is torch.bfloat16 while the model is torch.float32")
    assert fast_paths.direct_write_obstacle(model, own_pool(model)) is None


def prefill(worker: DFlashWorker):
    worker.admit("a")
    hidden = torch.zeros(3, worker.model.config.context_width, dtype=worker.model.dtype, device=worker.model.device)
    return worker.step(StepInput(context=[ContextChunk(request_id="a", target_hidden=hidden, start_position=0, anchor=5)]))


def check_falls_back(model, pool, reason: str, caplog) -> None:
    """`auto` runs without it and says so in the log, the choice, the description, the step's output and a counter."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "dspark_model"):
        worker = DFlashWorker(model, pool, AUTO)
    assert "fast paths set to auto but not in use: fused_prologue" in caplog.text
    choice = worker.resolved["fused_prologue"]
    assert (choice.requested, choice.in_force, choice.fell_back, choice.reason) == ("auto", "off", True, reason)
    assert worker.describe()["runtime.fused_prologue"] == f"off (asked for auto: {reason})"
    if isinstance(pool, LatentKVPool):
        output = prefill(worker)
        assert output.runtime.fallbacks == (choice,)
        assert worker.fallback_counts == {"fused_prologue": 1}


def check_is_refused(model, pool, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DFlashWorker(model, pool, REQUIRE)
    assert str(caught.value) == f"runtime.fused_prologue=require cannot be met: {reason}; use auto or off"


def test_without_triton_auto_falls_back_and_require_raises(model, no_triton, caplog):
    reason = "triton is not installed; install dspark_model[gpu]"
    check_falls_back(model, own_pool(model), reason, caplog)
    check_is_refused(model, own_pool(model), reason)


def test_a11_a_mask_row_of_another_dtype_falls_back_and_require_raises(triton_runs, caplog):
    model, reason = other_mask_row(), "the mask row is torch.float32 and the embedding torch.bfloat16"
    check_falls_back(model, own_pool(model), reason, caplog)
    check_is_refused(model, own_pool(model), reason)


def test_a_pool_of_unequal_distances_falls_back_and_require_raises(triton_runs, caplog):
    model = small_model(device=DEVICE, num_hidden_layers=3)
    pool = external_pool(model, unequal_distances(model))
    reason = "the layers' views of the pool differ in their strides or distances"
    check_falls_back(model, pool, reason, caplog)
    check_is_refused(model, pool, reason)


@pytest.mark.skipif(DEVICE != "cpu", reason="about a model on the CPU")
def test_without_a_device_and_interpreter_auto_falls_back_and_require_raises(model, monkeypatch, caplog):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    reason = "its kernels run on a CUDA device, and the model is on cpu"
    check_falls_back(model, own_pool(model), reason, caplog)
    check_is_refused(model, own_pool(model), reason)


@pytest.mark.skipif(DEVICE != "cpu", reason="about a model on the CPU")
def test_the_interpreter_is_left_by_auto_and_taken_by_require(model, caplog):
    reason = "the model is on cpu, where its kernels run in Triton's interpreter"
    check_falls_back(model, own_pool(model), reason, caplog)
    worker = DFlashWorker(model, own_pool(model), REQUIRE)
    choice = worker.resolved["fused_prologue"]
    assert (choice.in_force, choice.fell_back, choice.reason) == ("on", False, f"asked for, although {reason}")
    output = prefill(worker)
    assert output.runtime.takes("fused_prologue")
    assert not output.runtime.fallbacks and not worker.fallback_counts


def test_auto_takes_the_prologue_where_its_preconditions_hold(model, triton_runs):
    choice = make_worker(model, AUTO, Layout.PAGE_MAJOR).resolved["fused_prologue"]
    assert (choice.in_force, choice.fell_back, choice.reason) == ("on", False, "its preconditions hold")


def test_one_step_that_requires_what_cannot_run_is_refused_and_changes_nothing(model, no_triton):
    worker = DFlashWorker(model, own_pool(model), RuntimeConfig.plain())
    prefill(worker)
    before = worker.pool.storage.clone(), worker.context_length("a")
    with pytest.raises(ConfigError, match="fused_prologue=require cannot be met: triton is not installed"):
        worker.step(StepInput(), runtime=REQUIRE)
    assert torch.equal(worker.pool.storage.nan_to_num(), before[0].nan_to_num())
    assert worker.context_length("a") == before[1]
