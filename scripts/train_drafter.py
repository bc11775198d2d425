"""Generate text with a target, train a drafter on it, measure its acceptance, all in one --out folder.

A `train` call that stops before its budget is used up goes on when the same command is given again.

python scripts/train_drafter.py generate --out out/run --target smollm2 --prompts train.jsonl --exclude eval.jsonl
python scripts/train_drafter.py train --out out/run --target smollm2 --seconds-total 1200 --stop-after 540   # repeat
python scripts/train_drafter.py evaluate --out out/run --target smollm2 --prompts eval.jsonl
"""

import argparse
import dataclasses
import json
import sys
import time
import types
import typing
from pathlib import Path

import torch

from dspark_model.training.evaluate_prompts import evaluate_prompts
from dspark_model.training.generate_text import generate
from dspark_model.training.run import train
from dspark_model.training.settings import DrafterShape, GenerationConfig, TrainingConfig

CALLED_AT = time.perf_counter()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def add_fields(parser: argparse.ArgumentParser, settings: type) -> None:
    """A flag for each field of a settings class, `--max-user-tokens` for max_user_tokens; booleans as --x / --no-x."""
    hints = typing.get_type_hints(settings)
    for field in dataclasses.fields(settings):
        flag, kind = "--" + field.name.replace("_", "-"), hints[field.name]
        if isinstance(kind, types.UnionType):
            kind = typing.get_args(kind)[0]
        if kind is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=field.default)
        elif typing.get_origin(kind) is tuple:
            parser.add_argument(flag, type=int, nargs="+", default=field.default)
        else:
            parser.add_argument(flag, type=kind, default=field.default, help=f"default {field.default}")


def read_fields(arguments: argparse.Namespace, settings: type, **changes):
    """The settings object of the parsed flags."""
    values = {field.name: vars(arguments)[field.name] for field in dataclasses.fields(settings)}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return settings(**{**values, **changes})


def load_target(arguments: argparse.Namespace):
    """The target (frozen) and its tokenizer."""
    dtype = DTYPES[arguments.dtype]
    if arguments.target == "smollm2":
        from dspark_model.smollm2 import load_smollm2

        return load_smollm2(dtype, arguments.device, gguf=arguments.gguf)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=dtype, attn_implementation="sdpa")
    return model.to(arguments.device).eval().requires_grad_(False), AutoTokenizer.from_pretrained(arguments.target)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    on_cuda = torch.cuda.is_available()
    for name in ("generate", "train", "evaluate"):
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, required=True, help="folder of the run")
        command.add_argument("--target", required=True, help="smollm2, or a folder or repo of a causal LM")
        command.add_argument("--gguf", type=Path, help="GGUF file for --target smollm2; default: the installed package's")
        command.add_argument("--device", default="cuda" if on_cuda else "cpu")
        command.add_argument("--dtype", choices=DTYPES, default="bfloat16" if on_cuda else "float32")
        if name != "train":
            needed = name == "evaluate"
            command.add_argument("--prompts", type=Path, nargs="+", default=[], required=needed, help="JSONL files of prompts")
            add_fields(command, GenerationConfig)
        if name == "generate":
            command.add_argument("--exclude", type=Path, nargs="+", default=[], help="JSONL files kept for evaluation")
        if name == "train":
            add_fields(command, DrafterShape)
            add_fields(command, TrainingConfig)
            command.add_argument("--start-from", type=Path, help="drafter whose weights a new run begins with")
            command.add_argument("--stop-after", type=float, help="seconds after which this call saves and stops")
        if name == "evaluate":
            command.add_argument("--num-prompts", type=int, default=80, help="prompts of each file")
            command.add_argument("--drafter", type=Path, help="default: the one in --out")
    return parser.parse_args(arguments)


def main(given: list[str] | None = None) -> int:
    arguments = parse(given)
    model, tokenizer = load_target(arguments)
    if arguments.command == "generate":
        config = read_fields(arguments, GenerationConfig)
        report = generate(model, tokenizer, arguments.out, arguments.prompts, arguments.exclude, config)
        print(json.dumps({name: value for name, value in report.items() if name != "settings"}, indent=2))
    elif arguments.command == "train":
        budget = {"seconds_total": None} if arguments.steps is not None else {}
        config = read_fields(arguments, TrainingConfig, **budget)
        shape = read_fields(arguments, DrafterShape)
        result = train(
            model,
            arguments.out,
            shape,
            config,
            stop_after=arguments.stop_after,
            called_at=CALLED_AT,
            start_from=arguments.start_from,
        )
        print(json.dumps(dataclasses.asdict(result)))
        print("finished" if result.finished else "not finished: run the same command again to go on")
    else:
        drafter = arguments.drafter or arguments.out / "drafter"
        config = read_fields(arguments, GenerationConfig)
        results = evaluate_prompts(model, tokenizer, drafter, arguments.prompts, arguments.num_prompts, config)
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "acceptance.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        print(json.dumps(results, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
