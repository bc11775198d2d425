"""The demo: SmolLM2-135M-Instruct with and without a drafter, on the same code, compared."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark_model.chat import chat_ids
from dspark_model.config import DrafterConfig
from dspark_model.config_keys import ConfigError
from dspark_model.generation import TIE_MARGIN, Generation, GreedyComparison, compare_greedy, generate, generate_plain
from dspark_model.kv_pool import LatentKVPool
from dspark_model.modeling import MLADSparkForCausalLM
from dspark_model.packing import pack_linears
from dspark_model.presets import Preset, load_config
from dspark_model.runtime import pool_dtype_for
from dspark_model.target import Target
from dspark_model.worker import DFlashWorker

DEMO_PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "A baker makes 24 muffins and sells them in boxes of 6 for $9 a box. How much money does he make? Reason step by step.",
    "Give me three tips for learning to play the guitar.",
)


@dataclass(frozen=True, slots=True)
class Demo:
    """A target, its tokenizer, and a worker that drafts for it."""

    target: Target
    tokenizer: Any
    worker: DFlashWorker
    drafter: Path


@dataclass(frozen=True, slots=True)
class DemoResult:
    """One prompt, decoded without and with the drafter."""

    prompt: str
    text: str
    plain: Generation
    drafted: Generation
    comparison: GreedyComparison


def load_demo(config: Path, overrides: Sequence[str] = (), *, drafter: Path | None = None, gguf: Path | None = None) -> Demo:
    """Load SmolLM2 as the target and a drafter for it: `drafter`, else the preset's `checkpoint.path`.  The linear
    layers of both are packed (`pack_linears`), which plain decoding gains from too.

    Raises:
        ConfigError: the preset has no `checkpoint.path`.
        FileNotFoundError: the drafter or the GGUF file is not there.
    """
    from dspark_model.smollm2 import load_smollm2
    from dspark_model.transformers_target import TransformersTarget

    preset = load_config(config, overrides)
    model, tokenizer = load_smollm2(gguf=gguf)
    folder = drafter or _preset_drafter(preset)
    taps = DrafterConfig.from_file(folder / "config.json").target_layer_ids
    room = preset.pool.max_positions + preset.pool.num_drafts + 1
    target = TransformersTarget(model, taps, max_requests=preset.pool.max_requests, max_positions=room)
    drafting = MLADSparkForCausalLM.from_pretrained(
        folder, lm_head=target.lm_head, target_embed_tokens=target.embed_tokens, dtype=target.dtype, device=target.device
    )
    target_layers, drafter_layers = pack_linears(model), drafting.pack_linears()
    print(f"linear layers with weights packed for few rows: {target_layers} of the target, {drafter_layers} of the drafter")
    pool_dtype = pool_dtype_for(preset.runtime.kv_dtype, target.dtype)
    pool = LatentKVPool(preset.pool, drafting.config, dtype=pool_dtype, device=target.device)
    return Demo(target, tokenizer, DFlashWorker(drafting, pool, preset.runtime), folder)


def _preset_drafter(preset: Preset) -> Path:
    if preset.checkpoint is None or preset.checkpoint.path is None:
        raise ConfigError("the demo needs a preset with checkpoint.path, or --drafter; download a repo's drafter first")
    return Path(preset.checkpoint.path)


def run_demo(demo: Demo, prompts: Sequence[str], *, max_new_tokens: int) -> list[DemoResult]:
    """Answer each prompt greedily, first without and then with the drafter."""
    end_tokens = {demo.tokenizer.eos_token_id}
    _warm_up(demo)
    results = []
    for prompt in prompts:
        ids = chat_ids(demo.tokenizer, prompt)
        options = {"max_new_tokens": max_new_tokens, "end_tokens": end_tokens}
        (plain,) = generate_plain(demo.target, [ids], **options)
        (drafted,) = generate(demo.target, demo.worker, [ids], **options)
        text = demo.tokenizer.decode(drafted.tokens, skip_special_tokens=True)
        results.append(DemoResult(prompt, text, plain, drafted, compare_greedy(plain, drafted)))
        _print_result(results[-1])
    return results


def _warm_up(demo: Demo) -> None:
    """Leave the first calls' one-off costs out of the times."""
    ids = chat_ids(demo.tokenizer, "Hi")
    generate_plain(demo.target, [ids], max_new_tokens=4)
    generate(demo.target, demo.worker, [ids], max_new_tokens=4)


def _print_result(result: DemoResult) -> None:
    plain, drafted = result.plain, result.drafted
    print(f"\n=== {result.prompt}\n{result.text.strip()}\n")
    print(f"  tokens           {len(drafted.tokens)}; {verdict(result.comparison)}")
    print(f"  committed        {drafted.committed_per_pass:.2f} tokens per target pass ({drafted.num_passes} passes)")
    print(
        f"  accepted draft   {'  '.join(f'{k + 1}: {rate}' for k, rate in enumerate(_rates(drafted)))}   (given those before)"
    )
    print(
        f"  decode time      {drafted.seconds:.2f} s with the drafter, {plain.seconds:.2f} s without: "
        f"{plain.seconds / max(drafted.seconds, 1e-9):.2f}x"
    )


def _rates(generation: Generation) -> list[str]:
    pairs = zip(generation.accepted, generation.offered, strict=True)
    return [f"{accepted / offered:.2f}" if offered else "-" for accepted, offered in pairs]


def verdict(comparison: GreedyComparison) -> str:
    """One line on whether two greedy texts are equal."""
    if comparison.equal:
        return "equal to plain greedy decoding"
    where = f"differs from plain greedy decoding from token {comparison.first_difference} on"
    if comparison.excused:
        return f"{where}, where the target's two best logits tie (margin {comparison.margin:.1e} < {TIE_MARGIN:g})"
    return f"{where}, and no tie excuses it"


def print_report(results: Sequence[DemoResult]) -> int:
    """Print the totals; returns the exit status: 1 if a text differs without a tie to excuse it."""
    passes = sum(result.drafted.num_passes for result in results)
    committed = sum(sum(result.drafted.committed) for result in results)
    plain = sum(result.plain.seconds for result in results)
    drafted = sum(result.drafted.seconds for result in results)
    equal = sum(result.comparison.equal for result in results)
    ties = sum(not result.comparison.equal and result.comparison.excused for result in results)
    near = sum(result.drafted.near_ties() for result in results)
    print(f"\n{len(results)} prompts: {equal} texts equal, {ties} differ from a tie on, {len(results) - equal - ties} wrong")
    print(f"near ties of the target (margin below {TIE_MARGIN:g}): {near} tokens")
    print(f"committed per target pass: {committed / max(passes, 1):.2f}")
    print(f"decode time: {drafted:.2f} s with the drafter, {plain:.2f} s without ({plain / max(drafted, 1e-9):.2f}x)")
    return 0 if equal + ties == len(results) else 1
