"""How facts are looked up in a checkpoint's `config.json`: spellings, nesting, conflicts, unknown keys."""

import math
from typing import Any


class ConfigError(ValueError):
    """A configuration that is incomplete, contradictory or not supported; the message says which and what to do."""


_MISSING = object()

# Sections that a fact may be nested in, beside the top level. `dspark_<key>` and `dflash_<key>` at top level count too.
SECTIONS = ("dspark_config", "dflash_config")
ROPE_SECTIONS = ("rope_parameters", "rope_scaling")

# canonical name -> other accepted spellings
SPELLINGS = {
    "enable_confidence_head": ("use_confidence_head",),
    "is_causal": ("causal", "full_attention_causal"),
    "sample_from_anchor": ("shift_label",),
    "dtype": ("torch_dtype",),
}

ROPE_SPELLINGS = {
    "type": "rope_type",
    "rope_type": "rope_type",
    "rope_theta": "theta",
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}

# Keys that say nothing about the drafter's maths; written by transformers and by trainers.
INERT_KEYS = frozenset({
    "_name_or_path", "auto_map", "transformers_version", "use_cache", "initializer_range", "attention_dropout",
    "attn_implementation", "_attn_implementation", "return_dict", "output_hidden_states", "output_attentions",
    "pretraining_tp", "max_window_layers", "use_sliding_window", "head_dim",
})  # fmt: skip


class KeyReader:
    """Reads typed facts from a config dictionary and remembers which keys were used.

    A fact is looked up under each of its spellings at top level, with the prefix `dspark_` or `dflash_`, and inside the
    sections `dspark_config` and `dflash_config`.  All the places that have it must agree.
    """

    def __init__(self, data: dict[str, Any], ignore_keys: tuple[str, ...] = ()):
        self._data = dict(data)
        self._ignored = set(ignore_keys)
        self._used: set[str] = set(SECTIONS) | set(ROPE_SECTIONS)
        self._found: dict[str, str] = {}
        for section in (*SECTIONS, *ROPE_SECTIONS):
            if self._data.get(section) is not None and not isinstance(self._data[section], dict):
                raise ConfigError(f"{section} is {self._data[section]!r}, wanted an object")

    def __contains__(self, name: str) -> bool:
        return bool(self._places(name))

    def spelling_of(self, name: str) -> str:
        """The key under which a fact that has been read was found."""
        return self._found[name]

    def _places(self, name: str) -> list[tuple[str, Any]]:
        places = []
        for spelling in (name, *SPELLINGS.get(name, ())):
            for key in (spelling, f"dspark_{spelling}", f"dflash_{spelling}"):
                if key in self._data:
                    self._used.add(key)
                    places.append((key, self._data[key]))
            for section in SECTIONS:
                inner = self._data.get(section) or {}
                if spelling in inner:
                    self._used.add(f"{section}.{spelling}")
                    places.append((f"{section}.{spelling}", inner[spelling]))
        return places

    def _value(self, name: str, default: Any) -> Any:
        places = self._places(name)
        if not places:
            if default is _MISSING:
                spellings = ", ".join((name, *SPELLINGS.get(name, ())))
                raise ConfigError(f"config.json has no {name} (accepted spellings: {spellings}; flat or in {SECTIONS})")
            return default
        first_key, first = places[0]
        for key, value in places[1:]:
            if value != first or isinstance(value, bool) != isinstance(first, bool):
                raise ConfigError(f"{first_key} is {first!r} but {key} is {value!r}; they mean the same and must agree")
        self._found[name] = first_key
        return default if first is None and default is not _MISSING else first

    def _typed(self, name: str, default: Any, kinds: tuple[type, ...], wanted: str) -> Any:
        value = self._value(name, default)
        if value is default:
            return value
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ConfigError(f"{name} is {value!r} ({type(value).__name__}), wanted {wanted}")
        return value

    def integer(self, name: str, default: Any = _MISSING, minimum: int | None = None) -> Any:
        value = self._typed(name, default, (int,), "a whole number")
        if value is not None and minimum is not None and value < minimum:
            raise ConfigError(f"{name} is {value}, wanted at least {minimum}")
        return value

    def number(self, name: str, default: Any = _MISSING) -> Any:
        return self._typed(name, default, (int, float), "a number")

    def boolean(self, name: str, default: Any = _MISSING) -> Any:
        return self._typed(name, default, (bool,), "true or false")

    def string(self, name: str, default: Any = _MISSING) -> Any:
        return self._typed(name, default, (str,), "a string")

    def choice(self, name: str, choices: tuple[str, ...], default: Any = _MISSING) -> str:
        value = self.string(name, default)
        if value not in choices:
            raise ConfigError(f"{name} {value!r} is not supported; supported: {', '.join(choices)}")
        return value

    def integer_list(self, name: str) -> tuple[int, ...]:
        value = self._typed(name, _MISSING, (list, tuple), "a list of whole numbers")
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            raise ConfigError(f"{name} is {value!r}, wanted a list of whole numbers")
        return tuple(value)

    def string_list(self, name: str, default: Any = _MISSING) -> tuple[str, ...]:
        value = self._typed(name, default, (list, tuple), "a list of strings")
        if not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{name} is {value!r}, wanted a list of strings")
        return tuple(value)

    def require_value(self, name: str, wanted: Any, meaning: str) -> None:
        """Accept an absent key or `wanted`; anything else asks for `meaning`, which is not supported."""
        value = self._value(name, wanted)
        if value != wanted:
            raise ConfigError(f"{name} is {value!r}: {meaning} is not supported (supported: {wanted!r} or no such key)")

    def quant_method(self, supported: str) -> str | None:
        """The checkpoint's weight storage: None without a `quantization_config`, else `supported`."""
        section = self._value("quantization_config", None)
        if section is None:
            return None
        if section != {"quant_method": supported}:
            raise ConfigError(
                f"quantization_config is {section!r}; supported: no such key, or {{'quant_method': {supported!r}}} "
                "(int8 matrices with one scale per row)"
            )
        return supported

    def refuse_prefix(self, prefix: str, reason: str) -> None:
        hits = [key for key in self._data if key.lower().startswith(prefix)]
        if hits:
            raise ConfigError(f"{reason} (config keys {hits})")

    def rope_section(self) -> dict[str, Any]:
        """Rotary facts under the field names of `RopeConfig`, from all the places that carry some."""
        merged: dict[str, tuple[str, Any]] = {}
        if "rope_theta" in self._data:
            self._used.add("rope_theta")
            merged["theta"] = ("rope_theta", self._data["rope_theta"])
        for section in ROPE_SECTIONS:
            for key, value in (self._data.get(section) or {}).items():
                if key not in ROPE_SPELLINGS:
                    raise ConfigError(f"{section}.{key} is not supported; supported: {', '.join(ROPE_SPELLINGS)}")
                _merge(merged, ROPE_SPELLINGS[key], f"{section}.{key}", value)
        if "theta" not in merged:
            raise ConfigError("rope_theta is missing (top level, or inside rope_parameters or rope_scaling)")
        return {name: _rope_value(name, *entry) for name, entry in merged.items()}

    def refuse_unread(self) -> None:
        """Refuse every key that no reader asked for: an option that is accepted and then unused would be a lie."""
        flat = [key for key in self._data if key not in self._used]
        nested = [f"{section}.{key}" for section in SECTIONS for key in (self._data.get(section) or {})]
        unread = [key for key in flat if key not in INERT_KEYS and not key.startswith("_")]
        unread += [key for key in nested if key not in self._used]
        unread = sorted(set(unread) - self._ignored)
        if unread:
            raise ConfigError(
                f"config.json has keys that this package does not know: {', '.join(unread)}; "
                "if they are harmless, name them in ignore_keys"
            )


def _merge(merged: dict[str, tuple[str, Any]], name: str, key: str, value: Any) -> None:
    if name in merged and merged[name][1] != value:
        raise ConfigError(f"{merged[name][0]} is {merged[name][1]!r} but {key} is {value!r}; they must agree")
    merged[name] = (key, value)


def _rope_value(name: str, key: str, value: Any) -> Any:
    if name == "rope_type":
        return "default" if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{key} is {value!r}, wanted a finite number")
    if name != "original_max_position_embeddings":
        return float(value)
    if value != int(value):
        raise ConfigError(f"{key} is {value!r}, wanted a whole number")
    return int(value)
