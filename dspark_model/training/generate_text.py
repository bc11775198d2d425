"""The target writes the training text: `generate` runs a `SlotWriter` until time or count is used up."""

import dataclasses
import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from dspark_model.training.chat_format import ChatFormat, Job, JobSource, read_chat_format, read_turns
from dspark_model.training.decode_model import DecodeModel
from dspark_model.training.overlap import ExcludedRuns, excluded_runs, remove_overlap
from dspark_model.training.settings import GenerationConfig
from dspark_model.training.slot_writer import SlotWriter, WrittenText
from dspark_model.training.text_store import Conversations, conversations_from_lists

TEXT_FILE = "text.safetensors"


@dataclass(frozen=True, slots=True)
class WritingRun:
    """texts in the order in which they ended; seconds of decoding; steps taken."""

    texts: list[WrittenText]
    seconds: float
    steps: int


def write_texts(
    model: nn.Module, chat: ChatFormat, jobs, config: GenerationConfig, *, max_texts: int, progress: bool = True
) -> WritingRun:
    """Decode the conversations of the iterator `jobs` with all slots busy; stops after `config.seconds`, after
    `max_texts` texts or when the jobs and slots have run out.  Texts that are unfinished then are dropped."""
    device = model.get_input_embeddings().weight.device
    decode = DecodeModel(
        model,
        config.slots,
        config.sequence_length,
        config.decode_attention,
        compile_model=config.compile_target,
    )
    with decode:
        writer = SlotWriter(decode, chat, config, device)
        writer.prefill_head()
        step = _captured(writer) if config.cuda_graph and device.type == "cuda" else writer.step
        return _run(writer, step, iter(jobs), config, max_texts, progress)


def _captured(writer: SlotWriter):
    """A CUDA graph of one step.  Slots are all done meanwhile, so that the warm-up writes no text."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            writer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        writer.step()
    return graph.replay


def _run(writer: SlotWriter, step, jobs, config: GenerationConfig, max_texts: int, progress: bool) -> WritingRun:
    texts: list[WrittenText] = []
    start, steps = time.perf_counter(), 0
    with tqdm(total=max_texts, unit="text", disable=not progress) as bar:
        while True:
            slots, written = writer.finished()
            texts += written
            bar.update(len(written))
            elapsed = time.perf_counter() - start
            if len(texts) >= max_texts or elapsed > config.seconds:
                return WritingRun(texts[:max_texts], elapsed, steps)
            fresh = _take(jobs, len(slots))
            if fresh:
                writer.refill(slots[: len(fresh)], fresh)
            elif len(slots) == config.slots:
                return WritingRun(texts, elapsed, steps)
            for _ in range(config.check_every):
                step()
            steps += config.check_every


def _take(jobs, count: int) -> list[Job]:
    return [job for _, job in zip(range(count), jobs, strict=False)]


def pack_texts(texts: list[WrittenText]) -> Conversations:
    """The texts as one store."""
    return conversations_from_lists(
        [t.tokens for t in texts], [t.answer for t in texts], [t.greedy for t in texts], [t.turns for t in texts]
    )


def generate(
    model: nn.Module, tokenizer, out: Path, prompt_files: list[Path], exclude: list[Path], config: GenerationConfig
) -> dict:
    """Write `out`/text.safetensors and `out`/generation.json, whose content is returned.

    prompt_files: JSONL files whose first turns open conversations; exclude: JSONL files of evaluation prompts, texts
    that share a run of `config.ngram` tokens with one of them are removed (see `overlap`).
    """
    chat = read_chat_format(tokenizer)
    prompts = [turns[0] for path in prompt_files for turns in read_turns(path)]
    torch.manual_seed(config.seed)
    run = write_texts(model, chat, JobSource(chat, tokenizer, prompts, config), config, max_texts=config.max_sequences)
    written = pack_texts(run.texts)
    runs: list[ExcludedRuns] = [excluded_runs(path, tokenizer, config.ngram) for path in exclude]
    kept, overlap = remove_overlap(written, runs, config.ngram)
    out.mkdir(parents=True, exist_ok=True)
    kept.save(out / TEXT_FILE)
    report = {
        **_facts(kept, chat, run),
        "overlap": dataclasses.asdict(overlap),
        "ngram": config.ngram,
        "settings": dataclasses.asdict(config),
        "prompt_files": [path.name for path in prompt_files],
    }
    (out / "generation.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def _facts(kept: Conversations, chat: ChatFormat, run: WritingRun) -> dict:
    answers = int(kept.answer.sum())
    last = kept.tokens[kept.offsets[1:] - 1] if len(kept) else np.zeros(0)
    return {
        "texts": len(kept),
        "texts_written": len(run.texts),
        "tokens": len(kept.tokens),
        "answer_tokens": answers,
        "seconds": round(run.seconds, 2),
        "steps": run.steps,
        "answer_tokens_per_second": round(sum(int(t.answer.sum()) for t in run.texts) / max(run.seconds, 1e-9)),
        "ended_by_end_of_turn": round(float((last == chat.end_of_turn).mean()), 3) if len(kept) else 0.0,
        "turns": {str(k): v for k, v in sorted(Counter(kept.turns.tolist()).items())},
    }
