"""The frozen target over packed rows: taps, and the final hidden rows that its head reads."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class TargetRows:
    """taps: [R, L, T * E], residual stream after each tapped layer; final: [R, L, H], what the head reads."""

    taps: torch.Tensor
    final: torch.Tensor


class TargetPass:
    """One causal forward of packed texts, each with positions from 0 and blind to the others."""

    def __init__(self, model: nn.Module, layer_ids: tuple[int, ...], *, compile_model: bool):
        """Raises ValueError when the model's logits are not its head times its final hidden rows (scaled or capped
        logits)."""
        self.model = model
        self.layer_ids = layer_ids
        self.lm_head = model.get_output_embeddings().weight.detach()
        self.embed_tokens = model.get_input_embeddings().weight.detach()
        self._taps: dict[int, torch.Tensor] = {}
        decoder = model.get_decoder()
        self._hooks = [decoder.layers[i].register_forward_hook(self._hook(i)) for i in layer_ids]
        self._check_head(decoder)
        self._call: Callable = torch.compile(self._decode, dynamic=False) if compile_model else self._decode

    def close(self) -> None:
        """Take the hooks off the model; the object cannot be used afterwards."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, layer_id: int):
        def store(module: nn.Module, inputs: tuple, output: torch.Tensor | tuple) -> None:
            self._taps[layer_id] = output if isinstance(output, torch.Tensor) else output[0]

        return store

    def _decode(self, tokens: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor):
        output = self.model.get_decoder()(input_ids=tokens, attention_mask=visible, position_ids=positions, use_cache=False)
        return torch.cat([self._taps[i] for i in self.layer_ids], dim=-1), output.last_hidden_state

    @torch.no_grad()
    def _check_head(self, decoder: nn.Module) -> None:
        tokens = torch.arange(4, device=self.lm_head.device)[None]
        final = decoder(input_ids=tokens, use_cache=False).last_hidden_state
        logits = self.model(input_ids=tokens, use_cache=False).logits
        if not torch.allclose(final @ self.lm_head.T, logits, rtol=1e-2, atol=1e-2):
            raise ValueError(f"{type(self.model).__name__} scales or caps its logits; only plain heads can be trained against")

    @torch.no_grad()
    def __call__(self, tokens: torch.Tensor, document: torch.Tensor, *, compiled: bool = True) -> TargetRows:
        """tokens int64 [R, L]; document int64 [R, L], index at which each token's text starts.

        compiled: False runs the model as it is even with compile_model, for calls whose shape keeps changing.
        """
        index = torch.arange(tokens.shape[1], device=tokens.device)
        same = document[:, None, :, None] == document[:, None, None, :]
        call = self._call if compiled else self._decode
        taps, final = call(tokens, index - document, same & (index[:, None] >= index))
        self._taps.clear()
        return TargetRows(taps=taps, final=final)
