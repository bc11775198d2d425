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

    def forward(
        self,
        final_hidden: torch.Tensor,
        markov_w1: torch.Tensor | None,
        previous_tokens: torch.Tensor,
        *,
        backend: str = "torch",
    ) -> torch.Tensor:
        """final_hidden [B, K, H] after `final_norm`; markov_w1 [V, R], None for a head without Markov input; previous_tokens
        int64 [B, K], the token before each draft.  Returns float32 logits [B, K]; see `ops.confidence`."""
        weight, bias = self.proj.weight[0], self.proj.bias
        return ops.confidence(final_hidden, weight, bias, markov_w1, previous_tokens, backend=backend)
