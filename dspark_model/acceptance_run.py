"""Measuring a drafter: prompt files through the target, with and without it, to one `SetReport` each."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dspark_model.acceptance import SetReport, Timing, check_lossless, speed, summarize
from dspark_model.chat import chat_ids
from dspark_model.config import DrafterConfig
from dspark_model.generation import TIE_MARGIN, Generation, generate, generate_plain
from dspark_model.kv_pool import LatentKVPool
from dspark_model.modeling import MLADSparkForCausalLM
from dspark_model.packing import pack_linears
from dspark_model.presets import load_runtime
from dspark_model.runtime import pool_dtype_for
from dspark_model.sampling import SamplingParams
from dspark_model.serving_config import PoolConfig, RuntimeConfig
from dspark_model.target import Target
from dspark_model.worker import DFlashWorker

SMOLLM2 = "smollm2"
PREFILL_CHUNK = 512
_PAGE_SIZE = 32

# Another number of rows rounds the target's logits differently, and a plain pass has 1 row a text, a verifying one K + 1.
# On 80 tokens of SmolLM2 on a CPU (best logit 14 to 41, median 27) the gap of the two best logits moved between 1 and 8 rows
# by up to 3e-5 in float32, and in bfloat16 by 0.125 (median), 0.25 (90 %) and 0.625 (largest).  Texts part where the gap
# changes its sign, so that the smaller of the two gaps is at most half of the move.  The 16-bit types therefore get two of
# their steps at 32 to 64, where the largest logits lie: 2 x 2^-2 and 2 x 2^-5.
TIE_MARGINS = {torch.float32: TIE_MARGIN, torch.bfloat16: 0.5, torch.float16: 0.0625}


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceSettings:
    """What to measure.

    target: "smollm2", or what `transformers` loads (a folder or a repo id).  gguf: SmolLM2's file, None for the package's.
    drafter: checkpoint folder.  prompts: JSONL files.  limit: first prompts of each file that are taken; those of them with
        more than max_prompt_tokens tokens are skipped, and counted.
    batch: prompts decoded at once.  timed: with a batch above 1, first prompts of each set that are also run one at a time
        for the speeds.  verify_rows: also run each drafted text through the target again, in the same rows.
    dtype: None is float32 on a CPU and bfloat16 elsewhere.  num_drafts: None is the drafter's block_size, or 7.
    runtime: overrides "runtime.KEY=VALUE".
    """

    target: str = SMOLLM2
    gguf: Path | None = None
    drafter: Path
    prompts: tuple[Path, ...]
    max_new_tokens: int = 256
    limit: int = 80
    max_prompt_tokens: int = 1024
    temperature: float = 0.0
    seed: int = 0
    batch: int = 1
    timed: int = 1
    verify_rows: bool = False
    device: str = "cpu"
    dtype: str | None = None
    num_drafts: int | None = None
    runtime: tuple[str, ...] = ()

    def __post_init__(self):
        for name, least in (("max_new_tokens", 2), ("limit", 1), ("max_prompt_tokens", 1), ("batch", 1), ("timed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted at least {least}")
        if not self.prompts:
            raise ValueError("no prompt file was given; name at least one JSONL file")
        if torch.device(self.device).type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device is {self.device}, but torch finds no CUDA device here; use cpu")
        if self.torch_dtype not in TIE_MARGINS:
            raise ValueError(f"dtype is {self.dtype}, wanted float32, bfloat16 or float16")
        if self.verify_rows and self.temperature:
            raise ValueError("verify_rows checks arg maxima; it needs temperature 0")

    @property
    def torch_dtype(self) -> torch.dtype | None:
        default = "float32" if torch.device(self.device).type == "cpu" else "bfloat16"
        return getattr(torch, self.dtype or default, None)

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, seed=self.seed)


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Token ids of a file's prompts; num_skipped: those that were too long."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    num_skipped: int


@dataclass(frozen=True, slots=True)
class Bench:
    """All that is loaded: a target and a worker that have room for the prompt sets."""

    settings: AcceptanceSettings
    target: Target
    worker: DFlashWorker
    end_tokens: frozenset[int]
    sets: tuple[PromptSet, ...]


def load_bench(settings: AcceptanceSettings) -> Bench:
    """Load target, drafter and prompts, and size the caches for the longest prompt.

    Raises:
        ValueError, ConfigError, CheckpointError, FileNotFoundError: something does not load or fit; the message says what.
    """
    runtime = load_runtime(settings.runtime)
    config = DrafterConfig.from_file(settings.drafter / "config.json")
    model, tokenizer = _load_target(settings)
    sets = tuple(read_prompts(path, tokenizer, settings.limit, settings.max_prompt_tokens) for path in settings.prompts)
    longest = max(len(prompt) for one in sets for prompt in one.prompts) + settings.max_new_tokens
    target, worker = _build(settings, model, config, runtime, longest)
    return Bench(settings, target, worker, _end_tokens(model, tokenizer), sets)


def read_prompts(path: Path, tokenizer: Any, limit: int, max_tokens: int) -> PromptSet:
    """The first turns of the first `limit` lines {"turns": [...]} through the tokenizer's chat template.

    Raises:
        ValueError: a line has another form, the tokenizer has no chat template, or no prompt is left.
        FileNotFoundError: there is no such file.
    """
    if not tokenizer.chat_template:
        raise ValueError("the target's tokenizer has no chat template; take a chat model, or add one to its tokenizer folder")
    turns = [turn for turn, _ in zip(_first_turns(path), range(limit), strict=False)]
    prompts = [tuple(chat_ids(tokenizer, turn)) for turn in turns]
    kept = tuple(prompt for prompt in prompts if len(prompt) <= max_tokens)
    if not kept:
        raise ValueError(f"{path}: none of {len(prompts)} prompts has at most {max_tokens} tokens; raise max_prompt_tokens")
    return PromptSet(path.stem, kept, len(prompts) - len(kept))


def measure_set(bench: Bench, prompts: PromptSet) -> SetReport:
    """Decode a set with the drafter and, at temperature 0, without it; then compare and count."""
    settings, plain, drafted, faults = bench.settings, [], [], 0
    greedy = settings.temperature == 0
    for first in range(0, len(prompts.prompts), settings.batch):
        some = prompts.prompts[first : first + settings.batch]
        if greedy:
            plain += _decode(bench, some, drafting=False)
        texts = _decode(bench, some, drafting=True)
        drafted += texts
        if settings.verify_rows:
            faults += row_faults(bench.target, some, texts, bench.worker.num_drafts)
    margin = TIE_MARGINS[bench.target.dtype]
    together = speed(plain, drafted, settings.batch) if greedy else None
    return summarize(
        prompts.name,
        prompts.prompts,
        drafted,
        end_tokens=bench.end_tokens,
        num_skipped=prompts.num_skipped,
        lossless=check_lossless(plain, drafted, margin, faults if settings.verify_rows else None) if greedy else None,
        batched=together,
        single=together if settings.batch == 1 else _time_single(bench, prompts.prompts[: settings.timed]),
    )


def warm_up(bench: Bench) -> None:
    """Leave the first calls' one-off costs out of the speeds."""
    prompt = bench.sets[0].prompts[0]
    generate_plain(bench.target, [prompt], max_new_tokens=4)
    generate(bench.target, bench.worker, [prompt], max_new_tokens=16)


@torch.inference_mode()
def row_faults(target: Target, prompts: Sequence[Sequence[int]], texts: Sequence[Generation], num_drafts: int) -> int:
    """Run one batch of greedy drafted texts through the target again, in the passes and rows in which they were verified,
    and count the tokens whose logit is not the largest.

    Row counts, starts and slots are those of the drafted run, and a row does not depend on what stands in rejected rows.
    So there is no tie to excuse: a fault means that the run committed what the target did not say, or that a cache row was
    not rolled back.
    """
    faults = torch.zeros((), dtype=torch.int64, device=target.device)
    for slot, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        for start in range(0, len(prompt), PREFILL_CHUNK):
            chunk = [list(prompt[start : start + PREFILL_CHUNK])]
            logits = target.forward(*_tensors(target, chunk, [slot], [start]), last_logits_only=True).logits
        faults += _count_faults(logits, _tensors(target, [text.tokens[:1]])[0])
    done = [1] * len(texts)
    for step in range(max(text.num_passes for text in texts)):
        slots = [slot for slot, text in enumerate(texts) if text.num_passes > step]
        starts, read, said = [], [], []
        for slot in slots:
            begin, end = done[slot], done[slot] + texts[slot].committed[step]
            starts.append(len(prompts[slot]) + begin - 1)
            read.append(_padded(texts[slot].tokens[begin - 1 : end - 1], num_drafts + 1, 0))
            said.append(_padded(texts[slot].tokens[begin:end], num_drafts + 1, -1))
            done[slot] = end
        logits = target.forward(*_tensors(target, read, slots, starts)).logits
        faults += _count_faults(logits, _tensors(target, said)[0])
    return int(faults)


def _count_faults(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Tokens [B, N] that are below the best of logits [B, N, V]; a negative one is none."""
    own = logits.gather(-1, tokens.clamp(min=0)[..., None])[..., 0]
    return ((own < logits.amax(-1)) & (tokens >= 0)).sum()


def _padded(tokens: list[int], width: int, filler: int) -> list[int]:
    return tokens + [filler] * (width - len(tokens))


def _tensors(target: Target, *values: list) -> list[torch.Tensor]:
    return [torch.tensor(value, dtype=torch.int64, device=target.device) for value in values]


def _decode(bench: Bench, prompts: Sequence[Sequence[int]], *, drafting: bool) -> list[Generation]:
    options = {
        "max_new_tokens": bench.settings.max_new_tokens,
        "end_tokens": bench.end_tokens,
        "sampling": bench.settings.sampling,
        "prefill_chunk": PREFILL_CHUNK,
    }
    if drafting:
        return generate(bench.target, bench.worker, prompts, **options)
    return generate_plain(bench.target, prompts, **options)


def _time_single(bench: Bench, prompts: Sequence[Sequence[int]]) -> Timing | None:
    if bench.settings.temperature or not prompts:
        return None
    plain = [text for prompt in prompts for text in _decode(bench, [prompt], drafting=False)]
    drafted = [text for prompt in prompts for text in _decode(bench, [prompt], drafting=True)]
    return speed(plain, drafted, 1)


def _first_turns(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                turn = json.loads(line)["turns"][0]
            except (json.JSONDecodeError, KeyError, IndexError, TypeError):
                turn = None
            if not isinstance(turn, str) or not turn:
                raise ValueError(f'{path}, line {number}: wanted {{"turns": [TEXT, ...]}}, got {line.strip()[:80]!r}')
            yield turn


def _load_target(settings: AcceptanceSettings) -> tuple[torch.nn.Module, Any]:
    if settings.target == SMOLLM2:
        from dspark_model.smollm2 import load_smollm2

        return load_smollm2(settings.torch_dtype, settings.device, gguf=settings.gguf)
    if settings.gguf is not None:
        raise ValueError(f"a GGUF file is for target {SMOLLM2} only, but the target is {settings.target}; leave one out")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(settings.target, dtype=settings.torch_dtype, attn_implementation="sdpa")
    return model.to(settings.device).eval().requires_grad_(False), AutoTokenizer.from_pretrained(settings.target)


def _end_tokens(model: torch.nn.Module, tokenizer: Any) -> frozenset[int]:
    named = model.generation_config.eos_token_id
    ids = named if isinstance(named, list) else [named]
    return frozenset(token for token in (*ids, tokenizer.eos_token_id) if token is not None)


def _build(
    settings: AcceptanceSettings, model: torch.nn.Module, config: DrafterConfig, runtime: RuntimeConfig, longest: int
) -> tuple[Target, DFlashWorker]:
    """Target, drafter, pool and worker for `batch` texts of at most `longest` tokens; on a CPU with packed linear layers."""
    from dspark_model.transformers_target import TransformersTarget

    num_drafts = settings.num_drafts or config.block_size or 7
    target = TransformersTarget(
        model, config.target_layer_ids, max_requests=settings.batch, max_positions=longest + num_drafts + 1
    )
    drafter = MLADSparkForCausalLM.from_pretrained(
        settings.drafter,
        lm_head=target.lm_head,
        target_embed_tokens=target.embed_tokens,
        dtype=settings.torch_dtype,
        device=settings.device,
    )
    pack_linears(model)
    drafter.pack_linears()
    pages = -(-(longest + config.block_rows(num_drafts)) // _PAGE_SIZE)
    size = PoolConfig(
        page_size=_PAGE_SIZE,
        num_pages=settings.batch * pages,
        max_requests=settings.batch,
        max_positions=longest,
        num_drafts=num_drafts,
    )
    dtype = pool_dtype_for(runtime.kv_dtype, drafter.dtype)
    pool = LatentKVPool(size, drafter.config, dtype=dtype, device=settings.device)
    return target, DFlashWorker(drafter, pool, runtime)
