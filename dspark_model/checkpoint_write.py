"""Writing drafter checkpoints, plain or with int8 weights, in one file or in shards."""

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from dspark_model.checkpoint import EMBED_TOKENS, INDEX_FILE, LM_HEAD, SINGLE_FILE, CheckpointError, is_plain_name
from dspark_model.quantisation import QUANT_METHOD, SCALE_SUFFIX, quantise_rows


class WeightStorage(StrEnum):
    """How matrices are stored: in the model's dtype, or as int8 with one scale per row."""

    PLAIN = "plain"
    INT8_ROWS = QUANT_METHOD


def save_model(model: nn.Module, folder: Path, *, storage: WeightStorage | str, max_shard_bytes: int | None) -> None:
    """Write the drafter's own parameters and config; see `MLADSparkForCausalLM.save_pretrained`."""
    storage = WeightStorage(storage)
    folder.mkdir(parents=True, exist_ok=True)
    shared = {EMBED_TOKENS} if model.embedding_source == "target" else set()
    tensors = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items() if name not in shared}
    if model.lm_head_source == "checkpoint":
        tensors[LM_HEAD] = model.lm_head.cpu().contiguous()
    if storage is WeightStorage.INT8_ROWS:
        tensors = _quantise(tensors)
    shards = _split(tensors, max_shard_bytes)
    old_files = _weight_file_names(folder)
    config = dataclasses.replace(model.config, quant_method=None if storage is WeightStorage.PLAIN else str(storage)).to_dict()
    config["torch_dtype"] = str(model.dtype).removeprefix("torch.")
    for name, shard in shards.items():
        _replace(folder / name, lambda path, shard=shard: save_file(shard, path, metadata={"format": "pt"}))
    _write_json(folder / "config.json", config)
    if len(shards) > 1:
        total = sum(t.nbytes for t in tensors.values())
        weight_map = {key: name for name, shard in shards.items() for key in shard}
        _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    else:
        (folder / INDEX_FILE).unlink(missing_ok=True)
    for name in old_files - set(shards):
        (folder / name).unlink(missing_ok=True)


def _quantise(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    stored = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and tensor.shape[0] > 1:
            stored[name], stored[name + SCALE_SUFFIX] = quantise_rows(tensor)
        else:
            stored[name] = tensor
    return stored


def _split(tensors: dict[str, torch.Tensor], max_bytes: int | None) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors by file name, in order, each file's data at most `max_bytes`."""
    if max_bytes is None or sum(t.nbytes for t in tensors.values()) <= max_bytes:
        return {SINGLE_FILE: tensors}
    groups: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in tensors.items():
        if tensor.nbytes > max_bytes:
            raise CheckpointError(f"{name} takes {tensor.nbytes} bytes, above max_shard_bytes {max_bytes}; raise the limit")
        if sum(t.nbytes for t in groups[-1].values()) + tensor.nbytes > max_bytes:
            groups.append({})
        groups[-1][name] = tensor
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, start=1)}


def _weight_file_names(folder: Path) -> set[str]:
    """Weight files of the checkpoint that is in the folder already, if any; none outside it, whatever its index says."""
    names = {SINGLE_FILE} if (folder / SINGLE_FILE).exists() else set()
    if (folder / INDEX_FILE).exists():
        try:
            weight_map = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"]
            names |= {name for name in weight_map.values() if is_plain_name(name)}
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{folder / INDEX_FILE} is damaged ({error!r}); delete it or save elsewhere") from None
    return names


def _write_json(path: Path, content: dict) -> None:
    _replace(path, lambda temporary: temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8"))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside `path`, then move into place, so that an interrupted save leaves the old file whole."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    os.close(handle)
    try:
        write(Path(temporary))
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
