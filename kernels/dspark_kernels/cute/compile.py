"""Compile cache of the CuTe DSL kernels."""

import functools
from collections.abc import Callable, Hashable

import cutlass.cute as cute
import torch


@functools.cache
def compile_once(entry: Callable[[Hashable], tuple], facts: Hashable, architecture: str):
    """The compiled host function of one kernel for one set of static facts; built at the first call.

    entry: from the facts to a `cute.jit` function and arguments that stand for its runtime ones.

    Raises:
        RuntimeError: the current stream is being captured, where nothing may be compiled or loaded.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{facts} would be compiled during a capture; run the same work once before it")
    function, arguments = entry(facts)
    return cute.compile[cute.GPUArch(architecture)](function, *arguments)
