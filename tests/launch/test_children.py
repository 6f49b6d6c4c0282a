"""Processes that a training starts, and two trainings in one directory at once: nobody's files get anything of the other's."""

from __future__ import annotations

import json
import re
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launching as ln
import pytest

from msprobe_engine.config.pack.reader import read_pack

pytestmark = pytest.mark.framework
JOB = str(Path(__file__).with_name("parent_job.py"))
SETTINGS = """\
output_dir: out
monitor: {gradients: true}
rules: [{rule: nan_inf}]
sinks: {csv: {enabled: true}, jsonl: {enabled: true}, sqlite: {enabled: true}, tensorboard: {enabled: true}}
dump: {level: L0}
"""
STEPS = 6
_TIMES = ("time", "started", "started_unix", "launch")
_TIMES_OF_DUMP = re.compile(rb'^ "(run_began|step_ended)": [\d.]+,\n', re.MULTILINE)
HOW = ("subprocess", "early", "explicit", "debugger", "fork", "spawn")
_ALL_WAYS = ("torchrun", "one process")
"""Of the other launchers, which take long to start, one way is enough: what differs is what their environment hands on."""


def torchrun(*words: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *words]


def accelerate(*words: str) -> list[str]:
    options = [
        "--num_processes",
        "2",
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
        "--main_process_port",
        "0",
    ]
    return [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", *options, *words]  # without it 1 process on a CPU


def deepspeed(*words: str) -> list[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return [sys.executable, "-m", "deepspeed.launcher.runner", "--no_local_rank", "--num_gpus", "2", "--master_port", str(port), *words]


LAUNCHERS: dict[str, Callable[..., list[str]]] = {
    "torchrun": torchrun,
    "one process": lambda *words: [sys.executable, *words],
    "accelerate": accelerate,
    "deepspeed": deepspeed,
}


def train(directory: Path, how: str, launcher: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """``msprobe run -- [torchrun] parent_job.py``."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "probe.yaml").write_text(SETTINGS)
    command = LAUNCHERS[launcher](JOB, how, str(directory / "probe.yaml"))
    done = ln.run(*command, cwd=directory, env=ln.environment(**variables))
    assert done.returncode == 0, done.stderr
    return done


def artifacts(root: Path) -> dict[str, Any]:
    """What a run has written, apart from times, process ids and what is in ``run-*``."""
    found: dict[str, Any] = {}
    for path in sorted(root.rglob("*")):
        place = path.relative_to(root)
        if not path.is_file() or place.parts[0].startswith("run-"):
            continue
        name = re.sub(r"proc\d+", "proc", str(place))
        name = re.sub(r"[A-Z][a-z]{2}\d\d_[\d-]+-(rank\d)-[0-9a-f]{8}", r"\1", name)
        name = re.sub(r"tfevents\.\d+\.(rank\d)\.\d+\.[0-9a-f]+", r"tfevents.\1", name)
        assert name not in found, f"{name} twice"
        found[name] = content(path)
    return found


def content(path: Path) -> Any:
    if path.suffix == ".jsonl":
        return [without_times(json.loads(line)) for line in path.read_text().splitlines()]
    if path.name == "run.json":
        return without_times(json.loads(path.read_text()))
    if path.suffix == ".db":
        with sqlite3.connect(path) as base:
            tables = [name for (name,) in base.execute("select name from sqlite_master where type = 'table'") if "sqlite" not in name]
            return {name: [row for row in base.execute(f"select * from {name}") if "step_seconds" not in row] for name in tables}
    if path.suffix == ".csv":
        return [line for line in path.read_text().splitlines() if "step_seconds" not in line]
    if path.suffix == ".zip":
        return read_pack(path).names
    if "tfevents" in path.name:
        return path.stat().st_size
    if path.name == "dump.json":
        rest, times = _TIMES_OF_DUMP.subn(b"", path.read_bytes())
        assert times == 2, path
        return rest
    return path.read_bytes()


def without_times(value: dict[str, Any]) -> dict[str, Any]:
    return {
        key: {k: v for k, v in one.items() if k not in ("step_seconds", *_TIMES)} if isinstance(one, dict) else one
        for key, one in value.items()
        if key not in _TIMES
    }


@pytest.fixture(scope="module", params=LAUNCHERS)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], list[str]]:
    """The launcher, and files and losses of the training without a child."""
    if request.param in ("accelerate", "deepspeed"):
        pytest.importorskip(request.param)
    directory = tmp_path_factory.mktemp("alone")
    train(directory, "none", request.param)
    return request.param, artifacts(directory / "out"), losses(directory)


def losses(directory: Path) -> list[str]:
    return [path.read_text() for path in sorted(directory.glob("loss*.txt"))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alone", "how"), [(name, how) for name in LAUNCHERS for how in (HOW if name in _ALL_WAYS else HOW[:1])], indirect=["alone"]
)
def test_a_child_changes_nothing_of_its_parents(how: str, alone: tuple[str, dict[str, Any], list[str]], tmp_path: Path) -> None:
    """Started before the training or in the middle of it, with everything that the environment hands on."""
    launcher, expected, trained = alone
    done = train(tmp_path, how, launcher)
    assert losses(tmp_path) == trained
    found = artifacts(tmp_path / "out")
    assert found.keys() == expected.keys()
    for name in expected:
        if not name.endswith("run.json") and ".db" not in name:
            assert found[name] == expected[name], name
    assert not (tmp_path / "out" / "config_check_pack.previous.zip").exists()
    own = sorted(path.name for path in (tmp_path / "out").glob("run-*"))
    if how in ("explicit", "early"):
        assert own == ["run-2"]
        assert done.stderr.count("this one writes in run-2") == 1
        assert done.stderr.count("which has started this one and may train, too") == (how == "early")
        lines = [json.loads(line) for line in (tmp_path / "out" / "run-2" / "jsonl" / "rank0.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "step" in line] == [0, 1, 2]
    elif how == "debugger":
        assert own == ["run-2"]
        dump = tmp_path / "out" / "run-2" / "dump"
        assert sorted(path.name for path in dump.glob("step*")) == ["step0", "step1", "step2"]
    else:
        assert own == []
        assert done.stderr.count("no probe in this process") == (how != "fork")


@pytest.mark.slow
def test_trainings_of_a_program_that_imports_a_framework_are_runs_of_their_own(tmp_path: Path) -> None:
    """A wrapper that looks at the devices and starts one training after the other: each has a directory, which is said."""
    (tmp_path / "probe.yaml").write_text(SETTINGS)
    wrapper = "import subprocess, sys, torch\nfor _ in range(2):\n    subprocess.run([sys.executable, *sys.argv[1:]], check=True)\n"
    (tmp_path / "wrapper.py").write_text(wrapper)
    done = ln.run(sys.executable, "wrapper.py", JOB, "none", "probe.yaml", cwd=tmp_path, env=ln.environment())
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["run-2", "run-3"]
    for name in ("run-2", "run-3"):
        assert f"this one writes in {name} (parent_job.py, process " in done.stderr
        lines = [json.loads(text) for text in (tmp_path / "out" / name / "jsonl" / "rank0.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "step" in line] == list(range(STEPS))
        assert len(list((tmp_path / "out" / name / "dump" / "step0").iterdir())) == 1


@pytest.mark.slow
def test_a_child_may_have_a_probe_with_a_directory_of_its_own(tmp_path: Path) -> None:
    """MSPROBE_CHILDREN=1."""
    done = train(tmp_path, "subprocess", "one process", MSPROBE_CHILDREN="1")
    steps = [json.loads(line).get("step") for line in (tmp_path / "out" / "jsonl" / "rank0.jsonl").read_text().splitlines()]
    assert [step for step in steps if step is not None] == list(range(STEPS))
    own = tmp_path / "out" / "run-2"
    steps = [json.loads(line).get("step") for line in (own / "jsonl" / "rank0.jsonl").read_text().splitlines()]
    assert [step for step in steps if step is not None] == [0, 1, 2]
    assert (own / "config_check_pack.zip").is_file()
    assert "no probe in this process" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("alone", _ALL_WAYS, indirect=True)
def test_two_trainings_in_one_directory_at_once_are_two_runs(alone: tuple[str, dict[str, Any], list[str]], tmp_path: Path) -> None:
    """All sinks, dumps and the pack of both are whole, and those of the first are where they always are."""
    launcher, expected, _ = alone
    ranks = 1 if launcher == "one process" else 2
    (tmp_path / "probe.yaml").write_text(SETTINGS)
    words = [JOB, "none", str(tmp_path / "probe.yaml")]

    def line() -> list[str]:
        return [sys.executable, "-m", "msprobe_engine.cli.main", "run", "-c", "probe.yaml", "--", *LAUNCHERS[launcher](*words)]

    keys: dict[str, Any] = {"cwd": tmp_path, "text": True, "stderr": subprocess.PIPE}
    # The first is held in its last step until the second is through.
    first = subprocess.Popen(line(), env=ln.environment(JOB_WAITS="go"), **keys)
    ln.wait_for(lambda: len(list(tmp_path.glob("waiting*"))) == ranks)
    second = subprocess.run(line(), env=ln.environment(), timeout=240, check=False, **keys)
    (tmp_path / "go").write_text("")
    _, said = first.communicate(timeout=240)
    assert (first.returncode, second.returncode) == (0, 0), said + second.stderr
    assert "this one writes in run-2" in second.stderr
    assert "lost" not in said + second.stderr
    for root in (tmp_path / "out", tmp_path / "out" / "run-2"):
        found = artifacts(root)
        assert found.keys() == expected.keys()
        for name in expected:
            if not name.endswith("run.json") and ".db" not in name:
                assert found[name] == expected[name], name
    report = ln.msprobe("monitor", "report", "out/monitor", "-o", "report", cwd=tmp_path)
    assert "restart" not in report.stdout + report.stderr
    assert report.returncode == 0, report.stderr


@pytest.mark.slow
def test_a_start_right_after_a_kill_goes_on_in_the_same_directory(tmp_path: Path) -> None:
    """The killed one owns nothing any more; what it has left is that of an earlier run."""
    (tmp_path / "probe.yaml").write_text(SETTINGS)
    line = [sys.executable, "-m", "msprobe_engine.cli.main", "run", "-c", "probe.yaml", "--", sys.executable, JOB, "none", "probe.yaml"]
    first = subprocess.Popen(line, cwd=tmp_path, env=ln.environment(JOB_WAITS="never"), stderr=subprocess.PIPE, text=True)
    ln.wait_for(lambda: any(tmp_path.glob("waiting*")))
    first.kill()
    second = subprocess.run(line, cwd=tmp_path, env=ln.environment(), capture_output=True, text=True, timeout=240, check=False)
    first.communicate()
    assert second.returncode == 0, second.stderr
    assert not list((tmp_path / "out").glob("run-*"))
    lines = [json.loads(text) for text in (tmp_path / "out" / "jsonl" / "rank0.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "step" in line]
    assert steps[-STEPS:] == list(range(STEPS))
    assert steps[:-STEPS] == list(range(len(steps) - STEPS))
    assert not (tmp_path / "out" / ".owners").exists()


@pytest.mark.slow
def test_an_elastic_restart_after_a_kill_is_a_restart(tmp_path: Path) -> None:
    """Rank 1 is killed by SIGKILL in step 3 of its first launch: torchrun starts all ranks again, and they go on in the same files."""
    (tmp_path / "probe.yaml").write_text(SETTINGS)
    words = ["--max_restarts", "1", JOB, "killed once", "probe.yaml"]
    done = ln.run(*torchrun(*words), cwd=tmp_path, env=ln.environment())
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "out").glob("run-*"))
    for rank in range(2):
        lines = [json.loads(text) for text in (tmp_path / "out" / "jsonl" / f"rank{rank}.jsonl").read_text().splitlines()]
        steps = [line["step"] for line in lines if "step" in line]
        assert steps[-STEPS:] == list(range(STEPS))
        assert len(steps) > STEPS
        assert steps[:-STEPS] == list(range(len(steps) - STEPS))
        assert len([line for line in lines if "run" in line]) >= 2
