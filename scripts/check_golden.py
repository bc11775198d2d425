#!/usr/bin/env python3
"""Check the package against golden vectors: every case goes through `from_pretrained` and a worker on a paged pool.

usage: check_golden.py DIR...     a DIR is a case folder (with case.json) or a folder of case folders
Prints a table of the largest difference per output and exits with status 1 on any miss.
"""

import argparse
import sys
from pathlib import Path

import torch

from dspark_model.golden import Comparison, check_case, find_cases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    try:
        cases = find_cases(arguments.folders)
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    rows = [row for case in cases for row in check_case(case, device=arguments.device)]
    print_table(rows)
    missed = sum(not row.passed for row in rows)
    print(f"{len(cases)} cases, {len(rows)} comparisons, {missed} missed")
    return 1 if missed else 0


def print_table(rows: list[Comparison]) -> None:
    print(f"{'case':24} {'dtype':9} {'run':6} {'output':18} {'largest diff':>13} {'bound':>9}  result")
    for row in rows:
        result = "ok" if row.passed else f"MISS {row.detail}"
        print(f"{row.case:24} {row.dtype:9} {row.run:6} {row.output:18} {row.difference:13.3g} {row.bound:>9}  {result}")


if __name__ == "__main__":
    sys.exit(main())
