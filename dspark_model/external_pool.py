"""A pool of latents in memory of an outside engine."""

from collections.abc import Mapping, Sequence

import torch

from dspark_model import ops
from dspark_model.config import DrafterConfig
from dspark_model.device_slots import DeviceSlots
from dspark_model.kv_pool import PagedLatents, PrefixHandle
from dspark_model.serving_config import PoolConfig


class ExternalLatentPool(PagedLatents):
    """A pool in memory of an outside engine, which also decides who owns which page.

    layer_views: one tensor [pages, page_size, W] per layer, any strides between pages, W as in `PagedLatents`.
    Each step brings `block_table`, integer [requests of the step, P], with value = page x `divisor` or below 0 for "no page".
    """

    def __init__(self, config: PoolConfig, drafter: DrafterConfig, layer_views: Sequence[torch.Tensor], *, divisor: int = 1):
        if not isinstance(divisor, int) or divisor < 1:
            raise ValueError(f"divisor is {divisor!r}, wanted a whole number of at least 1 (encoded offset = page x divisor)")
        if config.context_window is not None:
            raise ValueError(
                f"context_window={config.context_window}: the outside engine decides which pages an external pool gives back; "
                "leave it out"
            )
        super().__init__(config, drafter, layer_views)
        self.divisor = divisor
        # Of the last step, at fixed addresses, so that a step allocates nothing: its slots and their rows before it.
        self._slots = DeviceSlots(config.max_requests, self.device)
        self._table_before, self._counts_before = torch.zeros_like(self.page_table), torch.zeros_like(self.num_pages)

    def open(self, slot: int, max_rows: int, prefix: PrefixHandle | None, what: str) -> None:
        """Start with no page; the engine's table comes with each step."""
        if prefix is not None:
            raise ValueError("the outside engine shares the pages of an external pool; pass no prefix")
        self._set_pages(slot, ())

    def begin_step(
        self, rows: Mapping[int, int], block_table: torch.Tensor | None, *, read_values: bool = True, fused: bool = False
    ) -> int:
        """Take over the engine's table for the step's slots, in the order of `rows`; a step without any needs none.

        read_values: False does not wait for the device; a page that the pool does not have then counts as none, and so does
        what stands behind it.  fused: see `ops.refresh_block_table`.

        Raises:
            ValueError: the table is missing, has another number of rows, or names pages that the pool does not have.
        """
        if block_table is None and not rows:
            return 0
        if block_table is None:
            raise ValueError("an external pool needs StepInput.block_table, the encoded offsets of the step's requests")
        if block_table.ndim != 2 or block_table.shape[0] != len(rows) or block_table.dtype.is_floating_point:
            raise ValueError(
                f"block_table is {block_table.dtype} {list(block_table.shape)}, wanted integer [{len(rows)}, pages]: "
                "one row per request of the step, context requests first, dummy rows left out"
            )
        block_table = block_table.to(self.device)
        limit = self.layer_views[0].shape[0]
        if read_values:
            self._check_table(block_table, limit)
        self._slots.set(list(rows))
        slots = self._slots.tensor[: len(rows)]
        torch.index_select(self.page_table, 0, slots, out=self._table_before[: len(rows)])
        torch.index_select(self.num_pages, 0, slots, out=self._counts_before[: len(rows)])
        ops.refresh_block_table(block_table, self.divisor, limit, slots, self.page_table, self.num_pages, fused=fused)
        return len(rows)

    def _check_table(self, block_table: torch.Tensor, limit: int) -> None:
        num_pages, table = ops.decode_block_table(block_table, self.divisor)
        # Judged by the encoded values: the table's int32 would wrap a huge one around to a page that exists.
        named = torch.arange(table.shape[1], device=self.device) < num_pages[:, None]
        highest = torch.where(named, block_table, -1).max().item() // self.divisor if table.numel() else -1
        if highest >= limit:
            raise ValueError(f"block_table names page {highest}, but the pool has {limit}; check the divisor")

    def cancel_step(self, before: int) -> None:
        """Undo the last `begin_step`, which returned `before`."""
        slots = self._slots.tensor[:before]
        self.page_table[slots] = self._table_before[:before]
        self.num_pages[slots] = self._counts_before[:before]

    def close(self, slot: int) -> None:
        self._set_pages(slot, ())
