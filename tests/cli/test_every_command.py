"""Every command x {no argument, a wrong path, a run directory, Ctrl-C, no terminal, an unknown option}: the answer that is defined.

One table of exit codes for all; what goes wrong is one message with what to do; a traceback is shown to nobody.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from msprobe_engine.cli.main import COMMANDS, GROUPS, all_commands, main, sub_parser

Capture = pytest.CaptureFixture[str]
ALL = all_commands()
WITHOUT_ARGUMENT = {"doctor": 0, "frameworks": (0, 1), "init": 0, "settings schema": 0}
"""Commands that have an answer without any argument; all others end with 2 and say what they need. `parse` is the interactive tool then."""
ANSWERS = {name: "--json" in {option for action in sub_parser(name)._actions for option in action.option_strings} for name in ALL}
READS_RUN = {
    "diagnose": (1, "NaN"),
    "monitor analyze": (2, "no monitor has written here"),
    "monitor csv2tb": (2, "no monitor has written here"),
    "monitor report": (2, "no monitor has written here"),
    "nan_analyze": (1, "First NaN: step 0, rank 0"),
    "estimate": (0, "step"),
    "graph": (1, "html"),
    "show": (0, "step 0: rank0"),
    "trends": (1, "trends.html"),
    "acc_check": ((0, 1, 3), ""),
    "ckpt diff": (2, "no checkpoint is recognised"),
    "ckpt digest": (2, "no checkpoint is recognised"),
    "ckpt show": (2, "no checkpoint is recognised"),
    "compare": (3, "NaN"),
    "config_check": (2, "without config_check_pack.zip"),
    "data2db": (0, ""),
    "grad_probe compare": (2, ""),
    "graph_visualize": (1, "First NaN"),
    "merge_result": (3, "cannot be read as yaml"),
    "monitor learn": (2, "no monitor has written here"),
    "op_generate": (0, ""),
    "parse": (2, "holds no tensor file"),
    "run_overflow_check": ((0, 1), "Details: "),
    "settings check": (2, "a settings file ends in"),
}
"""Commands that read the path of a run, and what they say of one that has a dump with a NaN and no monitor."""
QUICK = [pytest.param(name, marks=pytest.mark.slow) if name == "acc_check" else name for name in sorted(READS_RUN)]
"""The pre-check starts a process of its own each time: once is enough, with ``--json``."""
PATHS = {
    "acc_check": ["-api_info", "{}"],
    "api_precision_compare": ["-npu", "{}", "-gpu", "{}"],
    "certs crl": ["{}"],
    "certs host": ["{}", "host"],
    "certs revoke": ["{}", "host"],
    "certs show": ["{}"],
    "ckpt diff": ["{}", "golden"],
    "ckpt digest": ["{}", "-o", "digests.json"],
    "code_mapping": ["--ir", "{}", "--dump_data", "{}"],
    "compare": ["{}", "golden"],
    "config_check": ["{}", "golden"],
    "data2db": ["--db", "trend.db", "--data", "{}"],
    "grad_probe compare": ["{}", "golden"],
    "graph_visualize": ["-tp", "{}"],
    "merge_result": ["-i", "{}", "-o", "merged", "-config", "{}"],
    "monitor learn": ["{}", "-o", "learned.yaml"],
    "op_generate": ["--dump", "{}", "--api", "Torch.log.0.forward", "-o", "scripts"],
    "parse": ["-t", "npy", "-d", "{}"],
    "run": ["--config", "{}", "--", "true"],
    "run_overflow_check": ["-api_info", "{}"],
}
"""What is typed around a path, where it is not the path alone."""
NO_INPUT = {"certs init", "doctor", "frameworks", "init", "settings schema"}
"""Commands that read nothing that is named."""


def typed(name: str, path: str) -> list[str]:
    """The command with a path for all that it reads."""
    return [*name.split(), *(word.format(path) for word in PATHS.get(name, ["{}"]))]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the output directories of two runs: one dump each, of a call that makes a NaN."""
    rank = tmp_path / "run" / "dump" / "step0" / "rank0"
    rank.mkdir(parents=True)
    plain = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [1], "requires_grad": False}
    tensors = [plain | dict.fromkeys(("Max", "Min", "Mean", "Norm"), value) for value in (1.0, float("nan"))]
    record = {"input_args": tensors[:1], "input_kwargs": {}, "output": tensors[1:]}
    head = {"task": "statistics", "level": "L1", "framework": "pytorch", "dump_data_dir": None}
    (rank / "dump.json").write_text(json.dumps({**head, "data": {"Torch.log.0.forward": record}}))
    (rank / "construct.json").write_text("{}")
    (rank / "stack.json").write_text("{}")
    shutil.copytree(tmp_path / "run", tmp_path / "golden")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MSPROBE_CONFIG", raising=False)
    return tmp_path


def ended(*words: str) -> int:
    try:
        return main(words)
    except SystemExit as end:
        return int(end.code or 0)


def message(err: str) -> list[str]:
    """What is said behind argparse's lines of usage."""
    assert "Traceback" not in err
    lines = err.splitlines()
    return [line for i, line in enumerate(lines) if line.startswith("msprobe") or (i and lines[i - 1].startswith("msprobe"))]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", sorted({*ALL} - {"parse"}))
def test_no_argument(name: str, capsys: Capture) -> None:
    """An answer where there is one, else 2 and what is needed."""
    words = [*name.split(), *(["--brief"] if name == "doctor" else [])]
    code = ended(*words)
    out, err = capsys.readouterr()
    expected = WITHOUT_ARGUMENT.get(name, 2)
    assert code in (expected if isinstance(expected, tuple) else (expected,)), err
    if code == 2:
        assert out == ""
        said = message(err)
        assert said[0].startswith(f"msprobe {name}: ")
        assert any(word in said[0] for word in ("required: ", "give ", "pass a file", "say what to do", "no launch line")), said


@pytest.mark.parametrize("name", sorted({*ALL} - NO_INPUT))
def test_a_wrong_path(name: str, here: Path, capsys: Capture) -> None:
    """2, and a message that names the path and says what to give; with --json the answer says the same. Nothing is made."""
    for path in ("nothing", str(here / "no" / "such" / "directory")):
        code = ended(*typed(name, path))
        out, err = capsys.readouterr()
        (said,) = message(err)
        assert (code, out) == (2, "")
        assert said.startswith(f"msprobe {name}: ")
        assert path in said
        if ANSWERS[name]:
            assert ended(*typed(name, path), "--json") == 2
            out = capsys.readouterr().out
            assert not out or path in json.loads(out)["error"]
    assert sorted(path.name for path in here.iterdir()) == ["golden", "run"]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", QUICK)
def test_a_run_directory(name: str, capsys: Capture) -> None:
    """Is taken as it is, and what is said comes without a terminal, too."""
    expected, said = READS_RUN[name]
    code = ended(*typed(name, "run"))
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    assert code in (expected if isinstance(expected, tuple) else (expected,)), out + err
    assert said in out + err
    assert "\x1b" not in out + err


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", [name for name in sorted(READS_RUN) if name != "parse"])
def test_a_run_directory_as_json(name: str, capsys: Capture) -> None:
    """The same end, and one object on the standard output; what has none of the common form says errors on the standard error alone."""
    expected, _ = READS_RUN[name]
    code = ended(*typed(name, "run"), "--json")
    out, err = capsys.readouterr()
    assert code in (expected if isinstance(expected, tuple) else (expected,)), out + err
    if out:
        told = json.loads(out)
        assert told.get("exit_code", code) == code
    else:
        assert code == 2
        assert "run" in err


def _module(name: str) -> str:
    first, _, second = name.partition(" ")
    table = importlib.import_module(f"msprobe_engine.cli.{COMMANDS[first].module}").COMMANDS if first in GROUPS else COMMANDS
    return f"msprobe_engine.cli.{table[second or first].module}"


ARGUMENTS = {
    "api_precision_compare": ["-npu", "a", "-gpu", "b"],
    "certs crl": ["a"],
    "certs host": ["a", "b"],
    "certs init": ["a"],
    "certs revoke": ["a", "b"],
    "certs show": ["a"],
    "ckpt diff": ["a", "b"],
    "ckpt digest": ["a", "-o", "b"],
    "ckpt show": ["a"],
    "code_mapping": ["--ir", "a", "--dump_data", "b"],
    "data2db": ["--db", "a", "--data", "b"],
    "diagnose": ["a"],
    "estimate": ["a"],
    "grad_probe compare": ["a", "b"],
    "graph_visualize": ["-tp", "a"],
    "merge_result": ["-i", "a", "-o", "b", "-config", "c"],
    "monitor analyze": ["a"],
    "monitor csv2tb": ["a"],
    "monitor learn": ["a", "-o", "b"],
    "monitor report": ["a"],
    "op_generate": ["-o", "a"],
    "run_overflow_check": ["-api_info", "a"],
    "settings migrate": ["a"],
    "show": ["a"],
    "trends": ["a"],
}
"""The least that a command wants."""


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", ALL)
def test_ctrl_c(name: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """130 and one line, wherever it comes."""

    def run(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module(_module(name)), "run", run)
    assert ended(*name.split(), *ARGUMENTS.get(name, [])) == 130
    assert capsys.readouterr() == ("", f"msprobe {name}: interrupted\n")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", ALL)
def test_an_unknown_option(name: str, capsys: Capture) -> None:
    """2 and one message."""
    code = ended(*name.split(), *ARGUMENTS.get(name, []), "--no-such-option")
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert message(err)[-1].startswith(f"msprobe {name}: ")


def test_a_real_interrupt_without_a_terminal(here: Path) -> None:
    """SIGINT to a command that is reading."""
    code = (
        "import sys, time; from msprobe_engine.cli import main as m; import msprobe_engine.cli.analysis.show as show\n"
        "def run(args):\n    print('begun', flush=True); time.sleep(60)\n"
        "show.run = run; sys.exit(m.main(['show', 'run']))"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline() == "begun\n"
        time.sleep(0.1)
        child.send_signal(signal.SIGINT)
        assert child.stderr.read() == "msprobe show: interrupted\n"
        assert child.wait() == 130


WRITES = {
    "diagnose": "diagnosis.html",
    "graph": "graph_*.html",
    "nan_analyze": "anomaly_analyze_*.json",
    "trends": "trends.html",
}
"""Commands that write about a run, and what."""


@pytest.mark.parametrize("name", WRITES)
def test_results_lie_in_the_directory_of_the_run(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A new directory each time, whose place is printed; nothing beside the run."""
    for number in (1, 2):
        assert ended(name, "run") == 1
        (file,) = (here / "run" / "analysis" / f"{name}-{number}").glob(WRITES[name])
        assert file.name in capsys.readouterr().out
    assert sorted(path.name for path in here.iterdir()) == ["golden", "run"]


def test_a_run_does_not_choose_where_results_lie(here: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Its ``analysis`` is a link out of it: nothing is written there."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (here / "run" / "analysis").symlink_to(elsewhere)
    assert ended("diagnose", "run") == 1
    assert list(elsewhere.iterdir()) == []
    assert (here / "msprobe_diagnosis" / "diagnosis.html").is_file()


@pytest.mark.parametrize("name", ALL)
def test_options_in_one_spelling(name: str) -> None:
    """Every option is shown with hyphens and taken with underscores as well; -o has all the words that there have been for it."""
    parser = sub_parser(name)
    for action in parser._actions:
        assert not [option for option in action.option_strings if option.startswith("--") and "_" in option]
        for option in action.option_strings:
            assert parser._option_string_actions[option[:2] + option[2:].replace("-", "_")] is action or not option.startswith("--")
        if "-o" in action.option_strings:
            assert {"--output", "--output-path", "--output_path", "--output-dir", "--output_dir"} <= parser._option_string_actions.keys()


@pytest.mark.parametrize("name", ALL)
def test_the_default_that_is_said_is_the_default(name: str) -> None:
    """A number, a choice or a path that the help calls the default is what the command gets without the option."""
    for action in sub_parser(name)._actions:
        said = re.search(r"\(default: ([\w./]+)\)", action.help or "")
        if said and action.default is not None and (said[1][0] in ".0123456789" or said[1] in (action.choices or ())):
            assert action.default == type(action.default)(said[1]), action.option_strings


@pytest.mark.fast_cells("compare", "diagnose", "graph_visualize", "show")
@pytest.mark.parametrize("name", sorted(READS_RUN))
def test_latest_is_the_last_launch(name: str, here: Path, capsys: Capture) -> None:
    """The bare word, where no file has that name; the output names the launch, since the link leads to another one later."""
    (here / "msprobe_output").mkdir()
    (here / "run").rename(here / "msprobe_output" / "20260101-120000-abcd")
    (here / "msprobe_output" / "latest").symlink_to("20260101-120000-abcd")
    expected, said = READS_RUN[name]
    code = ended(*typed(name, "latest"))
    out, err = capsys.readouterr()
    assert code in (expected if isinstance(expected, tuple) else (expected,)), out + err
    assert said in out + err
    assert "msprobe_output/latest" not in out
