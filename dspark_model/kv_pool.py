"""The paged single-latent pool: storage, page tables, shared prefixes, a window over the context."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dspark_model import ops
from dspark_model.config import DrafterConfig
from dspark_model.page_allocator import CapacityError, PageAllocator
from dspark_model.serving_config import Layout, PoolConfig


@dataclass(frozen=True, slots=True, eq=False)
class PrefixHandle:
    """Context rows 0 .. num_tokens - 1 of some request, kept for later ones: whole pages by reference, the rows of a last,
    partly filled page as a private copy."""

    num_tokens: int
    full_pages: tuple[int, ...]
    tail_page: int | None


class PagedLatents:
    """What a worker needs of any pool.

    layer_views: one tensor [pages, page_size, W] per layer, any stride between pages; W = `ops.pool_row_width` of
        kv_lora_rank + qk_rope_head_dim values: that many, and more bytes in a float8_e4m3fn pool.
    page_table: int32 [max_requests, P], -1 where a slot has no page; num_pages: int64 [max_requests].
    """

    def __init__(self, config: PoolConfig, drafter: DrafterConfig, layer_views: Sequence[torch.Tensor]):
        self.config = config
        self.layer_views = tuple(layer_views)
        _check_views(self.layer_views, config, drafter)
        device = self.layer_views[0].device
        # A request holds its context and, behind it, the block's own rows (K + 1 with the plain slot rule).
        self.max_rows = config.max_positions + config.num_drafts + 1
        self.page_table = torch.full((config.max_requests, self.pages_for(self.max_rows)), -1, dtype=torch.int32, device=device)
        self.num_pages = torch.zeros(config.max_requests, dtype=torch.int64, device=device)

    @property
    def dtype(self) -> torch.dtype:
        return self.layer_views[0].dtype

    @property
    def device(self) -> torch.device:
        return self.layer_views[0].device

    def pages_for(self, rows: int) -> int:
        return -(-rows // self.config.page_size)

    def forget(self, slot: int, length: int) -> None:
        """Give back what no block behind `length` context rows sees; without a window over the context that is nothing."""

    def lacks_pages(self, slot: int, rows: int) -> bool:
        """Whether `begin_step` with so many rows would need more pages than are promised to the slot."""
        return False

    def _set_pages(self, slot: int, pages: Sequence[int], first: int = 0) -> None:
        """The slot's pages from page `first` of its rows on; those before it are gone."""
        on_cuda = self.device.type == "cuda"
        row = torch.full((self.page_table.shape[1],), -1, dtype=torch.int32, pin_memory=on_cuda)
        row[first : first + len(pages)] = torch.tensor(pages, dtype=torch.int32)
        # From pinned memory the copy does not wait for the device; torch keeps the memory until it is done.
        self.page_table[slot].copy_(row, non_blocking=True)
        # Not by assignment, which waits for the device.
        self.num_pages[slot].fill_(first + len(pages))


class LatentKVPool(PagedLatents):
    """A pool that owns its memory and hands out its pages.

    It keeps exactly kv_lora_rank + qk_rope_head_dim values a token and layer, 5,760 bytes a token at Kimi K3's shape in bf16;
    with dtype float8_e4m3fn the rows of `ops.quantise_rows`, 2,960 bytes.  Memory is not cleared: a row is written before it
    is read.

    With a window over the context a slot is promised the pages that a decode step of it can need.  A longer chunk borrows the
    others from what is available; its old pages pay them back.
    """

    def __init__(
        self,
        config: PoolConfig,
        drafter: DrafterConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ):
        layers, pages, width = drafter.num_hidden_layers, config.num_pages, ops.pool_row_width(drafter.latent_dim, dtype)
        if config.layout is Layout.LAYER_MAJOR:
            self.storage = torch.empty((layers, pages, config.page_size, width), dtype=dtype, device=device)
            views = self.storage.unbind(0)
        else:
            self.storage = torch.empty((pages, layers, config.page_size, width), dtype=dtype, device=device)
            views = self.storage.unbind(1)
        super().__init__(config, drafter, views)
        self._allocator = PageAllocator(pages)
        self._pages: dict[int, list[int]] = {}
        self._promised: dict[int, int] = {}
        # With a window: the first page that is left, and pages beyond the promise.
        self._first: dict[int, int] = {}
        self._borrowed: dict[int, int] = {}
        self._prefixes: set[PrefixHandle] = set()

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes

    @property
    def bytes_per_token(self) -> int:
        return self.nbytes // (self.config.num_pages * self.config.page_size)

    @property
    def num_available_pages(self) -> int:
        """Pages that are neither held nor promised."""
        return self._allocator.available

    @property
    def num_held_pages(self) -> int:
        return self._allocator.num_held

    def pages_of(self, slot: int) -> tuple[int, ...]:
        return tuple(self._pages[slot])

    def open(self, slot: int, max_rows: int, prefix: PrefixHandle | None, what: str) -> None:
        """Admit a slot that will hold at most `max_rows` rows, with the rows of `prefix` already there.

        Raises:
            ValueError: the slot is open already, the prefix is not one that this pool keeps, or there is a window over the
                context; nothing was changed.
            CapacityError: the pages for it cannot be promised; nothing was changed.
        """
        if slot in self._pages:
            raise ValueError(f"{what}: slot {slot} of the pool is open already; a pool serves one worker")
        if prefix is not None:
            self._check_shares_pages()
            self._check_prefix(prefix)
        shared = list(prefix.full_pages) if prefix else []
        needed = self._most_pages(max_rows) - len(shared)
        self._allocator.promise(needed, what)
        self._allocator.share(shared)
        self._pages[slot], self._promised[slot] = shared, needed
        self._first[slot] = self._borrowed[slot] = 0
        if prefix and prefix.tail_page is not None:
            self._grow(slot, len(shared) + 1)
            self._copy_rows(prefix.tail_page, self._pages[slot][-1], prefix.num_tokens % self.config.page_size)
        self._set_pages(slot, self._pages[slot])

    def begin_step(
        self, rows: Mapping[int, int], block_table: torch.Tensor | None, *, read_values: bool = True, fused: bool = False
    ) -> dict[int, int]:
        """Make sure that each slot has pages for that many rows; returns what `cancel_step` needs to undo it.

        Cannot fail for rows within what `open` promised, and never waits for the device; the options are for pools that take a
        table.

        Raises:
            CapacityError: a chunk needs more pages than its slot was promised, and they are not available; nothing was changed.
        """
        if block_table is not None:
            raise ValueError("block_table was given, but this pool allocates its own pages; leave it out")
        before = {}
        try:
            for slot, count in rows.items():
                before[slot] = (len(self._pages[slot]), self._borrowed[slot])
                if self.config.context_window is not None:
                    self._borrow(slot, count)
                if self._grow(slot, self.pages_for(count)):
                    self._set_pages(slot, self._pages[slot], self._first[slot])
        except CapacityError:
            self.cancel_step(before)
            raise
        return before

    def cancel_step(self, before: dict[int, tuple[int, int]]) -> None:
        """Return the pages that `begin_step` added, last taken first, so that the next step takes the same ones."""
        for slot, (count, borrowed) in reversed(before.items()):
            added = self._pages[slot][count:]
            if added:
                del self._pages[slot][count:]
                self._allocator.untake(added)
                self._promised[slot] += len(added)
                self._set_pages(slot, self._pages[slot], self._first[slot])
            self._repay(slot, self._borrowed[slot] - borrowed)

    def forget(self, slot: int, length: int) -> None:
        """With a window: return the pages of rows that no block behind `length` context rows sees."""
        window = self.config.context_window
        gone = 0 if window is None else max(0, length - window) // self.config.page_size - self._first[slot]
        if gone <= 0:
            return
        pages = self._pages[slot][:gone]
        del self._pages[slot][:gone]
        self._first[slot] += gone
        self._allocator.untake(pages)
        self._promised[slot] += gone
        self._repay(slot, min(self._borrowed[slot], gone))
        self._set_pages(slot, self._pages[slot], self._first[slot])

    def lacks_pages(self, slot: int, rows: int) -> bool:
        return self.config.context_window is not None and self._missing(slot, self.pages_for(rows)) > self._promised[slot]

    def close(self, slot: int) -> None:
        """Release everything that the slot holds or was promised."""
        self._allocator.drop(self._pages.pop(slot))
        self._allocator.withdraw(self._promised.pop(slot))
        del self._first[slot], self._borrowed[slot]
        self._set_pages(slot, ())

    def retain_prefix(self, slot: int, num_tokens: int) -> PrefixHandle:
        """Keep the slot's first `num_tokens` rows beyond its life; needs one page when they end inside a page.

        Raises:
            ValueError: there is a window over the context.
            CapacityError: that page is not there; nothing was changed.
        """
        self._check_shares_pages()
        full, tail = divmod(num_tokens, self.config.page_size)
        tail_page = None
        if tail:
            self._allocator.promise(1, f"the partly filled last page of a prefix of {num_tokens} tokens")
            (tail_page,) = self._allocator.take(1)
            self._copy_rows(self._pages[slot][full], tail_page, tail)
        pages = self._pages[slot][:full]
        self._allocator.share(pages)
        handle = PrefixHandle(num_tokens, tuple(pages), tail_page)
        self._prefixes.add(handle)
        return handle

    def release_prefix(self, handle: PrefixHandle) -> None:
        """Give up a prefix; requests that were opened with it keep their rows.

        Raises:
            ValueError: it was released before, or is of another pool.
        """
        self._check_prefix(handle)
        self._prefixes.remove(handle)
        tail = [] if handle.tail_page is None else [handle.tail_page]
        self._allocator.drop([*handle.full_pages, *tail])

    def _check_prefix(self, handle: PrefixHandle) -> None:
        if handle not in self._prefixes:
            raise ValueError(
                f"the prefix of {handle.num_tokens} tokens was released already or is of another pool; retain it again"
            )

    def _check_shares_pages(self) -> None:
        if self.config.context_window is not None:
            raise ValueError(
                f"a pool with context_window={self.config.context_window} gives old pages back, so requests share none; leave "
                "the prefix out, or build the pool without a window"
            )

    def _most_pages(self, max_rows: int) -> int:
        """The pages that a slot of at most `max_rows` rows is promised."""
        window = self.config.context_window
        if window is None:
            return self.pages_for(max_rows)
        # The window, K + 1 rows to verify, as many of a block, and of two steps in flight; they begin and end inside a page.
        return min(self.pages_for(max_rows), self.pages_for(window + 4 * (self.config.num_drafts + 1)) + 1)

    def _missing(self, slot: int, count: int) -> int:
        """Pages to take until the slot has its pages up to the `count`-th."""
        return count - self._first[slot] - len(self._pages[slot])

    def _borrow(self, slot: int, rows: int) -> None:
        """Promise the slot what a chunk needs beyond its promise."""
        lacking = self._missing(slot, self.pages_for(rows)) - self._promised[slot]
        if lacking > 0:
            what = (
                f"a chunk up to row {rows} of a pool with context_window={self.config.context_window} (send it in smaller ones)"
            )
            self._allocator.promise(lacking, what)
            self._promised[slot] += lacking
            self._borrowed[slot] += lacking

    def _repay(self, slot: int, count: int) -> None:
        """Give a promise back that was borrowed."""
        self._allocator.withdraw(count)
        self._promised[slot] -= count
        self._borrowed[slot] -= count

    def _grow(self, slot: int, count: int) -> bool:
        missing = self._missing(slot, count)
        if missing <= 0:
            return False
        if missing > self._promised[slot]:
            raise CapacityError(f"slot {slot} needs {missing} more pages but was promised {self._promised[slot]}")
        self._pages[slot] += self._allocator.take(missing)
        self._promised[slot] -= missing
        return True

    def _copy_rows(self, source: int, destination: int, rows: int) -> None:
        for view in self.layer_views:
            view[destination, :rows] = view[source, :rows]


def _check_views(views: tuple[torch.Tensor, ...], config: PoolConfig, drafter: DrafterConfig) -> None:
    if len(views) != drafter.num_hidden_layers:
        raise ValueError(f"{len(views)} layer views were given, wanted one for each of {drafter.num_hidden_layers} layers")
    first = views[0]
    for index, view in enumerate(views):
        wanted = (first.shape[0], config.page_size, ops.pool_row_width(drafter.latent_dim, first.dtype))
        if tuple(view.shape) != wanted:
            raise ValueError(
                f"layer view {index} has shape {list(view.shape)} in {view.dtype}, wanted [pages, page_size, W] {list(wanted)}"
            )
        if view.dtype is not first.dtype or view.device != first.device:
            raise ValueError(f"layer view {index} is {view.dtype} on {view.device}, view 0 {first.dtype} on {first.device}")
        if view.stride(-1) != 1:
            raise ValueError(f"layer view {index} has stride {view.stride(-1)} between the values of a row, wanted 1")
