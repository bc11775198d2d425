"""Where the rows that a step adds to its requests' contexts live in the pool."""

import torch

from dspark_model.ops.row_addresses import RowAddresses, row_addresses


def context_addresses(
    start: torch.Tensor,
    count: torch.Tensor,
    slots: torch.Tensor,
    page_table: torch.Tensor,
    num_pages: torch.Tensor,
    *,
    rows: int,
    page_size: int,
    fused: bool = False,
) -> RowAddresses:
    """Of the first count[b] of N = `rows` rows of each request, its rows start[b], start[b] + 1, ...; the others, rows without
    a page and those of dummy rows are not owned.

    start, count: int64 [B]; slots: int64 [B], -1 for dummy rows; page_table: int32 [S, P]; num_pages: int64 [S].
    fused: one Triton kernel, equal to the bit.
    """
    if fused:
        return _fused(start, count, slots, page_table, num_pages, rows, page_size)
    index = torch.arange(rows, device=slots.device)
    places = torch.where(index < count[:, None], start[:, None] + index, -1)
    at = slots.clamp(min=0)
    pages_live = torch.where(slots >= 0, num_pages[at], 0)
    return row_addresses(places, page_table[at], pages_live, page_size)


def _fused(start, count, slots, page_table, num_pages, rows: int, page_size: int) -> RowAddresses:
    import triton
    from dspark_kernels.triton.context_addresses import context_addresses_kernel

    shape, device = (slots.shape[0], rows), slots.device
    pages, offsets = (torch.empty(shape, dtype=torch.int64, device=device) for _ in range(2))
    owned = torch.empty(shape, dtype=torch.bool, device=device)
    if owned.numel():
        context_addresses_kernel[(shape[0],)](
            *(tensor.contiguous() for tensor in (start, count, slots, page_table, num_pages)),
            pages,
            offsets,
            owned.view(torch.uint8),
            page_table.shape[1],
            rows,
            page_size,
            LANES=triton.next_power_of_2(rows),
            num_warps=1,
        )
    return RowAddresses(pages=pages, offsets=offsets, owned=owned)
