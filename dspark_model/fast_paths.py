"""What stands in the way of a fast path with a given model and pool."""

import importlib.util

import torch

from dspark_model.kv_pool import PagedLatents
from dspark_model.modeling import MLADSparkForCausalLM
from dspark_model.ops import PoolGeometry, between_attentions_refusal, block_attention_refusal
from dspark_model.ops.alignment import in_steps_of_16_bytes
from dspark_model.ops.block_attention import BACKENDS as ATTENTION_BACKENDS
from dspark_model.ops.fp8_rows import FP8
from dspark_model.packing import PackedLinear
from dspark_model.persistent import between_sizes
from dspark_model.runtime import Obstacle


def triton_obstacle(device: torch.device) -> Obstacle | None:
    """Why Triton kernels cannot run on `device`, or are not worth it."""
    if importlib.util.find_spec("triton") is None:
        return Obstacle("triton is not installed; install dspark_model[gpu]")
    if device.type == "cuda":
        return None
    import triton

    if triton.knobs.runtime.interpret:
        return Obstacle(f"the model is on {device}, where its kernels run in Triton's interpreter", avoidable=True)
    return Obstacle(f"its kernels run on a CUDA device, and the model is on {device}")


def cute_obstacle(device: torch.device) -> Obstacle | None:
    """Why CuTe DSL kernels cannot run on `device`."""
    if importlib.util.find_spec("cutlass") is None:
        return Obstacle("nvidia-cutlass-dsl is not installed; install dspark_model[gpu]")
    if device.type != "cuda":
        return Obstacle(f"its kernels run on a CUDA device, and the model is on {device}")
    from dspark_kernels.cute.builds import build_architecture

    try:
        build_architecture(torch.cuda.get_device_capability(device))
    except ValueError as error:
        return Obstacle(str(error))
    return None


def fused_prologue_obstacle(model: MLADSparkForCausalLM, pool: PagedLatents) -> Obstacle | None:
    """Why the fused bookkeeping kernels cannot serve this model and pool, or are not worth it."""
    embedding = model.embed_tokens.weight
    if pool.dtype not in (model.dtype, FP8):
        return Obstacle(f"its stores copy bits, and the pool is {pool.dtype} while the model is {model.dtype}")
    if model.mask_row.dtype is not embedding.dtype:
        return Obstacle(f"the mask row is {model.mask_row.dtype} and the embedding {embedding.dtype}")
    if embedding.stride(-1) != 1 or not model.mask_row.is_contiguous():
        return Obstacle("rows of the embedding or the mask row are not contiguous")
    try:
        PoolGeometry.of(pool.layer_views)
    except ValueError as error:
        return Obstacle(str(error))
    return triton_obstacle(model.device)


def direct_write_obstacle(model: MLADSparkForCausalLM, pool: PagedLatents) -> Obstacle | None:
    """Why norm and rotation cannot store into this pool themselves, whatever their backend."""
    if pool.dtype not in (model.dtype, FP8):
        return Obstacle(f"the pool is {pool.dtype} while the model is {model.dtype}")
    return None


def merged_qkv_a_obstacle(model: MLADSparkForCausalLM) -> Obstacle | None:
    """Why q_a_proj and kv_a_proj_with_mqa cannot be one product."""
    if any(isinstance(layer.self_attn.q_a_proj, PackedLinear) for layer in model.layers):
        return Obstacle("the linear layers are packed for few rows on a CPU, each by itself")
    if model.device.type != "cuda":
        return Obstacle(f"the model is on {model.device}, where it was not measured", avoidable=True)
    return None


def stream_obstacle(device: torch.device) -> Obstacle | None:
    """Why work cannot overlap on `device`."""
    if device.type == "cuda":
        return None
    return Obstacle(f"the model is on {device}, which has no streams", avoidable=True)


def graph_obstacle(device: torch.device) -> Obstacle | None:
    """Why steps cannot be captured on `device`."""
    if device.type == "cuda":
        return None
    return Obstacle(f"the model is on {device}, which has no graphs: steps are computed again instead", avoidable=True)


def obstacles(model: MLADSparkForCausalLM, pool: PagedLatents) -> dict[str, Obstacle | None]:
    """By switch."""
    return {
        "fused_prologue": fused_prologue_obstacle(model, pool),
        "overlap_context_projection": stream_obstacle(model.device),
        "split_qkv_streams": stream_obstacle(model.device),
        "direct_pool_write": direct_write_obstacle(model, pool),
        "cuda_graph": graph_obstacle(model.device),
    }


def attention_obstacle(backend: str, model: MLADSparkForCausalLM, pool: PagedLatents) -> Obstacle | None:
    """Why a backend of `ops.block_attention` cannot serve this model and pool, or is not worth it."""
    fp8_pool = pool.dtype is FP8
    if pool.dtype is not model.dtype and not fp8_pool:
        return Obstacle(f"the pool is {pool.dtype} while the model is {model.dtype}")
    config, device = model.config, model.device
    reason = block_attention_refusal(
        backend,
        device=device,
        dtype=model.dtype,
        kv_lora_rank=config.kv_lora_rank,
        width=config.latent_dim,
        page_size=pool.config.page_size,
        heads=config.num_attention_heads,
        causal=config.is_causal,
        window=pool.config.context_window,
        fp8_pool=fp8_pool,
    )
    if reason is not None:
        return Obstacle(reason)
    if backend == "cute" and any(stride % 8 for view in pool.layer_views for stride in view.stride()[:2]):
        return Obstacle("cute wants rows of the pool at multiples of 8 values")
    if fp8_pool and not all(map(in_steps_of_16_bytes, pool.layer_views)):
        return Obstacle(f"{backend} wants rows of an fp8 pool at multiples of 16 bytes")
    return triton_obstacle(device) if backend in ("triton", "causal_fixup") else None


def low_m_obstacle(model: MLADSparkForCausalLM) -> Obstacle | None:
    """Why the products of few rows cannot be made by their own kernels, or are not worth it."""
    if any(isinstance(layer.self_attn.q_a_proj, PackedLinear) for layer in model.layers):
        return Obstacle("the linear layers are packed for few rows on a CPU")
    if model.dtype not in (torch.bfloat16, torch.float32):
        return Obstacle(f"its kernel takes bfloat16 and float32 weights, and the model is {model.dtype}")
    if model.lm_head.dtype is not model.dtype:
        return Obstacle(f"the head is {model.lm_head.dtype} and the model {model.dtype}")
    obstacle = triton_obstacle(model.device)
    if obstacle is None and model.dtype is torch.float32:
        return Obstacle("its float32 form is there for tests; torch's own products are faster", avoidable=True)
    return obstacle


def persistent_obstacle(model: MLADSparkForCausalLM) -> Obstacle | None:
    """Why the products between two attentions cannot be one launch."""
    reason = between_attentions_refusal(between_sizes(model.config), model.dtype, model.device)
    return low_m_obstacle(model) if reason is None else Obstacle(reason)


def cute_norm_obstacle(model: MLADSparkForCausalLM, pool: PagedLatents, persistent: Obstacle | None) -> Obstacle | None:
    """Why `latent_norm_rope=cute` cannot serve this model and pool, or is not worth it; persistent: of
    `persistent_obstacle`."""
    obstacle = cute_obstacle(model.device)
    if obstacle is None and pool.dtype is FP8:
        return Obstacle("it has no form that stores into an fp8 pool", avoidable=True)
    if obstacle is None and persistent is not None:
        reason = f"it helps only gemm=persistent, which cannot run: {persistent.reason}"
        return Obstacle(reason, avoidable=True)
    return obstacle


def backends(model: MLADSparkForCausalLM, pool: PagedLatents) -> dict[str, dict[str, Obstacle | None]]:
    """By field and backend, what stands in the way of a backend other than torch's."""
    device, persistent = model.device, persistent_obstacle(model)
    return {
        "attention": {name: attention_obstacle(name, model, pool) for name in ATTENTION_BACKENDS if name != "torch"},
        "gemm": {"low_m": low_m_obstacle(model), "persistent": persistent},
        "latent_norm_rope": {"triton": triton_obstacle(device), "cute": cute_norm_obstacle(model, pool, persistent)},
        "merged_qkv_a": {"on": merged_qkv_a_obstacle(model)},
    }
