"""The README's Python example runs as it stands there."""

import re
from pathlib import Path

import torch
import transformers

from dspark_model.testing import tiny_config, write_checkpoint

ROOT = Path(__file__).parents[1]


def test_the_ten_lines_run(tmp_path, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    config = tiny_config(
        vocab_size=97,
        hidden_size=32,
        target_hidden_size=32,
        target_layer_ids=(2, 8, 15, 22, 28),
        target_num_hidden_layers=30,
        mask_token_id=96,
        max_position_embeddings=2048,
    )
    write_checkpoint(tmp_path / "drafter", config, 0)
    target_config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=30,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
    )
    model = transformers.LlamaForCausalLM._from_config(target_config, attn_implementation="sdpa", dtype=torch.float32)
    names = {"model": model, "prompt_ids": [5, 6, 7], "eos": 1}
    exec(code.replace("path/or/repo-id", str(tmp_path / "drafter")), names)
    assert names["result"].tokens
    assert "shifted labels" in capsys.readouterr().out
