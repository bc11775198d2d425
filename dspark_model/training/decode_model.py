"""One decode step of a `transformers` causal LM over static slots: row b of the batch is slot b, one token each."""

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from dspark_model.transformers_target import TransformersTarget, cache_keyword

_ATTENTION_NAME = "dspark_decode"


class DecodeCache(Cache):
    """Writes each slot's new row into static buffers, [slots, kv_heads, positions, width], and hands out the
    buffers."""

    def __init__(self, keys: list[torch.Tensor], values: list[torch.Tensor]):
        super().__init__(layers=[])
        self.keys, self.values = keys, values
        self.slots = torch.arange(keys[0].shape[0], device=keys[0].device)
        self.positions = torch.zeros_like(self.slots)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        """key_states, value_states: [slots, kv_heads, 1, width]."""
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys[self.slots, :, self.positions] = key_states[:, :, 0]
        values[self.slots, :, self.positions] = value_states[:, :, 0]
        return keys, values


def _triton_attention(module, query, key, value, attention_mask, scaling: float, **kwargs):
    """`transformers` attention interface; attention_mask carries the slots' lengths, int64 [slots, 1, 1, 1]."""
    from dspark_kernels.triton.decode_attention import decode_attention

    out = decode_attention(query[:, :, 0].contiguous(), key, value, attention_mask.view(-1), scaling)
    return out[:, None], None


class DecodeModel:
    """Logits of the next token of every slot.

    attention `triton` reads only the rows in use; `sdpa` reads every row of the buffers and masks.  The model's own
    attention setting is changed while the object is open; use it as a context manager.
    """

    def __init__(self, model: nn.Module, slots: int, positions: int, attention: str, *, compile_model: bool):
        """Raises ValueError for models that `TransformersTarget` refuses, and for attention=triton without CUDA."""
        adapter = TransformersTarget(model, (0,), max_requests=slots, max_positions=positions)
        if attention == "triton" and adapter.device.type != "cuda":
            raise ValueError(f"decode_attention=triton needs CUDA, the model is on {adapter.device}; use sdpa")
        self.model, self.attention = model, attention
        self.cache = DecodeCache(adapter.cache.keys, adapter.cache.values)
        adapter.close()
        self._keyword = cache_keyword(model)
        self._call = torch.compile(model, dynamic=False) if compile_model else model

    def __enter__(self) -> "DecodeModel":
        if self.attention == "triton":
            AttentionInterface.register(_ATTENTION_NAME, _triton_attention)
            self.model.set_attn_implementation(_ATTENTION_NAME)
        return self

    def __exit__(self, *error) -> None:
        if self.attention == "triton":
            self.model.set_attn_implementation("sdpa")

    def step(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Feed tokens int64 [slots] at positions int64 [slots]; returns logits [slots, V].  Rows past a slot's
        position hold stale, finite values and are not attended to."""
        self.cache.positions = positions
        if self.attention == "triton":
            mask = (positions + 1)[:, None, None, None]
        else:
            rows = torch.arange(self.cache.keys[0].shape[2], device=positions.device)
            mask = (rows <= positions[:, None])[:, None, None, :]
        output = self._call(
            input_ids=tokens[:, None],
            attention_mask=mask,
            position_ids=positions[:, None],
            use_cache=True,
            **{self._keyword: self.cache},
        )
        return output.logits[:, 0]
