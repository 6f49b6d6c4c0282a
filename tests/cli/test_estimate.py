"""`msprobe estimate`, the command; the numbers are tested with `dump`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.cli.main import main

FIXTURES = Path(__file__).parent.parent / "fixtures"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dump of one step of two ranks, level mix: 20 records with one tensor of 4 MB each."""
    monkeypatch.chdir(tmp_path)
    tensor = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [1000, 1000], "Min": -1.5, "Mean": 0.1, "Norm": 12.25}
    head = {"task": "statistics", "level": "mix", "framework": "pytorch", "dump_data_dir": None, "nonfinite_counts": True}
    for rank in range(2):
        here = tmp_path / "small" / "step0" / f"rank{rank}"
        here.mkdir(parents=True)
        data = {f"Functional.linear.{i}.forward": {"output": [tensor | {"Max": 1.0 + i}]} for i in range(20)}
        (here / "dump.json").write_text(json.dumps(head | {"data": data}, indent=1))
        (here / "stack.json").write_text(json.dumps({"0": [list(data), ["File net.py, line 3, in forward, \n y = f(x)"]]}, indent=1))
        (here / "construct.json").write_text(json.dumps(dict.fromkeys(data), indent=1))
    return tmp_path / "small"


def test_a_table_is_printed(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Records, sizes of files, totals, free space, the verdict and what was assumed are printed; exit code 0."""
    assert main(["estimate", str(source), "--task", "tensor", "--steps", "3"]) == 0
    out = capsys.readouterr().out
    lines = {line[:26].strip(): line[26:].strip() for line in out.splitlines() if line.startswith("  ")}
    assert lines["records"] == lines["tensors"] == "20"
    assert lines["tensor files"] == "80.0 MB for 20 tensors"
    assert lines["on disk"] == "480.3 MB in 138 files"
    assert lines["stack.json"].endswith(" B")
    assert lines["a step gets longer by"].endswith("ms")
    assert lines["free"].endswith(f"on {source.parent}")
    assert "\nfits\n" in out
    assert "3 steps, 2 ranks, all files" in out
    assert "disk speed assumed" in out


def test_it_does_not_fit(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1, the reason, and settings under which it would fit."""
    assert main(["estimate", str(source), "--task", "tensor", "--steps", "3", "--max-disk-gb", "0.1"]) == 1
    out = capsys.readouterr().out
    assert "DOES NOT FIT" in out
    assert "take up to 240.1 MB, max_disk_gb allows 100.0 MB" in out
    assert "this would fit" in out
    assert "  dump 1 of the 3 steps" in out
    assert "  task: statistics" in out


def test_json_for_scripts(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints the same as data; the exit code is the same."""
    assert main(["estimate", str(source), "--json", "--ranks", "8"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["one_step_of_one_rank"]["records"] == 20
    assert set(made["one_step_of_one_rank"]["json_bytes"]) == {"dump.json", "stack.json", "construct.json"}
    assert made["total"]["files"] == 24
    assert (made["steps"], made["ranks"], made["fits"], made["problems"]) == (1, 8, True, [])
    assert made["disk"]["free_bytes"] > 0
    assert main(["estimate", str(source), "--json", "--task", "tensor", "--max-disk-gb", "0.01"]) == 1
    made = json.loads(capsys.readouterr().out)
    assert not made["fits"]
    assert {"settings": "task: statistics"}.items() <= made["changes"][0].items()


def test_settings_files_and_flags(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A config.json or probe.yaml says what is dumped; flags override it."""
    Path("config.json").write_text(
        json.dumps({"task": "tensor", "level": "L1", "dump_path": "out", "rank": [], "step": ["0-9"], "tensor": {"list": ["linear.1"]}})
    )
    Path("probe.yaml").write_text("dump: {task: tensor, level: L1, step: ['0-9'], list: [linear.1], tensor_format: packed}\n")
    for file, files in (("config.json", 20 * (3 + 11)), ("probe.yaml", 20 * (3 + 2))):
        assert main(["estimate", str(source), "--config", file, "--json"]) == 0
        made = json.loads(capsys.readouterr().out)
        assert (made["steps"], made["ranks"], made["total"]["files"]) == (10, 2, files)
        assert made["settings"]["list"] == ["linear.1"]
    flags = ["--task", "statistics", "--list", "linear.3.", "--steps", "1", "--level", "mix", "--data-mode", "forward"]
    assert main(["estimate", str(source), "-c", "config.json", "--json", *flags]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["one_step_of_one_rank"]["records"], made["total"]["files"]) == (1, 6)


def test_the_disk_is_measured(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--measure-disk uses the directory the dump will go to and leaves nothing; --disk-speed is taken at its word."""
    assert main(["estimate", str(source), "--dump-path", str(source.parent / "a" / "b"), "--measure-disk", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["disk"]["measured"]
    assert os.listdir(source.parent) == ["small"]
    assert main(["estimate", str(source), "--disk-speed", "1", "--task", "tensor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["write_seconds_per_step"][1] > 160


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "no such file or directory"),
        (["small", "--level", "L3"], "'L3'"),
        (["small", "--task", "tensors"], "'tensors'"),
        (["small", "--steps", "0"], "steps is 0"),
        (["small", "--disk-speed", "-1"], "disk_speed"),
        (["small", "--from-step", "7"], "step 7 was not dumped"),
        (["small", "--level", "debug"], "give a dump of level debug"),
        (["small", "--config", "absent.json"], "absent.json"),
        (["small", "--list", "re:("], "re:("),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(
    source: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """Every mistake is answered with one clean message that names it."""
    assert source.is_dir()
    assert main(["estimate", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("msprobe estimate: ")
    assert message in err
    assert "Traceback" not in err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    """--help shows examples and the exit codes."""
    with pytest.raises(SystemExit):
        main(["estimate", "--help"])
    out = capsys.readouterr().out
    assert "msprobe estimate out/dump --task tensor --level mix --steps 10 --ranks 8" in out
    assert "exit codes: 0 fits, 1 does not fit, 2 wrong usage" in out


def test_names_with_line_breaks_and_escapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a file or a path holds cannot write to the terminal."""
    here = tmp_path / "a\x1b[31m\nb" / "step0" / "rank0"
    here.mkdir(parents=True)
    tensor: dict[str, Any] = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "Max": 1.0}
    (here / "dump.json").write_text(json.dumps({"level": "L1", "data": {"Torch.f\x1b[0m\n.0.forward": {"output": [tensor]}}}))
    assert main(["estimate", str(tmp_path / "a\x1b[31m\nb")]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_a_dump_of_the_existing_tool(capsys: pytest.CaptureFixture[str]) -> None:
    """The source may be a dump of the existing tool; that more will be recorded is said."""
    assert main(["estimate", str(FIXTURES / "26.2.0" / "mix"), "--task", "tensor"]) == 0
    assert "which records fewer functions at levels L1 and mix: expect more" in capsys.readouterr().out
