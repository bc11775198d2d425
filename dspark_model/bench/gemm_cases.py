"""What `scripts/bench_gemm.py` times: the products of one Kimi K3 rank with few rows, alone and as the chain of five layers."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import linear, silu

from dspark_model import ops
from dspark_model.bench.timing import Timing, capture, time_interleaved
from dspark_model.ops import LowMTile, LowMWorkspace, low_m_linear, low_m_tile
from dspark_model.ops.low_m_linear import low_m_splits

COPY_RATE = 4.3e12  # bytes a second, what large reads reach on an H200
PAST_L2 = 300 << 20  # bytes of weights in rotation
SAMPLE_US = 2000  # what one timed sample should last at least
EPS = 1e-5
LAYERS = 5


@dataclass(frozen=True, slots=True)
class GemmCase:
    """One product: out_features (of each weight, with a gate), in_features, and what is around it."""

    name: str
    n: int
    k: int
    norm: bool = False
    gate_up: bool = False
    residual: bool = False
    logits: bool = False
    tiles: tuple[LowMTile, ...] = ()  # cuts to try beside those that every case tries

    @property
    def weight_bytes(self) -> int:
        return 2 * self.n * self.k * (1 + self.gate_up)

    @property
    def floor_us(self) -> float:
        return 1e6 * self.weight_bytes / COPY_RATE


CHAIN = (
    GemmCase("qkv_a", 2112, 7168, norm=True, tiles=(LowMTile(16, 256, 1, 6, 4),)),
    GemmCase("q_b", 1536, 1536, norm=True, tiles=(LowMTile(16, 128, 1, 8, 2), LowMTile(32, 256, 1, 5, 4))),
    GemmCase("o", 7168, 1024, residual=True, tiles=(LowMTile(32, 256, 1, 4, 4),)),
    GemmCase("gate_up", 1792, 7168, norm=True, gate_up=True, tiles=(LowMTile(16, 128, 1, 8, 4),)),
    GemmCase("down", 7168, 1792, residual=True, tiles=(LowMTile(32, 256, 1, 5, 4),)),
)
CASES = (
    *CHAIN,
    GemmCase("q_a", 1536, 7168),
    GemmCase("kv_a", 576, 7168),
    GemmCase("kv_a of 5 layers", 2880, 7168),
    GemmCase("context_proj", 7168, 35840),
    GemmCase("lm_head", 20480, 7168, norm=True, logits=True),
)


@dataclass(frozen=True, slots=True)
class Result:
    """One variant of a case; `error` is `Operands.error`, at most 1 in what is timed, `failure` why nothing was
    timed."""

    case: str
    rows: int
    variant: str
    floor_us: float
    timing: Timing | None = None
    error: float | None = None
    failure: str | None = None

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)

    def line(self) -> str:
        head = f"{self.case:17} M={self.rows:<4} {self.variant:34}"
        if self.timing is None:
            return f"{head} FAILED: {self.failure}"
        us = self.timing.median_us
        error = "" if self.error is None else f"  error {self.error:.2f} of the bound"
        rate = self.floor_us / us * COPY_RATE / 1e12
        return f"{head} {us:8.2f} us  floor {self.floor_us:7.2f}  {us / self.floor_us:5.2f}x  {rate:5.2f} TB/s{error}"


class Operands:
    """Inputs of a case on a device, with as many copies of the weights as lie past L2."""

    def __init__(self, case: GemmCase, rows: int, device: str, dtype: torch.dtype, copies: int):
        def values(*shape):
            return torch.randn(shape, dtype=torch.float32 if device == "cpu" else dtype, device=device).to(dtype)

        def weights():
            return [values(case.n, case.k).mul_(case.k**-0.5) for _ in range(copies)]

        self.case, self.rows, self.copies = case, rows, copies
        self.x, self.weights = values(rows, case.k), weights()
        self.ups = weights() if case.gate_up else [None] * copies
        self.norm_weight = values(case.k).abs_().add_(0.5) if case.norm else None
        self.residual = values(rows, case.n) if case.residual else None

    def low_m(self, copy: int, workspace: LowMWorkspace, tile: LowMTile, pdl: bool = False) -> torch.Tensor:
        return low_m_linear(
            self.x,
            self.weights[copy],
            up_weight=self.ups[copy],
            norm_weight=self.norm_weight,
            eps=EPS if self.case.norm else None,
            residual=self.residual,
            out_dtype=torch.float32 if self.case.logits else None,
            backend="triton",
            workspace=workspace,
            tile=tile,
            pdl=pdl,
        )

    def products(self, copy: int) -> tuple[torch.Tensor, ...]:
        """The library's products alone."""
        return _products(self.x, self.weights[copy], self.ups[copy], self.case.logits)

    def plain(self, copy: int) -> torch.Tensor:
        """The library's products with the pointwise work as the plain model does it."""
        return _plain(self.case, self.x, self.weights[copy], self.ups[copy], self.norm_weight, self.residual, self.case.logits)

    def error(self, out: torch.Tensor) -> float:
        """Distances of a result with copy 0 to float64: the largest over the contract's bound, or all together over what
        roundings make, which a block left out of a long sum exceeds sooner; whichever is more."""
        case, x, unit = self.case, self.x.double(), torch.finfo(self.x.dtype).eps / 2
        inner = case.k * 2.0**-23
        if case.norm:
            x = x / torch.sqrt(x.square().mean(-1, keepdim=True) + EPS) * self.norm_weight.double()
            inner += unit
        weight = self.weights[0].double()
        exact, size = x @ weight.T, x.abs() @ weight.abs().T
        bound = inner * size
        if case.gate_up:
            up = self.ups[0].double()
            up_exact, up_bound = x @ up.T, inner * (x.abs() @ up.abs().T)
            gate = silu(exact)
            # silu's slope is below 1.1.
            exact, bound = gate * up_exact, 1.1 * bound * (up_exact.abs() + up_bound) + gate.abs() * up_bound
            bound += 2.0**-20 * exact.abs()
        bound += exact.abs() * (2.0**-23 if case.logits else unit)
        if case.residual:
            exact = exact + self.residual.double()
            bound += unit * exact.abs()
        ratio = (out.double() - exact).abs() / (1.01 * bound + 1e-12)
        together = (out.double() - exact).norm() / exact.norm() / (2 * unit + 2.0**-20)
        return math.inf if bool(ratio.isnan().any()) else float(torch.maximum(ratio.max(), together))


def _products(x, weight, up, logits: bool) -> tuple[torch.Tensor, ...]:
    if logits:
        return (ops.fp32_linear(x, weight),)
    return tuple(linear(x, matrix) for matrix in (weight, up) if matrix is not None)


def _plain(case: GemmCase, x, weight, up, norm_weight, residual, logits: bool = False) -> torch.Tensor:
    if case.norm:
        x = ops.rms_norm(x, norm_weight, EPS)
    product, *rest = _products(x, weight, up, logits)
    if rest:
        return (silu(product.float()) * rest[0].float()).to(x.dtype)
    return product if residual is None else residual + product


def make_workspace(device: str) -> LowMWorkspace:
    """Enough for every cut below: at most some 800 programs of 128 x 65 sums."""
    return LowMWorkspace(device, num_sums=1 << 23, num_tiles=4096)


def cut(case: GemmCase, n: int, k: int, stages: int, warps: int, resident: int) -> LowMTile:
    """n rows a program (n / 2 of each weight, with a gate), split for `resident` programs."""
    n = n // 2 if case.gate_up else n
    return LowMTile(n, k, low_m_splits(case.n, case.k, n, k, resident), stages, warps)


def low_m_tiles(case: GemmCase, rows: int, processors: int, *, few: bool) -> dict[str, LowMTile]:
    """Cuts to compare, by name; few: only the one that the op chooses and at most one other."""
    chosen = low_m_tile(rows, case.n, case.k, torch.bfloat16, case.gate_up, processors)
    tiles = [chosen, *([cut(case, 32, 256, 4, 4, 2 * processors)] if rows <= 32 else [])]  # for more rows it does not fit
    if not few:
        tiles += [cut(case, 64, 128, 6, 4, processors), cut(case, 64, 128, 4, 4, 3 * processors), *case.tiles]
    named = {}
    for tile in tiles:
        name = f"n{tile.n} k{tile.k} splits {tile.splits} stages {tile.stages} warps {tile.warps}"
        named.setdefault(f"{name} (chosen)" if tile == chosen else name, tile)
    return named


def case_results(
    case: GemmCase, rows: int, workspace: LowMWorkspace, processors: int, *, few: bool, device: str = "cuda"
) -> Iterator[Result]:
    """All variants of one case: those that are wrong or fail are reported, the others timed in turns."""
    copies = -(-PAST_L2 // case.weight_bytes) if device == "cuda" else 1
    operands = Operands(case, rows, device, torch.bfloat16 if device == "cuda" else torch.float32, copies)
    tiles = low_m_tiles(case, rows, processors, few=few)
    variants: dict[str, Callable[[int], object]] = {"library, products alone": operands.products, "plain": operands.plain}
    variants |= {name: partial(operands.low_m, workspace=workspace, tile=tile) for name, tile in tiles.items()}
    errors, failures, timed = {}, {}, {}
    for name, variant in variants.items():
        try:
            if name != "library, products alone":
                errors[name] = operands.error(variant(0))
            # The plain model rounds the gate and up products too, which the bound leaves out.
            if name in tiles and not errors[name] <= 1:
                raise ArithmeticError(f"{errors[name]:.3g} times the bound away from float64")
            timed[name] = _rotated(variant, copies, device)
        except Exception as error:  # one variant's fault must not end the measurement of the others
            failures[name] = f"{type(error).__name__}: {error}"[:300]
    timings = _time(timed, case.floor_us * copies, copies, device)
    for name in variants:
        yield Result(case.name, rows, name, case.floor_us, timings.get(name), errors.get(name), failures.get(name))


def _rotated(variant: Callable[[int], object], copies: int, device: str) -> Callable[[], object]:
    def work():
        for copy in range(copies):
            variant(copy)

    return capture(work).replay if device == "cuda" else work


def _time(timed: dict[str, Callable[[], object]], replay_floor_us: float, copies: int, device: str) -> dict[str, Timing]:
    if device != "cuda":
        for work in timed.values():
            work()
        return {name: Timing(math.inf, math.inf, math.inf) for name in timed}
    replays = max(2, round(SAMPLE_US / replay_floor_us))
    return time_interleaved(timed, rounds=11, replays=replays, copies=copies)


class Chain:
    """The five products of a layer, one after the other, for five layers with weights of their own: 634 MB for K3's shape.

    The attention between q_b and o is left out: o reads the first values of q_b's rows.
    """

    def __init__(self, cases: tuple[GemmCase, ...], rows: int, device: str, dtype: torch.dtype):
        self.layers = [[Operands(case, rows, device, dtype, 1) for case in cases] for _ in range(LAYERS)]
        self.start = self.layers[0][0].x

    def run(self, product: Callable[..., torch.Tensor]) -> torch.Tensor:
        """product(operands, x, residual) -> out; returns the hidden rows behind the last layer."""
        hidden = self.start
        for qkv_a, q_b, o, gate_up, down in self.layers:
            latents = product(qkv_a, hidden, None)
            queries = product(q_b, latents[:, : q_b.case.k], None)
            hidden = product(o, queries[:, : o.case.k], hidden)
            hidden = product(down, product(gate_up, hidden, None), hidden)
        return hidden


def chain_results(
    rows: int,
    workspace: LowMWorkspace,
    processors: int,
    *,
    few: bool,
    cases: tuple[GemmCase, ...] = CHAIN,
    device: str = "cuda",
) -> Iterator[Result]:
    """The chain in the plain model's operations and in low_m_linear, with and without programmatic dependent launch."""
    chain = Chain(cases, rows, device, torch.bfloat16 if device == "cuda" else torch.float32)
    floor = LAYERS * sum(case.floor_us for case in cases)

    def plain(operands: Operands, x, residual):
        return _plain(operands.case, x, operands.weights[0], operands.ups[0], operands.norm_weight, residual)

    def low_m(operands: Operands, x, residual, *, resident: int, pdl: bool, prefetch_mb: int = 12):
        case = operands.case
        tile = _chain_tile(case, rows, processors, resident)
        return low_m_linear(
            x,
            operands.weights[0],
            up_weight=operands.ups[0],
            norm_weight=operands.norm_weight,
            eps=EPS if case.norm else None,
            residual=residual,
            backend="triton",
            workspace=workspace,
            tile=dataclasses.replace(tile, prefetch_bytes=prefetch_mb << 20),
            pdl=pdl,
        )

    variants = {"plain": plain}
    for resident in _residents(few):
        variants[f"low_m, {resident} a processor"] = partial(low_m, resident=resident, pdl=False)
        if device == "cuda":
            variants[f"low_m, {resident} a processor, pdl"] = partial(low_m, resident=resident, pdl=True)
    if device == "cuda" and not few:
        for prefetch in (1, 4, 24):
            variants[f"low_m, 2 a processor, pdl, {prefetch} MB"] = partial(low_m, resident=2, pdl=True, prefetch_mb=prefetch)
    outputs, failures, timed = {}, {}, {}
    for name, product in variants.items():
        try:
            outputs[name] = chain.run(product)
            _check_chain(name, outputs)
            timed[name] = _rotated(lambda copy, product=product: chain.run(product), 1, device)
        except Exception as error:  # as above
            failures[name] = f"{type(error).__name__}: {error}"[:300]
    timings = _time(timed, floor, 1, device)
    for name in variants:
        yield Result(f"{LAYERS} layers", rows, name, floor, timings.get(name), None, failures.get(name))


def _check_chain(name: str, outputs: dict[str, torch.Tensor]) -> None:
    """Near the plain chain, and with pdl equal to the bit to the same cut without."""
    out, plain = outputs[name].double(), outputs["plain"].double()
    distance = float((out - plain).norm() / plain.norm())
    if not distance < 0.05:
        raise ArithmeticError(f"relative distance {distance:.3g} to the plain chain")
    without = name.partition(", pdl")[0]
    if not torch.equal(outputs[name], outputs.get(without, outputs[name])):
        raise ArithmeticError("differs from the launches without pdl")


def _residents(few: bool) -> tuple[int, ...]:
    """Programs a processor for which the chain's products are cut."""
    return (2,) if few else (2, 1, 3)


def _chain_tile(case: GemmCase, rows: int, processors: int, resident: int) -> LowMTile:
    """`low_m_tile` counts on 2 programs a processor."""
    return low_m_tile(rows, case.n, case.k, torch.bfloat16, case.gate_up, processors * resident // 2)


def compile_ahead(case_index: int, rows: int, processors: int) -> None:
    """Launches the kernels of one case once, so that they lie in Triton's cache on disk; for a process of its own."""
    case, workspace, few = CASES[case_index], make_workspace("cuda"), rows != 8
    operands = Operands(case, rows, "cuda", torch.bfloat16, 1)
    for tile in low_m_tiles(case, rows, processors, few=few).values():
        _launch(operands, workspace, tile, False)
    for resident in _residents(few) if case in CHAIN and rows in (8, 32) else ():
        for pdl in (False, True):
            _launch(operands, workspace, _chain_tile(case, rows, processors, resident), pdl)
    torch.cuda.synchronize()


def _launch(operands: Operands, workspace: LowMWorkspace, tile: LowMTile, pdl: bool) -> None:
    try:
        operands.low_m(0, workspace, tile, pdl)
    except Exception as error:  # shown again, with its variant's name, by the measurement
        print(f"ahead of time: {operands.case.name} {tile}: {type(error).__name__}", flush=True)
