"""The `msprobe` command as such: help, version, unknown commands, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from msprobe_engine import __version__
from msprobe_engine.cli import main as cli
from msprobe_engine.core.errors import ProbeError

HEAVY = ("torch", "pandas", "tensorboard", "prometheus_client", "numpy", "mindspore", "megatron", "rich")


def test_help_imports_nothing_heavy() -> None:
    """`msprobe --help` imports no framework, no numpy and no optional package: it answers at once."""
    code = (
        "import sys\nfrom msprobe_engine.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    for name in cli.COMMANDS:
        assert name in done.stdout
    assert "exit codes:" in done.stdout
    assert "examples:" in done.stdout


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_has_help_without_heavy_imports(name: str) -> None:
    """The help of each sub-command explains it and imports no framework and no optional package."""
    code = (
        "import sys\nfrom msprobe_engine.cli.main import main\n"
        f"try:\n    main([{name!r}, '--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert f"usage: msprobe {name}" in done.stdout


def test_only_the_chosen_command_is_imported() -> None:
    """Running one sub-command leaves the files of the others alone."""
    code = (
        "import sys\nfrom msprobe_engine.cli.main import main\nmain(['show', '.', '--json'])\n"
        "print(sorted(n for n in sys.modules if n.startswith('msprobe_engine.cli.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    expected = [
        f"msprobe_engine.cli.{name}"
        for name in ("analysis", "analysis.show", "exit_codes", "main", "options", "options.arguments", "options.json_answer")
    ]
    assert done.stdout.splitlines()[-1] == str(expected)


def test_the_list_of_commands_has_sections() -> None:
    """Every command stands below the title of what it is for."""
    names = list(cli.COMMANDS)
    text = cli._top_parser().format_help()
    places = [text.index(f"\n {title}\n") for title in ("Watch", "Find", "Compare", "Inspect", "Compatibility")]
    assert places == sorted(places)
    assert set(cli.SECTIONS.values()) <= set(names)
    assert names[0] == cli.SECTIONS["Watch"]


@pytest.mark.parametrize("name", cli.all_commands())
def test_help_has_no_marks_of_a_docstring(name: str) -> None:
    """Backticks are for pages of documentation."""
    assert "`" not in cli.sub_parser(name).format_help()


@pytest.mark.parametrize(
    ("argv", "usage"),
    [
        (["help"], "usage: msprobe [-h]"),
        (["help", "show"], "usage: msprobe show "),
        (["help", "monitor", "analyze"], "usage: msprobe monitor analyze "),
        (["help", "monitor"], "usage: msprobe monitor [-h] COMMAND"),
        (["help", "run_ut"], "usage: msprobe acc_check "),
        (["help", "check-config"], "usage: msprobe settings check "),
    ],
)
def test_help_of_a_command(argv: list[str], usage: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``msprobe help X`` is ``msprobe X --help``."""
    try:
        code = cli.main(argv)
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 0
    assert capsys.readouterr().out.startswith(usage)


@pytest.mark.parametrize("argv", [["--version"], ["-V"], ["version"]])
def test_version_is_the_installed_one(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Name and version, and the end is 0."""
    assert cli.main(argv) == 0
    assert capsys.readouterr().out == f"msprobe {__version__}\n"


def test_without_a_command_the_help_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    """No command is wrong usage: help on stderr, exit code 2."""
    assert cli.main([]) == 2
    assert "commands:" in capsys.readouterr().err


@pytest.mark.parametrize(("typed", "near"), [("nan-analyse", "nan_analyze"), ("check_config", "check-config"), ("shwo", "show")])
def test_an_unknown_command_names_the_nearest(typed: str, near: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistyped command is answered with the nearest known one and exit code 2."""
    assert cli.main([typed]) == 2
    assert f"unknown command '{typed}'; did you mean '{near}'?" in capsys.readouterr().err


def test_framework_option_before_the_command_is_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`msprobe -f pytorch COMMAND`, as existing scripts write it, works."""
    (tmp_path / "config_check_pack.zip").write_bytes(b"")
    assert cli.main(["-f", "pytorch", "show", str(tmp_path)]) == 0
    assert "configuration pack" in capsys.readouterr().out


def _fails_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(_: object) -> int:
        raise error

    monkeypatch.setattr(cli.importlib, "import_module", lambda _: SimpleNamespace(add_arguments=lambda _: None, run=run, __doc__="x"))


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (ProbeError("file x: broken"), 2, "msprobe show: file x: broken\n"),
        (ValueError("oops"), 4, "unexpected ValueError: oops"),
        (KeyboardInterrupt(), 130, "msprobe show: interrupted\n"),
    ],
)
def test_errors_become_one_message_and_a_code(
    error: BaseException, code: int, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error of this project is one clean message and exit code 2; a bug is 4; an interrupt is 130; no traceback."""
    _fails_with(monkeypatch, error)
    assert cli.main(["show"]) == code
    err = capsys.readouterr().err
    assert says in err
    assert "Traceback" not in err


@pytest.mark.parametrize("argv", [["--debug", "show"], ["show", "--debug"]])
@pytest.mark.parametrize(("error", "code"), [(ProbeError("x"), 2), (ValueError("x"), 4)])
def test_debug_shows_the_traceback(
    argv: list[str], error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --debug before or after the command the traceback is shown, and the exit code is the same: 1 says that something was found."""
    _fails_with(monkeypatch, error)
    assert cli.main(argv) == code
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.slow
def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    """When the reader of the output goes away the command ends quietly."""
    for i in range(3000):
        (tmp_path / f"step{i}" / "rank0").mkdir(parents=True)
    child = subprocess.Popen(
        [sys.executable, "-m", "msprobe_engine.cli", "show", str(tmp_path), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.read(10)
    child.stdout.close()
    assert child.stderr.read() == b""
    child.stderr.close()
    assert child.wait() == 0


def test_a_closed_pipe_changes_no_exit_code(tmp_path: Path) -> None:
    """``msprobe diagnose RUN GOLDEN | head -1`` of two runs that differ ends with 1 all the same."""
    for name, top in (("run", 2.0), ("golden", 1.0)):
        rank = tmp_path / name / "step0" / "rank0"
        rank.mkdir(parents=True)
        plain = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [1], "requires_grad": False}
        tensors = [plain | dict.fromkeys(("Max", "Min", "Mean", "Norm"), value) for value in (1.0, top)]
        record = {"input_args": tensors[:1], "input_kwargs": {}, "output": tensors[1:]}
        head = {"task": "statistics", "level": "L1", "framework": "pytorch", "dump_data_dir": None}
        (rank / "dump.json").write_text(json.dumps({**head, "data": {"Torch.log.0.forward": record}}))
    command = [sys.executable, "-m", "msprobe_engine.cli", "diagnose", "run", "golden", "-o", "out"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        child.stdout.close()
        assert child.wait() == 1


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["compare", "a", "b", "--calibraton", "c"], "did you mean '--calibration' in place of '--calibraton'?"),
        (["compare", "--target-pth=a", "-gp", "b"], "did you mean '--target-path' in place of '--target-pth'?"),
        (
            ["run_overflow_check", "--api_info", "x"],
            "required: -api_info/--api-info-file; did you mean '-api_info' in place of '--api_info'?",
        ),
        (["show", "a", "--josn"], "did you mean '--json' in place of '--josn'?"),
        (["monitor", "analyze", "a", "--oupt"], "unrecognized arguments: --oupt"),
    ],
)
def test_an_unknown_option_names_the_nearest(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of every command, whatever stands between the letters; also where it is the spelling of one that is required."""
    with pytest.raises(SystemExit) as end:
        cli.main(argv)
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_paths_may_stand_around_an_option() -> None:
    """The second path of two is optional in some commands, and is found behind an option too."""
    args = cli.sub_parser("diagnose").parse_args(["a", "-o", "out", "b"])
    assert (args.target, args.golden, args.output_path) == ("a", "b", "out")
    assert cli.sub_parser("run").parse_args(["--", "train.py", "--jsno"]).command[-1] == "--jsno"


def test_a_path_that_is_not_there_has_one_wording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In all commands that read what a run has written."""
    path = str(tmp_path / "nothing")
    for argv in (["compare", path, path], ["diagnose", path], ["diagnose", path, path], ["show", path], ["nan_analyze", "-i", path]):
        assert cli.main(argv) == 2
        assert f"{path}: there is no such file or directory; give " in capsys.readouterr().err
