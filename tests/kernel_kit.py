"""What the kernel tests share: memory that shows what was not written, written outside, or read outside; paged pools."""

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from dspark_model.testing import assert_bitwise_equal, poison_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYOUTS = ("layer_major", "page_major")
# What a pool may hold and a store copies bit by bit.
POOL_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)
ZONE = 64  # values before and behind each allocation that nothing may touch


@contextmanager
def watched_memory(*reads: torch.Tensor, writes: Sequence[torch.Tensor] = ()) -> Iterator[None]:
    """While it lasts, `torch.empty` hands out poisoned memory between two zones that have to stay as they are.

    In the interpreter also: kernels load from `reads`, `writes` and memory that was handed out, and from nowhere else, masked
    lanes aside; and store to the latter two.
    """
    allocated: list[tuple[torch.Tensor, torch.Tensor]] = []
    empty = torch.empty

    def watched_empty(*size, dtype=None, device=None):
        size = torch.Size(size[0] if size and not isinstance(size[0], int) else size)
        memory = _fill(empty(size.numel() + 2 * ZONE, dtype=dtype, device=device))
        allocated.append((memory, memory.view(torch.uint8).clone()))
        return memory[ZONE : ZONE + size.numel()].view(size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", watched_empty)
        if DEVICE == "cpu":
            _watch_interpreter(patch, reads, writes, allocated)
        yield
    for memory, before in allocated:
        after, zone = memory.view(torch.uint8), ZONE * memory.element_size()
        assert_bitwise_equal(after[:zone], before[:zone], "memory in front of an output")
        assert_bitwise_equal(after[-zone:], before[-zone:], "memory behind an output")


@contextmanager
def programs_at_once() -> Iterator[None]:
    """While it lasts, the interpreter runs the programs of a launch in threads, so that they can wait for one another."""
    from triton.runtime import interpreter

    here, builder, made = threading.local(), interpreter.interpreter_builder, []
    construct = interpreter.GridExecutor.__init__

    def remember(executor, *args, **options):
        construct(executor, *args, **options)
        made.append((executor, executor.fn, [], []))

    def choose_program(*index: int) -> None:
        executor, kernel, threads, errors = made[-1]

        def program(**arguments) -> None:
            here.index = index
            try:
                kernel(**arguments)
            except BaseException as error:  # of any kind: it is raised in the test's own thread
                errors.append(error)

        def start(**arguments) -> None:
            threads.append(threading.Thread(target=program, kwargs=arguments, daemon=True))
            if len(threads) < math.prod(builder.grid_dim):
                return
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            stuck = sum(thread.is_alive() for thread in threads)
            assert not errors and not stuck, f"{stuck} programs wait for ever; errors: {errors}"

        executor.fn = start

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__init__", remember)
        patch.setattr(builder, "set_grid_idx", choose_program)
        patch.setattr(type(builder), "grid_idx", property(lambda builder: here.index), raising=False)
        yield


@contextmanager
def recorded_stores() -> Iterator[list[int]]:
    """While it lasts, the interpreter's stores write nothing; the list holds the byte addresses that they aimed at."""
    from triton.runtime import interpreter

    native, addresses = interpreter._interpreter, []

    class Recording:
        def __getattr__(self, name):
            return getattr(native, name)

        @staticmethod
        def store(pointers, values, mask):
            addresses.extend(np.asarray(pointers)[np.broadcast_to(mask, np.shape(pointers))].astype(np.int64).tolist())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_interpreter", Recording())
        yield addresses


def _fill(memory: torch.Tensor) -> torch.Tensor:
    """Poison; a bool gets a byte that neither False nor True has."""
    if memory.dtype is torch.bool:
        memory.view(torch.uint8).fill_(0xA5)
        return memory
    return poison_(memory)


def _watch_interpreter(patch: pytest.MonkeyPatch, reads, writes, allocated) -> None:
    from triton.runtime import interpreter

    native = interpreter._interpreter
    fixed = {"read": _ranges([*reads, *writes]), "written": _ranges(writes)}

    def check(pointers: np.ndarray, mask: np.ndarray, size: int, done: str) -> None:
        ranges = fixed[done] + _ranges(memory[ZONE:-ZONE] for memory, _ in allocated)
        at = np.asarray(pointers)[np.broadcast_to(mask, np.shape(pointers))].astype(np.int64)
        inside = np.zeros(at.shape, dtype=bool)
        for first, end in ranges:
            inside |= (at >= first) & (at + size <= end)
        if not inside.all():
            raise AssertionError(f"{int((~inside).sum())} values are {done} outside the tensors given")

    class Watched:
        def __getattr__(self, name):
            return getattr(native, name)

        @staticmethod
        def load(pointers, mask, other, dtype):
            check(pointers, mask, np.dtype(dtype).itemsize, "read")
            return native.load(pointers, mask, other, dtype)

        @staticmethod
        def store(pointers, values, mask):
            check(pointers, mask, values.dtype.itemsize, "written")
            return native.store(pointers, values, mask)

    patch.setattr(interpreter, "_interpreter", Watched())


def _ranges(tensors) -> list[tuple[int, int]]:
    """First and last byte + 1 of each tensor that has values."""
    ranges = []
    for tensor in tensors:
        if tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            ranges.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()))
    return ranges


def random_bits(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Any bit pattern: NaNs with payloads, both zeros, infinities."""
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(256, (*shape, size), dtype=torch.uint8).view(dtype)[..., 0].to(DEVICE)


def make_pool(
    layers: int, pages: int, page_size: int, width: int, layout: str, dtype: torch.dtype
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Storage of random bits, with a page of padding behind the pages of a layer or the layers of a page, and the layers'
    views of it."""
    shape = (layers, pages, page_size, width) if layout == "layer_major" else (pages, layers, page_size, width)
    storage = random_bits(shape[0], shape[1] + 1, *shape[2:], dtype=dtype)
    inner = storage[:, : shape[1]]
    return storage, inner.unbind(0 if layout == "layer_major" else 1)


def make_table(slots: int, table_width: int, num_pages: torch.Tensor, *, order: str = "scattered") -> torch.Tensor:
    """A page table in which no page stands twice, page 0 stands, and entries behind a slot's pages name none.

    order: "scattered", or "reversed" for pages that descend.
    """
    pages = torch.arange(slots * table_width)
    pages = pages.flip(0) if order == "reversed" else pages[torch.randperm(len(pages))]
    table = pages.view(slots, table_width).int().to(DEVICE)
    if slots and int(num_pages.max()):
        owner = int(num_pages.argmax())
        table = torch.where(table == 0, table[owner, 0], table)
        table[owner, 0] = 0
    behind = torch.arange(table_width, device=DEVICE) >= num_pages[:, None]
    return torch.where(behind, torch.iinfo(torch.int32).max, table).contiguous()


def strided(tensor: torch.Tensor, form: str) -> torch.Tensor:
    """The same values in other strides: "plain", "columns" (column-major), "gaps" (every third of poison), "offset"."""
    if form == "columns":
        return tensor.T.contiguous().T
    if form == "gaps":
        wide = poison_(tensor.new_empty(*tensor.shape, 3))
        wide[..., 1] = tensor
        return wide[..., 1]
    if form == "offset":
        wide = poison_(tensor.new_empty(tensor.shape[0] + 2, tensor.shape[1] + 3))
        wide[1:-1, 2:-1] = tensor
        return wide[1:-1, 2:-1]
    return tensor.contiguous()


STRIDES = ("plain", "columns", "gaps", "offset")
