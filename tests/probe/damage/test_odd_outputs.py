"""A named pipe, a socket, a directory, a device or a link where an output of a training goes: the training ends with the same bits, waits
for nothing, and the log names the path and what was found there. What a link leads to stays as it was."""

from __future__ import annotations

import os
import socket
import stat
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import probe_ranks as pr
import pytest
from all_sinks import settings

from msprobe_engine.core.settings.schema import ProbeSettings, PrometheusSettings, SinkSettings
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_engine.probe.sinks.prometheus import node
from msprobe_integrations.torch.monitor.probe import TorchProbe

pytestmark = pytest.mark.framework
STEPS = 3
PRECIOUS = b"vpp_stage,name,step\nnot ours"
CSV = "monitor/Dec01_00-00-00-rank0-0123abcd"


def pipe(path: Path) -> None:
    os.mkfifo(path)


def bound_socket(path: Path) -> None:
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{directory}/{path.name}")  # a short name for a long path
    finally:
        os.close(directory)


def device(path: Path) -> None:
    """A device of our own, like /dev/full."""
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 7))
    except PermissionError as error:
        pytest.skip(f"devices cannot be made here: {error}")


class Kind(NamedTuple):
    """How something odd is made, and what the log calls it where a file, and where a directory belongs ("" there: it is followed)."""

    make: Callable[[Path], None]
    for_file: str
    for_directory: str


PIPE, LINK = "a named pipe (FIFO) is where", "a link is where"
KINDS = {
    "pipe": Kind(pipe, PIPE, PIPE),
    "socket": Kind(bound_socket, "a socket is where", "a socket is where"),
    "directory": Kind(lambda path: path.mkdir(), "a directory is where", ""),
    "link to nothing": Kind(lambda path: path.symlink_to("nowhere"), LINK, LINK),
    "link to a file": Kind(lambda path: path.symlink_to("precious"), LINK, LINK),
    "link to a device": Kind(lambda path: path.symlink_to("/dev/zero"), LINK, LINK),
    "link to a device that is full": Kind(lambda path: path.symlink_to("/dev/full"), LINK, LINK),
    "link to a device that takes all": Kind(lambda path: path.symlink_to("/dev/null"), LINK, LINK),
    "device": Kind(device, "a device is where", "a device is where"),
    "link to itself": Kind(lambda path: path.symlink_to(path.name), LINK, LINK),
}
PROBE_FILES = (
    f"{CSV}/grad_reduced_0-99.csv",
    f"{CSV}/scalars_0-99.csv",
    f"{CSV}/run.json",
    f"{CSV}/alerts.jsonl",
    "jsonl/rank0.jsonl",
    "trend/rank0.trend.db",
    "trend/rank0.trend.db-wal",
    "trend/rank0.trend.db-shm",
    "trend/rank0.trend.db-journal",
    "prom/msprobe_rank0.prom",
    "anomaly_detected/rank0/anomaly.json",
)
PROBE_DIRECTORIES = (
    "jsonl", "trend", "tensorboard", "tensorboard/rank0", "prom", "anomaly_detected", "incidents",
)  # fmt: skip
DUMP_REPLACED = ("dump.json", "stack.json", "construct.json", ".frame.bin", "not_saved.json")
"""Of the directory of a step, which a later run takes over: what is there goes, as the files of an earlier run do."""


FAST_KINDS = ("pipe", "directory", "link to a file")


def cells(places: Iterable[str], first: str, kinds: Iterable[str] = KINDS) -> list[Any]:
    """Every place with every kind. The fast tier has the place `first` with all kinds, and all places with a pipe, which waits for ever,
    and in turn one more of `FAST_KINDS`."""
    return [
        pytest.param(place, kind, marks=() if place == first or kind in ("pipe", FAST_KINDS[1 + number % 2]) else pytest.mark.slow)
        for number, place in enumerate(places)
        for kind in kinds
    ]


FOR_DIRECTORIES = [kind for kind, made in KINDS.items() if made.for_directory]


@contextmanager
def planted(root: Path, place: str, kind: Kind) -> Iterator[Path]:
    """Something odd at `place`; afterwards nothing was written through it."""
    path = root / place
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / "precious").write_bytes(PRECIOUS)
    kind.make(path)
    yield path
    assert (path.parent / "precious").read_bytes() == PRECIOUS
    assert not (path.parent / "nowhere").exists()


def scraped(setup: ProbeSettings) -> str:
    """What an endpoint answers after a step; of a rank without one nothing."""
    probe = TorchProbe(setup)
    job = pr.gpt.Job(pr.TINY)
    probe.attach(job.model, job.optimizer)
    probe.begin_step(0)
    probe.end_step({"loss": job.step()})
    probe.session.writer.flush()
    port = next((sink.port for sink in probe.session.writer.sinks if sink.name == "prometheus"), None)  # type: ignore[attr-defined]
    text = ""
    if port:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=240) as answer:
            text = answer.read().decode()
    probe.close()
    return text


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    value: dict[str, Any] = pr.run(pr.train_alone, STEPS, directory=tmp_path_factory.mktemp("reference"))[0].value
    return value


@pytest.mark.fast_cells(
    "monitor/Dec01_00-00-00-rank0-0123abcd/grad_reduced_0-99.csv-pipe",
    "monitor/Dec01_00-00-00-rank0-0123abcd/grad_reduced_0-99.csv-directory",
    "monitor/Dec01_00-00-00-rank0-0123abcd/scalars_0-99.csv-pipe",
    "monitor/Dec01_00-00-00-rank0-0123abcd/scalars_0-99.csv-link to a file",
    "monitor/Dec01_00-00-00-rank0-0123abcd/run.json-pipe",
    "monitor/Dec01_00-00-00-rank0-0123abcd/run.json-directory",
    "monitor/Dec01_00-00-00-rank0-0123abcd/alerts.jsonl-pipe",
    "monitor/Dec01_00-00-00-rank0-0123abcd/alerts.jsonl-link to a file",
)
@pytest.mark.parametrize(("place", "kind"), cells(PROBE_FILES, "jsonl/rank0.jsonl"))
def test_file_of_a_probe(tmp_path: Path, place: str, kind: str, reference: dict[str, Any]) -> None:
    with planted(tmp_path / "out", place, KINDS[kind]) as path:
        done = pr.run(pr.train_with_probe, settings(tmp_path / "out", place.partition("/")[0]), STEPS, directory=tmp_path)[0]
    assert pr.is_same_training(done.value, reference)
    assert done.lines(str(path), KINDS[kind].for_file, "move it away", "training goes on"), done.log


@pytest.mark.fast_cells("jsonl-pipe", "jsonl-socket", "jsonl-link to nothing", "jsonl-link to a file", "jsonl-link to a device")
@pytest.mark.parametrize(("place", "kind"), cells(PROBE_DIRECTORIES, "jsonl", FOR_DIRECTORIES))
def test_directory_of_a_probe(tmp_path: Path, place: str, kind: str, reference: dict[str, Any]) -> None:
    with planted(tmp_path / "out", place, KINDS[kind]) as path:
        done = pr.run(pr.train_with_probe, settings(tmp_path / "out", place.partition("/")[0]), STEPS, directory=tmp_path)[0]
    assert pr.is_same_training(done.value, reference)
    assert done.lines(str(path), KINDS[kind].for_directory, "move it away"), done.log


@pytest.mark.fast_cells("pipe", "link to a file")
@pytest.mark.parametrize("kind", FOR_DIRECTORIES)
def test_directory_of_the_claims(tmp_path: Path, kind: str, reference: dict[str, Any]) -> None:
    """Who writes in the directory cannot be told: that is said, and what is to be written is written."""
    with planted(tmp_path / "out", ".owners", KINDS[kind]) as path:
        done = pr.run(pr.train_with_probe, settings(tmp_path / "out", "jsonl"), STEPS, directory=tmp_path)[0]
    assert pr.is_same_training(done.value, reference)
    assert done.lines(str(path)), done.log
    assert (tmp_path / "out" / "jsonl" / "rank0.jsonl").is_file()


@pytest.mark.fast_cells("pipe", "link to a file")
@pytest.mark.parametrize("kind", FOR_DIRECTORIES)
def test_directory_of_an_incident(tmp_path: Path, kind: str, reference: dict[str, Any]) -> None:
    """The incident goes to a directory beside it, or is said to be lost."""
    with planted(tmp_path / "out", "incidents/step0-always", KINDS[kind]):
        done = pr.run(pr.train_with_probe, settings(tmp_path / "out", "incidents"), STEPS, directory=tmp_path)[0]
    assert pr.is_same_training(done.value, reference)
    written = list((tmp_path / "out/incidents").glob("step0-always*/incident.json"))
    assert written or done.lines("step0-always", KINDS[kind].for_directory, "training goes on"), done.log


@pytest.mark.fast_cells(
    "dump.json-pipe",
    "dump.json-socket",
    "dump.json-directory",
    "dump.json-link to nothing",
    "dump.json-link to a file",
    "dump.json-link to a device",
)
@pytest.mark.parametrize(("name", "kind"), cells([*DUMP_REPLACED, ".incomplete", "dump_tensor_data"], "dump.json"))
def test_file_of_a_dump(tmp_path: Path, name: str, kind: str, reference: dict[str, Any]) -> None:
    """What stands in the directory of a step is taken away like the files of an earlier run, or costs that step and is said; the other
    steps are whole."""
    config = pr.write_config(tmp_path, "L0", task="tensor", dump_path=str(tmp_path / "dump"))
    with planted(tmp_path / "dump", f"step0/rank3/{name}", KINDS[kind]) as path:
        done = pr.run(pr.train_with_debugger, config, STEPS, directory=tmp_path)[0]
    assert pr.is_same_training(done.value, reference)
    dump = open_dump(tmp_path / "dump")
    assert [dump.load(step, 3).complete for step in (1, 2)] == [True, True]
    said = done.lines(str(path), KINDS[kind].for_directory if name == "dump_tensor_data" else KINDS[kind].for_file, "move it away")
    assert said or (dump.load(0, 3).complete and not path.is_symlink()), done.log


@pytest.mark.fast_cells("step0-pipe", "step0/rank3-pipe", "step0/rank3-socket")
@pytest.mark.parametrize(("place", "kind"), cells(["step0", "step0/rank3"], "step0/rank3", FOR_DIRECTORIES))
def test_directory_of_a_dump(tmp_path: Path, place: str, kind: str, reference: dict[str, Any]) -> None:
    config = pr.write_config(tmp_path, "L0", dump_path=str(tmp_path / "dump"))
    with planted(tmp_path / "dump", place, KINDS[kind]) as path:
        done = pr.run(pr.train_with_debugger, config, STEPS, directory=tmp_path)[0]
    assert pr.is_same_training(done.value, reference)
    dump = open_dump(tmp_path / "dump")
    assert [dump.load(step, 3).complete for step in (1, 2)] == [True, True]
    assert done.lines(str(path), KINDS[kind].for_directory, "directory", "move it away"), done.log


@pytest.mark.fast_cells(*FAST_KINDS)
@pytest.mark.parametrize("kind", KINDS)
def test_table_of_the_free_benchmark(tmp_path: Path, kind: str, reference: dict[str, Any]) -> None:
    config = pr.write_config(tmp_path, "L1", task="free_benchmark", dump_path=str(tmp_path / "dump"))
    with planted(tmp_path / "dump", "free_benchmark_summary_rank3.csv", KINDS[kind]) as path:
        done = pr.run(pr.train_with_debugger, config, STEPS, directory=tmp_path)[0]
    assert pr.is_same_training(done.value, reference)
    assert done.lines(str(path), KINDS[kind].for_file, "move it away"), done.log


@pytest.mark.fast_cells(*FAST_KINDS)
@pytest.mark.parametrize("kind", KINDS)
def test_configuration_pack(tmp_path: Path, kind: str, reference: dict[str, Any]) -> None:
    with planted(tmp_path / "out", "config_check_pack.zip", KINDS[kind]) as path:
        done = pr.run(pr.train_with_probe, settings(tmp_path / "out", "jsonl"), STEPS, directory=tmp_path)[0]
    assert pr.is_same_training(done.value, reference)
    assert done.lines(str(path), KINDS[kind].for_file, "move it away"), done.log


@pytest.mark.fast_cells(*FAST_KINDS)
@pytest.mark.parametrize("kind", KINDS)
def test_snapshot_of_another_rank(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What rank 1 leaves for rank 0, which serves both: neither waits."""
    monkeypatch.setattr(node, "SHARED_MEMORY", tmp_path / "none")
    setup = replace(settings(tmp_path / "out", "none"), sinks=SinkSettings(prometheus=PrometheusSettings(enabled=True, port=0)))
    with planted(tmp_path / "out", "prometheus/node0/rank1.json", KINDS[kind]) as path:
        done = pr.run(scraped, setup, ranks=2, directory=tmp_path)
    assert "msprobe_snapshots_unreadable 1.0" in done[0].value
    assert done[1].lines(str(path), KINDS[kind].for_file, "move it away", "training goes on"), done[1].log
