"""Compiling CuTe DSL kernels without a GPU, in a process of its own."""

import base64
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
ELF, CUDA = b"\x7fELF".hex(), 190  # of machine code: its first bytes, and the machine in its header


def run_compiling(program: str, dump: Path, *arguments: str, architecture: str = "sm_90a") -> subprocess.CompletedProcess:
    """`program` run by Python with its arguments, for an architecture; what is compiled is kept in `dump`."""
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    settings = {
        "CUTE_DSL_ARCH": architecture,  # else the DSL looks for a device
        "CUTE_DSL_KEEP": "cubin,ptx",
        "CUTE_DSL_DUMP_DIR": str(dump),
        "CUTE_DSL_NO_CACHE": "1",  # so that nothing compiled before is taken
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=300, cwd=dump)


def stack_bytes(code: str, folder: Path) -> list[int]:
    """Of the stack of each kernel in machine code, base64: above 0 where registers did not suffice."""
    return [int(size) for size in re.findall(r"STACK:(\d+)", _dump(code, folder, "-res-usage"))]


def products_wait(code: str, folder: Path) -> int:
    """How many instructions in machine code, base64, wait for products of a warpgroup."""
    return _dump(code, folder, "-sass").count("WARPGROUP.DEPBAR")


def _dump(code: str, folder: Path, option: str) -> str:
    import triton

    file = folder / "kernels.cubin"
    file.write_bytes(base64.b64decode(code))
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, option, file], capture_output=True, text=True, check=True).stdout
