#!/usr/bin/env python3
"""Check and time the Markov chain and the confidence of a block on a GPU, at the shapes of one Kimi K3 rank (TP8).

usage: bench_head.py [--out FOLDER] [--batches 1 4 16] [--replays 2000] [--limit SECONDS]
Each plan of the fused chain is checked against float64, small sizes first; one that fails is reported and not timed, and the
script ends with status 1.  Variants take turns within a round, under graph replay; medians over rounds.  Programs of the chain
wait for one another: after SECONDS the script ends itself, whatever it waits for.
Writes bench_head.json, anew after each case.
"""

import argparse
import faulthandler
import json
import sys
import time
from pathlib import Path

import torch

from dspark_model.bench.head_cases import (
    HeadInputs,
    check_beside_other_work,
    check_plan,
    check_replays,
    chosen_plan,
    plans,
    time_variants,
)
from dspark_model.bench.k3_rank import HIDDEN, VOCABULARY_SHARD
from dspark_model.bench.step_cases import Row
from dspark_model.bench.timing import machine

RANK = 256
SMALL = ((1, 300, 32), (3, 4099, 256), (17, 20483, 48))  # batch, vocabulary, rank


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/bench_head"), metavar="FOLDER")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--replays", type=int, default=2000)
    parser.add_argument("--limit", type=float, default=110, metavar="SECONDS")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: torch sees no CUDA device; this measures one", file=sys.stderr)
        return 2
    faulthandler.dump_traceback_later(options.limit, exit=True)
    report = Report(options.out)
    with torch.inference_mode():
        measure(report, options.batches, options.replays)
    faulthandler.cancel_dump_traceback_later()
    return 1 if report.failures else 0


class Report:
    """What was found, on the screen and in the file."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._file, self._start = folder / "bench_head.json", time.monotonic()
        self._machine = machine()
        self.checks: dict[str, str] = {}
        self.failures: dict[str, str] = {}
        self.rows: list[Row] = []

    def check(self, name: str, work) -> bool:
        """Whether `work` went through; what it returns is kept."""
        try:
            self.checks[name] = str(work())
            torch.cuda.synchronize()
        except Exception as error:  # a compiler or the driver may raise anything; it is reported
            self.failures[name] = f"{type(error).__name__}: {error}"
        passed = name not in self.failures
        line = f"ok, {self.checks[name]}" if passed else f"FAILED, {self.failures[name][:300]}"
        print(f"{time.monotonic() - self._start:6.1f} s  {name}: {line}", flush=True)
        self.write()
        return passed

    def add(self, rows: list[Row]) -> None:
        self.rows += rows
        for row in rows:
            entry = row.to_dict()
            print(
                f"  B {row.batch:2d}  {row.variant:32s} {row.timing.median_us:8.2f} us  "
                f"({row.timing.min_us:.2f} to {row.timing.max_us:.2f}; floor {entry['floor_us']:.1f})",
                flush=True,
            )
        self.write()

    def write(self) -> None:
        rows = [row.to_dict() for row in self.rows]
        parts = {"machine": self._machine, "checks": self.checks, "failures": self.failures, "rows": rows}
        self._file.write_text(json.dumps(parts, indent=1) + "\n", encoding="utf-8")


def measure(report: Report, batches: list[int], replays: int) -> None:
    for batch, vocab, rank in SMALL:
        inputs = HeadInputs.random(batch, vocab, rank, 64)
        for name in ("chosen", "drawn"):
            plan = plans(inputs, all_plans=False)[name]
            report.check(f"B {batch} V {vocab} R {rank}, {name}", lambda i=inputs, p=plan: check_plan(i, p))
    for batch in batches:
        inputs = HeadInputs.random(batch, VOCABULARY_SHARD, RANK, HIDDEN)
        usable = {
            name: plan
            for name, plan in plans(inputs, all_plans=batch == batches[0]).items()
            if report.check(f"B {batch}, {name}", lambda i=inputs, p=plan: check_plan(i, p))
        }
        report.add(time_variants(inputs, usable, report.failures))
    for batch, count in ((1, replays), (64, replays // 20)):
        inputs = HeadInputs.random(batch, VOCABULARY_SHARD, RANK, HIDDEN)
        plan = chosen_plan(inputs)
        if report.check(f"B {batch}, chosen, once more", lambda i=inputs, p=plan: check_plan(i, p)):
            report.check(f"B {batch}, beside other work", lambda i=inputs, p=plan: check_beside_other_work(i, p, 100))
            report.check(f"B {batch}, {count} replays", lambda i=inputs, p=plan, n=count: check_replays(i, p, n))


if __name__ == "__main__":
    sys.exit(main())
