"""A kernel that lets the next one begin at once, and writes what that one reads long after."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from dspark_model.testing import assert_bitwise_equal


@triton.jit
def _copy_late(out_ptr, in_ptr, count, nanoseconds, tile: tl.constexpr):
    tl.extra.cuda.gdc_launch_dependents()
    begin = tl.extra.cuda.globaltimer()
    now = begin
    while now - begin < nanoseconds:
        now = tl.extra.cuda.globaltimer()
    at = tl.program_id(0) * tile + tl.arange(0, tile)
    tl.store(out_ptr + at, tl.load(in_ptr + at, mask=at < count), mask=at < count)


def copy_late(out: torch.Tensor, values: torch.Tensor, nanoseconds: int = 30_000) -> None:
    """out = values, both contiguous, so long after the launch behind this one may begin."""
    tile = 1024
    _copy_late[(triton.cdiv(values.numel(), tile),)](out, values, values.numel(), nanoseconds, tile=tile)


def check_waits(
    late: torch.Tensor, values: torch.Tensor, call: Callable[[], list[torch.Tensor]], wanted: list[torch.Tensor]
) -> None:
    """That `call`, which reads `late`, gives `wanted` to the bit where the kernel in front of it writes `values` there late;
    until then there are NaN or zeros.  Under a graph too: a host may need longer for a launch than that kernel takes."""
    wanted = [result.clone() for result in wanted]

    def spoil(tensor: torch.Tensor) -> None:
        tensor.fill_(float("nan") if tensor.is_floating_point() else 0)

    def work() -> list[torch.Tensor]:
        spoil(late)
        copy_late(late, values)
        return call()

    def check(made: list[torch.Tensor]) -> None:
        for own, other in zip(made, wanted, strict=True):
            assert_bitwise_equal(own, other)

    for _ in range(20):
        check(work())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = work()
    for _ in range(20):
        for result in made:
            spoil(result)
        graph.replay()
        check(made)
