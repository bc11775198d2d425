"""Prompts through a tokenizer's chat template."""

from typing import Any


def chat_ids(tokenizer: Any, prompt: str) -> list[int]:
    """A user turn through the tokenizer's chat template, ready for the answer."""
    encoded = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])
