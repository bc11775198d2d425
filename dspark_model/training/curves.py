"""Curves of a training log."""

import json
from pathlib import Path


def draw_curves(log: Path, image: Path) -> None:
    """Loss, overlap and committed tokens per pass over the training seconds, as a PNG.  Needs matplotlib."""
    from matplotlib.figure import Figure

    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    checks = [row for row in rows if row["kind"] == "acceptance"]
    figure = Figure(figsize=(12, 4))
    loss, overlap, committed = figure.subplots(1, 3)
    seconds = [row["seconds"] for row in steps]
    loss.plot(seconds, [row["loss"] for row in steps])
    loss.set_title("loss")
    for name in ("overlap_first", "overlap_last"):
        overlap.plot(seconds, [row[name] for row in steps], label=name.removeprefix("overlap_") + " draft")
    overlap.set_title("1 - total variation")
    overlap.legend()
    committed.plot([row["seconds"] for row in checks], [row["committed"] for row in checks], marker="o")
    committed.set_title("committed tokens per pass, held-out text")
    for axis in (loss, overlap, committed):
        axis.set_xlabel("training seconds")
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(image, dpi=120)
