"""The torch path on a CUDA device: golden cases, and a worker against the same worker on the CPU."""

from pathlib import Path

import pytest
import torch

from dspark_model import ContextChunk, DFlashWorker, GenerationRows, LatentKVPool, PoolConfig, RuntimeConfig, StepInput
from dspark_model.golden import check_case, find_cases
from dspark_model.serving_config import Layout
from dspark_model.testing import random_model, tiny_config

pytestmark = pytest.mark.gpu
GOLDEN = find_cases([Path(__file__).parent / "golden"])


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("case", GOLDEN, ids=lambda path: path.name)
def test_golden_case_on_cuda(case, layout):
    rows = check_case(case, device="cuda", layout=layout)
    assert rows
    assert [row for row in rows if not row.passed] == []


def run_steps(device: str) -> list[torch.Tensor]:
    """Prefill of two requests, then three steps of generation; draft ids and confidence of each."""
    config = tiny_config()
    model = random_model(config, 4, torch.float32, device)
    pool_config = PoolConfig(page_size=8, num_pages=40, max_requests=2, max_positions=100, num_drafts=7)
    pool = LatentKVPool(pool_config, config, dtype=torch.float32, device=device)
    worker = DFlashWorker(model, pool, RuntimeConfig.plain())
    draw = torch.Generator().manual_seed(9)

    def hidden(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, config.context_width, generator=draw).to(device)

    chunks = []
    for request, rows in enumerate((5, 16)):
        worker.admit(request)
        chunks.append(ContextChunk(request_id=request, target_hidden=hidden(rows), start_position=0, anchor=request + 7))
    output = worker.step(StepInput(context=chunks))
    seen = [output.draft_tokens, output.confidence]
    for accepted in (0, 3, 7):
        tokens = torch.full((2, 8), 11, dtype=torch.int64, device=device)
        tokens[:, :accepted] = output.draft_tokens[:, :accepted]
        rows = GenerationRows(request_ids=[0, 1], target_hidden=hidden(2, 8), target_tokens=tokens)
        output = worker.step(StepInput(generation=rows))
        seen += [output.num_committed, output.draft_tokens, output.confidence]
    return [tensor.cpu() for tensor in seen]


def test_worker_on_cuda_drafts_what_it_drafts_on_the_cpu():
    for ours, theirs in zip(run_steps("cuda"), run_steps("cpu"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
