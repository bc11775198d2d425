"""The CuTe DSL kernels compile to machine code on a machine without a GPU, and a device without a build is refused."""

import importlib.util
import json

import pytest
from cute_kit import CUDA, ELF, run_compiling

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed")

# (C, r): Kimi K3's, whole 16-byte chunks; one whose values are taken one by one; one with several chunks a thread.
PROGRAM = r"""
import json, re, sys
import torch
from dspark_kernels.cute.latent_norm_rope import Facts, compile_latent_norm_rope

FLOAT = re.compile(r"(?:fma|mul|add|sub|div|neg|rsqrt|cvt|shfl)\.[a-z0-9.]*(?:f32|bfly\.b32)")
results = []
for dtype in (torch.bfloat16, torch.float32):
    for shape in ((512, 64), (7, 2), (4608, 64)):
        for aligned in (False, True)[: 1 if shape == (7, 2) else 2]:
            for pool in (False, True):
                facts = Facts(dtype, *shape, pool=pool, aligned=aligned)
                compiled = compile_latent_norm_rope(facts, sys.argv[1])
                assert compile_latent_norm_rope(Facts(dtype, *shape, pool=pool, aligned=aligned), sys.argv[1]) is compiled
                machine_code, ptx = compiled.__cubin__, compiled.__ptx__
                results.append(
                    {
                        "case": f"{dtype} {shape} aligned={aligned}",
                        "magic": machine_code[:4].hex(),
                        "machine": int.from_bytes(machine_code[18:20], "little"),
                        "target": re.search(r"\.target (\w+)", ptx)[1],
                        "arithmetic": sorted(FLOAT.findall(ptx)),
                        "widest": "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx,
                    }
                )
print(json.dumps(results))
"""


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a", "sm_103a", "sm_107a"])
def test_both_forms_compile_to_machine_code(architecture, tmp_path):
    done = run_compiling(PROGRAM, tmp_path, architecture, architecture=architecture)
    if architecture == "sm_107a" and "Unsupported GPU architecture 'sm_107a' with CUDA toolkit" in done.stdout + done.stderr:
        pytest.skip("this nvidia-cutlass-dsl carries a CUDA toolkit older than sm_107a; its cu13 extra has a newer one")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) == 20
    assert {(result["magic"], result["machine"], result["target"]) for result in results} == {(ELF, CUDA, architecture)}
    for plain, pool in zip(results[::2], results[1::2], strict=True):
        # The store's address alone differs, so the arithmetic is the same.
        assert plain["case"] == pool["case"] and plain["arithmetic"] == pool["arithmetic"]
        assert any("rsqrt" in name for name in plain["arithmetic"])
        assert plain["widest"] == pool["widest"] == ("aligned=True" in plain["case"])


def test_a_device_that_nothing_is_built_for_is_refused_with_the_reason():
    from dspark_kernels.cute.builds import BUILDS, build_architecture

    assert [build_architecture(capability) for capability in BUILDS] == ["sm_90a", "sm_100a", "sm_103a", "sm_107a"]
    with pytest.raises(ValueError, match=r"not built for compute capability 8\.0, only for 9\.0 \(sm_90a\)"):
        build_architecture((8, 0))
