"""A worker whose drafts are drawn inside the fused chain commits what it commits with torch's chain."""

import dataclasses

import pytest
import torch
from kernel_kit import DEVICE

from dspark_model import ContextChunk, DFlashWorker, GenerationRows, LatentKVPool, PoolConfig, RuntimeConfig, StepInput
from dspark_model.low_m import LowMPath
from dspark_model.sampling import SamplingParams
from dspark_model.testing import assert_bitwise_equal, random_model, tiny_config

RUNTIME = dataclasses.replace(RuntimeConfig.plain(), gemm="low_m", draft_sampling="sample")
HOT, COLD = SamplingParams(temperature=1.3, seed=5), SamplingParams()


@pytest.fixture(autouse=True)
def torch_products(monkeypatch):
    """The other products, of which these tests do not speak, would take most of the time."""
    monkeypatch.setattr(LowMPath, "takes", staticmethod(lambda rows: False))
    monkeypatch.setattr(LowMPath, "takes_head", staticmethod(lambda rows: False))


def run_steps(sampling: tuple[SamplingParams, ...], later: tuple[SamplingParams, ...] | None = None) -> list[torch.Tensor]:
    """Prefill, then three steps whose target likes some drafts; tokens, counts and confidence of each.

    later: how the steps behind the prefill are sampled, as the prefill where it is None.
    """
    config, count = tiny_config(), len(sampling)
    pool_config = PoolConfig(page_size=8, num_pages=64, max_requests=3, max_positions=100, num_drafts=7)
    pool = LatentKVPool(pool_config, config, dtype=torch.float32, device=DEVICE)
    worker = DFlashWorker(random_model(config, 4, torch.float32, DEVICE), pool, RUNTIME)
    generator = torch.Generator().manual_seed(9)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    chunks = []
    for request in range(count):
        worker.admit(request)
        rows = normal(5 + request, config.context_width)
        given = {"request_id": request, "target_hidden": rows, "start_position": 0, "anchor": request + 7}
        chunks.append(ContextChunk(**given, sampling=sampling[request]))
    output = worker.step(StepInput(context=chunks))
    seen, later = [output.draft_tokens, output.confidence], sampling if later is None else later
    for liked in (0, 4, 7):
        logits = normal(count, 8, config.vocab_size)
        logits[:, :liked].scatter_add_(
            2, output.draft_tokens[:, :liked, None], torch.full((count, liked, 1), 9.0, device=DEVICE)
        )
        rows = {"request_ids": list(range(count)), "target_hidden": normal(count, 8, config.context_width)}
        output = worker.step(StepInput(generation=GenerationRows(**rows, target_logits=logits, sampling=list(later))))
        seen += [output.num_committed, output.committed_tokens, output.draft_tokens, output.confidence]
    return [tensor.cpu() for tensor in seen]


@pytest.mark.parametrize("sampling", [(HOT,), (HOT, COLD, dataclasses.replace(HOT, temperature=0.4))], ids=["one", "mixed"])
def test_fused_draws_commit_what_torch_commits(monkeypatch, sampling):
    used, fused_workspace = [], LowMPath.chain_workspace

    def count_workspaces(*args, **options):
        workspace = fused_workspace(*args, **options)
        used.append(workspace.plan.sampled)
        return workspace

    monkeypatch.setattr(LowMPath, "chain_workspace", count_workspaces)
    ours = run_steps(sampling)
    assert used == [True] * 4
    monkeypatch.setattr(LowMPath, "chain_workspace", lambda *args, **options: None)
    wanted = run_steps(sampling)
    for index, (mine, theirs) in enumerate(zip(ours, wanted, strict=True)):
        if mine.dtype is torch.int64:
            assert_bitwise_equal(mine, theirs, f"output {index}")
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_greedy_requests_keep_the_greedy_chain(monkeypatch):
    used, fused_workspace = [], LowMPath.chain_workspace

    def count_workspaces(*args, **options):
        used.append(options["sampled"])
        return fused_workspace(*args, **options)

    monkeypatch.setattr(LowMPath, "chain_workspace", count_workspaces)
    run_steps((COLD, COLD))
    assert used == [False] * 4
    used.clear()
    run_steps((HOT,), (COLD,))
    assert used == [True, False, False, False]
