"""On a GPU: a launch that begins beside the kernel before it waits for what that one makes, and reads only weights sooner."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from dspark_model import ops

pytestmark = pytest.mark.gpu
CUDA, BF16 = torch.device("cuda"), torch.bfloat16
HIDDEN, VOCAB, RANK, DRAFTS = 7168, 20480, 256, 7


@dataclass(frozen=True)
class Case:
    """values: what the kernel before makes; call: of a tensor of their shape, with nothing but weights besides."""

    values: torch.Tensor
    call: Callable[[torch.Tensor], list[torch.Tensor]]


def normal(*size: int) -> torch.Tensor:
    return (torch.randn(*size) * size[-1] ** -0.5).to(CUDA, BF16)


def ids(*size: int) -> torch.Tensor:
    return torch.randint(1, VOCAB, size, device=CUDA)


def norm() -> Case:
    weight = normal(HIDDEN)
    return Case(normal(DRAFTS, HIDDEN), lambda x: [ops.rms_norm(x, weight, 1e-5, backend="triton")])


def head() -> Case:
    weight = normal(VOCAB, HIDDEN)
    options = {"out_dtype": torch.float32, "backend": "triton", "early": True}
    return Case(normal(DRAFTS, HIDDEN), lambda x: [ops.low_m_linear(x, weight, **options)])


def product(rows: int) -> Case:
    """Norm, gate and up, split, of one class of rows and another."""
    weight, up, scale = normal(512, HIDDEN), normal(512, HIDDEN), normal(HIDDEN)
    workspace = ops.LowMWorkspace.for_products(CUDA, [ops.LowMProduct(rows, 512, HIDDEN, BF16, gate_up=True)])
    options = {"up_weight": up, "norm_weight": scale, "eps": 1e-5, "workspace": workspace, "backend": "triton", "early": True}
    return Case(normal(rows, HIDDEN), lambda x: [ops.low_m_linear(x, weight, **options)])


def layer_of_products(rows: int) -> Case:
    """Split ones among them, which share a workspace."""
    shapes = {
        "o": (HIDDEN, 1024),
        "gate": (1792, HIDDEN),
        "up": (1792, HIDDEN),
        "down": (HIDDEN, 1792),
        "qkv_a": (2112, HIDDEN),
    }
    weights, residual = {name: normal(*shape) for name, shape in shapes.items()}, normal(rows, HIDDEN)
    products = [ops.LowMProduct(rows, *shape, BF16, gate_up=name == "gate") for name, shape in shapes.items()]
    options = {"workspace": ops.LowMWorkspace.for_products(CUDA, products), "backend": "triton", "early": True}
    norm = {"norm_weight": normal(HIDDEN), "eps": 1e-5}

    def call(values: torch.Tensor) -> list[torch.Tensor]:
        h = ops.low_m_linear(values, weights["o"], residual=residual, **options)
        gated = ops.low_m_linear(h, weights["gate"], up_weight=weights["up"], **norm, **options)
        hidden = ops.low_m_linear(gated, weights["down"], residual=h, **options)
        return [h, gated, hidden, ops.low_m_linear(hidden, weights["qkv_a"], **norm, **options)]

    return Case(normal(rows, 1024), call)


def absorption() -> Case:
    keys, cos_sin = normal(8, 256, 512)[:, :128], normal(2, DRAFTS, 64).float()
    return Case(normal(2, DRAFTS, 8, 192), lambda q: [ops.absorb_queries(q, keys, cos_sin, backend="triton")])


def confidence_of_rows() -> Case:
    weight, w1, tokens = normal(HIDDEN + RANK), normal(VOCAB, RANK), ids(1, DRAFTS)
    call = lambda rows: ops.confidence(rows, weight, weight[:1], w1, tokens, backend="triton")  # noqa: E731
    return Case(normal(1, DRAFTS, HIDDEN), lambda rows: [call(rows).logits, call(rows).probability])


def confidence_of_tokens() -> Case:
    weight, w1, rows = normal(HIDDEN + RANK), normal(VOCAB, RANK), normal(1, DRAFTS, HIDDEN)
    options = {"backend": "triton", "early": True}
    return Case(ids(1, DRAFTS), lambda tokens: [ops.confidence(rows, weight, weight[:1], w1, tokens, **options).logits])


def committing() -> Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]]:
    """A commit of one row's drafts: the next tokens, and what its slot has then."""
    numbers = torch.zeros(3, 4, dtype=torch.int64, device=CUDA)
    state = ops.SlotDrafts(*numbers, ids(4, DRAFTS))

    def commit(slots: torch.Tensor, drafts: torch.Tensor) -> list[torch.Tensor]:
        tokens = ops.step_commit(state, slots, slots, slots, slots, drafts, fused=True)
        return [tokens, state.draft_tokens[slots]]

    return commit


def commit() -> Case:
    slots, call = torch.tensor([2], device=CUDA), committing()
    return Case(ids(1, DRAFTS), lambda drafts: call(slots, drafts))


def chain(late: str) -> Case:
    w1, w2 = normal(VOCAB, RANK), normal(VOCAB, RANK)
    workspace = ops.ChainWorkspace.for_tables(1, DRAFTS, VOCAB, w2, CUDA)
    assert workspace.plan.backend == "cute"
    base, anchors = torch.randn(1, DRAFTS, VOCAB, device=CUDA), ids(1)

    def call(given: torch.Tensor) -> list[torch.Tensor]:
        inputs = (given, anchors) if late == "base" else (base, given)
        made = ops.markov_chain(*inputs, w1, w2, backend="cute", workspace=workspace)
        return [made.draft_tokens, made.previous_tokens, made.biased_logits]

    return Case(base if late == "base" else anchors, call)


def attention_inputs(requests: int = 1) -> dict[str, torch.Tensor]:
    lens = torch.full((requests,), 3000, device=CUDA)
    table = torch.zeros(3 * requests, 95, dtype=torch.int32, device=CUDA)
    table[2::3] = torch.randperm(95 * requests, device=CUDA).view(requests, 95)
    return {
        "queries": normal(requests, DRAFTS, 8, 576), "latents": normal(95 * requests, 32, 576), "page_table": table,
        "context_lens": lens, "seq_lens": lens + DRAFTS, "slots": 3 * torch.arange(requests, device=CUDA) + 2,
    }  # fmt: skip


def attention(late: str, *, multiplied: bool, requests: int = 1) -> Case:
    """Both launches; the second one reads lengths before the first one has ended.  Behind one that multiplies a product, which
    begins before that has ended."""
    given, product = attention_inputs(requests), ops.LowMProduct(requests * DRAFTS, HIDDEN, 1024, BF16)
    workspace = ops.LowMWorkspace.for_products(CUDA, [product])
    options = {"kv_lora_rank": 512, "softmax_scale": 0.1, "max_seq_len": 3040, "backend": "cute"}
    matrices, w_o = normal(8, 128, 512).mT, normal(HIDDEN, 1024)

    def call(made: torch.Tensor) -> list[torch.Tensor]:
        inputs = given | {late: made}
        if not multiplied:
            return [ops.block_attention(**inputs, **options)]
        values = ops.block_attention(**inputs, **options, value_weights=matrices)
        rows = values.flatten(0, 1).flatten(1)
        return [values, ops.low_m_linear(rows, w_o, backend="triton", workspace=workspace, early=True)]

    return Case(given[late], call)


def attention_parts(late: str) -> Case:
    """With an early launch that merges behind it, which reads lengths before its own wait."""
    from between_kit import ABSORBING, inputs, layers

    sizes, given = ABSORBING["k3"], attention_inputs()
    after, hidden = layers(sizes, "cuda", BF16)[0], inputs(sizes, DRAFTS, "cuda", BF16)[1]
    options = {"kv_lora_rank": 512, "softmax_scale": 0.1, "value_weights": normal(8, 128, 512).mT}
    workspace = ops.BetweenWorkspace(sizes, CUDA)

    def call(made: torch.Tensor) -> list[torch.Tensor]:
        parts = ops.attention_parts(**(given | {late: made}), **options)
        return [ops.between_attentions(parts, hidden, after, None, backend="cute", workspace=workspace, early=True).hidden]

    return Case(given[late], call)


def end_of_a_step() -> Case:
    """From the layers' rows to what the next step finds, each launch beside the one before it."""
    norm_weight, head, w1, w2 = normal(HIDDEN), normal(VOCAB, HIDDEN), normal(VOCAB, RANK), normal(VOCAB, RANK)
    weight, anchors, workspace = normal(HIDDEN + RANK), ids(1), ops.ChainWorkspace.for_tables(1, DRAFTS, VOCAB, w2, CUDA)
    slots, commit = torch.tensor([2], device=CUDA), committing()

    def call(rows: torch.Tensor) -> list[torch.Tensor]:
        hidden = ops.rms_norm(rows, norm_weight, 1e-5, backend="triton")
        base = ops.low_m_linear(hidden, head, out_dtype=torch.float32, backend="triton", early=True)[None]
        chain = ops.markov_chain(base, anchors, w1, w2, keep_biased=False, backend="cute", workspace=workspace)
        tokens = (w1, chain.previous_tokens)
        found = ops.confidence(hidden[None], weight, weight[:1], *tokens, slots=slots, backend="triton", early=True)
        return [chain.draft_tokens, found.logits, found.probability, *commit(slots, chain.draft_tokens)]

    return Case(normal(DRAFTS, HIDDEN), call)


def before_attention(late: str) -> Case:
    from between_kit import ABSORBING, context_of, inputs, into_attention, layers

    sizes = ABSORBING["k3"]
    front, context = into_attention(sizes, layers(sizes, "cuda", BF16)[1], 7), context_of(sizes, 8, "cuda", BF16)
    workspace, hidden = ops.BetweenWorkspace(sizes, CUDA), inputs(sizes, 7, "cuda", BF16)[1]

    def call(made: torch.Tensor) -> list[torch.Tensor]:
        rows, added = (made, context) if late == "rows" else (hidden, replace(context, rows=made))
        options = {"backend": "cute", "workspace": workspace, "early": True, "context": added}
        out = ops.before_attention(rows, front, **options)
        views, where = [front.latents.layer_view, *context.layer_views], [front.latents.where, *[context.where] * sizes.layers]
        # The first four rows are owned.
        stored = [view[at.pages[:4], at.offsets[:4]] for view, at in zip(views, where, strict=True)]
        return [out.absorbed, out.context_kv, *stored]

    return Case(hidden if late == "rows" else context.rows, call)


CASES = {
    "rms_norm": norm, "head": head, "confidence, rows": confidence_of_rows, "confidence, tokens": confidence_of_tokens,
    "step_commit": commit, "product of 7": lambda: product(7), "product of 56": lambda: product(56), "absorption": absorption,
    "layer of products of 7": lambda: layer_of_products(7), "layer of products of 56": lambda: layer_of_products(56),
}  # fmt: skip
if importlib.util.find_spec("cutlass"):
    CASES |= {f"chain, {late}": lambda late=late: chain(late) for late in ("base", "anchors")}
    kinds = ("queries", "latents", "page_table", "seq_lens", "slots")
    CASES |= {f"attention, {late}": lambda late=late: attention(late, multiplied=False) for late in kinds}
    for count, name in ((1, "attention"), (6, "attention of six")):
        CASES |= {
            f"{name} with a product, {late}": lambda late=late, count=count: attention(late, multiplied=True, requests=count)
            for late in kinds
        }
    CASES |= {f"attention merged later, {late}": lambda late=late: attention_parts(late) for late in kinds}
    CASES["end of a step"] = end_of_a_step
    CASES |= {f"before attention, {late}": lambda late=late: before_attention(late) for late in ("rows", "context")}


@pytest.mark.parametrize("case", CASES)
def test_what_the_kernel_before_makes_is_waited_for(case):
    """It lets the launch begin at once, and writes 30 us later; until then there are NaN or zeros.  Under a graph too."""
    from late_kit import check_waits

    case = CASES[case]()
    late = torch.empty_like(case.values)
    check_waits(late, case.values, lambda: case.call(late), case.call(case.values))
