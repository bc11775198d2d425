"""The drafter's maths against a dense float64 computation, and what each tensor and key does to the drafts."""

import pytest
import torch
from dense_drafter import dense_draft
from drafting import draft, make_worker, pool_rows, prefill, random_hidden

from dspark_model import DrafterConfig, MLADSparkForCausalLM
from dspark_model.slots import draft_rows
from dspark_model.testing import assert_bitwise_equal, random_model, random_tensors, tiny_config, tiny_config_json

# Logits here have a spread of about 3; the package in float32 stays within 2e-5 of float64.
BOUND = {"rtol": 1e-4, "atol": 1e-4}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = tiny_config_json()["rope_parameters"]
VARIANTS = {
    "all-heads": {},
    "no-markov": {"markov_rank": 0, "confidence_head_with_markov": False},
    "no-confidence": {"enable_confidence_head": False, "confidence_head_with_markov": False},
    "confidence-without-markov": {"confidence_head_with_markov": False},
    "fc-norm": {"fc_norm": True},
    "trained-mask-row": {"mask_embedding": True},
    "causal": {"is_causal": True},
    "dflash": {"model_type": "mla_dflash"},
    "dflash-shifted": {"model_type": "mla_dflash", "sample_from_anchor": True},
    "dflash-no-markov": {"model_type": "mla_dflash", "markov_rank": 0},
    "plain-rope": {"rope_parameters": PLAIN_ROPE},
    "mscale-ratio": {"rope_parameters": {**YARN, "mscale": 1.7, "mscale_all_dim": 0.4}},
    "three-layers-one-head": {"num_hidden_layers": 3, "num_attention_heads": 1},
    "one-tap": {"target_layer_ids": [2]},
    "large-eps": {"rms_norm_eps": 0.03},
}


def reference(data: dict, model: MLADSparkForCausalLM, hidden: torch.Tensor, anchor: int, num_drafts: int = 7, **changes):
    weights = model.state_dict()
    return dense_draft(data, weights, model.lm_head, hidden, anchor, num_drafts, **changes)


@pytest.mark.parametrize("layout", ["layer_major", "page_major"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_match_the_dense_computation(variant, layout):
    data = tiny_config_json(**VARIANTS[variant])
    model = random_model(DrafterConfig.from_dict(data), seed=3)
    worker = make_worker(model, layout=layout)
    contexts = [random_hidden(model, rows, seed=rows) for rows in (0, 1, 8, 29)]
    anchors = [0, 7, 319, 100]
    output = prefill(worker, contexts, anchors)
    for index, (hidden, anchor) in enumerate(zip(contexts, anchors, strict=True)):
        want = reference(data, model, hidden, anchor)
        close = {
            "base": (output.trace.draft.base_logits[index], want.base),
            "biased": (output.trace.draft.biased_logits[index], want.biased),
            "latents": (pool_rows(worker, index, len(hidden)), want.context_latents),
        }
        if want.confidence is not None:
            close["confidence"] = (output.confidence[index], want.confidence)
        for name, (ours, theirs) in close.items():
            torch.testing.assert_close(ours, theirs.float(), **BOUND, msg=lambda text, name=name: f"{name}: {text}")
        assert output.draft_tokens[index].tolist() == want.tokens
    assert (output.confidence is None) == (not data["enable_confidence_head"])


@pytest.mark.parametrize("num_drafts", [1, 4, 7])
def test_drafts_of_other_widths_match_the_dense_computation(num_drafts, drafter_config):
    model = random_model(drafter_config)
    data = {**tiny_config_json(), "markov_rank": drafter_config.markov_rank}
    data["confidence_head_with_markov"] = drafter_config.confidence_head_with_markov
    hidden = random_hidden(model, 9)
    output = prefill(make_worker(model, num_drafts=num_drafts), [hidden], [11])
    want = reference(data, model, hidden, 11, num_drafts)
    torch.testing.assert_close(output.trace.draft.biased_logits[0], want.biased.float(), **BOUND)
    assert output.draft_tokens[0].tolist() == want.tokens


def test_bfloat16_drafts_stay_near_the_dense_computation(drafter_config):
    model = random_model(drafter_config, dtype=torch.bfloat16)
    data = {**tiny_config_json(), "markov_rank": drafter_config.markov_rank, "confidence_head_with_markov": False}
    data["confidence_head_with_markov"] = drafter_config.confidence_head_with_markov
    hidden = random_hidden(model, 13)
    output = prefill(make_worker(model), [hidden], [5])
    want = reference(data, model, hidden, 5)
    # Eight bits of mantissa over two layers: 0.1 was seen at a spread of 3.
    torch.testing.assert_close(output.trace.draft.base_logits[0], want.base.float(), rtol=0.0, atol=0.3)
    assert output.trace.draft.base_logits.dtype is torch.float32


def test_parameter_names_and_shapes_are_those_of_the_published_checkpoint():
    shapes = {name: tuple(tensor.shape) for name, tensor in random_model(tiny_config()).state_dict().items()}
    expected = {
        "context_proj.weight": (64, 144),
        "context_norm.weight": (64,),
        "final_norm.weight": (64,),
        "embed_tokens.weight": (320, 64),
        "markov_head.markov_w1.weight": (320, 16),
        "markov_head.markov_w2.weight": (320, 16),
        "confidence_head.proj.weight": (1, 80),
        "confidence_head.proj.bias": (1,),
    }
    per_layer = {
        "input_layernorm.weight": (64,),
        "post_attention_layernorm.weight": (64,),
        "self_attn.q_a_proj.weight": (40, 64),
        "self_attn.q_a_layernorm.weight": (40,),
        "self_attn.q_b_proj.weight": (160, 40),
        "self_attn.kv_a_proj_with_mqa.weight": (48, 64),
        "self_attn.kv_a_layernorm.weight": (32,),
        "self_attn.kv_b_proj.weight": (176, 32),
        "self_attn.o_proj.weight": (64, 80),
        "mlp.gate_proj.weight": (96, 64),
        "mlp.up_proj.weight": (96, 64),
        "mlp.down_proj.weight": (64, 96),
    }
    for layer in range(2):
        expected |= {f"layers.{layer}.{name}": shape for name, shape in per_layer.items()}
    assert shapes == expected


def test_kimi_k3_has_68_tensors_of_3562312961_values():
    """The published file holds 2 x 3,562,312,961 bytes of bf16 values."""
    k3 = tiny_config(
        hidden_size=7168, intermediate_size=14336, num_hidden_layers=5, num_attention_heads=64, q_lora_rank=1536,
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, vocab_size=163840, markov_rank=256,
        target_hidden_size=7168, target_layer_ids=[2, 23, 47, 71, 89], target_num_hidden_layers=93, mask_token_id=163837,
    )  # fmt: skip
    with torch.device("meta"):
        model = MLADSparkForCausalLM(k3, lm_head=torch.empty(163840, 7168))
    sizes = [tensor.numel() for tensor in model.state_dict().values()]
    assert (len(sizes), sum(sizes)) == (68, 3_562_312_961)


SENSITIVE = {
    "markov": {},
    "no-markov": {"markov_rank": 0, "confidence_head_with_markov": False},
    "fc-norm-trained-mask": {"fc_norm": True, "mask_embedding": True},
}


def names_of(changes: dict) -> list[str]:
    return list(random_tensors(tiny_config(**changes)))


@pytest.mark.parametrize(
    ("variant", "name"), [(variant, name) for variant, changes in SENSITIVE.items() for name in names_of(changes)]
)
def test_a24_each_loaded_tensor_changes_the_drafts(variant, name):
    model = random_model(tiny_config(**SENSITIVE[variant]))
    before = draft(model)
    tensor = model.get_parameter(name)
    tensor.mul_(1.0 + 0.2 * torch.rand_like(tensor))
    after = draft(model)
    if name.startswith("confidence_head"):
        assert (before.confidence - after.confidence).abs().min() > 1e-5
        assert_bitwise_equal(before.trace.draft.biased_logits, after.trace.draft.biased_logits)
        return
    changed = (before.trace.draft.biased_logits - after.trace.draft.biased_logits).abs().amax(-1)
    assert changed.min() > 1e-4, "some draft row does not depend on the tensor"


def test_a24_the_targets_head_changes_the_drafts():
    model = random_model(tiny_config())
    before = draft(model).trace.draft.base_logits
    model.lm_head.mul_(1.0 + 0.2 * torch.rand_like(model.lm_head))
    assert (draft(model).trace.draft.base_logits - before).abs().amax(-1).min() > 1e-3


@pytest.mark.parametrize("slot_rule", ["mla_dspark", "mla_dflash"])
@pytest.mark.parametrize("causal", [False, True])
def test_a25_the_last_block_row_reaches_row_0_only_in_a_bidirectional_drafter(causal, slot_rule):
    model = random_model(tiny_config(is_causal=causal, model_type=slot_rule))
    outputs = []
    for shift in (0.0, 1.0):
        final = []
        embed = model.embed_block

        def shifted(anchors, rows, embed=embed, shift=shift, **options):
            block = embed(anchors, rows, **options)
            block[:, -1] += shift
            return block

        model.embed_block = shifted
        hook = model.final_norm.register_forward_hook(lambda _m, _i, out, final=final: final.append(out))
        draft(model)
        hook.remove()
        model.embed_block = embed
        outputs.append(final[0])
    rows = outputs[0].shape[1]
    assert (outputs[0][:, -1] - outputs[1][:, -1]).abs().max() > 1e-3
    for row in range(rows - 1):
        if causal:
            assert_bitwise_equal(outputs[0][:, row], outputs[1][:, row], f"block row {row}")
        else:
            assert (outputs[0][:, row] - outputs[1][:, row]).abs().max() > 1e-3


@pytest.mark.parametrize("variant", ["all-heads", "mscale-ratio"])
def test_a15_pairs_are_adjacent_and_not_half_split(variant):
    data = tiny_config_json(rope_interleave=True, **VARIANTS[variant])
    model = random_model(DrafterConfig.from_dict(data))
    hidden = random_hidden(model, 21)
    ours = prefill(make_worker(model), [hidden], [5]).trace.draft.base_logits[0]
    torch.testing.assert_close(ours, reference(data, model, hidden, 5).base.float(), **BOUND)
    other = reference(data, model, hidden, 5, half_split=True).base.float()
    assert (ours - other).abs().max() > 0.1


@pytest.mark.parametrize("rows", [60, 64, 200], ids=lambda rows: f"rows{rows}-window64")
@pytest.mark.parametrize("rope", [PLAIN_ROPE, YARN], ids=["default", "yarn"])
def test_a17_drafts_below_and_above_the_original_window(rope, rows):
    data = tiny_config_json(rope_parameters=rope)
    model = random_model(DrafterConfig.from_dict(data))
    worker = make_worker(model, max_positions=256)
    hidden = random_hidden(model, rows)
    ours = prefill(worker, [hidden], [5])
    want = reference(data, model, hidden, 5)
    torch.testing.assert_close(pool_rows(worker, 0, rows), want.context_latents.float(), **BOUND)
    torch.testing.assert_close(ours.trace.draft.base_logits[0], want.base.float(), **BOUND)
    other_rope = PLAIN_ROPE if rope is YARN else YARN
    other = reference({**data, "rope_parameters": other_rope}, model, hidden, 5)
    assert (ours.trace.draft.base_logits[0] - other.base.float()).abs().max() > 0.05


@pytest.mark.parametrize("model_type", ["mla_dspark", "mla_dflash"])
@pytest.mark.parametrize("markov_rank", [0, 16])
def test_a23_drafts_need_the_taps_in_every_variant(model_type, markov_rank):
    model = random_model(tiny_config(model_type=model_type, markov_rank=markov_rank))
    logits = [prefill(make_worker(model), [random_hidden(model, 9, seed)], [5]).trace.draft.base_logits for seed in (0, 1)]
    assert (logits[0] - logits[1]).abs().amax(-1).min() > 1e-2
    hidden = random_hidden(model, 9)
    for tap in range(3):
        changed = hidden.clone().unflatten(-1, (3, 48))
        changed[:, tap] += 1.0
        other = prefill(make_worker(model), [changed.flatten(1)], [5]).trace.draft.base_logits
        assert (logits[0] - other).abs().amax(-1).min() > 1e-2, f"tap {tap} is not read"


@pytest.mark.parametrize(("shifted", "rows", "wanted"), [(True, 7, slice(0, 7)), (False, 8, slice(1, 8))])
def test_slot_rule(shifted, rows, wanted):
    config = tiny_config(sample_from_anchor=shifted)
    assert config.block_rows(7) == rows
    assert draft_rows(config, 7) == wanted


def test_tables_of_the_target_are_held_without_a_copy():
    config = tiny_config()
    head, embed = torch.randn(333, 64), torch.randn(350, 64)
    model = MLADSparkForCausalLM(config, lm_head=head, target_embed_tokens=embed)
    assert model.lm_head.data_ptr() == head.data_ptr()
    assert model.embed_tokens.weight.data_ptr() == embed.data_ptr()
    assert (model.lm_head.shape, model.embed_tokens.weight.shape) == ((320, 64), (320, 64))
    assert "lm_head" not in model.state_dict()


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"lm_head": torch.zeros(319, 64)}, r"lm_head has shape \[319, 64\], wanted \[at least 320, 64\]"),
        ({"lm_head": torch.zeros(320, 63)}, r"lm_head has shape \[320, 63\]"),
        ({"lm_head": torch.zeros(320)}, r"lm_head has shape \[320\]"),
        (
            {"lm_head": torch.zeros(320, 64), "target_embed_tokens": torch.zeros(300, 64)},
            r"target_embed_tokens has shape \[300, 64\]",
        ),
        (
            {"lm_head": torch.zeros(320, 64), "target_embed_tokens": torch.zeros(320, 64, dtype=torch.float16)},
            "target_embed_tokens is torch.float16 on cpu but lm_head is torch.float32",
        ),
    ],
)
def test_tables_that_do_not_fit_are_refused(tables, message):
    with pytest.raises(ValueError, match=message):
        MLADSparkForCausalLM(tiny_config(), **tables)


def test_head_rows_past_the_vocabulary_are_never_drafted():
    config = tiny_config(markov_rank=0, confidence_head_with_markov=False)
    head = torch.full((400, 64), 1e6)
    model = random_model(config)
    padded = MLADSparkForCausalLM(config, lm_head=torch.cat((model.lm_head, head[320:])))
    padded.load_state_dict(model.state_dict())
    ours, theirs = draft(padded.eval()), draft(model)
    assert_bitwise_equal(ours.draft_tokens, theirs.draft_tokens)


def test_mask_row_is_the_mask_tokens_or_the_trained_one():
    plain = random_model(tiny_config(mask_token_id=17))
    assert_bitwise_equal(plain.mask_row, plain.embed_tokens.weight[17])
    trained = random_model(tiny_config(mask_embedding=True))
    assert_bitwise_equal(trained.mask_row, trained.mask_embedding.weight[0])


def test_a18_each_plane_reaches_the_columns_of_its_layer():
    """Rows whose tap of layer i is the constant i: columns t * E to (t + 1) * E belong to target_layer_ids[t]."""
    model = random_model(tiny_config(target_layer_ids=[0, 2, 5]))
    taps = torch.tensor([0.0, 2.0, 5.0])[:, None].expand(3, 48).flatten()
    with torch.no_grad():
        model.context_proj.weight.zero_()
        for t in range(3):
            model.context_proj.weight[t, t * 48 : (t + 1) * 48] = 1 / 48
        model.context_norm.weight.fill_(1.0)
    worker = make_worker(model)
    context = prefill(worker, [taps.repeat(4, 1)], [5]).trace.context
    wanted = torch.tensor([0.0, 2.0, 5.0] + [0.0] * 61)
    torch.testing.assert_close(context, (wanted / (wanted.square().mean() + 1e-5).sqrt()).expand(4, 64))
    assert worker.describe()["taps"] == "target layers [0, 2, 5] (0-based, after the layer), prefix"
