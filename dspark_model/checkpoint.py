"""Reading drafter checkpoints: files, names, strictness, memory.

Data goes through `safetensors`, repos through `huggingface_hub`.  Loading is strict in both directions: missing, surplus and
mis-shaped tensors are collected and raised together.
"""

import dataclasses
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from safetensors import SafetensorError, safe_open
from torch import nn

from dspark_model.config import DrafterConfig
from dspark_model.quantisation import SCALE_SUFFIX, dequantise_rows


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded as it is; the message names the file or the tensors and says what to do."""


class EmbeddingChoice(StrEnum):
    """Whose embedding table the drafter uses."""

    AUTO = "auto"
    OWN = "own"
    TARGET = "target"


@dataclass(frozen=True, slots=True)
class TargetTables:
    """The target's tables, [V', hidden]; None where the caller has none to give."""

    lm_head: torch.Tensor | None
    embed_tokens: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a checkpoint: the file that has it, its name there, its shape."""

    file: Path
    stored_name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """An opened checkpoint: its folder and its tensors by the names this package uses."""

    folder: Path
    tensors: dict[str, TensorEntry]


SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
EMBED_TOKENS = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"
MASK_EMBEDDING = "mask_embedding.weight"

# (pattern, replacement) applied in order to a stored name; SpecForge and TensorRT-LLM spellings on the left.
RENAMES = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^fc\."), "context_proj."),
    (re.compile(r"^hidden_norm\."), "context_norm."),
    (re.compile(r"^norm\."), "final_norm."),
    (re.compile(r"^markov_(w[12])\."), r"markov_head.markov_\1."),
    (re.compile(r"^confidence_proj\."), "confidence_head.proj."),
)

# Bytes moved per read.  The file is opened anew for each read, so that no more than this of it is mapped at a time.
_READ_BYTES = 8 << 20
# Eight-bit floats mean something only together with scales.
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def canonical_name(stored: str) -> str:
    """The parameter name that a stored tensor name stands for."""
    for pattern, replacement in RENAMES:
        stored = pattern.sub(replacement, stored)
    return stored


def open_checkpoint(
    path_or_repo_id: str | Path, *, revision: str | None, cache_dir: str | Path | None, local_files_only: bool
) -> CheckpointFiles:
    """Find the checkpoint's files and read their headers.

    Raises:
        CheckpointError: nothing is there, a shard that the index names is missing, a file is damaged, or two stored names
            stand for one parameter.
    """
    folder = _find_folder(path_or_repo_id, revision, cache_dir, local_files_only)
    tensors: dict[str, TensorEntry] = {}
    for file, expected in _weight_files(folder):
        shapes = _read_shapes(file)
        if expected is not None and expected != set(shapes):
            raise CheckpointError(
                f"{file} does not hold what {INDEX_FILE} says: missing {sorted(expected - set(shapes))}, "
                f"surplus {sorted(set(shapes) - expected)}; download the checkpoint again"
            )
        for stored, shape in shapes.items():
            name = canonical_name(stored)
            if name in tensors:
                other = tensors[name]
                raise CheckpointError(
                    f"{stored} in {file.name} and {other.stored_name} in {other.file.name} are both {name}; keep one"
                )
            tensors[name] = TensorEntry(file, stored, shape)
    return CheckpointFiles(folder, tensors)


def _find_folder(source: str | Path, revision: str | None, cache_dir: str | Path | None, local_only: bool) -> Path:
    folder = Path(source)
    if folder.is_dir():
        if revision is not None:
            raise CheckpointError(f"revision {revision!r} was given, but {source} is a local folder and has no revisions")
        return folder
    try:
        return Path(
            snapshot_download(
                str(source),
                revision=revision,
                cache_dir=cache_dir,
                local_files_only=local_only,
                allow_patterns=["config.json", "*.safetensors", INDEX_FILE],
            )
        )
    except HFValidationError:
        raise CheckpointError(f"{source} is neither a folder nor a repo id of the form owner/name") from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise CheckpointError(
            f"{source} is not a folder, and revision {revision or 'main'} of a repo of that name is not in the local cache, "
            f"while the hub could not be reached or offline mode (local_files_only or HF_HUB_OFFLINE) is on; "
            f"download it first or give a local folder ({error})"
        ) from error
    except HfHubHTTPError as error:
        raise CheckpointError(f"the hub refused {source} at revision {revision or 'main'}: {error}") from error


def _weight_files(folder: Path) -> list[tuple[Path, set[str] | None]]:
    """Weight files with the stored names that the index promises for each (None without an index)."""
    index = folder / INDEX_FILE
    if not index.exists():
        single = folder / SINGLE_FILE
        if not single.exists():
            raise CheckpointError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; it is no drafter checkpoint")
        return [(single, None)]
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        by_file: dict[str, set[str]] = {}
        for name, file in weight_map.items():
            by_file.setdefault(file, set()).add(name)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is damaged ({error!r}); download it again") from None
    outside = [name for name in sorted(by_file) if not is_plain_name(name)]
    if outside:
        raise CheckpointError(f"{index} names {outside}, wanted names of files in its own folder")
    missing = [name for name in sorted(by_file) if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{INDEX_FILE} in {folder} names shards that are not there: {missing}; download them again")
    return [(folder / name, by_file[name]) for name in sorted(by_file)]


def is_plain_name(name: str) -> bool:
    """Whether a shard's name in an index stands for a file in the index's own folder."""
    return Path(name).name == name


def _read_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(file, framework="pt") as reader:
            return {name: tuple(reader.get_slice(name).get_shape()) for name in reader.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged or cut short ({error}); download it again") from error


def load_model(
    model_class: type[nn.Module],
    config: DrafterConfig,
    files: CheckpointFiles,
    tables: TargetTables,
    *,
    embedding: EmbeddingChoice | str,
    dtype: torch.dtype | None,
    device: torch.device | str,
    ignore_tensors: Iterable[str],
) -> nn.Module:
    """Build `model_class` with every parameter read from `files`, or from the target's tables; see `from_pretrained`."""
    dtype = getattr(torch, config.dtype) if dtype is None else dtype
    if dtype not in (*_WEIGHT_DTYPES, torch.float64):
        raise ValueError(
            f"dtype is {dtype!r}, wanted torch.float32, bfloat16, float16 or float64, or None for the checkpoint's"
        )
    # With its index: "cuda" is the current device, which need not be the one that the target's tables are on.
    device = torch.empty(0, device=device).device
    ignored = set(ignore_tensors)
    stored = {name: entry for name, entry in files.tensors.items() if entry.stored_name not in ignored}
    own_embedding = _use_own_embedding(EmbeddingChoice(embedding), stored, tables)
    embed_tokens = None if own_embedding else tables.embed_tokens
    lm_head = tables.lm_head
    if lm_head is None:
        if LM_HEAD not in stored:
            raise CheckpointError(
                f"{files.folder} has no {LM_HEAD}, as usual for a drafter, and no lm_head was given; pass the target's "
                "(lm_head=target.lm_head.weight)"
            )
        lm_head = _read_tensor(stored[LM_HEAD], dtype, device, scales=stored.get(LM_HEAD + SCALE_SUFFIX))
    _check_placement({"lm_head": lm_head, "target_embed_tokens": embed_tokens}, dtype, device)
    if MASK_EMBEDDING in stored:
        config = dataclasses.replace(config, mask_embedding=True)
    with torch.device("meta"):
        model = model_class(config, lm_head=lm_head, target_embed_tokens=embed_tokens)
    model.lm_head_source = "checkpoint" if tables.lm_head is None else "target"
    unused = {LM_HEAD} if own_embedding else {LM_HEAD, EMBED_TOKENS}
    wanted = {name: tuple(tensor.shape) for name, tensor in model.named_parameters() if tensor.is_meta}
    if MASK_EMBEDDING in stored and len(stored[MASK_EMBEDDING].shape) == 1:
        wanted[MASK_EMBEDDING] = (config.hidden_size,)
    needed = {name: entry for name, entry in stored.items() if name.removesuffix(SCALE_SUFFIX) not in unused}
    _check_names(files.folder, wanted, needed, config.quant_method)
    for name in wanted:
        module, _, leaf = name.rpartition(".")
        # A trained mask row keeps its own dtype; the block rounds it to the embedding's.
        kept = _read_rows(stored[name], 0, 1).dtype if name == MASK_EMBEDDING else dtype
        tensor = _read_tensor(stored[name], kept, device, scales=stored.get(name + SCALE_SUFFIX))
        tensor = tensor.reshape(model.get_parameter(name).shape)
        model.get_submodule(module).register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    return model.eval()


def _use_own_embedding(choice: EmbeddingChoice, stored: dict[str, TensorEntry], tables: TargetTables) -> bool:
    own = EMBED_TOKENS in stored
    if choice is EmbeddingChoice.OWN and not own:
        raise CheckpointError(f"embedding=own, but the checkpoint has no {EMBED_TOKENS}; use embedding=target")
    use_own = own and choice is not EmbeddingChoice.TARGET
    if not use_own and tables.embed_tokens is None:
        reason = "embedding=target" if own else f"the checkpoint has no {EMBED_TOKENS}"
        raise CheckpointError(f"{reason}, and target_embed_tokens was not given; pass the target's embedding table")
    return use_own


def _check_placement(tables: dict[str, torch.Tensor | None], dtype: torch.dtype, device: torch.device) -> None:
    for name, table in tables.items():
        if table is None:
            continue
        if table.dtype is not dtype or table.device != device:
            raise ValueError(
                f"{name} is {table.dtype} on {table.device}, but the drafter is loaded as {dtype} on {device}; "
                f"pass {name}.to({str(device)!r}, {dtype}) or load the drafter with that dtype and device"
            )


def _check_names(
    folder: Path, wanted: dict[str, tuple[int, ...]], stored: dict[str, TensorEntry], quant_method: str | None
) -> None:
    problems = [f"missing: {name} {list(shape)}" for name, shape in wanted.items() if name not in stored]
    scales = {name + SCALE_SUFFIX: (shape[0], 1) for name, shape in wanted.items() if len(shape) == 2 and quant_method}
    known = wanted | {name: shape for name, shape in scales.items() if name in stored}
    if quant_method and known == wanted:
        problems.append(f"missing: row scales (names + {SCALE_SUFFIX!r}), though quantization_config says {quant_method}")
    problems += [f"surplus: {entry.stored_name}" for name, entry in stored.items() if name not in known]
    problems += [
        f"shape: {stored[name].stored_name} is {list(stored[name].shape)}, wanted {list(shape)}"
        for name, shape in known.items()
        if name in stored and stored[name].shape != shape
    ]
    if problems:
        raise CheckpointError(
            f"the tensors in {folder} do not fit its config.json ({len(problems)} problems):\n  " + "\n  ".join(problems)
        )


def _read_tensor(
    entry: TensorEntry, dtype: torch.dtype, device: torch.device, *, scales: TensorEntry | None = None
) -> torch.Tensor:
    """Read one tensor straight into its final dtype and device, a bounded number of bytes at a time; int8 values are
    multiplied by their rows' scales."""
    if not entry.shape:
        raise CheckpointError(f"{entry.stored_name} in {entry.file} is a scalar; no drafter tensor is one")
    result = torch.empty(entry.shape, dtype=dtype, device=device)
    row_scales = None if scales is None else _read_tensor(scales, torch.float32, torch.device("cpu"))
    step = max(_READ_BYTES // max(result[:1].numel() * 4, 1), 1)
    for start in range(0, entry.shape[0], step):
        rows = _read_rows(entry, start, start + step)
        if row_scales is not None and rows.dtype is torch.int8:
            rows = dequantise_rows(rows, row_scales[start : start + step], dtype)
        elif row_scales is not None or rows.dtype not in _WEIGHT_DTYPES:
            raise CheckpointError(
                f"{entry.stored_name} in {entry.file} is stored as {rows.dtype} {'with' if scales else 'without'} row scales; "
                f"supported: {', '.join(str(kind).removeprefix('torch.') for kind in _WEIGHT_DTYPES)}, and int8 with "
                f"float32 scales [rows, 1] under the same name + {SCALE_SUFFIX!r}"
            )
        result[start : start + step].copy_(rows)
    return result


def _read_rows(entry: TensorEntry, start: int, stop: int) -> torch.Tensor:
    try:
        with safe_open(entry.file, framework="pt") as reader:
            return reader.get_slice(entry.stored_name)[start:stop]
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{entry.file} could not be read ({error}); download it again") from error


def embeddings_bit_equal(drafter_table: torch.Tensor, target_table: torch.Tensor) -> bool:
    """Whether two embedding tables hold the same bits in the rows that both have (vocabularies may be padded).

    Tables of different dtype or width are not equal.
    """
    rows = min(drafter_table.shape[0], target_table.shape[0])
    ours, theirs = drafter_table.detach()[:rows].cpu(), target_table.detach()[:rows].cpu()
    if ours.dtype is not theirs.dtype or ours.shape != theirs.shape:
        return False
    return torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))
