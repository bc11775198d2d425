#!/usr/bin/env python3
"""Check the CuTe DSL block attention against float64, and time its two kernels; one Hopper GPU.

usage: bench_cute_attention.py [--out FILE] [--limit SECONDS]
The work is done in a child process that is killed and started again when a job takes longer than the limit, so that a kernel
that hangs costs one job.  Nothing is timed after a wrong or missing answer.  Writes JSON; status 1 if a job failed.
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
NO_PAGE = 2**31 - 1


@dataclass(frozen=True)
class Case:
    """seq_lens: keys of each request, block rows with them; scale: of the latents; the queries' undoes it for the scores.

    slotted: requests name their rows of a longer table, -1 without keys; apart: a request's query rows have no one stride.
    two_tiles: which schedule; None: by the shape; rising: keys grow with their position, so later scores are far larger.
    """

    name: str
    seq_lens: tuple[int, ...]
    heads: int = 8
    page_size: int = 32
    causal: bool = False
    window: int | None = None
    dtype: str = "bfloat16"
    page_major: bool = False
    scale: float = 1.0
    slotted: bool = False
    apart: bool = False
    two_tiles: bool | None = None
    rising: bool = False
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
        Case("slots", (0, 100, 2055, 0, 7), slotted=True),
        Case("slots of many requests", tuple(range(0, 3000, 83)), slotted=True),
        Case("queries apart", (515, 0, 70), apart=True),
        Case("8 heads, two tiles in flight", (0, 100, 2055, 0, 7), two_tiles=True),
        Case("64 heads, one tile in flight", (2055, 0, 70), heads=64, two_tiles=False),
    ]
    small += [Case(f"64 heads, seq {length}", (length,), heads=64) for length in (1, 64, 65, 129, 515)]
    small += [
        Case("64 heads, window", (2055, 300, 20, *range(200, 400, 3)), heads=64, window=100),
        Case("64 heads, requests of few tiles", tuple(range(1, 330)), heads=64),  # about 17 a CTA, of 1 to 6 tiles
        Case("64 heads, beyond one tile a CTA", (40000, 3, 131), heads=64),
        Case("64 heads, rising scores", (2055, 0, 70, 9000), heads=64, rising=True),
        Case("64 heads, large values", (2055, 70), heads=64, scale=1e6),
        Case("64 heads, page 16, float16, causal, slots", (0, 515, 9, 64), 64, 16, causal=True, dtype="float16", slotted=True),
        Case("16 heads, page 128, causal, page major", (2055, 9, 64), 16, 128, causal=True, page_major=True),
        Case("64 heads, page 64, queries apart", (515, 0, 70), 64, 64, apart=True),
    ]
    shapes = ((1, 2048, 8), (1, 32768, 8), (1, 131072, 8), (1, 393216, 8), (4, 2048, 8), (1, 32768, 64))
    return small + [
        Case(f"B={batch} ctx={length} heads={heads}", (length + BLOCK,) * batch, heads, timed=True)
        for batch, length, heads in shapes
    ]


def jobs() -> list[dict]:
    """In the order of running: checks, then times."""
    return [{"kind": "time" if case.timed else "check", "case": case.name} for case in sorted(cases(), key=lambda c: c.timed)]


@dataclass
class Inputs:
    queries: torch.Tensor
    latents: torch.Tensor
    page_table: torch.Tensor
    context_lens: torch.Tensor
    seq_lens: torch.Tensor
    slots: torch.Tensor | None = None

    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.queries, self.latents, self.page_table, self.context_lens, self.seq_lens


def make_inputs(case: Case, device: str, seed: int = 0, poison: bool = True) -> Inputs:
    """Scattered pages; with poison, NaN in all rows that have no influence.  Entries of the table behind the keys, and rows of
    slots that no request has, name no page."""
    draw = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    used = [math.ceil(length / case.page_size) for length in case.seq_lens]
    batch, columns, total = len(used), max(max(used), 1) + 2, sum(used) + 3
    shape = (total, 2, case.page_size, WIDTH) if case.page_major else (total, case.page_size, WIDTH)
    storage = torch.empty(shape, dtype=dtype, device=device).normal_(generator=draw).mul_(case.scale)
    latents = storage[:, 1] if case.page_major else storage
    order = torch.randperm(total, generator=draw, device=device).int()
    table = torch.full((batch + 3, columns) if case.slotted else (batch, columns), NO_PAGE, dtype=torch.int32, device=device)
    where = torch.randperm(len(table), generator=draw, device=device)[:batch].tolist() if case.slotted else range(batch)
    seq_lens = torch.tensor(case.seq_lens, device=device)
    context_lens = (seq_lens - BLOCK).clamp(min=0)
    first = 0
    for request, count in enumerate(used):
        table[where[request], :count] = order[first : first + count]
        first += count
        if case.rising:
            latents[table[where[request], :count].long()] *= torch.linspace(0.1, 30, count, device=device)[:, None, None]
    if poison:
        alive = torch.zeros(total, case.page_size, dtype=torch.bool, device=device)
        for request, (start, end) in enumerate(spans(case, context_lens)):
            index = torch.arange(start, end, device=device)
            alive[table[where[request], index // case.page_size].long(), index % case.page_size] = True
        latents[~alive] = float("nan")
    queries = 3 / case.scale * torch.randn(batch, BLOCK, case.heads, WIDTH, generator=draw, device=device)
    slots = torch.where(seq_lens > 0, torch.tensor(where, device=device), -1) if case.slotted else None
    return Inputs(lay_out(case, queries.to(dtype)), latents, table, context_lens, seq_lens, slots)


def lay_out(case: Case, queries: torch.Tensor) -> torch.Tensor:
    """The same queries; in a case with rows apart, a row of NaN lies behind the heads of each block row."""
    return torch.nn.functional.pad(queries, (0, 0, 0, 1), value=float("nan"))[:, :, :-1] if case.apart else queries


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
        row = request if inputs.slots is None else int(inputs.slots[request])
        pages = inputs.page_table[row, index // case.page_size].long()
        keys = inputs.latents[pages, index % case.page_size].double()
        scores = (inputs.queries[request].double() @ keys.T) * WIDTH**-0.5
        if case.causal:
            last = inputs.context_lens[request] + torch.arange(BLOCK, device=out.device)
            scores = scores.masked_fill(index > last[:, None, None], float("-inf"))
        out[request] = torch.softmax(scores, -1) @ keys[:, :LATENT]
    return out


def launch(case: Case, inputs: Inputs, **options) -> torch.Tensor:
    """options: others of the CuTe `block_attention`."""
    from dspark_kernels.cute.block_attention import block_attention

    return block_attention(
        *inputs.arguments(),
        kv_lora_rank=LATENT,
        softmax_scale=WIDTH**-0.5,
        causal=case.causal,
        window=case.window,
        slots=inputs.slots,
        two_tiles=case.two_tiles,
        **options,
    )


def add_dummies(case: Case, inputs: Inputs) -> Inputs:
    """One request without keys in front, and some behind."""

    def around(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor[:1], tensor, tensor[:1], tensor[:1]])

    queries, context_lens, seq_lens = map(around, (inputs.queries, inputs.context_lens, inputs.seq_lens))
    table, slots = inputs.page_table, inputs.slots
    outside = torch.tensor([0, -2, -1], device=seq_lens.device)
    context_lens[outside] = 0
    seq_lens[outside] = 0
    if slots is None:
        table = around(table)
    else:
        slots = around(slots)
        slots[outside] = -1
    return Inputs(lay_out(case, queries), inputs.latents, table, context_lens, seq_lens, slots)


def check(case: Case) -> dict:
    """Errors over the largest and the root mean square value; whether bits repeat, with dummies, and in a graph."""
    from dspark_model.bench.timing import capture

    inputs = make_inputs(case, "cuda")
    out = launch(case, inputs)
    torch.cuda.synchronize()
    reference = expected(case, inputs)
    error = out.double() - reference
    largest = float(error.abs().max() / reference.abs().max().clamp(min=1e-30))
    mean = float(error.norm() / reference.norm().clamp(min=1e-30))
    same = {
        "again": all(torch.equal(launch(case, inputs), out) for _ in range(5)),
        "padded": torch.equal(launch(case, add_dummies(case, inputs))[1:-2], out),
    }
    kept: list[torch.Tensor] = []
    graph = capture(lambda: kept.append(launch(case, inputs)))
    kept[-1].fill_(float("nan"))
    graph.replay()
    same["graph"] = torch.equal(kept[-1], out)
    bound = 2.2e-3 if case.dtype == "bfloat16" else 4e-4  # the rounding of weights and outputs alone: 1.8e-3 and 2.2e-4
    passed = mean < bound and largest < 4 * bound and all(same.values())
    return {"passed": bool(passed), "largest": largest, "mean": mean, **same}


def measure(case: Case) -> dict:
    """Microseconds of one call under graph replay, pools in rotation; floors; time of each kernel by the profiler."""
    from dspark_model.bench.timing import capture, time_interleaved

    row = sum(case.seq_lens) * WIDTH * 2
    several = pools(case, math.ceil(ROTATED / row))
    copies = len(several)
    graph = capture(lambda: [launch(case, inputs) for inputs in several])
    flops = 2 * BLOCK * case.heads * sum(case.seq_lens) * (WIDTH + LATENT)
    floors = {"bytes": row / BYTES_PER_US, "flops": flops / FLOPS_PER_US}
    replays = max(1, int(3000 / ((10 + 1.3 * max(floors.values())) * copies)))
    timings = time_interleaved({"cute": graph.replay}, rounds=15, replays=replays, copies=copies)
    return {
        "us": asdict(timings["cute"]),
        "floors_us": floors,
        "pools": copies,
        "kernels_us": kernel_times(case, several[: min(6, copies)]),
    }


def pools(case: Case, copies: int) -> list[Inputs]:
    first = make_inputs(case, "cuda", poison=False)
    return [first, *(replace_latents(first) for _ in range(copies - 1))]


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
def work(wanted: list[dict], all_right: bool) -> None:
    """The child: one line of JSON a job.  Nothing is timed unless all checks are right."""
    torch.zeros(1, device="cuda")
    by_name = {case.name: case for case in cases()}
    for job in wanted:
        begin = time.monotonic()
        try:
            if job["kind"] == "check":
                result = check(by_name[job["case"]])
            else:
                result = measure(by_name[job["case"]]) if all_right else {}
        except Exception:  # reported, and the other jobs go on
            result = {"passed": False, "error": traceback.format_exc()[-1500:]}
        all_right = all_right and result.get("passed", True)
        torch.cuda.empty_cache()
        print(json.dumps({"job": job, "seconds": round(time.monotonic() - begin, 1), **result}), flush=True)


def supervise(wanted: list[dict], limit: float) -> list[dict]:
    """Runs the child, again after a job that hung or took the process down; that job is reported and left out."""
    results, left = [], list(wanted)
    while left:
        all_right = all(done.get("passed", True) for done in results)
        command = [sys.executable, __file__, "--work", json.dumps([left, all_right])]
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
    name = f"{result['job']['case']:32}"
    if "error" in result:
        print(name, "FAILED", result["error"], flush=True)
    elif "us" in result:
        us, floors = result["us"], result["floors_us"]
        print(
            f"{name} {us['median_us']:7.1f} us ({us['min_us']:.1f} to {us['max_us']:.1f})  floors {floors['bytes']:.1f} us "
            f"bytes, {floors['flops']:.1f} products; kernels {result['kernels_us']}  {result['seconds']} s",
            flush=True,
        )
    elif "mean" in result:
        print(
            f"{name} {'right' if result['passed'] else 'WRONG'}  mean {result['mean']:.2e} largest {result['largest']:.1e}  "
            f"same bits: again {result['again']}, padded {result['padded']}, graph {result['graph']}  {result['seconds']} s",
            flush=True,
        )
    else:
        print(name, "not timed: a check failed", flush=True)
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
    written = {"machine": describe(), "cases": described, "results": results}
    options.out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return 1 if any(not result.get("passed", True) for result in results) else 0


def describe() -> dict:
    from dspark_model.bench.timing import machine

    return machine()


if __name__ == "__main__":
    sys.exit(main())
