"""`step_commit`: the rows' results in their slots and nowhere else, by the kernel as by the reference."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from kernel_kit import DEVICE, watched_memory

from dspark_model.ops import SlotDrafts, step_commit
from dspark_model.testing import assert_bitwise_equal, poison_


@dataclass
class Rows:
    """The fields in the order of the op's arguments."""

    slots: torch.Tensor
    anchors: torch.Tensor
    context_lens: torch.Tensor
    num_valid_drafts: torch.Tensor
    draft_tokens: torch.Tensor

    @property
    def arguments(self) -> list[torch.Tensor]:
        return [getattr(self, field.name) for field in dataclasses.fields(self)]


FIELDS = [field.name for field in dataclasses.fields(SlotDrafts)]


def blank_state(slots: int, drafts: int) -> SlotDrafts:
    """Poison throughout, so that a slot that nobody named shows when it changes."""
    sizes = [(slots, drafts) if name == "draft_tokens" else (slots,) for name in FIELDS]
    return SlotDrafts(
        **{name: poison_(torch.empty(size, dtype=torch.int64, device=DEVICE)) for name, size in zip(FIELDS, sizes, strict=True)}
    )


def random_rows(batch: int, drafts: int, num_slots: int, *, dummies: float = 0.25) -> Rows:
    def integers(low: int, *size: int) -> torch.Tensor:
        return torch.randint(low, 2**40, size, device=DEVICE)

    slots = torch.randperm(num_slots, device=DEVICE)[:batch]
    slots[torch.rand(batch, device=DEVICE) < dummies] = -1
    anchors = integers(0, batch)
    anchors[torch.rand(batch, device=DEVICE) < 0.4] = -1
    anchors[torch.rand(batch, device=DEVICE) < 0.2] = 0
    return Rows(slots, anchors, integers(0, batch), integers(0, batch), integers(-5, batch, drafts))


def by_hand(state: SlotDrafts, rows: Rows) -> list[list[int]]:
    next_tokens = []
    for row, slot in enumerate(rows.slots.tolist()):
        anchor, drafts = int(rows.anchors[row]), rows.draft_tokens[row].tolist()
        if slot < 0 or anchor < 0:
            next_tokens.append([-1] * (len(drafts) + 1))
        else:
            next_tokens.append([anchor, *drafts])
        if slot >= 0:
            state.context_lens[slot] = int(rows.context_lens[row])
            state.anchors[slot] = anchor
            state.num_valid_drafts[slot] = int(rows.num_valid_drafts[row])
            for column in range(len(drafts)):
                state.draft_tokens[slot, column] = drafts[column] if anchor >= 0 else -1
    return next_tokens


def check(rows: Rows, num_slots: int) -> torch.Tensor:
    """Kernel first, then the reference, then the loop, each on a state of its own; no argument may have changed."""
    batch, drafts = rows.draft_tokens.shape
    before = [argument.clone() for argument in rows.arguments]
    states = [blank_state(num_slots, drafts) for _ in range(3)]
    with watched_memory(*rows.arguments, writes=[getattr(states[0], name) for name in FIELDS]):
        fused = step_commit(states[0], *rows.arguments, fused=True)
    reference = step_commit(states[1], *rows.arguments)
    wanted = torch.tensor(by_hand(states[2], rows), dtype=torch.int64, device=DEVICE).view(batch, drafts + 1)
    assert_bitwise_equal(fused, reference, "kernel: next tokens")
    assert_bitwise_equal(reference, wanted, "reference: next tokens")
    for name in FIELDS:
        assert_bitwise_equal(getattr(states[0], name), getattr(states[1], name), f"kernel: {name}")
        assert_bitwise_equal(getattr(states[1], name), getattr(states[2], name), f"reference: {name}")
    for argument, old in zip(rows.arguments, before, strict=True):
        assert_bitwise_equal(argument, old, "an argument")
    return fused


@pytest.mark.parametrize("drafts", [1, 2, 3, 5, 7, 8, 15, 16])
@pytest.mark.parametrize("batch", [0, 1, 2, 9])
def test_slots_in_any_order(batch, drafts):
    check(random_rows(batch, drafts, batch + 3), batch + 3)


def test_every_slot_at_once():
    check(random_rows(12, 7, 12, dummies=0), 12)


def test_token_0_is_an_anchor():
    rows = random_rows(2, 3, 2, dummies=0)
    rows.anchors[:] = torch.tensor([0, -1], device=DEVICE)
    assert check(rows, 2)[:, 0].tolist() == [0, -1]


def test_dummy_rows_alone_change_no_slot():
    rows = random_rows(4, 3, 6)
    rows.slots.fill_(-1)
    assert check(rows, 6).tolist() == [[-1] * 4] * 4


@pytest.mark.parametrize("dummy", [0, 1, 2])
def test_a_dummy_row_in_any_place_leaves_slot_0_to_its_owner(dummy):
    rows = random_rows(3, 5, 4)
    rows.slots = torch.tensor([2, 0, 3], device=DEVICE)
    rows.slots[dummy] = -1
    rows.anchors.fill_(6)
    assert check(rows, 4)[:, 0].tolist() == [-1 if row == dummy else 6 for row in range(3)]


def test_a_slot_that_drafted_nothing_takes_its_length_and_has_no_drafts():
    rows = random_rows(2, 3, 2, dummies=0)
    rows.slots, rows.anchors = torch.tensor([1, 0], device=DEVICE), torch.tensor([-1, 8], device=DEVICE)
    state = blank_state(2, 3)
    tokens = step_commit(state, *rows.arguments, fused=True)
    assert tokens[0].tolist() == [-1] * 4
    assert state.draft_tokens[1].tolist() == [-1] * 3
    assert (int(state.anchors[1]), int(state.context_lens[1])) == (-1, int(rows.context_lens[0]))
    assert tokens[1].tolist() == [8, *rows.draft_tokens[1].tolist()]


def test_two_steps_leave_what_the_second_wrote():
    state, wanted = blank_state(5, 4), blank_state(5, 4)
    for _ in range(2):
        rows = random_rows(4, 4, 5)
        step_commit(state, *rows.arguments, fused=True)
        by_hand(wanted, rows)
    for name in FIELDS:
        assert_bitwise_equal(getattr(state, name), getattr(wanted, name), name)
