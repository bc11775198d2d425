"""Host-side bookkeeping of pages: who holds which, how often, and what is promised."""


class CapacityError(RuntimeError):
    """The pool or the worker cannot take on what was asked; nothing was changed."""


class PageAllocator:
    """Pages 0 .. num_pages - 1 with reference counts, and promises of pages that a holder may still take.

    A promise makes sure that `take` cannot fail for its holder: `available` counts the pages that are neither held nor
    promised.
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages
        self._promised = 0

    @property
    def available(self) -> int:
        """Pages that may still be promised."""
        return len(self._free) - self._promised

    @property
    def num_held(self) -> int:
        return self.num_pages - len(self._free)

    def references(self, page: int) -> int:
        return self._references[page]

    def promise(self, count: int, what: str) -> None:
        """Set `count` pages aside.

        Raises:
            CapacityError: fewer are available; `what` says for what they were wanted.
        """
        if count > self.available:
            raise CapacityError(
                f"{what} needs {count} pages, but only {max(self.available, 0)} of {self.num_pages} are neither held nor "
                "promised; release requests or prefixes, admit fewer tokens, or build a pool with more num_pages"
            )
        self._promised += count

    def withdraw(self, count: int) -> None:
        """Give a promise back."""
        assert 0 <= count <= self._promised
        self._promised -= count

    def take(self, count: int) -> list[int]:
        """Turn `count` promised pages into held ones."""
        assert count <= self._promised and count <= len(self._free)
        self._promised -= count
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def untake(self, pages: list[int]) -> None:
        """Undo `take`: the pages are free again and promised as before."""
        self.drop(pages)
        self._promised += len(pages)

    def share(self, pages: list[int]) -> None:
        """One more holder of pages that are held already."""
        for page in pages:
            assert self._references[page] > 0
            self._references[page] += 1

    def drop(self, pages: list[int]) -> None:
        """One holder less; a page without a holder is free again."""
        for page in reversed(pages):
            assert self._references[page] > 0
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)
