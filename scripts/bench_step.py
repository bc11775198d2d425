#!/usr/bin/env python3
"""Time the worker's decode step on a GPU at the shapes of one Kimi K3 rank (TP8), under graph replay.

usage: bench_step.py [--out FOLDER] [--batches 1 4] [--contexts 2048 32768 131072]
                     [--cases bookkeeping overlap step qkv profiles]
                     [--profiles torch triton cute ...] [--kernels]
Variants take turns within a round; medians over rounds.  Variants that differ in a bit are not timed:
the script stops with status 1.
Writes bench_step.json and bench_step.png.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from dspark_model.bench.k3_rank import k3_rank_config, random_drafter
from dspark_model.bench.profile_cases import PROFILES, block_rows, profile_step_rows
from dspark_model.bench.qkv_cases import qkv_part_rows, qkv_step_rows, qkv_summary
from dspark_model.bench.step_cases import Row, bookkeeping_rows, overlap_rows, overlap_summary, step_rows
from dspark_model.bench.timing import machine

CASES = ("bookkeeping", "overlap", "step", "qkv", "profiles")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/bench_step"), metavar="FOLDER")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 32768, 131072])
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--profiles", nargs="+", default=list(PROFILES), choices=list(PROFILES))
    parser.add_argument("--kernels", action="store_true", help="print the kernels of the fastest profile's step")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: torch sees no CUDA device; this measures one", file=sys.stderr)
        return 2
    try:
        rows = measure(options)
    except AssertionError as error:
        print(f"error: not equal to the bit, so nothing is timed: {error}", file=sys.stderr)
        return 1
    write(rows, options.out)
    return 0


@torch.inference_mode()
def measure(options: argparse.Namespace) -> list[Row]:
    """The cases, printed as they come; bookkeeping, overlap and qkv at the first context alone."""
    model = random_drafter(k3_rank_config())
    batches, contexts, cases, profiles = options.batches, options.contexts, options.cases, options.profiles
    rows: list[Row] = []
    for batch in batches:
        if "bookkeeping" in cases:
            rows += show(bookkeeping_rows(model, batch, contexts[0]))
        if "overlap" in cases:
            rows += show(overlap_rows(model, batch))
        if "qkv" in cases:
            for measured in (qkv_part_rows, qkv_step_rows):
                rows += show(measured(model, batch, contexts[0]))
                torch.cuda.empty_cache()
        for context in contexts if "step" in cases else ():
            rows += show(step_rows(model, batch, context))
            torch.cuda.empty_cache()
        for context in contexts if "profiles" in cases else ():
            rows += show(block_rows(model, batch, context, profiles))
            rows += show(profile_step_rows(model, batch, context, profiles, show_kernels=options.kernels))
            torch.cuda.empty_cache()
    return rows


def show(rows: list[Row]) -> list[Row]:
    for row in rows:
        floor = row.to_dict()["floor_us"]
        end = "" if floor is None else f"  floor {floor:.0f} us"
        timing = row.timing
        print(
            f"{row.case:22} {row.variant:44} B={row.batch} ctx={row.context:6}  {timing.median_us:8.1f} us "
            f"({timing.min_us:.1f} to {timing.max_us:.1f}){end}",
            flush=True,
        )
    for summary in (*overlap_summary(rows), *qkv_summary(rows)):
        print(summary)
    return rows


def write(rows: list[Row], out: Path) -> None:
    """JSON with the machine and the config, and a picture of the step times."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    out.mkdir(parents=True, exist_ok=True)
    result = {"machine": machine(), "config": k3_rank_config().to_dict(), "rows": [row.to_dict() for row in rows]}
    (out / "bench_step.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    cases = dict.fromkeys(row.case for row in rows if not row.case.startswith("overlap"))
    figure, axes = pyplot.subplots(1, max(1, len(cases)), figsize=(6 * max(1, len(cases)), 4), squeeze=False)
    for axis, case in zip(axes[0], cases, strict=False):
        own = [row for row in rows if row.case == case]
        labels = [f"{row.variant}\nB={row.batch} {row.context}" for row in own]
        axis.barh(labels, [row.timing.median_us for row in own])
        axis.set_title(f"{case}, microseconds")
        axis.tick_params(labelsize=6)
    figure.tight_layout()
    figure.savefig(out / "bench_step.png", dpi=110)
    print(f"written: {out / 'bench_step.json'}, {out / 'bench_step.png'}")


if __name__ == "__main__":
    sys.exit(main())
