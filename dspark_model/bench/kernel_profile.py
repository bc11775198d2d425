"""Which kernels a captured piece of work launches, how often, and how long they run."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of the profiler's trace


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel, copy or fill in one replay: launches, and microseconds of all of them together."""

    name: str
    launches: int
    us: float


def kernel_profile(call: Callable[[], object], *, replays: int = 10) -> list[KernelTime]:
    """What one call runs on the device, the longest first; means over `replays`."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile() as profile:
        for _ in range(replays):
            call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        return kernel_times(json.loads(trace.read_text(encoding="utf-8"))["traceEvents"], replays)


def kernel_times(events: list[dict], replays: int) -> list[KernelTime]:
    """The trace's events on the device, by name."""
    times: dict[str, list[float]] = {}
    for event in events:
        if event.get("cat") in ON_DEVICE:
            times.setdefault(event["name"], []).append(event["dur"])
    rows = [KernelTime(name, round(len(us) / replays), sum(us) / replays) for name, us in times.items()]
    return sorted(rows, key=lambda row: -row.us)


def table(rows: list[KernelTime], *, most: int = 40) -> str:
    """The longest rows as text, and the sums of all."""
    lines = [f"{row.us:9.1f} us {row.launches:4} x  {row.name[:100]}" for row in rows[:most]]
    total = f"{sum(row.us for row in rows):9.1f} us {sum(row.launches for row in rows):4} x  all"
    return "\n".join([*lines, total])
