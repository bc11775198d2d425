#!/usr/bin/env python3
"""Check the CuTe DSL block attention against float64, then time it, on one Hopper GPU.

usage: bench_cute_attention.py [--out FILE] [--limit SECONDS]
The work is done in a child process that is killed and started again when a case takes longer than the limit, so that a kernel
that hangs costs one case.  Nothing is timed for a shape whose check failed.  Writes JSON; status 1 if a check failed.
"""

import argparse
import json
import math
import queue
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

BYTES_PER_US, FLOPS_PER_US = 4.3e6, 790e6  # H200: 4.3 TB/s, 790 TFLOP/s
ROTATED = 300e6  # bytes of all pools that one graph reads in turn: past L2
LATENT, WIDTH, BLOCK = 512, 576, 7


@dataclass(frozen=True)
class Case:
    """seq_lens: keys of each request, block rows with them; early_merge: see the kernel's Facts."""

    name: str
    seq_lens: tuple[int, ...]
    heads: int = 8
    page_size: int = 32
    causal: bool = False
    window: int | None = None
    dtype: str = "bfloat16"
    page_major: bool = False
    early_merge: bool = True
    timed: bool = False


def cases() -> list[Case]:
    small = [Case(f"seq {length}", (length,)) for length in (1, 63, 64, 65, 2055)]
    small += [
        Case("late merge", (2055,), early_merge=False),
        Case("ragged, dummies", (0, 100, 2055, 0, 7)),
        Case("many requests", tuple(range(0, 3000, 41))),
        Case("beyond one tile a CTA", (40000, 3, 131)),
        Case("window", (2055, 300, 20), window=100),
        Case("64 heads", (2055, 0, 70), heads=64),
        Case("page 128, causal, page major", (2055, 9, 64), page_size=128, causal=True, page_major=True),
        Case("page 16, float16, causal, window", (515, 8), page_size=16, dtype="float16", causal=True, window=33),
    ]
    times = []
    for batch, context, heads in ((1, 2048, 8), (1, 32768, 8), (1, 131072, 8), (1, 393216, 8), (4, 2048, 8), (1, 32768, 64)):
        times.append(Case(f"B={batch} ctx={context} heads={heads}", (context + BLOCK,) * batch, heads, timed=True))
    times.append(replace(times[0], name=times[0].name + " late merge", early_merge=False))
    times.append(replace(times[1], name=times[1].name + " late merge", early_merge=False))
    return small + times


@dataclass
class Inputs:
    queries: torch.Tensor
    latents: torch.Tensor
    page_table: torch.Tensor
    context_lens: torch.Tensor
    seq_lens: torch.Tensor

    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.queries, self.latents, self.page_table, self.context_lens, self.seq_lens


def make_inputs(case: Case, device: str, seed: int = 0, poison: bool = True) -> Inputs:
    """Scattered pages; with poison, NaN in all rows that have no influence, and page ids that name none behind the keys."""
    draw = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    used = [math.ceil(length / case.page_size) for length in case.seq_lens]
    batch, columns, total = len(used), max(max(used), 1) + 2, sum(used) + 3
    shape = (total, 2, case.page_size, WIDTH) if case.page_major else (total, case.page_size, WIDTH)
    storage = torch.empty(shape, dtype=dtype, device=device).normal_(generator=draw)
    latents = storage[:, 1] if case.page_major else storage
    order = torch.randperm(total, generator=draw, device=device).int()
    table = torch.full((batch, columns), 2**31 - 1, dtype=torch.int32, device=device)
    seq_lens = torch.tensor(case.seq_lens, device=device)
    context_lens = (seq_lens - BLOCK).clamp(min=0)
    first = 0
    for request, count in enumerate(used):
        table[request, :count] = order[first : first + count]
        first += count
    if poison:
        alive = torch.zeros(total, case.page_size, dtype=torch.bool, device=device)
        for request, (start, end) in enumerate(spans(case, context_lens)):
            index = torch.arange(start, end, device=device)
            alive[table[request, index // case.page_size].long(), index % case.page_size] = True
        latents[~alive] = float("nan")
    queries = 3 * torch.randn(batch, BLOCK, case.heads, WIDTH, generator=draw, device=device)
    return Inputs(queries.to(dtype), latents, table, context_lens, seq_lens)


def spans(case: Case, context_lens: torch.Tensor) -> list[tuple[int, int]]:
    """First key and end of each request."""
    firsts = [0 if case.window is None else max(0, context - case.window) for context in context_lens.tolist()]
    return list(zip(firsts, case.seq_lens, strict=True))


def expected(case: Case, inputs: Inputs) -> torch.Tensor:
    """float64, request by request."""
    out = torch.zeros(*inputs.queries.shape[:3], LATENT, dtype=torch.float64, device=inputs.queries.device)
    for request, (start, end) in enumerate(spans(case, inputs.context_lens)):
        if start >= end:
            continue
        index = torch.arange(start, end, device=out.device)
        pages = inputs.page_table[request, index // case.page_size].long()
        keys = inputs.latents[pages, index % case.page_size].double()
        scores = (inputs.queries[request].double() @ keys.T) * WIDTH**-0.5
        if case.causal:
            last = inputs.context_lens[request] + torch.arange(BLOCK, device=out.device)
            scores = scores.masked_fill(index > last[:, None, None], float("-inf"))
        out[request] = torch.softmax(scores, -1) @ keys[:, :LATENT]
    return out


def launch(case: Case, inputs: Inputs) -> torch.Tensor:
    from dspark_kernels.cute.block_attention import block_attention

    return block_attention(
        *inputs.arguments(),
        kv_lora_rank=LATENT,
        softmax_scale=WIDTH**-0.5,
        causal=case.causal,
        window=case.window,
        early_merge=case.early_merge,
    )


def check(case: Case) -> dict:
    """Errors over the largest and the root mean square value; whether bits repeat, alone, with dummies, and in a graph."""
    from dspark_model.bench.timing import capture

    inputs = make_inputs(case, "cuda")
    out = launch(case, inputs)
    torch.cuda.synchronize()
    reference = expected(case, inputs)
    error = out.double() - reference
    largest = float(error.abs().max() / reference.abs().max().clamp(min=1e-30))
    mean = float(error.norm() / reference.norm().clamp(min=1e-30))
    padded = Inputs(*(torch.cat([tensor[:1], tensor, tensor[:2]]) for tensor in inputs.arguments()))
    padded.latents = inputs.latents
    keep = range(1, 1 + len(case.seq_lens))
    for lens in (padded.seq_lens, padded.context_lens):
        lens[0] = 0
        lens[keep.stop :] = 0
    same = {
        "again": all(torch.equal(launch(case, inputs), out) for _ in range(5)),
        "padded": torch.equal(launch(case, padded)[keep.start : keep.stop], out),
    }
    kept: list[torch.Tensor] = []
    graph = capture(lambda: kept.append(launch(case, inputs)))
    kept[-1].fill_(float("nan"))
    graph.replay()
    same["graph"] = torch.equal(kept[-1], out)
    bound = 4e-3 if case.dtype == "bfloat16" else 1e-3
    passed = mean < bound and largest < 4 * bound and all(same.values())
    return {"passed": bool(passed), "largest": largest, "mean": mean, **same}


def measure(case: Case) -> dict:
    """Microseconds of one call under graph replay, pools in rotation; floors; time of each kernel by the profiler."""
    from dspark_model.bench.timing import capture, time_interleaved

    row = sum(case.seq_lens) * WIDTH * 2
    copies = max(1, math.ceil(ROTATED / row))
    several = [make_inputs(case, "cuda", poison=False)]
    first = several[0]
    several += [replace_latents(first) for _ in range(copies - 1)]
    graph = capture(lambda: [launch(case, inputs) for inputs in several])
    flops = 2 * BLOCK * case.heads * sum(case.seq_lens) * (WIDTH + LATENT)
    floors = {"bytes": row / BYTES_PER_US, "flops": flops / FLOPS_PER_US}
    guess_us = 10 + 1.3 * max(floors.values())
    replays = max(1, int(4000 / (guess_us * copies)))
    timing = time_interleaved({"cute": graph.replay}, rounds=15, replays=replays, copies=copies)["cute"]
    return {
        "us": timing.median_us,
        "min": timing.min_us,
        "max": timing.max_us,
        "floors_us": floors,
        "of_floor": max(floors.values()) / timing.median_us,
        "pools": copies,
        "kernels_us": kernel_times(case, several[: min(8, copies)]),
    }


def replace_latents(inputs: Inputs) -> Inputs:
    latents = torch.empty_like(inputs.latents).normal_()
    return Inputs(inputs.queries, latents, inputs.page_table, inputs.context_lens, inputs.seq_lens)


def kernel_times(case: Case, several: list[Inputs]) -> dict | str:
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for inputs in several:
                launch(case, inputs)
            torch.cuda.synchronize()
        found: dict[str, list[float]] = {}
        for event in profile.events():
            for name in ("block_attention_kernel", "merge_kernel"):
                if name in event.name:
                    found.setdefault(name, []).append(event.device_time)
        return {name: sorted(times)[len(times) // 2] for name, times in found.items()}
    except Exception as error:  # a diagnosis only: the times above stand without it
        return repr(error)[:200]


@torch.inference_mode()
def work(names: list[str]) -> None:
    """The child: one line of JSON a case."""
    torch.zeros(1, device="cuda")
    print(json.dumps({"name": "start"}), flush=True)
    for case in cases():
        if case.name not in names:
            continue
        begin = time.monotonic()
        try:
            result = measure(case) if case.timed else check(case)
        except Exception:  # reported, and the other cases go on
            result = {"passed": False, "error": traceback.format_exc()[-1500:]}
        torch.cuda.empty_cache()
        print(json.dumps({"name": case.name, "seconds": round(time.monotonic() - begin, 1), **result}), flush=True)


def supervise(names: list[str], limit: float) -> list[dict]:
    """Runs the child, again after a case that hung or took the process down; that case is reported and left out."""
    results, left = [], list(names)
    while left:
        command = [sys.executable, __file__, "--work", json.dumps(left)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=forward, args=(child.stdout, lines), daemon=True).start()
        other: list[str] = []
        while left:
            try:
                line = lines.get(timeout=limit)
            except queue.Empty:
                child.kill()
                results.append(show({"name": left.pop(0), "passed": False, "error": f"no result within {limit} s"}))
                break
            if line is None:
                results.append(show({"name": left.pop(0), "passed": False, "error": "died: " + "".join(other)[-1500:]}))
                break
            try:
                result = json.loads(line)
            except json.JSONDecodeError:
                other.append(line)
                continue
            if result["name"] in left:
                left.remove(result["name"])
                results.append(show(result))
        child.wait(timeout=limit)
    return results


def forward(stream, to: queue.Queue) -> None:
    for line in stream:
        to.put(line)
    to.put(None)


def show(result: dict) -> dict:
    name = f"{result['name']:40}"
    if "error" in result:
        print(name, "FAILED", result["error"], flush=True)
    elif "us" in result:
        floors = result["floors_us"]
        print(
            f"{name} {result['us']:7.1f} us ({result['min']:.1f} to {result['max']:.1f})  floors {floors['bytes']:.1f} bytes, "
            f"{floors['flops']:.1f} flops; {result['of_floor']:.0%} of the larger; kernels {result['kernels_us']}",
            flush=True,
        )
    else:
        print(
            f"{name} {'right' if result['passed'] else 'WRONG'}  mean {result['mean']:.1e} largest {result['largest']:.1e}  "
            f"same bits: again {result['again']}, padded {result['padded']}, graph {result['graph']}  {result['seconds']} s",
            flush=True,
        )
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/bench_cute_attention.json"), metavar="FILE")
    parser.add_argument("--limit", type=float, default=25.0, metavar="SECONDS")
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        work(options.work)
        return 0
    everything = cases()
    checks = supervise([case.name for case in everything if not case.timed], options.limit)
    wrong = {result["name"] for result in checks if not result["passed"]}
    broken = {case.heads for case in everything if case.name in wrong and case.page_size == 32 and case.window is None}
    times = supervise([case.name for case in everything if case.timed and case.heads not in broken], options.limit)
    results = [{"case": asdict(case)} for case in everything]
    by_name = {result["name"]: result for result in checks + times}
    for entry in results:
        entry["result"] = by_name.get(entry["case"]["name"])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"machine": describe(), "results": results}, indent=1) + "\n", encoding="utf-8")
    return 1 if wrong else 0


def describe() -> dict:
    from dspark_model.bench.timing import machine

    return machine()


if __name__ == "__main__":
    sys.exit(main())
