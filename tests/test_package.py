"""What importing and using the package does to the process around it."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import dspark_model

ROOT = Path(dspark_model.__file__).parent.parent

RECORDER = """
import os, sys
package = os.path.join({root!r}, "dspark_model") + os.sep
kernels = os.path.join({root!r}, "kernels") + os.sep
reads = []

class Recording(type(os.environ)):
    def __getitem__(self, key):
        frame = sys._getframe(1)
        while frame.f_code.co_filename in (os.__file__, "<frozen os>", "<frozen _collections_abc>"):
            frame = frame.f_back
        if frame.f_code.co_filename.startswith((package, kernels)):
            reads.append((frame.f_code.co_filename, key))
        return super().__getitem__(key)

os.environ.__class__ = Recording
"""


def run(code: str) -> str:
    script = RECORDER.format(root=str(ROOT)) + textwrap.dedent(code)
    paths = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'kernels')!r}, {str(ROOT / 'tests')!r}]\n"
    result = subprocess.run([sys.executable, "-c", paths + script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_and_use_are_free_of_side_effects():
    """No triton, cutlass or transformers, no CUDA context, no environment variable read; also not by loading and a step."""
    output = run("""
        for ways in ("os.environ['PATH']", "os.environ.get('PATH')", "os.getenv('PATH')", "'PATH' in os.environ"):
            eval(compile(ways, package + "control.py", "eval"))
        assert len(reads) == 4, "the recorder misses a way to read the environment"
        reads.clear()
        import torch
        import dspark_model
        print("modules", sorted({name.split(".")[0] for name in sys.modules} & {"triton", "cutlass", "transformers"}))
        print("cuda", torch.cuda.is_initialized())
        import tempfile
        from drafting import make_worker, prefill, random_hidden
        from dspark_model.testing import random_lm_head, tiny_config, write_checkpoint
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(folder, tiny_config())
            model = dspark_model.MLADSparkForCausalLM.from_pretrained(folder, lm_head=random_lm_head(tiny_config()))
        worker = make_worker(model, dspark_model.RuntimeConfig())
        prefill(worker, [random_hidden(model, 3)], [1])
        print("later", sorted({name.split(".")[0] for name in sys.modules} & {"cutlass", "transformers"}))
        print("later cuda", torch.cuda.is_initialized())
        print("reads", reads)
    """)
    assert output.splitlines() == ["modules []", "cuda False", "later []", "later cuda False", "reads []"]


@pytest.mark.parametrize("folder", ["dspark_model", "kernels"])
def test_no_source_file_names_the_environment(folder):
    pattern = re.compile(r"\benviron\b|\bgetenv\b|\bputenv\b")
    files = sorted((ROOT / folder).rglob("*.py"))
    hits = [f"{path}:{number}" for path in files for number, line in enumerate(path.open(), 1) if pattern.search(line)]
    assert files or folder == "kernels"
    assert hits == []


def test_kernels_do_not_import_the_package():
    pattern = re.compile(r"^\s*(from|import)\s+dspark_model\b", re.MULTILINE)
    assert [path for path in (ROOT / "kernels").rglob("*.py") if pattern.search(path.read_text())] == []


def test_every_public_name_exists():
    assert len(set(dspark_model.__all__)) == len(dspark_model.__all__)
    for name in dspark_model.__all__:
        assert getattr(dspark_model, name) is not None
