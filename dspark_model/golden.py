"""Golden cases: checkpoints with inputs and the outputs that any right implementation reaches.

A case folder holds `case.json`, a checkpoint (or the name of the folder that has it), `inputs.safetensors` and the expected
outputs of each run.  Every expected tensor is compared; one that this module does not know is a miss, not a skip.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from dspark_model.config import DrafterConfig
from dspark_model.kv_pool import LatentKVPool
from dspark_model.modeling import MLADSparkForCausalLM
from dspark_model.serving_config import Layout, PoolConfig, RuntimeConfig
from dspark_model.step_io import ContextChunk, GenerationRows, StepInput, StepOutput
from dspark_model.worker import DFlashWorker

# Bounds (rtol = atol).  float32: of the contract.  bfloat16: about twice the largest difference of a plain bf16 run that
# rounds once per norm, rotation and product; the deviations grow from the context to the logits.
FLOAT32_BOUND = 1e-4
BFLOAT16_BOUNDS = {
    "context": 0.06,
    "context_latents": 0.08,
    "block_latents": 0.12,
    "block_hidden": 0.15,
    "final_hidden": 0.2,
    "base_logits": 0.7,
    "biased_logits": 0.7,
    "margins": 0.7,
    "confidence_logits": 0.1,
    "confidence": 0.02,
}
# A page size that makes contexts of 31, 32, 33 and 64 rows end around page edges.
PAGE_SIZE = 32


@dataclass(frozen=True, slots=True)
class Comparison:
    """One expected tensor against ours.  difference: largest absolute difference, NaN when shapes differ."""

    case: str
    dtype: str
    run: str
    output: str
    difference: float
    bound: str
    passed: bool
    detail: str


def find_cases(folders: Iterable[Path]) -> list[Path]:
    """Case folders among `folders` and one level below them, sorted.

    Raises:
        FileNotFoundError: one of `folders` holds no case.
    """
    found: list[Path] = []
    for folder in folders:
        here = [folder] if (folder / "case.json").is_file() else sorted(p.parent for p in folder.glob("*/case.json"))
        if not here:
            raise FileNotFoundError(f"{folder} has no case.json, and no folder in it has one")
        found += here
    return found


def check_case(folder: Path, *, device: str = "cpu", layout: Layout = Layout.LAYER_MAJOR) -> list[Comparison]:
    """Run all runs of a case in float32, and in bfloat16 too where the checkpoint is stored so."""
    case = json.loads((folder / "case.json").read_text(encoding="utf-8"))
    checkpoint = folder / case["checkpoint"]
    stored = DrafterConfig.from_file(checkpoint / "config.json").dtype
    dtypes = [torch.float32] + ([torch.bfloat16] if stored == "bfloat16" else [])
    rows = []
    for run in case["runs"]:
        inputs = load_file(folder / run["inputs"], device=device)
        expected = load_file(folder / run["expected"], device=device)
        for dtype in dtypes:
            harness = _Harness(checkpoint, inputs, run["num_drafts"], case.get("num_steps"), dtype, device, layout)
            observed = harness.run()
            label = (case["name"], str(dtype).removeprefix("torch."), f"k{run['num_drafts']}")
            # What the worker decides itself, such as the accepted rows of a step, stands among a case's inputs.
            wanted = {name: inputs[name] for name in inputs if name in observed} | expected
            rows += [_compare(label, name, value, observed, dtype) for name, value in wanted.items()]
    if not rows:
        raise ValueError(f"{folder} has no run with expected tensors; a case that compares nothing proves nothing")
    return rows


def _compare(
    label: tuple[str, str, str], name: str, expected: torch.Tensor, observed: dict[str, torch.Tensor], dtype: torch.dtype
) -> Comparison:
    kind = name.rpartition(".")[2]
    if name not in observed:
        return Comparison(*label, name, float("nan"), "-", False, "this package has no such output")
    ours = observed[name]
    if ours.shape != expected.shape:
        detail = f"shape {list(ours.shape)}, wanted {list(expected.shape)}"
        return Comparison(*label, name, float("nan"), "-", False, detail)
    if not expected.is_floating_point():
        equal = torch.equal(ours, expected)
        difference = float((ours - expected).abs().max()) if expected.numel() else 0.0
        return Comparison(*label, name, difference, "equal", equal, "" if equal else "ids differ")
    bound = FLOAT32_BOUND if dtype is torch.float32 else BFLOAT16_BOUNDS.get(kind)
    if bound is None:
        return Comparison(*label, name, float("nan"), "-", False, f"no bound is stated for it in {dtype}")
    distance = (ours.double() - expected.double()).abs()
    passed = bool((distance <= bound + bound * expected.double().abs()).all())
    difference = float(distance.max()) if distance.numel() else 0.0
    return Comparison(*label, name, difference, f"{bound:g}", passed, "" if passed else "above the bound")


class _Harness:
    """Feeds a case's inputs to a worker and collects outputs under their golden names."""

    def __init__(
        self,
        checkpoint: Path,
        inputs: dict[str, torch.Tensor],
        num_drafts: int,
        num_steps: int | None,
        dtype: torch.dtype,
        device: str,
        layout: Layout,
    ):
        self._inputs, self._num_steps = inputs, num_steps
        embed = inputs.get("embed_tokens_weight")
        self._model = MLADSparkForCausalLM.from_pretrained(
            checkpoint,
            lm_head=inputs["lm_head_weight"].to(dtype),
            target_embed_tokens=None if embed is None else embed.to(dtype),
            dtype=dtype,
            device=device,
        )
        first = self._inputs.get("context_lens", self._inputs.get("step0.context_lens"))
        self._batch = first.shape[0]
        longest = 256 + num_drafts
        pages = (self._batch + 1) * (longest // PAGE_SIZE + 2)
        pool_config = PoolConfig(
            page_size=PAGE_SIZE,
            num_pages=pages,
            max_requests=self._batch,
            max_positions=longest,
            num_drafts=num_drafts,
            layout=layout,
        )
        pool = LatentKVPool(pool_config, self._model.config, dtype=dtype, device=device)
        for view in pool.layer_views:
            view.fill_(float("nan"))
        self._pool = pool
        self._worker = DFlashWorker(self._model, pool, RuntimeConfig.plain())
        self._seen: dict[str, torch.Tensor] = {}
        for index, layer in enumerate(self._model.layers):
            layer.register_forward_hook(self._keep(f"layer{index}"))
        self._model.final_norm.register_forward_hook(self._keep("final_hidden"))

    def _keep(self, name: str):
        def hook(_module, _inputs, output):
            self._seen[name] = output

        return hook

    def run(self) -> dict[str, torch.Tensor]:
        for request in range(self._batch):
            self._worker.admit(request)
        if self._num_steps is None:
            return self._prefill("", "target_hidden", "cu_seqlens")
        observed = self._prefill("step0.", "committed_hidden", "committed_cu_seqlens")
        for step in range(1, self._num_steps):
            observed |= self._verify(f"step{step}.")
        return observed

    def _prefill(self, prefix: str, hidden: str, bounds: str) -> dict[str, torch.Tensor]:
        rows = self._inputs[prefix + hidden].to(self._model.dtype)
        edges = self._inputs[prefix + bounds].tolist()
        anchors = self._inputs[prefix + "anchor_tokens"].tolist()
        chunks = [
            ContextChunk(request_id=b, target_hidden=rows[edges[b] : edges[b + 1]], start_position=0, anchor=anchors[b])
            for b in range(self._batch)
        ]
        return self._collect(prefix, self._worker.step(StepInput(context=chunks), trace=True))

    def _verify(self, prefix: str) -> dict[str, torch.Tensor]:
        generation = GenerationRows(
            request_ids=list(range(self._batch)),
            target_hidden=self._inputs[prefix + "verify_hidden"].to(self._model.dtype),
            target_tokens=self._inputs[prefix + "target_tokens"],
        )
        output = self._worker.step(StepInput(generation=generation), trace=True)
        decided = {prefix + "num_committed": output.num_committed, prefix + "anchor_tokens": output.anchor}
        return decided | self._collect(prefix, output)

    def _collect(self, prefix: str, output: StepOutput) -> dict[str, torch.Tensor]:
        draft = output.trace.draft
        top = draft.biased_logits.topk(2, dim=-1).values
        lengths = [self._worker.context_length(b) for b in range(self._batch)]
        block = self._model.config.block_rows(self._worker.num_drafts)
        rows = [torch.arange(length + block) for length in lengths]
        latents = [self._rows(b, rows[b]) for b in range(self._batch)]
        hidden = [self._seen[f"layer{index}"] for index in range(len(self._model.layers))]
        observed = {
            "context": output.trace.context,
            "context_latents": torch.cat([part[:, :n] for part, n in zip(latents, lengths, strict=True)], dim=1),
            "block_latents": torch.stack([part[:, n:] for part, n in zip(latents, lengths, strict=True)], dim=1),
            "block_hidden": torch.stack(hidden),
            "final_hidden": self._seen["final_hidden"],
            "base_logits": draft.base_logits,
            "draft_tokens": output.draft_tokens,
            "biased_logits": draft.biased_logits,
            "margins": top[..., 0] - top[..., 1],
            "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).to(output.draft_tokens.device),
        }
        if draft.confidence is not None:
            observed |= {"confidence_logits": draft.confidence.logits, "confidence": output.confidence}
        if "temperature" in self._inputs:
            scaled = draft.biased_logits.double() / self._inputs["temperature"].double()
            observed["draft_probs"] = torch.softmax(scaled, dim=-1)
        return {prefix + name: tensor for name, tensor in observed.items()}

    def _rows(self, request: int, rows: torch.Tensor) -> torch.Tensor:
        """Pool rows of a request, read through its page list: [L, rows, D]."""
        pages = torch.tensor(self._pool.pages_of(self._worker.slot_of(request)))
        where = (pages[rows // PAGE_SIZE], rows % PAGE_SIZE)
        return torch.stack([view[where] for view in self._pool.layer_views])
