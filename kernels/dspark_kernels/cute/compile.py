"""Compile cache of the CuTe DSL kernels, and the one table from a device to what is built for it."""

import functools
from collections.abc import Callable, Hashable

import cutlass.cute as cute

# Compute capability to build.  The "a" builds run on exactly that capability, so a device never gets its neighbour's.
BUILDS = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a", (10, 7): "sm_107a"}


def build_architecture(capability: tuple[int, int]) -> str:
    """The architecture to build for on a device of this compute capability.

    Raises:
        ValueError: nothing is built for it.
    """
    if capability not in BUILDS:
        known = ", ".join(f"{major}.{minor} ({name})" for (major, minor), name in BUILDS.items())
        major, minor = capability
        raise ValueError(
            f"the CuTe DSL kernels are not built for compute capability {major}.{minor}, only for {known}; choose triton"
        )
    return BUILDS[capability]


@functools.cache
def compile_once(entry: Callable[[Hashable], tuple], facts: Hashable, architecture: str):
    """The compiled host function of one kernel for one set of static facts; built at the first call.

    entry: from the facts to a `cute.jit` function and arguments that stand for its runtime ones.
    """
    function, arguments = entry(facts)
    return cute.compile[cute.GPUArch(architecture)](function, *arguments)
