"""Packed linear layers: in a module, in a `transformers` target and in a drafter."""

import pytest
import torch
import transformers
from drafting import draft, make_worker
from torch import nn

from dspark_model import MLADSparkForCausalLM, generate, generate_plain, pack_linears
from dspark_model.ops import can_pack
from dspark_model.packing import PackedLinear
from dspark_model.testing import assert_bitwise_equal, random_model, tiny_config
from dspark_model.transformers_target import TransformersTarget

pytestmark = pytest.mark.skipif(not can_pack(torch.ones(1, 1)), reason="not an x86 CPU with AVX2 and oneDNN")


class OtherLinear(nn.Linear):
    """A subclass, whose forward may do anything."""


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 33), nn.Sequential(nn.GELU(), nn.Linear(33, 8, bias=False)), OtherLinear(8, 8))


def target_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        attn_implementation="sdpa",
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config).to(dtype).eval().requires_grad_(False)


def drafter_for(target: TransformersTarget) -> MLADSparkForCausalLM:
    config = tiny_config(vocab_size=97, hidden_size=48, mask_token_id=96, target_layer_ids=(1, 3))
    return random_model(config, seed=0)


def test_layers_are_replaced_at_any_depth_and_compute_the_same():
    model = small_model()
    x = torch.randn(2, 7, 20)
    want, names = model(x), list(model.state_dict())
    assert pack_linears(model) == 2
    kinds = [type(module) for module in model.modules() if not isinstance(module, nn.Sequential)]
    assert kinds == [PackedLinear, nn.GELU, PackedLinear, OtherLinear]
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model(x), want)
    assert pack_linears(model) == 0


@pytest.mark.parametrize("change", [{"dtype": torch.bfloat16}, {"dtype": torch.float64}, {"device": "meta"}], ids=str)
def test_other_dtypes_and_devices_stay_as_they_are(change):
    model = small_model().to(**change)
    before = list(model.modules())
    assert pack_linears(model) == 0
    assert all(ours is theirs for ours, theirs in zip(model.modules(), before, strict=True))


def test_a_target_computes_the_same_and_keeps_its_tied_tables():
    model = target_model()
    slots, starts = torch.tensor([1, 0]), torch.tensor([0, 0])
    tokens = torch.randint(97, (2, 9))
    plain = TransformersTarget(model, (1, 3), max_requests=2, max_positions=40).forward(tokens, slots, starts)
    assert pack_linears(model) == 6 * 7 + 1
    target = TransformersTarget(model, (1, 3), max_requests=2, max_positions=40)
    packed = target.forward(tokens, slots, starts)
    torch.testing.assert_close(packed.logits, plain.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(packed.hidden, plain.hidden, rtol=1e-4, atol=1e-4)
    assert target.lm_head.data_ptr() == model.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("variant", [{}, {"markov_rank": 0, "confidence_head_with_markov": False}], ids=["markov", "no_markov"])
def test_a_packed_drafter_drafts_the_same(variant, tmp_path):
    model = random_model(tiny_config(**variant), seed=3)
    plain = draft(model)
    model.save_pretrained(tmp_path / "plain")
    assert make_worker(model).describe()["linear_layers"] == "torch's own product"
    assert model.pack_linears() == sum(isinstance(module, PackedLinear) for module in model.modules()) > 0
    assert make_worker(model).describe()["linear_layers"] == "weights packed for few rows on a CPU"
    packed = draft(model)
    assert_bitwise_equal(packed.draft_tokens, plain.draft_tokens)
    for name, of in (
        ("base_logits", lambda drafted: drafted.base_logits),
        ("biased_logits", lambda drafted: drafted.biased_logits),
        ("confidence", lambda drafted: drafted.confidence.logits),
    ):
        ours, theirs = of(packed.trace.draft), of(plain.trace.draft)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    model.save_pretrained(tmp_path / "packed")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "packed")]
    assert files[0] == files[1]


def test_the_head_and_w2_of_a_packed_drafter_are_the_packed_ones():
    """Their plain tables are overwritten after packing: the drafts must not notice."""
    model = random_model(tiny_config(), seed=3)
    model.pack_linears()
    before = draft(model).trace.draft
    with torch.no_grad():
        model.lm_head.zero_()
        model.markov_head.markov_w2.weight.zero_()
    after = draft(model).trace.draft
    assert_bitwise_equal(after.base_logits, before.base_logits)
    assert_bitwise_equal(after.biased_logits, before.biased_logits)


def test_a_bf16_drafter_is_left_alone():
    model = random_model(tiny_config(), seed=3).to(torch.bfloat16)
    assert model.pack_linears() == 0
    assert make_worker(model).describe()["linear_layers"] == "torch's own product"


def test_drafted_text_equals_plain_text_with_both_packed():
    model = target_model()
    pack_linears(model)
    target = TransformersTarget(model, (1, 3), max_requests=2, max_positions=64)
    drafter = drafter_for(target)
    drafter.pack_linears()
    prompts = [[5, 6, 7], [8, 9]]
    plain = generate_plain(target, prompts, max_new_tokens=24)
    drafted = generate(target, make_worker(drafter), prompts, max_new_tokens=24)
    assert [text.tokens for text in drafted] == [text.tokens for text in plain]
