"""What an acceptance measurement leaves behind: a table on screen, JSON, Markdown and a picture."""

import dataclasses
import datetime
import hashlib
import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import dspark_model
from dspark_model.acceptance import Macro, SetReport, Timing, macro_means
from dspark_model.acceptance_run import TIE_MARGINS, Bench

FIGURE = "committed tokens / target passes, the prefill's token not counted, the last pass cut at the end of the text"
_HEADER = (
    "set",
    "prompts",
    "per pass",
    "by prompt",
    "accepted 1..{}, given those before",
    "look-up",
    "repeats",
    "ended",
    "ECE",
    "tok/s plain",
    "drafted",
    "speed-up",
    "equal/tied/wrong",
)


@dataclass(frozen=True, slots=True)
class Measurement:
    """A finished run: every set, their means, and with what and where it was measured."""

    sets: tuple[SetReport, ...]
    macro: Macro
    settings: dict[str, Any]
    machine: dict[str, Any]
    config: dict[str, Any]
    seconds: float

    @property
    def lossless(self) -> bool | None:
        """Whether every text is what plain decoding says, up to ties; None at a temperature above 0."""
        checks = [report.lossless for report in self.sets]
        return None if None in checks else all(check.holds for check in checks)

    @property
    def num_near_ties(self) -> int:
        return sum(report.lossless.near_ties for report in self.sets if report.lossless)


def finish(bench: Bench, reports: Sequence[SetReport], seconds: float) -> Measurement:
    """Add to the sets' reports what is common to them."""
    prompts = [{"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()} for path in bench.settings.prompts]
    settings = dataclasses.asdict(bench.settings) | {
        "drafter": _shown(bench.settings.drafter),
        "prompts": prompts,
        "dtype": str(bench.target.dtype).removeprefix("torch."),
        "num_drafts": bench.worker.num_drafts,
    }
    config = {
        "drafter": bench.worker.model.config.to_dict(),
        "pool": dataclasses.asdict(bench.worker.pool.config),
        "runtime": dataclasses.asdict(bench.worker.runtime),
        "in_force": bench.worker.describe(),
        "tie_margin": TIE_MARGINS[bench.target.dtype],
        "end_tokens": sorted(bench.end_tokens),
    }
    machine = describe_machine(bench.target.device)
    return Measurement(tuple(reports), macro_means(reports), settings, machine, config, seconds)


def describe_machine(device: torch.device) -> dict[str, Any]:
    """The machine and what ran on it."""
    import transformers

    return {
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dspark_model": dspark_model.__version__,
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def screen_table(result: Measurement) -> str:
    """One row per set and one of their means, and what to know to read them."""
    rows = _cells(result)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, *_notes(result)])


def markdown_table(result: Measurement) -> str:
    """The same as Markdown, ready for a README or a model card."""
    header, *rows = _cells(result)
    lines = [header, ("---",) * len(header), *rows]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join([table, "", *(f"- {note}" for note in _notes(result)), ""])


def write_files(result: Measurement, folder: Path) -> list[Path]:
    """Write acceptance.json, acceptance.md and acceptance.png into `folder`, creating it; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"acceptance.{kind}" for kind in ("json", "md", "png")]
    data = {"lossless": result.lossless, **dataclasses.asdict(result)}
    paths[0].write_text(json.dumps(data, indent=1, default=str) + "\n", encoding="utf-8")
    paths[1].write_text(markdown_table(result), encoding="utf-8")
    draw(result, paths[2])
    return paths


def draw(result: Measurement, path: Path) -> None:
    """Acceptance by position, and committed tokens per pass beside n-gram look-up."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    positions = range(1, len(result.macro.conditional) + 1)
    for report in result.sets:
        left.plot(positions, report.conditional, marker="o", markersize=4, linewidth=1.3, label=report.name)
    left.plot(positions, result.macro.conditional, color="black", linewidth=2.2, label="mean of sets")
    left.plot(positions, result.macro.unconditional, color="black", linestyle="--", label="mean, share of all passes")
    left.set(xlabel="position in the block", xticks=list(positions), ylim=(0, 1), title="accepted, given those before")
    left.grid(alpha=0.3)
    left.legend(fontsize=8)
    _draw_bars(right, result)
    figure.suptitle(_headline(result), fontsize=10)
    figure.savefig(path, dpi=130)


def _draw_bars(axes: Any, result: Measurement) -> None:
    groups = [*result.sets, result.macro]
    names = [report.name for report in result.sets] + ["mean of sets"]
    for offset, label, values in (
        (-0.2, "drafter", [group.committed_per_pass for group in groups]),
        (0.2, "n-gram prompt look-up, same texts", [group.lookup for group in groups]),
    ):
        bars = axes.bar([index + offset for index in range(len(groups))], values, width=0.38, label=label)
        axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=1)
    axes.axhline(1, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(groups)), names, fontsize=8, rotation=15)
    highest = max(max(group.committed_per_pass, group.lookup) for group in groups)
    axes.set(title="committed tokens per target pass", ylim=(0, 1.2 * highest + 0.2))
    axes.legend(fontsize=8, loc="upper left", ncols=2)


def _cells(result: Measurement) -> list[tuple[str, ...]]:
    """Header, sets and means as text."""
    header = tuple(cell.format(len(result.macro.conditional)) for cell in _HEADER)
    return [header, *map(_set_cells, result.sets), _macro_cells(result)]


def _set_cells(report: SetReport) -> tuple[str, ...]:
    check = report.lossless
    return (
        report.name,
        str(report.num_prompts),
        f"{report.committed_per_pass:.2f}",
        f"{report.committed_by_prompt:.2f}",
        _positions(report.conditional),
        f"{report.lookup:.2f}",
        f"{report.repeats:.2f}",
        f"{report.ended:.2f}",
        f"{report.calibration.ece:.3f}" if report.calibration else "-",
        *_speed_cells(report.single or report.batched),
        f"{check.equal}/{check.tied}/{len(check.unexcused)}" if check else "-",
    )


def _macro_cells(result: Measurement) -> tuple[str, ...]:
    macro, checks = result.macro, [report.lossless for report in result.sets if report.lossless]
    texts = (sum(c.equal for c in checks), sum(c.tied for c in checks), sum(len(c.unexcused) for c in checks))
    return (
        "mean of sets",
        str(sum(report.num_prompts for report in result.sets)),
        f"{macro.committed_per_pass:.2f}",
        f"{macro.committed_by_prompt:.2f}",
        _positions(macro.conditional),
        f"{macro.lookup:.2f}",
        f"{macro.repeats:.2f}",
        f"{macro.ended:.2f}",
        "-" if macro.ece is None else f"{macro.ece:.3f}",
        "-",
        "-",
        "-" if macro.speed_up is None else f"{macro.speed_up:.2f}x",
        "/".join(map(str, texts)) if checks else "-",
    )


def _speed_cells(timing: Timing | None) -> tuple[str, str, str]:
    return ("-", "-", "-") if timing is None else (f"{timing.plain:.1f}", f"{timing.drafted:.1f}", f"{timing.speed_up:.2f}x")


def _positions(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}".removeprefix("0") for value in values)


def _headline(result: Measurement) -> str:
    settings, machine = result.settings, result.machine
    mode = f"temperature {settings['temperature']:g}" if settings["temperature"] else "greedy"
    where = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} threads"
    return (
        f"{settings['target']}, {mode}, K = {settings['num_drafts']}, up to {settings['max_new_tokens']} new tokens, "
        f"{settings['dtype']}, {where}"
    )


def _notes(result: Measurement) -> list[str]:
    notes = [
        f"{_headline(result)}; torch {result.machine['torch']}, transformers {result.machine['transformers']}",
        f"per pass: {FIGURE}; pooled over the passes of all sets {result.macro.pooled:.2f}",
        "look-up: n-gram prompt look-up (n = 4..1, the same K) on the same texts; repeats: share of 8-grams that stand "
        "earlier in the answer; ended: answers that end before the limit",
    ]
    skipped = sum(report.num_skipped for report in result.sets)
    if skipped:
        notes.append(f"{skipped} prompts of more than {result.settings['max_prompt_tokens']} tokens were skipped")
    notes += _speed_notes(result)
    return notes + _lossless_notes(result)


def _speed_notes(result: Measurement) -> list[str]:
    timing = result.sets[0].single or result.sets[0].batched
    if timing is None:
        return []
    notes = [f"tok/s: decoding without the prefill, {timing.batch} at a time, the first {timing.num_prompts} of each set"]
    together = [report.batched for report in result.sets]
    if timing.batch != together[0].batch:
        rates = ", ".join(f"{one.plain:.0f} -> {one.drafted:.0f}" for one in together)
        notes.append(f"tok/s of all prompts, up to {together[0].batch} at a time: {rates}")
    return notes


def _lossless_notes(result: Measurement) -> list[str]:
    checks = [report.lossless for report in result.sets if report.lossless]
    if not checks:
        return ["drawn tokens: texts are not compared"]
    notes = [
        f"equal/tied/wrong: texts equal to plain greedy decoding, different from a tie on (best logits within "
        f"{checks[0].margin:g}), different without one; near ties: {result.num_near_ties} of "
        f"{sum(report.num_tokens for report in result.sets)} tokens"
    ]
    if checks[0].row_faults is not None:
        faults = sum(check.row_faults for check in checks)
        notes.append(f"the same rows run again: {faults} committed tokens are not the target's arg max")
    return notes


def _shown(path: Path) -> str:
    """A path as it was given, but one inside the package from the package on, wherever that is installed."""
    root = Path(dspark_model.__file__).parent.parent
    return str(path.relative_to(root) if path.is_relative_to(root) else path)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _commit() -> str | None:
    """The commit of the working tree that the package runs from, marked when files differ; None when there is none."""
    git = ["git", "-C", str(Path(dspark_model.__file__).parent)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", "__init__.py"], check=True, capture_output=True)
        found = subprocess.run([*git, "describe", "--always", "--dirty", "--abbrev=40"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.decode().strip()
