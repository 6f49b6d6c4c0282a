"""``msprobe run``: the launched interpreters wait for a framework, and nothing else is different from the bare launch line."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import launching as ln
import pytest

from msprobe_engine.cli.main import main

PYTHON = sys.executable


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return ln.place(tmp_path / "a job's place")


@pytest.mark.fast_cells("script", "shell that goes elsewhere", "child", "fork")
@pytest.mark.parametrize(
    "command",
    [
        [PYTHON, "seen.py"],
        [PYTHON, "-m", "seen"],
        [PYTHON, "-c", ln.SEEN],
        ["seen.py"],
        ["bash", "-c", f"cd / && '{PYTHON}' \"$OLDPWD/seen.py\""],
        [PYTHON, "-c", f"import subprocess, sys; sys.exit(subprocess.call([{PYTHON!r}, 'seen.py']))"],
        [PYTHON, "-c", "import os\nif os.fork():\n    sys = __import__('sys'); sys.exit(os.wait()[1])\n" + ln.SEEN],
    ],
    ids=["script", "module", "code", "script alone", "shell that goes elsewhere", "child", "fork"],
)
def test_every_interpreter_waits(here: Path, command: list[str]) -> None:
    """However Python is started below the launch line: it knows the settings file by its absolute name, and nothing is written."""
    (one,) = ln.reports(ln.run(*command, cwd=here))
    assert one["waits"]
    assert one["config"] == str(here / "probe.yaml")
    assert not any(entry.endswith("bootstrap") for entry in one["path"])
    assert sorted(p.name for p in here.iterdir() if p.name != "__pycache__") == ["probe.yaml", "seen.py"]


def test_spawned_children_wait(here: Path) -> None:
    """Processes of `multiprocessing` that begin anew wait too."""
    (here / "many.py").write_text(
        "import multiprocessing, runpy\n"
        "if __name__ == '__main__':\n"
        "    p = multiprocessing.get_context('spawn').Process(target=runpy.run_path, args=('seen.py',))\n"
        "    p.start(); p.join()\n"
    )
    (one,) = ln.reports(ln.run(PYTHON, "many.py", cwd=here))
    assert one["waits"]


def test_arguments_input_and_output_go_through(here: Path) -> None:
    """Spaces, quotes, another --, options of ours and bytes arrive as they were given."""
    words = ["a b", 'quo"te', "it's", "--", "--config", "x", "", "é"]
    (one,) = ln.reports(ln.run(PYTHON, "seen.py", *words, cwd=here))
    assert one["argv"] == ["seen.py", *words]
    copy = [PYTHON, "-m", "msprobe_engine.cli.main", "run", "-c", "probe.yaml", "--", "cat"]
    data = bytes(range(256)) * 100
    assert subprocess.run(copy, cwd=here, input=data, capture_output=True, check=True, env=ln.environment()).stdout == data


def test_changes(here: Path) -> None:
    """``--set`` and ``--output-dir`` arrive in every process, the directory absolute; a launch line inside adds its own."""
    options = ("-c", "probe.yaml", "--set", "monitor.parameters=true", "--set", "dump.step=[1, 3]", "--output-dir", "to here, [x]: 5")
    (one,) = ln.reports(ln.run(PYTHON, "seen.py", cwd=here, options=options))
    expected = ["monitor.parameters=true", "dump.step=[1, 3]", f"output_dir={json.dumps(str(here / 'to here, [x]: 5'))}"]
    assert one["changes"] == expected
    inner = [PYTHON, "-m", "msprobe_engine.cli.main", "run", "--set", "dump.level=L0", "--", PYTHON, "seen.py"]
    (one,) = ln.reports(ln.run(*inner, cwd=here, options=options))
    assert one["changes"] == [*expected, "dump.level=L0"]
    assert one["pythonpath"].count("bootstrap") == 1


@pytest.mark.slow
def test_the_launch_line_is_kept(here: Path) -> None:
    """For the commands that are proposed later, as a shell takes it and without secrets; of a launch line inside of another the outer."""
    code = "import os; print(os.environ['MSPROBE_LAUNCH_LINE'])"
    words = ["a b", "--hub_token", "hf_ABcdEFgh12345678901234567890abcdEF"]
    told = ln.run(PYTHON, "-c", code, *words, cwd=here).stdout.strip()
    assert shlex.split(told)[:4] == [PYTHON, "-c", code, "a b"]
    assert "hf_AB" not in told
    inner = [PYTHON, "-m", "msprobe_engine.cli.main", "run", "-c", "probe.yaml", "--", PYTHON, "-c", code]
    assert shlex.split(ln.run(*inner, cwd=here).stdout.strip()) == inner


@pytest.mark.parametrize(
    ("name", "text", "variable", "value"),
    [
        ("config.json", '{"task": "statistics", "dump_path": "./x", "level": "L1", "step": [0]}', "MSPROBE_SET", 'dump_path="{out}"'),
        ("monitor_config.json", '{"targets": {}, "format": "csv", "ops": ["norm"]}', "MONITOR_OUTPUT_DIR", "{out}"),
    ],
)
def test_output_dir_of_existing_files(here: Path, name: str, text: str, variable: str, value: str) -> None:
    """``--output-dir`` means the same with the files of the existing tool."""
    (here / name).write_text(text)
    code = f"import os; print(os.environ[{variable!r}])"
    done = ln.run(PYTHON, "-c", code, cwd=here, options=("-c", name, "--output-dir", "out"))
    assert done.stdout.strip() == value.format(out=here / "out"), done.stderr


@pytest.mark.parametrize(
    ("options", "command", "words"),
    [
        (("-c", "probe.yaml", "--set", "monitor.gradint=true"), ("true",), ["monitor.gradint", "did you mean 'gradients'"]),
        (("-c", "probe.yaml", "--set", "monitor"), ("true",), ["'monitor'", "KEY=VALUE"]),
        (("-c", "probe.yaml", "--set", "output_dir=a\nb"), ("true",), ["one line"]),
        (("-c", "probe.yaml", "--set", "rules=[{rule: extreme_value, args: {limitt: 1}}]"), ("true",), ["limitt"]),
        (("-c", "missing.yaml"), ("true",), ["missing.yaml"]),
        (("--preset", "nan", "-c", "probe.yaml"), ("true",), ["--preset nan and --config probe.yaml are both settings"]),
        (("-c", "probe.yaml"), (), ["no launch line"]),
        (("-c", "probe.yaml"), ("no_such_program",), ["no_such_program", "not found"]),
        (("-c", "probe.yaml"), ("./plain.sh",), ["bash ./plain.sh"]),
    ],
)
def test_mistakes_end_before_anything_starts(
    here: Path,
    options: tuple[str, ...],
    command: tuple[str, ...],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 2 and one message that names the mistake and the way out."""
    (here / "plain.sh").write_text("echo started\n")
    monkeypatch.chdir(here)
    monkeypatch.setattr(os, "execve", None)
    assert main(["run", *options, "--", *command]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert all(word in err for word in words), err
    assert len(err.splitlines()) == 1


def test_what_the_system_does_not_start(here: Path) -> None:
    """A file that is no program: exit code 2, and one message with the way out."""
    (here / "bare").write_bytes(b"\x00\x01started\n")
    (here / "bare").chmod(0o755)
    done = ln.run("./bare", cwd=here)
    assert (done.returncode, done.stdout) == (2, "")
    assert "#!" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.fast_cells(
    *(f"option-options{k}-{cell}" for k, cell in enumerate(("7-True", "2-False", "2-False", "2-False"))), "variable-options0-7-True"
)
@pytest.mark.parametrize(
    ("options", "code", "started"),
    [((), 7, True), (("--set", "strict=true"), 2, False), (("--dry-run",), 2, False), (("--set", "strict"), 2, False)],
)
@pytest.mark.parametrize("by", ["option", "variable"])
def test_settings_that_one_node_cannot_read_keep_it_from_nothing(
    here: Path, by: str, options: tuple[str, ...], code: int, started: bool
) -> None:
    """The training runs without a probe, and ends as it does; all other mistakes are those of every node."""
    (here / "probe.yaml").unlink()
    (here / "probe.yaml").symlink_to("/proc/self/mem")  # can be opened, and reading it fails
    program = "import os, sys; print('started', 'MSPROBE_CONFIG' in os.environ); sys.exit(7)"
    given = ("-c", "probe.yaml") if by == "option" else ()
    variables = {"MSPROBE_CONFIG": "probe.yaml"} if by == "variable" else {}
    done = ln.run(PYTHON, "-c", program, cwd=here, options=(*given, *options), env=ln.environment(**variables))
    assert (done.returncode, done.stdout) == (code, "started False\n" if started else ""), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert ("probe.yaml: the settings file cannot be read: Input/output error" in done.stderr) == (options[1:] != ("strict",))
    assert ("the launch line runs without a probe" in done.stderr) == started


@pytest.mark.parametrize(
    ("options", "variable", "file", "said"),
    [
        ((), None, "watch.yaml", "preset watch: loss every step, gradients in each of the first 100 steps and then every 10 steps"),
        (("--preset", "dump", "--set", "dump.step=5"), None, "dump.yaml", "preset dump: a dump of step 5"),
        ((), "probe.yaml", "probe.yaml", ""),
        (("--preset", "nan"), "probe.yaml", "nan.yaml", "preset nan"),
    ],
)
def test_without_a_settings_file(here: Path, options: tuple[str, ...], variable: str | None, file: str, said: str) -> None:
    """A preset; the file that the environment names wins over the one that is not named. Each launch has a directory of its own."""
    places = set()
    for _ in range(2):
        done = ln.run("true", cwd=here, options=("--dry-run", *options), env=ln.environment(MSPROBE_CONFIG=variable))
        assert done.returncode == 0
        assert said in done.stderr
        assert done.stderr.count("\n") == bool(said)
        found = dict(word.split("=", 1) for word in shlex.split(done.stdout) if "=" in word)
        assert Path(found.get("MSPROBE_CONFIG", variable or "")).name == file
        places.add(found.get("MSPROBE_SET", ""))
    assert all(str(here / "msprobe_output") in place for place in places) == bool(said)
    assert len(places) == (2 if said else 1)


@pytest.mark.fast_cells("option-none", "option-another key", "option-the same key", "option-all keys", "variable-none")
@pytest.mark.parametrize(
    ("options", "changes", "said"),
    [
        ((), "output_dir=a\nmonitor.parameters=true", "MSPROBE_SET holds in this launch too: output_dir, monitor.parameters"),
        (("--set", "dump.step=2"), "output_dir=a\nmonitor.parameters=true\ndump.step=2", "too: output_dir, monitor.parameters"),
        (
            ("--set", "monitor.parameters=false"),
            "output_dir=a\nmonitor.parameters=true\nmonitor.parameters=false",
            "too: output_dir; MSPROBE_SET does not count for what this launch sets: monitor.parameters",
        ),
        (
            ("--set", "monitor={}", "--set", "output_dir=b"),
            "output_dir=a\nmonitor.parameters=true\nmonitor={}\noutput_dir=b",
            "msprobe run: MSPROBE_SET does not count for what this launch sets: output_dir, monitor.parameters",
        ),
    ],
    ids=["none", "another key", "the same key", "all keys"],
)
@pytest.mark.parametrize("file", ["probe.yaml", None], ids=["option", "variable"])
def test_changes_of_the_environment_hold_too(here: Path, file: str | None, options: tuple[str, ...], changes: str, said: str) -> None:
    """A launch in an environment with changes (another launch, a job script) has both; of the same key its own counts. One line says so,
    without values, which may be secrets."""
    given = {"MSPROBE_SET": "output_dir=a\nmonitor.parameters=true", "MSPROBE_CONFIG": None if file else "probe.yaml"}
    options = (*(("-c", file) if file else ()), *options)
    done = ln.run(PYTHON, "seen.py", cwd=here, options=options, env=ln.environment(**given))
    assert ln.reports(done)[0]["changes"] == changes.split("\n")
    first, *others = done.stderr.splitlines()
    assert said in first
    assert not any("MSPROBE_SET" in line for line in others)


def test_changes_to_a_file_of_another_kind_are_left_out(here: Path) -> None:
    """Their keys are none of the file that this launch names, which is no reason to end it."""
    (here / "config.json").write_text('{"task": "statistics", "dump_path": "./x", "level": "L1", "step": [0]}')
    given = {"MSPROBE_SET": "dump_path=a", "MSPROBE_CONFIG": "config.json"}
    done = ln.run(PYTHON, "seen.py", cwd=here, options=("-c", "probe.yaml"), env=ln.environment(**given))
    assert ln.reports(done)[0]["changes"] == []
    first = done.stderr.splitlines()[0]
    assert first.startswith("msprobe run: MSPROBE_SET is not used: it changes ")
    assert first.endswith("config.json, a file of another kind")


def test_where_a_preset_writes(here: Path) -> None:
    """Where the command line says, if it does."""
    for options in (("--output-dir", "out"), ("--set", f"output_dir={here / 'out'}")):
        done = ln.run("true", cwd=here, options=("--dry-run", *options))
        assert "writing to out; probe.yaml in this directory is not used, name it with --config" in done.stderr
        assert f"{here / 'out'}" in next(word for word in shlex.split(done.stdout) if word.startswith("MSPROBE_SET"))


def test_dry_run(here: Path) -> None:
    """Prints what a shell would take, and starts nothing."""
    done = ln.run("bash", "-c", "echo x > started", cwd=here, options=("-c", "probe.yaml", "--set", "dump.step=[1]", "--dry-run"))
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert "MSPROBE_SET='dump.step=[1]'" in lines
    assert lines[-1] == "bash -c 'echo x > started'"
    assert not (here / "started").exists()
    again = subprocess.run(
        ["bash", "-c", "export " + " ".join(lines[:-1]) + f"; '{PYTHON}' seen.py"], cwd=here, capture_output=True, text=True
    )
    assert json.loads(again.stdout)["changes"] == ["dump.step=[1]"]


@pytest.mark.fast_cells("exit", "error", "interrupt")
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import sys; sys.exit(7)", 7),
        ("raise RuntimeError('theirs')", 1),
        ("import os; os._exit(9)", 9),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
        ("import faulthandler; faulthandler._sigsegv()", -signal.SIGSEGV),
    ],
    ids=["exit", "error", "end at once", "terminate", "interrupt", "crash"],
)
def test_how_it_ends(here: Path, code: str, expected: int) -> None:
    """Exit code, signal and traceback are those of the bare launch line."""
    done = ln.run(PYTHON, "-c", code, cwd=here)
    bare = subprocess.run([PYTHON, "-c", code], cwd=here, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, ln.without_last_words(done.stderr)) == (expected, bare.stdout, bare.stderr)
    assert bare.returncode == expected


def test_signals_that_python_ignores_are_not_ignored_below(here: Path) -> None:
    """A pipe whose reader goes ends the writer, as in a shell."""
    done = ln.run("bash", "-c", "yes | head -n 1; echo ${PIPESTATUS[0]}", cwd=here)
    assert done.stdout.split() == ["y", str(128 + signal.SIGPIPE)]


def test_it_becomes_the_launch_line(here: Path) -> None:
    """One process: signals to the launcher's number reach the launch line."""
    with subprocess.Popen(
        [PYTHON, "-m", "msprobe_engine.cli.main", "run", "-c", "probe.yaml", "--", PYTHON, "-c", "import os; print(os.getpid())"],
        cwd=here,
        stdout=subprocess.PIPE,
        text=True,
        env=ln.environment(),
    ) as process:
        assert process.stdout is not None
        assert int(process.stdout.read()) == process.pid


def test_the_users_own_customisations(here: Path) -> None:
    """``sitecustomize`` and ``usercustomize`` of the user run, in Python's order; an error of theirs is theirs; PYTHONPATH stays."""
    own = here / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import sys; sys.seen = ['site']\n")
    (own / "usercustomize.py").write_text("import sys; sys.seen.append('user')\n")
    given = os.pathsep.join([str(own), str(ln.ROOT)])
    # a user site exists only outside of virtual environments
    base = Path(sys._base_executable)  # type: ignore[attr-defined]
    (one,) = ln.reports(ln.run(str(base), "seen.py", cwd=here, env=ln.environment(PYTHONPATH=given)))
    assert one["seen"] == ["site", "user"]
    assert one["own"] == str(own / "sitecustomize.py")
    assert one["path"][1:3] == given.split(os.pathsep)
    (own / "sitecustomize.py").write_text("import sys; sys.seen = []; import no_such_module\n")
    done = ln.run(PYTHON, "seen.py", cwd=here, env=ln.environment(PYTHONPATH=given))
    assert done.returncode == 0
    assert "no_such_module" in done.stderr
    assert "msprobe" not in ln.without_last_words(done.stderr)


@pytest.mark.fast_cells("-S", "-I")
@pytest.mark.parametrize("flag", ["-S", "-I", "-E", "-sI"])
def test_isolated_interpreters_work(here: Path, flag: str) -> None:
    """-I and -E take no notice of PYTHONPATH, -S of .pth files either: the program runs, with the probe only where the .pth is."""
    (one,) = ln.reports(ln.run(PYTHON, flag, "seen.py", cwd=here))
    if flag == "-S":
        assert one["modules"] == []


def test_switched_off(here: Path) -> None:
    """MSPROBE_AUTOLOAD=0 counts more than the command, which says so."""
    done = ln.run(PYTHON, "seen.py", cwd=here, env=ln.environment(MSPROBE_AUTOLOAD="0"))
    assert done.stderr.splitlines() == ["msprobe run: MSPROBE_AUTOLOAD=0: the launch line runs without a probe"]
    one = json.loads(done.stdout)
    assert not one["waits"]
    assert one["config"] is None


def test_help() -> None:
    """Examples, and the one thing about exit codes that differs from other commands."""
    done = ln.msprobe("run", "--help", cwd=ln.ROOT)
    assert done.returncode == 0
    assert "msprobe run --config probe.yaml -- torchrun" in done.stdout
    assert "that of the launch line" in done.stdout
