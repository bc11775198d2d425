"""`step_prologue`: the kernel against the reference, and the reference against a loop over requests, drafts and rows."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from kernel_kit import DEVICE, STRIDES, make_table, random_bits, strided, watched_memory

from dspark_model.ops import BlockShape, GivenRows, SlotTables, StepRows, step_prologue
from dspark_model.testing import assert_bitwise_equal, poison_

MASK_TOKEN = 9
HUGE = 2**62
COLUMNS = ("committed_tokens", "num_accepted", "num_committed", "anchors", "context_lens", "num_dropped", "num_valid_drafts",
           "block_ids")  # fmt: skip


@dataclass
class Case:
    """Arguments of one call."""

    slots: torch.Tensor
    tables: SlotTables
    given: GivenRows
    target_tokens: torch.Tensor
    cos_sin: torch.Tensor
    shape: BlockShape

    def run(self, *, fused: bool) -> StepRows:
        return step_prologue(self.slots, self.tables, self.given, self.target_tokens, self.cos_sin, self.shape, fused=fused)

    @property
    def tensors(self) -> list[torch.Tensor]:
        tables = (getattr(self.tables, field.name) for field in dataclasses.fields(SlotTables))
        return [self.slots, *tables, self.given.num_new, self.given.anchors, self.target_tokens, self.cos_sin]


def integers(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def random_case(
    drafts: int,
    rows: int,
    page_size: int,
    given: int,
    verified: int,
    *,
    form: str = "plain",
    order: str = "scattered",
    dummies: float = 0.2,
    table_width: int = 4,
    width: int = 6,
    vocab_size: int = 2,
) -> Case:
    """Few tokens, so that drafts stand by chance; lengths, limits and pages at, before and behind each other's edges."""
    batch = given + verified
    slots = torch.randperm(batch + 3)[:batch]
    slots[torch.rand(batch) < dummies] = -1
    num_slots = batch + 3
    num_pages = torch.randint(0, table_width + 1, (num_slots,))
    capacity = num_pages * page_size
    edges = torch.tensor([-drafts - rows - 1, -drafts - rows, -drafts - 1, -drafts, -rows, -1, 0, 3])
    context_lens = torch.where(
        torch.rand(num_slots) < 0.5,
        capacity + edges[torch.randint(len(edges), (num_slots,))],
        (torch.rand(num_slots) ** 2 * capacity).long(),
    ).clamp(min=0)
    slack = torch.randint(0, 2 * drafts + 4, (num_slots,))
    target = torch.randint(-1, 2, (verified, drafts + 1))
    draft_tokens = torch.randint(-1, 2, (num_slots, drafts))
    for row in range(verified):  # up to all drafts stand
        slot, same = int(slots[given + row]), int(torch.randint(drafts + 1, ()))
        target[row, :same] = draft_tokens[slot, :same].clamp(min=0)
    tables = SlotTables(
        context_lens=context_lens.to(DEVICE),
        draft_tokens=draft_tokens.to(DEVICE),
        num_valid_drafts=torch.where(torch.rand(num_slots) < 0.5, drafts, torch.randint(0, drafts + 1, (num_slots,))).to(
            DEVICE
        ),
        max_context=(context_lens + slack).to(DEVICE),
        page_table=make_table(num_slots, table_width, num_pages.to(DEVICE), order=order),
        num_pages=num_pages.to(DEVICE),
    )
    anchors = torch.where(torch.rand(given) < 0.3, -1, torch.randint(50, (given,)))
    return Case(
        slots=slots.to(DEVICE),
        tables=tables,
        given=GivenRows(torch.randint(0, drafts + 3, (given,)).to(DEVICE), anchors.to(DEVICE)),
        target_tokens=strided(target.to(DEVICE), form),
        cos_sin=random_bits(table_width * page_size + rows, width, dtype=torch.float32),
        shape=BlockShape(drafts, vocab_size, rows, rows - drafts, page_size, MASK_TOKEN),
    )


def by_hand(case: Case) -> tuple[dict[str, list], dict[str, list]]:
    """Fields of `StepRows` and of its block, one request after the other."""
    shape, first = case.shape, case.given.num_new.shape[0]
    drafts, rows, page_size = shape.num_drafts, shape.rows, shape.page_size
    lens, all_drafts, checked, limits, table, num_pages = (
        getattr(case.tables, name).tolist()
        for name in ("context_lens", "draft_tokens", "num_valid_drafts", "max_context", "page_table", "num_pages")
    )
    columns = {name: [] for name in COLUMNS}
    block = {name: [] for name in ("positions", "pages", "offsets", "owned", "seq_lens")}
    for row, slot in enumerate(case.slots.tolist()):
        live, committed, void = slot >= 0, [], 0
        if row < first:
            fresh, anchor = int(case.given.num_new[row]), int(case.given.anchors[row])
        else:
            target = case.target_tokens[row - first].tolist()
            if live:
                for draft, wanted in zip(all_drafts[slot][: checked[slot]], target, strict=False):
                    if max(draft, 0) != wanted:
                        break
                    committed.append(wanted)
                committed.append(target[len(committed)])
            if live and not 0 <= committed[-1] < shape.vocab_size:
                committed, void = [], len(committed)
            fresh, anchor = len(committed), committed[-1] if committed else 0
        capacity = num_pages[slot] * page_size if live else 0
        wanted = lens[slot] + fresh if live else 0
        length = min(wanted, capacity)
        drafting = live and anchor >= 0 and not void
        reach = capacity if drafting else 0
        positions = list(range(length, length + rows))
        owned = [position < reach for position in positions]
        usable = 0
        for draft in range(drafts):
            token, source = length + 1 + draft, positions[draft + shape.first_draft_row]
            if drafting and wanted == length and token < limits[slot] and source < reach:
                usable += 1
        columns["committed_tokens"].append(committed + [-1] * (drafts + 1 - len(committed)))
        columns["num_accepted"].append(max(len(committed) - 1, 0))
        columns["num_committed"].append(len(committed))
        columns["anchors"].append(anchor)
        columns["context_lens"].append(length)
        columns["num_dropped"].append(wanted - length + void)
        columns["num_valid_drafts"].append(usable)
        columns["block_ids"].append([max(anchor, 0)] + [MASK_TOKEN] * (rows - 1))
        block["positions"].append(positions)
        block["pages"].append([table[slot][at // page_size] if own else 0 for at, own in zip(positions, owned, strict=True)])
        block["offsets"].append([at % page_size if own else 0 for at, own in zip(positions, owned, strict=True)])
        block["owned"].append(owned)
        block["seq_lens"].append(length + sum(owned) if drafting else 0)
    return columns, block


def assert_as_by_hand(case: Case, result: StepRows) -> None:
    columns, block = by_hand(case)
    batch = case.slots.shape[0]
    shapes = {"committed_tokens": (batch, case.shape.num_drafts + 1), "block_ids": (batch, case.shape.rows)}
    for name, values in columns.items():
        assert_bitwise_equal(getattr(result, name), integers(values).view(shapes.get(name, (batch,))), name)
    wide = (batch, case.shape.rows)
    for name in ("pages", "offsets"):
        assert_bitwise_equal(getattr(result.block.where, name), integers(block[name]).view(wide), name)
    owned = torch.tensor(block["owned"], dtype=torch.bool, device=DEVICE).view(wide)
    assert_bitwise_equal(result.block.where.owned, owned, "owned")
    assert_bitwise_equal(result.block.positions, integers(block["positions"]).view(wide), "positions")
    assert_bitwise_equal(result.block.seq_lens, integers(block["seq_lens"]), "seq_lens")
    rotations = [case.cos_sin[position] for positions in block["positions"] for position in positions]
    wanted = torch.stack(rotations) if rotations else case.cos_sin[:0]
    assert_bitwise_equal(result.cos_sin, wanted.view(*wide, case.cos_sin.shape[1]), "cos_sin")


def flat(result: StepRows) -> dict[str, torch.Tensor]:
    rest = {"positions": result.block.positions, "seq_lens": result.block.seq_lens}
    where = {name: getattr(result.block.where, name) for name in ("pages", "offsets", "owned")}
    names = (field.name for field in dataclasses.fields(StepRows) if field.name != "block")
    return {name: getattr(result, name) for name in names} | rest | where


def check(case: Case) -> StepRows:
    """Kernel first, then the reference, then the loop; no argument may have changed."""
    before = [tensor.clone() for tensor in case.tensors]
    with watched_memory(*case.tensors):
        fused = case.run(fused=True)
    reference = case.run(fused=False)
    for name, wanted in flat(reference).items():
        assert_bitwise_equal(flat(fused)[name], wanted, f"kernel: {name}")
    assert_as_by_hand(case, reference)
    for tensor, wanted in zip(case.tensors, before, strict=True):
        assert_bitwise_equal(tensor, wanted, "an argument")
    return fused


SHAPES = [(1, 1, 1), (1, 2, 16), (2, 3, 20), (5, 5, 32), (7, 7, 16), (7, 8, 1), (15, 16, 32), (16, 16, 20), (16, 17, 16)]


@pytest.mark.parametrize(("drafts", "rows", "page_size"), SHAPES)
def test_given_and_verified_rows(drafts, rows, page_size):
    for turn, (form, order) in enumerate(zip(STRIDES, ("scattered", "reversed") * 2, strict=True)):
        check(random_case(drafts, rows, page_size, turn, 5, form=form, order=order))


@pytest.mark.parametrize(("given", "verified"), [(0, 0), (1, 0), (0, 1), (4, 0), (0, 17)])
def test_batches_of_one_kind(given, verified):
    check(random_case(7, 7, 16, given, verified))


@pytest.mark.parametrize("width", [1, 2, 16, 64])
def test_widths_of_the_rotation(width):
    check(random_case(3, 4, 16, 1, 3, width=width))


def test_one_page_for_each_request():
    check(random_case(7, 8, 20, 3, 12, table_width=1))


def test_one_row_of_choices_for_all_requests():
    case = random_case(4, 4, 16, 1, 6, dummies=0)
    case.target_tokens = case.target_tokens[:1].expand(6, -1)
    check(case)


def test_dummy_rows_take_nothing_from_slot_0():
    case = random_case(6, 7, 16, 2, 6)
    case.slots.fill_(-1)
    for tensor in (case.tables.context_lens, case.tables.draft_tokens, case.tables.num_valid_drafts, case.tables.num_pages):
        tensor[0] = 3
    case.tables.page_table[0, :3] = torch.tensor([5, 6, 7], dtype=torch.int32, device=DEVICE)
    case.tables.draft_tokens[0] = case.target_tokens[0, 0] = 1
    result = check(case)
    assert not result.block.where.owned.any()
    assert not torch.stack((result.context_lens, result.num_dropped, result.num_valid_drafts, result.num_committed)).any()


def test_slots_that_no_row_names_are_not_read():
    case = random_case(5, 6, 16, 1, 3, dummies=0)
    named = torch.zeros(case.tables.num_pages.shape[0], dtype=torch.bool, device=DEVICE)
    named[case.slots] = True
    wanted = case.run(fused=False)
    for field in dataclasses.fields(SlotTables):
        table = getattr(case.tables, field.name)
        table[~named] = poison_(torch.empty((), dtype=table.dtype))
    for name, tensor in flat(case.run(fused=True)).items():
        assert_bitwise_equal(tensor, flat(wanted)[name], name)


def edge_case(length: int, limit: int, pages: int, accepted: int, first_draft_row: int = 0, vocab_size: int = 8) -> Case:
    """One request of K = 3 whose first `accepted` drafts stand."""
    target = [[7] * accepted + [5] * (4 - accepted)]
    return Case(
        slots=integers([0]),
        tables=SlotTables(
            context_lens=integers([length]),
            draft_tokens=integers([[7, 7, 7]]),
            num_valid_drafts=integers([3]),
            max_context=integers([limit]),
            page_table=torch.tensor([[2, 0, 1]], dtype=torch.int32, device=DEVICE),
            num_pages=integers([pages]),
        ),
        given=GivenRows(integers([]), integers([])),
        target_tokens=integers(target),
        cos_sin=random_bits(20, 2, dtype=torch.float32),
        shape=BlockShape(3, vocab_size, 3 + first_draft_row, first_draft_row, 4, MASK_TOKEN),
    )


@pytest.mark.parametrize(
    ("arguments", "context_len", "num_dropped", "num_valid", "seq_len"),
    [
        ((4, 99, 3, 3), 8, 0, 3, 11),
        ((4, 99, 2, 3), 8, 0, 0, 8),  # the context ends with the last page
        ((5, 99, 2, 3), 8, 1, 0, 8),  # one committed row has no page
        ((4, 99, 2, 2), 7, 0, 1, 8),  # one row of the block has a page
        ((4, 99, 2, 2, 1), 7, 0, 0, 8),  # and it predicts nothing
        ((4, 8, 3, 3), 8, 0, 0, 11),  # the context is as long as the limit, the anchor behind it
        ((4, 9, 3, 3), 8, 0, 0, 11),  # the anchor is the limit's last token
        ((4, 10, 3, 3), 8, 0, 1, 11),
        ((4, 11, 3, 3), 8, 0, 2, 11),
        ((4, 12, 3, 3), 8, 0, 3, 11),
        ((0, 99, 0, 0), 0, 1, 0, 0),  # no page at all
        ((11, 99, 3, 0, 1), 12, 0, 0, 12),
    ],
)
def test_edges(arguments, context_len, num_dropped, num_valid, seq_len):
    result = check(edge_case(*arguments))
    values = (result.context_lens, result.num_dropped, result.num_valid_drafts, result.block.seq_lens)
    assert tuple(int(value) for value in values) == (context_len, num_dropped, num_valid, seq_len)


def test_a_request_that_outran_its_pages_owns_no_row_of_the_block():
    result = check(edge_case(30, 99, 2, 1))
    assert (int(result.context_lens), int(result.num_dropped)) == (8, 24)
    assert not result.block.where.owned.any()


def test_a_request_without_context_has_its_block_at_position_0():
    case = edge_case(0, 99, 3, 0)
    case.given, case.target_tokens = GivenRows(integers([0]), integers([0])), case.target_tokens[:0]
    result = check(case)
    assert (int(result.context_lens), int(result.anchors), int(result.num_valid_drafts)) == (0, 0, 3)
    assert result.block.where.owned.all() and result.block.where.pages.tolist() == [[2, 2, 2]]


@pytest.mark.parametrize("checked", [0, 1, 3])
def test_drafts_that_were_not_checked_do_not_stand(checked):
    case = edge_case(0, 99, 3, 3)
    case.tables.num_valid_drafts.fill_(checked)
    result = check(case)
    assert int(result.num_accepted) == checked
    assert result.committed_tokens.tolist() == [[7] * checked + [int(case.target_tokens[0, checked])] + [-1] * (3 - checked)]


def test_a_missing_draft_stands_for_token_0():
    case = edge_case(0, 99, 3, 0)
    case.tables.draft_tokens[0, 0] = -1
    case.target_tokens[0, 0] = 0
    assert int(check(case).num_accepted) == 1


def test_tokens_past_2_to_the_31_are_compared_whole():
    case = edge_case(0, 99, 3, 1, vocab_size=HUGE)
    case.tables.draft_tokens[0] = 2**32 + 7
    case.target_tokens[0, 3] = 2**40
    result = check(case)
    assert int(result.num_accepted) == 0
    case.target_tokens[0, :3] = 2**32 + 7
    result = check(case)
    assert (int(result.num_accepted), int(result.anchors)) == (3, 2**40)


@pytest.mark.parametrize("token", [-1, -(2**40), 8, 2**32 + 3, 2**62])
@pytest.mark.parametrize("accepted", [0, 2, 3])
def test_a_verdict_that_ends_outside_the_vocabulary_is_void(token, accepted):
    case = edge_case(2, 99, 3, accepted)
    case.target_tokens[0, accepted] = token
    result = check(case)
    assert (int(result.context_lens), int(result.num_dropped)) == (2, accepted + 1)
    assert (int(result.num_committed), int(result.anchors), int(result.num_valid_drafts)) == (0, 0, 0)
    assert not result.block.where.owned.any() and int(result.block.seq_lens) == 0


def test_the_last_token_of_the_vocabulary_stands():
    case = edge_case(0, 99, 3, 1)
    case.target_tokens[0, 1] = 7
    case.target_tokens[0, 2] = 2**40
    case.tables.draft_tokens[0, 1] = 6
    result = check(case)
    assert (int(result.num_committed), int(result.anchors), int(result.num_dropped)) == (2, 7, 0)
