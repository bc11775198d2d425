#!/usr/bin/env python3
"""Check builds of the CuTe DSL block attention against float64, time them, and show where a call's time goes; one Hopper GPU.

usage: bench_cute_attention.py [--out FILE] [--limit SECONDS]
The work is done in a child process that is killed and started again when a job takes longer than the limit, so that a kernel
that hangs costs one job.  A variant with a wrong or missing answer is neither timed nor drawn.  Writes JSON; status 1 if a job
failed.
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
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

BYTES_PER_US, FLOPS_PER_US = 4.3e6, 790e6  # H200: 4.3 TB/s, 790 TFLOP/s
ROTATED = 300e6  # bytes of all pools that one graph reads in turn: past L2
LATENT, WIDTH, BLOCK = 512, 576, 7
VARIANTS = {  # facts of a build that differ from the defaults; dtypes by name
    "default": {},
    "early start": {"early_start": True},
    "merge at start": {"merge_launch": "start"},
    "merge after": {"merge_launch": "after"},
    "merge in half an SM": {"merge_room": 112 * 1024},
    "float32 parts": {"part_dtype": "float32"},
    "queries by threads": {"fetch_queries": False},
    "32 keys": {"keys": 32},
    "32 keys, overlap": {"keys": 32, "overlap": True},
    "overlap": {"overlap": True},
}
VARIANTS_OF_64_HEADS = ("default", "32 keys, overlap", "overlap")
DRAWN = ("default", "32 keys, overlap")


@dataclass(frozen=True)
class Case:
    """seq_lens: keys of each request, block rows with them; scale: of the latents; the queries' undoes it for the scores."""

    name: str
    seq_lens: tuple[int, ...]
    heads: int = 8
    page_size: int = 32
    causal: bool = False
    window: int | None = None
    dtype: str = "bfloat16"
    page_major: bool = False
    scale: float = 1.0
    timed: bool = False


def cases() -> list[Case]:
    small = [Case(f"seq {length}", (length,)) for length in (1, 63, 64, 65, 2055)]
    small += [
        Case("ragged, dummies", (0, 100, 2055, 0, 7)),
        Case("many requests", tuple(range(0, 3000, 41))),
        Case("beyond one tile a CTA", (40000, 3, 131)),
        Case("large values", (2055, 70), scale=1e6),
        Case("window", (2055, 300, 20), window=100),
        Case("64 heads", (2055, 0, 70), heads=64),
        Case("page 128, causal, page major", (2055, 9, 64), page_size=128, causal=True, page_major=True),
        Case("page 16, float16, causal, window", (515, 8), page_size=16, dtype="float16", causal=True, window=33),
    ]
    shapes = ((1, 2048, 8), (1, 32768, 8), (1, 131072, 8), (1, 393216, 8), (4, 2048, 8), (1, 32768, 64))
    return small + [
        Case(f"B={batch} ctx={length} heads={heads}", (length + BLOCK,) * batch, heads, timed=True)
        for batch, length, heads in shapes
    ]


def jobs() -> list[dict]:
    """In the order of running: checks, those that need another build with few variants; then times and timelines by shape."""
    wanted = []
    for variant, facts in VARIANTS.items():
        for case in cases():
            other_build = case.page_size != 32 or (case.heads != 8 and variant not in VARIANTS_OF_64_HEADS)
            if not case.timed and not (facts and other_build):
                wanted.append(("check", case.name, [variant]))
    for case in cases():
        if case.timed:
            wanted.append(("time", case.name, list(VARIANTS if case.heads == 8 else VARIANTS_OF_64_HEADS)))
            wanted += [("timeline", case.name, [variant]) for variant in DRAWN]
    return [{"kind": kind, "case": case, "variants": variants} for kind, case, variants in wanted]


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
    storage = torch.empty(shape, dtype=dtype, device=device).normal_(generator=draw).mul_(case.scale)
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
    queries = 3 / case.scale * torch.randn(batch, BLOCK, case.heads, WIDTH, generator=draw, device=device)
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


def launch(case: Case, inputs: Inputs, variant: str, times: torch.Tensor | None = None) -> torch.Tensor:
    from dspark_kernels.cute.block_attention import block_attention

    choices = dict(VARIANTS[variant])
    if "part_dtype" in choices:
        choices["part_dtype"] = getattr(torch, choices["part_dtype"])
    return block_attention(
        *inputs.arguments(),
        kv_lora_rank=LATENT,
        softmax_scale=WIDTH**-0.5,
        causal=case.causal,
        window=case.window,
        times=times,
        **choices,
    )


def check(case: Case, variants: list[str]) -> dict:
    """Errors over the largest and the root mean square value; whether bits repeat, alone, with dummies, and in a graph."""
    from dspark_model.bench.timing import capture

    (variant,) = variants
    inputs = make_inputs(case, "cuda")
    out = launch(case, inputs, variant)
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
        "again": all(torch.equal(launch(case, inputs, variant), out) for _ in range(5)),
        "padded": torch.equal(launch(case, padded, variant)[keep.start : keep.stop], out),
    }
    kept: list[torch.Tensor] = []
    graph = capture(lambda: kept.append(launch(case, inputs, variant)))
    kept[-1].fill_(float("nan"))
    graph.replay()
    same["graph"] = torch.equal(kept[-1], out)
    bound = 2.2e-3 if case.dtype == "bfloat16" else 4e-4  # the rounding of weights and outputs alone: 1.8e-3 and 2.2e-4
    passed = mean < bound and largest < 4 * bound and all(same.values())
    return {"passed": bool(passed), "largest": largest, "mean": mean, **same}


def measure(case: Case, variants: list[str]) -> dict:
    """Microseconds of one call under graph replay, pools in rotation; floors; time of each kernel by the profiler."""
    from dspark_model.bench.timing import capture, time_interleaved

    row = sum(case.seq_lens) * WIDTH * 2
    several = pools(case, math.ceil(ROTATED / row))
    copies = len(several)
    graphs = {name: capture(lambda name=name: [launch(case, inputs, name) for inputs in several]) for name in variants}
    flops = 2 * BLOCK * case.heads * sum(case.seq_lens) * (WIDTH + LATENT)
    floors = {"bytes": row / BYTES_PER_US, "flops": flops / FLOPS_PER_US}
    replays = max(1, int(3000 / ((10 + 1.3 * max(floors.values())) * copies)))
    calls = {name: graph.replay for name, graph in graphs.items()}
    timings = time_interleaved(calls, rounds=15, replays=replays, copies=copies)
    return {
        "us": {name: asdict(timing) for name, timing in timings.items()},
        "floors_us": floors,
        "pools": copies,
        "kernels_us": {name: kernel_times(case, several[: min(6, copies)], name) for name in variants[:1]},
    }


def pools(case: Case, copies: int) -> list[Inputs]:
    first = make_inputs(case, "cuda", poison=False)
    return [first, *(replace_latents(first) for _ in range(copies - 1))]


def timeline(case: Case, variants: list[str]) -> dict:
    """Of the last of four calls on different pools: when CTAs begin and end, and how long after its begin it is at a mark."""
    from dspark_kernels.cute import block_attention as kernel

    (variant,) = variants
    several = pools(case, 4)
    attention = torch.cuda.get_device_properties(0).multi_processor_count
    merging = len(case.seq_lens) * -(-BLOCK * case.heads // kernel.TILE) * LATENT // 4
    times = torch.zeros(attention + merging, kernel.MARKS, dtype=torch.int64, device="cuda")
    for inputs in several:
        torch.cuda.synchronize()
        times.zero_()
        launch(case, inputs, variant, times)
    torch.cuda.synchronize()
    rows = times.cpu()
    begin = rows[:, 0].min()
    return {
        "attention": phases(rows[:attention], kernel.ATTENTION_MARKS, begin, kernel.ATTENTION_MARKS.index("products")),
        "merge": phases(rows[attention:], kernel.MERGE_MARKS, begin, kernel.MERGE_MARKS.index("summed")),
    }


def phases(rows: torch.Tensor, marks: tuple[str, ...], begin: int, needed: int) -> dict:
    """Median and largest over the CTAs that have work, that is, reach the mark `needed`."""
    rows = rows[rows[:, needed] > 0]
    if not len(rows):
        return {"CTAs": 0}
    end = marks.index("end")
    cycles_per_ns = float((rows[:, end] - rows[:, 2]).sum() / (rows[:, 1] - rows[:, 0]).sum().clamp(min=1))
    found = {"begins": (rows[:, 0] - begin) / 1e3, "ends": (rows[:, 1] - begin) / 1e3}
    found |= {mark: (rows[:, at] - rows[:, 2]) / cycles_per_ns / 1e3 for at, mark in enumerate(marks) if mark and at > 2}
    result = {mark: (round(float(us.median()), 2), round(float(us.max()), 2)) for mark, us in found.items()}
    return {"CTAs": len(rows), "GHz": round(cycles_per_ns, 2), **result}


def replace_latents(inputs: Inputs) -> Inputs:
    latents = torch.empty_like(inputs.latents).normal_()
    return Inputs(inputs.queries, latents, inputs.page_table, inputs.context_lens, inputs.seq_lens)


def kernel_times(case: Case, several: list[Inputs], variant: str) -> dict | str:
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for inputs in several:
                launch(case, inputs, variant)
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
def work(wanted: list[dict], broken: list[str]) -> None:
    """The child: one line of JSON a job.  A variant that failed is left out of what comes later."""
    torch.zeros(1, device="cuda")
    by_name = {case.name: case for case in cases()}
    for job in wanted:
        begin = time.monotonic()
        left = [variant for variant in job["variants"] if variant not in broken]
        try:
            result = (
                {"check": check, "time": measure, "timeline": timeline}[job["kind"]](by_name[job["case"]], left) if left else {}
            )
        except Exception:  # reported, and the other jobs go on
            result = {"passed": False, "error": traceback.format_exc()[-1500:]}
        broken += left if not result.get("passed", True) and job["kind"] == "check" else []
        torch.cuda.empty_cache()
        print(json.dumps({"job": job, "seconds": round(time.monotonic() - begin, 1), **result}), flush=True)


def supervise(wanted: list[dict], limit: float) -> list[dict]:
    """Runs the child, again after a job that hung or took the process down; that job is reported and left out."""
    results, left = [], list(wanted)
    while left:
        broken = [
            name
            for done in results
            if not done.get("passed", True) and done["job"]["kind"] == "check"
            for name in done["job"]["variants"]
        ]
        command = [sys.executable, __file__, "--work", json.dumps([left, broken])]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=forward, args=(child.stdout, lines), daemon=True).start()
        other: list[str] = []
        while left:
            try:
                line = lines.get(timeout=limit)
            except queue.Empty:
                child.kill()
                results.append(show({"job": left.pop(0), "passed": False, "error": f"no result within {limit} s"}))
                break
            if line is None:
                results.append(show({"job": left.pop(0), "passed": False, "error": "died: " + "".join(other)[-1500:]}))
                break
            try:
                result = json.loads(line)
                left.remove(result["job"])
            except (json.JSONDecodeError, TypeError, KeyError, ValueError):
                other.append(line)
                continue
            results.append(show(result))
        child.wait(timeout=limit)
    return results


def forward(stream, to: queue.Queue) -> None:
    for line in stream:
        to.put(line)
    to.put(None)


def show(result: dict) -> dict:
    job = result["job"]
    name = f"{job['case']:36}"
    if "error" in result:
        print(job["kind"], name, ", ".join(job["variants"]), "FAILED", result["error"], flush=True)
    elif "us" in result:
        floors = result["floors_us"]
        print(f"{name} floors {floors['bytes']:.1f} us bytes, {floors['flops']:.1f} products; kernels {result['kernels_us']}")
        for variant, us in sorted(result["us"].items(), key=lambda item: item[1]["median_us"]):
            print(f"  {variant:24} {us['median_us']:7.1f} us ({us['min_us']:.1f} to {us['max_us']:.1f})")
        print(f"  {result['seconds']} s", flush=True)
    elif "attention" in result:
        for kernel in ("attention", "merge"):
            shown = (f"{mark} {'/'.join(map(str, us)) if isinstance(us, list) else us}" for mark, us in result[kernel].items())
            print(f"  {job['variants'][0]}: {kernel} (median/largest us): {', '.join(shown)}", flush=True)
    elif "mean" in result:
        print(
            f"{name} {job['variants'][0]:24} {'right' if result['passed'] else 'WRONG'}  mean {result['mean']:.2e} "
            f"largest {result['largest']:.1e}  same bits: again {result['again']}, padded {result['padded']}, "
            f"graph {result['graph']}  {result['seconds']} s",
            flush=True,
        )
    else:
        print(job["kind"], name, "left out: its variants failed", flush=True)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/bench_cute_attention.json"), metavar="FILE")
    parser.add_argument("--limit", type=float, default=25.0, metavar="SECONDS")
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        work(*options.work)
        return 0
    results = supervise(jobs(), options.limit)
    described = {case.name: asdict(case) for case in cases()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    written = {"machine": describe(), "variants": VARIANTS, "cases": described, "results": results}
    options.out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return 1 if any(not result.get("passed", True) for result in results) else 0


def describe() -> dict:
    from dspark_model.bench.timing import machine

    return machine()


if __name__ == "__main__":
    sys.exit(main())
