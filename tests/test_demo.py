"""The demo, end to end: SmolLM2-135M-Instruct with a drafter from disk, through the script that users run."""

import dataclasses
import importlib.util
from pathlib import Path

import pytest

from dspark_model import ConfigError, demo, load_config, shipped
from dspark_model.demo import load_demo, print_report, run_demo
from dspark_model.generation import compare_greedy

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "smollm2.toml"


def script_main(monkeypatch, *arguments) -> int:
    spec = importlib.util.spec_from_file_location("run_demo", ROOT / "scripts" / "run_demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr("sys.argv", ["run_demo.py", "--config", str(CONFIG), *map(str, arguments)])
    return module.main()


@pytest.fixture(scope="module")
def smollm2() -> demo.Demo:
    """The real target with the shipped drafter; loaded once, since reading the GGUF file takes half a minute."""
    return load_demo(CONFIG)


@pytest.mark.smollm2
def test_smollm2_with_the_shipped_drafter_equals_plain_greedy(smollm2, capsys):
    assert smollm2.drafter == shipped.shipped_folder(shipped.SMOLLM2)
    results = run_demo(smollm2, ["What is the capital of France?", "Count to five."], max_new_tokens=10)
    assert print_report(results) == 0
    printed = capsys.readouterr().out
    assert "Paris" in printed
    assert "2 texts equal, 0 differ from a tie on, 0 wrong" in printed
    assert all(line in printed for line in ("committed per target pass", "accepted draft", "decode time"))


@pytest.mark.smollm2
def test_a_wrong_text_gives_exit_status_1(smollm2):
    (result,) = run_demo(smollm2, ["Count to five."], max_new_tokens=6)
    assert print_report([result]) == 0
    result.drafted.tokens[2] += 1
    comparison = compare_greedy(result.plain, result.drafted)
    assert print_report([dataclasses.replace(result, comparison=comparison)]) == 1


def test_bad_arguments_are_refused_with_a_reason(monkeypatch, capsys):
    assert script_main(monkeypatch, "--set", "runtime.nothing=1") == 2
    assert "unknown key runtime.nothing" in capsys.readouterr().err
    assert script_main(monkeypatch, "--gguf", "no/such/file.gguf") == 2
    assert "no/such/file.gguf does not exist" in capsys.readouterr().err


def test_a_missing_shipped_drafter_is_named():
    with pytest.raises(FileNotFoundError, match="ships no drafter 'other'"):
        shipped.shipped_drafter("other")


def test_a_preset_without_a_local_drafter_is_refused():
    kimi = load_config(ROOT / "configs" / "kimi_k3_dspark.toml")
    with pytest.raises(ConfigError, match="needs a preset with checkpoint.path"):
        demo._preset_drafter(kimi)


def test_a_drafter_named_by_the_preset_is_used_even_if_it_is_not_there(tmp_path):
    preset = load_config(CONFIG, [f'checkpoint.path="{tmp_path}"'])
    assert demo._preset_drafter(preset) == tmp_path


def test_the_preset_points_at_the_shipped_drafter_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config(CONFIG).checkpoint.path == str(shipped.shipped_folder(shipped.SMOLLM2))
