#!/usr/bin/env python3
"""Time products with few rows on a GPU, at the shapes of one Kimi K3 rank (TP8), under graph replay.

usage: bench_gemm.py [--out FOLDER] [--workers N]
Each product is first held to float64 within its bound, each chain of products to the plain one; what fails or is wrong is
reported and not timed.  Variants take turns within a round, weights rotate past L2; medians over rounds.  Kernels are compiled
ahead in N processes.
Writes bench_gemm.json.
"""

import argparse
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from dspark_model.bench.gemm_cases import (
    CASES,
    ROW_COUNTS,
    Result,
    case_results,
    chain_results,
    compile_ahead,
    make_workspace,
)
from dspark_model.bench.timing import machine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/bench_gemm"), metavar="FOLDER")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile ahead, 0 for none")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: torch sees no CUDA device; this measures one", file=sys.stderr)
        return 2
    if options.workers:
        compile_all(options.workers)
    results = measure()
    write(results, options.out)
    return 1 if any(result.failure for result in results) else 0


def compile_all(workers: int) -> None:
    """The chain's kernels are those of its cases."""
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(compile_ahead, case, rows) for case in CASES for rows in ROW_COUNTS]
        for job in jobs:
            if job.exception() is not None:
                print(f"ahead of time: {job.exception()}", flush=True)


@torch.inference_mode()
def measure() -> list[Result]:
    """All cases, printed as they come: the chain first, since it decides."""
    torch.manual_seed(0)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    workspace, results = make_workspace("cuda"), []
    for rows in ROW_COUNTS:
        results += show(chain_results(rows, workspace, processors))
        torch.cuda.empty_cache()
    for case in CASES:
        for rows in ROW_COUNTS:
            results += show(case_results(case, rows, workspace, processors))
        torch.cuda.empty_cache()
    print("\n".join(["", "best:", *best(results)]), flush=True)
    return results


def show(results) -> list[Result]:
    shown = []
    for result in results:
        print(result.line(), flush=True)
        shown.append(result)
    return shown


def best(results: list[Result]) -> list[str]:
    """The fastest low_m variant of each case, beside the library's products alone, for the chain the plain operations."""
    lines = []
    for key in dict.fromkeys((result.case, result.rows) for result in results):
        here = [result for result in results if (result.case, result.rows) == key and result.timing is not None]
        others = [result for result in here if result.variant in ("plain", "library, products alone")]
        ours = [result for result in here if result not in others]
        if ours:
            fastest = min(ours, key=lambda result: result.timing.median_us)
            lines.append("  ".join([fastest.line(), *(f"{other.variant} {other.timing.median_us:.2f} us" for other in others)]))
    return lines


def write(results: list[Result], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content = {"machine": machine(), "results": [result.to_dict() for result in results]}
    (folder / "bench_gemm.json").write_text(json.dumps(content, indent=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
