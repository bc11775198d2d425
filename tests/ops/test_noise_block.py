"""`noise_block`: exact copies of embedding rows, by the kernel as by the reference."""

import pytest
import torch
from kernel_kit import DEVICE, random_bits, watched_memory

from dspark_model.ops import noise_block
from dspark_model.testing import assert_bitwise_equal, poison_

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check(anchors: torch.Tensor, embed: torch.Tensor, mask: torch.Tensor, rows: int, **shard) -> torch.Tensor:
    """Kernel first, then the reference, then a loop; table and mask row may not have changed."""
    arguments = (anchors, embed, mask)
    before = [tensor.clone() for tensor in arguments]
    with watched_memory(*arguments):
        fused = noise_block(anchors, embed, mask, rows, fused=True, **shard)
    block = noise_block(anchors, embed, mask, rows, **shard)
    assert_bitwise_equal(fused, block, "kernel")
    assert (block.dtype, block.shape) == (embed.dtype, (len(anchors), rows, embed.shape[1]))
    start, nothing = shard.get("vocab_start", 0), torch.zeros_like(mask)
    for b, anchor in enumerate(anchors.tolist()):
        here = start <= anchor < start + embed.shape[0]
        assert_bitwise_equal(block[b, 0], embed[anchor - start] if here else nothing, f"anchor of request {b}")
        for row in range(1, rows):
            wanted = mask if shard.get("with_mask", True) else nothing
            assert_bitwise_equal(block[b, row], wanted, f"row {row} of request {b}")
    for tensor, wanted in zip(arguments, before, strict=True):
        assert_bitwise_equal(tensor, wanted, "an argument")
    return fused


def tokens(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 7, 8])
@pytest.mark.parametrize("batch", [0, 1, 5])
def test_the_anchor_stands_first_and_mask_rows_behind(dtype, rows, batch):
    embed, mask = random_bits(20, 9, dtype=dtype), random_bits(9, dtype=dtype)
    check(torch.randint(20, (batch,), device=DEVICE), embed, mask, rows)


@pytest.mark.parametrize("width", [1, 64, 1023, 1024, 1025, 2304])
@pytest.mark.parametrize("rows", [1, 17])
def test_widths_at_and_behind_one_tile_of_the_kernel(width, rows):
    embed, mask = random_bits(3, width, dtype=torch.bfloat16), random_bits(width, dtype=torch.bfloat16)
    check(tokens([2, 0]), embed, mask, rows)


def test_a_table_whose_rows_lie_apart():
    wide = random_bits(6, 13, dtype=torch.bfloat16)
    check(tokens([0, 5, 3]), wide[:, 2:11], random_bits(9, dtype=torch.bfloat16), 3)


@pytest.mark.parametrize("fused", [False, True])
def test_only_the_anchors_rows_of_the_table_are_read(fused):
    embed = poison_(torch.empty(20, 9, device=DEVICE))
    embed[[0, 19]] = 1.0
    block = noise_block(tokens([0, 19, 0]), embed, torch.ones(9, device=DEVICE), 4, fused=fused)
    assert torch.equal(block, torch.ones(3, 4, 9, device=DEVICE))


def test_a_mask_row_of_another_dtype_is_rounded_to_the_tables():
    mask = torch.randn(9)
    block = noise_block(torch.tensor([1]), torch.randn(4, 9).bfloat16(), mask, 3)
    assert_bitwise_equal(block[0, 2], mask.bfloat16())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("batch", "rows"), [(2, 3), (1, 3), (1, 1)])
def test_neither_building_nor_writing_the_block_reaches_table_or_mask(batch, rows, fused):
    embed, mask = torch.ones(4, 3, device=DEVICE), torch.zeros(3, device=DEVICE)
    noise_block(tokens([1] * batch), embed, mask, rows, fused=fused).fill_(7.0)
    assert torch.equal(embed, torch.ones(4, 3, device=DEVICE))
    assert torch.equal(mask, torch.zeros(3, device=DEVICE))


@pytest.mark.parametrize("sizes", [(12,), (5, 7), (1, 10, 1), (4, 4, 4)], ids=str)
def test_blocks_of_a_sharded_vocabulary_sum_to_the_whole(sizes):
    embed, mask = torch.randn(12, 10, device=DEVICE).bfloat16(), torch.randn(10, device=DEVICE).bfloat16()
    anchors = tokens([*range(12), 0, 11])
    total, start = torch.zeros(14, 3, 10, dtype=torch.bfloat16, device=DEVICE), 0
    for shard, table in enumerate(embed.split(list(sizes))):
        # What a shard does not hold is poison beside its rows.
        around = poison_(torch.empty(len(table) + 2, 10, dtype=torch.bfloat16, device=DEVICE))
        around[1:-1] = table
        total += check(anchors, around[1:-1], mask, 3, vocab_start=start, with_mask=shard == len(sizes) - 1)
        start += len(table)
    assert torch.equal(total, noise_block(anchors, embed, mask, 3))


def test_no_token_and_tokens_of_other_shards_give_rows_of_zero():
    embed, mask = random_bits(4, 5, dtype=torch.float32), random_bits(5, dtype=torch.float32)
    anchors = tokens([-1, 99, 100, 103, 104, 2**40, -(2**40), 0])
    block = check(anchors, embed, mask, 2, vocab_start=100, with_mask=False)
    assert_bitwise_equal(block[[2, 3], 0], embed[[0, 3]])
    for row in (0, 1, 4, 5, 6, 7):
        assert_bitwise_equal(block[row], torch.zeros(2, 5, device=DEVICE), f"anchor {int(anchors[row])}")
