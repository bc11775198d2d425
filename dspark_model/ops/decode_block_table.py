"""From an outside engine's encoded page offsets to a page table."""

import torch


def decode_block_table(encoded: torch.Tensor, divisor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode page offsets.

    encoded: integer [B, P], any strides; a value below 0 means "no page", a value of at least 0 is page x divisor, and
    page 0 is a valid page.  Returns (num_pages int64 [B], page_table int32 [B, P]): the number of entries of at least 0
    before the first negative one, and the decoded pages with -1 for every entry from the first negative one on.
    """
    present = (encoded >= 0).long().cumprod(dim=1).bool()
    pages = torch.div(encoded, divisor, rounding_mode="floor")
    return present.sum(dim=1), torch.where(present, pages, -1).to(torch.int32)
