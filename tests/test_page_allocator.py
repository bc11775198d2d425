"""Pages: who holds which, how often, and what is promised."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dspark_model.page_allocator import CapacityError, PageAllocator


def test_promise_take_drop():
    pages = PageAllocator(4)
    pages.promise(3, "a request")
    assert (pages.available, pages.num_held) == (1, 0)
    taken = pages.take(2)
    assert (pages.available, pages.num_held) == (1, 2)
    pages.withdraw(1)
    assert pages.available == 2
    pages.drop(taken)
    assert (pages.available, pages.num_held) == (4, 0)


def test_pages_are_handed_out_from_zero_on():
    pages = PageAllocator(3)
    pages.promise(3, "a request")
    assert pages.take(3) == [0, 1, 2]


def test_refused_promise_says_what_and_changes_nothing():
    pages = PageAllocator(4)
    pages.promise(3, "first")
    with pytest.raises(CapacityError, match="second needs 2 pages, but only 1 of 4.*release"):
        pages.promise(2, "second")
    assert pages.available == 1


def test_untake_restores_the_order():
    pages = PageAllocator(5)
    pages.promise(4, "a request")
    first = pages.take(1)
    before = (list(pages._free), pages.available)
    taken = pages.take(3)
    pages.untake(taken)
    assert (list(pages._free), pages.available) == before
    assert pages.take(3) == taken and first == [0]


def test_shared_page_is_free_only_after_its_last_holder():
    pages = PageAllocator(2)
    pages.promise(1, "a request")
    held = pages.take(1)
    pages.share(held)
    pages.drop(held)
    assert (pages.num_held, pages.references(0)) == (1, 1)
    pages.drop(held)
    assert (pages.num_held, pages.references(0)) == (0, 0)


@pytest.mark.parametrize("call", ["share", "drop"])
def test_a_free_page_can_be_neither_shared_nor_dropped(call):
    with pytest.raises(AssertionError):
        getattr(PageAllocator(2), call)([1])


class AllocatorModel(RuleBasedStateMachine):
    """The allocator beside a plain account of who holds what."""

    SIZE = 7

    def __init__(self):
        super().__init__()
        self.pages = PageAllocator(self.SIZE)
        self.holders: list[list[int]] = []
        self.promised = 0

    def _held(self) -> set[int]:
        return {page for holder in self.holders for page in holder}

    @rule(count=st.integers(0, 5))
    def promise(self, count):
        if count <= self.SIZE - len(self._held()) - self.promised:
            self.pages.promise(count, "model")
            self.promised += count
            return
        with pytest.raises(CapacityError):
            self.pages.promise(count, "model")

    @precondition(lambda self: self.promised)
    @rule(data=st.data())
    def take(self, data):
        count = data.draw(st.integers(1, self.promised))
        free = set(range(self.SIZE)) - self._held()
        taken = self.pages.take(count)
        assert len(set(taken)) == count and set(taken) <= free
        self.promised -= count
        self.holders.append(taken)

    @precondition(lambda self: self.promised)
    @rule(data=st.data())
    def take_and_undo(self, data):
        count = data.draw(st.integers(1, self.promised))
        before = list(self.pages._free)
        self.pages.untake(self.pages.take(count))
        assert self.pages._free == before

    @precondition(lambda self: self.promised)
    @rule(data=st.data())
    def withdraw(self, data):
        count = data.draw(st.integers(1, self.promised))
        self.pages.withdraw(count)
        self.promised -= count

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data):
        source = data.draw(st.sampled_from(self.holders))
        shared = source[: data.draw(st.integers(0, len(source)))]
        self.pages.share(shared)
        self.holders.append(list(shared))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def drop(self, data):
        self.pages.drop(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @invariant()
    def counts_agree(self):
        held = self._held()
        assert self.pages.num_held == len(held)
        assert self.pages.available == self.SIZE - len(held) - self.promised >= 0
        for page in range(self.SIZE):
            assert self.pages.references(page) == sum(page in holder for holder in self.holders)
        assert sorted(self.pages._free) == sorted(set(range(self.SIZE)) - held)


TestAllocatorModel = AllocatorModel.TestCase
TestAllocatorModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)
