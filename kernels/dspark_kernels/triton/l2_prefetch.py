"""Memory asked for ahead of its use: requests without a result that bring ranges of bytes to L2."""

import triton
import triton.language as tl


@triton.jit
def load_pieces(pieces_ptr, num_pieces, program, programs, LANES: tl.constexpr):
    """A program's share of the pieces, one a thread: addresses and sizes in bytes, size 0 in threads that have none.

    pieces: int64 [num_pieces, 2], address and size, both multiples of 16.  Shares lie one after the other and hold at most
    LANES pieces, as many as the program has threads.
    """
    share = tl.cdiv(num_pieces, programs)
    lane = tl.arange(0, LANES)
    piece = program * share + lane
    mine = (lane < share) & (piece < num_pieces)
    addresses = tl.load(pieces_ptr + 2 * piece, mask=mine, other=0)
    return addresses, tl.load(pieces_ptr + 2 * piece + 1, mask=mine, other=0).to(tl.int32)


@triton.jit
def prefetch_pieces(addresses, sizes):
    """One request a thread, none where the size is 0; a program of as many threads as there are values."""
    tl.inline_asm_elementwise(
        "{ .reg .pred some; setp.ne.u32 some, $2, 0; @some cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [addresses, sizes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["num_pieces"])
def l2_prefetch_kernel(pieces_ptr, num_pieces, LANES: tl.constexpr):
    addresses, sizes = load_pieces(pieces_ptr, num_pieces, tl.program_id(0), tl.num_programs(0), LANES)
    prefetch_pieces(addresses, sizes)
