"""Settings around a dump: replay of inputs, comparison while dumping, device kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.settings.dump_rules import kernel_api
from msprobe_engine.core.settings.load import load_settings

CALL = "Module.layers.0.mlp.MLP.forward.0"


def mistakes(**keys: Any) -> str:
    """The message about a ``config.json`` with these keys."""
    with pytest.raises(SettingsError) as raised:
        load_settings(keys, kind="dump")
    return str(raised.value)


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        ([], "load.modules: is empty"),
        (None, "load.modules"),
        ("Module.a.B.forward.0", "load.modules"),
        ([CALL, 3], "load.modules[1]"),
        (["Functional.linear.0.forward"], "load.modules[0]: 'Functional.linear.0.forward' is no forward call of a module"),
        (["Module.a.B.backward.0"], "load.modules[0]: 'Module.a.B.backward.0' is no forward call of a module"),
        (["Module.a.B"], "is no forward call of a module; allowed: names like"),
        (["Cell.a.B.forward.0"], "is no forward call"),
        ([CALL, CALL], f"'{CALL}' is there 2 times"),
    ],
)
def test_load_names(tmp_path: Path, modules: Any, said: str) -> None:
    """Only forward calls of modules can be replayed, each named once."""
    assert said in mistakes(load={"path": str(tmp_path), "modules": modules})


@pytest.mark.parametrize(
    ("path", "said"),
    [("", "load.path: is missing"), ("/no/such/place", "is no directory"), (__file__, "is no directory"), (3, "load.path")],
)
def test_load_path(path: Any, said: str) -> None:
    """The earlier dump must be there, and a file is none."""
    assert said in mistakes(load={"path": path, "modules": [CALL]})


def test_load_steps_and_switch(tmp_path: Path) -> None:
    """Steps and ranks are lists with ranges; the switch is a bool; unknown keys are mistakes."""
    good = {"path": str(tmp_path), "modules": [CALL]}
    load = load_settings({"load": {**good, "step": [1, "3-4"], "rank": ["0-1"], "dump_after_load": True}}, kind="dump").dump.load  # type: ignore[union-attr]
    assert load is not None
    assert (load.step, load.rank, load.dump_after_load) == ((1, 3, 4), (0, 1), True)
    said = mistakes(load={**good, "step": -1, "dump_after_load": 1, "module": []})
    assert all(part in said for part in ("load.step", "load.dump_after_load", "did you mean 'modules'"))


def bench(tmp_path: Path, **keys: Any) -> dict[str, Any]:
    """A ``config.json`` that compares while dumping."""
    return {"task": "tensor", "tensor": {"bench_path": str(tmp_path), "summary_mode": "md5", **keys}}


def test_bench_path(tmp_path: Path) -> None:
    """The benchmark is a directory, and the summary mode one with a checksum."""
    dump = load_settings(bench(tmp_path, diff_nums=-1), kind="dump").dump
    assert dump is not None
    assert (dump.bench_path, dump.diff_nums) == (str(tmp_path), -1)
    assert "is no directory" in mistakes(**bench(tmp_path / "nothing"))
    assert "'statistics' has no checksum" in mistakes(**bench(tmp_path, summary_mode="statistics"))
    assert "bench_path" in mistakes(**bench(tmp_path, bench_path=3))


@pytest.mark.parametrize("number", [0, -2, 1.5, True, "1"])
def test_diff_nums(tmp_path: Path, number: Any) -> None:
    """-1 or a positive integer."""
    assert "diff_nums" in mistakes(**bench(tmp_path, diff_nums=number))


def test_diff_check_says_how(tmp_path: Path) -> None:
    """The task of the existing tool that never compared says how to get the comparison."""
    said = mistakes(task="diff_check", dump_path=str(tmp_path))
    assert "bench_path" in said
    assert "task 'tensor'" in said


def kernels(*names: str, **keys: Any) -> dict[str, Any]:
    """A ``config.json`` for device kernels."""
    return {"task": "tensor", "level": "L2", "tensor": {"list": list(names), **keys}}


def test_kernel_level() -> None:
    """Level L2 takes tasks statistics and tensor, and no scope; PyTorch task tensor and a list of exactly one full API name."""
    name = "Functional.linear.0.backward"
    dump = load_settings(kernels(name), kind="dump").dump
    assert dump is not None
    assert kernel_api(dump) == name
    for names in ((), (name, name + "x"), ("linear",), (CALL,)):
        other = load_settings(kernels(*names), kind="dump").dump
        assert other is not None
        with pytest.raises(SettingsError, match="needs exactly one full API name"):
            kernel_api(other)
    with pytest.raises(SettingsError, match="'statistics' is not possible at level L2"):
        kernel_api(replace(dump, task="statistics"))
    assert "'structure' is not possible at level L2" in mistakes(level="L2", task="structure")
    assert "scope: is not possible at level L2" in mistakes(**kernels(name, scope=[name, name]))
