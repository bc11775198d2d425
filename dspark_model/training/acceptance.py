"""Committed tokens per target pass of a drafter on given greedy text, without running the target's loop.

At every anchor of a text the drafter drafts greedily from the taps up to P only; walking from the prompt's end, an
anchor's accepted drafts decide which anchor comes next.  With greedy verification this is what the real loop commits
on that text.
"""

from dataclasses import dataclass

import numpy as np
import torch

from dspark_model.modeling import MLADSparkForCausalLM
from dspark_model.rope import RopeTable
from dspark_model.training.anchors import anchor_batch, block_labels, eligible_anchors
from dspark_model.training.block_forward import DenseAttention, block_forward
from dspark_model.training.target_pass import TargetPass
from dspark_model.training.text_store import Conversations


@dataclass(frozen=True, slots=True)
class Acceptance:
    """committed: tokens per target pass (accepted + 1), over all passes; passes: target passes; conditional: P(draft k
    accepted | k - 1 accepted), of K; confidence: mean predicted acceptance of the drafts that were reached."""

    committed: float
    passes: int
    conditional: tuple[float, ...]
    confidence: float


@dataclass(frozen=True, slots=True)
class _Drafts:
    """Per anchor of one text, ascending: P [A]; hits, counted (0 or 1) and confidence [A, K]; all float32."""

    at: np.ndarray
    hits: np.ndarray
    counted: np.ndarray
    confidence: np.ndarray


@torch.no_grad()
def measure_acceptance(
    model: MLADSparkForCausalLM,
    target: TargetPass,
    tap_scale: torch.Tensor,
    texts: Conversations,
    *,
    drafts: int,
    autocast_dtype: torch.dtype | None,
    texts_at_once: int = 8,
    anchors_at_once: int = 256,
) -> Acceptance:
    """Walk each text of `texts` (one exchange each).  tap_scale: float32 [T * E], ones for an exported drafter."""
    walks: list[_Drafts] = []
    order = np.argsort(np.diff(texts.offsets), kind="stable")
    longest = int(np.diff(texts.offsets).max())
    rope = RopeTable(model.config.rope, model.config.qk_rope_head_dim, longest + drafts + 2, model.device)
    for start in range(0, len(order), texts_at_once):
        part = texts.select(order[start : start + texts_at_once])
        walks += _draft_everywhere(model, target, tap_scale, part, rope, drafts, autocast_dtype, anchors_at_once)
    return _walk_all(walks, drafts)


def _draft_everywhere(
    model, target, tap_scale, texts: Conversations, rope: RopeTable, drafts: int, autocast_dtype, anchors_at_once: int
) -> list[_Drafts]:
    device = model.device
    tokens, document, answer = (array.to(device) for array in _padded(texts))
    rows = target(tokens, document, compiled=False)
    eligible = eligible_anchors(document, answer)
    counts = eligible.sum(1)
    at = torch.argsort((~eligible).int(), dim=1, stable=True)[:, : max(1, int(counts.max()))]
    valid = torch.arange(at.shape[1], device=device) < counts[:, None]
    at = torch.where(valid, at, 0)
    batch = anchor_batch(tokens, document, at, drafts, rope)
    taps = (rows.taps.float() * tap_scale).to(rows.taps.dtype)
    with torch.autocast(device.type, dtype=autocast_dtype, enabled=autocast_dtype is not None):
        hidden = block_forward(model, taps, batch, DenseAttention(batch, drafts), drafts)
    labels = block_labels(tokens, document, answer, at, valid, drafts)
    shape = (-1, drafts)
    hits, confidence = [], []
    for hidden_part, anchor_part, label_part in zip(
        hidden.reshape(at.numel(), drafts, -1).split(anchors_at_once),
        batch.anchor_tokens.flatten().split(anchors_at_once),
        labels.tokens.reshape(shape).split(anchors_at_once),
        strict=True,
    ):
        tokens_part, confidence_part = _draft(model, hidden_part, anchor_part)
        hits.append(tokens_part == label_part)
        confidence.append(confidence_part)
    hits = torch.cat(hits).reshape(labels.tokens.shape) & labels.counted
    confidence = torch.cat(confidence).reshape(labels.tokens.shape)
    result = []
    for row, count in enumerate(counts.tolist()):
        arrays = (at[row], hits[row], labels.counted[row], confidence[row])
        result.append(_Drafts(*(array[:count].float().cpu().numpy() for array in arrays)))
    return result


def _draft(model: MLADSparkForCausalLM, hidden: torch.Tensor, anchors: torch.Tensor):
    """Greedy drafts int64 [A, K] and confidence [A, K] of hidden [A, K, H]."""
    draft = model.draft(hidden.to(model.lm_head.dtype), anchors, keep_biased=False)
    return draft.draft_tokens, draft.confidence.probability


def _padded(texts: Conversations) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One text a row: tokens int64 [B, L], document int64 [B, L] (padding is a document of its own), answer bool [B,
    L]."""
    lengths = np.diff(texts.offsets)
    # One more column than the longest text, so that an anchor's next token always exists.
    shape = (len(lengths), int(lengths.max()) + 1)
    tokens, document, answer = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, bool)
    for row, length in enumerate(lengths):
        tokens[row, :length], answer[row, :length] = texts.text(row)
        document[row, length:] = length
    return torch.from_numpy(tokens), torch.from_numpy(document), torch.from_numpy(answer)


def _walk_all(walks: list[_Drafts], drafts: int) -> Acceptance:
    reached, accepted = np.zeros(drafts), np.zeros(drafts)
    committed, passes, confidence = 0, 0, []
    for walk in walks:
        index = 0
        while index < len(walk.at):
            count = int(walk.hits[index].cumprod().sum())
            seen = min(count + 1, int(walk.counted[index].sum()))
            reached[:seen] += 1
            accepted[:count] += 1
            confidence.append(walk.confidence[index][:seen].mean())
            # Text that ends inside the block ends the walk: then no further token is the target's own.
            ended = count == int(walk.counted[index].sum())
            committed += count if ended and count < drafts else count + 1
            passes += 1
            index = int(np.searchsorted(walk.at, walk.at[index] + count + 1))
    return Acceptance(
        committed=committed / max(passes, 1),
        passes=passes,
        conditional=tuple((accepted / np.maximum(reached, 1)).round(4).tolist()),
        confidence=float(np.mean(confidence)) if confidence else 0.0,
    )
