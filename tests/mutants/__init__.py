"""Faults put into the package on purpose, each with a test that has to notice it; a file for each part of the code."""

from mutants import cute, ops, package, triton
from mutants.mutant import Mutant

__all__ = ["MUTANTS", "Mutant"]

MUTANTS = package.MUTANTS + ops.MUTANTS + triton.MUTANTS + cute.MUTANTS
