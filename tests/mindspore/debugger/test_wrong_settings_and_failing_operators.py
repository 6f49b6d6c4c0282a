"""Wrong settings and calls, and operators of the training that fail while a dump is taken."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mindspore
import pytest
from mindspore import nn
from ms_programs import run
from small_cells import Job, Net, config, names, train, x

from msprobe.mindspore import MsprobeStep, PrecisionDebugger, module_dump
from msprobe_engine.core.errors import NothingCapturedError, SettingsError, UsageError

CELL, FUNCTION = "Cell.a.Dense.forward.0", "Mint.add.0.forward"


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"task": "statistic"}, "task: 'statistic' (string) is not allowed"),
        ({"task": "statistic"}, "did you mean 'statistics'?"),
        ({"level": "L3"}, "level: 'L3' (string) is not allowed; allowed: one of 'L0', 'L1', 'mix', 'L2', 'debug'"),
        ({"levl": "L0"}, "levl: unknown key; did you mean 'level'?"),
        ({"lst": []}, "lst: unknown key here; 'list' belongs in the section 'statistics'"),
        ({"step": [-1]}, "step[0]: -1"),
        ({"rank": "x"}, "rank[0]: 'x' (string) is not allowed"),
        ({"dump_path": 3}, "dump_path: 3 (integer) is not allowed; allowed: a string"),
        ({"section": {"data_mode": ["forwards"]}}, "data_mode[0]: 'forwards' (string) is not allowed"),
        ({"section": {"summary_mode": "md4"}}, "did you mean 'md5'?"),
        ({"section": {"scop": []}}, "statistics.scop: unknown key; did you mean 'scope'?"),
        ({"section": {"scope": [CELL]}}, "allowed: [] or two names, the first and the last record"),
        ({"section": {"scope": [FUNCTION, FUNCTION]}}, "names a function, and level L0 records modules"),
        ({"level": "L1", "section": {"scope": [CELL, CELL]}}, "names a module, and level L1 records functions"),
        ({"section": {"slice": [{"dim": 0}]}}, "'slice' works with PyTorch only"),
        ({"section": {"request_id": "r"}}, "'request_id' works with PyTorch only"),
        ({"perturb": "ulp"}, "'perturb' works with PyTorch only"),
    ],
)
def test_settings(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    """A wrong value is refused at construction with its file and key; a right file works afterwards."""
    path = config(tmp_path, **keys)
    with pytest.raises(SettingsError) as caught:
        PrecisionDebugger(path)
    assert says in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    assert PrecisionDebugger._instance is None
    assert PrecisionDebugger(config(tmp_path, level="L0")).dump.level == "L0"


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    """A dump_path below a file is said before the training begins, which goes on without the dump."""
    (tmp_path / "file").write_text("")
    debugger = PrecisionDebugger(config(tmp_path, dump_path=str(tmp_path / "file/dump")))
    assert "file/dump' cannot be used" in debugger.faults.disabled["dump"]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda d: d.start(), "start() at level L0 needs the model: PrecisionDebugger.start(model)"),
        (lambda d: d.start(3), "model is a int; allowed: mindspore.nn.Cell or a list of them"),
        (lambda d: d.start([]), "model is an empty list; allowed: mindspore.nn.Cell or a list of them"),
        (lambda d: d.start([Net(), None]), "model is a NoneType"),
        (lambda d: d.start(Net(), token_range=[3, 1]), "token_range is [3, 1]; allowed: [first, last]"),
        (lambda d: d.start(Net(), rank_id=-1), "rank_id is -1; allowed: an int >= 0"),
        (lambda d: d.set_init_step(-1), "set_init_step: step is -1; allowed: an int >= 0"),
        (lambda d: d.register_custom_api(mindspore.ops, "no_such"), "mindspore.ops has no attribute 'no_such'"),
        (lambda d: d.register_custom_api(mindspore.ops, 3), "api is 3; allowed: the name of a function of the module"),
        (lambda _: module_dump(3, "n"), "module_dump: module is a int; allowed: mindspore.nn.Cell"),
        (lambda _: module_dump(Net(), ""), "module_dump: dump_name is ''"),
        (
            lambda _: MsprobeStep("debugger"),  # type: ignore[arg-type]
            "MsprobeStep: debugger is a str; allowed: a PrecisionDebugger",
        ),
    ],
)
def test_arguments(tmp_path: Path, call: Any, says: str) -> None:
    """A wrong argument is an error that names it, its value and what is allowed."""
    debugger = PrecisionDebugger(config(tmp_path, "L0"))
    with pytest.raises(UsageError) as caught:
        call(debugger)
    assert says in str(caught.value)


@pytest.mark.parametrize("call", ["start", "stop", "step"])
def test_before_construction(call: str) -> None:
    """Class methods say that there is no debugger yet."""
    with pytest.raises(UsageError, match="PrecisionDebugger instance is not created"):
        getattr(PrecisionDebugger, call)()


def test_one_debugger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second construction gives the first object and says what of its arguments is not used."""
    first = PrecisionDebugger(config(tmp_path, "L0"))
    assert PrecisionDebugger(config(tmp_path, "mix")) is first
    assert "level 'L0' -> 'mix'" in capsys.readouterr().err


def test_nothing_captured_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A dump that stays empty says why; strict makes it an error."""
    debugger = PrecisionDebugger(config(tmp_path, "L0", section={"list": ["no such name"]}))
    train(debugger, 1)
    debugger.run.at_exit()
    assert "no call between start() and stop() has a name that list ['no such name'] wants" in capsys.readouterr().err
    PrecisionDebugger._instance = None
    path = tmp_path / "probe.yaml"
    path.write_text(f"strict: true\ndump:\n  level: L0\n  dump_path: {tmp_path}/strict\n  list: [nothing]\n")
    debugger = PrecisionDebugger(path)
    train(debugger, 1)
    with pytest.raises(NothingCapturedError, match="is empty"):
        debugger.run.at_exit()
    PrecisionDebugger._instance = None


def test_a_model_that_is_one_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model itself is no record: given alone, that is said."""
    debugger = PrecisionDebugger(config(tmp_path, "L0"))
    net = nn.Dense(4, 4)
    debugger.start(net)
    net(x())
    debugger.stop()
    debugger.step()
    assert "the model itself is no record, only what it holds" in capsys.readouterr().err


def test_the_model_is_remembered(tmp_path: Path) -> None:
    """start without a model uses the one that was given before."""
    debugger = PrecisionDebugger(config(tmp_path, "L0"))
    job = Job()
    debugger.start(job.net)
    debugger.start()
    job.forward_backward()
    debugger.stop()
    debugger.step()
    assert CELL in names(tmp_path)


def test_torch_is_not_imported() -> None:
    """msprobe.mindspore neither needs nor imports torch."""
    assert "torch" not in sys.modules


PROGRAM = Path(__file__).parents[1] / "failing_program.py"


def _run(*arguments: str) -> list[str]:
    return run(PROGRAM, *arguments, check=True).stdout.splitlines()


@pytest.mark.parametrize(
    ("how", "error"), [("unused", "RuntimeError Cholesky expects"), ("outside", "ValueError For 'TensorScatterUpdate'")]
)
@pytest.mark.slow
def test_the_training_ends_as_it_would(how: str, error: str) -> None:
    """Type and text of the error are those without a capture, also of a result that nobody looks at; the capture's own guard is not told,
    and what was seen before is there."""
    (plain,) = _run(how, "none")
    assert plain.startswith(error)
    watched, seen = _run(how, "mix")
    assert watched == plain
    assert seen.startswith("{} [")
    assert "'Cell.first.Dense.forward.0'" in seen


@pytest.mark.parametrize("how", ["step", "exit"])
def test_a_failure_that_nobody_has_waited_for_is_not_kept_back(how: str, tmp_path: Path) -> None:
    """The framework tells of a failed operator once, and gives empty memory for its result from then on: where the dump waits it goes on to
    the training, and the step is written all the same."""
    done = run(PROGRAM, how, cwd=tmp_path)
    assert "Gather" in (done.stdout if how == "step" else done.stderr)
    assert "is switched off" not in done.stderr
    (written,) = tmp_path.glob("dump/step0/*/dump.json")
    assert list(json.loads(written.read_text())["data"]) == ["Cell.0.Dense.forward.0"]
