"""Every wrong value that a user can give `PrecisionDebugger`: the answer names file, key, value and what is allowed.

The rows are those of the existing tool's table of bad values; what differs from it on purpose says so in the test's docstring.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from debug_model import Net, config

from msprobe_engine.core.errors import SettingsError
from msprobe_integrations.torch.dump.debugger import PrecisionDebugger

pytestmark = [pytest.mark.framework, pytest.mark.usefixtures("own_debugger")]

FUNCTION, MODULE = "Functional.linear.0.forward", "Module.a.Linear.forward.0"


def refused(path: Any, **arguments: Any) -> str:
    """The error of a construction; a right one works afterwards."""
    with pytest.raises(SettingsError) as caught:
        PrecisionDebugger(path, **arguments)
    assert PrecisionDebugger._instance is None
    return str(caught.value)


@pytest.mark.parametrize(("name", "content", "says"), [
    ("none.json", None, "none.json: the settings file cannot be read: No such file or directory"),
    ("c.txt", "{}", "a settings file ends in .yaml, .yml, .json; this one ends in '.txt'"),
    ("c.json", "{", "c.json: not valid JSON"),
    ("c.json", '{"level": "L0", "level": "L1"}', "the key 'level' appears twice"),
    ("c.json", "[]", "c.json: the file: [] (list) is not allowed; allowed: a mapping with the keys"),
])  # fmt: skip
def test_file(tmp_path: Path, name: str, content: str | None, says: str) -> None:
    """A file that is missing, of another kind or not valid is named with the reason."""
    if content is not None:
        (tmp_path / name).write_text(content)
    assert says in refused(tmp_path / name)


def test_path_of_the_file() -> None:
    """config_path is a path; a file that is none is named by its value."""
    assert "a file name or a mapping is expected, not 3 (integer)" in refused(3)


VALUES: list[tuple[str, Any, str]] = [
    ("task", "statistic", "'statistic' (string) is not allowed; allowed: one of 'statistics', 'tensor', 'structure', 'overflow_check'"),
    ("task", "statistic", "; did you mean 'statistics'?"),
    ("task", 3, "3 (integer) is not allowed"),
    ("task", "run_ut", "`msprobe acc_check -config` reads its section"),
    ("task", "acc_check", "task 'acc_check' of the existing tool is no task here"),
    ("task", "nan_check", "NaN and Inf are counted in every dump of task statistics"),
    ("task", "exception_dump", "TorchProbe writes an incident directory"),
    ("task", "diff_check", "use task 'tensor' with tensor.bench_path"),
    ("level", "L3", "'L3' (string) is not allowed; allowed: one of 'L0', 'L1', 'mix', 'L2', 'debug'"),
    ("level", 1, "1 (integer) is not allowed"),
    ("dump_path", 3, "3 (integer) is not allowed; allowed: a string"),
    *[
        (key, bad, f"{key}[0]: ") for key in ("rank", "step")
        for bad in ([-1], [1_000_001], [1.0], [True], ["3-1"], ["a-b"], ["-3"], ["1-2-3"], [None], [[1]])
    ],
    ("rank", -3, "rank[0]: -3"),
    ("step", "three", "'three' (string) is not allowed"),
    ("async_dump", "yes", "'yes' (string) is not allowed; allowed: true or false"),
    ("async_dump", 1, "1 (integer) is not allowed; allowed: true or false"),
    ("dump_enable", 1, "1 (integer) is not allowed; allowed: true or false"),
    ("extra_info", "no", "'no' (string) is not allowed; allowed: true or false"),
    ("precision", "mid", "'mid' (string) is not allowed; allowed: one of 'low', 'high'"),
    ("custom_op_namespaces", "ops", "'ops' (string) is not allowed; allowed: a list, each item a string"),
    ("custom_op_namespaces", [1], "custom_op_namespaces[0]: 1 (integer)"),
    ("enable_dataloader", "yes", "'yes' (string) is not allowed; allowed: true or false"),
    ("risk_level", "NONE", "'NONE' (string) is not allowed; allowed: one of 'CORE', 'FOCUS', 'ALL'"),
    ("risk_level", "focus", "did you mean 'FOCUS'?"),
    ("lst", [], "lst: unknown key here; 'list' belongs in the section 'statistics'"),
    ("scope", [], "scope: unknown key here; 'scope' belongs in the section 'statistics'"),
    ("tensor_format", "packed", "tensor_format: unknown key here; 'tensor_format' belongs in the section 'statistics'"),
    ("whatever", [], "whatever: unknown key; known here: task, dump_path"),
    ("levl", "L0", "levl: unknown key; did you mean 'level'?"),
    ("load", {"path": "/no/such", "modules": ["Module.a.Linear.forward.0"]}, "load.path: '/no/such' is no directory"),
    ("load", {"path": ".", "modules": []}, "load.modules: is empty"),
    ("load", {"path": ".", "modules": ["Module.a.Linear.backward.0"]}, "is no forward call of a module"),
    ("load", {"path": ".", "modules": [MODULE, MODULE]}, "is there 2 times; name it once"),
    ("load", {"modules": [MODULE]}, "load.path: is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "says"), VALUES)
def test_common_keys(tmp_path: Path, key: str, value: Any, says: str) -> None:
    """Keys at the top of the file. ``"3"`` as a step is a range of one here, as in 26.2.0."""
    path = config(tmp_path, **{"level": "L0", key: value})
    message = refused(path)
    assert says in message
    assert message.startswith(f"{path}: {key}")


LISTS = ("scope", "list", "tensor_list", "data_mode")
OPTIONS: list[tuple[str, Any, str]] = [
    *[(key, bad, "is not allowed; allowed: a list, each item") for key in LISTS for bad in ("x", 3, {})],
    *[(key, [3], f"{key}[0]: 3 (integer) is not allowed") for key in LISTS],
    ("data_mode", ["all", "input"], "'all' stands alone"),
    ("data_mode", ["inputs"], "'inputs' (string) is not allowed; allowed: a list, each item one of 'all', 'input', 'output'"),
    ("data_mode", ["inputs"], "; did you mean 'input'?"),
    ("data_mode", ["input", "output", "forward", "backward", "all"], "'all' stands alone"),
    ("summary_mode", "md4", "'md4' (string) is not allowed; allowed: one of 'statistics', 'md5', 'xor', 'digest'; did you mean 'md5'?"),
    ("summary_mode", ["maximum"], "summary_mode: ['maximum'] (list) is not allowed; allowed: one of"),
    ("slice", {"dim": 0}, "slice: {'dim': 0} (mapping) is not allowed; allowed: a list"),
    ("slice", [3], "slice[0]: 3 (integer) is not allowed"),
    ("slice", [{"dim": "0"}], "slice[0].dim: '0' (string) is not allowed; allowed: an integer >= 0"),
    ("slice", [{"dim": -1}], "slice[0].dim: -1 (integer) is not allowed; allowed: an integer >= 0"),
    ("slice", [{"size": -2}], "slice[0].size: -2 (integer) is not allowed"),
    ("slice", [{"dim": 0, "start": 1}], "slice[0].start: unknown key"),
    ("request_id", 3, "request_id: 3 (integer) is not allowed; allowed: a string"),
    ("precision", 3, "statistics.precision: 3 (integer) is not allowed; allowed: one of 'low', 'high'"),
    ("device", "gpu", "statistics.device: 'gpu' (string) is not allowed; allowed: one of 'host', 'device'"),
    ("scop", [], "statistics.scop: unknown key; did you mean 'scope'?"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "says"), OPTIONS)
def test_options_of_a_task(tmp_path: Path, key: str, value: Any, says: str) -> None:
    """Keys of the task's section."""
    path = config(tmp_path, "L0", section={key: value})
    message = refused(path)
    assert says in message
    assert message.startswith(f"{path}: ")


SCOPES: list[tuple[str, list[str], str]] = [
    ("L0", [MODULE], "allowed: [] or two names, the first and the last record"),
    ("L0", [MODULE] * 3, "allowed: [] or two names"),
    ("L0", [FUNCTION, FUNCTION], f"scope[0]: '{FUNCTION}' names a function, and level L0 records modules; allowed: modules like"),
    ("L1", [MODULE, MODULE], f"scope[0]: '{MODULE}' names a module, and level L1 records functions; allowed: functions like"),
    ("L0", [MODULE, FUNCTION], "scope[1]: "),
    ("L1", [FUNCTION, MODULE], "scope[1]: "),
    ("L1", ["Functional.linear.0", FUNCTION], "scope[0]: 'Functional.linear.0' is no full record name; allowed at level L1: functions"),
    ("L1", ["Functional.linear.0", FUNCTION], f"did you mean '{FUNCTION}'?"),
    ("L0", ["Module.a.Linear.0.forward", MODULE], f"did you mean '{MODULE}'?"),
    ("mix", ["linear", MODULE], "scope[0]: 'linear' is no full record name"),
    ("mix", ["", MODULE], "scope[0]: '' is no full record name"),
    ("mix", ["Module.a.Linear.parameters_grad.0", MODULE], "is no full record name"),
]  # fmt: skip


@pytest.mark.parametrize(("level", "scope", "says"), SCOPES)
def test_scope(tmp_path: Path, level: str, scope: list[str], says: str) -> None:
    """Names of a scope are full record names of a kind that the level records."""
    assert says in refused(config(tmp_path, level, section={"scope": scope}))


@pytest.mark.parametrize(("level", "scope"), [
    ("mix", [MODULE, FUNCTION]),
    ("L1", ["MindSpeed.swiglu.0.forward", "Triton.kernel.3.forward"]),
    ("L1", ["my.own.pkg.f.0.forward", "Distributed.all_reduce.0.forward"]),
    ("L0", ["Cell.a.Dense.forward.0", "Module.layers.0.Linear.backward.1"]),
])  # fmt: skip
def test_scope_that_works(tmp_path: Path, level: str, scope: list[str]) -> None:
    """Both kinds at level mix; every prefix, also those that the existing tool refuses."""
    assert PrecisionDebugger(config(tmp_path, level, section={"scope": scope})).dump.scope == tuple(scope)


@pytest.mark.parametrize(("keys", "says"), [
    ({"level": "L2", "task": "statistics"}, "'statistics' is not possible at level L2"),
    ({"level": "L2", "task": "tensor", "section": {"list": []}}, "level L2 needs exactly one full API name"),
    ({"level": "L2", "task": "tensor", "section": {"list": ["linear"]}}, "level L2 needs exactly one full API name"),
    ({"level": "L2", "task": "tensor", "section": {"list": [FUNCTION], "scope": [FUNCTION, FUNCTION]}}, "is not possible at level L2"),
    ({"level": "L0", "task": "tensor", "section": {"bench_path": "."}}, "'statistics' has no checksum to compare"),
    ({"level": "L0", "task": "tensor", "section": {"file_format": "txt"}}, "tensor.file_format: 'txt' (string) is not allowed"),
    ({"level": "L0", "task": "tensor", "section": {"bench_path": ".", "diff_nums": 0}}, "diff_nums: 0 is not allowed"),
    ({"level": "L1", "task": "tensor", "section": {"online_run_ut": True, "host": "h"}}, "tensor.port: -1 is not allowed"),
    ({"level": "L1", "task": "tensor", "section": {"online_run_ut": True, "port": 1}}, "tensor.host: is missing"),
    ({"level": "mix", "task": "tensor", "section": {"online_run_ut": True, "nfs_path": "."}}, "looks at calls of APIs; allowed: 'L1'"),
    ({"level": "L1", "task": "tensor", "section": {"online_run_ut": 1}}, "tensor.online_run_ut: 1 (integer) is not allowed"),
    ({"task": "tensor", "section": {"online_run_ut": True, "nfs_path": ".", "data_mode": ["input"]}}, "needs inputs and outputs"),
    ({"task": "tensor", "section": {"online_run_ut": True, "nfs_path": ".", "online_policy": "x"}}, "tensor.online_policy: 'x'"),
])  # fmt: skip
def test_keys_that_belong_together(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    """Combinations that cannot work say what is missing."""
    assert says in refused(config(tmp_path, **keys))


@pytest.mark.parametrize(("keys", "says"), [
    ({"task": "structure", "level": "L1"}, "'mix' is used instead of 'L1'"),
    ({"level": "L0", "enable_dataloader": True}, "enable_dataloader: True is accepted"),
    ({"level": "L0", "section": {"summary_mode": ["max", "l2norm"]}}, "['max', 'l2norm'] chooses numbers of MindSpore's static graphs"),
    ({"level": "L0", "task": "tensor", "section": {"file_format": "bin"}}, "file_format: 'bin' is accepted"),
    ({"level": "debug", "section": {"scope": [FUNCTION, "x"]}}, "scope: has no effect at level debug"),
    ({"level": "debug", "section": {"list": ["a"]}}, "list: has no effect at level debug"),
    ({"level": "debug", "section": {"tensor_list": ["a"]}}, "tensor_list: has no effect at level debug"),
    ({"level": "debug", "section": {"data_mode": ["input"]}}, "data_mode: has no effect at level debug"),
    ({"level": "debug", "section": {"slice": [{"dim": 0}]}}, "slice: has no effect at level debug"),
    ({"level": "debug", "section": {"request_id": "r"}}, "request_id: has no effect at level debug"),
])  # fmt: skip
def test_remarks(tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: dict[str, Any], says: str) -> None:
    """What is accepted without effect is said once."""
    PrecisionDebugger(config(tmp_path, **keys))
    assert capsys.readouterr().err.count(says) == 1


@pytest.mark.parametrize("keys", [
    {"precision": "high", "custom_op_namespaces": ["my_ops"]}, {"async_dump": True, "task": "tensor"},
    {"async_dump": True, "section": {"summary_mode": "md5"}}, {"rank": None, "step": None}, {"step": ["3", 1, "1-2"]},
    {"grad_probe": {}, "run_ut": {"white_list": []}},
])  # fmt: skip
def test_what_works_here(tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: dict[str, Any]) -> None:
    """Combinations that the existing tool refuses or that cost something there, and sections of other tasks."""
    dump = PrecisionDebugger(config(tmp_path, **{"level": "L0", **keys})).dump
    assert dump.step == ((1, 2, 3) if keys.get("step") else ())
    assert not capsys.readouterr().err


def test_several_mistakes(tmp_path: Path) -> None:
    """All mistakes of a file are in one error, one line each."""
    path = config(tmp_path, "L7", rank=[-1], lst=[], section={"data_mode": ["fwd"]})
    lines = refused(path).splitlines()
    assert len(lines) == 4
    assert all(line.startswith(f"{path}: ") for line in lines)


@pytest.mark.parametrize(("argument", "value", "says"), [
    ("task", "sum", "argument: task: 'sum'"), ("level", "L8", "argument: level: 'L8'"), ("step", ["5-"], "argument: step[0]: '5-'"),
    ("rank", [-1], "argument: rank[0]: -1"), ("dump_path", 3, "argument: dump_path: 3"), ("step", -3, "argument: step[0]: -3"),
])  # fmt: skip
def test_arguments(tmp_path: Path, argument: str, value: Any, says: str) -> None:
    """A wrong argument of the constructor is named as such."""
    assert says in refused(config(tmp_path), **{argument: value})


def test_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing given: task statistics, level L1, below the working directory. The existing tool needs a dump_path in a file that is given;
    here it has a default."""
    monkeypatch.chdir(tmp_path)
    debugger = PrecisionDebugger()
    assert (debugger.dump.task, debugger.dump.level) == ("statistics", "L1")
    assert str(debugger.run.files.root) == str(tmp_path / "msprobe_output/dump")
    PrecisionDebugger._instance = None
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"task": "statistics", "level": "L0"}))
    assert str(PrecisionDebugger(path).run.files.root) == str(tmp_path / "msprobe_output/dump")


def test_probe_yaml_without_dump(tmp_path: Path) -> None:
    """A probe.yaml without a dump section gives the debugger nothing to do."""
    path = tmp_path / "probe.yaml"
    path.write_text("monitor: {}\n")
    assert "probe.yaml: has no 'dump' section, so PrecisionDebugger has nothing to do" in refused(path)


def test_model_is_needed(tmp_path: Path) -> None:
    """start without a model at L0 and mix says how to give it; once it was given it is known."""
    for level in ("L0", "mix"):
        PrecisionDebugger._instance = None
        debugger = PrecisionDebugger(config(tmp_path, level))
        with pytest.raises(Exception, match=rf"start\(\) at level {level} needs the model: PrecisionDebugger\.start\(model\)"):
            debugger.start()
        debugger.start(Net())
        debugger.start()
