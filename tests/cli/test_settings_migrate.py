"""`msprobe settings migrate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from msprobe_engine.cli.main import main
from msprobe_engine.core.settings.load import read_settings

FILES: dict[str, dict[str, Any]] = {
    "of 8.1.1, statistics": {
        "task": "statistics", "dump_path": "/home/data_dump", "rank": [], "step": [], "level": "L1", "async_dump": False,
        "extra_info": True, "statistics": {"scope": [], "list": [], "tensor_list": [], "data_mode": ["all"], "summary_mode": "statistics"},
        "tensor": {"scope": [], "list": [], "data_mode": ["all"], "file_format": "npy"}, "run_ut": {"white_list": []},
    },
    "of 26.2.0, tensors of chosen ranks and steps": {
        "task": "tensor", "dump_path": "out", "rank": [0, "4-6"], "step": [0, 2, "10-19"], "level": "mix", "dump_enable": True,
        "risk_level": "FOCUS", "tensor": {"list": ["relu"], "slice": [{"dim": 1, "begin": -2}]},
        "load": {"path": ".", "modules": ["Module.fc.Linear.forward.0"], "step": [1]},
    },
    "only what differs from an earlier dump": {"task": "tensor", "tensor": {"bench_path": ".", "diff_nums": 3, "summary_mode": "md5"}},
    "online": {"task": "tensor", "tensor": {"online_run_ut": True, "host": "127.0.0.1", "port": 6000, "online_run_ut_recompute": True}},
    "free benchmark": {"task": "free_benchmark", "free_benchmark": {"fuzz_device": "cpu", "pert_mode": "to_cpu", "if_preheat": True}},
    "gradient probe": {"task": "grad_probe", "dump_path": "x", "grad_probe": {"grad_level": "L2", "param_list": ["a"], "bounds": [-2, 0]}},
    "monitor": {
        "targets": {"layers.0": {}, "0:head": {}}, "xy_distribution": True, "wg_distribution": True, "mv_distribution": True,
        "ur_distribution": True, "cc_distribution": {"enable": True, "cc_codeline": ["train.py"]}, "module_ranks": [0, 3],
        "step_interval": 5, "ops": ["min", "nans", "id"], "format": "tensorboard", "recording_l2_features": True,
        "l2_targets": {"attention_hook": ["attn"], "linear_hook": []}, "squash_name": True,
        "alert": {"rules": [{"rule_name": "AnomalyTurbulence", "args": {"threshold": 0.5}}, {"rule_name": "AnomalyNan"}], "dump": True},
    },
    "monitor, nothing switched on": {"targets": {}},
}  # fmt: skip


def ask(tmp_path: Path, tree: dict[str, Any], *flags: str) -> tuple[int, Path]:
    path = tmp_path / "given.json"
    path.write_text(json.dumps(tree))
    return main(["settings", "migrate", str(path), *flags]), path


@pytest.mark.parametrize("variable", ["", "MONITOR_OUTPUT_DIR", "DYNAMIC_MONITOR", "MSPROBE_LOG_LEVEL"])
@pytest.mark.parametrize("name", FILES)
def test_the_yaml_means_what_the_file_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, variable: str
) -> None:
    """`read_settings`, which every way in uses, makes equal settings of both, whatever the environment says."""
    if variable:
        monkeypatch.setenv(variable, {"MONITOR_OUTPUT_DIR": "elsewhere", "DYNAMIC_MONITOR": "True"}.get(variable, "2"))
    code, path = ask(tmp_path, FILES[name])
    tree = yaml.safe_load(capsys.readouterr().out)
    assert code == 0
    assert read_settings(tree, kind="probe") == (read_settings(path)[0], [])
    assert read_settings(tree, kind=None)[0] == read_settings(path)[0]


def test_ranges_stay_short_and_defaults_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A reader sees what was chosen, as it would be written by hand."""
    ask(tmp_path, {"task": "statistics", "level": "L1", "step": ["0-9999"], "rank": [0, 2, 3], "statistics": {"list": []}})
    assert yaml.safe_load(capsys.readouterr().out) == {"dump": {"step": ["0-9999"], "rank": [0, 2, 3]}}


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"task": "statistics", "enable_dataloader": True}, "enable_dataloader"),
        ({"task": "tensor", "tensor": {"file_format": "bin"}}, "tensor.file_format"),
        ({"targets": {}, "ndigits": 6}, "ndigits"),
    ],
)
def test_what_has_no_counterpart_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], tree: dict[str, Any], says: str) -> None:
    """The rest is written, and the exit code tells a script that it is not all."""
    code, path = ask(tmp_path, tree)
    out, err = capsys.readouterr()
    assert code == 3
    assert f"no counterpart: {path}: {says}: " in err
    assert read_settings(yaml.safe_load(out))[0] == read_settings(path)[0]


def test_sections_of_other_tasks_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They mean nothing to this run, and whoever changes the task later would miss them."""
    code, path = ask(tmp_path, {"task": "statistics", "tensor": {"list": ["a"]}, "run_ut": {"white_list": ["relu"]}, "structure": {}})
    err = capsys.readouterr().err
    assert code == 3  # a list that narrows nothing is a remark of `settings check`, too
    assert f"note: {path}: tensor: is the section of another task than 'statistics'" in err
    assert "run_ut: is the section of another task than 'statistics'; `msprobe acc_check -config` reads its section" in err
    assert "structure" not in err


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"output_dir": "x", "monitor": {}}, "has no keys of config.json or monitor_config.json"),
        ({"monitors": {"module": {}}}, "is a file of TrainerMonitorV2"),
        ({"task": "statistics", "lst": 1}, "lst: unknown key"),
    ],
)
def test_other_files_and_mistakes_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], tree: dict[str, Any], says: str) -> None:
    """Nothing is written for them."""
    code, _ = ask(tmp_path, tree)
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert says in err


def test_a_file_that_is_there_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """-o writes a new file; over one that is there only with --force, over its input never."""
    out = tmp_path / "probe.yaml"
    assert ask(tmp_path, {"task": "tensor"}, "-o", str(out))[0] == 0
    assert read_settings(out)[0] == read_settings({"task": "tensor"}, kind="dump")[0]
    assert ask(tmp_path, {"task": "structure"}, "-o", str(out))[0] == 2
    assert "is there already" in capsys.readouterr().err
    assert ask(tmp_path, {"task": "tensor"}, "-o", str(tmp_path / "given.json"), "--force")[0] == 2
    assert ask(tmp_path, {"task": "overflow_check"}, "-o", str(out), "--force")[0] == 0
    assert "task: overflow_check" in out.read_text()
