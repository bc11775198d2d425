"""What is asked for ahead: each byte of the right memory, once, by the op and by `low_m_linear`; results stay as they are."""

import importlib
import itertools

import pytest
import torch
from kernel_kit import DEVICE, watched_memory

from dspark_model.ops import L2Pieces, LowMTile, LowMWorkspace, l2_pieces_ahead, l2_prefetch, low_m_linear
from dspark_model.testing import assert_bitwise_equal

KERNELS = [f"dspark_kernels.triton.{stem}" for stem in ("l2_prefetch", "low_m_linear")]
OPS = [f"dspark_model.ops.{stem}" for stem in ("l2_prefetch", "low_m_linear")]


def weights(*sizes: int) -> list[torch.Tensor]:
    return [torch.zeros(size, dtype=torch.uint8, device=DEVICE) for size in sizes]


def addresses(pieces: L2Pieces) -> list[int]:
    """Of every 16 bytes that are asked for, in order."""
    return [at for first, size in pieces.table.tolist() for at in range(first, first + size, 16)]


@pytest.fixture
def requests(monkeypatch) -> list[tuple[int, int]]:
    """Addresses and sizes that kernels ask for in the interpreter, which has no requests to a cache."""
    if DEVICE == "cuda":
        pytest.skip("the interpreter shows what a device does not")
    seen: list[tuple[int, int]] = []

    def record(starts, sizes):
        starts, sizes = starts.handle.data.reshape(-1), sizes.handle.data.reshape(-1)
        assert len(starts) == len(sizes)
        seen.extend((int(start), int(size)) for start, size in zip(starts, sizes, strict=True) if size)

    for module in KERNELS:
        monkeypatch.setattr(importlib.import_module(module), "prefetch_pieces", record)
    for module in OPS:
        monkeypatch.setattr(importlib.import_module(module), "check_l2_prefetch", lambda device: None)
    return seen


def test_pieces_are_small_aligned_and_all_of_the_range():
    (tensor,) = weights(20_011)
    pieces = L2Pieces(tensor.device, [(tensor, 32, 20_011), (tensor, 0, 16), (tensor, 48, 48), (tensor, 0, 15)])
    wanted = [*range(32, 20_000, 16), 0]
    assert addresses(pieces) == [tensor.data_ptr() + at for at in wanted]
    assert pieces.num_bytes == 16 * len(wanted) and len(pieces) == 6
    assert all(size <= 4096 and size % 16 == 0 and start % 16 == 0 for start, size in pieces.table.tolist())


@pytest.mark.parametrize("cyclic", [False, True])
@pytest.mark.parametrize("distance", [0, 16, 4096, 10_000, 10_240, 60_000, 1 << 30])
def test_launches_ask_for_each_byte_once_and_far_enough_ahead(distance, cyclic):
    launches = [weights(20_480), weights(160, 5_120), weights(10_240), [], weights(32_000)]
    stream = [weight.data_ptr() + at for weight in itertools.chain(*launches) for at in range(0, weight.numel(), 16)]
    plans = [addresses(pieces) for pieces in l2_pieces_ahead(launches, distance, cyclic=cyclic)]
    distance = min(distance - distance % 16, 16 * len(stream)) // 16
    end, asked = 0, 0 if not cyclic else distance
    for launch, plan in zip(launches, plans, strict=True):
        end += sum(weight.numel() for weight in launch) // 16
        until = end + distance if cyclic else min(end + distance, len(stream))
        # What lies behind this launch's own weights and was not asked for before.
        wanted = [stream[at % len(stream)] for at in range(max(end, asked), until)]
        assert plan == wanted
        asked = max(asked, until)


@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 300])
def test_the_op_asks_for_every_piece_once(requests, count):
    (tensor,) = weights(4096 * 300)
    pieces = L2Pieces(tensor.device, [(tensor, 0, 4096 * count)])
    with watched_memory(pieces.table):
        l2_prefetch(pieces)
    assert requests == [tuple(piece) for piece in pieces.table.tolist()]


@pytest.mark.parametrize("pieces_left", [None, 1, 2, 3, 1 << 20])
@pytest.mark.parametrize("count", [1, 5, 6, 7, 100])
@pytest.mark.parametrize("weight_first", [False, True])
def test_a_product_asks_for_every_piece_once(requests, weight_first, count, pieces_left):
    """Six programs, of two or three blocks."""
    x, weight, (later,) = torch.randn(3, 130), torch.randn(20, 130), weights(4096 * 100)
    tile = LowMTile(16, 32, 2, 2, 4, weight_first=weight_first, pieces_left=pieces_left)
    workspace = LowMWorkspace(DEVICE, num_sums=60_000, num_tiles=64)
    pieces = L2Pieces(later.device, [(later, 0, 4096 * count)])
    options = {"backend": "triton", "workspace": workspace, "tile": tile}
    plain = low_m_linear(x, weight, **options)
    with watched_memory(x, weight, pieces.table, writes=(workspace.sums, workspace.arrivals)):
        out = low_m_linear(x, weight, pieces=pieces, **options)
    assert sorted(requests) == [tuple(piece) for piece in pieces.table.tolist()]
    assert_bitwise_equal(out, plain)


def test_what_does_not_fit_is_refused(requests):
    (tensor,) = weights(4096 * 400)
    here = tensor.device
    refused = [
        (lambda: L2Pieces(here, [(tensor[::2], 0, 16)]), "wants contiguous tensors on cpu"),
        (lambda: L2Pieces(here, [(tensor[8:], 0, 16)]), "at 8 bytes past 16"),
        (lambda: L2Pieces(torch.device("meta"), [(tensor, 0, 16)]), "wants contiguous tensors on meta"),
        (lambda: L2Pieces(here, [(tensor, 8, 32)]), "bytes 8 to 32 do not lie in the 1638400 of the tensor, or start off 16"),
        (lambda: L2Pieces(here, [(tensor, 0, 1638401)]), "bytes 0 to 1638401"),
        (lambda: L2Pieces(here, [(tensor, 32, 16)]), "bytes 32 to 16"),
        (lambda: l2_pieces_ahead([], 16), "wants launches with weights"),
        (lambda: l2_pieces_ahead([[]], 16), "wants launches with weights"),
        (lambda: l2_pieces_ahead([[tensor]], -16), "a distance of 0 or more, got .* -16"),
    ]
    for call, message in refused:
        with pytest.raises(ValueError, match=message):
            call()
    x, weight = torch.randn(3, 40), torch.randn(16, 40)
    many = L2Pieces(here, [(tensor, 0, 4096 * 129)])
    with pytest.raises(ValueError, match="a launch of 128 threads asks for as many pieces, got 129"):
        low_m_linear(x, weight, backend="triton", tile=LowMTile(16, 32, 1, 2, 4), pieces=many)


def test_devices_without_requests_are_refused():
    tensor = torch.zeros(4096, dtype=torch.uint8)
    pieces = L2Pieces(tensor.device, [(tensor, 0, 4096)])
    with pytest.raises(ValueError, match="needs a CUDA device of capability 9.0, got cpu"):
        l2_prefetch(pieces)
    with pytest.raises(ValueError, match="needs a CUDA device of capability 9.0, got cpu"):
        x, weight = torch.randn(3, 40), torch.randn(16, 40)
        low_m_linear(x, weight, backend="triton", tile=LowMTile(16, 32, 1, 2, 4), pieces=pieces)


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("weight_first", [False, True])
def test_results_and_memory_stay_as_they_are(weight_first, pdl):
    x = torch.randn(8, 1536).bfloat16().to(DEVICE)
    weight = torch.randn(2112, 1536).bfloat16().to(DEVICE)
    later = torch.randint(256, (24 << 20,), dtype=torch.uint8, device=DEVICE)
    before = later.clone()
    (pieces, _) = l2_pieces_ahead([[weight], [later]], 16 << 20)
    assert pieces.num_bytes == 16 << 20
    workspace = LowMWorkspace(DEVICE, num_sums=2_000_000, num_tiles=99)
    tile = LowMTile(64, 128, 4, 4, 4, weight_first=weight_first)
    plain = low_m_linear(x, weight, backend="triton", workspace=workspace, tile=tile)
    for _ in range(20):
        l2_prefetch(pieces)
        out = low_m_linear(x, weight, backend="triton", workspace=workspace, tile=tile, pieces=pieces, pdl=pdl)
        assert_bitwise_equal(out, plain)
    assert_bitwise_equal(later, before)


@pytest.mark.gpu
def test_reading_what_was_asked_for_is_faster():
    """Prefetched memory against memory that was pushed out of L2, by the medians of many reads."""
    values, other = (torch.ones(size >> 2, device=DEVICE) for size in (16 << 20, 400 << 20))
    pieces = L2Pieces(values.device, [(values, 0, 16 << 20)])

    def read_us(asked: bool) -> float:
        times = []
        for _ in range(21):
            other.add_(1)
            if asked:
                l2_prefetch(pieces)
            torch.cuda.synchronize()
            torch.cuda._sleep(200_000)  # until the rest lies in the stream
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            values.sum()
            end.record()
            end.synchronize()
            times.append(1e3 * start.elapsed_time(end))
        return sorted(times)[10]

    read_us(True)
    assert read_us(True) < read_us(False)
