"""Loading checkpoints: names, strictness, tables that come from the target."""

import pytest
import torch
from checkpoint_kit import EMBED, MARKOV_W2, NAMES, assert_same_weights, drop_embedding, load, write_with
from dense_drafter import dense_draft
from drafting import make_worker, prefill, random_hidden

from dspark_model import CheckpointError, MLADSparkForCausalLM, embeddings_bit_equal
from dspark_model.checkpoint import RENAMES, canonical_name
from dspark_model.testing import (
    assert_bitwise_equal,
    random_lm_head,
    random_tensors,
    tiny_config,
    tiny_config_json,
    write_checkpoint,
)


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
