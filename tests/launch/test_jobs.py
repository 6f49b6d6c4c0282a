"""Real launch lines with a script that knows nothing of the probe: what they write, and how they end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launching as ln
import pytest

from msprobe_engine.formats.dump.reader import open_dump

pytestmark = pytest.mark.framework
JOB = str(Path(__file__).with_name("job.py"))
SETTINGS = "output_dir: out\nmonitor: {gradients: true}\nsinks: {csv: {enabled: true}}\ndump: {level: L0}\n"
STEPS = 6
Cells = Any


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "probe.yaml").write_text(SETTINGS)
    return tmp_path


def started(command: list[str], cwd: Path, **variables: str) -> subprocess.Popen[str]:
    """``msprobe run -- command`` in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "msprobe_engine.cli.main", "run", "-c", str(cwd / "probe.yaml"), "--", *command],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ln.environment(**variables),
        start_new_session=True,
    )


def torchrun(*words: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *words]


def check(root: Path, ranks: int, finished: int, cut_off: int | None = None) -> None:
    """Dump and monitor of `ranks` ranks and nobody else: `finished` whole steps, and a last one that was cut off."""
    dump = open_dump(root / "dump")
    steps = list(range(finished))
    assert dump.steps == steps + ([] if cut_off is None else [cut_off])
    for step in dump.steps:
        found = dump.ranks(step)
        assert len(found) == ranks
        for rank in found:
            assert dump.load(step, rank).complete == (step != cut_off)
    directories = [path for path in (root / "monitor").iterdir() if path.is_dir()]
    assert len(directories) == ranks
    for directory in directories:
        (text,) = (path.read_text() for path in directory.glob("grad_reduced_*.csv"))
        assert text.endswith("\n")
        assert {line.split(",")[2] for line in text.splitlines()[1:]} == {str(step) for step in steps}


@pytest.mark.slow
def test_torchrun_with_workers_and_a_thread_that_fails(here: Path) -> None:
    """Two ranks with data-loader workers: two ranks' files and no other; the agent and the workers make nothing. An exception of a
    thread ends nothing."""
    process = started(torchrun(JOB, "thread", "2"), here, JOB_WORKERS="1")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert out.count(f"step {STEPS - 1} loss") == 2
    assert err.count("msprobe is on") == 1
    check(here / "out", 2, STEPS)
    assert sorted(path.name for path in here.iterdir()) == ["out", "probe.yaml"]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """The script ended in all its ways, in forked children below one launch line: directory of the ways, exit codes."""
    here = tmp_path_factory.mktemp("ends")
    (here / "probe.yaml").write_text(SETTINGS)
    process = started([sys.executable, str(Path(JOB).with_name("children.py")), "3", "exit", "raise", "interrupt"], here)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return here, json.loads(out.splitlines()[-1])


@pytest.mark.parametrize(
    ("end", "code", "last"), [("exit", 5, ""), ("raise", 1, "RuntimeError: theirs"), ("interrupt", -signal.SIGINT, "KeyboardInterrupt")]
)
@pytest.mark.slow
def test_how_a_script_ends(ends: tuple[Path, dict[str, int]], end: str, code: int, last: str) -> None:
    """sys.exit, an exception and Ctrl-C in the middle of a step: the exit code and the last line are the script's, but for the words of the
    probe behind it; the files are complete."""
    here, codes = ends
    assert codes[end] == code
    said = (here / end / "stderr").read_text()
    assert ln.without_last_words(said).rstrip().endswith(last)
    assert said.count(ln.CLOSING_WORDS) == 1
    check(here / end / "out", 1, 3, cut_off=3)


def ended(line: list[str], here: Path, start: Callable[..., subprocess.Popen[str]]) -> tuple[int, str]:
    """Exit code and errors of a job of two ranks whose launcher is asked to end while both ranks wait."""
    process = start(line, here)
    assert process.stdout is not None
    waiting = 0
    while waiting < 2:
        text = process.stdout.readline()
        assert text, process.communicate()[1]
        waiting += text.count("waiting")  # two ranks may write into one line
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=240)
    return process.returncode, err


def bare(line: list[str], cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        line, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ln.environment(), start_new_session=True
    )


@pytest.mark.slow
def test_a_scheduler_ends_the_job(here: Path) -> None:
    """SIGTERM to torchrun, which hands it to the ranks: exit code and the agent's report are those without the probe, the files are
    complete, and nobody had to be killed."""
    (here / "waits.py").write_text("import time\nprint('waiting', flush=True)\ntime.sleep(60)\n")  # to the agent, a rank is any program
    with_probe, err = ended(torchrun(JOB, "wait", "3"), here, started)
    without, err_without = ended(torchrun("waits.py"), here, bare)
    assert with_probe == without
    assert err.splitlines()[-1] == err_without.splitlines()[-1] or "SignalException" in err
    assert "SIGKILL" not in err
    check(here / "out", 2, 3, cut_off=3)


@pytest.mark.slow
def test_a_rank_that_fails(here: Path) -> None:
    """One rank raises, the agent ends the other one by SIGTERM: the report names the first failure, files of both ranks are complete."""
    fault = "    if os.environ['RANK'] == '1':\n        raise ValueError('of rank 1')\n"
    (here / "job.py").write_text(Path(JOB).read_text().replace("def end() -> None:\n", f"def end() -> None:\n{fault}"))
    process = started(torchrun("job.py", "wait", "3"), here)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "ValueError: of rank 1" in err
    check(here / "out", 2, 3, cut_off=3)


@pytest.mark.slow
def test_accelerate_launch(here: Path) -> None:
    """Accelerate's launcher starts a script of plain torch: followed; the launcher itself, which imports torch, is not."""
    process = started([sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", JOB, "done", "9"], here)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    check(here / "out", 1, STEPS)
