"""Loading checkpoints: shards, damaged files, repos, revisions, offline mode."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_kit import assert_same_weights, cut, load, run_python
from drafting import make_worker, prefill, random_hidden
from safetensors.torch import save_file

import dspark_model
from dspark_model import CheckpointError, ConfigError, load_config
from dspark_model.golden import check_case
from dspark_model.testing import (
    random_tensors,
    tiny_config,
    tiny_config_json,
    write_checkpoint,
)


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
