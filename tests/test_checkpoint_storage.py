"""Storing weights: dtypes, int8 rows, memory while loading, saving and saving again."""

import json
from pathlib import Path

import pytest
import torch
from checkpoint_kit import (
    EMBED,
    MARKOV_W2,
    NAMES,
    assert_same_weights,
    drop_embedding,
    int8_checkpoint,
    load,
    run_python,
    write_with,
)
from drafting import draft
from safetensors.torch import load_file, save_file

import dspark_model
from dspark_model import CheckpointError, DrafterConfig, MLADSparkForCausalLM
from dspark_model.testing import (
    assert_bitwise_equal,
    random_lm_head,
    random_model,
    random_tensors,
    tiny_config,
    tiny_config_json,
    write_checkpoint,
)


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
