"""`Trainer`: one training step, its optimisers and its state on disk."""

import dataclasses
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from dspark_model.rope import RopeTable
from dspark_model.training import block_forward as blocks
from dspark_model.training.anchors import anchor_batch, block_labels, eligible_anchors, sample_anchors
from dspark_model.training.draft_loss import LossWeights, VocabularyRows, load_row_loss, vocabulary_loss
from dspark_model.training.muon import StackedMuon
from dspark_model.training.new_drafter import load_weights, measure_tap_scale, new_drafter
from dspark_model.training.settings import DrafterShape, TrainingConfig
from dspark_model.training.target_pass import TargetPass
from dspark_model.training.text_store import PackedRows


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Scalars of one step on the device, so that nothing waits: loss; ce; overlap (1 - TV) of the first and last
    draft; confidence BCE."""

    loss: torch.Tensor
    ce: torch.Tensor
    overlap_first: torch.Tensor
    overlap_last: torch.Tensor
    confidence: torch.Tensor

    def to_floats(self) -> dict[str, float]:
        """The values by name; waits for the device."""
        return {name: round(float(getattr(self, name)), 5) for name in self.__slots__}


class Trainer:
    """Drafter, frozen target, data order and optimisers.  `step` trains one batch; everything else that a run needs to
    go on later is in `save` and `load`."""

    def __init__(self, model: nn.Module, data: PackedRows, shape: DrafterShape, config: TrainingConfig):
        """model: the target, a causal LM whose parameters are frozen; data: packed rows on its device."""
        if len(data) < config.rows:
            raise ValueError(f"the text fills {len(data)} rows, a step takes {config.rows}; generate more text")
        torch.manual_seed(config.seed)
        self.config, self.data = config, data
        self.drafter = new_drafter(model, shape, drafts=config.drafts, markov_init_std=config.markov_init_std)
        self.device = self.drafter.device
        layer_ids = self.drafter.config.target_layer_ids
        self.target = TargetPass(model, layer_ids, compile_model=config.compile_target)
        dtype = self.target.lm_head.dtype
        self.autocast_dtype = None if dtype is torch.float32 else dtype
        self.rope = RopeTable(
            self.drafter.config.rope,
            self.drafter.config.qk_rope_head_dim,
            config.row_tokens + config.drafts + 2,
            self.device,
        )
        self.row_loss = load_row_loss(config.loss_kernel)
        self.generator = torch.Generator(self.device).manual_seed(config.seed)
        self.steps_done, self.seconds, self._epoch, self._cursor = 0, 0.0, 0, 0
        self._order = self._shuffled(0)
        self.muon, self.adamw = self._optimisers()
        if config.attention != "dense" and self.device.type != "cuda":
            raise ValueError(f"attention={config.attention} cannot train on {self.device.type}; use attention=dense")
        self._flex = blocks.compiled_flex_attention()
        self._forward = torch.compile(self._blocks, dynamic=False) if config.compile_drafter else self._blocks
        first = self._order[: config.rows]
        self.tap_scale = measure_tap_scale(self.target, data.tokens[first].long(), data.document[first].long())

    def _optimisers(self) -> tuple[StackedMuon, torch.optim.AdamW]:
        matrices, others = [], []
        for name, p in self.drafter.named_parameters():
            if p.requires_grad:
                hidden = p.ndim == 2 and name.startswith(("layers.", "context_proj."))
                (matrices if hidden else others).append(p)
        muon = StackedMuon(matrices, self.config.lr_matrix, weight_decay=self.config.weight_decay)
        fused = self.device.type == "cuda"
        adamw = torch.optim.AdamW(others, self.config.lr_other, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
        return muon, adamw

    def _shuffled(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.config.seed * 100_003 + epoch)
        return torch.randperm(len(self.data), generator=generator).to(self.device)

    def _next_rows(self) -> torch.Tensor:
        if self._cursor + self.config.rows > len(self.data):
            self._epoch, self._cursor = self._epoch + 1, 0
            self._order = self._shuffled(self._epoch)
        rows = self._order[self._cursor : self._cursor + self.config.rows]
        self._cursor += self.config.rows
        return rows

    @property
    def epoch(self) -> float:
        """Passes over the text so far."""
        return self._epoch + self._cursor / len(self.data)

    @property
    def progress(self) -> float:
        """Share of the budget that is used, 0 to 1."""
        if self.config.steps is not None:
            return min(self.steps_done / self.config.steps, 1.0)
        return min(self.seconds / self.config.seconds_total, 1.0)

    def lr_factor(self) -> float:
        """Warm-up, then a cosine of the progress down to `final_lr_share`."""
        warm = min((self.steps_done + 1) / max(self.config.warmup_steps, 1), 1.0)
        floor = self.config.final_lr_share
        return warm * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * self.progress)))

    def step(self) -> StepMetrics:
        """Train on the next batch; nothing is read back from the device."""
        config, rows = self.config, self._next_rows()
        tokens, document = self.data.tokens[rows].long(), self.data.document[rows].long()
        answer = self.data.answer[rows]
        target = self.target(tokens, document)
        at, valid = sample_anchors(eligible_anchors(document, answer), config.anchors, self.generator)
        labels = block_labels(tokens, document, answer, at, valid, config.drafts)
        batch = anchor_batch(tokens, document, at, config.drafts, self.rope)
        taps = (target.taps.float() * self.tap_scale).to(target.taps.dtype)
        mask = blocks.flex_block_mask(batch, config.drafts) if config.attention == "flex" else None
        hidden = self._forward(taps, *batch.tensors(), mask)
        loss, metrics = self._loss(hidden, target.final, labels)
        factor = self.lr_factor()
        for optimiser, lr in ((self.muon, config.lr_matrix), (self.adamw, config.lr_other)):
            optimiser.param_groups[0]["lr"] = lr * factor
        loss.backward()
        self.muon.step()
        self.adamw.step()
        self.muon.zero_grad()
        self.adamw.zero_grad()
        self.steps_done += 1
        return metrics

    def _blocks(self, taps, anchor_tokens, anchor_at, document, context_cos_sin, block_cos_sin, mask) -> torch.Tensor:
        """`block_forward` of plain tensors, in the target's dtype."""
        batch = blocks.AnchorBatch(anchor_tokens, anchor_at, document, context_cos_sin, block_cos_sin)
        with torch.autocast(self.device.type, dtype=self.autocast_dtype, enabled=self.autocast_dtype is not None):
            return blocks.block_forward(self.drafter, taps, batch, self._attention(batch, mask), self.config.drafts)

    def _attention(self, batch: blocks.AnchorBatch, mask):
        """The attention that the settings name; mask: a `flex_block_mask`, for flex only."""
        if self.config.attention == "flex":
            return blocks.FlexAttention(mask, self._flex)
        if self.config.attention == "triton":
            return blocks.TritonAttention(batch)
        return blocks.DenseAttention(batch, self.config.drafts)

    def _loss(self, hidden: torch.Tensor, final: torch.Tensor, labels) -> tuple[torch.Tensor, StepMetrics]:
        """hidden [R, A * K, H]; final [R, L, H], the target's."""
        config, head = self.config, self.drafter.markov_head
        chunks, size = config.rows // config.vocab_chunk_rows, config.vocab_chunk_rows
        decay = torch.exp(-torch.arange(config.drafts, device=self.device) / config.gamma)
        weights = labels.counted * decay
        weights = weights / weights.sum().clamp(min=1e-6)
        markov_rows = head.markov_w1(labels.previous)
        in_chunk = torch.arange(config.rows, device=self.device) % size
        rows = VocabularyRows(
            target_hidden=final.reshape(chunks, -1, final.shape[-1]),
            target_rows=(labels.source + in_chunk[:, None, None] * config.row_tokens).reshape(chunks, -1),
            labels=labels.tokens.reshape(chunks, -1),
            weights=weights.reshape(chunks, -1),
        )
        loss, ce, l1 = vocabulary_loss(
            hidden.reshape(chunks, -1, hidden.shape[-1]),
            markov_rows.reshape(chunks, -1, markov_rows.shape[-1]),
            head.markov_w2.weight,
            self.target.lm_head,
            rows,
            LossWeights(ce=config.ce_weight, l1=config.l1_weight),
            self.row_loss,
        )
        overlap = (1.0 - 0.5 * l1).clamp(0.0, 1.0).reshape(labels.counted.shape)
        predicted = self.drafter.confidence_head(hidden.reshape(-1, config.drafts, hidden.shape[-1]), markov_rows.flatten(0, 1))
        bce = nn.functional.binary_cross_entropy_with_logits(
            predicted.reshape(overlap.shape), overlap, weight=weights, reduction="sum"
        )
        total = loss + config.confidence_weight * bce
        return total, _metrics(total, ce.reshape(weights.shape), weights, overlap, labels.counted, bce)

    def start_from(self, folder: Path) -> None:
        """Take over the weights of a drafter of the same shape, made for the same target, before the first step."""
        load_weights(self.drafter, folder, self.tap_scale)

    def save(self, path: Path) -> None:
        """Write everything that a later `load` needs, replacing `path` at once."""
        state = {
            "drafter": self.drafter.state_dict(),
            "muon": self.muon.state_dict(),
            "adamw": self.adamw.state_dict(),
            "generator": self.generator.get_state(),
            "tap_scale": self.tap_scale,
            "counters": (self.steps_done, self.seconds, self._epoch, self._cursor),
            "settings": self._settings(),
        }
        temporary = path.with_suffix(".partial")
        torch.save(state, temporary)
        os.replace(temporary, path)

    def load(self, path: Path) -> None:
        """Go on where `save` left off.

        Raises:
            ValueError: the state was written with other settings or other text.
        """
        state = torch.load(path, map_location=self.device, weights_only=True)
        differing = [name for name, value in self._settings().items() if state["settings"].get(name) != value]
        if differing:
            raise ValueError(f"{path} was written with other {', '.join(differing)}; pass the same settings or remove the file")
        self.drafter.load_state_dict(state["drafter"])
        self.muon.load_state_dict(state["muon"])
        self.adamw.load_state_dict(state["adamw"])
        self.generator.set_state(state["generator"].cpu())
        self.tap_scale = state["tap_scale"]
        self.steps_done, self.seconds, self._epoch, self._cursor = state["counters"]
        self._order = self._shuffled(self._epoch)

    def _settings(self) -> dict:
        """What must not change between two calls of one run."""
        free = {"attention", "loss_kernel", "compile_drafter", "compile_target", "log_every", "vocab_chunk_rows"}
        free |= {"eval_every_seconds", "save_every_seconds", "eval_sequences"}
        settings = {name: v for name, v in dataclasses.asdict(self.config).items() if name not in free}
        return {**settings, "text rows": len(self.data)}


def _metrics(total, ce, weights, overlap, counted, bce) -> StepMetrics:
    with torch.no_grad():
        per_draft = (overlap * counted).sum((0, 1)) / counted.sum((0, 1)).clamp(min=1)
        mean_ce = torch.where(weights > 0, ce * weights, 0.0).sum()
        return StepMetrics(total.detach(), mean_ce, per_draft[0], per_draft[-1], bce.detach())
