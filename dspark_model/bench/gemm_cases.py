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

COPY_RATE = 4.3e12  # bytes a second, what large reads reach on an H200
PAST_L2 = 300 << 20  # bytes of weights in rotation
SAMPLE_US = 2000  # what one timed sample should last at least
EPS = 1e-5
LAYERS = 5
ROW_COUNTS = (8, 32)


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
            early=True,
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
    """Enough for every cut below: split products have at most 2 programs a processor, of 32 x 65 sums each."""
    return LowMWorkspace(device, num_sums=1 << 20, num_tiles=1 << 10)


def low_m_tiles(case: GemmCase, rows: int, processors: int) -> dict[str, LowMTile]:
    """Cuts to compare, by name: the one that the op chooses, and the same with the factors in the other order."""
    chosen = low_m_tile(rows, case.n, case.k, torch.bfloat16, case.gate_up, processors)
    turned = dataclasses.replace(chosen, weight_first=not chosen.weight_first)
    head = f"n{chosen.n} splits {chosen.splits} stages {chosen.stages}"
    return {f"{head} {_order(chosen)} (chosen)": chosen, f"{head} {_order(turned)}": turned}


def _order(tile: LowMTile) -> str:
    return "weight first" if tile.weight_first else "x first"


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
            if name in tiles:
                errors[name] = operands.error(variant(0))
                if not errors[name] <= 1:
                    raise ArithmeticError(f"{errors[name]:.3g} times the bound away from float64")
            timed[name] = _replayed(partial(_rotate, variant, copies), device)
        except Exception as error:  # one variant's fault must not end the measurement of the others
            failures[name] = f"{type(error).__name__}: {error}"[:300]
    timings = _time(timed, case.floor_us * copies, copies, device)
    for name in variants:
        yield Result(case.name, rows, name, case.floor_us, timings.get(name), errors.get(name), failures.get(name))


def _rotate(variant: Callable[[int], object], copies: int) -> None:
    for copy in range(copies):
        variant(copy)


class _Replay:
    """Captured work.  It holds on to the work: a graph does not keep the memory that its launches read."""

    def __init__(self, work: Callable[[], object]):
        self._work, self._graph = work, capture(work)

    def __call__(self) -> None:
        self._graph.replay()


def _replayed(work: Callable[[], object], device: str) -> Callable[[], object]:
    return _Replay(work) if device == "cuda" else work


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
    cases: tuple[GemmCase, ...] = CHAIN,
    device: str = "cuda",
) -> Iterator[Result]:
    """The chain in the plain model's operations, and by low_m_linear with x and with the weight as first factor."""
    chain = Chain(cases, rows, device, torch.bfloat16 if device == "cuda" else torch.float32)
    floor = LAYERS * sum(case.floor_us for case in cases)

    def plain(operands: Operands, x, residual):
        return _plain(operands.case, x, operands.weights[0], operands.ups[0], operands.norm_weight, residual)

    def low_m(operands: Operands, x, residual, *, weight_first: bool):
        case = operands.case
        tile = low_m_tile(rows, case.n, case.k, torch.bfloat16, case.gate_up, processors)
        tile = dataclasses.replace(tile, weight_first=weight_first)
        return operands.low_m(0, workspace, tile, x=x, residual=residual)

    works = {
        "plain": partial(chain.run, plain),
        "x first": partial(chain.run, partial(low_m, weight_first=False)),
        "weight first": partial(chain.run, partial(low_m, weight_first=True)),
    }
    outputs, failures, timed = {}, {}, {}
    for name, work in works.items():
        try:
            outputs[name] = work()
            _check_chain(outputs[name], outputs["plain"])
            timed[name] = _replayed(work, device)
        except Exception as error:  # as above
            failures[name] = f"{type(error).__name__}: {error}"[:300]
    timings = _time(timed, floor, 1, device)
    for name in works:
        yield Result(f"{LAYERS} layers", rows, name, floor, timings.get(name), None, failures.get(name))


def _check_chain(out: torch.Tensor, plain: torch.Tensor) -> None:
    distance = float((out.double() - plain.double()).norm() / plain.double().norm())
    if not distance < 0.05:
        raise ArithmeticError(f"relative distance {distance:.3g} to the plain chain")


def compile_ahead(case: GemmCase, rows: int) -> None:
    """Launches each kernel of one case once, so that they lie in Triton's cache on disk; for a process of its own."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    workspace, operands = make_workspace("cuda"), Operands(case, rows, "cuda", torch.bfloat16, 1)
    for name, tile in low_m_tiles(case, rows, processors).items():
        try:
            operands.low_m(0, workspace, tile)
        except Exception as error:  # shown again, with its message, by the measurement
            print(f"ahead of time: {case.name} M={rows} {name}: {type(error).__name__}", flush=True)
    torch.cuda.synchronize()
