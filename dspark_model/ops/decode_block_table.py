"""From an outside engine's encoded page offsets to a page table."""

import torch


def decode_block_table(
    encoded: torch.Tensor, divisor: int, *, limit: int | None = None, fused: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode page offsets.

    encoded: integer [B, P], any strides; a value below 0 means "no page", a value of at least 0 is page x divisor, and
    page 0 is a valid page.  limit: pages that the pool has; a larger page is "no page" too; None leaves pages unchecked.
    Returns (num_pages int64 [B], page_table int32 [B, P]): the number of entries before the first one without a page, and
    the decoded pages with -1 for every entry from there on.
    fused: one Triton kernel, equal to the bit.
    """
    if fused:
        num_pages = torch.empty(encoded.shape[0], dtype=torch.int64, device=encoded.device)
        table = torch.empty(encoded.shape, dtype=torch.int32, device=encoded.device)
        _launch(encoded, divisor, limit, None, table, num_pages)
        return num_pages, table
    pages = torch.div(encoded, divisor, rounding_mode="floor")
    there = encoded >= 0 if limit is None else (encoded >= 0) & (pages < limit)
    present = there.long().cumprod(dim=1).bool()
    return present.sum(dim=1), torch.where(present, pages, -1).to(torch.int32)


def refresh_block_table(
    encoded: torch.Tensor,
    divisor: int,
    limit: int,
    slots: torch.Tensor,
    page_table: torch.Tensor,
    num_pages: torch.Tensor,
    *,
    fused: bool = False,
) -> None:
    """`decode_block_table` of row i into row slots[i] of the tables of S slots; other rows stay as they are.

    slots: int64 [B], distinct; page_table: int32 [S, W], contiguous; num_pages: int64 [S].  A row of more than W offsets is cut
    there, a shorter one is filled up with -1.  Waits for nothing and allocates nothing when fused.
    """
    if fused:
        _launch(encoded, divisor, limit, slots, page_table, num_pages)
        return
    width = min(encoded.shape[1], page_table.shape[1])
    counts, pages = decode_block_table(encoded[:, :width], divisor, limit=limit)
    rows = torch.full((encoded.shape[0], page_table.shape[1]), -1, dtype=torch.int32, device=page_table.device)
    rows[:, :width] = pages
    page_table[slots] = rows
    num_pages[slots] = counts


def _launch(encoded, divisor: int, limit: int | None, slots: torch.Tensor | None, page_table, num_pages) -> None:
    """slots: None when row i goes to row i."""
    import triton
    from dspark_kernels.triton.decode_block_table import decode_block_table_kernel

    batch, width = encoded.shape
    if not batch:
        return
    lanes = min(triton.next_power_of_2(max(width, page_table.shape[1], 1)), 1024)
    decode_block_table_kernel[(batch,)](
        encoded,
        *encoded.stride(),
        width,
        divisor,
        2**31 if limit is None else limit,
        num_pages if slots is None else slots,  # not looked at without slots
        num_pages,
        page_table,
        page_table.shape[1],
        SLOTS=slots is not None,
        BLOCK=lanes,
        num_warps=4,
    )
