#!/usr/bin/env python3
"""Time one layer's block attention at Kimi K3's shape on a GPU, under graph replay, beside its floors and FlashInfer's fa3.

usage: bench_attention.py [--out FOLDER] [--contexts 2048 32768 131072 393216] [--backends cute triton] [--no-flashinfer]
Each backend is held to float64 first: one that fails, to compile or to be right, is reported and not timed.  They take turns
within a round; medians over rounds.  Writes bench_attention.json.  Status 1 if none of ours is right in some case.
"""

import argparse
import json
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch

from dspark_model.bench import attention_cases as cases
from dspark_model.bench.timing import machine

SECONDS_TO_BUILD = 60
# Our backends, and the error that each may have, over that of rounding the exact weights and result.  CuTe's parts are float16,
# and the causal kernel's result is rounded once more.
BOUNDS = {"triton": 1.2, "cute": 1.3, "causal_fixup": 1.6}
FLASHINFER = "flashinfer fa3"
# The same with W_UV behind it, `cute`: in a launch of its own, and in the merge's launch.
APART, MERGED = VALUES = ("values apart", "values merged")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/bench_attention"), metavar="FOLDER")
    parser.add_argument("--contexts", type=int, nargs="+", default=sorted({context for _, context, _ in cases.CASES}))
    parser.add_argument("--backends", nargs="+", choices=BOUNDS, default=list(BOUNDS), metavar="NAME")
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
            rows += measure(batch, context, heads, options.backends, not options.no_flashinfer)
            torch.cuda.empty_cache()
            # Written after each case, so that a run cut short leaves what it has.
            result = json.dumps({"machine": machine(), "rows": rows}, indent=1)
            (options.out / "bench_attention.json").write_text(result + "\n", encoding="utf-8")
    return summary(rows)


@torch.inference_mode()
def measure(batch: int, context: int, heads: int, backends: list[str], with_flashinfer: bool) -> list[dict]:
    """One case, printed as it comes."""
    start = time.perf_counter()
    case = cases.make_case(batch, context, heads, rotated_bytes=cases.ROTATED_BYTES)
    rounded = cases.error_against_float64(case, case.rounded_reference())
    byte_floor, flop_floor = case.floors_us()
    print(
        f"B={batch} context={context} heads={heads}: floors {byte_floor:.1f} us bytes, {flop_floor:.1f} us products; "
        f"{len(case.pools)} pools; rounding alone {rounded:.2e}", flush=True,
    )  # fmt: skip
    calls, errors = {}, {}
    error_of = partial(cases.error_against_float64, case)
    for name in backends:
        reason = case.refusal(name)
        if reason is not None:
            print(f"  {name:24} left out: {reason}", flush=True)
            continue
        check(name, lambda name=name: partial(case.run, backend=name), calls, errors, error_of, BOUNDS[name] * rounded)
        if name == "cute":
            check_values(case, calls, errors)
    if with_flashinfer:
        check(FLASHINFER, lambda: cases.flashinfer_call(case), calls, errors, error_of, 4 * rounded)
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


def check_values(case, calls: dict, errors: dict) -> None:
    """`check` of the variants with W_UV."""
    weights = case.value_weights()
    error_of = partial(cases.error_against_float64, case, value_weights=weights)
    rounded = error_of(cases.values_of(case.rounded_reference(), weights).to(weights.dtype))
    variants = {
        APART: partial(case.run_with_product_apart, backend="cute", value_weights=weights),
        MERGED: partial(case.run, backend="cute", value_weights=weights),
    }
    for name, call in variants.items():
        check(name, lambda call=call: call, calls, errors, error_of, BOUNDS["cute"] * rounded)


def check(name: str, make_call, calls: dict, errors: dict, error_of, bound: float) -> None:
    """Adds a variant whose result is within the bound and repeats itself to the bit; says why it does not add another."""
    signal.alarm(SECONDS_TO_BUILD)  # raises out of a build that takes longer
    try:
        call = make_call()
        out = call(0)
        error = error_of(out)
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
    """Microseconds of all backends, case by case."""
    names = (*BOUNDS, *VALUES, FLASHINFER)
    status = 0 if rows else 1
    print(f"{'B':>2} {'context':>7} {'heads':>5} {'floor':>7} " + " ".join(f"{name:>14}" for name in names))
    for batch, context, heads in dict.fromkeys((row["batch"], row["context"], row["heads"]) for row in rows):
        here = {row["variant"]: row for row in rows if (row["batch"], row["context"], row["heads"]) == (batch, context, heads)}
        if not set(here) & set(BOUNDS):
            status = 1
        any_row = next(iter(here.values()))
        floor = max(any_row["byte_floor_us"], any_row["flop_floor_us"])
        times = (f"{here[name]['median_us']:14.1f}" if name in here else f"{'-':>14}" for name in names)
        print(f"{batch:2} {context:7} {heads:5} {floor:7.1f} " + " ".join(times))
    return status


if __name__ == "__main__":
    sys.exit(main())
