"""Runs a kernel's PTX on the CPU: what a CuTe DSL kernel computes, and whether its CTAs end, without a GPU.

The lanes of a warp go in lock step, those at the lowest place first, so that lanes that branched apart meet where the code
does.  Warps take random turns of random length.  Memory is what the test gave, nothing else; registers and shared memory start
with garbage.  The kernel before ends when nothing can go on without it.  It knows the instructions that those tests need which
import it.  fma rounds twice, from float64, and powers of two are numpy's.
"""

import random
import re
from collections.abc import Callable

import numpy as np
import torch

WARP = 32
OUTSIDE = 1 << 40  # the place of a lane that has ended
SIGNED = {"s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64, "f16": np.float16, "f32": np.float32}
UNSIGNED = {f"{letter}{bits}": np.dtype(f"u{bits // 8}").type for letter in "ub" for bits in (16, 32, 64)}
TYPES = SIGNED | UNSIGNED
WIDER = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}
COMPARISONS = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
BINARY = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "min": np.minimum,
    "max": np.maximum,
}


def fma(a, b, c) -> np.ndarray:
    return (np.float64(a) * np.float64(b) + np.float64(c)).astype(np.float32)


class Memory:
    """Arrays at made-up addresses, with gaps between."""

    def __init__(self):
        self._arrays: list[tuple[int, np.ndarray]] = []
        self._next = 1 << 20

    def add(self, array: np.ndarray) -> int:
        """The address of a contiguous array; the kernel changes the array itself."""
        address, data = self._next, array.reshape(-1).view(np.uint8)
        self._next += (data.size // 4096 + 2) * 4096
        self._arrays.append((address, data))
        return address

    def at(self, address: int, size: int) -> np.ndarray:
        assert address % size == 0, f"{size} bytes at {address:#x} are not aligned"
        for start, data in self._arrays:
            if start <= address and address + size <= start + data.size:
                return data[address - start : address - start + size]
        raise AssertionError(f"nothing is at {address:#x}")


class Program:
    """The instructions of a module's one kernel: (guard, names, operands); where labels point to; shared memory's layout, with
    so many bytes that the launch gives it."""

    def __init__(self, ptx: str, dynamic: int):
        start = ptx.index("\n{\n")
        self.code, self.labels, self.shared, self.shared_size = [], {}, {}, dynamic
        for name in re.findall(r"\.extern \.shared .* (\w+)\[\];", ptx):
            self.shared[name] = 0
        for line in (line.split("//")[0].strip() for line in ptx[start + 3 : ptx.rindex("}")].split("\n")):
            if found := re.match(r"\.shared \.align (\d+) \.\w(\d+) ([\w$]+)(?:\[(\d+)\])?;", line):
                align, bits, name, count = int(found[1]), int(found[2]), found[3], int(found[4] or 1)
                self.shared[name] = -(-self.shared_size // align) * align
                self.shared_size = self.shared[name] + count * bits // 8
            elif found := re.match(r"([\w$]+):$", line):
                self.labels[found[1]] = len(self.code)
            elif found := re.match(r"(?:@(!?%p\d+)\s+)?(\w[\w.:]*)\s*(.*);$", line):
                operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", found[3])
                self.code.append((found[1], found[2].split("."), operands))


class Warp:
    def __init__(self, cta: "Cta", index: int):
        self.cta, self.index, self.waits, self.waits_for_kernel = cta, index, False, False
        self.place = np.zeros(WARP, np.int64)
        self._registers: dict[str, np.ndarray] = {}

    def register(self, name: str) -> np.ndarray:
        """Its bits, for each lane; predicates are 0 or 1."""
        garbage = 1 if name.startswith("%p") else 0xDEADBEEFDEADBEEF
        return self._registers.setdefault(name, np.full(WARP, garbage, np.uint64))

    @property
    def ended(self) -> bool:
        return self.place.min() >= OUTSIDE

    @property
    def rests(self) -> bool:
        return self.ended or self.waits or self.waits_for_kernel


class Cta:
    """index: x, y, z."""

    def __init__(self, index: tuple[int, int, int], warps: int, shared_size: int):
        self.index, self.shared = index, np.full(max(shared_size, 1), 0xFF, np.uint8)  # NaN
        self.warps = [Warp(self, warp) for warp in range(warps)]


class Machine:
    """All CTAs of one launch.  arguments: the kernel's parameters in order, addresses and integers; ctas: how many, or in x and
    y; dtype: of the matrices; end_before: the last that the kernel before does; shared: bytes of dynamic shared memory; early:
    the next kernel may begin before the one before has ended; only: the CTAs, (x, y), that are there."""

    def __init__(
        self, ptx: str, memory: Memory, arguments: list[int], ctas: int | tuple[int, int], warps: int, dtype: torch.dtype,
        seed: int, end_before: Callable[[], None], *, shared: int = 0, early: bool = False,
        only: list[tuple[int, int]] | None = None,
    ):  # fmt: skip
        self._program, self._memory, self._arguments, self._dtype = Program(ptx, shared), memory, arguments, dtype
        self._random, self._end_before, self._alone, self._early = random.Random(seed), end_before, False, early
        width, height = (ctas, 1) if isinstance(ctas, int) else ctas
        self._grid, places = (width, height, 1), only or [(x, y) for y in range(height) for x in range(width)]
        self._warps = [w for x, y in places for w in Cta((x, y, 0), warps, self._program.shared_size).warps]

    def run(self, limit: int = 1_000_000) -> None:
        """Raises AssertionError where not all warps have ended after `limit` instructions."""
        running, done = list(self._warps), 0
        while running:
            warp = self._random.choice(running)
            for _ in range(self._random.choice((1, 7, 60, 400))):
                if warp.rests:
                    break
                self._step(warp)
                done += 1
            assert done < limit, "the programs do not end"
            if all(other.waits for other in warp.cta.warps):
                for other in warp.cta.warps:
                    other.waits = False
            if warp.ended:
                running.remove(warp)
            if not self._alone and all(other.rests for other in running):
                self._end_before()
                self._alone = True
                for other in running:
                    other.waits_for_kernel = False

    def _step(self, warp: Warp) -> None:
        place = int(warp.place.min())
        here = warp.place == place
        guard, names, operands = self._program.code[place]
        taken = here.copy()
        if guard is not None:
            taken &= (warp.register(guard.lstrip("!")) != 0) ^ guard.startswith("!")
        warp.place[here] += 1
        name = names[0]
        if name == "bra":
            warp.place[taken] = self._program.labels[operands[0]]
        elif name == "ret":
            warp.place[taken] = OUTSIDE
        elif name == "bar" and names[1] != "warp":
            assert taken.all(), "lanes are missing at a barrier"
            warp.waits = True
        elif name == "griddepcontrol":
            waits = names[1] == "wait"
            assert self._alone or self._early or waits, "the next kernel may begin before the one before has ended"
            warp.waits_for_kernel = waits and not self._alone
        elif name in ("ld", "st", "prefetch"):
            self._access(warp, names, operands, taken)
        elif name in ("bar", "cp"):
            self._copy(warp, names, operands, taken)
        elif name in ("redux", "vote", "shfl", "mma"):
            assert taken.all(), f"lanes are missing at {name}"
            getattr(self, f"_{name}")(warp, names, operands)
        else:
            self._compute(warp, names, operands, taken)

    def _read(self, warp: Warp, operand: str, kind: str) -> np.ndarray:
        if operand.startswith("%laneid"):
            bits = np.arange(WARP, dtype=np.uint64)
        elif operand.startswith("%tid"):
            bits = np.arange(WARP, dtype=np.uint64) + np.uint64(WARP * warp.index)
        elif operand.startswith("%ctaid"):
            bits = np.full(WARP, warp.cta.index["xyz".index(operand[-1])], np.uint64)
        elif operand.startswith("%nctaid"):
            bits = np.full(WARP, self._grid["xyz".index(operand[-1])], np.uint64)
        elif operand.startswith("%"):
            bits = warp.register(operand)
        elif operand in self._program.shared:
            bits = np.full(WARP, self._program.shared[operand], np.uint64)
        else:
            value = int(operand[2:], 16) if operand.startswith("0f") else int(operand, 0)
            bits = np.full(WARP, value & (1 << 64) - 1, np.uint64)
        if kind == "pred":
            return bits & np.uint64(1)  # a constant is 0 or -1
        return bits.astype(f"u{TYPES[kind]().itemsize}").view(TYPES[kind])  # the low bits

    def _write(self, warp: Warp, name: str, values: np.ndarray, lanes) -> None:
        if name != "_":
            warp.register(name)[lanes] = values.view(f"u{values.itemsize}").astype(np.uint64)[lanes]

    def _compute(self, warp: Warp, names: list[str], operands: list[str], lanes) -> None:
        name, kind, into = names[0], names[-1], operands[0]
        if name == "mov" and any(operand.startswith("{") for operand in operands):
            self._pair(warp, int(kind[1:]), operands, lanes)
            return
        if "f16x2" in names:
            with np.errstate(all="ignore"):
                high, low = (self._read(warp, operand, "f32").astype(np.float16).view(np.uint16) for operand in operands[1:])
            self._write(warp, into, low | high.astype(np.uint32) << np.uint32(16), lanes)
            return
        kinds = [kind] * (len(operands) - 1)
        if name in ("shl", "shr"):
            kinds[1] = "u32"
        if name == "selp":
            kinds[2] = "pred"
        values = [self._read(warp, operand, k) for operand, k in zip(operands[1:], kinds, strict=True)]
        with np.errstate(all="ignore"):
            if name == "mov":
                result = values[0]
            elif name == "cvt":
                result = values[0].astype(TYPES[names[-2]])
            elif name == "neg":
                result = np.negative(values[0])
            elif name == "ex2":
                result = np.exp2(values[0])
            elif name == "rcp":
                result = np.float32(1) / values[0]
            elif name == "fma":
                result = fma(*values)
            elif name == "popc":
                result = np.array([int(value).bit_count() for value in values[0]], np.uint32)
            elif name in ("div", "rem"):  # towards zero
                quotient = np.trunc(values[0].astype(np.float64) / values[1]).astype(values[0].dtype)
                result = quotient if name == "div" else values[0] - quotient * values[1]
            elif name == "mul" and names[1] == "hi":
                result = (values[0].astype(TYPES[WIDER[kind]]) * values[1] >> 32).astype(values[0].dtype)
            elif name == "not":
                result = values[0] ^ np.uint64(1) if kind == "pred" else ~values[0]
            elif name in ("shl", "shr"):
                shift = np.left_shift if name == "shl" else np.right_shift
                result = shift(values[0], values[1].astype(values[0].dtype))
            elif name == "setp":
                result = COMPARISONS[names[1]](*values).astype(np.uint64)
            elif name == "selp":
                result = np.where(values[2] != 0, values[0], values[1])
            elif name in ("mul", "mad") and names[1] in ("lo", "wide"):
                into_kind = WIDER[kind] if names[1] == "wide" else kind
                result = values[0].astype(TYPES[into_kind]) * values[1].astype(TYPES[into_kind])
                if name == "mad":
                    result = result + self._read(warp, operands[3], into_kind)
            else:
                result = BINARY[name](*values)
        self._write(warp, into, result, lanes)

    def _pair(self, warp: Warp, bits: int, operands: list[str], lanes) -> None:
        """mov between a register of so many bits and two of half its width."""
        names, half = [re.findall(r"[%\w]+", operand) for operand in operands], bits // 2
        if operands[0].startswith("{"):
            both = self._read(warp, operands[1], f"b{bits}").astype(np.uint64)
            for name, shift in zip(names[0], (0, half), strict=True):
                self._write(warp, name, (both >> np.uint64(shift)).astype(f"u{half // 8}"), lanes)
        else:
            low, high = (self._read(warp, name, f"b{half}").astype(np.uint64) for name in names[1])
            self._write(warp, operands[0], low | high << np.uint64(half), lanes)

    def _copy(self, warp: Warp, names: list[str], operands: list[str], lanes) -> None:
        """cp.async, done at once; and what a warp that goes in lock step need not wait for."""
        if "global" not in names:
            assert names[:2] in (["bar", "warp"], ["cp", "async"]), names
            return
        (into, to), (source, at) = (re.match(r"\[(%\w+)(?:\+(-?\d+))?\]", operand).groups() for operand in operands[:2])
        places = self._read(warp, into, "u32").astype(np.int64) + int(to or 0)
        addresses, size = self._read(warp, source, "u64").astype(np.int64) + int(at or 0), int(operands[2])
        for lane in np.flatnonzero(lanes):
            assert 0 <= places[lane] <= warp.cta.shared.size - size and places[lane] % size == 0
            warp.cta.shared[places[lane] : places[lane] + size] = self._memory.at(int(addresses[lane]), size)

    def _access(self, warp: Warp, names: list[str], operands: list[str], lanes) -> None:
        stores, size = names[0] == "st", TYPES.get(names[-1], np.uint64)().itemsize
        base, offset = re.match(r"\[([%\w$]+)(?:\+(-?\d+))?\]", operands[0 if stores or names[0] == "prefetch" else 1]).groups()
        if "param" in names:
            value = self._arguments[int(base.rsplit("_", 1)[1])]
            self._write(warp, operands[0], np.full(WARP, value, TYPES[names[-1].replace("b", "s")]), lanes)
            return
        addresses = self._read(warp, base, "u64" if "shared" not in names else "u32").astype(np.int64) + int(offset or 0)
        if names[0] == "prefetch":
            for lane in np.flatnonzero(lanes):
                self._memory.at(int(addresses[lane]), 2)
            return
        registers = re.findall(r"[%\w]+", operands[1 if stores else 0])
        for lane in np.flatnonzero(lanes):
            assert addresses[lane] % (size * len(registers)) == 0, "a vector is not aligned"
            for i, name in enumerate(registers):
                where = int(addresses[lane]) + i * size
                if "shared" in names:
                    assert 0 <= where <= warp.cta.shared.size - size and where % size == 0
                    data = warp.cta.shared[where : where + size]
                else:
                    data = self._memory.at(where, size)
                if stores:
                    data[:] = self._read(warp, name, f"b{8 * size}")[lane : lane + 1].view(np.uint8)
                else:
                    warp.register(name)[lane] = int.from_bytes(data.tobytes(), "little")

    def _redux(self, warp: Warp, names: list[str], operands: list[str]) -> None:
        values = self._read(warp, operands[1], names[-1])
        self._write(warp, operands[0], np.full(WARP, {"max": values.max, "min": values.min}[names[2]]()), slice(None))

    def _vote(self, warp: Warp, names: list[str], operands: list[str]) -> None:
        assert names[2] in ("all", "ballot"), names
        votes = self._read(warp, operands[1], "pred")
        result = sum(int(vote) << lane for lane, vote in enumerate(votes)) if names[2] == "ballot" else votes.all()
        self._write(warp, operands[0], np.full(WARP, result, np.uint64), slice(None))

    def _shfl(self, warp: Warp, names: list[str], operands: list[str]) -> None:
        """Within a whole warp."""
        assert names[2] in ("up", "idx", "bfly"), names
        values, lanes = self._read(warp, operands[1], names[-1]), np.arange(WARP)
        distance = self._read(warp, operands[2], "u32").astype(np.int64)
        sources = {"idx": distance % WARP, "bfly": lanes ^ distance, "up": np.where(lanes >= distance, lanes - distance, lanes)}
        source = sources[names[2]]
        self._write(warp, operands[0], values[source], slice(None))

    def _mma(self, warp: Warp, names: list[str], operands: list[str]) -> None:
        """m16n8k16, sums in float64; lane l has rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next one."""
        assert "m16n8k16" in names
        into, first, second, added = (re.findall(r"%\w+", operand) for operand in operands)
        group, pair = np.arange(WARP) // 4, np.arange(WARP) % 4 * 2
        a, b, c = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
        for i, name in enumerate(first):
            for half, values in enumerate(self._halves(warp, name)):
                a[group + i % 2 * 8, pair + i // 2 * 8 + half] = values
        for i, name in enumerate(second):
            for half, values in enumerate(self._halves(warp, name)):
                b[pair + i * 8 + half, group] = values
        for i, name in enumerate(added):
            c[group + i // 2 * 8, pair + i % 2] = self._read(warp, name, "f32")
        with np.errstate(all="ignore"):
            sums = (a @ b + c).astype(np.float32)
        for i, name in enumerate(into):
            self._write(warp, name, sums[group + i // 2 * 8, pair + i % 2], slice(None))

    def _halves(self, warp: Warp, name: str) -> torch.Tensor:
        """The two 16-bit values of a register, [2, 32]."""
        bits = np.ascontiguousarray(self._read(warp, name, "b32")).view(np.int16).reshape(WARP, 2)
        return torch.from_numpy(bits.copy()).view(self._dtype).double().T.numpy()
