"""`attention_parts` in `between_attentions`: the bits of `block_attention` with value_weights, and of what follows them."""

import dataclasses
import importlib.util
import itertools

import pytest
import torch
from between_kit import layers, results
from kernel_kit import watched_memory

from dspark_model.ops import (
    AttentionParts,
    BetweenOutput,
    BetweenSizes,
    BetweenWorkspace,
    attention_parts,
    attention_parts_refusal,
    between_attentions,
    block_attention,
)
from dspark_model.ops.between_workspace import MAX_BETWEEN_ROWS, MERGE_WORDS
from dspark_model.testing import assert_bitwise_equal

needs_cute = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed")
K3_VALUES = 128  # v_head_dim
LENGTHS = {  # context of each request; -1: a request without keys
    "none": [0],
    "short": [1],
    "tile": [57],  # with a block of 7 rows 64 keys
    "2k": [2041],
    "32k": [32768],
    "131k": [131071],
    "two": [300, 4000],
    "four": [2041, 0, 32768, 57],
    "gone": [-1, 900],
    "two of four gone": [-1, 900, 3, -1],
    "all gone": [-1],
}


@dataclasses.dataclass
class Attended:
    """Arguments of `block_attention` up to the options, its options, and what follows."""

    call: tuple[torch.Tensor, ...]
    options: dict
    residual: torch.Tensor

    @property
    def values(self) -> torch.Tensor:
        queries, options = self.call[0], {**self.options, "max_seq_len": int(self.call[4].max())}
        made = block_attention(*self.call, backend="cute", **options)
        return made.view(queries.shape[0] * queries.shape[1], -1)


def attended(contexts: list[int], rows: int, heads: int, hidden: int, latent: int = 512, width: int = K3_VALUES, **options):
    """Requests of these contexts, their pages in any order in a pool that is NaN elsewhere."""
    device, page_size, dtype = torch.device("cuda"), 32, torch.bfloat16
    seq_lens = torch.tensor([context + rows if context >= 0 else 0 for context in contexts], device=device)
    context_lens = torch.tensor([max(context, 0) for context in contexts], device=device)
    counts = [-(-int(length) // page_size) for length in seq_lens]
    pages = torch.randperm(sum(counts) + 3, device=device)[: sum(counts)].int().split(counts)
    pool = torch.full((sum(counts) + 3, page_size, latent + 64), float("nan"), dtype=dtype, device=device)
    table = torch.full((len(contexts), max(1, *counts)), 2**31 - 1, dtype=torch.int32, device=device)
    for request, own in enumerate(pages):
        table[request, : len(own)] = own
        keys = torch.randn(int(seq_lens[request]), latent + 64, device=device).to(dtype)
        pool.view(-1, latent + 64)[
            (own.long()[:, None] * page_size + torch.arange(page_size, device=device)).flatten()[: len(keys)]
        ] = keys
    queries = torch.randn(len(contexts), rows, heads, latent + 64, device=device).to(dtype)
    matrices = (torch.randn(heads, width + 64, latent, device=device) * latent**-0.5).to(dtype)[:, 64:].transpose(1, 2)
    residual = torch.randn(len(contexts) * rows, hidden, device=device).to(dtype)
    options = {"kv_lora_rank": latent, "softmax_scale": 0.1, "value_weights": matrices, **options}
    return Attended((queries, pool, table, context_lens, seq_lens), options, residual)


def both(case: Attended, after, before, workspace, *, early: bool = False) -> tuple[BetweenOutput, BetweenOutput]:
    """By parts, and by values."""
    parts = attention_parts(*case.call, **case.options)
    ours = between_attentions(parts, case.residual, after, before, backend="cute", workspace=workspace, early=early)
    return ours, between_attentions(case.values, case.residual, after, before, backend="cute", workspace=workspace)


def assert_same(ours: BetweenOutput, wanted: BetweenOutput) -> None:
    own, others = results(ours), results(wanted)
    assert own.keys() == others.keys()
    for name, one in own.items():
        assert_bitwise_equal(one, others[name], name)


def sizes_of(heads: int, width: int = K3_VALUES) -> BetweenSizes:
    return BetweenSizes(hidden=256, values=heads * width, intermediate=128, q_rank=128, width=192, queries=64)


@needs_cute
@pytest.mark.parametrize(
    ("batch", "rows", "heads", "latent"), [(1, 7, 8, 512), (4, 8, 8, 512), (16, 1, 3, 128), (3, 6, 16, 256), (2, 9, 8, 128)]
)
def test_units_cover_all_rows_and_latents_once(batch, rows, heads, latent):
    from dspark_kernels.cute.between_attentions_values import num_units, unit_of
    from dspark_kernels.cute.block_attention import unit_rows
    from dspark_kernels.cute.block_attention_facts import Facts

    of_unit = unit_rows(batch, rows)
    facts = Facts(torch.bfloat16, latent, latent + 64, rows, heads, 32, False, 132, value_width=128, group_rows=of_unit)
    seen = []
    for number in range(num_units(batch, facts)):
        unit = unit_of(number, facts)
        block_rows = range(unit.group.first, min(unit.group.first + of_unit, rows))
        seen += [(unit.group.request, unit.group.head, row, unit.slice) for row in block_rows]
        assert unit_of(number - unit.slice, facts).group == unit.group and unit.number == number
    assert sorted(seen) == list(itertools.product(range(batch), range(heads), range(rows), range(latent // 64)))


@needs_cute
def test_the_workspace_has_words_for_all_batches():
    from dspark_kernels.cute.between_attentions_values import num_units
    from dspark_kernels.cute.block_attention import unit_rows
    from dspark_kernels.cute.block_attention_facts import Facts

    needed = []
    for rows in range(1, MAX_BETWEEN_ROWS + 1):
        for batch in range(1, MAX_BETWEEN_ROWS // rows + 1):
            of_unit = unit_rows(batch, rows)
            facts = Facts(torch.bfloat16, 512, 576, rows, 8, 32, False, 132, value_width=64, group_rows=of_unit)
            needed.append(num_units(batch, facts) * of_unit * 64)
    assert max(needed) == MERGE_WORDS * 8 * 64


@needs_cute
def test_no_two_launches_on_a_workspace_have_the_same_tag():
    from types import SimpleNamespace

    from dspark_kernels.cute.between_attentions_values import tag

    kinds, launches = ((False, 0), (True, 0), (True, 8)), (*range(1, 40), 2**29)
    forms = [SimpleNamespace(following=following, heads=heads) for following, heads in kinds]
    tags = [tag(launch, facts) for facts, launch in itertools.product(forms, launches)]
    assert len({0, *tags}) == 1 + len(tags)  # zeros are what a workspace begins with


@needs_cute
def test_refusals_name_the_reason():
    from dspark_kernels.cute.between_attentions_values import merge_refusal

    assert merge_refusal(torch.bfloat16, 7, 8, 512, 128) is None and merge_refusal(torch.bfloat16, 8, 24, 512, 128) is None
    for given, message in (
        ((torch.float16, 7, 8, 512, 128), "not torch.float16"),
        ((torch.bfloat16, 7, 8, 512, 120), "in steps of 16"),
        ((torch.bfloat16, 7, 8, 512, 256), "up to 128 values"),
        ((torch.bfloat16, 13, 16, 512, 128), "13 times 16"),
        ((torch.bfloat16, 7, 8, 384, 128), "not 384"),
    ):
        assert message in merge_refusal(*given)
    kind = {"rows": 7, "heads": 8, "kv_lora_rank": 512, "v_head_dim": 128, "dtype": torch.bfloat16}
    assert "CUDA" in attention_parts_refusal(device=torch.device("cpu"), **kind)


def test_the_torch_form_takes_values():
    after, before = layers(sizes_of(1), "cpu", torch.float32)
    parts = AttentionParts((3, 128), torch.float32, torch.device("cpu"), None)
    with pytest.raises(ValueError, match="takes values, got AttentionParts"):
        between_attentions(parts, torch.zeros(3, 256), after, before)
    with pytest.raises(ValueError, match=r"wants residual \[3, 256\]"):
        between_attentions(parts, torch.zeros(4, 256), after, before)


@pytest.mark.gpu
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(
    ("rows", "heads", "latent", "width"),
    [(7, 8, 512, 128), (1, 64, 512, 128), (8, 8, 512, 64), (5, 16, 256, 128), (3, 8, 128, 16), (8, 24, 512, 128)],
)
def test_parts_give_the_bits_of_values(rows, heads, latent, width, lengths, early):
    contexts = LENGTHS[lengths]
    if len(contexts) * rows > MAX_BETWEEN_ROWS:
        contexts = contexts[-1:]
    sizes, case = sizes_of(heads, width), attended(contexts, rows, heads, 256, latent, width)
    after, before = layers(sizes, "cuda", torch.bfloat16)
    workspace = BetweenWorkspace(sizes, torch.device("cuda"))
    workspace.words.fill_(0x7FC00000)  # a NaN with no tag
    for _ in range(2):
        with watched_memory():
            ours, wanted = both(case, after, before, workspace, early=early)
        assert_same(ours, wanted)
        assert not ours.values.isnan().any() and (ours.values != 0).any() == (max(contexts) >= 0)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"causal": True}, {"window": 100}, {"causal": True, "window": 33}], ids=str)
def test_options_of_the_attention(options):
    case = attended([300, 2000], 7, 8, 256, **options)
    after, before = layers(sizes_of(8), "cuda", torch.bfloat16)
    assert_same(*both(case, after, before, BetweenWorkspace(sizes_of(8), torch.device("cuda"))))


@pytest.mark.gpu
def test_batches_of_all_sizes_share_a_workspace():
    """Beside a stream that keeps the memory busy, both forms in turns."""
    sizes = sizes_of(8)
    after, before = layers(sizes, "cuda", torch.bfloat16)
    workspace, side, noise = (
        BetweenWorkspace(sizes, torch.device("cuda")),
        torch.cuda.Stream(),
        torch.zeros(1 << 24, device="cuda"),
    )
    cases = [
        attended(contexts, rows, 8, 256)
        for contexts, rows in (([100], 7), ([9, 700], 8), ([5] * 16, 1), ([3000], 1), ([40] * 5, 3), ([9, 0, 2000, 70], 7))
    ]
    kinds = [(case, following) for case in cases for following in (before, None)]
    wanted = [
        between_attentions(case.values, case.residual, after, following, backend="cute", workspace=workspace)
        for case, following in kinds
    ]
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(600):
        if turn % 10 == 0:
            with torch.cuda.stream(side):
                noise.mul_(1.0)
        index = (7 * turn + turn // 3) % len(kinds)
        case, following = kinds[index]
        parts = attention_parts(*case.call, **case.options)
        made = between_attentions(
            parts, case.residual, after, following, backend="cute", workspace=workspace, early=turn % 2 == 0
        )
        for name in ("values", "hidden"):
            differing += (getattr(made, name) != getattr(wanted[index], name)).sum()
    assert int(differing) == 0


@pytest.mark.gpu
def test_a_graph_replays_with_other_lengths():
    sizes, case = sizes_of(8), attended([4000], 7, 8, 256)
    after, before = layers(sizes, "cuda", torch.bfloat16)
    workspace = BetweenWorkspace(sizes, torch.device("cuda"))
    both(case, after, before, workspace, early=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        parts = attention_parts(*case.call, **case.options)
        made = between_attentions(parts, case.residual, after, before, backend="cute", workspace=workspace, early=True)
    for context in (4000, 0, 63, 1, 3999, 2048, 0, 128):
        case.call[3].fill_(context)
        case.call[4].fill_(context + 7)
        case.call[0].copy_(torch.randn(case.call[0].shape))
        for result in results(made).values():
            result.fill_(float("nan"))
        graph.replay()
        wanted = between_attentions(case.values, case.residual, after, before, backend="cute", workspace=workspace)
        assert_same(made, wanted)


@pytest.mark.gpu
def test_counters_and_tags_wrap_around():
    sizes, case = sizes_of(8), attended([500], 7, 8, 256)
    after, before = layers(sizes, "cuda", torch.bfloat16)
    workspace = BetweenWorkspace(sizes, torch.device("cuda"))
    _, wanted = both(case, after, before, workspace)
    counts, launches = workspace.counters[True, True, False, False].tolist(), 2**31 - 2
    assert counts[-1] == 2 and all(count % 2 == 0 for count in counts)
    wrapped = [(launches * count // 2 + 2**31) % 2**32 - 2**31 for count in counts]
    workspace.counters[True, True, False, False].copy_(torch.tensor(wrapped))
    for _ in range(5):
        parts = attention_parts(*case.call, **case.options)
        assert_same(between_attentions(parts, case.residual, after, before, backend="cute", workspace=workspace), wanted)


@pytest.mark.gpu
def test_what_is_not_taken_is_refused():
    case = attended([10], 7, 8, 256)
    matrices = case.options["value_weights"]
    for weights, message in (
        (matrices.transpose(1, 2).contiguous().transpose(1, 2)[..., :120], "in steps of 16"),
        (matrices.contiguous(), "side by side"),
    ):
        with pytest.raises(ValueError, match=f"{message}.*choose block_attention"):
            attention_parts(*case.call, **{**case.options, "value_weights": weights})
    none = (case.call[0][:, :0], *case.call[1:])
    with pytest.raises(ValueError, match="at least one row, got 1 requests of 0"):
        attention_parts(*none, **case.options)
    with pytest.raises(ValueError, match="window=0"):
        attention_parts(*case.call, **{**case.options, "window": 0})
