"""Small drafters, checkpoints and comparisons for tests of this package and of engines that use it."""

import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dspark_model.checkpoint import INDEX_FILE, LM_HEAD, SINGLE_FILE
from dspark_model.config import DrafterConfig
from dspark_model.modeling import MLADSparkForCausalLM


def tiny_config_json(**changes: Any) -> dict[str, Any]:
    """The `config.json` of a drafter that runs on a CPU in milliseconds; `changes` replace keys, None removes one."""
    data = {
        "architectures": ["MLADSparkForCausalLM"],
        "model_type": "mla_dspark",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "q_lora_rank": 40,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 20,
        "vocab_size": 320,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
        },
        "target_hidden_size": 48,
        "target_layer_ids": [1, 3, 4],
        "target_num_hidden_layers": 6,
        "mask_token_id": 319,
        "block_size": 7,
        "markov_rank": 16,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "torch_dtype": "float32",
    }
    return {key: value for key, value in {**data, **changes}.items() if value is not None}


def tiny_config(**changes: Any) -> DrafterConfig:
    """`tiny_config_json(**changes)` as a config: Markov and confidence heads, YaRN, three taps, unless changed."""
    return DrafterConfig.from_dict(tiny_config_json(**changes))


def random_model(
    config: DrafterConfig, seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> MLADSparkForCausalLM:
    """A drafter with seeded weights in which every tensor matters: norm weights are far from 1, biases from 0.

    The values depend on `seed` and the tensor's name alone; another dtype or device rounds or moves the same ones.
    """
    model = MLADSparkForCausalLM(config, lm_head=random_lm_head(config, seed, dtype))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_random_tensor(name, tuple(parameter.shape), seed))
    return model.to(dtype=dtype, device=device).requires_grad_(False).eval()


def random_lm_head(config: DrafterConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The target's output table that `random_model` of the same seed uses, [vocab_size, hidden_size], on the CPU."""
    return _random_tensor(LM_HEAD, (config.vocab_size, config.hidden_size), seed).to(dtype)


def random_tensors(config: DrafterConfig, seed: int = 0, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """The tensors of `random_model` under their checkpoint names; dtype None is the config's."""
    model = random_model(config, seed, getattr(torch, config.dtype) if dtype is None else dtype)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def write_checkpoint(
    folder: str | Path,
    config: DrafterConfig,
    seed: int = 0,
    *,
    tensors: Mapping[str, torch.Tensor] | None = None,
    config_json: Mapping[str, Any] | None = None,
    num_shards: int = 1,
) -> Path:
    """Write a checkpoint of `random_model(config, seed)`, or of the given `tensors` and `config_json`, and return its
    folder.  With several shards the tensors are dealt out in turn and an index is written."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = random_tensors(config, seed) if tensors is None else dict(tensors)
    config_json = config.to_dict() if config_json is None else dict(config_json)
    (folder / "config.json").write_text(json.dumps(config_json, indent=2), encoding="utf-8")
    if num_shards == 1:
        save_file(tensors, folder / SINGLE_FILE)
        return folder
    names = [f"model-{index + 1:05}-of-{num_shards:05}.safetensors" for index in range(num_shards)]
    weight_map = {tensor: names[index % num_shards] for index, tensor in enumerate(tensors)}
    for name in names:
        save_file({tensor: tensors[tensor] for tensor, file in weight_map.items() if file == name}, folder / name)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    return folder


def assert_bitwise_equal(a: torch.Tensor, b: torch.Tensor, name: str = "tensor") -> None:
    """Require the same dtype, shape and bytes; NaNs are equal when their bits are.

    Raises:
        AssertionError: says how many values differ, where the first one is, and what both are there.
    """
    if a.dtype is not b.dtype or a.shape != b.shape:
        raise AssertionError(f"{name}: {a.dtype} {list(a.shape)} is not {b.dtype} {list(b.shape)}")
    bits_a, bits_b = _bits(a), _bits(b)
    if torch.equal(bits_a, bits_b):
        return
    differ = (bits_a != bits_b).any(-1)
    first = torch.unravel_index(differ.nonzero()[0, 0], a.shape) if a.ndim else ()
    where = tuple(int(index) for index in first)
    raise AssertionError(
        f"{name}: {int(differ.sum())} of {a.numel()} values differ, the first at {list(where)}: "
        f"{a[where].item()!r} and {b[where].item()!r}"
    )


def poison_(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with NaN, or with the lowest value of a whole-number dtype, in place; returns the tensor."""
    if not tensor.is_floating_point():
        return tensor.fill_(False if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).min)
    if tensor.element_size() == 1:
        tensor.view(torch.uint8).fill_(0x7F)  # NaN in e4m3fn and in e5m2
        return tensor
    return tensor.fill_(float("nan"))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of each value, uint8 [numel, element size]."""
    # A copy has no odd strides, which `view` refuses even for a single value.
    flat = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).flatten()
    return flat.view(torch.uint8).unflatten(0, (flat.numel(), flat.element_size()))


def _random_tensor(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """float32 values: matrices keep the scale of their input, tables have unit rows, norm weights lie in [0.5, 1.5]."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
    if len(shape) == 1:
        shift = 0.5 if "norm" in name else 0.0
        return torch.rand(shape, generator=generator) + shift
    values = torch.randn(shape, generator=generator)
    is_table = name.startswith(("embed_tokens", "mask_embedding")) or name.endswith("markov_w1.weight")
    if is_table:
        return values
    # Logits need a spread well above 1, so that a float32 rounding never changes an arg max.
    return values * (3.0 if name == LM_HEAD else 1.0) / math.sqrt(shape[1])
