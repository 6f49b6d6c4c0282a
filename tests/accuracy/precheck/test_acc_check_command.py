"""`msprobe acc_check` as a program: what its processes may do, what stays after a kill, its files and what it says."""

from __future__ import annotations

import csv
import json
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from msprobe_engine.accuracy.precheck import memory
from msprobe_engine.accuracy.precheck.options import Work
from msprobe_engine.cli.main import main
from msprobe_integrations.torch.op_tools.accuracy.precheck import resolve_device
from msprobe_integrations.torch.tensors.devices import accelerator

BOMBS = str(Path(__file__).parents[1] / "bombs.py")
STACK = ["File /data/train.py, line 12, in forward, \n return scale(x)"]


def tensor(shape: Sequence[int] = (64,)) -> dict[str, Any]:
    return {
        "type": "torch.Tensor", "dtype": "torch.float32", "shape": list(shape),
        "Max": 2.0, "Min": -2.0, "Mean": 0.1, "Norm": 9.0, "requires_grad": True,
    }  # fmt: skip


def dump(directory: Path, names: Sequence[str]) -> Path:
    """A dump of calls ``bombs.{name}``, each with a backward."""
    directory.mkdir(parents=True, exist_ok=True)
    data: dict[str, Any] = {}
    for n, name in enumerate(names):
        data[f"bombs.{name}.{n}.forward"] = {"input_args": [tensor()], "input_kwargs": {}, "output": [tensor()]}
        data[f"bombs.{name}.{n}.backward"] = {"input": [tensor()], "output": [tensor()]}
    header = {"task": "statistics", "level": "L1", "framework": "pytorch", "dump_data_dir": None}
    (directory / "dump.json").write_text(json.dumps({**header, "data": data}))
    (directory / "stack.json").write_text(json.dumps({"0": [[name for name in data if name.endswith("forward")], STACK]}))
    return directory / "dump.json"


def rows(path: Path) -> dict[str, dict[str, str]]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        found = list(csv.DictReader(file))
    return {next(iter(row.values())): row for row in found}


def files(directory: Path) -> tuple[Path, Path]:
    (result,) = directory.glob("accuracy_checking_result_*.csv")
    (details,) = directory.glob("accuracy_checking_details_*.csv")
    return result, details


@pytest.mark.slow
def test_a_call_that_takes_its_process_down_or_hangs_costs_one_row_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the system has killed is tried once more, alone. A wrong result is an error, named with its source line; its data are saved."""
    monkeypatch.setenv("MSPROBE_TEST_MARK", str(tmp_path / "mark"))
    file = dump(tmp_path / "dump", ("good", "fault", "wrong", "out_of_memory", "hangs", "good"))
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"run_ut": {"error_data_path": str(tmp_path), "black_list": ["nothing"]}}))
    command = ["acc_check", str(file), "-o", str(tmp_path / "out"), "-d", "cpu", "-n", "1", "--operators", BOMBS, "--timeout", "15"]
    assert main([*command, "-save_error_data", "-config", str(config)]) == 1
    result, details = files(tmp_path / "out")
    found = rows(result)
    assert list(found) == [f"bombs.{name}" for name in ("good.0", "fault.1", "wrong.2", "out_of_memory.3", "hangs.4", "good.5")]
    statuses = [(row["Forward Test Success"], row["Backward Test Success"]) for row in found.values()]
    assert statuses == [("pass", "pass"), ("SKIP", " "), ("error", "error"), ("pass", "pass"), ("SKIP", " "), ("pass", "pass")]
    assert "SIGSEGV: a fault in native code" in found["bombs.fault.1"]["Message"]
    assert "took longer than 15 s (--timeout)" in found["bombs.hangs.4"]["Message"]
    assert found["bombs.wrong.2"]["Source Line"] == "/data/train.py:12 in forward"
    assert stat.S_IMODE(result.stat().st_mode) == stat.S_IMODE(details.stat().st_mode) == 0o640
    (data,) = tmp_path.glob("ut_error_data*")
    assert data.name.removeprefix("ut_error_data") == result.stem.removeprefix("accuracy_checking_result_")
    saved = sorted(path.name for path in data.iterdir())
    assert saved == [
        f"bombs.wrong.2.{part}.0.pt"
        for part in (
            "backward.input", "backward.output.bench", "backward.output.device",
            "forward.input", "forward.output.bench", "forward.output.device",
        )
    ]  # fmt: skip
    out, err = capsys.readouterr()
    assert "6 calls, 4 checked: 1 error, 3 pass, 2 skipped forward" in out
    assert "2 took their process down, ran out of time or do not fit into memory:" in out
    assert re.search(r"bombs\.wrong\.2: forward error, backward error\n +(forward|backward)\.output\.0 \(float32 64\): the error is", out)
    assert "called in /data/train.py:12 in forward" in out
    assert "black_list: no call of 'nothing' in this dump" in err


@pytest.mark.slow
def test_a_check_that_is_killed_goes_on_and_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    """Killed at any row, resumed with another number of processes: the same bytes. The dump may be read-only; nothing is left in it."""
    file = dump(tmp_path / "dump", ["slow", "good", "wrong"] * 20)
    for path in (file, file.with_name("stack.json")):
        path.chmod(0o400)
    file.parent.chmod(0o500)
    command = [sys.executable, "-m", "msprobe", "acc_check", str(file), "-d", "cpu", "--operators", BOMBS, "-n"]
    assert subprocess.run([*command, "1", "-o", str(tmp_path / "whole")], capture_output=True).returncode == 1
    whole = files(tmp_path / "whole")
    out = tmp_path / "out"
    process = subprocess.Popen([*command, "2", "-o", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for wanted in (3, 20):
        _wait_for_rows(out, wanted, process)
        process.kill()
        process.wait()
        result, details = files(out)
        assert len(rows(result)) < 60
        for path in (result, details):  # as if it had been in the middle of a row
            with open(path, "ab") as torn:
                torn.write(b'bombs.torn.0,"pass\n')
        process = subprocess.Popen([*command, "1", "-csv_path", str(result)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    said, wrong = process.communicate()
    assert process.returncode == 1, wrong.decode()
    assert b"60 calls, 60 checked: 20 error, 40 pass forward" in said
    for one, other in zip(whole, files(out)):
        assert one.read_bytes() == other.read_bytes()
    assert sorted(path.name for path in file.parent.iterdir()) == ["dump.json", "stack.json"]
    file.parent.chmod(0o700)


def _wait_for_rows(directory: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = list(directory.glob("accuracy_checking_result_*.csv")) if directory.is_dir() else []
        if found and len(found[0].read_bytes().splitlines()) > count:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    raise AssertionError(f"no {count} rows")


@pytest.mark.slow
def test_a_check_that_is_interrupted_says_how_to_go_on_and_leaves_no_process(tmp_path: Path) -> None:
    """Ctrl-C: the rows that are there stay whole."""
    file = dump(tmp_path / "dump", ["slow"] * 500)
    command = [sys.executable, "-m", "msprobe", "acc_check", str(file), "-d", "cpu", "--operators", BOMBS, "-n", "1", "-o", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _wait_for_rows(tmp_path, 5, process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert children
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=240)
    assert process.returncode == 130
    assert f"-csv_path {files(tmp_path)[0]}".encode() in said
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    assert {row["Forward Test Success"] for row in rows(files(tmp_path)[0]).values()} == {"pass"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give the dump.json of one rank (-api_info)"),
        (["{dump}", "-api_info", "{dump}"], "-api_info says already what is checked"),
        (["{dump}", "-n", "65"], "1 to 64 processes are allowed"),
        (["{dump}", "-d", "0", "0"], "name each device once"),
        (["{dump}", "-d", "-1"], "write numbers from 0"),
        (["{dump}", "--timeout", "0"], "seconds above 0"),
        (["{dump}", "--compat", "--dtype", "bfloat16"], "the existing tool has none of these"),
        (["{dump}/nothing"], "there is no such file or directory"),
        (["{dump}", "-csv_path", "{dump}"], "is called accuracy_checking_result_"),
        (["{dump}", "-save_error_data", "-config", "{config}"], "error_data_path"),
    ],
)
def test_wrong_usage_is_one_sentence(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is begun, exit code 2."""
    file = dump(tmp_path / "dump", ["good"])
    config = tmp_path / "config.json"
    config.write_text('{"run_ut": {"error_data_path": "/nowhere/at/all"}}')
    given = [word.format(dump=file, config=config) for word in arguments]
    monkeypatch.chdir(tmp_path)
    assert main(["acc_check", *given]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_types_and_operators_that_are_not_here_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the process that would have used them."""
    file = dump(tmp_path / "dump", ["good"])
    for arguments, message in (
        (["-d", "cpu", "--dtype", "float31"], "--dtype float31: is no floating type of torch"),
        (["-d", "cpu", "--operators", str(tmp_path / "none.py")], "none.py is no Python file"),
    ):
        assert main(["run_ut", str(file), "-o", str(tmp_path / "out"), *arguments]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_call_that_does_not_fit_into_memory_has_a_row_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not run, and counts as one that could not be checked; large ones are checked by fewer processes, which is said once."""
    file = dump(tmp_path / "dump", ("good", "good", "good"))
    document = json.loads(file.read_text())
    for n, elements in ((1, 1 << 40), (2, 1 << 21)):
        document["data"][f"bombs.good.{n}.forward"]["input_args"][0]["shape"] = [elements]
    file.write_text(json.dumps(document))
    monkeypatch.setattr(memory, "free_memory", lambda: 1 << 30)
    assert main(["acc_check", str(file), "-o", str(tmp_path / "out"), "-d", "cpu", "-n", "2", "--operators", BOMBS]) == 3
    found = rows(files(tmp_path / "out")[0])
    assert [row["Forward Test Success"] for row in found.values()] == ["pass", "SKIP", "pass"]
    assert "too large for this machine" in found["bombs.good.1"]["Message"]
    assert capsys.readouterr().err.count("large calls (1) are checked after the others") == 1


@pytest.mark.slow
def test_saved_tensors_that_cannot_be_read_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged, missing or foreign file costs no call: its input is drawn, the row says which and why, the check ends with 3."""
    file = dump(tmp_path / "dump", ("good", "good", "good", "good"))
    (folder := tmp_path / "dump" / "dump_tensor_data").mkdir()
    document = json.loads(file.read_text())
    for n, (name, content) in enumerate((("cut.pt", b"PK\x03\x04"), ("empty.pt", b""), ("gone.pt", None))):
        document["data"][f"bombs.good.{n}.forward"]["input_args"][0]["data_name"] = name
        if content is not None:
            (folder / name).write_bytes(content)
    file.write_text(json.dumps(document))
    assert main(["acc_check", str(file), "-o", str(tmp_path / "out"), "-d", "cpu", "-n", "1", "--operators", BOMBS]) == 3
    messages = [row["Message"] for row in rows(files(tmp_path / "out")[0]).values()]
    for name, message in zip(("cut.pt", "empty.pt", "gone.pt"), messages):
        assert message.startswith("input 0: the saved tensor cannot be read: ")
        assert name in message
        assert message.endswith("drawn from its statistics instead")
    assert not messages[3].strip()
    assert "saved tensors of 3 calls cannot be read" in capsys.readouterr().out


def test_a_dump_beside_the_path_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Single processes write ``proc<pid>``, not ``rank0``: for all commands, by file and by directory."""
    file = dump(tmp_path / "step0" / "proc77", ("good",))
    wrong = tmp_path / "step0" / "rank0" / "dump.json"
    out = str(tmp_path / "out")
    for command in (["acc_check", str(wrong), "-o", out], ["op_generate", "--dump", str(wrong), "--api", "good", "-o", out]):
        assert main(command) == 2
        assert f"; there is {file}\n" in capsys.readouterr().err
    assert main(["acc_check", str(wrong.parent), "-o", out]) == 2
    assert f"; there is {file.parent};" in capsys.readouterr().err


@pytest.mark.slow
def test_the_summary_says_what_was_compared_with_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In its first line. Without an accelerator the default is said to be the CPU. With nothing wrong there is no directory of error data.
    Registered names that no call has are told, with the nearest."""
    file = dump(tmp_path / "dump", ("good",))
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"run_ut": {"error_data_path": str(tmp_path)}}))
    operators = tmp_path / "operators.py"
    operators.write_text(Path(BOMBS).read_text() + "\nregister_operator('bomb.good', good)\n")
    command = ["acc_check", str(file), "-o", str(tmp_path / "out"), "--operators", str(operators)]
    assert main([*command, "-save_error_data", "-config", str(config)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(("cpu in the recorded types against cpu in float64 (torch ", "cuda:", "npu:"))
    assert err.count("there is no accelerator here: the CPU's own kernels are checked") == out.startswith("cpu ")
    assert "no call of 'bomb.good' in this dump; did you mean 'bombs.good'?" in err
    assert "inputs and results" not in out
    assert not list(tmp_path.glob("ut_error_data*"))


def test_a_build_for_an_accelerator_on_a_machine_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch from PyPI is built for CUDA and names it everywhere: ``auto`` is the CPU all the same."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert accelerator() is None
    assert resolve_device("auto") == "cpu"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "more"),
    [
        (["cuda:77"], []),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((["cuda:77"], ["--compat"]), (["0"], ["--compat"]), (["0", "1"], []))),
    ],
)
def test_a_device_that_is_not_there_is_refused_before_files_are_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], device: list[str], more: list[str]
) -> None:
    """Also by number, where there is no accelerator; with --compat too. By the process that would have used it: each case starts one."""
    if device != ["cuda:77"] and torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    file = dump(tmp_path / "dump", ("good", "good"))
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"run_ut": {"black_list": ["bombs.good.1"]}}))
    assert main(["acc_check", str(file), "-o", str(tmp_path / "out"), "-config", str(config), *more, "-d", *device]) == 2
    err = capsys.readouterr().err
    assert "-csv_path" not in err
    if device == ["cuda:77"]:
        assert "device cuda:77: there is no device of this type" in err
    else:
        assert "-d 0: there is no accelerator here; -d cpu checks the CPU" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_process_that_is_ready_has_loaded_what_calls_need() -> None:
    """The first call is not charged with the imports of torch's own lazy modules."""
    work = Work(
        framework="pytorch", directory=".", device="cpu", dtype=None, compiled=False, bench="cpu", bench_dtype="float64", jit_compile=False,
        seed=0, condition=True, compat="", error_data="", quantized=(), threads=1,
    )  # fmt: skip
    code = f"""
import sys
from msprobe_engine.accuracy.precheck.worker import make_check
from msprobe_engine.accuracy.precheck.options import Work
check, one = make_check({work!r}), {tensor()!r}
before = set(sys.modules)
record = {{"input_args": [one], "input_kwargs": {{}}, "output": [one]}}
assert check(name="Torch.sin.0", record=record, backward={{"input": [one], "output": [one]}}).forward == "pass"
print(len(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 5
