"""`load_config`, `PoolConfig`, `RuntimeConfig`, and what a worker makes of them."""

import dataclasses
import logging
from pathlib import Path

import pytest
import torch
from drafting import make_worker, prefill, random_hidden

from dspark_model import (
    ConfigError,
    ContextChunk,
    DFlashWorker,
    LatentKVPool,
    MLADSparkForCausalLM,
    PoolConfig,
    RuntimeConfig,
    SamplingParams,
    StepInput,
    load_config,
)
from dspark_model.presets import CheckpointConfig
from dspark_model.runtime import Surroundings, resolve_runtime
from dspark_model.serving_config import Layout, Switch
from dspark_model.testing import random_lm_head, random_model, tiny_config, write_checkpoint

CONFIGS = Path(__file__).parent.parent / "configs"
SWITCHES = [field.name for field in dataclasses.fields(RuntimeConfig) if isinstance(field.default, Switch)]
POOL = "[pool]\nnum_pages = 4\nmax_requests = 2\nmax_positions = 16\n"
CHECKPOINT = '[checkpoint]\npath = "drafter"\n'


def write(folder: Path, text: str) -> Path:
    path = folder / "preset.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_preset_is_readable(path):
    preset = load_config(path)
    assert (preset.checkpoint is None) != (preset.model is None)
    pages = -(-(preset.pool.max_positions + 8) // preset.pool.page_size)
    assert preset.pool.num_pages >= pages, "a request of the served length would not fit"


def test_kimi_k3_preset_pins_the_published_revision():
    preset = load_config(CONFIGS / "kimi_k3_dspark.toml")
    assert preset.checkpoint.repo_id == "Inferact/Kimi-K3-DSpark"
    assert preset.checkpoint.revision == "cf6b8244620e7ea4b0651d214f28e89eac75bed6"
    assert (preset.pool.page_size, preset.pool.num_drafts) == (32, 7)


def test_the_tiny_preset_drafts():
    preset = load_config(CONFIGS / "tiny.toml", ["pool.layout=page_major"])
    model = random_model(preset.model)
    pool = LatentKVPool(preset.pool, preset.model, dtype=model.dtype)
    worker = DFlashWorker(model, pool, preset.runtime)
    output = prefill(worker, [random_hidden(model, 5)], [1])
    assert output.draft_tokens.shape == (1, 7)


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("pool.num_pages=64", lambda preset: preset.pool.num_pages, 64),
        (" pool.num_pages = 65 ", lambda preset: preset.pool.num_pages, 65),
        ("pool.layout=page_major", lambda preset: preset.pool.layout, Layout.PAGE_MAJOR),
        ('pool.layout="page_major"', lambda preset: preset.pool.layout, Layout.PAGE_MAJOR),
        ("runtime.fused_prologue=off", lambda preset: preset.runtime.fused_prologue, Switch.OFF),
        ("runtime.attention=torch", lambda preset: preset.runtime.attention, "torch"),
        ("checkpoint.path=some/where", lambda preset: preset.checkpoint.path, "some/where"),
    ],
)
def test_overrides(tmp_path, override, read, value):
    assert read(load_config(write(tmp_path, CHECKPOINT + POOL), [override])) == value


def test_the_last_override_wins(tmp_path):
    preset = load_config(write(tmp_path, CHECKPOINT + POOL), ["pool.num_pages=64", "pool.num_pages=32"])
    assert preset.pool.num_pages == 32


BAD_PRESETS = [
    (
        "unknown sections \\['target'\\] in .*; allowed: checkpoint, pool, runtime, model",
        CHECKPOINT + POOL + "[target]\na = 1\n",
    ),
    ("unknown key pool.pages; allowed: page_size, num_pages", CHECKPOINT + POOL + "pages = 3\n"),
    ("unknown key runtime.turbo; allowed: fused_prologue", CHECKPOINT + POOL + "[runtime]\nturbo = true\n"),
    ("unknown key checkpoint.repo; allowed: repo_id", '[checkpoint]\nrepo = "a/b"\n' + POOL),
    ("\\[pool\\] lacks num_pages, max_requests, max_positions", CHECKPOINT),
    ("\\[pool\\] is 3, wanted a table", "pool = 3\n" + CHECKPOINT),
    ("\\[model\\] is 3, wanted a table", "model = 3\n" + POOL),
    ("\\[checkpoint\\] is 3, wanted a table", "checkpoint = 3\n" + POOL),
    ("pool.num_pages is '4' \\(str\\), wanted int", CHECKPOINT + POOL.replace("num_pages = 4", 'num_pages = "4"')),
    ("pool.num_pages is True \\(bool\\), wanted int", CHECKPOINT + POOL.replace("num_pages = 4", "num_pages = true")),
    ("pool.num_pages is 0, wanted a whole number of at least 1", CHECKPOINT + POOL.replace("num_pages = 4", "num_pages = 0")),
    ("pool.layout is 'rows'; allowed: layer_major, page_major", CHECKPOINT + POOL + 'layout = "rows"\n'),
    ("runtime.cuda_graph is 'on'; allowed: off, auto, require", CHECKPOINT + POOL + '[runtime]\ncuda_graph = "on"\n'),
    ("runtime.cuda_graph is True; allowed: off, auto, require", CHECKPOINT + POOL + "[runtime]\ncuda_graph = true\n"),
    ("checkpoint needs exactly one of repo_id and path", '[checkpoint]\nrepo_id = "a/b"\npath = "c"\n' + POOL),
    ("checkpoint needs exactly one of repo_id and path", "[checkpoint]\n" + POOL),
    ("checkpoint.revision belongs to a repo_id", CHECKPOINT + 'revision = "main"\n' + POOL),
    ("needs exactly one of the sections \\[checkpoint\\] and \\[model\\]", POOL),
    ("needs exactly one of the sections \\[checkpoint\\] and \\[model\\]", CHECKPOINT + POOL + "[model]\nhidden_size = 3\n"),
    ("is not valid TOML", CHECKPOINT + "["),
]


@pytest.mark.parametrize(("message", "text"), BAD_PRESETS)
def test_a22_bad_presets_are_refused_by_name(tmp_path, message, text):
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, text))


def test_preset_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="nothing.toml does not exist"):
        load_config(tmp_path / "nothing.toml")
    path = tmp_path / "preset.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_config(path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("pool.num_pages", "is not of the form section.key=value"),
        ("num_pages=3", "is not of the form section.key=value"),
        ("pool.=3", "is not of the form section.key=value"),
        ("target.num_pages=3", "unknown section 'target'; allowed: checkpoint, pool, runtime, model"),
        ("pool.pages=3", "unknown key pool.pages"),
        ("pool.num_pages=many", "pool.num_pages is 'many' \\(str\\), wanted int"),
    ],
)
def test_a22_bad_overrides_are_refused(tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, CHECKPOINT + POOL), [override])


def test_a08_overrides_for_the_target_do_not_reach_the_drafter(tmp_path):
    """The drafter's numbers come from its own config.json alone: a served limit above its own changes none of them, and a
    preset cannot state them beside a checkpoint."""
    config = tiny_config()
    folder = write_checkpoint(tmp_path / "drafter", config)
    path = write(tmp_path, f'[checkpoint]\npath = "{folder}"\n' + POOL)
    preset = load_config(path, ["pool.max_positions=100000", "pool.num_pages=20000"])
    model = MLADSparkForCausalLM.from_pretrained(preset.checkpoint.path, lm_head=random_lm_head(config))
    assert model.config == config
    assert model.config.max_position_embeddings == 512
    for override in ("model.max_position_embeddings=100000", "model.rope_theta=1e6"):
        with pytest.raises(ConfigError, match="exactly one of the sections"):
            load_config(path, [override])
    asked = load_config(CONFIGS / "tiny.toml", ["model.max_position_embeddings=1024"])
    assert asked.model.max_position_embeddings == 1024


def test_a08_a_larger_vocabulary_of_the_target_does_not_reach_the_drafter(tmp_path):
    config = tiny_config()
    folder = write_checkpoint(tmp_path, config)
    padded = torch.cat((random_lm_head(config), torch.ones(64, config.hidden_size)))
    model = MLADSparkForCausalLM.from_pretrained(folder, lm_head=padded)
    assert model.config.vocab_size == 320
    assert model.lm_head.shape[0] == 320


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(PoolConfig)])
def test_a22_every_pool_field_has_an_effect(field):
    sizes = {"page_size": 4, "num_pages": 16, "max_requests": 2, "max_positions": 12, "num_drafts": 3}
    others = {"layout": "page_major", "context_window": 1}
    changed = {**sizes, field: others[field] if field in others else sizes[field] + 5}

    def shapes(values: dict) -> tuple:
        pool = LatentKVPool(PoolConfig(**values), tiny_config(), dtype=torch.float32)
        pool.open(0, 40, None, "a request")
        return pool.storage.shape, pool.page_table.shape, pool.num_available_pages

    assert shapes(changed) != shapes(sizes)


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "3", None])
def test_pool_sizes_must_be_positive_whole_numbers(value):
    with pytest.raises(ConfigError, match="wanted a whole number of at least 1"):
        PoolConfig(num_pages=value, max_requests=1, max_positions=1)


SURROUNDINGS = Surroundings(
    model_dtype=torch.float32,
    pool_dtype=torch.float32,
    obstacles=dict.fromkeys(SWITCHES),
    backends={"latent_norm_rope": {"triton": None, "cute": None}},
)


def resolve(**fields):
    return resolve_runtime(RuntimeConfig(**fields), SURROUNDINGS)


@pytest.mark.parametrize("switch", SWITCHES)
def test_a22_a_switch_that_is_required_runs_or_raises(switch):
    assert resolve(**{switch: "off"})[switch].in_force == "off"
    try:
        resolved = resolve(**{switch: "require"})
    except ConfigError as error:
        assert switch in str(error)
        assert "cannot be met" in str(error)
    else:
        assert resolved[switch].in_force != "off"


@pytest.mark.parametrize("field", ["attention", "latent_norm_rope", "gemm", "merged_qkv_a"])
def test_a22_a_backend_that_is_named_runs_or_raises(field):
    kind = type(getattr(RuntimeConfig(), field))
    ran = []
    for value in kind:
        try:
            choice = resolve(**{field: value})[field]
        except ConfigError as error:
            assert f"runtime.{field}={value}" in str(error)
        else:
            assert choice.in_force == value or value == "auto"
            ran.append(value)
    assert "auto" in ran
    assert len(ran) >= 2


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "fp8_e4m3"])
def test_a22_a_pool_of_another_dtype_than_asked_for_is_refused(kv_dtype):
    assert resolve(kv_dtype="float32")["kv_dtype"].in_force == "float32"
    with pytest.raises(ConfigError, match=f"runtime.kv_dtype={kv_dtype}"):
        make_worker(random_model(tiny_config()), RuntimeConfig(kv_dtype=kv_dtype))


def test_a22_draft_sampling_changes_the_drafts():
    model = random_model(tiny_config())
    tokens = []
    for sampling in ("greedy", "sample"):
        worker = make_worker(model, dataclasses.replace(RuntimeConfig.plain(), draft_sampling=sampling))
        worker.admit("a")
        hot = SamplingParams(temperature=5.0, seed=1)
        chunk = ContextChunk(request_id="a", target_hidden=random_hidden(model, 5), start_position=0, anchor=3, sampling=hot)
        tokens.append(worker.step(StepInput(context=[chunk])).draft_tokens)
    assert not torch.equal(*tokens)


def test_a22_runtime_values_are_checked():
    with pytest.raises(ConfigError, match="runtime.fused_prologue is 'yes'; allowed: off, auto, require"):
        RuntimeConfig(fused_prologue="yes")
    with pytest.raises(ConfigError, match="runtime.attention is None"):
        RuntimeConfig(attention=None)
    with pytest.raises(TypeError):
        RuntimeConfig(turbo="on")
    with pytest.raises(KeyError, match="no runtime field 'turbo'"):
        resolve()["turbo"]


def test_plain_runtime_uses_no_fast_path():
    plain = RuntimeConfig.plain()
    resolved = resolve_runtime(plain, SURROUNDINGS)
    assert not resolved.fallbacks
    assert {resolved[switch].in_force for switch in SWITCHES} == {"off"}
    assert (resolved["attention"].in_force, resolved["gemm"].in_force) == ("torch", "cublas")


def test_a21_every_fallback_has_a_reason_is_counted_and_is_logged_once(caplog):
    model = random_model(tiny_config())
    caplog.set_level(logging.WARNING, logger="dspark_model")
    worker = make_worker(model, RuntimeConfig())
    steps = 3
    for step in range(steps):
        worker.admit(step)
        chunk = ContextChunk(request_id=step, target_hidden=random_hidden(model, 4), start_position=0, anchor=3)
        output = worker.step(StepInput(context=[chunk]))
    missing = {choice.name for choice in output.runtime.choices if choice.requested == "auto" and choice.in_force == "off"}
    fallbacks = {choice.name: choice for choice in output.runtime.fallbacks}
    assert missing == set(fallbacks)
    assert set(SWITCHES) <= set(fallbacks), "no fast path of a switch runs without a GPU"
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 1
    for name, choice in fallbacks.items():
        assert len(choice.reason) > 10
        assert worker.fallback_counts[name] == steps
        assert name in warned[0]
        assert choice.reason in worker.describe()[f"runtime.{name}"]


def test_a21_a_plain_step_counts_no_fallback(caplog):
    model = random_model(tiny_config())
    worker = make_worker(model, RuntimeConfig.plain())
    output = prefill(worker, [random_hidden(model, 4)], [3])
    assert not output.runtime.fallbacks
    assert not worker.fallback_counts
    assert not caplog.records


def test_a21_report_names_the_choice_of_every_runtime_field():
    report = make_worker(random_model(tiny_config()), RuntimeConfig()).describe()
    for field in dataclasses.fields(RuntimeConfig):
        assert report[f"runtime.{field.name}"]
    assert report["slot_rule"] == "shifted labels, rows 0..K-1 (no key; dspark family default)"
    stated = make_worker(random_model(tiny_config(shift_label=False))).describe()
    assert stated["slot_rule"] == "plain DFlash, K+1 rows, rows 1..K (checkpoint key shift_label=false)"


def test_checkpoint_config_takes_a_repo_or_a_path():
    assert CheckpointConfig(repo_id="a/b", revision="c").revision == "c"
    with pytest.raises(ConfigError, match="exactly one of repo_id and path"):
        CheckpointConfig()
