"""A fault put into the package on purpose, with the test that has to notice it.

A mutant is a file of `dspark_model` or `kernels`, a text that stands in it exactly once, what replaces it, the test's id, and
what that test needs: None, "cutlass" for nvidia-cutlass-dsl, "gpu" for a CUDA device and that package.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    test: str
    needs: str | None = None
