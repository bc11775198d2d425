"""A drafter to start from, and the drafter to hand out."""

import copy
from pathlib import Path

import torch
from torch import nn

from dspark_model.modeling import MLADSparkForCausalLM
from dspark_model.training.settings import DrafterShape
from dspark_model.training.target_pass import TargetPass


def new_drafter(model: nn.Module, shape: DrafterShape, *, drafts: int, markov_init_std: float) -> MLADSparkForCausalLM:
    """A float32 drafter on the target's device that shares the target's embedding and head, both frozen.

    W2 starts at 0, so that the Markov bias does; `final_norm` starts as the target's last norm where its decoder has
    one named `norm`; the mask row starts with the spread of the embedding's rows; the rest is torch's default.
    """
    config = model.config.get_text_config()
    embed = model.get_input_embeddings().weight.detach()
    drafter_config = shape.to_config(
        hidden_size=embed.shape[1],
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        max_position_embeddings=config.max_position_embeddings,
        eps=config.rms_norm_eps,
        drafts=drafts,
    )
    lm_head = model.get_output_embeddings().weight
    drafter = MLADSparkForCausalLM(drafter_config, lm_head=lm_head, target_embed_tokens=embed).to(embed.device)
    norm = dict(model.get_decoder().named_children()).get("norm")
    with torch.no_grad():
        drafter.mask_embedding.weight.normal_(std=float(embed.float().std()))
        drafter.markov_head.markov_w1.weight.normal_(std=markov_init_std)
        drafter.markov_head.markov_w2.weight.zero_()
        if norm is not None and norm.weight.shape == drafter.final_norm.weight.shape:
            drafter.final_norm.weight.copy_(norm.weight)
    return drafter


@torch.no_grad()
def measure_tap_scale(target: TargetPass, tokens: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
    """1 / rms of each tapped channel over the tokens of a batch, float32 [T * E]."""
    taps = target(tokens, document).taps.float().flatten(0, 1)
    return taps.square().mean(0).add(1e-6).rsqrt()


@torch.no_grad()
def export_drafter(model: MLADSparkForCausalLM, tap_scale: torch.Tensor) -> MLADSparkForCausalLM:
    """A copy in the dtype of the target's tables, with the tap scale folded into the columns of `context_proj`."""
    exported = copy.deepcopy(model)
    exported.context_proj.weight.mul_(tap_scale)
    return exported.to(model.lm_head.dtype).eval().requires_grad_(False)


@torch.no_grad()
def load_weights(drafter: MLADSparkForCausalLM, folder: Path, tap_scale: torch.Tensor) -> None:
    """Copy a checkpoint's weights into `drafter`, taking the tap scale that `export_drafter` folds in out of `context_proj`.

    Raises:
        ValueError: the checkpoint's drafter has another shape.
    """
    source = MLADSparkForCausalLM.from_pretrained(
        folder,
        lm_head=drafter.lm_head.float(),
        target_embed_tokens=drafter.embed_tokens.weight.float(),
        dtype=torch.float32,
        device=drafter.device,
    )
    ours, theirs = drafter.config.to_dict(), source.config.to_dict()
    storage = {"torch_dtype", "quantization_config"}
    differing = sorted(key for key in {*ours, *theirs} - storage if ours.get(key) != theirs.get(key))
    if differing:
        raise ValueError(f"{folder} holds a drafter with other {', '.join(differing)}; pass the same shape or start anew")
    source.context_proj.weight.div_(tap_scale)
    weights = dict(source.named_parameters())
    for name, parameter in drafter.named_parameters():
        if parameter.requires_grad:
            parameter.copy_(weights[name])
