#!/usr/bin/env python3
"""Time one layer's block attention at Kimi K3's shape on a GPU, under graph replay, beside its floors and FlashInfer's fa3.

usage: bench_attention.py [--out FOLDER] [--contexts 2048 32768 131072 393216] [--no-flashinfer]
Each launch shape is held to float64 first: one that fails, to compile or to be right, is reported and not timed.
Variants take turns within a round; medians over rounds.  Writes bench_attention.json.  Status 1 if no launch shape is right in
some case.
"""

import argparse
import json
import signal
import sys
import time
from pathlib import Path

import torch

from dspark_model.bench import attention_cases as cases
from dspark_model.bench.timing import machine

SECONDS_TO_BUILD = 60


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/bench_attention"), metavar="FOLDER")
    parser.add_argument("--contexts", type=int, nargs="+", default=sorted({context for _, context, _ in cases.CASES}))
    parser.add_argument("--no-flashinfer", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: torch sees no CUDA device; this measures one", file=sys.stderr)
        return 2
    signal.signal(signal.SIGALRM, stop_build)
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for batch, context, heads in cases.CASES:
        if context in options.contexts:
            rows += measure(batch, context, heads, not options.no_flashinfer)
            torch.cuda.empty_cache()
            # Written after each case, so that a run cut short leaves what it has.
            result = json.dumps({"machine": machine(), "rows": rows}, indent=1)
            (options.out / "bench_attention.json").write_text(result + "\n", encoding="utf-8")
    return summary(rows)


@torch.inference_mode()
def measure(batch: int, context: int, heads: int, with_flashinfer: bool) -> list[dict]:
    """One case, printed as it comes."""
    start = time.perf_counter()
    case = cases.make_case(batch, context, heads, rotated_bytes=cases.ROTATED_BYTES)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    rounded = cases.error_against_float64(case, case.rounded_reference())
    byte_floor, flop_floor = case.floors_us()
    print(
        f"B={batch} context={context} heads={heads}: floors {byte_floor:.1f} us bytes, {flop_floor:.1f} us products; "
        f"{len(case.pools)} pools; rounding alone {rounded:.2e}", flush=True,
    )  # fmt: skip
    calls, errors = {}, {}
    for name, tuning in cases.tunings().items():
        check(name, case, lambda tuning=tuning: cases.kernel_call(case, tuning, processors), calls, errors, 1.2 * rounded)
    check("causal fixup", case, lambda: lambda pool: case.run(pool, backend="causal_fixup"), calls, errors, 1.6 * rounded)
    if with_flashinfer:
        check("flashinfer fa3", case, lambda: cases.flashinfer_call(case), calls, errors, 4 * rounded)
    rows = []
    for name, timing in sorted(cases.time_case(case, calls).items(), key=lambda item: item[1].median_us):
        share = max(byte_floor, flop_floor) / timing.median_us
        print(f"  {name:24} {timing.median_us:8.1f} us ({timing.min_us:.1f} to {timing.max_us:.1f})  {share:4.0%} of the floor"
              f"  error {errors[name]:.2e}")  # fmt: skip
        rows.append({
            "batch": batch, "context": context, "heads": heads, "variant": name, "median_us": timing.median_us,
            "min_us": timing.min_us, "max_us": timing.max_us, "byte_floor_us": byte_floor, "flop_floor_us": flop_floor,
            "error": errors[name], "error_of_rounding": rounded,
        })  # fmt: skip
    print(f"  ({time.perf_counter() - start:.1f} s)", flush=True)
    return rows


def check(name: str, case, make_call, calls: dict, errors: dict, bound: float) -> None:
    """Adds a variant whose result is within the bound and repeats itself to the bit; says why it does not add another."""
    signal.alarm(SECONDS_TO_BUILD)  # raises out of a build that takes longer
    try:
        call = make_call()
        out = call(0)
        error = cases.error_against_float64(case, out)
        torch.cuda.synchronize()
        if not error <= bound:
            raise AssertionError(f"error {error:.2e}, allowed {bound:.2e}")
        if not torch.equal(call(0).view(torch.int16), out.view(torch.int16)):
            raise AssertionError("two runs differ")
    except Exception as error:  # a variant that does not compile must not keep the others from being timed
        print(f"  {name:24} left out: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return
    finally:
        signal.alarm(0)
    calls[name], errors[name] = call, error


def stop_build(*_) -> None:
    raise TimeoutError(f"not built within {SECONDS_TO_BUILD} s")


def summary(rows: list[dict]) -> int:
    """The best launch shape of each case, beside FlashInfer."""
    status = 0 if rows else 1
    print(f"{'B':>2} {'context':>7} {'heads':>5} {'best':24} {'us':>8} {'floor':>7} {'flashinfer':>10}")
    for batch, context, heads in dict.fromkeys((row["batch"], row["context"], row["heads"]) for row in rows):
        here = [row for row in rows if (row["batch"], row["context"], row["heads"]) == (batch, context, heads)]
        ours = [row for row in here if not row["variant"].startswith("flashinfer")]
        theirs = [f"{row['median_us']:.1f}" for row in here if row["variant"].startswith("flashinfer")]
        if not ours:
            status = 1
            continue
        best = min(ours, key=lambda row: row["median_us"])
        floor = max(best["byte_floor_us"], best["flop_floor_us"])
        line = f"{batch:2} {context:7} {heads:5} {best['variant']:24} {best['median_us']:8.1f} {floor:7.1f}"
        print(f"{line} {(theirs or ['-'])[0]:>10}")
    return status


if __name__ == "__main__":
    sys.exit(main())
