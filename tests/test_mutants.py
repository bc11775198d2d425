"""Each mutant of the package makes its named test fail, and without a mutant these tests pass."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from mutants import MUTANTS, Mutant

ROOT = Path(__file__).parent.parent
PLAIN = "without a mutant"
DRIVERS = 12 if torch.cuda.is_available() else 2  # processes that work on the jobs
PLAIN_JOBS = DRIVERS // 2  # so that none takes much longer than the others


def runs_here(mutant: Mutant) -> bool:
    """On a GPU only those that need one: there the others' tests run compiled kernels and have other ids."""
    if mutant.needs == "gpu" or torch.cuda.is_available():
        return mutant.needs == "gpu" and torch.cuda.is_available()
    return mutant.needs is None or importlib.util.find_spec(mutant.needs) is not None


CHOSEN = [mutant for mutant in MUTANTS if runs_here(mutant)]
# Imports what is slow once, then gives each job a process of its own; one of one test is ended if it waits for ever.  Jobs are
# [name, folder, tests], results name: status.
DRIVER = """
import json, os, signal, sys
import hypothesis, pytest, safetensors.torch, torch, triton
from huggingface_hub import snapshot_download

torch.testing.assert_close(torch.ones(1), torch.ones(1))  # brings in what torch imports late
results = {}
for name, folder, tests in json.load(sys.stdin):
    child = os.fork()
    if child == 0:
        signal.alarm(0 if len(tests) > 1 else 300)
        os.dup2(2, 1)
        os.chdir(folder)
        sys.path[:0] = [folder]
        os._exit(pytest.main(["-q", "-x", "--tb=no", "-p", "no:cacheprovider", *tests]))
    results[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
json.dump(results, sys.stdout)
"""


def copy_package(folder: Path) -> Path:
    """The packages and their tests, to be broken; compiled files go along, so that only what changes is compiled again."""
    for name in ("dspark_model", "kernels", "scripts", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("golden", "drafters"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def link_package(folder: Path, copied: Path) -> Path:
    """The same by links to a copy's files."""
    return Path(shutil.copytree(copied, folder, copy_function=os.link, dirs_exist_ok=True))


def break_package(folder: Path, mutant: Mutant) -> None:
    file = folder / mutant.file
    text = file.read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1, f"{mutant.file} has {text.count(mutant.old)} times: {mutant.old}"
    file.unlink()  # the link: others have the same file
    file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")


@pytest.fixture(scope="module")
def statuses(tmp_path_factory) -> dict[str, int]:
    """pytest's exit status of each mutant's test, and of one of each file on an unchanged copy: the suite itself runs all."""
    plain = copy_package(tmp_path_factory.mktemp("plain"))
    one_of_each = sorted({mutant.test.split("::")[0]: f"tests/{mutant.test}" for mutant in CHOSEN}.values())
    jobs = [[f"{PLAIN} {i}", str(plain), one_of_each[i::PLAIN_JOBS]] for i in range(PLAIN_JOBS)]
    for mutant in CHOSEN:
        folder = link_package(tmp_path_factory.mktemp(mutant.name), plain)
        break_package(folder, mutant)
        jobs.append([mutant.name, str(folder), [f"tests/{mutant.test}"]])
    settings = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths_of_others()}
    command, environment = [sys.executable, "-c", DRIVER], os.environ | settings
    with ThreadPoolExecutor(DRIVERS) as threads:  # each waits for a process of its own
        runs = threads.map(
            lambda part: run_driver(command, folder, environment, part), [jobs[i::DRIVERS] for i in range(DRIVERS)]
        )
        return {name: status for results in runs for name, status in results.items()}


def paths_of_others() -> str:
    """PYTHONPATH without this checkout, whose modules a copy has to stand for."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(path for path in paths if path and not Path(path).resolve().is_relative_to(ROOT))


def run_driver(command: list[str], folder: Path, environment: dict[str, str], jobs: list) -> dict[str, int]:
    result = subprocess.run(command, cwd=folder, env=environment, input=json.dumps(jobs), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_the_named_tests_pass_without_a_mutant(statuses):
    assert [statuses[f"{PLAIN} {i}"] for i in range(PLAIN_JOBS)] == [0] * PLAIN_JOBS


@pytest.mark.parametrize("mutant", CHOSEN, ids=lambda mutant: mutant.name)
def test_mutant_is_noticed(statuses, mutant):
    # 1: a test failed.  A broken import or an unknown test gives another status.
    assert statuses[mutant.name] == pytest.ExitCode.TESTS_FAILED
