"""Which kernels a captured piece of work launches, how often, and how long they run."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel in one replay: launches, and microseconds of all of them together."""

    name: str
    launches: int
    us: float


def kernel_profile(call: Callable[[], object], *, replays: int = 10) -> list[KernelTime]:
    """Kernels, copies and fills of one call, the longest first; means over `replays`."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(replays):
            call()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in profile.events():
        if event.device_type is torch.autograd.DeviceType.CUDA:
            times.setdefault(event.name, []).append(event.device_time)
    rows = [KernelTime(name, round(len(us) / replays), sum(us) / replays) for name, us in times.items()]
    return sorted(rows, key=lambda row: -row.us)


def table(rows: list[KernelTime], *, most: int = 40) -> str:
    """The longest rows as text, and the sums of all."""
    lines = [f"{row.us:9.1f} us {row.launches:4} x  {row.name[:100]}" for row in rows[:most]]
    total = f"{sum(row.us for row in rows):9.1f} us {sum(row.launches for row in rows):4} x  all"
    return "\n".join([*lines, total])
