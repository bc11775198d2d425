"""Acceptance of a trained drafter on files of prompts, answered greedily by the target."""

import dataclasses
from pathlib import Path

import numpy as np
import torch
from torch import nn

from dspark_model.modeling import MLADSparkForCausalLM
from dspark_model.training.acceptance import measure_acceptance
from dspark_model.training.chat_format import ChatFormat, Job, read_chat_format, read_turns
from dspark_model.training.generate_text import pack_texts, write_texts
from dspark_model.training.settings import GenerationConfig
from dspark_model.training.target_pass import TargetPass


def prompt_jobs(chat: ChatFormat, tokenizer, prompts: list[str], longest: int) -> list[Job]:
    """A greedy answer to each prompt that has at most `longest` tokens."""
    encoded = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    given = [(*chat.head, *ids, chat.end_of_turn, *chat.to_assistant) for ids in encoded if len(ids) <= longest]
    return [Job(np.asarray(tokens, np.int32), 1, 2, False, 0.0, 0.0) for tokens in given]


def evaluate_prompts(
    model: nn.Module, tokenizer, drafter_folder: Path, files: list[Path], num_prompts: int, config: GenerationConfig
) -> dict:
    """Per file: committed tokens per pass and conditional acceptance on the first `num_prompts` prompts (those of at
    most `config.max_prompt_tokens` tokens), answers up to `config.max_answer_tokens` tokens; and the mean over
    files.

    Raises:
        ValueError: a file has no such prompt.
    """
    chat = read_chat_format(tokenizer)
    texts = {}
    for path in files:
        prompts = [turns[0] for turns in read_turns(path)][:num_prompts]
        jobs = prompt_jobs(chat, tokenizer, prompts, config.max_prompt_tokens)
        if not jobs:
            raise ValueError(
                f"{path}: none of {len(prompts)} prompts has at most {config.max_prompt_tokens} tokens; raise max_prompt_tokens"
            )
        settings = dataclasses.replace(config, slots=min(config.slots, len(jobs)), seconds=float("inf"))
        texts[path.stem] = pack_texts(write_texts(model, chat, jobs, settings, max_texts=len(jobs)).texts)
    drafter = MLADSparkForCausalLM.from_pretrained(
        drafter_folder,
        lm_head=model.get_output_embeddings().weight.detach(),
        target_embed_tokens=model.get_input_embeddings().weight.detach(),
        dtype=model.dtype,
        device=model.device,
    )
    target = TargetPass(model, drafter.config.target_layer_ids, compile_model=False)
    ones = torch.ones(drafter.config.context_width, device=model.device)
    results = {
        name: measure_acceptance(drafter, target, ones, part, drafts=drafter.config.block_size, autocast_dtype=None)
        for name, part in texts.items()
    }
    target.close()
    report = {name: {**dataclasses.asdict(r), "texts": len(texts[name])} for name, r in results.items()}
    if results:
        report["macro_mean"] = sum(r.committed for r in results.values()) / len(results)
    return report
