"""`confidence` against float64."""

import pytest
import torch
from kernel_kit import DEVICE, watched_memory

from dspark_model.ops import confidence
from dspark_model.testing import assert_bitwise_equal, poison_


def inputs(batch: int, drafts: int, hidden: int, rank: int, dtype: torch.dtype):
    """Hidden rows apart from one another and W1 with rows of NaN that no token names; None for a head without Markov input."""
    wide = poison_(torch.empty(drafts, batch, hidden + 5, dtype=dtype))
    wide[..., :hidden] = torch.randn(drafts, batch, hidden)
    rows = wide.to(DEVICE).transpose(0, 1)[..., :hidden]
    weight, bias = torch.randn(hidden + rank).to(dtype).to(DEVICE), torch.randn(1).to(dtype).to(DEVICE)
    if not rank:
        return rows, weight, bias, None, None
    w1 = poison_(torch.empty(11, rank + 1, dtype=dtype))
    w1[2:9, :rank] = torch.randn(7, rank)
    return rows, weight, bias, w1.to(DEVICE)[:, :rank], torch.randint(2, 9, (batch, drafts)).to(DEVICE)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("batch", "drafts", "hidden", "rank"), [(1, 1, 1, 1), (3, 7, 70, 5), (2, 3, 64, 0), (1, 2, 9000, 16), (0, 3, 8, 2)]
)
def test_matches_float64(backend, dtype, batch, drafts, hidden, rank):
    rows, weight, bias, w1, previous = inputs(batch, drafts, hidden, rank, dtype)
    reads = [tensor for tensor in (rows, weight, bias, w1, previous) if tensor is not None]
    if backend == "triton":
        with watched_memory(*reads):
            made = confidence(rows, weight, bias, w1, previous, backend=backend)
    else:
        made = confidence(rows, weight, bias, w1, previous)
    ours = made.logits
    torch.testing.assert_close(made.probability.double(), torch.sigmoid(ours.double()), rtol=2.0**-20, atol=1e-30)
    assert (ours.dtype, ours.shape) == (torch.float32, (batch, drafts))
    for b in range(batch):
        for k in range(drafts):
            row = rows[b, k].double()
            if rank:
                row = torch.cat((row, w1[previous[b, k]].double()))
            wanted = row @ weight.double() + bias.double()
            size = row.abs() @ weight.double().abs() + bias.double().abs()
            assert abs(ours[b, k].double() - wanted) <= 2.0**-18 * size


def test_the_fused_sum_has_one_order():
    rows, weight, bias, w1, previous = inputs(3, 4, 300, 7, torch.float32)
    whole = confidence(rows, weight, bias, w1, previous, backend="triton")
    alone = confidence(rows[1:2], weight, bias, w1, previous[1:2], backend="triton")
    assert_bitwise_equal(alone.logits, whole.logits[1:2])
    assert_bitwise_equal(alone.probability, whole.probability[1:2])


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("rank", [5, 0])
@pytest.mark.parametrize("slots", [[4, -1, 0], [-7, 2, -1], [0, 3, 1], [-1, -1, -1]], ids=str)
def test_logits_of_dummy_rows_are_minus_infinity_whatever_they_hold(backend, rank, slots):
    rows, weight, bias, w1, previous = inputs(3, 4, 70, rank, torch.float32)
    whole = confidence(rows, weight, bias, w1, previous, backend=backend)
    at = torch.tensor(slots, device=DEVICE)
    dummies = at < 0
    rows[dummies] = float("nan")
    reads = [tensor for tensor in (rows, weight, bias, w1, previous, at) if tensor is not None]
    if backend == "triton":
        with watched_memory(*reads):
            ours = confidence(rows, weight, bias, w1, previous, slots=at, backend=backend)
    else:
        ours = confidence(rows, weight, bias, w1, previous, slots=at)
    assert (ours.logits[dummies] == -torch.inf).all()
    assert_bitwise_equal(ours.logits[~dummies], whole.logits[~dummies])
    zeros = ours.probability[dummies]
    assert_bitwise_equal(zeros, torch.zeros_like(zeros))
    assert_bitwise_equal(ours.probability[~dummies], whole.probability[~dummies])


@pytest.mark.parametrize(
    "slots",
    [torch.zeros(3, dtype=torch.int64), torch.zeros(2, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)[::2]],
    ids=["size", "dtype", "strides"],
)
def test_slots_that_the_kernel_refuses(slots):
    tensors = torch.zeros(2, 3, 6), torch.zeros(6), torch.zeros(1)
    with pytest.raises(ValueError, match=r"slots: contiguous int64 \[2\] wanted"):
        confidence(*tensors, slots=slots, backend="triton")


@pytest.mark.parametrize(
    ("place", "wrong", "message"),
    [
        (0, torch.zeros(2, 6, 3).transpose(1, 2), "side by side"),
        (1, torch.zeros(6), "weight"),
        (3, torch.zeros(4, 9).T, "side by side"),
        (4, torch.zeros(2, 3, dtype=torch.int32), "previous_tokens"),
        (4, torch.zeros(3, 2, dtype=torch.int64).T, "previous_tokens"),
    ],
)
def test_what_the_kernel_refuses(place, wrong, message):
    tensors = [torch.zeros(2, 3, 6), torch.zeros(10), torch.zeros(1), torch.zeros(9, 4), torch.zeros(2, 3, dtype=torch.int64)]
    tensors[place] = wrong
    with pytest.raises(ValueError, match=message):
        confidence(*tensors, backend="triton")
