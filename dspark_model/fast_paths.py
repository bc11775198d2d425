"""Why a fast path cannot be taken with a given model and pool: the reasons that `auto` records and `require` raises."""

import importlib.util

import torch

from dspark_model.kv_pool import PagedLatents
from dspark_model.modeling import MLADSparkForCausalLM
from dspark_model.ops.latent_store import PoolGeometry


def triton_obstacle(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on `device`; None when they can, on a CPU in Triton's interpreter."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; install dspark_model[gpu]"
    import triton

    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        return f"its kernels run on a CUDA device, and the model is on {device}"
    return None


def fused_prologue_obstacle(model: MLADSparkForCausalLM, pool: PagedLatents) -> str | None:
    """Why the fused bookkeeping kernels cannot serve this model and pool; None when they can."""
    if (reason := triton_obstacle(model.device)) is not None:
        return reason
    if pool.dtype is not model.dtype:
        return f"its stores copy bits, and the pool is {pool.dtype} while the model is {model.dtype}"
    embedding = model.embed_tokens.weight
    if model.mask_row.dtype is not embedding.dtype:
        return f"the mask row is {model.mask_row.dtype} and the embedding {embedding.dtype}"
    if embedding.stride(-1) != 1 or not model.mask_row.is_contiguous():
        return "rows of the embedding or the mask row are not contiguous"
    try:
        PoolGeometry.of(pool.layer_views)
    except ValueError as error:
        return str(error)
    return None
