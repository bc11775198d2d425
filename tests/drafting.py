"""One prefill through a worker, as most loading tests need it."""

from collections.abc import Sequence

import torch

from dspark_model import (
    ContextChunk,
    DFlashWorker,
    LatentKVPool,
    MLADSparkForCausalLM,
    PoolConfig,
    RuntimeConfig,
    StepInput,
    StepOutput,
)
from dspark_model.testing import poison_


def make_worker(model: MLADSparkForCausalLM, runtime: RuntimeConfig | None = None, **pool_changes) -> DFlashWorker:
    """A worker on a pool that is full of NaN."""
    sizes = {"page_size": 8, "num_pages": 128, "max_requests": 4, "max_positions": 96, "num_drafts": 7, **pool_changes}
    pool = LatentKVPool(PoolConfig(**sizes), model.config, dtype=model.dtype, device=model.device)
    poison_(pool.storage)
    return DFlashWorker(model, pool, runtime or RuntimeConfig.plain())


def random_hidden(model: MLADSparkForCausalLM, rows: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, model.config.context_width, generator=generator).to(model.dtype)


def prefill(worker: DFlashWorker, contexts: Sequence[torch.Tensor], anchors: Sequence[int]) -> StepOutput:
    """Admit one request for each context and draft behind it."""
    chunks = []
    for index, (hidden, anchor) in enumerate(zip(contexts, anchors, strict=True)):
        worker.admit(index)
        chunks.append(ContextChunk(request_id=index, target_hidden=hidden, start_position=0, anchor=anchor))
    return worker.step(StepInput(context=chunks), trace=True)


def draft(model: MLADSparkForCausalLM, rows: int = 13, anchor: int = 5, **pool_changes) -> StepOutput:
    """Draft behind `rows` fixed random context rows."""
    return prefill(make_worker(model, **pool_changes), [random_hidden(model, rows)], [anchor])


def pool_rows(worker: DFlashWorker, request: int, rows: int) -> torch.Tensor:
    """The first pool rows of a request, [L, rows, D]."""
    pages = torch.tensor(worker.pool.pages_of(worker.slot_of(request)))
    index = torch.arange(rows)
    size = worker.pool.config.page_size
    return torch.stack([view[pages[index // size], index % size] for view in worker.pool.layer_views])
