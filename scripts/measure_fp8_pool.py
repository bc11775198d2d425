#!/usr/bin/env python3
"""Measure what a pool's dtype costs in accuracy: rows and attended rows against the unquantised pool, over prompts.

usage: measure_fp8_pool.py --prompts FILE... [--limit N] [--max-new-tokens N]
Drafts with SmolLM2 and the shipped drafter in float32 on a CPU, keeps the queries and keys of every attention call of the
drafter, and attends again in float64 to the keys as each format would hold them.  Prints one line a format: relative errors
(length of the difference over length) of the latent part, the rotary part and the attended row, mean and largest.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from dspark_model import ops
from dspark_model.acceptance_run import AcceptanceSettings, load_bench
from dspark_model.generation import generate
from dspark_model.shipped import shipped_drafter

# One call: queries [rows, D], keys [rows, D], kv_lora_rank, softmax scale.
Call = tuple[torch.Tensor, torch.Tensor, int, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, metavar="FILE")
    parser.add_argument("--limit", type=int, default=1, help="prompts of each file (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()
    settings = AcceptanceSettings(
        drafter=shipped_drafter(), prompts=tuple(options.prompts), limit=options.limit, max_new_tokens=options.max_new_tokens
    )
    calls = recorded_calls(settings)
    print(f"{len(calls)} calls, {min(len(keys) for _, keys, *_ in calls)} to {max(len(keys) for _, keys, *_ in calls)} keys")
    print(f"{'format':28}{'latent':>18}{'rotary':>18}{'attended':>18}")
    for name, kept in FORMATS.items():
        errors = zip(*(errors_of(call, kept) for call in calls), strict=True)
        print(f"{name:28}" + "".join(f"{100 * e.mean():9.2f} {100 * e.max():7.2f}%" for e in map(torch.cat, errors)))


def recorded_calls(settings: AcceptanceSettings) -> list[Call]:
    """What the drafter attends with while it drafts the settings' prompts."""
    attend, calls = ops.block_attention, []

    def recording(queries, latents, page_table, context_lens, seq_lens, *, kv_lora_rank, softmax_scale, **options):
        count = int(seq_lens[0])
        keys = latents[page_table[0, : -(-count // latents.shape[1])].long()].flatten(0, 1)[:count]
        calls.append((queries[0].flatten(0, 1).clone(), keys.clone(), kv_lora_rank, softmax_scale))
        options |= {"kv_lora_rank": kv_lora_rank, "softmax_scale": softmax_scale}
        return attend(queries, latents, page_table, context_lens, seq_lens, **options)

    bench = load_bench(settings)
    ops.block_attention = recording
    for prompts in bench.sets:
        for prompt in prompts.prompts:
            options = {"max_new_tokens": settings.max_new_tokens, "end_tokens": bench.end_tokens}
            generate(bench.target, bench.worker, [prompt], **options)
    return calls


def errors_of(call: Call, kept: Callable[[torch.Tensor, int], torch.Tensor]) -> list[torch.Tensor]:
    """Relative errors of the keys' two parts and of the attended rows."""
    queries, keys, rank, scale = call
    held = kept(keys, rank)
    pairs = [(held[:, :rank], keys[:, :rank]), (held[:, rank:], keys[:, rank:])]
    pairs.append(tuple(attended(queries, some, rank, scale) for some in (held, keys)))
    return [(ours.double() - exact).norm(dim=-1) / exact.double().norm(dim=-1) for ours, exact in pairs]


def attended(queries: torch.Tensor, keys: torch.Tensor, rank: int, scale: float) -> torch.Tensor:
    weights = torch.softmax(queries.double() @ keys.double().T * scale, -1)
    return weights @ keys[:, :rank].double()


def by_largest(rows: torch.Tensor, top: float, cast: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Rows through `cast` at the scale that makes each row's largest magnitude `top`."""
    scale = rows.abs().amax(-1, keepdim=True).clamp(min=1e-30) / top
    return cast(rows / scale) * scale


def in_parts(rows: torch.Tensor, rank: int, top: float, cast: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return torch.cat([by_largest(part, top, cast) for part in (rows[:, :rank], rows[:, rank:])], -1)


def e4m3(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float8_e4m3fn).float()


FORMATS = {
    "bfloat16": lambda rows, rank: rows.bfloat16().float(),
    "fp8_e4m3, as in the pool": lambda rows, rank: ops.dequantise_rows(ops.quantise_rows(rows), rows.shape[-1]),
    "e4m3, largest / 448": lambda rows, rank: by_largest(rows, 448, e4m3),
    "e4m3, a scale for each part": lambda rows, rank: in_parts(rows, rank, 448, e4m3),
    "int8, largest / 127": lambda rows, rank: by_largest(rows, 127, torch.round),
    "int8, a scale for each part": lambda rows, rank: in_parts(rows, rank, 127, torch.round),
}


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
