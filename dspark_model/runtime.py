"""Which fast paths are in force, and why: `RuntimeConfig` resolved against the machine, the model and the pool."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch

from dspark_model.config_keys import ConfigError
from dspark_model.ops.fp8_rows import FP8
from dspark_model.serving_config import (
    Attention,
    Gemm,
    KvDtype,
    LatentNormRope,
    MergedQkvA,
    RuntimeConfig,
    Switch,
)

logger = logging.getLogger("dspark_model")


@dataclass(frozen=True, slots=True)
class Choice:
    """One resolved field of `RuntimeConfig`: what was asked for, what runs, and the reason."""

    name: str
    requested: str
    in_force: str
    reason: str

    @property
    def fell_back(self) -> bool:
        """Whether `auto` did without a fast path that the field offers."""
        return self.requested == "auto" and self.in_force == "off"


@dataclass(frozen=True, slots=True)
class ResolvedRuntime:
    """What a step runs with: one `Choice` per field of `RuntimeConfig`, in its order."""

    choices: tuple[Choice, ...]

    def __getitem__(self, name: str) -> Choice:
        for choice in self.choices:
            if choice.name == name:
                return choice
        raise KeyError(f"no runtime field {name!r}; fields: {', '.join(choice.name for choice in self.choices)}")

    def without(self, name: str, reason: str) -> "ResolvedRuntime":
        """The same, with the switch `name` off for a reason that lies in the step."""
        choices = (
            replace(choice, in_force="off", reason=reason) if choice.name == name and choice.in_force == "on" else choice
            for choice in self.choices
        )
        return ResolvedRuntime(tuple(choices))

    def takes(self, name: str) -> bool:
        """Whether the switch `name` is on."""
        return self[name].in_force == "on"

    @property
    def fallbacks(self) -> tuple[Choice, ...]:
        return tuple(choice for choice in self.choices if choice.fell_back)


# Backends that this version has; the first is the reference, which runs everywhere.
_BUILT = {
    "attention": (Attention.TORCH, Attention.TRITON, Attention.CUTE, Attention.CAUSAL_FIXUP, Attention.FLASHINFER),
    "latent_norm_rope": (LatentNormRope.TORCH, LatentNormRope.TRITON, LatentNormRope.CUTE),
    "gemm": (Gemm.CUBLAS, Gemm.LOW_M, Gemm.PERSISTENT),
    "merged_qkv_a": (MergedQkvA.OFF, MergedQkvA.ON),
}

_HOLDS = "its preconditions hold"
_MEASURED = "docs/results/step_2026-11-30_h200.md"
# What `auto` takes, the first of each line that nothing stands in the way of, and why.  A reason that was measured names the
# result file.
_AUTO: dict[str, tuple[tuple[str, str], ...]] = {
    "fused_prologue": (("on", _HOLDS),),
    "overlap_context_projection": (("on", _HOLDS),),
    "split_qkv_streams": (("on", _HOLDS),),
    "direct_pool_write": (("on", _HOLDS),),
    "cuda_graph": (("on", _HOLDS),),
    "attention": (
        (Attention.CUTE, f"the fastest at every context, {_MEASURED}"),
        (Attention.TRITON, f"the next fastest, {_MEASURED}"),
        (Attention.TORCH, "the reference"),
    ),
    "latent_norm_rope": (
        (LatentNormRope.CUTE, f"as fast as triton, and the one with which gemm=persistent stores latents, {_MEASURED}"),
        (LatentNormRope.TRITON, f"faster than torch, {_MEASURED}"),
        (LatentNormRope.TORCH, "the reference"),
    ),
    "gemm": (
        (Gemm.PERSISTENT, f"the fastest in whole steps, {_MEASURED}"),
        (Gemm.LOW_M, f"the next fastest, {_MEASURED}"),
        (Gemm.CUBLAS, "the reference"),
    ),
    "merged_qkv_a": ((MergedQkvA.ON, f"faster than two products, {_MEASURED}"), (MergedQkvA.OFF, "the reference")),
}


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a fast path is not taken.  avoidable: it would run, but no faster, so that `auto` leaves it and `require` takes
    it."""

    reason: str
    avoidable: bool = False


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What `resolve_runtime` decides by.  obstacles: for each `Switch` field, what stands in its way with this model and pool,
    or None; backends: the same for backends other than torch's, by field and name."""

    model_dtype: torch.dtype
    pool_dtype: torch.dtype
    obstacles: Mapping[str, Obstacle | None]
    backends: Mapping[str, Mapping[str, Obstacle | None]]


def resolve_runtime(runtime: RuntimeConfig, surroundings: Surroundings) -> ResolvedRuntime:
    """Decide every field.

    Raises:
        ConfigError: a field requires what cannot run here; the message names the reason.
    """
    backend = _resolve_backend("latent_norm_rope", runtime.latent_norm_rope, surroundings)
    direct = surroundings.obstacles["direct_pool_write"] or _direct_write_obstacle(backend.in_force, surroundings)
    merged = _resolve_backend("merged_qkv_a", runtime.merged_qkv_a, surroundings)
    products = dict(surroundings.backends.get("gemm", {}))
    products[Gemm.PERSISTENT] = products.get(Gemm.PERSISTENT) or _persistent_obstacle(merged.in_force)
    surroundings = replace(
        surroundings,
        obstacles={**surroundings.obstacles, "direct_pool_write": direct},
        backends={**surroundings.backends, "gemm": products},
    )
    choices = [_resolve(field.name, getattr(runtime, field.name), surroundings) for field in fields(runtime)]
    return ResolvedRuntime(tuple(choices))


def _direct_write_obstacle(backend: str, surroundings: Surroundings) -> Obstacle | None:
    """What the backend of norm and rotation has against storing into the pool itself."""
    if backend == LatentNormRope.TORCH:
        return Obstacle("latent_norm_rope=torch has no kernel that stores into the pool")
    if backend == LatentNormRope.CUTE and surroundings.pool_dtype is FP8:
        return Obstacle("latent_norm_rope=cute has no form that stores into an fp8 pool")
    return surroundings.backends["latent_norm_rope"][backend]


def _persistent_obstacle(merged_qkv_a: str) -> Obstacle | None:
    """What the choice of the projections has against one launch between two attentions."""
    if merged_qkv_a == MergedQkvA.ON:
        return None
    return Obstacle("it takes the projections of queries and latents as one product, and merged_qkv_a is off, set it on")


def _resolve(name: str, value: str, surroundings: Surroundings) -> Choice:
    if name in surroundings.obstacles:
        return _resolve_switch(name, value, surroundings.obstacles[name])
    if name in _BUILT:
        return _resolve_backend(name, value, surroundings)
    if name == "kv_dtype":
        return _resolve_kv_dtype(value, surroundings.model_dtype, surroundings.pool_dtype)
    return Choice(name, value, value, "asked for")


def _resolve_switch(name: str, value: Switch, obstacle: Obstacle | None) -> Choice:
    if value is Switch.OFF:
        return Choice(name, value, "off", "asked for")
    if value is Switch.REQUIRE and obstacle is not None and not obstacle.avoidable:
        raise ConfigError(f"runtime.{name}=require cannot be met: {obstacle.reason}; use auto or off")
    if value is Switch.REQUIRE:
        return Choice(name, value, "on", "asked for" if obstacle is None else f"asked for, although {obstacle.reason}")
    if obstacle is not None:
        return Choice(name, value, "off", obstacle.reason)
    return Choice(name, value, *_AUTO[name][0])


def _resolve_backend(name: str, value: str, surroundings: Surroundings) -> Choice:
    built, against = _BUILT[name], surroundings.backends.get(name, {})
    if value == "auto":
        fitting = (entry for entry in _AUTO[name] if against.get(entry[0]) is None)
        return Choice(name, value, *next(fitting, (built[0], "the reference")))
    if value not in built:
        raise ConfigError(f"runtime.{name}={value} is not in this version; available: auto, {', '.join(built)}")
    obstacle = against.get(value)
    if obstacle is not None and not obstacle.avoidable:
        raise ConfigError(f"runtime.{name}={value} cannot run: {obstacle.reason}; use auto or {built[0]}")
    return Choice(name, value, value, "asked for" if obstacle is None else f"asked for, although {obstacle.reason}")


def pool_dtype_for(kv_dtype: KvDtype, model_dtype: torch.dtype) -> torch.dtype:
    """The dtype of a pool that a worker with this `RuntimeConfig.kv_dtype` accepts."""
    if kv_dtype is KvDtype.FP8_E4M3:
        return FP8
    return model_dtype if kv_dtype is KvDtype.AUTO else getattr(torch, kv_dtype)


def _resolve_kv_dtype(value: str, model_dtype: torch.dtype, pool_dtype: torch.dtype) -> Choice:
    wanted = pool_dtype_for(value, model_dtype)
    if wanted is not pool_dtype:
        raise ConfigError(
            f"runtime.kv_dtype={value} wants a pool of {wanted} (the model is {model_dtype}), but the pool is {pool_dtype}; "
            "build the pool with that dtype or set runtime.kv_dtype"
        )
    in_force = str(pool_dtype).removeprefix("torch.") if value is KvDtype.AUTO else value
    return Choice("kv_dtype", value, in_force, "dtype of the pool")
