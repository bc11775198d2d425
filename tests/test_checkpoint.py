"""Reading and writing checkpoints: names, files, revisions, dtypes, memory, and whose tables are used."""

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from dense_drafter import dense_draft
from drafting import draft, make_worker, prefill, random_hidden
from safetensors.torch import load_file, save_file

import dspark_model
from dspark_model import CheckpointError, ConfigError, DrafterConfig, MLADSparkForCausalLM, embeddings_bit_equal, load_config
from dspark_model.checkpoint import RENAMES, canonical_name
from dspark_model.golden import check_case
from dspark_model.testing import (
    assert_bitwise_equal,
    random_lm_head,
    random_model,
    random_tensors,
    tiny_config,
    tiny_config_json,
    write_checkpoint,
)

ROOT = Path(dspark_model.__file__).parent.parent
EMBED = "embed_tokens.weight"
MARKOV_W2 = "markov_head.markov_w2.weight"


def load(folder, config: DrafterConfig | None = None, **options) -> MLADSparkForCausalLM:
    config = config or tiny_config()
    dtype = options.get("dtype") or getattr(torch, config.dtype)
    options.setdefault("lm_head", random_lm_head(config, dtype=dtype))
    return MLADSparkForCausalLM.from_pretrained(folder, **options)


def write_with(folder: Path, change, config: DrafterConfig | None = None, **options) -> Path:
    """A tiny checkpoint whose tensors `change` has edited."""
    config = config or tiny_config()
    tensors = random_tensors(config)
    change(tensors)
    return write_checkpoint(folder, config, tensors=tensors, **options)


def assert_same_weights(model: MLADSparkForCausalLM, tensors: dict[str, torch.Tensor]) -> None:
    state = model.state_dict()
    assert set(state) == set(tensors)
    for name, tensor in tensors.items():
        assert_bitwise_equal(state[name], tensor, name)


# Names and completeness


@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_every_tensor_is_read_bit_for_bit(drafter_config, num_shards, tmp_path):
    write_checkpoint(tmp_path, drafter_config, seed=4, num_shards=num_shards)
    model = load(tmp_path, drafter_config)
    assert_same_weights(model, random_tensors(drafter_config, seed=4))
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_optional_tensors_are_read_bit_for_bit(tmp_path):
    config = tiny_config(fc_norm=True, mask_embedding=True, enable_confidence_head=False)
    write_checkpoint(tmp_path, config)
    assert_same_weights(load(tmp_path, config), random_tensors(config))


NAMES = [name for name in random_tensors(tiny_config()) if name != EMBED]


@pytest.mark.parametrize("name", NAMES)
def test_a01_each_missing_tensor_is_named(name, tmp_path):
    write_with(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=r"1 problems") as error:
        load(tmp_path)
    assert f"missing: {name} {list(random_tensors(tiny_config())[name].shape)}" in str(error.value)


def test_a01_renamed_tensor_is_named(tmp_path):
    write_with(tmp_path, lambda tensors: tensors.update(markov_bias=tensors.pop(MARKOV_W2)))
    with pytest.raises(CheckpointError, match="2 problems") as error:
        load(tmp_path)
    assert f"missing: {MARKOV_W2} [320, 16]" in str(error.value)
    assert "surplus: markov_bias" in str(error.value)


def test_a01_surplus_tensor_is_refused_or_named_as_harmless(tmp_path):
    write_with(tmp_path, lambda tensors: tensors.update({"d2t.index": torch.zeros(3), "other": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match="surplus: d2t.index\n.*surplus: other"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match="surplus: other"):
        load(tmp_path, ignore_tensors=("d2t.index",))
    assert_same_weights(load(tmp_path, ignore_tensors=iter(("d2t.index", "other"))), random_tensors(tiny_config()))


def test_a01_all_problems_are_named_together(tmp_path):
    def change(tensors):
        del tensors["final_norm.weight"]
        tensors["surplus"] = torch.zeros(1)
        tensors["context_proj.weight"] = torch.zeros(64, 143)

    write_with(tmp_path, change)
    with pytest.raises(CheckpointError, match="3 problems") as error:
        load(tmp_path)
    for text in (
        "missing: final_norm.weight [64]",
        "surplus: surplus",
        "shape: context_proj.weight is [64, 143], wanted [64, 144]",
    ):
        assert text in str(error.value)


@pytest.mark.parametrize(
    "extra", [{"markov_rank": 16}, {"enable_confidence_head": True}, {"fc_norm": True}, {"num_hidden_layers": 3}]
)
def test_a01_a_config_that_promises_more_than_the_file_holds_is_refused(extra, tmp_path):
    small = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
    write_checkpoint(tmp_path, tiny_config(**small), config_json=tiny_config_json(**{**small, **extra}))
    with pytest.raises(CheckpointError, match="missing: "):
        load(tmp_path)


SPELLINGS = {
    "context_proj.weight": ("fc.weight", "model.fc.weight", "model.context_proj.weight"),
    "context_norm.weight": ("hidden_norm.weight", "model.hidden_norm.weight"),
    "final_norm.weight": ("norm.weight", "model.norm.weight"),
    "markov_head.markov_w1.weight": ("markov_w1.weight", "model.markov_w1.weight"),
    "markov_head.markov_w2.weight": ("markov_w2.weight",),
    "confidence_head.proj.weight": ("confidence_proj.weight",),
    "confidence_head.proj.bias": ("confidence_proj.bias",),
    "embed_tokens.weight": ("model.embed_tokens.weight",),
    "layers.1.self_attn.kv_a_proj_with_mqa.weight": ("model.layers.1.self_attn.kv_a_proj_with_mqa.weight",),
    "layers.0.input_layernorm.weight": ("model.layers.0.input_layernorm.weight",),
}


@pytest.mark.parametrize(
    ("name", "stored"), [(name, stored) for name, spellings in SPELLINGS.items() for stored in (name, *spellings)]
)
def test_a11_each_spelling_of_a_tensor_is_read(name, stored, tmp_path):
    write_with(tmp_path, lambda tensors: tensors.update({stored: tensors.pop(name)}))
    assert_same_weights(load(tmp_path), random_tensors(tiny_config()))


def test_a11_the_spelling_table_covers_every_rename():
    stored = [spelling for spellings in SPELLINGS.values() for spelling in spellings]
    for pattern, _ in RENAMES:
        assert any(pattern.search(name.removeprefix("model.")) or pattern.search(name) for name in stored)


@pytest.mark.parametrize(
    "stored", ["layers.0.input_norm.weight", "mfc.weight", "xnorm.weight", "layers.0.norm.weight", "fc_norm.0.weight"]
)
def test_a11_other_names_are_left_alone(stored):
    assert canonical_name(stored) == stored


@pytest.mark.parametrize(("name", "stored"), [("context_proj.weight", "fc.weight"), ("final_norm.weight", "model.norm.weight")])
@pytest.mark.parametrize("num_shards", [1, 2])
def test_a11_two_spellings_of_one_tensor_are_refused(name, stored, num_shards, tmp_path):
    write_with(tmp_path, lambda tensors: tensors.update({stored: tensors[name].clone()}), num_shards=num_shards)
    with pytest.raises(CheckpointError, match=f"are both {name}; keep one") as error:
        load(tmp_path)
    assert stored in str(error.value)


# Whose embedding and head


def drop_embedding(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[EMBED]


def fill_memory_with_sevens() -> None:
    """Leave 7.0 in the allocator's free blocks of the sizes that loading will ask for."""
    for _ in range(3):
        blocks = [torch.full(tensor.shape, 7.0) for tensor in random_tensors(tiny_config()).values() for _ in range(2)]
        del blocks


def test_a02_tensors_that_only_the_target_has_must_be_given(tmp_path):
    write_with(tmp_path, drop_embedding)
    head = random_lm_head(tiny_config())
    with pytest.raises(
        CheckpointError, match="the checkpoint has no embed_tokens.weight, and target_embed_tokens was not given"
    ):
        MLADSparkForCausalLM.from_pretrained(tmp_path, lm_head=head)
    with pytest.raises(CheckpointError, match="has no lm_head.weight, as usual for a drafter, and no lm_head was given"):
        MLADSparkForCausalLM.from_pretrained(tmp_path, target_embed_tokens=torch.randn(320, 64))


def test_a02_target_tables_are_the_targets_bits_under_a_poisoned_allocator(tmp_path):
    write_with(tmp_path, drop_embedding)
    head, embed = torch.randn(330, 64), torch.randn(320, 64)
    fill_memory_with_sevens()
    model = MLADSparkForCausalLM.from_pretrained(tmp_path, lm_head=head, target_embed_tokens=embed)
    assert_bitwise_equal(model.embed_tokens.weight, embed)
    assert_bitwise_equal(model.lm_head, head[:320])
    assert model.lm_head.data_ptr() == head.data_ptr()
    stored = random_tensors(tiny_config())
    drop_embedding(stored)
    assert_same_weights(model, {**stored, EMBED: embed})


@pytest.mark.parametrize(
    ("stored", "given", "choice", "wanted"),
    [
        (True, False, "auto", "checkpoint"),
        (True, True, "auto", "checkpoint"),
        (False, True, "auto", "target"),
        (True, False, "own", "checkpoint"),
        (True, True, "own", "checkpoint"),
        (True, True, "target", "target"),
        (False, True, "target", "target"),
    ],
)
def test_a13_whose_embedding_is_used(stored, given, choice, wanted, tmp_path):
    write_with(tmp_path, (lambda tensors: None) if stored else drop_embedding)
    target = torch.randn(320, 64)
    model = load(tmp_path, target_embed_tokens=target if given else None, embedding=choice)
    expected = random_tensors(tiny_config())[EMBED] if wanted == "checkpoint" else target
    assert_bitwise_equal(model.embed_tokens.weight, expected)
    worker = make_worker(model)
    assert worker.describe()["embedding"] == f"from the {wanted}"
    hidden = random_hidden(model, 9)
    ours = prefill(worker, [hidden], [5]).trace.draft
    theirs = dense_draft(tiny_config_json(), random_tensors(tiny_config()), model.lm_head, hidden, 5, 7, embed_tokens=expected)
    torch.testing.assert_close(ours.biased_logits[0], theirs.biased.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("stored", "given", "choice", "message"),
    [
        (False, True, "own", "embedding=own, but the checkpoint has no embed_tokens.weight"),
        (False, False, "own", "embedding=own, but the checkpoint has no embed_tokens.weight"),
        (True, False, "target", "embedding=target, and target_embed_tokens was not given"),
        (False, False, "auto", "the checkpoint has no embed_tokens.weight, and target_embed_tokens was not given"),
    ],
)
def test_a13_an_embedding_that_is_nowhere_is_refused(stored, given, choice, message, tmp_path):
    write_with(tmp_path, (lambda tensors: None) if stored else drop_embedding)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, target_embed_tokens=torch.randn(320, 64) if given else None, embedding=choice)


def test_a13_unknown_embedding_choice_is_refused(tmp_path):
    write_checkpoint(tmp_path, tiny_config())
    with pytest.raises(ValueError, match="neither"):
        load(tmp_path, embedding="neither")


def test_a13_own_head_is_used_only_when_none_is_given(tmp_path):
    own, other = torch.randn(320, 64), torch.randn(320, 64)
    write_with(tmp_path, lambda tensors: tensors.update({"lm_head.weight": own}))
    assert_bitwise_equal(MLADSparkForCausalLM.from_pretrained(tmp_path).lm_head, own)
    assert_bitwise_equal(MLADSparkForCausalLM.from_pretrained(tmp_path, lm_head=other).lm_head, other)


@pytest.mark.parametrize(
    ("ours", "theirs", "equal"),
    [
        (torch.ones(4, 3), torch.ones(4, 3), True),
        (torch.ones(4, 3), torch.ones(6, 3), True),
        (torch.ones(6, 3), torch.ones(4, 3), True),
        (torch.ones(4, 3), torch.ones(4, 3).bfloat16(), False),
        (torch.ones(4, 3), torch.ones(4, 2), False),
        (torch.zeros(4, 3), -torch.zeros(4, 3), False),
        (torch.full((2, 2), float("nan")), torch.full((2, 2), float("nan")), True),
        (torch.arange(12.0).view(3, 4).T, torch.arange(12.0).view(3, 4).T.contiguous(), True),
        (torch.ones(4, 3), torch.ones(4, 3).index_fill(0, torch.tensor([3]), 1.0000001), False),
    ],
)
def test_embeddings_bit_equal(ours, theirs, equal):
    assert embeddings_bit_equal(ours, theirs) is equal


@pytest.mark.parametrize("table", ["lm_head", "target_embed_tokens"])
def test_tables_of_another_dtype_are_refused(table, tmp_path):
    write_with(tmp_path, drop_embedding)
    tables = {"lm_head": torch.zeros(320, 64), "target_embed_tokens": torch.zeros(320, 64)}
    tables[table] = tables[table].bfloat16()
    with pytest.raises(ValueError, match=f"{table} is torch.bfloat16 on cpu, but the drafter is loaded as torch.float32"):
        MLADSparkForCausalLM.from_pretrained(tmp_path, **tables)
    with pytest.raises(ValueError, match="loaded as torch.bfloat16 on cpu"):
        MLADSparkForCausalLM.from_pretrained(
            tmp_path, lm_head=torch.zeros(320, 64), target_embed_tokens=torch.zeros(320, 64), dtype=torch.bfloat16
        )


# Files


def test_a04_a_missing_shard_is_named(tmp_path):
    write_checkpoint(tmp_path, tiny_config(), num_shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="names shards that are not there: .*model-00002-of-00002.safetensors"):
        load(tmp_path)


def test_a04_a_shard_that_does_not_hold_what_the_index_says_is_named(tmp_path):
    write_checkpoint(tmp_path, tiny_config(), num_shards=2)
    first, second = (tmp_path / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    shutil.copy(first, second)
    with pytest.raises(CheckpointError, match="model-00002-of-00002.safetensors does not hold what .*index.json says"):
        load(tmp_path)


def test_a04_stray_weight_files_are_not_read(tmp_path):
    write_checkpoint(tmp_path, tiny_config(), num_shards=2)
    save_file({"stray": torch.zeros(3)}, tmp_path / "model-00003-of-00003.safetensors")
    assert_same_weights(load(tmp_path), random_tensors(tiny_config()))


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": [1]}'])
def test_a04_a_damaged_index_is_named(content, tmp_path):
    write_checkpoint(tmp_path, tiny_config(), num_shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match="model.safetensors.index.json is damaged .*download it again"):
        load(tmp_path)


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize("keep", ["all-but-100", "in-header", "header-length", "nothing"])
@pytest.mark.parametrize("num_shards", [1, 2])
def test_a05_a_truncated_file_is_named(keep, num_shards, tmp_path):
    write_checkpoint(tmp_path, tiny_config(), num_shards=num_shards)
    path = sorted(tmp_path.glob("*.safetensors"))[-1]
    cut(path, {"all-but-100": path.stat().st_size - 100, "in-header": 300, "header-length": 5, "nothing": 0}[keep])
    with pytest.raises(CheckpointError, match="is damaged or cut short .*download it again") as error:
        load(tmp_path)
    assert str(path) in str(error.value)


def test_a05_a_file_that_shrinks_while_it_is_read_is_named(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, tiny_config())
    path = tmp_path / "model.safetensors"
    checkpoint = dspark_model.checkpoint
    monkeypatch.setattr(checkpoint, "_check_names", lambda *args: cut(path, path.stat().st_size - 100))
    with pytest.raises(CheckpointError, match="could not be read .*download it again"):
        load(tmp_path)


def test_folders_that_are_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="has neither model.safetensors nor model.safetensors.index.json"):
        load(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="config.json does not exist"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match="neither a folder nor a repo id of the form owner/name"):
        load(tmp_path / "not" / "there")
    with pytest.raises(CheckpointError, match="is a local folder and has no revisions"):
        load(tmp_path, revision="main")


# Hub caches, offline


def cached_repo(cache: Path, name: str, revisions: dict[str, int]) -> Path:
    """A hub cache on disk that holds the tiny drafter `name`: for each ref or commit a snapshot of that seed."""
    repo = cache / f"models--{name.replace('/', '--')}"
    for ref, seed in revisions.items():
        commit = ref if len(ref) == 40 else f"{seed:040x}"
        write_checkpoint(repo / "snapshots" / commit, tiny_config(), seed)
        if commit != ref:
            (repo / "refs").mkdir(exist_ok=True)
            (repo / "refs" / ref).write_text(commit)
    return cache


def test_a07_the_asked_revision_of_the_drafter_is_read(tmp_path):
    commit = "c" * 40
    cached_repo(tmp_path, "owner/drafter", {"main": 1, "v2": 2, commit: 3})
    cached_repo(tmp_path, "owner/target", {"main": 4, "target-only": 5})
    options = {"cache_dir": tmp_path, "local_files_only": True}
    for revision, seed in ((None, 1), ("main", 1), ("v2", 2), (commit, 3)):
        assert_same_weights(load("owner/drafter", revision=revision, **options), random_tensors(tiny_config(), seed))
    with pytest.raises(CheckpointError, match="revision target-only of a repo of that name is not in the local cache"):
        load("owner/drafter", revision="target-only", **options)


def test_a07_a_presets_revision_is_the_drafters(tmp_path):
    cached_repo(tmp_path / "cache", "owner/drafter", {"main": 1, "v2": 2})
    preset = tmp_path / "preset.toml"
    preset.write_text(
        '[checkpoint]\nrepo_id = "owner/drafter"\nrevision = "v2"\n'
        "[pool]\nnum_pages = 4\nmax_requests = 1\nmax_positions = 16\n"
    )
    chosen = load_config(preset).checkpoint
    model = load(chosen.repo_id, revision=chosen.revision, cache_dir=tmp_path / "cache", local_files_only=True)
    assert_same_weights(model, random_tensors(tiny_config(), 2))


def run_python(code: str, **environment) -> str:
    """Run `code` in a new process that finds the package."""
    script = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n" + textwrap.dedent(code)
    variables = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "OMP_NUM_THREADS": "1", **environment}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=variables)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a06_offline_loads_a_folder_and_a_filled_cache_and_names_what_is_absent(tmp_path):
    cached_repo(tmp_path / "cache", "owner/drafter", {"main": 1})
    write_checkpoint(tmp_path / "folder", tiny_config(), 2)
    output = run_python(
        f"""
        import socket, time

        def refuse(*args, **kwargs):
            raise AssertionError("the network was reached for")

        socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse
        import dspark_model
        from dspark_model.testing import assert_bitwise_equal, random_lm_head, random_tensors, tiny_config

        def load(source):
            return dspark_model.MLADSparkForCausalLM.from_pretrained(
                source, lm_head=random_lm_head(tiny_config()), cache_dir={str(tmp_path / "cache")!r}
            )

        for source, seed in (({str(tmp_path / "folder")!r}, 2), ("owner/drafter", 1)):
            for name, tensor in random_tensors(tiny_config(), seed).items():
                assert_bitwise_equal(load(source).state_dict()[name], tensor, name)
        start = time.monotonic()
        try:
            load("owner/absent")
        except dspark_model.CheckpointError as error:
            print(error)
        assert time.monotonic() - start < 5.0
        """,
        HF_HUB_OFFLINE="1",
    )
    assert "owner/absent is not a folder" in output
    assert "offline mode (local_files_only or HF_HUB_OFFLINE) is on" in output


def test_a06_local_files_only_does_not_need_the_variable(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was reached for")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    cached_repo(tmp_path, "owner/drafter", {"main": 1})
    model = load("owner/drafter", cache_dir=tmp_path, local_files_only=True)
    assert_same_weights(model, random_tensors(tiny_config(), 1))
    with pytest.raises(CheckpointError, match="offline mode"):
        load("owner/absent", cache_dir=tmp_path, local_files_only=True)


# Configs beside the weights


def test_a10_no_code_from_the_checkpoint_is_run(tmp_path):
    config_json = tiny_config_json(architectures=None, auto_map={"AutoModel": "modeling_own.Model"})
    write_checkpoint(tmp_path, tiny_config(), config_json=config_json)
    (tmp_path / "modeling_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert_same_weights(load(tmp_path), random_tensors(tiny_config()))
    assert not (tmp_path / "ran").exists()


def test_a12_a_mask_token_past_the_embedding_is_refused_at_load(tmp_path):
    write_checkpoint(tmp_path, tiny_config(), config_json=tiny_config_json(mask_token_id=320))
    with pytest.raises(ConfigError, match="mask_token_id 320 is outside the vocabulary of 320 rows"):
        load(tmp_path)
    write_checkpoint(tmp_path, tiny_config(), config_json=tiny_config_json(vocab_size=400, mask_token_id=320))
    with pytest.raises(CheckpointError, match=r"shape: embed_tokens.weight is \[320, 64\], wanted \[400, 64\]"):
        load(tmp_path, lm_head=torch.zeros(400, 64))


def test_a14_every_entry_point_loads_the_same_drafter_only_checkpoint(tmp_path):
    """The folder as a string and as a path, a repo id, a preset, and the golden harness."""
    folder = cached_repo(tmp_path, "owner/drafter", {"main": 1}) / "models--owner--drafter" / "snapshots" / f"{1:040x}"
    preset = tmp_path / "preset.toml"
    preset.write_text(f'[checkpoint]\npath = "{folder}"\n[pool]\nnum_pages = 4\nmax_requests = 1\nmax_positions = 16\n')
    sources = (str(folder), folder, "owner/drafter", load_config(preset).checkpoint.path)
    models = [load(source, cache_dir=tmp_path, local_files_only=True) for source in sources]
    for model in models:
        assert_same_weights(model, random_tensors(tiny_config(), 1))
    case = tmp_path / "case"
    case.mkdir()
    run = {"num_drafts": 7, "inputs": "inputs.safetensors", "expected": "expected.safetensors"}
    (case / "case.json").write_text(json.dumps({"name": "own", "checkpoint": str(folder), "runs": [run]}))
    hidden, model = random_hidden(models[0], 9), models[0]
    expected = prefill(make_worker(model), [hidden], [5])
    inputs = {"target_hidden": hidden, "cu_seqlens": torch.tensor([0, 9]), "context_lens": torch.tensor([9])}
    save_file({**inputs, "anchor_tokens": torch.tensor([5]), "lm_head_weight": model.lm_head}, case / "inputs.safetensors")
    save_file({"draft_tokens": expected.draft_tokens}, case / "expected.safetensors")
    assert all(row.passed for row in check_case(case))


def test_a20_the_targets_quantisation_does_not_reach_the_drafter(tmp_path):
    """A target's config beside the drafter is not read, and a quantised head of it is refused instead of misread."""
    target = {"quantization_config": {"quant_method": "fp8"}, "vocab_size": 320}
    (tmp_path / "config.json").write_text(json.dumps(target))
    folder = write_checkpoint(tmp_path / "drafter", tiny_config())
    model = load(folder)
    assert_same_weights(model, random_tensors(tiny_config()))
    assert model.config.quant_method is None
    with pytest.raises(ValueError, match="lm_head is torch.int8 on cpu, but the drafter is loaded as torch.float32"):
        load(folder, lm_head=torch.zeros(320, 64, dtype=torch.int8))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64])
def test_a20_weights_of_an_unknown_storage_are_refused(dtype, tmp_path):
    def change(tensors):
        tensors["final_norm.weight"] = tensors["final_norm.weight"].to(dtype)

    write_with(tmp_path, change)
    with pytest.raises(CheckpointError, match=f"final_norm.weight in .* is stored as {dtype} without row scales; supported: "):
        load(tmp_path)


def test_a20_row_scales_need_a_config_that_says_so(tmp_path):
    write_with(tmp_path, lambda tensors: tensors.update({MARKOV_W2 + "_scale": torch.ones(320, 1)}))
    with pytest.raises(CheckpointError, match=f"surplus: {MARKOV_W2}_scale"):
        load(tmp_path)


def test_a20_a_config_that_says_quantised_needs_row_scales(tmp_path):
    config_json = tiny_config_json(quantization_config={"quant_method": "int8_rows"})
    write_checkpoint(tmp_path, tiny_config(), config_json=config_json)
    with pytest.raises(CheckpointError, match="missing: row scales .* quantization_config says int8_rows"):
        load(tmp_path)


def int8_checkpoint(folder: Path, change=lambda tensors: None) -> dict[str, torch.Tensor]:
    """Write the tiny drafter with one int8 matrix, edited by `change`; returns what has to be loaded."""
    tensors = random_tensors(tiny_config())
    values = torch.randint(-127, 128, tensors[MARKOV_W2].shape, dtype=torch.int8)
    scales = torch.rand(320, 1) / 100
    stored = {**tensors, MARKOV_W2: values, MARKOV_W2 + "_scale": scales}
    change(stored)
    config_json = tiny_config_json(quantization_config={"quant_method": "int8_rows"})
    write_checkpoint(folder, tiny_config(), tensors=stored, config_json=config_json)
    return {**tensors, MARKOV_W2: (values.double() * scales.double()).float()}


def test_int8_rows_are_values_times_scales(tmp_path):
    wanted = int8_checkpoint(tmp_path)
    model = load(tmp_path)
    assert model.config.quant_method == "int8_rows"
    assert_same_weights(model, wanted)


def test_int8_rows_with_a_wrong_scale_are_refused(tmp_path):
    int8_checkpoint(tmp_path / "a", lambda stored: stored.update({MARKOV_W2 + "_scale": torch.ones(320)}))
    with pytest.raises(CheckpointError, match=r"shape: .*_scale is \[320\], wanted \[320, 1\]"):
        load(tmp_path / "a")
    int8_checkpoint(tmp_path / "b", lambda stored: stored.update({MARKOV_W2: torch.ones(320, 16)}))
    with pytest.raises(CheckpointError, match="is stored as torch.float32 with row scales"):
        load(tmp_path / "b")


@pytest.mark.parametrize("embedding", ["own", "target"])
def test_int8_save_and_load(embedding, drafter_config, tmp_path):
    model = random_model(drafter_config)
    model.save_pretrained(tmp_path / "a", storage="int8_rows")
    stored = load_file(tmp_path / "a" / "model.safetensors")
    assert stored["embed_tokens.weight"].dtype is torch.int8
    target = torch.randn(320, 64)
    loaded = load(tmp_path / "a", drafter_config, target_embed_tokens=target, embedding=embedding)
    assert_bitwise_equal(loaded.final_norm.weight, model.final_norm.weight)
    for name, tensor in loaded.state_dict().items():
        if name == EMBED and embedding == "target":
            assert_bitwise_equal(tensor, target)
            continue
        # Half a step of 127, and clipping of the largest values by at most 30 %.
        error = (tensor - model.state_dict()[name]).abs()
        top = model.state_dict()[name].abs().amax(-1, keepdim=True)
        assert (error <= 0.31 * top).all(), name
        assert error.square().mean() <= (0.01 * top).square().mean(), name
    loaded.save_pretrained(tmp_path / "b")
    again = load(tmp_path / "b", drafter_config, target_embed_tokens=target, embedding="auto")
    assert again.config.quant_method is None
    assert_same_weights(again, loaded.state_dict())


# Dtypes and memory


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("asked", [None, "float32", "bfloat16", "float16"])
def test_dtype_is_the_configs_or_the_asked_one(stored, asked, tmp_path):
    config = tiny_config(torch_dtype=stored)
    write_checkpoint(tmp_path, config)
    dtype = None if asked is None else getattr(torch, asked)
    model = load(tmp_path, config, dtype=dtype)
    wanted = getattr(torch, asked or stored)
    assert model.dtype is wanted
    assert {parameter.dtype for parameter in model.parameters()} == {wanted}
    assert_same_weights(model, {name: tensor.to(wanted) for name, tensor in random_tensors(config).items()})


@pytest.mark.parametrize("read_bytes", [300, 4096, 10**9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reads_in_pieces_of_any_size_give_the_same_bits(read_bytes, dtype, tmp_path, monkeypatch):
    wanted = int8_checkpoint(tmp_path)
    monkeypatch.setattr(dspark_model.checkpoint, "_READ_BYTES", read_bytes)
    assert_same_weights(load(tmp_path, dtype=dtype), {name: tensor.to(dtype) for name, tensor in wanted.items()})


LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "vocab_size": 24000,
    "markov_rank": 256,
    "mask_token_id": 1,
    "q_lora_rank": 512,
    "kv_lora_rank": 128,
}


@pytest.mark.parametrize("loaded_as", ["float32", "bfloat16"])
def test_loading_holds_at_most_1_10_times_the_models_bytes(loaded_as, tmp_path):
    """Peak resident memory, from a file of 4 bytes a value: as it is, and rounded to 2 bytes."""
    config = tiny_config(**LARGE, num_hidden_layers=1 if loaded_as == "float32" else 5)
    with torch.device("meta"):
        shapes = MLADSparkForCausalLM(config, lm_head=torch.empty(24000, 1024)).state_dict()
    write_checkpoint(tmp_path / "large", config, tensors={name: torch.zeros(t.shape) for name, t in shapes.items()})
    write_checkpoint(tmp_path / "small", tiny_config())
    output = run_python(
        f"""
        import torch
        from dspark_model import MLADSparkForCausalLM
        dtype = torch.{loaded_as}
        MLADSparkForCausalLM.from_pretrained({str(tmp_path / "small")!r}, lm_head=torch.ones(320, 64, dtype=dtype), dtype=dtype)
        head = torch.ones(24000, 1024, dtype=dtype)

        def resident(field):
            lines = open("/proc/self/status").read().splitlines()
            return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])

        open("/proc/self/clear_refs", "w").write("5")
        before = resident("VmRSS")
        model = MLADSparkForCausalLM.from_pretrained({str(tmp_path / "large")!r}, lm_head=head, dtype=dtype)
        print(sum(tensor.nbytes for tensor in model.state_dict().values()), resident("VmHWM") - before)
        """
    )
    final, risen = (int(number) for number in output.split())
    assert 190e6 < final < 260e6
    assert final * 0.9 < risen, "the measurement misses the model itself"
    assert risen <= 1.10 * final, f"{risen / final:.3f} times the model's bytes"


# Saving


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"fc_norm": True, "mask_embedding": True}, {"model_type": "mla_dflash"}], ids=str)
def test_save_and_load_round_trip(dtype, changes, drafter_config, tmp_path):
    data = {**drafter_config.to_dict(), **changes}
    data.pop("sample_from_anchor")
    config = DrafterConfig.from_dict(data)
    model = random_model(config, seed=9, dtype=dtype)
    model.save_pretrained(tmp_path / "new" / "folder")
    again = load(tmp_path / "new" / "folder", lm_head=model.lm_head)
    assert again.dtype is dtype
    assert {**again.config.to_dict(), "torch_dtype": "float32"} == model.config.to_dict()
    assert_same_weights(again, model.state_dict())
    ours, theirs = draft(model), draft(again)
    assert_bitwise_equal(ours.trace.draft.biased_logits, theirs.trace.draft.biased_logits)
    assert_bitwise_equal(ours.confidence, theirs.confidence)


@pytest.mark.parametrize("max_shard_bytes", [90_000, 200_000, 10**9])
def test_sharded_save_and_load_round_trip(max_shard_bytes, tmp_path):
    model = random_model(tiny_config())
    model.save_pretrained(tmp_path, max_shard_bytes=max_shard_bytes)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (max_shard_bytes < 10**9) == (tmp_path / "model.safetensors.index.json").exists()
    assert max(sum(t.nbytes for t in load_file(file).values()) for file in files) <= max_shard_bytes
    assert_same_weights(load(tmp_path), model.state_dict())


def test_saving_leaves_out_the_targets_tables(tmp_path):
    write_with(tmp_path / "a", drop_embedding)
    target = torch.randn(320, 64)
    load(tmp_path / "a", target_embed_tokens=target).save_pretrained(tmp_path / "b")
    assert set(load_file(tmp_path / "b" / "model.safetensors")) == set(NAMES)
    assert_bitwise_equal(load(tmp_path / "b", target_embed_tokens=target).embed_tokens.weight, target)


@pytest.mark.parametrize("before", [1, 3])
@pytest.mark.parametrize("shard_bytes", [None, 200_000])
def test_saving_over_a_checkpoint_leaves_nothing_of_it(before, shard_bytes, tmp_path):
    write_checkpoint(tmp_path, tiny_config(), seed=1, num_shards=before)
    (tmp_path / "README.md").write_text("kept")
    load(tmp_path).save_pretrained(tmp_path, max_shard_bytes=shard_bytes)
    assert_same_weights(load(tmp_path), random_tensors(tiny_config(), 1))
    model = random_model(tiny_config(), seed=2)
    model.save_pretrained(tmp_path, max_shard_bytes=shard_bytes)
    assert_same_weights(load(tmp_path), model.state_dict())
    named = {"model.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    if index.exists():
        named = set(json.loads(index.read_text())["weight_map"].values()) | {index.name}
    assert {path.name for path in tmp_path.iterdir()} == named | {"config.json", "README.md"}


@pytest.mark.parametrize("storage", ["plain", "int8_rows"])
def test_a_head_that_came_from_the_checkpoint_is_saved_with_it(storage, tmp_path):
    write_with(tmp_path / "a", lambda tensors: tensors.update({"lm_head.weight": random_lm_head(tiny_config())}))
    MLADSparkForCausalLM.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b", storage=storage)
    again = MLADSparkForCausalLM.from_pretrained(tmp_path / "b")
    assert again.lm_head_source == "checkpoint"
    if storage == "plain":
        assert_bitwise_equal(again.lm_head, random_lm_head(tiny_config()))
    else:
        torch.testing.assert_close(again.lm_head, random_lm_head(tiny_config()), rtol=0, atol=0.05)
    load(tmp_path / "a").save_pretrained(tmp_path / "c")
    assert "lm_head.weight" not in load_file(tmp_path / "c" / "model.safetensors")


def test_an_index_reaches_no_file_outside_its_folder(tmp_path):
    """Neither when it is read nor when the checkpoint is replaced."""
    write_checkpoint(tmp_path / "other", tiny_config())
    model = random_model(tiny_config(), seed=2)
    for outside in ("../other/model.safetensors", str(tmp_path / "other" / "model.safetensors")):
        model.save_pretrained(tmp_path / "a")
        (tmp_path / "a" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": outside}}))
        with pytest.raises(CheckpointError, match="names of files in its own folder"):
            load(tmp_path / "a")
        model.save_pretrained(tmp_path / "a")
        assert_same_weights(load(tmp_path / "a"), model.state_dict())
        assert_same_weights(load(tmp_path / "other"), random_tensors(tiny_config()))


def test_saving_over_a_damaged_index_names_it(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match="model.safetensors.index.json is damaged"):
        random_model(tiny_config()).save_pretrained(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.float8_e4m3fn, "float32"])
def test_a_dtype_that_cannot_hold_weights_is_refused(dtype, tmp_path):
    write_checkpoint(tmp_path, tiny_config())
    with pytest.raises(ValueError, match="wanted torch.float32, bfloat16, float16 or float64"):
        MLADSparkForCausalLM.from_pretrained(tmp_path, lm_head=random_lm_head(tiny_config()), dtype=dtype)


def test_an_interrupted_save_leaves_the_old_file_whole(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, tiny_config(), seed=1)

    def half(tensors, path, **options):
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("dspark_model.checkpoint_write.save_file", half)
    with pytest.raises(OSError, match="disk full"):
        random_model(tiny_config(), seed=2).save_pretrained(tmp_path)
    assert_same_weights(load(tmp_path), random_tensors(tiny_config(), 1))
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("shape", [(64,), (1, 64)], ids=["hidden", "1xhidden"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_mask_row_in_the_file_is_used_without_a_config_key_and_keeps_its_dtype(tmp_path, shape, stored):
    config = tiny_config()
    write_checkpoint(tmp_path, config, 0)
    tensors = load_file(tmp_path / "model.safetensors")
    row = torch.linspace(-1.0, 1.0, config.hidden_size).to(stored)
    save_file({**tensors, "mask_embedding.weight": row.reshape(shape)}, tmp_path / "model.safetensors")
    head = torch.zeros(config.vocab_size, config.hidden_size)
    model = MLADSparkForCausalLM.from_pretrained(tmp_path, lm_head=head)
    assert model.config.mask_embedding
    assert_bitwise_equal(model.mask_row.detach(), row)
    block = model.embed_block(torch.tensor([3]), 4)
    assert_bitwise_equal(block[0, 1:].detach(), row.float().expand(3, -1).contiguous())
