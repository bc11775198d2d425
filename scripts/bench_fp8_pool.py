#!/usr/bin/env python3
"""Time block attention over an fp8 pool on a GPU, one layer at Kimi K3's shape under graph replay, beside a bf16 pool.

usage: bench_fp8_pool.py [--out FOLDER] [--contexts 2048 32768 131072]
Each launch shape first has to be right against float64, and says in how many values it differs from a bf16 pool of the same
keys, which should be none; one that fails is reported and not timed.  Then the stores of a step's context rows, quantised and
copied.  Variants take turns; medians over rounds.  Writes bench_fp8_pool.json.  Status 1 if no launch shape is right in some
case.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from dspark_model import ops
from dspark_model.bench import attention_cases as cases
from dspark_model.bench.timing import capture, machine, time_interleaved

FP8 = torch.float8_e4m3fn
LAYERS = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/bench_fp8_pool"), metavar="FOLDER")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 32768, 131072])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: torch sees no CUDA device; this measures one", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    processors, rows, status = torch.cuda.get_device_properties(0).multi_processor_count, [], 0
    for context in options.contexts:
        bf16, fp8 = make_cases(context)
        calls = checked_calls(bf16, fp8, processors)
        status |= not any(name.startswith("fp8") for name in calls)
        timings = cases.time_case(bf16, calls)
        rows += [report(f"context {context}, {name}", timing) for name, timing in timings.items()]
        torch.cuda.empty_cache()
    rows += [report(name, timing) for name, timing in time_interleaved(store_graphs()).items()]
    result = json.dumps({"machine": machine(), "rows": rows}, indent=1)
    (options.out / "bench_fp8_pool.json").write_text(result + "\n", encoding="utf-8")
    return status


def make_cases(context: int, heads: int = 8, **options) -> tuple[cases.AttentionCase, cases.AttentionCase]:
    """The same queries and keys, in bf16 pools and in fp8 pools."""
    options = {"rotated_bytes": cases.ROTATED_BYTES, **options}
    case = cases.make_case(1, context, heads, **options)
    kept = tuple(ops.quantise_rows(pool) for pool in case.pools)
    held = tuple(ops.dequantise_rows(pool, cases.WIDTH).to(case.queries.dtype) for pool in kept)
    return replace(case, pools=held), replace(case, pools=kept)


def checked_calls(bf16: cases.AttentionCase, fp8: cases.AttentionCase, processors: int) -> dict:
    """Variants that may be timed, by name: what the op launches for the bf16 pool, and the plain kernel for both."""
    calls = {"bf16, as the op": lambda pool: bf16.run(pool, backend="triton")}
    rounded = cases.error_against_float64(bf16, bf16.rounded_reference())
    for name, tuning in shapes().items():
        # A bf16 pool has no room for a third stage, and stages have no part in the bits.
        plain = plain_kernel(bf16, replace(tuning, num_stages=2), processors)
        ours = plain_kernel(fp8, tuning, processors)
        try:
            wanted, found = plain(0), ours(0)
            error, bound = cases.error_against_float64(bf16, found), 1.2 * rounded + 1e-6
            said = f"error {error:.2e} (rounding alone {rounded:.2e}), {int((wanted != found).sum())} values differ from bf16's"
            if not error <= bound:
                raise AssertionError(f"{said}; allowed {bound:.2e}")
            print(f"{name}: {said}", flush=True)
        except Exception as reason:  # a shape that does not compile must not keep the others from being timed
            print(f"{name} left out: {type(reason).__name__}: {str(reason)[:200]}", flush=True)
            continue
        calls |= {f"bf16, {name}": plain, f"fp8, {name}": ours} if name == "64x64 s2" else {f"fp8, {name}": ours}
    return calls


def plain_kernel(case: cases.AttentionCase, tuning, processors: int) -> Callable[[int], torch.Tensor]:
    """A call of the plain Triton kernel with a launch shape."""
    from dspark_kernels.triton.block_attention import block_attention

    options = {"kv_lora_rank": cases.RANK, "softmax_scale": cases.SCALE, "causal": False, "window": None}
    options |= {"max_seq_len": case.max_seq_len, "processors": processors, "tuning": tuning}
    return lambda pool: block_attention(*case.inputs(pool), **options)


def shapes() -> dict:
    """Launch shapes by name: query rows x keys a tile, stages."""
    from dspark_kernels.triton.block_attention import Tuning

    return {
        f"{rows}x{keys} s{stages}": Tuning(row_tile=rows, key_tile=keys, num_warps=8, num_stages=stages)
        for rows, keys, stages in ((64, 64, 2), (64, 64, 3), (64, 32, 3), (16, 64, 2))
    }


def store_graphs(rows: int = 8) -> dict:
    """Replays of the context store of all layers, by name."""
    device, found = "cuda", {}
    latents = torch.randn(LAYERS, 1, rows, cases.WIDTH, device=device).bfloat16()
    one = torch.zeros(1, dtype=torch.int64, device=device)
    table = torch.arange(4, dtype=torch.int32, device=device)[None]
    for dtype in (torch.bfloat16, FP8):
        views = torch.zeros(LAYERS, 4, 32, ops.pool_row_width(cases.WIDTH, dtype), device=device).to(dtype).unbind(0)
        place = (one, one + rows, one, table, one + 4)
        store = partial(ops.context_store, views, latents, *place, fused=True)
        found[f"context store of {rows} rows, {dtype}"] = capture(store).replay
    return found


def report(name: str, timing) -> dict:
    print(f"{name:40} {timing.median_us:8.1f} us ({timing.min_us:.1f} to {timing.max_us:.1f})", flush=True)
    return {"variant": name, "median_us": timing.median_us, "min_us": timing.min_us, "max_us": timing.max_us}


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
