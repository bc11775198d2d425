"""Every Triton kernel compiles for an H200 on a machine without a GPU, for the arguments with which its op launches it."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Without the interpreter.  The ops run on CPU tensors; each launch is compiled for sm_90 to a cubin and then left out.
PROGRAM = """
import dataclasses, importlib, json, pkgutil, re, sys, types
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction
import dspark_kernels.triton
from dspark_kernels.triton.block_attention import block_attention, choose_tuning
from dspark_model import ops

driver = types.SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0, get_current_stream=lambda device: 0
)
triton.runtime.driver.set_active(driver)
run, compiled, last = JITFunction.run, {}, {}

def compile_only(kernel, *args, grid, warmup, **kwargs):
    result = run(kernel, *args, grid=grid, warmup=True, **kwargs)
    assert result.metadata.target.arch == 90 and len(result.asm["cubin"]) > 0
    last.update(result.asm)
    compiled.setdefault(f"{kernel.module}.{kernel.__name__}", []).append(result.metadata.shared)

JITFunction.run = compile_only

names = [info.name for info in pkgutil.iter_modules(dspark_kernels.triton.__path__)]
modules = [importlib.import_module(f"dspark_kernels.triton.{name}") for name in names]
kernels = [
    f"{module.__name__}.{name}"
    for module in modules
    for name, value in vars(module).items()
    if isinstance(value, JITFunction) and name.endswith("_kernel")
]

def integers(*size, dtype=torch.int64):
    return torch.zeros(size, dtype=dtype)

H200_SHARED_MEMORY = 227 * 1024
# Kimi K3's shape; a batch of 1 makes some sizes the compile-time 1.
LAYERS, PAGE, LATENT, ROPE, HIDDEN, DRAFTS, SLOTS = 5, 32, 576, 64, 7168, 7, 4
table, lens = integers(SLOTS, 9, dtype=torch.int32), integers(SLOTS)
for batch, rows in ((1, DRAFTS), (3, DRAFTS + 1)):
    slots, where = integers(batch), ops.RowAddresses(*integers(2, batch, rows), integers(batch, rows).bool())
    for layout in (0, 1):
        storage = torch.zeros((LAYERS, 2, PAGE, LATENT) if layout == 0 else (2, LAYERS, PAGE, LATENT), dtype=torch.bfloat16)
        views, latents = storage.unbind(layout), torch.zeros(LAYERS, batch, rows, LATENT, dtype=torch.bfloat16)
        ops.latent_store(views, latents, where, fused=True)
        ops.context_store(views, latents, slots, slots, slots, table, lens, fused=True)
    ops.latent_store(views[:1], latents[:1], where, fused=True)
    weight, rotations = torch.zeros(LAYERS, LATENT - ROPE, dtype=torch.bfloat16), torch.zeros(batch * rows, ROPE)
    flat = latents.flatten(1, 2)
    ops.latent_norm_rope(flat, weight, 1e-5, rotations, backend="triton")
    ops.latent_norm_rope(flat[:1], weight[:1], 1e-5, rotations, backend="triton")
    ops.latent_norm_rope_store(flat[0], weight[0], 1e-5, rotations, views[0], where, backend="triton")
    q, kv_b = torch.zeros(batch, rows, 8, 192, dtype=torch.bfloat16), torch.zeros(8, 256, 512, dtype=torch.bfloat16)
    queries = ops.absorb_queries(q, kv_b[:, :128], torch.zeros(batch, rows, 64), backend="triton")
    ops.per_head_product(queries[..., :512], kv_b[:, 128:].mT, out=q[..., :128], backend="triton")
    queries = torch.zeros(batch, DRAFTS, 8 * batch, LATENT, dtype=torch.bfloat16)
    statistics = torch.zeros(batch, DRAFTS, 8 * batch)
    bf16 = torch.bfloat16
    for by_hand in (False, True):
        for options in ({"causal": False, "window": None, "slots": slots}, {"causal": True, "window": 4096, "lse": statistics}):
            block_attention(
                queries, views[0], integers(batch, 9, dtype=torch.int32), slots, slots, kv_lora_rank=LATENT - ROPE,
                softmax_scale=0.07, max_seq_len=1 << 17, processors=132,
                tuning=choose_tuning(56 * batch, bf16, by_hand=by_hand, shared_bytes=H200_SHARED_MEMORY), **options,
            )
    block_attention(
        queries[..., :2, :], views[0], integers(batch, 9, dtype=torch.int32), slots, slots, kv_lora_rank=LATENT - ROPE,
        softmax_scale=0.07, max_seq_len=1 << 17, causal=False, window=None, processors=132,
        tuning=choose_tuning(14, bf16, by_hand=False, shared_bytes=H200_SHARED_MEMORY),
    )
    # An fp8 pool: rows that are quantised as they are stored, and keys of one byte a value.
    fp8 = torch.zeros(LAYERS, 2, PAGE, ops.pool_row_width(LATENT, torch.float8_e4m3fn), dtype=torch.float8_e4m3fn).unbind(0)
    ops.latent_store(fp8[:1], latents[:1], where, fused=True)
    ops.latent_store(fp8, latents, where, fused=True)
    ops.context_store(fp8, latents, slots, slots, slots, table, lens, fused=True)
    ops.latent_norm_rope_store(flat[0], weight[0], 1e-5, rotations, fp8[0], where, backend="triton")
    for options in ({"causal": False, "window": None, "slots": slots}, {"causal": True, "window": 4096, "lse": statistics}):
        block_attention(
            queries, fp8[0], integers(batch, 9, dtype=torch.int32), slots, slots, kv_lora_rank=LATENT - ROPE,
            softmax_scale=0.07, max_seq_len=1 << 17, processors=132,
            tuning=choose_tuning(56 * batch, bf16, by_hand=False, shared_bytes=H200_SHARED_MEMORY), **options,
        )
    hidden = torch.zeros(8, HIDDEN, dtype=torch.bfloat16)
    ops.rms_norm(hidden, hidden[0], 1e-5, backend="triton")
    ops.noise_block(slots, hidden, hidden[0], rows, fused=True)
    ops.noise_block(slots, hidden, hidden[0], rows, vocab_start=8, with_mask=False, fused=True)
    for dtype in (torch.int32, torch.int64):
        ops.decode_block_table(integers(batch, 2, 9, dtype=dtype)[:, 0], 1, fused=True)
        ops.decode_block_table(integers(batch, 9, dtype=dtype), LAYERS, fused=True)
    ops.decode_block_table(integers(batch, 5000), 1 << 33, fused=True)
    ops.refresh_block_table(integers(batch, 9), LAYERS, 2, slots, table, lens, fused=True)
    ops.context_rows(slots, lens, torch.zeros(99, ROPE), rows, fused=True)
    ops.context_addresses(slots, slots, slots, table, lens, rows=rows, page_size=PAGE, fused=True)
    for given in (0, 1, batch):
        ops.step_prologue(
            slots,
            ops.SlotTables(lens, integers(SLOTS, DRAFTS), lens, lens, table, lens),
            ops.GivenRows(integers(given), integers(given)),
            integers(DRAFTS + 1, batch - given).T,
            torch.zeros(99, ROPE),
            ops.BlockShape(DRAFTS, 163840, rows, rows - DRAFTS, PAGE, 163838),
            fused=True,
        )
    state = ops.SlotDrafts(lens, lens, lens, integers(SLOTS, DRAFTS))
    ops.step_commit(state, slots, slots, slots, slots, integers(batch, DRAFTS), fused=True)

# A layer's products, some logits, and sizes that no tile divides.
def low_m(rows, out, inner, *, norm=False, gate_up=False, residual=False, dtype=torch.bfloat16, **options):
    weight = torch.empty(out, inner, dtype=dtype)
    ops.low_m_linear(
        torch.empty(rows, inner, dtype=dtype),
        weight,
        up_weight=weight if gate_up else None,
        norm_weight=weight[0] if norm else None,
        eps=1e-5 if norm else None,
        residual=torch.empty(rows, out, dtype=dtype) if residual else None,
        backend="triton",
        workspace=ops.LowMWorkspace.for_products("cpu", [ops.LowMProduct(rows, out, inner, dtype, gate_up)]),
        **options,
    )

for rows in (DRAFTS, 4 * DRAFTS, 128):
    low_m(rows, 2112, HIDDEN, norm=True)
    assert "wgmma.mma_async" in last["ptx"], rows
    low_m(rows, 1792, HIDDEN, norm=True, gate_up=True)
    assert "wgmma.mma_async" in last["ptx"], rows
    # The rows of both weights go to shared memory in 16 bytes at a time.
    assert "cp.async.cg.shared.global.L2::cache_hint" in last["ptx"]
low_m(DRAFTS, HIDDEN, 1024, residual=True)
low_m(4 * DRAFTS, HIDDEN, 1024, residual=True)
low_m(64, 20480, HIDDEN, norm=True, out_dtype=torch.float32)
low_m(DRAFTS, 20480, HIDDEN, out_dtype=torch.float32)
assert "wgmma.mma_async" in last["ptx"]
low_m(DRAFTS, 163840, HIDDEN, out_dtype=torch.float32)
assert "wgmma.mma_async" not in last["ptx"]
low_m(1, 577, 1535, norm=True, gate_up=True, residual=True)
low_m(DRAFTS, LATENT, HIDDEN, norm=True, dtype=torch.float32)
low_m(DRAFTS, LATENT, HIDDEN, dtype=torch.float16)
# Tables of one rank under TP8, which stay on a chip of 132 multiprocessors, and larger ones.
from dspark_model.ops.markov_chain import ChainPlan

held = ChainPlan.of_tiles(256, 132, 20480, 256)
for batch, vocab, dtype, plan in (
    (1, 20480, torch.bfloat16, held),
    (64, 20480, torch.bfloat16, held),
    (1, 20480, None, held),
    (4, 20480, torch.bfloat16, dataclasses.replace(held, prefetch=True)),
    (4, 163840, torch.float16, ChainPlan.of_tiles(256, 132, 163840, 128, held=False)),
    (4, 20480, torch.float32, ChainPlan.of_tiles(64, 132, 20480, 16, held=False)),
):
    w1, w2 = (None, None) if dtype is None else torch.empty(2, vocab, 256, dtype=dtype)
    workspace = ops.ChainWorkspace.for_plan(plan, batch, DRAFTS, torch.device("cpu"))
    logits = torch.empty(batch, DRAFTS, vocab)
    for keep in (False, True):
        ops.markov_chain(logits, integers(batch), w1, w2, keep_biased=keep, backend="triton", workspace=workspace)
    if not plan.prefetch:
        workspace = ops.ChainWorkspace.for_plan(
            dataclasses.replace(plan, sampled=True), batch, DRAFTS, torch.device("cpu")
        )
        draws = {"temperatures": torch.empty(batch), "uniforms": torch.empty(batch, DRAFTS)}
        ops.markov_chain(logits, integers(batch), w1, w2, **draws, backend="triton", workspace=workspace)
    rows, weight = torch.empty(batch, DRAFTS, HIDDEN, dtype=torch.bfloat16), torch.empty(HIDDEN + 256, dtype=torch.bfloat16)
    if dtype is torch.bfloat16:
        ops.confidence(rows, weight, weight[:1], w1, integers(batch, DRAFTS), slots=integers(batch), backend="triton")
    ops.confidence(rows, weight[:HIDDEN], weight[:1], backend="triton")

# The same launches as on a device of capability 9.0: they begin beside the kernel before, and wait for its end.
for name in ("rms_norm", "confidence", "step_commit", "low_m_linear", "absorb_queries"):
    module = sys.modules[f"dspark_model.ops.{name}"]
    module.programmatic_launch = lambda device: {"PROGRAMMATIC": True, "launch_pdl": True}

def loads():
    # Of global memory, in front of the wait and behind it; only behind it are results stored and does the next kernel begin.
    before, after = last["ptx"].split("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" in after and "st.global" in after and "st.global" not in before
    return [len(re.findall("ld.global|cp.async.c[ag]", part)) for part in (before, after)]

ops.rms_norm(hidden, hidden[0], 1e-5, backend="triton")
weights, rows_read = loads()
assert weights == rows_read > 0
for early in (False, True):
    ops.confidence(rows, weight, weight[:1], w1, integers(batch, DRAFTS), slots=integers(batch), backend="triton", early=early)
    before, after = loads()
    assert (before > 1) == early and before > 0 and after > 2, (before, after)
    assert ("bar.sync" in last["ptx"].split("griddepcontrol.wait")[0]) == early  # of the long sum
ops.step_commit(state, slots, slots, slots, slots, integers(3, DRAFTS), fused=True)
assert loads()[0] == 0
low_m(DRAFTS, 20480, HIDDEN, out_dtype=torch.float32, early=True)
assert loads()[0] == 0
low_m(DRAFTS, 20480, HIDDEN, out_dtype=torch.float32)
assert "griddepcontrol" not in last["ptx"]
q, keys = torch.zeros(1, DRAFTS, 8, 192, dtype=torch.bfloat16), torch.zeros(8, 128, 512, dtype=torch.bfloat16)
ops.absorb_queries(q, keys, torch.zeros(1, DRAFTS, 64), backend="triton")
# Programs that multiply have keys in front of their wait, the others none; and either has one of its own.
keys_read, *behind = (len(re.findall("ld.global", part)) for part in last["ptx"].split("griddepcontrol.wait"))
assert keys_read > 1 and len(behind) == 2

# Training, at SmolLM2's shape.
from dspark_kernels.triton.anchor_attention import anchor_attention
from dspark_kernels.triton.decode_attention import decode_attention
from dspark_kernels.triton.draft_loss import draft_loss_
from dspark_kernels.triton.sample_rows import sample_rows

def values(*size):
    return torch.zeros(size, dtype=torch.bfloat16)

blocks = [values(2, 9, n, w).requires_grad_() for n, w in ((21, 96), (70, 96), (70, 64), (21, 96), (21, 64))]
out = anchor_attention(*blocks, *integers(2, 2, 3, dtype=torch.int32), 0.1)
torch.autograd.grad(out, blocks, out.detach())
decode_attention(values(2, 9, 64), values(2, 3, 40, 64), values(2, 3, 40, 64), integers(2) + 1, 0.125)
draft_loss_(values(2, 49152), values(2, 49152), integers(2), integers(2), torch.zeros(2), ce_weight=0.1, l1_weight=0.9)
sample_rows(values(2, 49152), torch.zeros(2), integers(1))

print(json.dumps({"kernels": sorted(kernels), "compiled": compiled}))
"""
H200_SHARED_MEMORY = 227 * 1024


def test_all_kernels_compile_for_an_h200(tmp_path):
    settings = {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),  # so that nothing compiled before is taken
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels"))),
    }
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert sorted(result["compiled"]) == result["kernels"]
    assert max(size for sizes in result["compiled"].values() for size in sizes) <= H200_SHARED_MEMORY
