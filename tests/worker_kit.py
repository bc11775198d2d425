"""What the worker's tests share: a scripted target, a bench that holds each step against the dense reference, snapshots."""

import dataclasses
import hashlib

import torch
from worker_reference import DenseDrafter

from dspark_model.external_pool import ExternalLatentPool
from dspark_model.kv_pool import LatentKVPool
from dspark_model.ops import pool_row_width
from dspark_model.serving_config import PoolConfig, RuntimeConfig
from dspark_model.step_io import ContextChunk, GenerationRows, StepInput
from dspark_model.testing import random_model, tiny_config
from dspark_model.worker import DFlashWorker

# Products this small only lose by being split over threads.
torch.set_num_threads(1)

# The same algorithm in float32 differs from the float64 reference by less than this in latents and logits of the tiny
# drafter; ids have to agree wherever the two best logits are further apart than TIE_MARGIN.
BOUND = 2e-4
TIE_MARGIN = 2e-3


class FakeTarget:
    """A target whose hidden row depends on the token and its position, and that agrees with as many drafts as asked."""

    def __init__(self, width: int, vocab_size: int, dtype: torch.dtype = torch.float32, seed: int = 11):
        generator = torch.Generator().manual_seed(seed)
        self.vocab_size, self.dtype = vocab_size, dtype
        self._by_token = torch.randn(vocab_size, width, generator=generator)
        self._wave = torch.rand(width, generator=generator)

    def rows(self, tokens: list[int], start: int) -> torch.Tensor:
        """Hidden rows of tokens at positions start, start + 1, ...: [n, T * E]."""
        positions = torch.arange(start, start + len(tokens)).float()
        wave = torch.cos(positions[:, None] * self._wave)
        return (self._by_token[torch.tensor(tokens, dtype=torch.int64)] + wave).to(self.dtype)


def prompt(length: int, seed: int = 0, vocab_size: int = 320) -> list[int]:
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(1000 + seed)).tolist()


@dataclasses.dataclass
class Script:
    """One request as its caller sees it: the tokens whose hidden rows the worker has, the anchor and the drafts behind."""

    tokens: list[int]
    anchor: int = -1
    drafts: list[int] = dataclasses.field(default_factory=list)


class Bench:
    """A worker with a scripted target; every step's output can be held against the dense reference."""

    def __init__(self, config=None, *, seed=0, num_drafts=None, runtime=None, pool=None, dtype=torch.float32, **pool_changes):
        self.config = config or tiny_config()
        self.model = random_model(self.config, seed, dtype)
        self.dense = DenseDrafter(self.model)
        self.pool = pool or make_pool(self.config, dtype=dtype, **pool_changes)
        self.worker = DFlashWorker(self.model, self.pool, runtime or RuntimeConfig.plain(), num_drafts=num_drafts)
        self.target = FakeTarget(self.config.context_width, self.config.vocab_size, dtype)
        self.scripts: dict = {}

    @property
    def k(self) -> int:
        return self.worker.num_drafts

    def admit(self, key, text: list[int], *, max_context=None, prefix=None) -> None:
        self.worker.admit(key, max_context=max_context, prefix=prefix)
        self.scripts[key] = Script(list(text))

    def release(self, key) -> None:
        self.worker.release(key)
        del self.scripts[key]

    def taps(self, key, length: int | None = None) -> torch.Tensor:
        return self.target.rows(self.scripts[key].tokens[:length], 0)

    def chunk(self, key, start: int = 0, end: int | None = None, **fields) -> ContextChunk:
        """Rows start .. end of the text; the anchor comes with the last ones."""
        tokens = self.scripts[key].tokens
        end = len(tokens) if end is None else end
        anchor = (7 * len(tokens) + 3) % self.config.vocab_size if end == len(tokens) else None
        rows = self.target.rows(tokens[start:end], start)
        given = {"request_id": key, "target_hidden": rows, "start_position": start, "anchor": anchor, **fields}
        return ContextChunk(**given)

    def rows(self, accepts: dict, *, kind: str = "tokens", dummies: dict[int, float] | None = None, **fields) -> GenerationRows:
        """Generation rows for {request: number of drafts that the target agrees with}; dummies: {place: fill value}."""
        keys = list(accepts)
        for place in sorted(dummies or {}):
            keys.insert(place, None)
        width = self.k + 1
        hidden = torch.empty(len(keys), width, self.config.context_width, dtype=self.target.dtype)
        tokens = torch.empty(len(keys), width, dtype=torch.int64)
        for index, key in enumerate(keys):
            if key is None:
                hidden[index], tokens[index] = dummies[index], -(2**40)
                continue
            script = self.scripts[key]
            checked = [script.anchor, *(max(token, 0) for token in script.drafts)]
            hidden[index] = self.target.rows(checked, len(script.tokens))
            tokens[index] = self._choices(script, accepts[key])
        given = {"request_ids": keys, "target_hidden": hidden, **self._verdict(kind, tokens, keys, accepts)}
        return GenerationRows(**{**given, **fields})

    def _choices(self, script: Script, accepted: int) -> torch.Tensor:
        """The target's token at each row: the drafts as long as it agrees, then others."""
        drafts = torch.tensor([*script.drafts, 0])
        other = (drafts + 1 + torch.arange(self.k + 1)) % self.config.vocab_size
        return torch.where(torch.arange(self.k + 1) < accepted, drafts, other)

    def _verdict(self, kind: str, tokens: torch.Tensor, keys: list, accepts: dict) -> dict:
        if kind == "tokens":
            return {"target_tokens": tokens}
        if kind == "committed":
            counts = torch.tensor([1 if key is None else accepts[key] + 1 for key in keys], dtype=torch.int64)
            return {"committed_tokens": tokens, "num_committed": counts}
        logits = torch.nn.functional.one_hot(tokens.clamp(min=0), self.config.vocab_size).float() * 9.0
        for index, key in enumerate(keys):
            if key is None:
                logits[index] = float("nan")
        return {"target_logits": logits}

    def step(self, step_input: StepInput | None = None, *, context=(), generation=None, block_table=None, **options):
        """Run a step and follow it in the scripts."""
        if step_input is None:
            step_input = StepInput(context=context, generation=generation, block_table=block_table)
        output = self.worker.step(step_input, **options)
        self.follow(output)
        return output

    def follow(self, output) -> None:
        for index, key in enumerate(output.request_ids):
            if key is None or output.anchor[index] < 0:
                continue
            script, count = self.scripts[key], int(output.num_committed[index])
            if count:
                committed = output.committed_tokens[index, :count].tolist()
                script.tokens += [script.anchor, *committed[:-1]]
            script.anchor = int(output.anchor[index])
            script.drafts = output.draft_tokens[index].tolist()

    def prefill(self, *keys, **options):
        return self.step(context=[self.chunk(key) for key in keys], **options)

    def generate(self, accepts: dict, *, context=(), block_table=None, runtime=None, trace=False, **rows):
        generation = self.rows(accepts, **rows)
        return self.step(context=context, generation=generation, block_table=block_table, runtime=runtime, trace=trace)

    def check(self, output, key, *, forced: bool = False) -> dict:
        """Hold a request's last drafts against the dense reference; returns the reference's block."""
        index = output.request_ids.index(key)
        script, tokens = self.scripts[key], output.draft_tokens[index].tolist()
        wanted = self.dense.draft(self.taps(key), script.anchor, self.k, tokens if forced else None)
        assert self.worker.context_length(key) == len(script.tokens)
        count = self.k if forced else self._agreeing(tokens, wanted)
        if wanted["confidence"] is not None:
            close(output.confidence[index, :count], wanted["confidence"][:count])
        if output.trace is not None:
            drafting = [i for i, anchor in enumerate(output.anchor.tolist()) if anchor >= 0 or output.request_ids[i] is None]
            close(output.trace.draft.biased_logits[drafting.index(index), :count], wanted["biased"][:count])
        return wanted

    def _agreeing(self, tokens: list[int], wanted: dict) -> int:
        """All drafts have to agree up to the first near tie; returns how many could be compared."""
        for k, (ours, theirs) in enumerate(zip(tokens, wanted["tokens"], strict=True)):
            if ours != theirs:
                assert wanted["margins"][k] < TIE_MARGIN, (k, tokens, wanted["tokens"], wanted["margins"])
                return k
        return self.k

    def latents(self, key, length: int | None = None) -> torch.Tensor:
        """Pool rows of a request, through the page table: [L, length, D]."""
        rows = torch.arange(self.worker.context_length(key) if length is None else length)
        pages = self.pool.page_table[self.worker.slot_of(key)].long()[rows // self.pool.config.page_size]
        return torch.stack([view[pages, rows % self.pool.config.page_size] for view in self.pool.layer_views])

    def check_latents(self, key) -> None:
        close(self.latents(key), self.dense.context_latents(self.taps(key)))


def close(ours: torch.Tensor, wanted: torch.Tensor, bound: float = BOUND) -> None:
    torch.testing.assert_close(ours.double(), wanted.double(), rtol=bound, atol=bound)


def make_pool(config=None, *, dtype=torch.float32, fill: float | None = float("nan"), **changes) -> LatentKVPool:
    """A pool whose memory holds NaN, so that a read of a row that was not written shows."""
    sizes = {"page_size": 8, "num_pages": 64, "max_requests": 5, "max_positions": 96, "num_drafts": 7, **changes}
    pool = LatentKVPool(PoolConfig(**sizes), config or tiny_config(), dtype=dtype)
    if fill is not None:
        pool.storage.fill_(fill)
    return pool


def external_pool(
    config=None, *, dtype=torch.float32, divisor: int = 1, page_stride: int | None = None, **changes
) -> ExternalLatentPool:
    """Layer views into one NaN-filled buffer of pages [num_pages, L, page_size, D], as an engine would lend them."""
    config = config or tiny_config()
    sizes = {"page_size": 8, "num_pages": 40, "max_requests": 5, "max_positions": 96, "num_drafts": 7, **changes}
    width, layers = pool_row_width(config.latent_dim, dtype), config.num_hidden_layers
    row = sizes["page_size"] * width
    stride = page_stride or layers * row + 48
    buffer = torch.full((sizes["num_pages"] * stride,), float("nan"), dtype=dtype)
    shape, strides = (sizes["num_pages"], sizes["page_size"], width), (stride, width, 1)
    views = [buffer.as_strided(shape, strides, layer * row) for layer in range(layers)]
    return ExternalLatentPool(PoolConfig(**sizes), config, views, divisor=divisor)


def digest(tensor: torch.Tensor) -> str:
    """Hash of a tensor's bytes."""
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def page_digests(pool) -> list[str]:
    """Hash of each page, all layers together."""
    count = pool.layer_views[0].shape[0]
    return ["".join(digest(view[page]) for view in pool.layer_views) for page in range(count)]


def changed_pages(before: list[str], pool) -> set[int]:
    """Pages whose bytes are not those of an earlier `page_digests`."""
    return {page for page, pair in enumerate(zip(before, page_digests(pool), strict=True)) if pair[0] != pair[1]}


def snapshot(worker: DFlashWorker) -> dict:
    """Everything that a refused step or call has to leave as it was."""
    pool, slots = worker.pool, worker._slots
    state = {name: digest(tensor) for name, tensor in vars(slots).items() if tensor is not None}
    state["requests"] = {key: dataclasses.asdict(request) for key, request in worker._requests.items()}
    state["free_slots"] = list(worker._free_slots)
    state["page_table"], state["num_pages"] = pool.page_table.tolist(), pool.num_pages.tolist()
    state["pool"] = page_digests(pool)
    if isinstance(pool, LatentKVPool):
        state["free_pages"] = list(pool._allocator._free)
        state["available"], state["held"] = pool.num_available_pages, pool.num_held_pages
        state["references"] = list(pool._allocator._references)
        state["pages"] = {slot: list(pages) for slot, pages in pool._pages.items()}
    return state


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)
