"""Random anchors in packed rows, and what their blocks are trained towards."""

from dataclasses import dataclass

import torch

from dspark_model.rope import RopeTable
from dspark_model.training.block_forward import AnchorBatch


@dataclass(frozen=True, slots=True)
class BlockLabels:
    """tokens: int64 [R, A, K], token P + 2 + j; previous: int64 [R, A, K], the token before it (the anchor for j = 0);
    counted: bool [R, A, K], whether the label is part of the anchor's answer; source: int64 [R, A, K], index of the
    target row that predicts it."""

    tokens: torch.Tensor
    previous: torch.Tensor
    counted: torch.Tensor
    source: torch.Tensor


def eligible_anchors(document: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
    """bool [R, L]: P may be the last context token, i.e. P + 1 and P + 2 are answer tokens of P's own text.

    document: int64 [R, L]; answer: bool [R, L].
    """
    result = torch.zeros_like(answer)
    same = (document[:, :-2] == document[:, 1:-1]) & (document[:, :-2] == document[:, 2:])
    result[:, :-2] = same & answer[:, 1:-1] & answer[:, 2:]
    return result


def sample_anchors(eligible: torch.Tensor, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` distinct eligible positions of each row, ascending, at random: int64 [R, count], and bool [R, count]
    that is False where a row has fewer (the position is then 0)."""
    scores = torch.rand(eligible.shape, generator=generator, device=eligible.device)
    picked = scores.masked_fill(~eligible, -1.0).topk(count, dim=1)
    valid = picked.values >= 0
    at = torch.where(valid, picked.indices, 0)
    at, order = at.sort(dim=1)
    return at, valid.gather(1, order)


def block_labels(
    tokens: torch.Tensor,
    document: torch.Tensor,
    answer: torch.Tensor,
    at: torch.Tensor,
    valid: torch.Tensor,
    drafts: int,
) -> BlockLabels:
    """Labels of the blocks of anchors at [R, A] (P, see AnchorBatch) of which `valid` [R, A] count.  tokens, document:
    int64 [R, L]; answer: bool [R, L]."""
    rows, length = tokens.shape
    offsets = torch.arange(drafts, device=tokens.device)
    label_at = at[..., None] + 2 + offsets
    inside = label_at < length
    label_at = label_at.clamp(max=length - 1)
    flat = label_at.flatten(1)
    shape = label_at.shape
    own = document.gather(1, flat).reshape(shape) == document.gather(1, at)[..., None]
    ok = inside & own & answer.gather(1, flat).reshape(shape) & valid[..., None]
    return BlockLabels(
        tokens=tokens.gather(1, flat).reshape(shape),
        previous=tokens.gather(1, flat - 1).reshape(shape),
        counted=ok.int().cumprod(-1).bool(),
        source=label_at - 1,
    )


def anchor_batch(tokens: torch.Tensor, document: torch.Tensor, at: torch.Tensor, drafts: int, rope: RopeTable) -> AnchorBatch:
    """The blocks of anchors at int64 [R, A].  tokens, document: int64 [R, L]; row j of a block has position P + 1 + j
    of its text."""
    index = torch.arange(tokens.shape[1], device=tokens.device)
    first = at + 1 - document.gather(1, at)
    block_positions = (first[..., None] + torch.arange(drafts, device=tokens.device)).flatten(1)
    return AnchorBatch(
        anchor_tokens=tokens.gather(1, at + 1),
        anchor_at=at,
        document=document,
        context_cos_sin=rope.rows(index - document),
        block_cos_sin=rope.rows(block_positions),
    )
