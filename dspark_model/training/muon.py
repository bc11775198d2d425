"""Muon over stacks of equal-shaped matrices (Jordan et al. 2024; scaling of Moonlight, arXiv 2502.16982).

The same update as `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`, but one Newton-Schulz iteration serves all
matrices of
a shape: 4 layers of 7 matrices and context_proj are 8 stacks instead of 29 loops of 15 small products.
"""

import math
from collections import defaultdict

import torch

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5


def orthogonalise(stack: torch.Tensor) -> torch.Tensor:
    """Quintic Newton-Schulz towards U V^T of each matrix of [n, a, b], in bf16."""
    a, b, c = _COEFFICIENTS
    x = stack.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / x.float().norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7).bfloat16()
    for _ in range(_STEPS):
        gram = x @ x.mT
        update = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, update, x, beta=a)
    return x.mT if tall else x


class StackedMuon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, times lr * 0.2 sqrt(max dim); decoupled weight decay.  2-D parameters only."""

    def __init__(self, params, lr: float, *, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for group in self.param_groups:
            wrong = [tuple(p.shape) for p in group["params"] if p.ndim != 2]
            if wrong:
                raise ValueError(f"Muon takes matrices only, got parameters of shapes {wrong}; give those to AdamW")

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Update every parameter that has a gradient; `closure` is not supported."""
        if closure is not None:
            raise ValueError("StackedMuon.step takes no closure")
        for group in self.param_groups:
            stacks = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    stacks[p.shape].append(p)
            for shape, params in stacks.items():
                self._update(shape, params, group)

    def _update(self, shape: torch.Size, params: list[torch.Tensor], group: dict) -> None:
        for p in params:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        grads = [p.grad for p in params]
        buffers = [self.state[p]["momentum_buffer"] for p in params]
        torch._foreach_lerp_(buffers, grads, 1.0 - group["momentum"])
        direction = torch._foreach_lerp(grads, buffers, group["momentum"])
        updates = orthogonalise(torch.stack(direction)).to(params[0].dtype).unbind(0)
        torch._foreach_mul_(params, 1.0 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, list(updates), alpha=-group["lr"] * 0.2 * math.sqrt(max(shape)))
