"""Frequencies and the table of cosines and sines."""

import math

import pytest
import torch
from dense_drafter import inverse_frequencies as reference_frequencies
from dense_drafter import rotate
from drafting import make_worker

from dspark_model import MLADSparkForCausalLM, RopeConfig
from dspark_model.config import RopeType
from dspark_model.ops import rope_rotate
from dspark_model.rope import RopeTable, inverse_frequencies
from dspark_model.testing import assert_bitwise_equal, random_lm_head, tiny_config, write_checkpoint

K3 = RopeConfig(
    rope_type=RopeType.YARN, theta=50000.0, factor=32.0, original_max_position_embeddings=32768, mscale=1.0, mscale_all_dim=1.0
)
K3_JSON = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 32.0, "original_max_position_embeddings": 32768}
# Worked out by hand from the rule for dim 64: raw bounds 15.0645 and 25.3146, so 15 and 26.
K3_FREQUENCIES = {
    0: 1.0,
    14: 8.794287e-3,
    15: 6.271303e-3,
    16: 4.078283e-3,
    20: 6.472429e-4,
    24: 6.202299e-5,
    25: 2.544698e-5,
    26: 4.752662e-6,
    31: 8.764413e-7,
}


def test_frequencies_of_kimi_k3():
    frequencies = inverse_frequencies(K3, 64)
    assert frequencies.dtype is torch.float64
    for pair, value in K3_FREQUENCIES.items():
        assert float(frequencies[pair]) == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("dim", [2, 10, 16, 64, 128])
@pytest.mark.parametrize(
    "changes",
    [{}, {"factor": 1.0}, {"theta": 100.0}, {"beta_fast": 1.0}, {"original_max_position_embeddings": 8}, {"theta": 1e9}],
    ids=lambda changes: "-".join(f"{key}={value:g}" for key, value in changes.items()) or "k3",
)
def test_frequencies_match_the_rule_written_out(dim, changes):
    fields = {"theta": 50000.0, "factor": 32.0, "original_max_position_embeddings": 32768, "beta_fast": 32.0, **changes}
    theirs = reference_frequencies({"rope_type": "yarn", "rope_theta": fields["theta"], **fields}, dim)
    ours = inverse_frequencies(RopeConfig(rope_type=RopeType.YARN, **fields), dim)
    torch.testing.assert_close(ours, torch.tensor(theirs, dtype=torch.float64), rtol=1e-12, atol=0.0)
    assert float(ours[0]) == 1.0 or changes.get("original_max_position_embeddings") == 8


@pytest.mark.parametrize("theta", [100.0, 10000.0, 5e6])
def test_plain_frequencies(theta):
    ours = inverse_frequencies(RopeConfig(theta=theta), 12)
    assert ours.tolist() == pytest.approx([theta ** (-i / 6) for i in range(6)], rel=1e-14)
    assert float(ours[0]) == 1.0


def test_table_stays_exact_at_position_131071():
    table = RopeTable(K3, 64, 131072)
    angles = [131071 * frequency for frequency in reference_frequencies(K3_JSON, 64)]
    wanted = torch.tensor([math.cos(a) for a in angles] + [math.sin(a) for a in angles])
    torch.testing.assert_close(table.cos_sin[131071], wanted, rtol=0.0, atol=1e-7)
    assert table.cos_sin.dtype is torch.float32


def test_table_carries_the_mscale_ratio():
    rope = RopeConfig(
        rope_type=RopeType.YARN, theta=1e4, factor=8.0, original_max_position_embeddings=64, mscale=2.0, mscale_all_dim=0.5
    )
    ratio = (0.2 * math.log(8.0) + 1.0) / (0.05 * math.log(8.0) + 1.0)
    assert float(RopeTable(rope, 16, 1).cos_sin[0, 0]) == pytest.approx(ratio, rel=1e-7)


@pytest.mark.parametrize("rope_type", ["default", "yarn"])
@pytest.mark.parametrize("positions", [(0, 1, 63), (64, 65, 511)], ids=["within-window64", "past-window64"])
def test_a17_rotated_keys_match_the_rule_written_out(rope_type, positions):
    data = {"rope_type": "default", "rope_theta": 1e4}
    config = RopeConfig(theta=1e4)
    if rope_type == "yarn":
        scaling = {"factor": 8.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.4}
        data |= {"rope_type": "yarn", **scaling}
        config = RopeConfig(rope_type=RopeType.YARN, theta=1e4, **scaling)
    where = torch.tensor(positions)
    keys = torch.randn(3, 16)
    ours = rope_rotate(keys, RopeTable(config, 16, 512).rows(where))
    theirs = rotate(keys.double(), where, data, half_split=False)
    torch.testing.assert_close(ours, theirs.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("position", [-1, 8, 1000])
def test_positions_outside_the_table_raise(position):
    with pytest.raises(IndexError):
        RopeTable(K3, 8, 8).rows(torch.tensor([0, position]))


@pytest.mark.parametrize("shape", [(0,), (3,), (2, 5), (2, 0)], ids=str)
def test_rows_of_any_shape_are_the_tables_own_bytes(shape):
    table = RopeTable(K3, 8, 50)
    positions = torch.randint(50, shape)
    rows = table.rows(positions)
    assert rows.shape == (*shape, 8)
    wanted = torch.stack([table.cos_sin[int(p)] for p in positions.flatten()]).view(*shape, 8) if positions.numel() else rows
    assert_bitwise_equal(rows, wanted)


LOAD_PATHS = {
    "defaults": {},
    "dtype-bfloat16": {"dtype": torch.bfloat16},
    "dtype-float16": {"dtype": torch.float16},
    "device-string": {"device": "cpu"},
    "device-object": {"device": torch.device("cpu")},
    "two-shards": {},
    "after-save": {},
}


@pytest.mark.parametrize("path", LOAD_PATHS)
def test_a03_rope_table_is_right_after_every_way_to_load(path, tmp_path):
    config = tiny_config()
    folder = write_checkpoint(tmp_path / "a", config, num_shards=2 if path == "two-shards" else 1)
    options = LOAD_PATHS[path]
    head = random_lm_head(config, dtype=options.get("dtype", torch.float32))
    model = MLADSparkForCausalLM.from_pretrained(folder, lm_head=head, **options)
    if path == "after-save":
        model.save_pretrained(tmp_path / "b")
        model = MLADSparkForCausalLM.from_pretrained(tmp_path / "b", lm_head=head)
    assert set(dict(model.named_buffers())) == {"lm_head"}, "a buffer that no checkpoint fills"
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    table = make_worker(model).rope
    rope = config.to_dict()["rope_parameters"]
    assert inverse_frequencies(model.config.rope, 16)[0] == 1.0
    where = torch.arange(table.num_positions)
    angles = where.double()[:, None] * torch.tensor(reference_frequencies(rope, 16), dtype=torch.float64)
    ratio = config.rope.cos_sin_multiplier
    wanted = torch.cat((angles.cos(), angles.sin()), dim=-1) * ratio
    torch.testing.assert_close(table.cos_sin, wanted.float(), rtol=0.0, atol=1e-7)
    assert_bitwise_equal(table.cos_sin, RopeTable(config.rope, 16, table.num_positions).cos_sin)
    assert table.num_positions >= 96 + 7 + 1 + 7
