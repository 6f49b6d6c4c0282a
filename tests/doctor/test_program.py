"""`msprobe doctor` as a program: from a bare source tree to its end, and what it makes of checks that hang, die or find something."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

import pytest

from msprobe_engine.core.errors import UsageError
from msprobe_engine.workflow import doctor
from msprobe_engine.workflow.check_process import CheckCommand
from msprobe_engine.workflow.doctor import Check, Line, Report, Result
from msprobe_integrations.doctor.checks import CHECKS

ROOT = Path(__file__).parents[2]

FAKE = """
import json, os, subprocess, sys, time
key, pipe = sys.argv[2], int(sys.argv[4])
def say(name, verdict): os.write(pipe, (json.dumps({"name": name, "verdict": verdict}) + "\\n").encode())
os.write(pipe, b'{"ready": true}\\n')
if key in ("GOOD", "DIES", "HANGS"): say("first", "ok")
if key == "DIES": sys.exit("no such kernel")
if key == "KILLED": os.abort()
if key == "HANGS":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # which has the pipe, too
    print(child.pid, file=open(os.environ["PID_FILE"], "w"), flush=True)
    time.sleep(600)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckCommand:
    """A program whose checks do what their keys say."""
    (tmp_path / "fake_checks.py").write_text(FAKE)
    monkeypatch.setenv("PID_FILE", str(tmp_path / "pid"))
    return CheckCommand("fake_checks", path=(str(tmp_path),))


def test_time_that_is_left_over_goes_to_later_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check gets its own seconds and what others have not used; with too little for all, its share."""
    given: list[float] = []
    now = 0.0

    def answers(_command: CheckCommand, _key: str, seconds: float) -> list[dict[str, str]]:
        nonlocal now
        given.append(seconds)
        now += 10.0
        return [{"name": "x", "verdict": "ok"}]

    monkeypatch.setattr(doctor, "answers", answers)
    monkeypatch.setattr(doctor.time, "monotonic", lambda: now)
    checks = [Check(key, key, 100.0, "") for key in ("A1", "A2")]
    for budget in (300.0, 100.0):
        doctor.run(checks, CheckCommand("x"), budget, Report({}))
    assert given == [200.0, 290.0, 50.0, 90.0]


def test_a_check_that_hangs_or_dies_costs_its_own_lines(fake: CheckCommand, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a check has said stays; one that dies is WRONG, with its last words; one whose time is up is ended with all it has started; one
    for which no time is left is not started. The summary says how much was checked."""
    seconds = {"HANGS": 5.0, "GOOD": 60.0, "DIES": 60.0, "KILLED": 60.0, "SILENT": 60.0}
    report = Report({})
    doctor.run([Check(key, key.lower(), box, "") for key, box in seconds.items()], fake, 246.0, report)
    doctor.run([Check("LATE", "late", 100.0, "")], fake, 1.0, report)
    said = {result.check.key: [(line.name, line.verdict, line.why) for line in result.lines] for result in report.results}
    assert said == {
        "GOOD": [("first", "ok", "")],
        "DIES": [("first", "ok", ""), ("dies", "WRONG", "the check ended with exit code 1: no such kernel")],
        "KILLED": [("killed", "WRONG", "the check ended with signal SIGABRT")],
        "SILENT": [("silent", "WRONG", "the check ended without a result")],
        "HANGS": [("first", "ok", ""), ("the rest", "skipped", "time box of 6 s ended")],
        "LATE": [("late", "skipped", "no time left: give it more with --budget")],
    }
    assert report.exit_code == 1
    assert report.summary()[0] == "3 WRONG: 5 of 6 checks ran, 1 of them without a line that was skipped"
    assert "WRONG    DIES dies  the check ended with exit code 1: no such kernel" in capsys.readouterr().out.splitlines()
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        ending = os.pidfd_open(int((tmp_path / "pid").read_text()))
        assert select.select([ending], [], [], 60)[0], "what the check had started still runs"
        os.close(ending)


@pytest.mark.slow
def test_a_check_ends_with_the_program_that_started_it() -> None:
    """Also with one that is killed: a check that hangs would stay on the device."""
    command = [sys.executable, "-m", "msprobe_integrations.doctor", "--device", "cpu", "--only", "A1"]
    program = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert program.stderr is not None
    assert next(line for line in program.stderr if line.startswith("... A1"))
    children, check = Path(f"/proc/{program.pid}/task/{program.pid}/children"), ""
    while "libtorch" not in (Path(f"/proc/{check}/maps").read_text() if check else ""):
        check = next(iter(children.read_text().split()), "")
    ending = os.pidfd_open(int(check))
    os.kill(int(check), signal.SIGSTOP)  # it hangs
    program.kill()
    program.wait()
    assert select.select([ending], [], [], 60)[0], "the check still runs"
    os.close(ending)
    program.stderr.close()


@pytest.mark.parametrize(
    ("verdicts", "code"), [(["ok", "skipped"], 0), (["slow"], 0), (["ok", "WRONG"], 1), (["skipped"], 2), ([], 2)], ids=str
)
def test_exit_codes(verdicts: list[doctor.Verdict], code: int) -> None:
    """0 where nothing is wrong, 1 for anything WRONG, 2 where nothing was checked, 3 where nothing is wrong and time was too short."""
    result = Result(Check("A1", "title", 1.0, ""), [Line("name", verdict, why="|") for verdict in verdicts])
    report = Report({"device": "cpu"}, [result])
    assert report.exit_code == report.as_dict()["exit_code"] == code
    assert report.summary()[0].startswith("nothing could be checked") == (code == 2)
    result.cut = True
    assert report.exit_code == (code or 3)
    assert report.markdown().count("\\|") == len(verdicts)


@pytest.mark.usefixtures("fake")
def test_a_report_that_cannot_be_written_costs_no_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a full disk all checks run and the summary is printed before the error."""
    checks = types.SimpleNamespace(CHECKS=(Check("GOOD", "a", 60.0, ""), Check("DIES", "b", 60.0, "")))
    monkeypatch.setitem(sys.modules, "fake_table", checks)
    monkeypatch.setattr(doctor, "describe", lambda _command, _seconds: {"device": "cpu"})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    args = argparse.Namespace(budget=120.0, only="", list=False, json=Path("/dev/full"), markdown=None, device="", peer="")
    with pytest.raises(OSError, match="No space left"):
        doctor.execute(args, "fake_table", "fake_checks")
    said = capsys.readouterr().out
    assert all(text in said for text in ("ok       GOOD first", "WRONG    DIES b", "2 of 2 checks ran"))


def test_a_report_at_a_place_that_cannot_be_written_is_said_first(tmp_path: Path) -> None:
    """Ten minutes of checks do not end in an error that was known before them."""
    args = argparse.Namespace(budget=120.0, only="", list=False, json=tmp_path, markdown=None, device="", peer="")
    with pytest.raises(UsageError, match="cannot be written: Is a directory"):
        doctor.execute(args, "msprobe_integrations.doctor.checks", "no_such_module")


def test_checks_are_chosen_by_key() -> None:
    """Whole keys or their first letter; another one is a usage error."""
    checks = [Check(key, "", 1.0, "") for key in ("A1", "A2", "B1", "H")]
    assert [check.key for check in doctor.choose(checks, "a,h")] == ["A1", "A2", "H"]
    with pytest.raises(UsageError, match="no check C; allowed: A1, A2, B1, H"):
        doctor.choose(checks, "A1,C")


def test_the_table_of_checks() -> None:
    """Keys are unique, every module is there, and all of them together fit into ten minutes."""
    assert len({check.key for check in CHECKS}) == len(CHECKS)
    for check in CHECKS:
        assert (ROOT / check.module.replace(".", "/")).with_suffix(".py").is_file(), check.module
    assert sum(check.seconds for check in CHECKS) <= 570  # the rest is for starting them


@pytest.mark.slow
def test_the_program_runs_from_a_bare_source_tree(tmp_path: Path) -> None:
    """A copy of the files of the repository, no installation, one check on the CPU: lines, JSON and a table, exit 0."""
    listing = ["git", "ls-files", "-co", "--exclude-standard", "*.py", "*/_filewrite.c", "pyproject.toml"]  # one module to build
    files = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in files.stdout.split():
        if name.startswith("tests/") or not (ROOT / name).is_file():
            continue
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    packages = sysconfig.get_paths()["purelib"]  # with -S its .pth files, which lead to the tree that is installed, are not read
    environment = {**os.environ, "PYTHONPATH": packages}
    options = ["--device", "cpu", "--only", "H", "--json", "r.json", "--markdown", "r.md"]
    command = [sys.executable, "-S", "-m", "msprobe_integrations.doctor", *options]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["machine"]["msprobe"].endswith("(source tree)")
    assert report["machine"]["C modules"] != "there"  # of this tree, not of the one that is installed
    assert report["checks"][0]["lines"][0]["name"] == "C kernel of the host"
    assert "1 of 1 checks ran" in ran.stdout
    assert "| H C kernel of the host |" in (tmp_path / "r.md").read_text()


def test_what_was_checked_whole_is_counted() -> None:
    """A check with a skipped line ran, and not whole; one with nothing but skipped lines did not run."""
    said = [[ok := Line("a", "ok")], [ok], [ok, skipped := Line("b", "skipped", why="no device")], [skipped]]
    report = Report({}, [Result(Check(f"A{number}", "title", 1.0, ""), lines) for number, lines in enumerate(said)])
    expected = "nothing is wrong in what was checked: 3 of 4 checks ran, 2 of them without a line that was skipped"
    assert report.summary() == [expected, "skipped (no device): A2 b; A3 b"]
