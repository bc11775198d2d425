"""`DrafterConfig`: spellings, conflicts, refusals, and that every field has an effect."""

import dataclasses
import json
import math

import pytest
import torch
from drafting import draft, make_worker, prefill, random_hidden

from dspark_model import ConfigError, DrafterConfig, RopeConfig
from dspark_model.config import RopeType
from dspark_model.testing import random_model, tiny_config, tiny_config_json

YARN = tiny_config_json()["rope_parameters"]

# The config.json of Inferact/Kimi-K3-DSpark at revision cf6b8244620e7ea4b0651d214f28e89eac75bed6.
KIMI_K3 = {
    "architectures": ["K3DSparkModel"], "model_type": "k3_dspark", "hidden_size": 7168, "intermediate_size": 14336,
    "num_hidden_layers": 5, "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": False, "mla_use_output_gate": False,
    "vocab_size": 163840, "draft_vocab_size": 163840, "rms_norm_eps": 1e-5, "max_position_embeddings": 1048576,
    "rope_theta": 50000.0, "num_target_layers": 5, "target_num_hidden_layers": 93, "target_hidden_size": 7168,
    "target_layer_ids": [2, 23, 47, 71, 89], "mask_token_id": 163837, "bos_token_id": 163584, "eos_token_id": 163586,
    "pad_token_id": 163839, "markov_rank": 256, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "_torchspec_version": "0.1.0",
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 50000.0, "factor": 32.0, "original_max_position_embeddings": 32768,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip


def read(**changes) -> DrafterConfig:
    return DrafterConfig.from_dict(tiny_config_json(**changes))


def refused(message: str, **changes) -> None:
    with pytest.raises(ConfigError, match=message):
        read(**changes)


def test_published_kimi_k3_config():
    config = DrafterConfig.from_dict(KIMI_K3)
    assert config.latent_dim == 576
    assert config.context_width == 35840
    assert config.confidence_input_size == 7424
    assert config.softmax_scale == pytest.approx(0.13086080, abs=5e-9)
    assert config.rope.cos_sin_multiplier == 1.0
    assert (config.sample_from_anchor, config.is_causal, config.fc_norm) == (True, False, False)
    assert (config.block_size, config.aux_hidden_stream, config.mask_embedding) == (None, "prefix", False)
    assert config.slot_rule_source == "no key; dspark family default"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"markov_rank": 0, "confidence_head_with_markov": False},
        {"enable_confidence_head": False},
        {"fc_norm": True, "mask_embedding": True, "is_causal": True, "aux_hidden_stream": "attn_res"},
        {"model_type": "mla_dflash"},
        {"model_type": "mla_dflash", "sample_from_anchor": True},
        {"rope_parameters": {"rope_theta": 500.0}},
        {"quantization_config": {"quant_method": "int8_rows"}},
        {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3, "block_size": None, "torch_dtype": "bfloat16"},
    ],
    ids=lambda changes: "-".join(changes) or "default",
)
def test_to_dict_is_read_back_as_an_equal_config(changes):
    config = read(**changes)
    stored = json.loads(json.dumps(config.to_dict()))
    assert DrafterConfig.from_dict(stored) == config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("markov_rank", 16),
        ("markov_head_type", "vanilla"),
        ("enable_confidence_head", True),
        ("confidence_head_with_markov", True),
        ("mask_token_id", 319),
        ("target_layer_ids", [1, 3, 4]),
        ("block_size", 7),
        ("sample_from_anchor", False),
        ("is_causal", True),
        ("fc_norm", True),
    ],
)
@pytest.mark.parametrize("place", ["dspark_config", "dflash_config", "dspark_", "dflash_"])
def test_a09_nested_keys_count_as_flat_ones_and_conflicts_raise(key, value, place):
    flat = read(**{key: value})
    prefixed = place.endswith("_")
    moved = {f"{place}{key}": value} if prefixed else {place: {key: value}}
    nested = read(**{key: None}, **moved)
    assert nested == flat
    assert read(**{key: value}, **moved) == flat
    other = {int: 6, bool: not value, list: [1, 2, 4], str: "gated"}[type(value)]
    changed = {f"{place}{key}": other} if prefixed else {place: {key: other}}
    refused(f"{key} is .* but .*{key} is .*; they mean the same and must agree", **{key: value}, **changed)


def test_a09_flat_and_nested_keys_give_the_same_drafts():
    keys = ("markov_rank", "enable_confidence_head", "mask_token_id", "target_layer_ids", "block_size")
    data = tiny_config_json()
    nested = {"dspark_config": {key: data[key] for key in keys}, **{key: None for key in keys}}
    flat, moved = draft(random_model(read())), draft(random_model(read(**nested)))
    assert torch.equal(flat.trace.draft.biased_logits, moved.trace.draft.biased_logits)
    assert torch.equal(flat.confidence, moved.confidence)


@pytest.mark.parametrize("model_type", ["k3_dspark", "kimi_k3_dspark", "mla_dspark", "k3_dflash", "mla_dflash"])
def test_a10_model_type_alone_is_enough(model_type):
    config = read(model_type=model_type, architectures=None)
    assert config.family == ("dflash" if "dflash" in model_type else "dspark")
    assert config == read(model_type=model_type)


def test_a10_auto_map_is_not_needed_and_not_used():
    assert read(auto_map={"AutoModel": "modeling_other.Other"}) == read()


def test_a10_foreign_names_are_refused_with_the_supported_ones():
    refused("architecture 'Qwen3DFlashModel' is not supported; supported: K3DSparkModel", architectures=["Qwen3DFlashModel"])
    refused("model_type 'qwen3' is not supported; supported: k3_dspark", model_type="qwen3")
    refused("config.json has no model_type", model_type=None)
    refused("is a LiLiCorr drafter", architectures=["LiLiCorrDSparkModel"])
    refused("LiLiCorr drafters are not supported", lilicorr_rank=4)


SPELLINGS = [
    ("enable_confidence_head", "use_confidence_head", True),
    ("is_causal", "causal", True),
    ("is_causal", "full_attention_causal", True),
    ("sample_from_anchor", "shift_label", False),
    ("torch_dtype", "dtype", "float16"),
]


@pytest.mark.parametrize(("name", "spelling", "value"), SPELLINGS)
@pytest.mark.parametrize("section", [None, "dspark_config", "dflash_config"])
def test_a11_every_spelling_is_read(name, spelling, value, section):
    given = {spelling: value} if section is None else {section: {spelling: value}}
    assert read(**{name: None}, **given) == read(**{name: value})
    assert read(**{name: None}, **given) != read(**{name: None})


@pytest.mark.parametrize(("name", "spelling", "value"), SPELLINGS)
def test_a11_two_spellings_must_agree(name, spelling, value):
    other = "float32" if isinstance(value, str) else not value
    refused("they mean the same and must agree", **{name: value, spelling: other})


@pytest.mark.parametrize(
    "unknown",
    ["mask_token", "markov_dim", "target_layers", "dspark_rank", "aux_layer_ids", "causal_block", "speculative_width"],
)
def test_a11_unknown_spellings_raise(unknown):
    refused(f"keys that this package does not know: {unknown}", **{unknown: 3})
    refused(f"keys that this package does not know: dspark_config.{unknown}", dspark_config={unknown: 3})
    assert DrafterConfig.from_dict(tiny_config_json(**{unknown: 3}), ignore_keys=(unknown,)) == read()


def test_a11_all_unknown_keys_are_named_at_once():
    refused("aaa, bbb, dflash_config.ccc", bbb=1, aaa=2, dflash_config={"ccc": 3})


def test_a12_the_mask_token_has_no_default():
    refused("config.json has no mask_token_id", mask_token_id=None, pad_token_id=0)
    refused("mask_token_id is None", dspark_config={"mask_token_id": None}, mask_token_id=None)


def test_a_stated_head_width_must_agree_with_its_parts():
    assert read(qk_head_dim=40) == read()
    refused("qk_head_dim is 41, but qk_nope_head_dim 24 and qk_rope_head_dim 16 make 40", qk_head_dim=41)


@pytest.mark.parametrize("mask_token_id", [320, 321, 100_000])
def test_a12_a_mask_token_outside_the_vocabulary_is_refused(mask_token_id):
    refused(f"mask_token_id {mask_token_id} is outside the vocabulary of 320 rows", mask_token_id=mask_token_id)
    refused("mask_token_id is -1, wanted at least 0", mask_token_id=-1)


def rope_places(**places) -> dict:
    """Config changes that give the RoPE base only in the named places: flat, rope_parameters, rope_scaling."""
    rest = {key: value for key, value in YARN.items() if key != "rope_theta"}
    changes = {"rope_theta": places.pop("flat", None), "rope_parameters": None}
    for section, theta in places.items():
        changes[section] = {**rest, **({} if theta is None else {"rope_theta": theta})}
    return changes


@pytest.mark.parametrize(
    "places",
    [
        {"flat": 777.0, "rope_parameters": None},
        {"flat": 777.0, "rope_scaling": None},
        {"rope_parameters": 777.0},
        {"rope_scaling": 777.0},
        {"flat": 777.0, "rope_parameters": 777.0},
        {"flat": 777, "rope_scaling": 777.0},
        {"rope_parameters": 777.0, "rope_scaling": 777.0},
        {"flat": 777.0, "rope_parameters": 777.0, "rope_scaling": 777.0},
    ],
    ids=lambda places: "-".join(f"{key}={value}" for key, value in places.items()),
)
def test_a16_rope_base_is_found_wherever_it_is(places):
    assert read(**rope_places(**places)).rope == dataclasses.replace(tiny_config().rope, theta=777.0)


@pytest.mark.parametrize(
    "places",
    [
        {"flat": 777.0, "rope_parameters": 778.0},
        {"flat": 777.0, "rope_scaling": 77700.0},
        {"rope_parameters": 777.0, "rope_scaling": 778.0},
    ],
    ids=lambda places: "-".join(places),
)
def test_a16_rope_bases_that_differ_are_refused(places):
    refused(r"rope_theta is 777.0 but rope_\w+.rope_theta is 77.*; they must agree", **rope_places(**places))


def test_a16_rope_base_has_no_default():
    refused("rope_theta is missing", **rope_places(rope_parameters=None))
    refused("rope_theta is missing", rope_parameters=None)


def test_a17_null_scaling_is_plain_rope_and_yarn_is_read():
    plain = read(rope_parameters=None, rope_theta=10000.0, rope_scaling=None)
    assert plain.rope == RopeConfig(theta=10000.0)
    assert plain.softmax_scale == 1.0 / math.sqrt(40)
    assert read(rope_parameters={**YARN, "type": "yarn", "rope_type": "yarn"}) == read()
    without_type = {key: value for key, value in YARN.items() if key != "rope_type"}
    assert read(rope_parameters={**without_type, "type": "yarn"}) == read()
    refused("rope type 'default' takes only rope_theta, got also", rope_parameters=without_type)
    refused("rope type 'linear' is not supported; supported: default, yarn", rope_parameters={**YARN, "rope_type": "linear"})
    refused(r"rope_parameters.type is 'default'|must agree", rope_parameters={**YARN, "type": "default"})
    refused("rope_parameters.short_factor is not supported", rope_parameters={**YARN, "short_factor": [1.0]})


def test_a17_attention_temperature():
    rope = read().rope
    assert rope.softmax_multiplier == pytest.approx((0.1 * 0.8 * math.log(8.0) + 1.0) ** 2, rel=1e-15)
    assert rope.cos_sin_multiplier == pytest.approx((0.1 * math.log(8.0) + 1.0) / (0.08 * math.log(8.0) + 1.0), rel=1e-15)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("rope_theta is 1.0; it must be finite and above 1", {"rope_theta": 1.0}),
        ("rope_parameters.rope_theta is nan, wanted a finite number", {"rope_theta": float("nan")}),
        ("rope_parameters.rope_theta is '1e4', wanted a finite number", {"rope_theta": "1e4"}),
        ("rope_parameters.factor is True, wanted a finite number", {"factor": True}),
        ("rope_parameters.factor is inf, wanted a finite number", {"factor": float("inf")}),
        ("rope_parameters.mscale is nan, wanted a finite number", {"mscale": float("nan")}),
        ("YaRN factor is 0.5; it must be at least 1", {"factor": 0.5}),
        ("YaRN needs original_max_position_embeddings .* got 0", {"original_max_position_embeddings": 0}),
        ("original_max_position_embeddings is 64.5, wanted a whole number", {"original_max_position_embeddings": 64.5}),
        ("wanted beta_fast >= beta_slow > 0", {"beta_slow": 0.0}),
        ("wanted beta_fast >= beta_slow > 0", {"beta_fast": 0.5}),
    ],
)
def test_rope_values_that_make_no_sense_are_refused(message, changes):
    refused(message, rope_parameters={**YARN, **changes})


def test_a_yarn_window_must_be_stated():
    rest = {key: value for key, value in YARN.items() if key != "original_max_position_embeddings"}
    refused("YaRN needs original_max_position_embeddings", rope_parameters=rest)


def test_a15_half_split_rope_is_refused():
    assert read(rope_interleave=True) == read()
    refused("rope_interleave is False: half-split RoPE is not supported", rope_interleave=False)


def test_a19_missing_taps_are_not_made_up():
    refused("config.json has no target_layer_ids", target_layer_ids=None)
    refused("config.json has no target_layer_ids", target_layer_ids=None, num_target_layers=3)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "target_layer_ids is empty"),
        ([3, 1, 4], "ascending and without repeats"),
        ([1, 1, 4], "ascending and without repeats"),
        ([-1, 1, 4], "the ids are 0-based layers"),
        ([1, 3, 6], "reach past the target's 6 layers"),
        ([1, 3, 4.0], "wanted a list of whole numbers"),
        ([1, True], "wanted a list of whole numbers"),
        (3, "wanted a list of whole numbers"),
    ],
)
def test_a19_taps_that_make_no_sense_are_refused(ids, message):
    refused(message, target_layer_ids=ids)


def test_a20_quantised_drafters_are_refused():
    refused("quantization_config is .*'fp8'.*; supported: no such key, or", quantization_config={"quant_method": "fp8"})
    more = {"quant_method": "int8_rows", "group_size": 128}
    refused("quantization_config is .*'group_size'.*; supported: no such key, or", quantization_config=more)
    refused("compression_config is .*: a quantised checkpoint is not supported", compression_config={"format": "nvfp4"})


REFUSALS = [
    ("this is a GQA drafter", {"num_key_value_heads": 2}),
    ("kv_lora_rank is missing: this is not an MLA drafter", {"kv_lora_rank": None}),
    ("biases in the attention projections", {"attention_bias": True}),
    ("MLA without rotary values", {"mla_use_nope": True}),
    ("an output gate in MLA", {"mla_use_output_gate": True}),
    ("another activation than SiLU", {"hidden_act": "gelu"}),
    ("a head tied to the drafter's embedding", {"tie_word_embeddings": True}),
    ("a sliding window", {"sliding_window": 512}),
    ("reduced draft vocabularies are not supported", {"draft_vocab_size": 100}),
    ("only full_attention is supported", {"layer_types": ["full_attention", "sliding_attention"]}),
    ("markov_head_type 'gated' is not supported; supported: vanilla", {"markov_head_type": "gated"}),
    ("aux_hidden_stream 'mean' is not supported; supported: prefix, attn_res", {"aux_hidden_stream": "mean"}),
    ("dtype 'float8_e4m3fn' is not supported; supported: float32, bfloat16, float16", {"torch_dtype": "float8_e4m3fn"}),
    ("num_target_layers is 2, below the 3 target_layer_ids", {"num_target_layers": 2}),
    ("qk_rope_head_dim is 15; RoPE rotates pairs", {"qk_rope_head_dim": 15}),
    ("rms_norm_eps is 0; it must be positive", {"rms_norm_eps": 0}),
    ("rms_norm_eps is nan; it must be positive", {"rms_norm_eps": float("nan")}),
    ("hidden_size is 0, wanted at least 1", {"hidden_size": 0}),
    ("hidden_size is 64.0 \\(float\\), wanted a whole number", {"hidden_size": 64.0}),
    ("hidden_size is True \\(bool\\), wanted a whole number", {"hidden_size": True}),
    ("rms_norm_eps is '1e-5' \\(str\\), wanted a number", {"rms_norm_eps": "1e-5"}),
    ("fc_norm is 1 \\(int\\), wanted true or false", {"fc_norm": 1}),
    ("model_type is 3 \\(int\\), wanted a string", {"model_type": 3}),
    ("architectures is 'K3DSparkModel'", {"architectures": "K3DSparkModel"}),
    ("dspark_config is 3, wanted an object", {"dspark_config": 3}),
    ("rope_scaling is 'yarn', wanted an object", {"rope_scaling": "yarn"}),
    ("markov_rank is -1, wanted at least 0", {"markov_rank": -1}),
    ("block_size is 0, wanted at least 1", {"block_size": 0}),
]


@pytest.mark.parametrize(("message", "changes"), REFUSALS, ids=lambda value: "-".join(value) if isinstance(value, dict) else "")
def test_what_cannot_be_run_is_refused_by_name(message, changes):
    refused(message, **changes)


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "q_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "vocab_size",
        "max_position_embeddings",
        "rms_norm_eps",
    ],
)
def test_architecture_numbers_have_no_default(key):
    refused(f"config.json has no {key}", **{key: None})


def test_bad_config_files(tmp_path):
    path = tmp_path / "config.json"
    for content, message in ((None, "does not exist"), ("{", "is not valid JSON"), ("[1]", "holds a JSON list")):
        if content is not None:
            path.write_text(content)
        with pytest.raises(ConfigError, match=message) as error:
            DrafterConfig.from_file(path)
        assert str(path) in str(error.value)


# field -> the config.json keys that change it, and whether the change shows in the weights' shapes, in the drafts, in the
# worker's report or warnings, or in the checks.
EFFECTS = {
    "model_type": ({"model_type": "k3_dspark"}, "report"),
    "family": ({"model_type": "mla_dflash"}, "drafts"),
    "hidden_size": ({"hidden_size": 80}, "shapes"),
    "intermediate_size": ({"intermediate_size": 80}, "shapes"),
    "num_hidden_layers": ({"num_hidden_layers": 3}, "shapes"),
    "num_attention_heads": ({"num_attention_heads": 5}, "shapes"),
    "q_lora_rank": ({"q_lora_rank": 48}, "shapes"),
    "kv_lora_rank": ({"kv_lora_rank": 24}, "shapes"),
    "qk_nope_head_dim": ({"qk_nope_head_dim": 16}, "shapes"),
    "qk_rope_head_dim": ({"qk_rope_head_dim": 8}, "shapes"),
    "v_head_dim": ({"v_head_dim": 8}, "shapes"),
    "vocab_size": ({"vocab_size": 400}, "shapes"),
    "rms_norm_eps": ({"rms_norm_eps": 0.1}, "drafts"),
    "max_position_embeddings": ({"max_position_embeddings": 50}, "warnings"),
    "rope": ({"rope_parameters": {**YARN, "factor": 4.0}}, "drafts"),
    "target_layer_ids": ({"target_layer_ids": [0, 3, 4]}, "report"),
    "target_hidden_size": ({"target_hidden_size": 32}, "shapes"),
    "mask_token_id": ({"mask_token_id": 3}, "drafts"),
    "block_size": ({"block_size": 4}, "warnings"),
    "markov_rank": ({"markov_rank": 8}, "shapes"),
    "enable_confidence_head": ({"enable_confidence_head": False}, "shapes"),
    "confidence_head_with_markov": ({"confidence_head_with_markov": False}, "shapes"),
    "fc_norm": ({"fc_norm": True}, "shapes"),
    "aux_hidden_stream": ({"aux_hidden_stream": "attn_res"}, "report"),
    "is_causal": ({"is_causal": True}, "drafts"),
    "sample_from_anchor": ({"sample_from_anchor": False}, "drafts"),
    "slot_rule_source": ({"sample_from_anchor": True}, "report"),
    "mask_embedding": ({"mask_embedding": True}, "shapes"),
}
# The target's depth bounds its taps, special tokens are the caller's to read, there is one Markov head type so far, and
# the stored dtype and quantisation tell `from_pretrained` how to read.  Each has a test here or in test_checkpoint.
TESTED_ELSEWHERE = {
    "target_num_hidden_layers",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "markov_head_type",
    "dtype",
    "quant_method",
}


def test_a22_no_field_is_without_a_test_of_its_effect():
    fields = {field.name for field in dataclasses.fields(DrafterConfig)}
    assert fields == set(EFFECTS) | TESTED_ELSEWHERE


def observe(config: DrafterConfig, kind: str, recwarn) -> object:
    model = random_model(config)
    if kind == "shapes":
        return {name: tensor.shape for name, tensor in model.state_dict().items()}
    if kind == "drafts":
        return draft(model).trace.draft.biased_logits.tolist()
    recwarn.clear()
    report = make_worker(model).describe()
    return report if kind == "report" else [str(warning.message) for warning in recwarn]


@pytest.mark.parametrize("field", EFFECTS)
def test_a22_every_field_has_an_effect(field, recwarn):
    changes, kind = EFFECTS[field]
    changed = read(**changes)
    assert getattr(changed, field) != getattr(read(), field)
    assert observe(changed, kind, recwarn) != observe(read(), kind, recwarn)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(RopeConfig)])
def test_a22_every_rope_field_changes_the_drafts(field):
    wide = {"original_max_position_embeddings": 32, "beta_fast": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5}
    base = {**YARN, **wide, "rope_theta": 100.0}
    change = {
        "rope_type": None,
        "theta": {"rope_theta": 200.0},
        "factor": {"factor": 2.0},
        "original_max_position_embeddings": {"original_max_position_embeddings": 128},
        "beta_fast": {"beta_fast": 1.5},
        "beta_slow": {"beta_slow": 0.3},
        "mscale": {"mscale": 2.0},
        "mscale_all_dim": {"mscale_all_dim": 1.5},
    }[field]
    changed = {"rope_type": "default", "rope_theta": 100.0} if change is None else {**base, **change}
    models = [random_model(read(rope_parameters=rope)) for rope in (base, changed)]
    hidden = random_hidden(models[0], 60)
    logits = [prefill(make_worker(model), [hidden], [5]).trace.draft.base_logits for model in models]
    assert (logits[0] - logits[1]).abs().max() > 1e-3


@pytest.mark.parametrize("token", ["bos_token_id", "eos_token_id", "pad_token_id"])
def test_a22_special_tokens_are_kept_for_the_caller(token):
    assert getattr(read(**{token: 7}), token) == 7
    assert getattr(read(), token) is None


def test_a22_fields_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        read().hidden_size = 3
    assert read().rope.rope_type is RopeType.YARN
