"""A training run in pieces: each call goes on from the state on disk, until the budget is used up."""

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from dspark_model.training.acceptance import Acceptance, measure_acceptance
from dspark_model.training.curves import draw_curves
from dspark_model.training.generate_text import TEXT_FILE
from dspark_model.training.new_drafter import export_drafter
from dspark_model.training.settings import DrafterShape, TrainingConfig
from dspark_model.training.text_store import Conversations, pack_rows
from dspark_model.training.trainer import Trainer

STATE_FILE = "training_state.pt"
LOG_FILE = "training_log.jsonl"
DRAFTER_FOLDER = "drafter"
# Steps at the start of a call whose time is compilation and warm-up, not training.
_WARM_STEPS = 3


@dataclass(frozen=True, slots=True)
class RunResult:
    """finished: the budget is used up; steps and seconds of training so far, over all calls; acceptance: of the last
    evaluation."""

    finished: bool
    steps: int
    seconds: float
    acceptance: Acceptance | None


def split_texts(texts: Conversations, held_out: int, seed: int) -> tuple[Conversations, Conversations]:
    """Texts to train on, and `held_out` greedy ones of a single exchange that are kept for evaluation."""
    candidates = np.flatnonzero(texts.greedy & (texts.turns == 1))
    if len(candidates) < held_out:
        raise ValueError(
            f"the text has {len(candidates)} greedy single exchanges, wanted {held_out} to hold out; generate more"
        )
    chosen = np.random.default_rng(seed).permutation(candidates)[:held_out]
    keep = np.ones(len(texts), bool)
    keep[chosen] = False
    return texts.select(np.flatnonzero(keep)), texts.select(chosen)


class _Log:
    def __init__(self, path: Path):
        self.path = path

    def write(self, kind: str, **values) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **values}) + "\n")


def train(
    model: nn.Module,
    out: Path,
    shape: DrafterShape,
    config: TrainingConfig,
    *,
    stop_after: float | None,
    called_at: float,
    start_from: Path | None = None,
    progress: bool = True,
) -> RunResult:
    """Train on `out`/text.safetensors; writes state, log, drafter and curves into `out`.

    stop_after: seconds after `called_at` (time.perf_counter) at which this call saves and returns even if the budget
    is not used up.
    start_from: a drafter whose weights a new run begins with; a run that goes on ignores it.
    """
    texts, held_out = split_texts(Conversations.load(out / TEXT_FILE), config.eval_sequences, config.seed)
    device = model.get_input_embeddings().weight.device
    data = pack_rows(texts, config.row_tokens, device, config.seed)
    trainer = Trainer(model, data, shape, config)
    log = _Log(out / LOG_FILE)
    if (out / STATE_FILE).exists():
        trainer.load(out / STATE_FILE)
    elif start_from is not None:
        trainer.start_from(start_from)
    log.write("call", step=trainer.steps_done, seconds=trainer.seconds, rows=len(data), fill=_fill(texts, config, data))
    deadline = None if stop_after is None else called_at + stop_after
    acceptance = _loop(trainer, held_out, log, out, deadline, progress)
    trainer.save(out / STATE_FILE)
    export_drafter(trainer.drafter, trainer.tap_scale).save_pretrained(out / DRAFTER_FOLDER)
    finished = trainer.progress >= 1.0
    draw_curves(out / LOG_FILE, out / "training_curves.png")
    return RunResult(finished, trainer.steps_done, trainer.seconds, acceptance)


def _fill(texts: Conversations, config: TrainingConfig, data) -> float:
    return round(len(texts.tokens) / (len(data) * config.row_tokens), 4)


def _loop(trainer: Trainer, held_out: Conversations, log: _Log, out: Path, deadline: float | None, progress: bool):
    config, acceptance = trainer.config, None
    warm = _WARM_STEPS
    began = mark = time.perf_counter()
    next_eval, next_save = trainer.seconds + config.eval_every_seconds, trainer.seconds + config.save_every_seconds
    with tqdm(total=100.0, unit="%", disable=not progress, bar_format="{l_bar}{bar}| {postfix}") as bar:
        while trainer.progress < 1.0 and (deadline is None or time.perf_counter() < deadline):
            metrics = trainer.step()
            if warm:
                warm -= 1
                _wait(trainer)
                if not warm:
                    log.write("warm", seconds=round(time.perf_counter() - began, 2), step=trainer.steps_done)
                mark = time.perf_counter()
                continue
            if trainer.steps_done % config.log_every == 0:
                values = metrics.to_floats()
                trainer.seconds, mark = trainer.seconds + time.perf_counter() - mark, time.perf_counter()
                _report(trainer, values, log, bar)
            else:
                now = time.perf_counter()
                trainer.seconds, mark = trainer.seconds + now - mark, now
            if trainer.seconds >= next_eval:
                acceptance = _evaluate(trainer, held_out, log)
                next_eval += config.eval_every_seconds
                mark = time.perf_counter()
            if trainer.seconds >= next_save:
                trainer.save(out / STATE_FILE)
                next_save += config.save_every_seconds
                mark = time.perf_counter()
    if trainer.progress >= 1.0:
        acceptance = _evaluate(trainer, held_out, log)
    return acceptance


def _wait(trainer: Trainer) -> None:
    if trainer.device.type == "cuda":
        torch.cuda.synchronize()


def _report(trainer: Trainer, values: dict, log: _Log, bar) -> None:
    facts = {"step": trainer.steps_done, "seconds": round(trainer.seconds, 2), "epoch": round(trainer.epoch, 3)}
    log.write("step", **facts, lr=round(trainer.lr_factor(), 5), **values)
    if not np.isfinite(values["loss"]):
        raise FloatingPointError(
            f"the loss is {values['loss']} at step {trainer.steps_done}; lower lr_matrix or lr_other and start again"
        )
    bar.n = round(100 * trainer.progress, 2)
    bar.set_postfix_str(f"step {trainer.steps_done} loss {values['loss']:.3f} overlap {values['overlap_first']:.3f}")


def _evaluate(trainer: Trainer, held_out: Conversations, log: _Log) -> Acceptance:
    began = time.perf_counter()
    acceptance = measure_acceptance(
        trainer.drafter,
        trainer.target,
        trainer.tap_scale,
        held_out,
        drafts=trainer.config.drafts,
        autocast_dtype=trainer.autocast_dtype,
    )
    facts = {"step": trainer.steps_done, "seconds": round(trainer.seconds, 2)}
    took = round(time.perf_counter() - began, 2)
    log.write("acceptance", **facts, **dataclasses.asdict(acceptance), took=took)
    return acceptance
