"""A launch line in which no training is found: ``msprobe run`` says so at its end, with what was seen, and the exit code stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import launching as ln
import pytest

from msprobe_engine.workflow.launch_watch import LaunchReports, link_latest

PYTHON = sys.executable
NONE = "msprobe run: no training was found on this machine: nothing was watched, nothing is written. "
MODEL = "import torch; m = torch.nn.Linear(2, 2); o = torch.optim.SGD(m.parameters(), lr=0.1)\n"
PASS = "m(torch.ones(1, 2)).sum().backward()\n"
CASES = {
    "no framework": ("print(1)", "python -c imported none of torch,", "name the program that trains"),
    "no optimizer": ("import torch", "python -c imported torch and made no optimizer.", "is this the program that trains?"),
    "no pass": (MODEL, "python -c made the optimizer SGD, and no training pass", "is the model called with gradients on"),
    "evaluation": (MODEL + "m.eval()\n" + PASS, "python -c called Linear only in evaluation mode", "call model.train() before the loop"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.fast_cells("no framework")
def test_what_was_seen(case: str, tmp_path: Path) -> None:
    """The first line says what came nearest to a training, the second what to do; nothing is written."""
    code, seen, what_to_do = CASES[case]
    done = ln.run(PYTHON, "-c", code + "\nraise SystemExit(3)", cwd=tmp_path, options=())
    said = done.stderr.splitlines()
    assert done.returncode == 3
    assert said[0].startswith("msprobe run: preset watch: ")
    assert said[1].startswith(NONE + seen), said
    assert said[2].startswith(f"msprobe run: what to do: {what_to_do}")
    assert len(said) == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("words", "code"), [(("-c", "raise ValueError"), 1), (("gone.py",), 2)])
def test_a_program_that_ended_with_an_error(words: tuple[str, ...], code: int, tmp_path: Path) -> None:
    """Its error comes first: that no training was found follows from it."""
    done = ln.run(PYTHON, *words, cwd=tmp_path, options=())
    seen, what_to_do = done.stderr.splitlines()[-2:]
    assert done.returncode == code
    assert seen.startswith(f"msprobe run: the program itself ended with exit code {code}, its error stands above; no training was found")
    assert what_to_do == "msprobe run: what to do: mend that error and start again"


@pytest.mark.parametrize("shell", [(), ("bash", "-c", '"$@"; exit $?', "-")])
def test_a_program_that_was_interrupted(shell: tuple[str, ...], tmp_path: Path) -> None:
    """Ctrl-C before a training has begun is no fault of the program: no advice follows."""
    done = ln.run(*shell, PYTHON, "-c", "raise KeyboardInterrupt", cwd=tmp_path, options=())
    assert done.stderr.splitlines()[-1] == (
        "msprobe run: the program was interrupted before a training was found: nothing was watched, nothing is written"
    )


@pytest.mark.slow
def test_settings_that_do_not_fit_the_job(tmp_path: Path) -> None:
    """What only the training can tell (how many ranks there are) is wrong: the last words do not look for a training."""
    options = ("--set", "monitor.rank={tp: 1, sizes: {tp: 3}}")
    script = ("import os\nos.environ['WORLD_SIZE'] = '2'\n", MODEL, PASS, "o.step()\n")
    done = ln.run(PYTHON, "train.py", cwd=_with(tmp_path, "".join(script)), options=options)
    assert done.returncode == 0
    assert "do not make up the 2 ranks of this job" in done.stderr
    assert done.stderr.splitlines()[-2:] == [
        "msprobe run: nothing was watched, nothing is written. "
        "train.py trained without the probe, because its settings do not fit this job.",
        "msprobe run: what to do: the error above (the probe is off, training goes on) names the setting; change it and start again",
    ]


@pytest.mark.parametrize("command", [["true"], [PYTHON, "-S", "-c", "print(1)"]])
def test_no_python_with_the_probe(command: list[str], tmp_path: Path) -> None:
    done = ln.run(*command, cwd=tmp_path, options=())
    assert done.returncode == 0
    assert NONE + "No Python process with the probe has begun." in done.stderr


@pytest.mark.parametrize(
    ("code", "said"),
    [
        pytest.param("o.step()\n", "", marks=pytest.mark.slow),
        ("raise SystemExit(0)\n", "a training was found and ended within its first step, before an optimizer step was done; what was seen"),
    ],
)
def test_a_training(code: str, said: str, tmp_path: Path) -> None:
    """Of a step that came to its end nothing is said here, and ``latest`` leads to its files."""
    done = ln.run("bash", "-c", f"'{PYTHON}' train.py", cwd=_with(tmp_path, MODEL + PASS + code), options=())
    last = [line for line in done.stderr.splitlines() if line.startswith("msprobe run: ")][1:]
    assert [line.removeprefix("msprobe run: ")[: len(said)] for line in last] == ([said] if said else []), done.stderr
    (launch,) = [path for path in (tmp_path / "msprobe_output").iterdir() if not path.is_symlink()]
    if not said:
        assert (tmp_path / "msprobe_output" / "latest").resolve() == launch
        again = ln.run(PYTHON, "train.py", cwd=tmp_path, options=())
        assert again.returncode == 0
        assert (tmp_path / "msprobe_output" / "latest").resolve() != launch


def _with(directory: Path, code: str) -> Path:
    (directory / "train.py").write_text(code)
    return directory


@pytest.mark.slow
def test_a_probe_of_the_script_is_no_missing_training(tmp_path: Path) -> None:
    """Who makes a debugger writes by its own settings, wherever that is."""
    code = "import msprobe.pytorch as p; d = p.PrecisionDebugger(dump_path='elsewhere', task='statistics', step=[0], level='L0')\n"
    done = ln.run(PYTHON, "-c", code, cwd=tmp_path, options=())
    assert done.returncode == 0, done.stderr
    assert "no training was found" not in done.stderr


def test_what_is_left_behind_may_train(tmp_path: Path) -> None:
    """A shell that starts the training and ends: nothing is said to be missing."""
    done = ln.run("bash", "-c", "sleep 5 > /dev/null 2>&1 < /dev/null & exit 6", cwd=tmp_path, options=())
    assert done.returncode == 6
    assert "the launch line has ended and has left processes behind (" in done.stderr
    assert "no training was found" not in done.stderr


def test_a_launch_line_within_a_launch_line(tmp_path: Path) -> None:
    """One of them speaks."""
    inner = f"'{PYTHON}' -m msprobe_engine.cli.main run -- '{PYTHON}' -c 'print(1)'"
    done = ln.run("bash", "-c", inner, cwd=tmp_path, options=())
    assert done.stderr.count(NONE) == 1


def test_the_launch_line_has_no_child_of_ours(tmp_path: Path) -> None:
    """A program that waits for all its children waits for its own alone; what listens goes when the launch line does."""
    code = "import os\ntry:\n    os.wait()\nexcept ChildProcessError:\n    print('none')"
    done = ln.run(PYTHON, "-c", code, cwd=tmp_path, options=())
    assert done.stdout == "none\n"


def test_the_last_word_comes_before_the_end(tmp_path: Path) -> None:
    """Where the launch line is a Python: a shell's prompt does not stand in the midst of it."""
    command = f"'{PYTHON}' -m msprobe_engine.cli.main run -- '{PYTHON}' -c 'print(1)' 2>&1; echo prompt"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True, env=ln.environment())
    assert done.stdout.splitlines()[-1] == "prompt"
    assert "what to do" in done.stdout.splitlines()[-2]


def test_nobody_listens(tmp_path: Path) -> None:
    """Another machine, or a command that was killed: the program does not notice."""
    code = "import msprobe_integrations.autoload.report as r; r.report_event('step'); r.report_event('end')"
    variables = {"MSPROBE_LAUNCH": f"{os.getpid()}:msprobe-nobody"}
    done = subprocess.run([PYTHON, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True, env=ln.environment(**variables))
    assert done.stderr == ""


@pytest.mark.parametrize("line", [b"", b"x", b"a\0b\0c\0d", b"\xff" * 50, b"step\0-1\0\0", b"step\0" + b"9" * 40 + b"\0\0", b"\0" * 9])
def test_what_is_no_report(line: bytes) -> None:
    """Anybody on the machine can send something."""
    reports = LaunchReports()
    assert reports.add_report(line) == ""
    assert not reports.trained


def test_what_is_shown_is_text() -> None:
    """A terminal obeys none of it, and no line is added."""
    reports = LaunchReports()
    reports.add_report(b"imports\x001\0to\x1b[2Jrch\n\0a\nb.py")
    first, second = reports.describe_outcome("")
    assert "\x1b" not in first
    assert "\n" not in first + second


def test_files_that_nobody_has_reported() -> None:
    """A process of a container has written: it is not said that nothing is there."""
    (line,) = LaunchReports().describe_outcome("/out")
    assert line.startswith("no process on this machine has reported a training, and files were written to /out")


def test_a_framework_in_which_no_training_is_found() -> None:
    reports = LaunchReports()
    reports.add_report(b"began\x001\0\0train.py")
    reports.add_report(b"imports\x001\0mindspore\0train.py")
    first, second = reports.describe_outcome("")
    assert "train.py imported mindspore, in which trainings are not found by themselves." in first
    assert "MindSporeProbe" in second


def test_latest_is_a_link_or_left_alone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        link_latest(str(tmp_path), str(tmp_path / name))
        assert os.readlink(tmp_path / "latest") == name
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    link_latest(str(tmp_path), str(tmp_path / "a"))
    assert not (tmp_path / "latest").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "latest"]
    link_latest(str(tmp_path / "missing"), str(tmp_path / "a"))
