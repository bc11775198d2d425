"""From a request's row number to its place in the pool."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RowAddresses:
    """Where rows live.  All three have the shape of the rows asked for.

    pages: int64 page number, 0 where not owned.  offsets: int64 row within the page.  owned: bool, False where the
    request has no page for the row; such a row must be neither read nor written.
    """

    pages: torch.Tensor
    offsets: torch.Tensor
    owned: torch.Tensor


def row_addresses(rows: torch.Tensor, page_table: torch.Tensor, num_pages: torch.Tensor, page_size: int) -> RowAddresses:
    """Look rows up in the page table of their request.

    rows: int64 [B, N], row number = absolute position; page_table: int32 [B, P], entries past num_pages[b] are not read
    as pages; num_pages: int64 [B].  Never raises: rows outside the allocation come back with owned False.
    """
    index = torch.div(rows, page_size, rounding_mode="floor")
    owned = (rows >= 0) & (index < num_pages[:, None])
    safe = torch.where(owned, index, 0)
    pages = torch.where(owned, page_table.long().gather(1, safe), 0)
    return RowAddresses(pages=pages, offsets=torch.where(owned, rows % page_size, 0), owned=owned)
