"""Everything about the block's own rows that no layer changes, computed once per step."""

from dataclasses import dataclass

import torch

from dspark_model.ops.row_addresses import RowAddresses, row_addresses


@dataclass(frozen=True, slots=True)
class BlockRows:
    """positions: int64 [B, N], absolute position of each block row.  where: their addresses in the pool.
    seq_lens: int64 [B], keys that the block attends to: the context and the block rows that have a page."""

    positions: torch.Tensor
    where: RowAddresses
    seq_lens: torch.Tensor


def block_fixup(
    context_lens: torch.Tensor,
    page_table: torch.Tensor,
    num_pages: torch.Tensor,
    live: torch.Tensor,
    *,
    rows: int,
    page_size: int,
) -> BlockRows:
    """Place `rows` block rows right behind the context of each request.

    context_lens, num_pages: int64 [B]; page_table: int32 [B, P]; live: bool [B].  Row j of the block has position
    context_lens[b] + j.  Rows without a page are masked, and seq_lens is cut to what fits; a dummy row has seq_lens 0.
    """
    positions = context_lens[:, None] + torch.arange(rows, device=context_lens.device)
    pages_live = torch.where(live, num_pages, 0)
    where = row_addresses(positions, page_table, pages_live, page_size)
    seq_lens = torch.minimum(context_lens + rows, pages_live * page_size)
    return BlockRows(positions=positions, where=where, seq_lens=torch.where(live, seq_lens, 0))
