"""A drafter with the shapes of one rank of Kimi K3's under TP8, filled with random weights, and a worker for it."""

import torch

from dspark_model.config import DrafterConfig
from dspark_model.kv_pool import LatentKVPool
from dspark_model.modeling import MLADSparkForCausalLM
from dspark_model.serving_config import Layout, PoolConfig, RuntimeConfig
from dspark_model.worker import DFlashWorker

HIDDEN, PAGE_SIZE, NUM_DRAFTS = 7168, 32, 7
VOCABULARY_SHARD = 20480


def k3_rank_config(**changes) -> DrafterConfig:
    """5 layers, 8 heads, q rank 1536, latent 512 + 64, MLP 1792, a vocabulary shard of 20,480, 5 taps, block 7; `changes`
    replace keys, for a smaller copy of the same form."""
    return DrafterConfig.from_dict(
        {
            "model_type": "mla_dspark",
            "hidden_size": HIDDEN,
            "intermediate_size": 1792,
            "num_hidden_layers": 5,
            "num_attention_heads": 8,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "vocab_size": VOCABULARY_SHARD,
            "max_position_embeddings": 1_048_576,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 50000.0,
                "factor": 32.0,
                "original_max_position_embeddings": 32768,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "target_layer_ids": [2, 23, 47, 71, 89],
            "target_hidden_size": HIDDEN,
            "target_num_hidden_layers": 93,
            "mask_token_id": 1,
            "markov_rank": 256,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "block_size": NUM_DRAFTS,
            "dtype": "bfloat16",
            **changes,
        }
    )


@torch.no_grad()
def random_drafter(
    config: DrafterConfig, dtype: torch.dtype = torch.bfloat16, device: str = "cuda", seed: int = 0
) -> MLADSparkForCausalLM:
    """Random weights, made on the device, that keep the scale of what they multiply; logits have a spread of about 3."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device=device)

    head = (normal(config.vocab_size, config.hidden_size) * 3 * config.hidden_size**-0.5).to(dtype)
    with torch.device(device):
        previous = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            model = MLADSparkForCausalLM(config, lm_head=head)
        finally:
            torch.set_default_dtype(previous)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.copy_(1 + 0.2 * normal(*parameter.shape))
        else:
            table = "embed" in name or name.endswith("markov_w1.weight")
            parameter.copy_(normal(*parameter.shape) * (1.0 if table else parameter.shape[1] ** -0.5))
    return model.requires_grad_(False).eval()


def make_worker(
    model: MLADSparkForCausalLM,
    runtime: RuntimeConfig,
    *,
    batch: int,
    context: int,
    layout: Layout = Layout.LAYER_MAJOR,
    room: int = 4096,
    graph_batch_sizes: tuple[int, ...] | None = None,
) -> DFlashWorker:
    """A worker for `batch` requests of `context` tokens that may grow by `room` more; its pool holds random values."""
    pages = -(-(context + room + 2 * NUM_DRAFTS + 2) // PAGE_SIZE)
    config = PoolConfig(
        page_size=PAGE_SIZE,
        num_pages=pages * batch + 8,
        max_requests=batch,
        max_positions=context + room,
        num_drafts=NUM_DRAFTS,
        layout=layout,
    )
    pool = LatentKVPool(config, model.config, dtype=model.dtype, device=model.device)
    pool.storage.normal_(generator=torch.Generator(model.device).manual_seed(1))
    return DFlashWorker(model, pool, runtime, graph_batch_sizes=graph_batch_sizes or (batch,))
