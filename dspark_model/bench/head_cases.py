"""What `scripts/bench_head.py` checks and times: the Markov chain and the confidence of one block, behind the base logits."""

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dspark_model import ops
from dspark_model.bench.step_cases import Row
from dspark_model.bench.timing import capture, time_interleaved
from dspark_model.ops.markov_chain import ChainPlan, invert_cdf
from dspark_model.testing import assert_bitwise_equal

FLOAT32_STEP = 2.0**-23
SETS = 8  # tables in rotation: 168 MB at a rank's shape, past an H200's cache of 50 MB


@dataclass(frozen=True, slots=True, eq=False)
class HeadInputs:
    """base: float32 [B, K, V]; anchors: int64 [B]; w1, w2: [V, R]; hidden: [B, K, H]; weight: [H + R]; bias: [1]; for drafts
    that are drawn, temperatures: float32 [B]; uniforms: float32 [B, K]."""

    base: torch.Tensor
    anchors: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    temperatures: torch.Tensor
    uniforms: torch.Tensor

    @classmethod
    def random(
        cls, batch: int, vocab: int, rank: int, hidden: int, *, drafts: int = 7, device: str = "cuda", seed: int = 0
    ) -> "HeadInputs":
        """Logits and bias with a spread of 3 and 1; bf16 tables."""
        draw = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(shape, generator=draw, device=device) * scale

        anchors = torch.randint(vocab, (batch,), generator=draw, device=device)
        tables = (normal(vocab, rank).bfloat16(), normal(vocab, rank, scale=rank**-0.5).bfloat16())
        rows = normal(batch, drafts, hidden).bfloat16()
        weight = normal(hidden + rank, scale=hidden**-0.5).bfloat16()
        base, bias = normal(batch, drafts, vocab, scale=3.0), normal(1).bfloat16()
        temperatures = torch.full((batch,), 0.8, device=device)
        uniforms = torch.rand((batch, drafts), generator=draw, device=device)
        return cls(base, anchors, *tables, rows, weight, bias, temperatures, uniforms)

    def with_tables_of(self, seed: int) -> "HeadInputs":
        """The same logits with other tables."""
        batch, drafts, vocab = self.base.shape
        other = HeadInputs.random(
            batch, vocab, self.w1.shape[1], self.hidden.shape[2], drafts=drafts, device=str(self.base.device), seed=seed
        )
        return dataclasses.replace(other, base=self.base)


def chosen_plan(inputs: HeadInputs) -> ChainPlan:
    """What the op chooses for these inputs."""
    return ChainPlan.choose(inputs.base.shape[0], *inputs.w2.shape, inputs.w2.dtype, inputs.base.device)


def plans(inputs: HeadInputs, *, all_plans: bool) -> dict[str, ChainPlan]:
    """The plans that the op chooses, greedy and drawn, and, where that is another one, the Triton kernel's; or all that may be
    worth it at a rank's shape on an H200."""
    chosen = chosen_plan(inputs)
    triton = ChainPlan.of_triton(inputs.base.shape[0], *inputs.w2.shape, inputs.w2.dtype, inputs.base.device)
    found = {"chosen": chosen, "drawn": dataclasses.replace(triton, sampled=True)}
    if chosen.backend == "triton":
        return found
    found["triton"] = triton
    if not all_plans:
        return found
    return found | {
        "no prefetch": dataclasses.replace(chosen, prefetch=False),
        "1 copy": dataclasses.replace(chosen, copies=1),
        "80 programs": ChainPlan.of_warps(inputs.base.shape[0], *inputs.w2.shape, 80),
    }


def run_chain(
    inputs: HeadInputs,
    workspace: ops.ChainWorkspace | None,
    *,
    keep_biased: bool,
    confidence: bool = False,
    drawn: bool = False,
) -> tuple[ops.MarkovChainOutput, torch.Tensor | None]:
    """The chain, and the confidence behind it; workspace: None for plain torch; drawn: drafts at a temperature."""
    backend = "torch" if workspace is None else workspace.plan.backend
    chain = ops.markov_chain(
        inputs.base,
        inputs.anchors,
        inputs.w1,
        inputs.w2,
        temperatures=inputs.temperatures if drawn else None,
        uniforms=inputs.uniforms if drawn else None,
        keep_biased=keep_biased,
        backend=backend,
        workspace=workspace,
    )
    if not confidence:
        return chain, None
    tensors = (inputs.hidden, inputs.weight, inputs.bias, inputs.w1, chain.previous_tokens)
    return chain, ops.confidence(*tensors, backend="torch" if workspace is None else "triton").logits


def workspace_for(inputs: HeadInputs, plan: ChainPlan) -> ops.ChainWorkspace:
    batch, drafts, _ = inputs.base.shape
    return ops.ChainWorkspace.for_plan(plan, batch, drafts, inputs.base.device)


def check_plan(inputs: HeadInputs, plan: ChainPlan) -> float:
    """The fused chain against float64, planted ties, repeated, without its logits, and the confidence; for a plan that draws
    see `check_draws`.

    Returns the largest error of a logit, as a share of the stated bound.  Raises AssertionError.
    """
    if plan.sampled:
        return check_draws(inputs, plan)
    workspace = workspace_for(inputs, plan)
    tied = _with_ties(inputs)
    share = 0.0
    for case in (inputs, tied):
        chain, logits = run_chain(case, workspace, keep_biased=True, confidence=True)
        error, bound = _error_and_bound(case, chain)
        share = max(share, float((error / bound).max()))
        assert share <= 1.0, f"a logit is off by {share:.2f} times the bound"
        assert_bitwise_equal(chain.draft_tokens, chain.biased_logits.argmax(-1), "draft tokens")
        again, _ = run_chain(case, workspace, keep_biased=True, confidence=False)
        bare, _ = run_chain(case, workspace, keep_biased=False, confidence=False)
        assert_bitwise_equal(again.biased_logits, chain.biased_logits, "biased logits, a second time")
        assert_bitwise_equal(bare.draft_tokens, chain.draft_tokens, "draft tokens without the logits")
        _check_confidence(case, chain.previous_tokens, logits)
    assert (chain.draft_tokens == 1).all(), "a tie did not go to the lowest id"
    return share


def check_draws(inputs: HeadInputs, plan: ChainPlan) -> float:
    """Drawn drafts against a float64 softmax of the chain's own logits, all ids equally likely, a greedy request among others,
    and repeated.  Returns and raises as `check_plan`."""
    workspace = workspace_for(inputs, plan)
    even = dataclasses.replace(inputs, temperatures=torch.full_like(inputs.temperatures, 1e30))
    greedy = dataclasses.replace(inputs, temperatures=inputs.temperatures.clone())
    greedy.temperatures[0] = 0.0
    share = 0.0
    for case in (inputs, even, greedy):
        chain, _ = run_chain(case, workspace, keep_biased=True, drawn=True)
        error, bound = _error_and_bound(case, chain)
        share = max(share, float((error / bound).max()))
        assert share <= 1.0, f"a logit is off by {share:.2f} times the bound"
        _check_ids(case, chain)
        again, _ = run_chain(case, workspace, keep_biased=False, drawn=True)
        assert_bitwise_equal(again.draft_tokens, chain.draft_tokens, "drawn tokens, a second time")
    return share


def check_replays(inputs: HeadInputs, plan: ChainPlan, replays: int) -> int:
    """One graph with new anchors and logits each time, against plain torch; a token may differ only where the two largest
    logits lie within 1e-3.  Returns how often one did.  Raises AssertionError."""
    workspace = workspace_for(inputs, plan)
    made: dict[str, ops.MarkovChainOutput] = {}

    def work(name: str, memory: ops.ChainWorkspace | None) -> None:
        made[name], _ = run_chain(inputs, memory, keep_biased=memory is None, confidence=False)

    graphs = {name: capture(lambda n=name, m=memory: work(n, m)) for name, memory in (("fused", workspace), ("plain", None))}
    draw = torch.Generator(inputs.base.device).manual_seed(9)
    near, wrong = (torch.zeros((), dtype=torch.int64, device=inputs.base.device) for _ in range(2))
    for _ in range(replays):
        inputs.base.normal_(std=3.0, generator=draw)
        inputs.anchors.random_(0, inputs.base.shape[2], generator=draw)
        for name in ("fused", "plain"):
            made[name].draft_tokens.fill_(-1)
            graphs[name].replay()
        differs = made["fused"].draft_tokens != made["plain"].draft_tokens
        first = differs & (differs.cumsum(1) == 1)  # behind it the chains go different ways
        top = made["plain"].biased_logits.topk(2).values
        close = top[..., 0] - top[..., 1] <= 1e-3
        near += (first & close).sum()
        wrong += (first & ~close).sum()
    assert int(wrong) == 0, f"{int(wrong)} tokens differ from plain torch in {replays} replays"
    return int(near)


def check_beside_other_work(inputs: HeadInputs, plan: ChainPlan, launches: int) -> None:
    """The chain beside copies and products on another stream, which hold multiprocessors: it ends, with the same bits."""
    workspace, side = workspace_for(inputs, plan), torch.cuda.Stream()
    wanted, _ = run_chain(inputs, workspace, keep_biased=True, confidence=False)
    square = torch.randn((4096, 4096), device=inputs.base.device, dtype=torch.bfloat16)
    copied = torch.empty_like(square)
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(launches):
        with torch.cuda.stream(side):
            torch.mm(square, square, out=copied)
        chain, _ = run_chain(inputs, workspace, keep_biased=True, confidence=False)
        assert_bitwise_equal(chain.biased_logits, wanted.biased_logits, "biased logits beside other work")
    torch.cuda.current_stream().wait_stream(side)


def variants(inputs: HeadInputs, usable: dict[str, ChainPlan]) -> dict[str, Callable[[], object]]:
    """Calls by name; each takes the next of `SETS` tables, so that W2 comes from memory as it does in a step."""
    batch, drafts, _ = inputs.base.shape
    sets = [inputs, *(inputs.with_tables_of(seed) for seed in range(1, SETS))]
    short = [dataclasses.replace(one, base=one.base[:, :1]) for one in sets]

    def turns(plan: ChainPlan | None, cases: list[HeadInputs], **options):
        workspace = None if plan is None else workspace_for(cases[0], plan)
        turn = itertools.cycle(cases)
        return lambda: run_chain(next(turn), workspace, **({"keep_biased": False} | options))

    def confidences(backend: str) -> Callable[[], torch.Tensor]:
        turn = itertools.cycle(sets)
        previous = torch.randint(inputs.base.shape[2], (batch, drafts), device=inputs.base.device)

        def work() -> torch.Tensor:
            case = next(turn)
            return ops.confidence(case.hidden, case.weight, case.bias, case.w1, previous, backend=backend).logits

        return work

    calls = {
        "plain": turns(None, sets),
        "plain + logits": turns(None, sets, keep_biased=True),
        "plain, drawn + logits": turns(None, sets, keep_biased=True, drawn=True),
        "plain + confidence": turns(None, sets, confidence=True),
        "confidence, plain": confidences("torch"),
        "confidence, fused": confidences("triton"),
    }
    for name, plan in usable.items():
        if plan.sampled:
            calls[f"fused, {name} + logits"] = turns(plan, sets, keep_biased=True, drawn=True)
        else:
            calls[f"fused, {name}"] = turns(plan, sets)
    if "chosen" in usable:
        calls["fused + logits"] = turns(usable["chosen"], sets, keep_biased=True)
        calls["fused + confidence"] = turns(usable["chosen"], sets, confidence=True)
        calls["fused, 1 draft"] = turns(usable["chosen"], short)
    return calls


def time_variants(inputs: HeadInputs, usable: dict[str, ChainPlan], failures: dict[str, str]) -> list[Row]:
    """Under graph replay, in turns.  What cannot be captured is added to `failures`."""
    graphs = {}
    for name, work in variants(inputs, usable).items():
        try:
            graphs[name] = capture(work, copies=SETS)
            graphs[name].replay()
            torch.cuda.synchronize()
        except (RuntimeError, ValueError) as error:
            graphs.pop(name, None)
            failures[f"B{inputs.base.shape[0]} {name}"] = f"{type(error).__name__}: {error}"
    times = time_interleaved({name: graph.replay for name, graph in graphs.items()}, rounds=9, replays=20, copies=SETS)
    batch = inputs.base.shape[0]
    return [Row("head", name, batch, 0, timing, _bytes(inputs, name)) for name, timing in times.items()]


def _bytes(inputs: HeadInputs, variant: str) -> int:
    """Bytes that a variant reads or writes at least."""
    batch, drafts, _ = inputs.base.shape
    confidence = inputs.hidden.nbytes + inputs.weight.nbytes
    if variant.startswith("confidence"):
        return confidence
    share = 1 / drafts if variant.endswith("1 draft") else 1
    kept = inputs.base.nbytes if "logits" in variant else 0
    rows = batch * drafts * inputs.w1[0].nbytes
    added = confidence if "confidence" in variant else 0
    return inputs.w2.nbytes + int(share * (inputs.base.nbytes + rows)) + kept + added


def _with_ties(inputs: HeadInputs) -> HeadInputs:
    """Three ids far apart, 1 the lowest, with the same largest logits and the same rows of W2."""
    base, w2, vocab = inputs.base.clone(), inputs.w2.clone(), inputs.base.shape[2]
    ids = [1, vocab // 2, vocab - 1]
    base[..., ids] = 60.0
    w2[ids] = w2[1].clone()
    return dataclasses.replace(inputs, base=base, w2=w2)


def _error_and_bound(inputs: HeadInputs, chain: ops.MarkovChainOutput) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the biased logits along the chain's own tokens, in float64."""
    rows, w2, base = inputs.w1[chain.previous_tokens].double(), inputs.w2.double(), inputs.base.double()
    sizes = base.abs() + rows.abs() @ w2.abs().T
    return (chain.biased_logits - (base + rows @ w2.T)).abs(), (inputs.w1.shape[1] + 2) * FLOAT32_STEP * sizes


def _check_ids(inputs: HeadInputs, chain: ops.MarkovChainOutput) -> None:
    """Of drawn drafts: those of torch from the same logits unless the uniform lies within 1e-5 of a boundary, and possible."""
    tokens, biased = chain.draft_tokens, chain.biased_logits
    greedy = (inputs.temperatures == 0)[:, None]
    probs = ops.tempered_softmax(biased, inputs.temperatures)
    assert ((probs.gather(-1, tokens[..., None])[..., 0] > 0) | greedy).all(), "an impossible id was drawn"
    wanted = invert_cdf(probs.flatten(0, 1), inputs.uniforms.flatten()).view_as(tokens)
    wanted = torch.where(greedy, biased.argmax(-1), wanted)
    running = probs.double().cumsum(-1)
    behind = running.gather(-1, tokens[..., None])[..., 0]
    before = behind - probs.double().gather(-1, tokens[..., None])[..., 0]
    close = (inputs.uniforms <= behind + 1e-5) & (inputs.uniforms >= before - 1e-5) & ~greedy
    assert ((tokens == wanted) | close).all(), "drawn tokens differ from torch's"


def _check_confidence(inputs: HeadInputs, previous: torch.Tensor, logits: torch.Tensor) -> None:
    rows = torch.cat((inputs.hidden, inputs.w1[previous]), dim=-1).double()
    weight, bias = inputs.weight.double(), inputs.bias.double()
    bound = 2.0**-18 * (rows.abs() @ weight.abs() + bias.abs())
    assert ((logits - (rows @ weight + bias)).abs() <= bound).all(), "a confidence logit is outside its bound"
