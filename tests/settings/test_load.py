"""From file, mapping or environment to settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.core import log
from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.settings.load import load_settings, read_settings, recognise
from msprobe_engine.core.settings.schema import CsvSettings, DumpSettings, MonitorSettings, ProbeSettings


@pytest.mark.parametrize("name", ["probe.yaml", "probe.yml", "probe.json", "PROBE.JSON"])
def test_a_file_is_read_by_its_suffix(tmp_path: Path, name: str) -> None:
    """YAML and JSON files with the same content give the same settings; a relative output directory stays relative."""
    path = tmp_path / name
    path.write_text(json.dumps({"output_dir": "out/a", "monitor": {"interval": 3}}))
    assert load_settings(path) == load_settings(str(path)) == ProbeSettings(output_dir="out/a", monitor=MonitorSettings(interval=3))


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    """An empty YAML file is a tree with every value at its default."""
    (tmp_path / "probe.yaml").write_text("# nothing\n")
    assert load_settings(tmp_path / "probe.yaml") == ProbeSettings()


@pytest.mark.parametrize(
    ("tree", "kind"),
    [
        ({"monitor": {}, "output_dir": "x"}, "probe"),
        ({"task": "statistics", "dump_path": "x"}, "dump"),
        ({"statistics": {}}, "dump"),
        ({"targets": {}, "ops": []}, "monitor"),
        ({"wg_distrbution": True}, "monitor"),
        ({"dump_pth": "x"}, "dump"),
        ({"moniter": {}}, "probe"),
        ({}, "probe"),
        ([1], "probe"),
    ],
)
def test_the_kind_of_a_file_is_recognised_by_its_keys(tree: Any, kind: str) -> None:
    """Exact keys decide; where there is none, the nearest names do, so that the error speaks of the right file."""
    assert recognise(tree) == kind


def test_the_kind_can_be_given() -> None:
    """A given kind overrides recognition, and an unknown one is refused."""
    with pytest.raises(SettingsError, match="task: unknown key"):
        load_settings({"task": "tensor"}, kind="probe")
    with pytest.raises(SettingsError, match="allowed: probe, dump, monitor"):
        load_settings({}, kind="other")


def test_arguments_override_the_dump_section() -> None:
    """Constructor arguments win over the file, are checked like it, and make a dump section where there is none."""
    settings = load_settings({"task": "tensor", "dump_path": "a", "step": [1]}, task="statistics", dump_path="b", level="mix", step=["2-3"])
    assert settings.dump == DumpSettings(task="statistics", dump_path="b", level="mix", step=(2, 3))
    assert load_settings({"monitor": {}}, rank=[1]) == ProbeSettings(monitor=MonitorSettings(), dump=DumpSettings(rank=(1,)))
    assert load_settings(dump_path="c") == ProbeSettings(dump=DumpSettings(dump_path="c"))
    with pytest.raises(SettingsError, match="argument: level: 'L9'"):
        load_settings({"task": "tensor"}, level="L9")
    with pytest.raises(SettingsError, match="task 'run_ut' of the existing tool is no task here"):
        load_settings({}, task="run_ut")


def test_the_environment_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a file, MSPROBE_CONFIG names it; with neither the error says what to do."""
    with pytest.raises(SettingsError, match="MSPROBE_CONFIG"):
        load_settings()
    path = tmp_path / "p.yaml"
    path.write_text("strict: true")
    monkeypatch.setenv("MSPROBE_CONFIG", str(path))
    assert load_settings().strict
    assert not load_settings({}).strict


def test_the_environment_sets_level_and_csv_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """MSPROBE_LOG_LEVEL wins over the file; MONITOR_OUTPUT_DIR fills an empty CSV directory only."""
    monkeypatch.setenv("MSPROBE_LOG_LEVEL", "4")
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", "/m")
    settings = load_settings({"log_level": "debug"})
    assert (settings.log_level, settings.sinks.csv) == ("silent", CsvSettings(path="/m"))
    assert load_settings({"sinks": {"csv": {"path": "/x"}}}).sinks.csv.path == "/x"
    monkeypatch.setenv("MSPROBE_LOG_LEVEL", "loud")
    assert load_settings({}).log_level == "info"


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"dump": {"scope": ["a"]}}, "settings: dump.scope: ['a'] is not allowed; allowed: [] or two names"),
        ({"task": "tensor", "tensor": {"scope": ["a"]}}, "settings: scope: ['a'] is not allowed"),
        ({"dump": {"data_mode": ["all", "input"]}}, "'all' stands alone"),
        ({"sinks": {"prometheus": {"enabled": True, "mode": "push"}}}, "sinks.prometheus.push_url: is empty"),
        ({"sinks": {"prometheus": {"enabled": True, "mode": "textfile"}}}, "sinks.prometheus.textfile_dir: is empty"),
        ({"sinks": {"prometheus": {"tls_key": "k"}}}, "belong together"),
    ],
)
def test_keys_that_cannot_go_together_are_mistakes(tree: Any, says: str) -> None:
    """Rules between keys are reported like mistakes in single keys."""
    with pytest.raises(SettingsError) as caught:
        load_settings(tree)
    assert says in str(caught.value)


def test_task_structure_needs_modules() -> None:
    """Task 'structure' at level L1 or debug becomes level mix, with a remark; an empty data_mode means all."""
    for level in ({}, {"level": "debug"}):
        settings, warnings = read_settings({"dump": {"task": "structure", "data_mode": [], **level}})
        assert settings.dump == DumpSettings(task="structure", level="mix")
        assert len(warnings) == 1
        assert "dump.level" in warnings[0]


def test_remarks_are_logged_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A remark about an accepted key without effect is written once per process, to stderr."""
    log.forget_warnings()
    for _ in range(2):
        load_settings({"task": "statistics", "enable_dataloader": True})
    assert capsys.readouterr().err.count("enable_dataloader: True is accepted") == 1


def test_the_console_takes_its_level_from_the_settings() -> None:
    """Loading sets the level of the logger; reading alone does not."""
    load_settings({"log_level": "error"})
    assert log.get_logger().level == log.LEVELS["error"]
    read_settings({"log_level": "debug"})
    assert log.get_logger().level == log.LEVELS["error"]
