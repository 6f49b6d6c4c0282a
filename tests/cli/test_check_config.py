"""`msprobe check-config`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from msprobe_engine.cli.main import main
from msprobe_engine.core.settings import load_settings


def test_it_prints_a_tree_that_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The printed tree, YAML or JSON, is a settings file with the same meaning."""
    path = tmp_path / "config.json"
    path.write_text('{"task": "tensor", "dump_path": "x", "step": ["1-3"], "tensor": {"list": ["relu"]}}')
    assert main(["check-config", str(path)]) == 0
    assert load_settings(yaml.safe_load(capsys.readouterr().out)) == load_settings(path)
    assert main(["check-config", "--json", str(path)]) == 0
    assert load_settings(json.loads(capsys.readouterr().out)) == load_settings(path)


def test_mistakes_go_to_stderr_with_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All mistakes of a file are printed, one per line, and the exit code is 2."""
    path = tmp_path / "probe.yaml"
    path.write_text("monitor: {intervall: 1}\nstrict: maybe\n")
    assert main(["check-config", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{path}: monitor.intervall: unknown key; did you mean 'interval'?" in err
    assert f"\n{path}: strict: 'maybe' (string) is not allowed; allowed: true or false\n" in err


def test_the_environment_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a path the file named by MSPROBE_CONFIG is checked."""
    (tmp_path / "p.yaml").write_text("output_dir: here")
    monkeypatch.setenv("MSPROBE_CONFIG", str(tmp_path / "p.yaml"))
    assert main(["check-config"]) == 0
    assert "output_dir: here" in capsys.readouterr().out


def test_remarks_are_shown_whatever_the_log_level(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A key without effect is named on stderr each time, and the file is still right."""
    path = tmp_path / "config.json"
    path.write_text('{"task": "statistics", "enable_dataloader": true}')
    for _ in range(2):
        assert main(["check-config", str(path)]) == 0
        assert capsys.readouterr().err.startswith(f"remark: {path}: enable_dataloader: True is accepted")


def test_arguments_of_rules_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt argument of a rule, which would end a launch, is a mistake here too; every rule that is wrong has its line."""
    path = tmp_path / "probe.yaml"
    path.write_text("rules: [{rule: turbulence, args: {thresold: 3}}, {rule: condition, args: {name: x, when: 'foo(1)'}}, {rule: nan_inf}]")
    assert main(["check-config", str(path)]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "has no argument 'thresold'; did you mean 'threshold'?" in first
    assert second.startswith(f"{path}: rules: condition 'x', when, column 1: there is no function 'foo'")
