"""The merges of the CuTe block attention that do not multiply, each alone."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream, make_ptr
from dspark_kernels.cute.block_attention_merge import merge_kernel
from dspark_kernels.cute.block_attention_schedule import ELEMENTS, PART, WARP, Requests, Workspace
from dspark_kernels.cute.block_attention_warps import merge_by_warps_kernel


@cute.jit
def _launch(
    lens: cute.Pointer, parts: cute.Pointer, statistics: cute.Pointer, out: cute.Pointer, batch: cutlass.Int32, stream,
    facts: cutlass.Constexpr,
):  # fmt: skip
    window = cutlass.Int32(2**31 - 1)
    requests, work = Requests(lens, cutlass.Int64(0), lens, lens, lens, batch, window), Workspace(parts, statistics)
    kernel = merge_by_warps_kernel if facts.many else merge_kernel
    kernel(requests, work, out, facts).launch(
        grid=(1, 1, 1), block=(facts.warps * WARP, 1, 1), min_blocks_per_mp=2 if facts.many and not facts.spread else 0,
        preferred_smem_carveout=100, stream=stream,
    )  # fmt: skip


def compile_merge(facts):
    """The kernel, which the test gives a grid."""
    kinds = ((cutlass.Int64, 8), (PART, 16), (cutlass.Float32, 16), (ELEMENTS[facts.dtype], 16))
    pointers = [make_ptr(kind, 16, cute.AddressSpace.gmem, assumed_align=align) for kind, align in kinds]
    return cute.compile[cute.GPUArch("sm_90a")](_launch, *pointers, cutlass.Int32(1), make_fake_stream(), facts)
