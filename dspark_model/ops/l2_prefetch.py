"""Bring weights of later launches to L2 while the memory has nothing else to do.  No result: bits cannot change."""

from collections.abc import Iterable, Sequence

import torch

# Large enough that 16 MB are few requests, small enough that all programs of a launch have a share of them.
PIECE_BYTES = 4096
_LANES = 128


class L2Pieces:
    """Ranges of bytes on one device, cut into pieces of at most 4 KB; it holds on to their memory.

    Build it once, at start-up, and keep it: the list of pieces lies on the device, where launches and graph replays read it.
    """

    def __init__(self, device: torch.device, ranges: Iterable[tuple[torch.Tensor, int, int]]):
        """ranges: (contiguous tensor, first byte, end byte), all on `device`."""
        pieces, self._memory = [], []
        for tensor, first, end in ranges:
            _check_range(tensor, first, end, device)
            self._memory.append(tensor)
            start = tensor.data_ptr()
            # A request is made of whole 16 bytes; up to 15 at the end are left out.
            end -= (end - first) % 16
            pieces += [(start + at, min(PIECE_BYTES, end - at)) for at in range(first, end, PIECE_BYTES)]
        self.table = torch.tensor(pieces, dtype=torch.int64).reshape(-1, 2).to(device)

    @property
    def num_bytes(self) -> int:
        return int(self.table[:, 1].sum())

    def __len__(self) -> int:
        return self.table.shape[0]


def l2_pieces_ahead(launches: Sequence[Sequence[torch.Tensor]], distance: int, *, cyclic: bool = False) -> list[L2Pieces]:
    """For each launch of a sequence what it should bring to L2, so that the next `distance` bytes behind it have been asked
    for, each byte once.

    launches: of each, the contiguous weights that it reads, in order and all on one device.  distance: bytes, rounded down to
    a multiple of 16; some less than L2 holds.  cyclic: the first launch follows the last, else the last ones ask for less.

    Raises:
        ValueError: no launches, a negative distance, weights that are not contiguous, start off 16 bytes or lie on several
            devices.
    """
    if not any(launches) or distance < 0:
        raise ValueError(
            f"l2_pieces_ahead wants launches with weights and a distance of 0 or more, got {len(launches)}, {distance}"
        )
    distance -= distance % 16
    stream = [weight for launch in launches for weight in launch]
    ends, total = [], 0
    for launch in launches:
        total += sum(_num_bytes(weight) for weight in launch)
        ends.append(total)
    distance = min(distance, total)
    device, plans = stream[0].device, []
    for index, end in enumerate(ends):
        asked = (ends[index - 1] if index else 0) + distance
        if index == 0 and not cyclic:
            asked = end
        first, last = max(end, asked), end + distance
        plans.append(L2Pieces(device, _ranges(stream, first, last if cyclic else min(last, total), total)))
    return plans


def l2_prefetch(pieces: L2Pieces) -> None:
    """Asks for `pieces` to be brought to L2 and does not wait for them.  Launch it beside work that leaves the memory idle.

    Raises:
        ValueError: not on a CUDA device of capability 9 or more.
    """
    check_l2_prefetch(pieces.table.device)
    if len(pieces):
        _launch(pieces)


def _launch(pieces: L2Pieces) -> None:
    from dspark_kernels.triton.l2_prefetch import l2_prefetch_kernel

    # Small programs, since they run beside others.
    l2_prefetch_kernel[(-(-len(pieces) // _LANES),)](pieces.table, len(pieces), LANES=_LANES, num_warps=_LANES // 32)


def check_l2_prefetch(device: torch.device) -> None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        raise ValueError(f"prefetching to L2 needs a CUDA device of capability 9.0, got {device}; leave it out there")


def _ranges(stream: Sequence[torch.Tensor], first: int, last: int, total: int) -> list[tuple[torch.Tensor, int, int]]:
    """Bytes first to last of the weights one after the other, which start again behind `total`."""
    ranges = []
    for turn in (0, total):
        start = turn
        for weight in stream:
            end = start + _num_bytes(weight)
            if max(first, start) < min(last, end):
                ranges.append((weight, max(first, start) - start, min(last, end) - start))
            start = end
    return ranges


def _check_range(tensor: torch.Tensor, first: int, end: int, device: torch.device) -> None:
    if not tensor.is_contiguous() or tensor.data_ptr() % 16 or tensor.device != device:
        raise ValueError(
            f"prefetching to L2 wants contiguous tensors on {device} that start at 16 bytes, got {[*tensor.shape]} with "
            f"strides {tensor.stride()} at {tensor.data_ptr() % 16} bytes past 16 on {tensor.device}"
        )
    if not 0 <= first <= end <= _num_bytes(tensor) or first % 16:
        raise ValueError(f"bytes {first} to {end} do not lie in the {_num_bytes(tensor)} of the tensor, or start off 16")


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
