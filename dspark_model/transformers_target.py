"""`TransformersTarget`: any `transformers` causal LM with plain full attention as a batched, slot-addressed target."""

import inspect
from dataclasses import dataclass

import torch
from torch import nn
from transformers.cache_utils import Cache

from dspark_model.target import TargetOutput


@dataclass(frozen=True, slots=True)
class SlotRows:
    """Where the tokens of one call go.

    slots: int64 [B]; positions: int64 [B, N]; used: bool [B, key_rows], the cache rows that hold something for the call.
    one_slot: the slot as a host number where the call has one request and `used` is all true, else None.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    used: torch.Tensor
    one_slot: int | None


class SlotCache(Cache):
    """Static keys and values, [max_requests, kv_heads, max_positions, head_dim] per layer.

    `update` overwrites the rows that the current `SlotRows` name and returns the slots' first `key_rows` rows, with
    rows that are not used set to 0, so that stale contents (even NaN) reach no sum.
    """

    def __init__(self, shapes: list[tuple[int, int, int]], max_requests: int, max_positions: int, like: torch.Tensor):
        """shapes: (kv_heads, key width, value width) of each layer; like: gives dtype and device."""
        super().__init__(layers=[])
        self.keys = [like.new_zeros(max_requests, heads, max_positions, width) for heads, width, _ in shapes]
        self.values = [like.new_zeros(max_requests, heads, max_positions, width) for heads, _, width in shapes]
        self.rows: SlotRows | None = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        """key_states, value_states: [B, kv_heads, N, width], stored; returns both as [B, kv_heads, key_rows, width]."""
        rows = self.rows
        stored = []
        for buffer, states in ((self.keys[layer_idx], key_states), (self.values[layer_idx], value_states)):
            buffer[rows.slots[:, None], :, rows.positions] = states.transpose(1, 2)
            stored.append(self._read(buffer, rows))
        return tuple(stored)

    @staticmethod
    def _read(buffer: torch.Tensor, rows: SlotRows) -> torch.Tensor:
        if rows.one_slot is not None:
            # One request, whose rows are all in use: a view. On a CPU the copy below takes a sixth of a pass over 8 tokens.
            return buffer[rows.one_slot : rows.one_slot + 1, :, : rows.used.shape[1]]
        gathered = buffer[:, :, : rows.used.shape[1]][rows.slots]
        return torch.where(rows.used[:, None, :, None], gathered, 0)


class _ShapeProbe(Cache):
    """Records the key and value shapes that each layer hands to its cache."""

    def __init__(self):
        super().__init__(layers=[])
        self.shapes: dict[int, tuple[int, int, int]] = {}

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        self.shapes[layer_idx] = (key_states.shape[1], key_states.shape[3], value_states.shape[3])
        return key_states, value_states


class TransformersTarget:
    """A `transformers` causal LM behind the calls that speculative decoding needs.

    Row b of a call has its N tokens at positions starts[b] .. starts[b] + N - 1 of cache slot slots[b]; their keys and
    values overwrite those rows, and token j sees the rows up to its own position.  Nothing else is remembered, so a
    rejection is rolled back by passing a smaller start.
    """

    def __init__(self, model: nn.Module, target_layer_ids: tuple[int, ...], *, max_requests: int, max_positions: int):
        """model: a causal LM with `attn_implementation="sdpa"`; target_layer_ids: tapped decoder layers, 0-based,
        ascending.

        Raises:
            ValueError: the model's cache is not plain full attention, its attention is not sdpa, a layer id is
                not one of its layers, or a size is not positive.
        """
        _check_model(model)
        self.model = model.eval()
        self.layers = model.get_decoder().layers
        self.num_layers = len(self.layers)
        self.target_layer_ids = _check_layer_ids(target_layer_ids, self.num_layers)
        self.lm_head = model.get_output_embeddings().weight.detach()
        self.embed_tokens = model.get_input_embeddings().weight.detach()
        self.vocab_size = model.config.get_text_config().vocab_size
        self.hidden_size = self.embed_tokens.shape[1]
        self.device, self.dtype = self.embed_tokens.device, self.embed_tokens.dtype
        if max_requests < 1 or max_positions < 1:
            raise ValueError(f"max_requests is {max_requests} and max_positions {max_positions}; both must be positive")
        self.max_requests, self.max_positions = max_requests, max_positions
        self._cache_keyword = cache_keyword(model)
        self._taps: dict[int, torch.Tensor] = {}
        self._hooks = [self.layers[i].register_forward_hook(self._tap_hook(i)) for i in self.target_layer_ids]
        try:
            self.cache = SlotCache(self._probe_shapes(), max_requests, max_positions, self.embed_tokens)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Take the hooks off the model; the object cannot be used afterwards."""
        for hook in self._hooks:
            hook.remove()

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        starts: torch.Tensor,
        *,
        last_logits_only: bool = False,
        key_rows: int | None = None,
    ) -> TargetOutput:
        """Run tokens int64 [B, N] of slots int64 [B] from positions starts int64 [B].

        last_logits_only: logits of the last token only.
        key_rows: host bound of at least every starts[b] + N, at most max_positions.  The caller then vouches for all
            values, and nothing is read back from the device (a CUDA graph may hold the call).  None: values are checked
            and the bound is the largest starts[b] + N.

        Raises:
            ValueError: a wrong shape, dtype or device, or (with key_rows None) a token, slot or position out of
                range, or a slot that is given twice.
        """
        self._check_shapes(tokens, slots, starts)
        one_slot = None
        if key_rows is None:
            key_rows = self._check_values(tokens, slots, starts)
            one_slot = int(slots[0]) if len(slots) == 1 else None
        elif not tokens.shape[1] <= key_rows <= self.max_positions:
            raise ValueError(f"key_rows is {key_rows}, wanted {tokens.shape[1]} .. {self.max_positions}")
        positions = starts[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        index = torch.arange(key_rows, device=tokens.device)
        self.cache.rows = SlotRows(slots, positions, used=index <= positions[:, -1:], one_slot=one_slot)
        visible = index <= positions[:, None, :, None]
        logits = self._run(tokens, positions, visible, self.cache, last_logits_only=last_logits_only)
        taps = [self._taps.pop(layer_id) for layer_id in self.target_layer_ids]
        return TargetOutput(logits=logits[..., : self.vocab_size], hidden=torch.cat(taps, dim=-1))

    def _run(self, tokens, positions, visible, cache: Cache, *, last_logits_only: bool) -> torch.Tensor:
        """One call of the model; an attention mask with four dimensions is used by `transformers` as it is."""
        output = self.model(
            input_ids=tokens,
            attention_mask=visible,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1 if last_logits_only else 0,
            **{self._cache_keyword: cache},
        )
        return output.logits

    def _tap_hook(self, layer_id: int):
        def store(module: nn.Module, inputs: tuple, output: torch.Tensor | tuple) -> None:
            self._taps[layer_id] = output if isinstance(output, torch.Tensor) else output[0]

        return store

    @torch.inference_mode()
    def _probe_shapes(self) -> list[tuple[int, int, int]]:
        """Key and value shapes of each layer, from a forward of one token."""
        probe = _ShapeProbe()
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        visible = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        self._run(token, token, visible, probe, last_logits_only=True)
        self._taps.clear()
        missing = [layer for layer in range(self.num_layers) if layer not in probe.shapes]
        if missing:
            raise ValueError(f"layers {missing} keep no keys and values; only plain full attention is supported")
        return [probe.shapes[layer] for layer in range(self.num_layers)]

    def _check_shapes(self, tokens: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor) -> None:
        if tokens.ndim != 2 or 0 in tokens.shape:
            raise ValueError(f"tokens has shape {list(tokens.shape)}, wanted [B, N] with B and N at least 1")
        for name, tensor, shape in (
            ("tokens", tokens, tokens.shape),
            ("slots", slots, tokens.shape[:1]),
            ("starts", starts, tokens.shape[:1]),
        ):
            if tensor.shape != shape or tensor.dtype is not torch.int64 or tensor.device != self.device:
                raise ValueError(
                    f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}, "
                    f"wanted int64 {list(shape)} on {self.device}"
                )

    def _check_values(self, tokens: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor) -> int:
        """Check ids, slots and positions; returns the largest number of cache rows needed."""
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.vocab_size:
            raise ValueError(
                f"tokens holds ids from {int(tokens.min())} to {int(tokens.max())}, wanted 0 .. {self.vocab_size - 1}"
            )
        slot_list, start_list = slots.tolist(), starts.tolist()
        if min(slot_list) < 0 or max(slot_list) >= self.max_requests:
            raise ValueError(f"slots is {slot_list}, wanted 0 .. {self.max_requests - 1}; raise max_requests for more")
        if len(set(slot_list)) != len(slot_list):
            raise ValueError(f"slots is {slot_list}: a slot may appear once in a call")
        end = max(start_list) + tokens.shape[1]
        if min(start_list) < 0 or end > self.max_positions:
            raise ValueError(
                f"starts is {start_list} with {tokens.shape[1]} tokens each, but a slot has positions "
                f"0 .. {self.max_positions - 1}; raise max_positions or shorten the text"
            )
        return end


def cache_keyword(model: nn.Module) -> str:
    """How the model's forward names its cache: `past_key_values` up to transformers 5.17, `cache` in 5.24."""
    parameters = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise ValueError(f"{type(model).__name__}.forward takes neither cache nor past_key_values; it is no causal LM")


def _check_model(model: nn.Module) -> None:
    """Refuse, by name, models that cannot be rolled back by position."""
    name = type(model).__name__
    config = model.config.get_text_config().to_dict()
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise ValueError(f"{name} has layers of kind {sorted(kinds)}; only full_attention is supported")
    # Configs of models with an optional window say so in use_sliding_window; without that key a window is in force.
    if config.get("sliding_window") is not None and config.get("use_sliding_window", True):
        raise ValueError(f"{name} has sliding_window {config['sliding_window']}; only full attention is supported")
    if model._is_stateful:
        raise ValueError(f"{name} is recurrent and cannot be rolled back; only full attention is supported")
    if model.config._attn_implementation != "sdpa":
        raise ValueError(
            f"{name} runs with attention {model.config._attn_implementation!r}, wanted 'sdpa'; "
            'load it with attn_implementation="sdpa"'
        )


def _check_layer_ids(layer_ids: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    ids = tuple(layer_ids)
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= num_layers:
        raise ValueError(f"target_layer_ids is {ids}, wanted distinct ascending ids of layers 0 .. {num_layers - 1}")
    return ids
