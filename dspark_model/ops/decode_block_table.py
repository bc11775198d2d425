"""From an outside engine's encoded page offsets to a page table."""

import torch


def decode_block_table(encoded: torch.Tensor, divisor: int, *, fused: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode page offsets.

    encoded: integer [B, P], any strides; a value below 0 means "no page", a value of at least 0 is page x divisor, and
    page 0 is a valid page.  Returns (num_pages int64 [B], page_table int32 [B, P]): the number of entries of at least 0
    before the first negative one, and the decoded pages with -1 for every entry from the first negative one on.
    fused: one Triton kernel, equal to the bit.
    """
    if fused:
        return _fused(encoded, divisor)
    present = (encoded >= 0).long().cumprod(dim=1).bool()
    pages = torch.div(encoded, divisor, rounding_mode="floor")
    return present.sum(dim=1), torch.where(present, pages, -1).to(torch.int32)


def _fused(encoded: torch.Tensor, divisor: int) -> tuple[torch.Tensor, torch.Tensor]:
    import triton
    from dspark_kernels.triton.decode_block_table import decode_block_table_kernel

    batch, width = encoded.shape
    num_pages = torch.empty(batch, dtype=torch.int64, device=encoded.device)
    table = torch.empty((batch, width), dtype=torch.int32, device=encoded.device)
    if batch:
        lanes = min(triton.next_power_of_2(max(width, 1)), 1024)
        decode_block_table_kernel[(batch,)](
            encoded, *encoded.stride(), num_pages, table, width, divisor, BLOCK=lanes, num_warps=4
        )
    return num_pages, table
