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
from dspark_model.ops import L2Pieces, LowMTile, LowMWorkspace, l2_pieces_ahead, l2_prefetch, low_m_linear, low_m_tile
from dspark_model.ops.low_m_linear import low_m_splits

COPY_RATE = 4.3e12  # bytes a second, what large reads reach on an H200
PAST_L2 = 300 << 20  # bytes of weights in rotation
SAMPLE_US = 2000  # what one timed sample should last at least
EPS = 1e-5
LAYERS = 5
CHAIN_ROWS = (8, 32)


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

    @property
    def weight_bytes(self) -> int:
        return 2 * self.n * self.k * (1 + self.gate_up)

    @property
    def floor_us(self) -> float:
        return 1e6 * self.weight_bytes / COPY_RATE


CHAIN = (
    GemmCase("qkv_a", 2112, 7168, norm=True),
    GemmCase("q_b", 1536, 1536, norm=True),
    GemmCase("o", 7168, 1024, residual=True),
    GemmCase("gate_up", 1792, 7168, norm=True, gate_up=True),
    GemmCase("down", 7168, 1792, residual=True),
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
        head = f"{self.case:17} M={self.rows:<4} {self.variant:46}"
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

    def low_m(
        self,
        copy: int,
        workspace: LowMWorkspace,
        tile: LowMTile,
        *,
        x: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        pdl: bool = False,
        pieces: L2Pieces | None = None,
    ) -> torch.Tensor:
        """x, residual: instead of the case's own."""
        return low_m_linear(
            self.x if x is None else x,
            self.weights[copy],
            up_weight=self.ups[copy],
            norm_weight=self.norm_weight,
            eps=EPS if self.case.norm else None,
            residual=self.residual if residual is None else residual,
            out_dtype=torch.float32 if self.case.logits else None,
            backend="triton",
            workspace=workspace,
            tile=tile,
            pdl=pdl,
            pieces=pieces,
        )

    def products(self, copy: int) -> tuple[torch.Tensor, ...]:
        """The library's products alone."""
        return _products(self.x, self.weights[copy], self.ups[copy], self.case.logits)

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


def turned(tile: LowMTile) -> LowMTile:
    """The same cut with the factors in the other order."""
    return dataclasses.replace(tile, weight_first=not tile.weight_first)


def low_m_tiles(case: GemmCase, rows: int, processors: int) -> dict[str, LowMTile]:
    """Cuts to compare, by name: the one that the op chooses, the same turned, and the other of its two depths."""
    chosen = low_m_tile(rows, case.n, case.k, torch.bfloat16, case.gate_up, processors)
    tiles = [chosen]
    if rows <= 32:
        stages, programs = (4, 2) if chosen.stages == 6 else (6, 1)
        splits = low_m_splits(case.n, case.k, chosen.n, chosen.k, processors * programs)
        other = dataclasses.replace(chosen, stages=stages, splits=splits, weight_first=True)
        tiles += [turned(chosen), other]
    named = {}
    for tile in tiles:
        name = f"n{tile.n} splits {tile.splits} stages {tile.stages} {'weight' if tile.weight_first else 'x'} first"
        named.setdefault(f"{name} (chosen)" if tile == chosen else name, tile)
    return named


def case_results(
    case: GemmCase, rows: int, workspace: LowMWorkspace, processors: int, *, device: str = "cuda"
) -> Iterator[Result]:
    """All variants of one case: those that are wrong or fail are reported, the others timed in turns."""
    copies = -(-PAST_L2 // case.weight_bytes) if device == "cuda" else 1
    operands = Operands(case, rows, device, torch.bfloat16 if device == "cuda" else torch.float32, copies)
    tiles = low_m_tiles(case, rows, processors)
    variants: dict[str, Callable[[int], object]] = {"library, products alone": operands.products}
    variants |= {name: partial(operands.low_m, workspace=workspace, tile=tile) for name, tile in tiles.items()}
    errors, failures, timed = {}, {}, {}
    for name, variant in variants.items():
        try:
            if name != "library, products alone":
                errors[name] = operands.error(variant(0))
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


@dataclass(frozen=True, slots=True)
class ChainVariant:
    """How the chain is launched.  distance: MB that are asked for ahead of use, when a product has `pieces_left` blocks left
    or, with `side_stream`, by `l2_prefetch` beside it; own: MB of its weights that a `pdl` launch asks for before its wait."""

    name: str
    base: str  # the variant whose bits it has to have
    weight_first: bool = False
    programs: int = 2
    pdl: bool = False
    distance: int = 0
    pieces_left: int | None = None
    own: int = 12
    side_stream: bool = False

    def tile(self, case: GemmCase, rows: int, processors: int) -> LowMTile:
        """`low_m_tile`'s cut, with more and shallower programs where it counts on 2 a processor and 3 are asked for."""
        tile = low_m_tile(rows, case.n, case.k, torch.bfloat16, case.gate_up, processors)
        if self.programs == 3 and tile.stages == 4:
            splits = low_m_splits(case.n, case.k, tile.n, tile.k, 3 * processors)
            tile = dataclasses.replace(tile, stages=3, splits=splits)
        return dataclasses.replace(
            tile, weight_first=self.weight_first, pieces_left=self.pieces_left, prefetch_bytes=self.own << 20
        )

    @property
    def with_pieces(self) -> bool:
        return self.distance > 0 and not self.side_stream


def chain_variants(rows: int) -> list[ChainVariant]:
    """By orientation: alone, with programmatic launches, with 4 to 32 MB ahead, and both."""
    variants = []
    for name, turn in (("x first", False), ("weight first", True)):
        make = partial(ChainVariant, base=name, weight_first=turn)
        variants.append(make(name))
        if rows > 16 and not turn:
            continue
        variants += [make(f"{name}, pdl", pdl=True), make(f"{name}, ahead 16 MB", distance=16)]
        variants += [
            make(f"{name}, pdl, ahead {distance} MB", pdl=True, own=0, distance=distance)
            for distance in ((8, 16) if turn else (16,))
        ]
        if rows <= 16 and turn:
            variants += [make(f"{name}, ahead {distance} MB", distance=distance) for distance in (4, 8, 24, 32)]
            variants.append(make(f"{name}, ahead 16 MB at the first block", distance=16, pieces_left=1 << 20))
            variants.append(make(f"{name}, ahead 16 MB at the last block", distance=16, pieces_left=1))
            variants.append(make(f"{name}, pdl, own 12, ahead 16 MB", pdl=True, distance=16))
            variants.append(make(f"{name}, side stream 16 MB", distance=16, side_stream=True))
    if rows <= 16:
        make = partial(ChainVariant, base="weight first, 3 a processor", weight_first=True, programs=3)
        variants.append(make("weight first, 3 a processor"))
        variants.append(make("weight first, 3 a processor, pdl, ahead 16 MB", pdl=True, own=0, distance=16))
    return variants


class _LowMChain:
    """The chain as a variant launches it; what it asks for ahead is fixed, as weights are when a model is served."""

    def __init__(self, chain: Chain, variant: ChainVariant, workspace: LowMWorkspace, processors: int):
        self._chain, self._variant, self._workspace, self._processors = chain, variant, workspace, processors
        launches = [[w for w in (o.weights[0], o.ups[0]) if w is not None] for layer in chain.layers for o in layer]
        self._pieces = l2_pieces_ahead(launches, variant.distance << 20) if variant.distance else [None] * len(launches)
        self._side = torch.cuda.Stream() if variant.side_stream else None

    def run(self) -> torch.Tensor:
        pieces = iter(self._pieces)
        out = self._chain.run(lambda operands, x, residual: self._product(operands, x, residual, next(pieces)))
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
        return out

    def _product(self, operands: Operands, x, residual, pieces: L2Pieces | None) -> torch.Tensor:
        variant = self._variant
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                l2_prefetch(pieces)
        return operands.low_m(
            0,
            self._workspace,
            variant.tile(operands.case, operands.rows, self._processors),
            x=x,
            residual=residual,
            pdl=variant.pdl,
            pieces=pieces if variant.with_pieces else None,
        )


def chain_results(
    rows: int,
    workspace: LowMWorkspace,
    processors: int,
    *,
    cases: tuple[GemmCase, ...] = CHAIN,
    device: str = "cuda",
) -> Iterator[Result]:
    """The chain in the plain model's operations and in low_m_linear's variants; on the CPU those that run there."""
    chain = Chain(cases, rows, device, torch.bfloat16 if device == "cuda" else torch.float32)
    floor = LAYERS * sum(case.floor_us for case in cases)

    def plain(operands: Operands, x, residual):
        return _plain(operands.case, x, operands.weights[0], operands.ups[0], operands.norm_weight, residual)

    bases, works = {"plain": "plain"}, {"plain": lambda: partial(chain.run, plain)}
    for variant in chain_variants(rows):
        if device == "cuda" or not (variant.pdl or variant.distance):
            bases[variant.name] = variant.base
            works[variant.name] = lambda variant=variant: _LowMChain(chain, variant, workspace, processors).run
    outputs, failures, timed = {}, {}, {}
    for name, make in works.items():
        try:
            work = make()
            outputs[name] = work()
            _check_chain(name, bases[name], outputs)
            timed[name] = _rotated(lambda copy, work=work: work(), 1, device)
        except Exception as error:  # as above
            failures[name] = f"{type(error).__name__}: {error}"[:300]
    timings = _time(timed, floor, 1, device)
    for name in works:
        yield Result(f"{LAYERS} layers", rows, name, floor, timings.get(name), None, failures.get(name))


def _check_chain(name: str, base: str, outputs: dict[str, torch.Tensor]) -> None:
    """Near the plain chain, and equal to the bit to its base."""
    out, plain = outputs[name].double(), outputs["plain"].double()
    distance = float((out - plain).norm() / plain.norm())
    if not distance < 0.05:
        raise ArithmeticError(f"relative distance {distance:.3g} to the plain chain")
    if not torch.equal(outputs[name], outputs.get(base, outputs[name])):
        raise ArithmeticError(f"differs from {base}")


def kernels_of(case: GemmCase, rows: int, processors: int, *, alone: bool) -> list[tuple[LowMTile, bool, bool]]:
    """What the measurements launch for a case, each once: cut, pdl, pieces."""
    kernels = [
        (
            dataclasses.replace(variant.tile(case, rows, processors), pieces_left=None, prefetch_bytes=0),
            variant.pdl,
            variant.with_pieces,
        )
        for variant in (chain_variants(rows) if case in CHAIN and rows in CHAIN_ROWS else [])
    ]
    if alone:
        for tile in low_m_tiles(case, rows, processors).values():
            kernels.append((dataclasses.replace(tile, pieces_left=None, prefetch_bytes=0), False, False))
    return list(dict.fromkeys(kernels))


def compile_ahead(case_index: int, rows: int, kernels: list[tuple[LowMTile, bool, bool]]) -> None:
    """Launches kernels of one case once, so that they lie in Triton's cache on disk; for a process of its own."""
    case, workspace = CASES[case_index], make_workspace("cuda")
    operands = Operands(case, rows, "cuda", torch.bfloat16, 1)
    some = L2Pieces(operands.x.device, [(operands.weights[0], 0, 1 << 16)])
    for tile, pdl, with_pieces in kernels:
        try:
            operands.low_m(0, workspace, tile, pdl=pdl, pieces=some if with_pieces else None)
        except Exception as error:  # shown again, with its variant's name, by the measurement
            print(f"ahead of time: {case.name} {tile}: {type(error).__name__}", flush=True)
    torch.cuda.synchronize()
