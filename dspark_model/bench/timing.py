"""Interleaved timing of captured work, and where it was measured."""

import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one replay: median over rounds, and the least and largest round."""

    median_us: float
    min_us: float
    max_us: float


def capture(work: Callable[[], object], *, copies: int = 1) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `copies` runs of `work`, warmed up before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(copies):
            work()
    return graph


def time_interleaved(
    variants: Mapping[str, Callable[[], object]], *, rounds: int = 15, replays: int = 40, copies: int = 1
) -> dict[str, Timing]:
    """Time variants in turns, so that a drift of the clock meets all of them.

    variants: work by name, each a call that launches `copies` equal pieces, a graph's `replay` for instance.  One round of a
    variant is `replays` calls between two events.
    """
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for call in variants.values():
        call()
    for _ in range(rounds):
        for name, call in variants.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(replays):
                call()
            end.record()
            end.synchronize()
            samples[name].append(1e3 * start.elapsed_time(end) / (replays * copies))
    return {name: Timing(statistics.median(us), min(us), max(us)) for name, us in samples.items()}


def machine() -> dict[str, str | None]:
    """GPU, versions and commit of a result."""
    import triton

    root = Path(__file__).resolve().parents[2]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": commit.stdout.strip() or None,
    }
