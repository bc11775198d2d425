"""`DrafterConfig`: what a checkpoint's `config.json` says the drafter is.

Every number is read from the checkpoint; nothing about the architecture is assumed.  A fact that is given in several
places must agree in all of them, a key that this package does not know is refused, and a variant that it cannot run is
refused by name.
"""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from dspark_model.config_keys import ConfigError, KeyReader
from dspark_model.quantisation import QUANT_METHOD


class Family(StrEnum):
    """Which contract the checkpoint was trained for; decides the slot rule when no key does."""

    DSPARK = "dspark"
    DFLASH = "dflash"


MODEL_TYPES = {
    "k3_dspark": Family.DSPARK,
    "kimi_k3_dspark": Family.DSPARK,
    "mla_dspark": Family.DSPARK,
    "k3_dflash": Family.DFLASH,
    "mla_dflash": Family.DFLASH,
}
ARCHITECTURES = (
    "K3DSparkModel",
    "KimiK3DSparkModel",
    "KimiK3DSparkMLADraftModel",
    "MLADSparkForCausalLM",
    "K3DFlashModel",
    "MLADFlashForCausalLM",
)
MARKOV_HEAD_TYPES = ("vanilla",)
AUX_HIDDEN_STREAMS = ("prefix", "attn_res")
DTYPES = ("float32", "bfloat16", "float16")


class RopeType(StrEnum):
    DEFAULT = "default"
    YARN = "yarn"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding over `qk_rope_head_dim` values, adjacent pairs (2i, 2i + 1).

    For `yarn` the fields are those of the YaRN paper (arXiv 2309.00071) as DeepSeek-V2/V3 configs spell them.
    """

    rope_type: RopeType = RopeType.DEFAULT
    theta: float
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def __post_init__(self):
        if not (self.theta > 1.0 and math.isfinite(self.theta)):
            raise ConfigError(f"rope_theta is {self.theta}; it must be finite and above 1")
        if self.rope_type is RopeType.DEFAULT:
            return
        if self.factor < 1.0:
            raise ConfigError(f"YaRN factor is {self.factor}; it must be at least 1")
        if self.original_max_position_embeddings is None or self.original_max_position_embeddings < 1:
            raise ConfigError(
                "YaRN needs original_max_position_embeddings (a positive whole number), "
                f"got {self.original_max_position_embeddings}"
            )
        if not self.beta_fast >= self.beta_slow > 0:
            raise ConfigError(
                f"YaRN beta_fast is {self.beta_fast} and beta_slow {self.beta_slow}; wanted beta_fast >= beta_slow > 0"
            )

    def yarn_mscale(self, scale: float) -> float:
        """m(a) = 0.1 a ln(factor) + 1: YaRN's attention temperature, 1 without scaling."""
        return 0.1 * scale * math.log(self.factor) + 1.0

    @property
    def cos_sin_multiplier(self) -> float:
        """Factor on cos and sin: m(mscale) / m(mscale_all_dim), 1 for plain RoPE."""
        return self.yarn_mscale(self.mscale) / self.yarn_mscale(self.mscale_all_dim)

    @property
    def softmax_multiplier(self) -> float:
        """Factor on the softmax scale: m(mscale_all_dim) squared, 1 for plain RoPE."""
        return self.yarn_mscale(self.mscale_all_dim) ** 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """The architecture of one MLA-shaped DSpark (or DFlash) drafter.

    Build it with `from_dict` or `from_file`; all facts are then checked.  `sample_from_anchor` is the resolved slot
    rule: True means K block rows for K drafts and row j predicts draft j (DSpark's shifted labels); False means K + 1
    rows of which rows 1..K are read (plain DFlash).  `slot_rule_source` says what decided it and is not compared.
    """

    model_type: str
    family: Family
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    target_layer_ids: tuple[int, ...]
    target_hidden_size: int
    target_num_hidden_layers: int | None
    mask_token_id: int
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    block_size: int | None
    markov_rank: int
    markov_head_type: str
    enable_confidence_head: bool
    confidence_head_with_markov: bool
    fc_norm: bool
    aux_hidden_stream: str
    is_causal: bool
    sample_from_anchor: bool
    slot_rule_source: str = field(compare=False)
    mask_embedding: bool
    dtype: str
    quant_method: str | None

    @property
    def num_context_features(self) -> int:
        """Number of tapped target layers."""
        return len(self.target_layer_ids)

    @property
    def context_width(self) -> int:
        """Width of one row of `target_hidden`: the taps side by side."""
        return self.num_context_features * self.target_hidden_size

    @property
    def latent_dim(self) -> int:
        """Values the pool keeps per token and layer: kv_lora_rank + qk_rope_head_dim."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """mscale² / sqrt(qk_head_dim): from the un-absorbed head width, not from the latent's (DeepSeek-V2, YaRN)."""
        return self.rope.softmax_multiplier / math.sqrt(self.qk_head_dim)

    @property
    def confidence_input_size(self) -> int:
        return self.hidden_size + (self.markov_rank if self.confidence_head_with_markov else 0)

    def block_rows(self, num_drafts: int) -> int:
        """Rows that one block of `num_drafts` drafts occupies: K with shifted labels, K + 1 with the plain rule."""
        return num_drafts if self.sample_from_anchor else num_drafts + 1

    @classmethod
    def from_file(cls, path: str | Path, *, ignore_keys: tuple[str, ...] = ()) -> "DrafterConfig":
        """Read a checkpoint's `config.json`.

        Raises:
            ConfigError: the file is missing or is not a JSON object, or `from_dict` refuses its content.
        """
        path = Path(path)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{path} does not exist; a drafter folder needs a config.json") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not valid JSON ({error}); download it again") from None
        if not isinstance(data, dict):
            raise ConfigError(f"{path} holds a JSON {type(data).__name__}, wanted an object")
        return cls.from_dict(data, ignore_keys=ignore_keys)

    @classmethod
    def from_dict(cls, data: dict[str, Any], *, ignore_keys: tuple[str, ...] = ()) -> "DrafterConfig":
        """Check `data` (the content of a `config.json`) and build the config.

        `ignore_keys` names keys of `data` that the caller knows to be harmless although this package does not.

        Raises:
            ConfigError: a key is missing, unknown, of a wrong type, given twice with different values, or asks for a
                variant that this package cannot run.
        """
        reader = KeyReader(data, ignore_keys)
        family = _read_family(reader)
        _refuse_unsupported(reader)
        dimensions = {name: reader.integer(name, minimum=1) for name in _DIMENSIONS}
        markov_rank = reader.integer("markov_rank", default=0, minimum=0)
        confidence = reader.boolean("enable_confidence_head", default=False)
        sample_from_anchor, slot_rule_source = _read_slot_rule(reader, family)
        config = cls(
            model_type=reader.string("model_type"),
            family=family,
            **dimensions,
            rms_norm_eps=reader.number("rms_norm_eps"),
            rope=_read_rope(reader),
            target_layer_ids=reader.integer_list("target_layer_ids"),
            target_hidden_size=reader.integer("target_hidden_size", default=dimensions["hidden_size"], minimum=1),
            target_num_hidden_layers=reader.integer("target_num_hidden_layers", default=None, minimum=1),
            mask_token_id=reader.integer("mask_token_id", minimum=0),
            bos_token_id=reader.integer("bos_token_id", default=None),
            eos_token_id=reader.integer("eos_token_id", default=None),
            pad_token_id=reader.integer("pad_token_id", default=None),
            block_size=reader.integer("block_size", default=None, minimum=1),
            markov_rank=markov_rank,
            markov_head_type=reader.choice("markov_head_type", MARKOV_HEAD_TYPES, default="vanilla"),
            enable_confidence_head=confidence,
            confidence_head_with_markov=_read_confidence_markov(reader, markov_rank) and confidence,
            fc_norm=reader.boolean("fc_norm", default=False),
            aux_hidden_stream=reader.choice("aux_hidden_stream", AUX_HIDDEN_STREAMS, default="prefix"),
            is_causal=reader.boolean("is_causal", default=False),
            sample_from_anchor=sample_from_anchor,
            slot_rule_source=slot_rule_source,
            mask_embedding=reader.boolean("mask_embedding", default=False),
            dtype=reader.choice("dtype", DTYPES, default="bfloat16"),
            quant_method=reader.quant_method(QUANT_METHOD),
        )
        _read_stated_facts(reader, config)
        reader.refuse_unread()
        return config

    def __post_init__(self):
        _check_taps(self)
        if self.mask_token_id >= self.vocab_size:
            raise ConfigError(f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size} rows")
        if self.qk_rope_head_dim % 2:
            raise ConfigError(f"qk_rope_head_dim is {self.qk_rope_head_dim}; RoPE rotates pairs, so it must be even")
        if not self.rms_norm_eps > 0:
            raise ConfigError(f"rms_norm_eps is {self.rms_norm_eps}; it must be positive")

    def to_dict(self) -> dict[str, Any]:
        """The `config.json` that `from_dict` reads back to an equal config."""
        data = dataclasses.asdict(self)
        rope = data.pop("rope")
        rope["rope_type"] = str(rope["rope_type"])
        rope["rope_theta"] = rope.pop("theta")
        if self.rope.rope_type is RopeType.DEFAULT:
            rope = {key: rope[key] for key in ("rope_type", "rope_theta")}
        for derived in ("family", "slot_rule_source", "quant_method"):
            data.pop(derived)
        if self.quant_method is not None:
            data["quantization_config"] = {"quant_method": self.quant_method}
        data["torch_dtype"] = data.pop("dtype")
        data["target_layer_ids"] = list(self.target_layer_ids)
        data = {key: value for key, value in data.items() if value is not None}
        return {"architectures": ["MLADSparkForCausalLM"], **data, "rope_parameters": rope}


_DIMENSIONS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "vocab_size",
    "max_position_embeddings",
)


def _read_family(reader: KeyReader) -> Family:
    _refuse_gqa(reader)
    model_type = reader.string("model_type")
    if model_type not in MODEL_TYPES:
        raise ConfigError(f"model_type {model_type!r} is not supported; supported: {', '.join(MODEL_TYPES)}")
    for name in reader.string_list("architectures", default=()):
        if "lilicorr" in name.lower():
            raise ConfigError(f"architecture {name!r} is a LiLiCorr drafter, which this package does not run")
        if name not in ARCHITECTURES:
            raise ConfigError(f"architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return MODEL_TYPES[model_type]


def _refuse_gqa(reader: KeyReader) -> None:
    heads = reader.integer("num_attention_heads", minimum=1)
    kv_heads = reader.integer("num_key_value_heads", default=heads, minimum=1)
    if kv_heads != heads:
        raise ConfigError(
            f"num_key_value_heads is {kv_heads} and num_attention_heads {heads}: this is a GQA drafter; "
            "only MLA drafters (kv_lora_rank, one shared latent) are supported"
        )


def _refuse_unsupported(reader: KeyReader) -> None:
    """Refuse, by name, what would change the maths in a way that this package does not implement."""
    reader.refuse_prefix("lilicorr", "LiLiCorr drafters are not supported")
    if "kv_lora_rank" not in reader:
        raise ConfigError("kv_lora_rank is missing: this is not an MLA drafter (GQA drafters are not supported)")
    for key, wanted, meaning in _FIXED_FACTS:
        reader.require_value(key, wanted, meaning)
    vocab = reader.integer("vocab_size", minimum=1)
    draft_vocab = reader.integer("draft_vocab_size", default=vocab, minimum=1)
    if draft_vocab != vocab:
        raise ConfigError(
            f"draft_vocab_size is {draft_vocab} and vocab_size {vocab}: reduced draft vocabularies are not supported"
        )
    layer_types = reader.string_list("layer_types", default=())
    if any(kind != "full_attention" for kind in layer_types):
        raise ConfigError(f"layer_types is {list(layer_types)}; only full_attention is supported")


_FIXED_FACTS = (
    ("attention_bias", False, "biases in the attention projections"),
    ("mla_use_nope", False, "MLA without rotary values"),
    ("mla_use_output_gate", False, "an output gate in MLA"),
    ("hidden_act", "silu", "another activation than SiLU"),
    ("rope_interleave", True, "half-split RoPE"),
    ("tie_word_embeddings", False, "a head tied to the drafter's embedding; the head is the target's"),
    ("sliding_window", None, "a sliding window"),
    ("compression_config", None, "a quantised checkpoint"),
)


def _read_slot_rule(reader: KeyReader, family: Family) -> tuple[bool, str]:
    stated = reader.boolean("sample_from_anchor", default=None)
    if stated is not None:
        return stated, f"checkpoint key {reader.spelling_of('sample_from_anchor')}={str(stated).lower()}"
    return family is Family.DSPARK, f"no key; {family} family default"


def _read_confidence_markov(reader: KeyReader, markov_rank: int) -> bool:
    stated = reader.boolean("confidence_head_with_markov", default=None)
    return markov_rank > 0 if stated is None else stated and markov_rank > 0


def _read_rope(reader: KeyReader) -> RopeConfig:
    rope = reader.rope_section()
    kind = rope.pop("rope_type", "default")
    if kind not in list(RopeType):
        raise ConfigError(f"rope type {kind!r} is not supported; supported: {', '.join(RopeType)}")
    if kind == RopeType.DEFAULT:
        surplus = set(rope) - {"theta"}
        if surplus:
            raise ConfigError(f"rope type 'default' takes only rope_theta, got also {sorted(surplus)}")
    return RopeConfig(rope_type=RopeType(kind), **rope)


def _read_stated_facts(reader: KeyReader, config: DrafterConfig) -> None:
    """Keys that repeat or only describe what is known already."""
    # In K3 exports num_target_layers counts the taps, in DFlash and DeepSpec ones the target's depth: no use is made
    # of it, only an impossible value is refused.
    stated = reader.integer("num_target_layers", default=config.num_context_features, minimum=1)
    if stated < config.num_context_features:
        raise ConfigError(f"num_target_layers is {stated}, below the {config.num_context_features} target_layer_ids")
    width = reader.integer("qk_head_dim", default=config.qk_head_dim)
    if width != config.qk_head_dim:
        raise ConfigError(
            f"qk_head_dim is {width}, but qk_nope_head_dim {config.qk_nope_head_dim} and qk_rope_head_dim "
            f"{config.qk_rope_head_dim} make {config.qk_head_dim}; they must agree"
        )


def _check_taps(config: DrafterConfig) -> None:
    ids = config.target_layer_ids
    if not ids:
        raise ConfigError("target_layer_ids is empty; a drafter needs at least one tapped layer")
    if any(later <= earlier for earlier, later in zip(ids, ids[1:], strict=False)) or ids[0] < 0:
        raise ConfigError(
            f"target_layer_ids is {list(ids)}; the ids are 0-based layers, ascending and without repeats "
            "(the order of the taps in a row is positional)"
        )
    depth = config.target_num_hidden_layers
    if depth is not None and ids[-1] >= depth:
        raise ConfigError(f"target_layer_ids {list(ids)} reach past the target's {depth} layers (0-based)")
