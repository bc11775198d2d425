"""`PoolConfig` and `RuntimeConfig`: how much is served, and which fast paths may be taken."""

from dataclasses import dataclass, fields
from enum import StrEnum

from dspark_model.config_keys import ConfigError


class Layout(StrEnum):
    """Order of the latent pool's dimensions; D = kv_lora_rank + qk_rope_head_dim."""

    LAYER_MAJOR = "layer_major"  # [layers, pages, page_size, D]
    PAGE_MAJOR = "page_major"  # [pages, layers, page_size, D]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Size of what is served; every buffer of the worker and the pool follows from it.

    page_size: tokens per page.
    num_pages: pages of the pool, shared by all requests.
    max_requests: requests admitted at one time.
    max_positions: served limit in tokens for one request; positions 0 .. max_positions - 1 are allowed.
    num_drafts: largest K that a worker on this pool may draft.
    layout: order of the pool's dimensions.
    context_window: W bounds the drafter to the last W context rows of a request, whose older pages go back to the pool; None: a
        block sees the whole context.
    """

    page_size: int = 32
    num_pages: int
    max_requests: int
    max_positions: int
    num_drafts: int = 7
    layout: Layout = Layout.LAYER_MAJOR
    context_window: int | None = None

    def __post_init__(self):
        for name in ("page_size", "num_pages", "max_requests", "max_positions", "num_drafts", "context_window"):
            value = getattr(self, name)
            if name == "context_window" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"pool.{name} is {value!r}, wanted a whole number of at least 1")
        object.__setattr__(self, "layout", _choice("pool.layout", self.layout, Layout))


class Switch(StrEnum):
    """How an optional fast path is chosen.

    `off`: never.  `auto`: when its preconditions hold, with the reason recorded when they do not.  `require`: always;
    raises when the preconditions do not hold.
    """

    OFF = "off"
    AUTO = "auto"
    REQUIRE = "require"


class Attention(StrEnum):
    AUTO = "auto"
    TORCH = "torch"
    TRITON = "triton"
    CUTE = "cute"
    FLASHINFER = "flashinfer"
    CAUSAL_FIXUP = "causal_fixup"


class LatentNormRope(StrEnum):
    AUTO = "auto"
    TORCH = "torch"
    TRITON = "triton"
    CUTE = "cute"


class Gemm(StrEnum):
    AUTO = "auto"
    CUBLAS = "cublas"  # torch's own matrix product: cuBLAS on CUDA, the CPU library elsewhere
    LOW_M = "low_m"
    PERSISTENT = "persistent"  # low_m, with all products between two attentions in one launch


class MergedQkvA(StrEnum):
    AUTO = "auto"
    OFF = "off"
    ON = "on"


class KvDtype(StrEnum):
    AUTO = "auto"  # the model's dtype
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FP8_E4M3 = "fp8_e4m3"


class DraftSampling(StrEnum):
    """How the Markov chain draws for a request with a temperature above 0."""

    GREEDY = "greedy"  # arg max always; verification treats each draft as certain, which is still exact
    SAMPLE = "sample"  # draw at the request's temperature and keep the distribution for verification


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """Speed and accuracy choices of a worker, read when a step runs.

    The `Switch` fields never change a result.  The named choices select a numeric profile, whose distance from the
    torch reference is stated by the op concerned.
    """

    fused_prologue: Switch = Switch.AUTO
    overlap_context_projection: Switch = Switch.AUTO
    split_qkv_streams: Switch = Switch.AUTO
    direct_pool_write: Switch = Switch.AUTO
    cuda_graph: Switch = Switch.AUTO
    attention: Attention = Attention.AUTO
    latent_norm_rope: LatentNormRope = LatentNormRope.AUTO
    gemm: Gemm = Gemm.AUTO
    merged_qkv_a: MergedQkvA = MergedQkvA.AUTO
    kv_dtype: KvDtype = KvDtype.AUTO
    draft_sampling: DraftSampling = DraftSampling.GREEDY

    @classmethod
    def plain(cls) -> "RuntimeConfig":
        """The readable torch path: every switch off, every backend the reference."""
        switches = {field.name: Switch.OFF for field in fields(cls) if isinstance(field.default, Switch)}
        return cls(
            **switches,
            attention=Attention.TORCH,
            latent_norm_rope=LatentNormRope.TORCH,
            gemm=Gemm.CUBLAS,
            merged_qkv_a=MergedQkvA.OFF,
        )

    def __post_init__(self):
        for field in fields(self):
            kind = type(field.default)
            object.__setattr__(self, field.name, _choice(f"runtime.{field.name}", getattr(self, field.name), kind))


def _choice(name: str, value: object, kind: type[StrEnum]) -> StrEnum:
    """`value` as a member of `kind`; plain strings are accepted so that a config file can spell them."""
    if not isinstance(value, str) or value not in list(kind):
        raise ConfigError(f"{name} is {value!r}; allowed: {', '.join(kind)}")
    return kind(value)
