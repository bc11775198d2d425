"""The CuTe DSL block attention compiles to Hopper's instructions without a GPU, and on one agrees with float64."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed")

PROGRAM = r"""
import json, re
import torch
from dspark_kernels.cute.block_attention import Facts, compile_block_attention

results = []
for facts in (
    Facts(torch.bfloat16, 512, 576, 7, 8, 32, False, 132),
    Facts(torch.float16, 128, 192, 16, 64, 128, True, 132),
    Facts(torch.bfloat16, 256, 320, 1, 1, 16, True, 132, slotted=True, fetch_queries=False),
):
    compiled = compile_block_attention(facts, "sm_90a")
    machine_code, ptx = compiled.__cubin__, compiled.__ptx__
    results.append(
        {
            "magic": machine_code[:4].hex(),
            "machine": int.from_bytes(machine_code[18:20], "little"),
            "target": re.search(r"\.target (\w+)", ptx)[1],
            "scores": ptx.count(f"wgmma.mma_async.sync.aligned.m64n32k16.f32"),
            "values": ptx.count(f"wgmma.mma_async.sync.aligned.m64n{facts.latent // 2}k16.f32"),
            "boxes": ptx.count("cp.async.bulk.tensor.4d.shared"),
            "spilled": ".local" in ptx,
            "waits": ptx.count("griddepcontrol.wait"),
        }
    )
print(json.dumps(results))
"""
ELF, CUDA = b"\x7fELF".hex(), 190


def test_compiles_to_wgmma_and_tma(tmp_path):
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    settings = {
        "CUTE_DSL_ARCH": "sm_90a",  # else the DSL looks for a device
        "CUTE_DSL_KEEP": "cubin,ptx",
        "CUTE_DSL_DUMP_DIR": str(tmp_path),
        "CUTE_DSL_NO_CACHE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    wanted = ((576, 4), (192, 3), (320, 4))
    for result, (width, boxes) in zip(results, wanted, strict=True):
        assert (result["magic"], result["machine"], result["target"]) == (ELF, CUDA, "sm_90a")
        assert result["scores"] == width // 16
        assert result["values"] == 4
        assert result["boxes"] == boxes
        assert not result["spilled"]
        assert result["waits"] == 1


def bench():
    spec = importlib.util.spec_from_file_location("bench_cute_attention", ROOT / "scripts" / "bench_cute_attention.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


BENCH = bench()


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in BENCH.cases() if not case.timed], ids=lambda case: case.name)
def test_agrees_with_float64_and_repeats_its_bits(case):
    result = BENCH.check(case)
    assert result["passed"], result


@pytest.mark.parametrize("case", [case for case in BENCH.cases() if not case.timed], ids=lambda case: case.name)
def test_the_float64_answer_is_the_torch_reference(case):
    from dspark_model.ops.block_attention import block_attention

    if case.window is not None or max(case.seq_lens) > 3000 or len(case.seq_lens) > 10:
        pytest.skip("the reference has no window, or the case is large")
    inputs = BENCH.make_inputs(case, "cpu")
    inputs.page_table.masked_fill_(inputs.page_table == BENCH.NO_PAGE, 0)
    options = {"kv_lora_rank": BENCH.LATENT, "softmax_scale": BENCH.WIDTH**-0.5, "causal": case.causal, "slots": inputs.slots}
    reference = block_attention(*inputs.arguments(), **options, max_seq_len=max(case.seq_lens))
    expected = BENCH.expected(case, inputs).to(reference.dtype)
    torch.testing.assert_close(expected, reference, rtol=1e-2, atol=1e-2 * case.scale)


@pytest.mark.gpu
def test_the_op_hands_over_slots_and_all_options():
    from dspark_model.ops.block_attention import block_attention

    case = BENCH.Case("", (2055, 0, 70), causal=True, window=100, slotted=True)
    inputs = BENCH.make_inputs(case, "cuda")
    ours = block_attention(
        *inputs.arguments(), kv_lora_rank=BENCH.LATENT, softmax_scale=BENCH.WIDTH**-0.5, max_seq_len=4096, causal=True,
        window=100, slots=inputs.slots, backend="cute",
    )  # fmt: skip
    assert torch.equal(ours, BENCH.launch(case, inputs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.update(queries=a["queries"].float()), "one dtype"),
        (lambda a: a.update(kv_lora_rank=500), "kv_lora_rank up to 512 in steps of 128"),
        (lambda a: a.update(latents=a["latents"][:, :12]), "multiple of 8 tokens, not 12"),
        (lambda a: a.update(latents=a["latents"].as_strided((3, 16, 576), (16 * 580, 580, 1))), "multiples of 8"),
        (lambda a: a.update(page_table=a["page_table"].long()), "page_table must be int32"),
        (lambda a: a.update(seq_lens=a["seq_lens"].int()), "seq_lens must be int64"),
        (lambda a: a.update(slots=torch.zeros(2, dtype=torch.int32)), "slots must be int64"),
        (lambda a: a.update(slots=torch.zeros(3, dtype=torch.int64)), "one a request"),
        (lambda a: a.update(softmax_scale=0.0), "softmax_scale=0.0: must be positive"),
    ],
)
def test_bad_input_is_refused_before_the_device_is_asked(change, message):
    from dspark_kernels.cute.block_attention import block_attention

    arguments = {
        "queries": torch.zeros(2, 7, 8, 576, dtype=torch.bfloat16),
        "latents": torch.zeros(4, 16, 576, dtype=torch.bfloat16),
        "page_table": torch.zeros(2, 2, dtype=torch.int32),
        "context_lens": torch.zeros(2, dtype=torch.int64),
        "seq_lens": torch.zeros(2, dtype=torch.int64),
        "kv_lora_rank": 512,
        "softmax_scale": 0.1,
    }
    change(arguments)
    with pytest.raises(ValueError, match=message):
        block_attention(**arguments)
