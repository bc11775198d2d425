"""The Markov head and the confidence head."""

import torch
from torch import nn

from dspark_model import ops
from dspark_model.config import DrafterConfig
from dspark_model.packing import PackedLinear


class MarkovHead(nn.Module):
    """The tables of the low-rank bias W2 W1[previous] on the logits; `ops.markov_chain` applies them along a block."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.vocab_size, bias=False)

    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """W1 and W2, both [V, R], W2 packed where the layer is."""
        w2 = self.markov_w2
        return self.markov_w1.weight, w2.packed if isinstance(w2, PackedLinear) else w2.weight


class ConfidenceHead(nn.Module):
    """w . [hidden ; W1[previous]] + b: the logit of P(draft accepted | the drafts before it accepted)."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.proj = nn.Linear(config.confidence_input_size, 1)

    def forward(self, final_hidden: torch.Tensor, previous_rows: torch.Tensor | None) -> torch.Tensor:
        """final_hidden [B, K, H] after `final_norm`; previous_rows [B, K, R], the W1 rows of the tokens before, or None
        for a head without Markov input.  Returns float32 logits [B, K]."""
        return ops.confidence_logits(final_hidden, self.proj.weight[0], self.proj.bias, previous_rows)
