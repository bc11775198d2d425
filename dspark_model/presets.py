"""`load_config`: a preset file (TOML) with overrides, resolved into typed config objects."""

import dataclasses
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args

from dspark_model.config import DrafterConfig
from dspark_model.config_keys import ConfigError
from dspark_model.serving_config import PoolConfig, RuntimeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Which drafter to load: a Hugging Face repo id with a pinned revision, or a local folder."""

    repo_id: str | None = None
    revision: str | None = None
    path: str | None = None

    def __post_init__(self):
        if (self.repo_id is None) == (self.path is None):
            raise ConfigError("checkpoint needs exactly one of repo_id and path")
        if self.revision is not None and self.repo_id is None:
            raise ConfigError("checkpoint.revision belongs to a repo_id; a local path has no revision")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """What to run.  Exactly one of `checkpoint` and `model` is there: a preset either points at a checkpoint, whose own
    `config.json` says what the model is, or describes a model that has no checkpoint."""

    checkpoint: CheckpointConfig | None
    model: DrafterConfig | None
    pool: PoolConfig
    runtime: RuntimeConfig


SECTIONS = {"checkpoint": CheckpointConfig, "pool": PoolConfig, "runtime": RuntimeConfig}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Preset:
    """Read a preset and apply overrides such as `"runtime.fused_prologue=off"` or `"pool.num_pages=64"`.

    A relative `checkpoint.path` in the file counts from the file's folder, one in an override from the working directory.

    Raises:
        ConfigError: the file is missing or not TOML; a section or key is unknown (the allowed ones are listed); a value
            has the wrong type.
    """
    path = Path(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"preset {path} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"preset {path} is not valid TOML: {error}") from None
    _resolve_checkpoint_path(data, path.parent)
    for override in overrides:
        _apply_override(data, override)
    allowed = (*SECTIONS, "model")
    unknown = sorted(set(data) - set(allowed))
    if unknown:
        raise ConfigError(f"unknown sections {unknown} in {path}; allowed: {', '.join(allowed)}")
    if ("checkpoint" in data) == ("model" in data):
        raise ConfigError(f"{path} needs exactly one of the sections [checkpoint] and [model]")
    return Preset(
        checkpoint=_build("checkpoint", data["checkpoint"]) if "checkpoint" in data else None,
        model=DrafterConfig.from_dict(_table("model", data["model"])) if "model" in data else None,
        pool=_build("pool", data.get("pool", {})),
        runtime=_build("runtime", data.get("runtime", {})),
    )


def _resolve_checkpoint_path(data: dict[str, Any], folder: Path) -> None:
    section = data.get("checkpoint")
    if isinstance(section, dict) and isinstance(section.get("path"), str):
        section["path"] = str((folder / section["path"]).resolve())


def load_runtime(overrides: Sequence[str]) -> RuntimeConfig:
    """The default `RuntimeConfig` with overrides such as `"runtime.fused_prologue=off"`, where no preset is involved.

    Raises:
        ConfigError: as `load_config`, and for an override of another section.
    """
    data: dict[str, Any] = {}
    for override in overrides:
        _apply_override(data, override)
    others = sorted(set(data) - {"runtime"})
    if others:
        raise ConfigError(f"overrides of {others} were given; only runtime.KEY=VALUE can be set here")
    return _build("runtime", data.get("runtime", {}))


def _apply_override(data: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and key):
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    if section not in (*SECTIONS, "model"):
        raise ConfigError(f"override {override!r}: unknown section {section!r}; allowed: {', '.join(SECTIONS)}, model")
    if not isinstance(data.setdefault(section, {}), dict):
        raise ConfigError(f"override {override!r}: [{section}] is not a table")
    data[section][key] = _parse_value(text.strip())


def _parse_value(text: str) -> Any:
    """A TOML value where `text` is one (numbers, true, false, lists, quoted strings), else the bare word itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _table(section: str, values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ConfigError(f"[{section}] is {values!r}, wanted a table")
    return values


def _build(section: str, values: Any) -> Any:
    kind = SECTIONS[section]
    values = _table(section, values)
    known = {field.name: field for field in dataclasses.fields(kind)}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"unknown key {section}.{key}; allowed: {', '.join(known)}")
        _check_type(f"{section}.{key}", value, known[key].type)
    required = [name for name, field in known.items() if field.default is dataclasses.MISSING]
    missing = [name for name in required if name not in values]
    if missing:
        raise ConfigError(f"[{section}] lacks {', '.join(missing)}")
    return kind(**values)


def _check_type(name: str, value: Any, annotation: Any) -> None:
    wanted = get_args(annotation) or (annotation,)
    if issubclass(wanted[0], StrEnum):
        return  # the config class lists the values that it takes
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        names = " or ".join(kind.__name__ for kind in wanted if kind is not type(None))
        raise ConfigError(f"{name} is {value!r} ({type(value).__name__}), wanted {names}")
