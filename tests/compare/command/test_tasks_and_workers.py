"""Tasks of a comparison: on processes, on a Dask cluster, after a worker was killed, after an interruption."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from driver_dumps import pair

from msprobe_engine.align.sources import pair_paths
from msprobe_engine.align.tasks import Task
from msprobe_engine.core.errors import DumpFormatError, UsageError
from msprobe_engine.core.process.jobs import cluster, run_jobs
from msprobe_engine.formats.dump.replicas import far as far_reading
from msprobe_engine.formats.dump.replicas.far import Answer
from msprobe_engine.formats.dump.replicas.reader import ReplicaReader
from msprobe_engine.formats.dump.replicas.shared_columns import SharedColumns
from msprobe_engine.formats.dump.replicas.template import read_text
from msprobe_engine.measure.options import CompareOptions
from msprobe_engine.report.table.api import compare_dumps
from msprobe_engine.report.table.manifest import Manifest, absolute_options, absolute_task
from msprobe_engine.report.table.rank_table import Result, build_failed_result, compare_guarded


def _work(tmp_path: Path) -> partial[Result]:
    return partial(compare_guarded, options=CompareOptions(), output=str(tmp_path / "out"), stamp="20260101000000", keep=False)


@pytest.mark.parametrize("kind", ["serial", "threads", "processes"])
@pytest.mark.fast_cells("serial", "threads")
def test_every_way_gives_the_same_tables(tmp_path: Path, kind: str) -> None:
    """The bytes of the tables do not depend on where they were made."""
    tasks = pair_paths(*pair(tmp_path, 3, wrong=2)).tasks
    found = {task.rank: result for task, result in run_jobs(tasks, _work(tmp_path), build_failed_result, kind, 2, 2048)}
    assert sorted(found) == [0, 1, 2]
    assert all(not result.problems for result in found.values())
    serial = [compare_guarded(task, CompareOptions(), str(tmp_path / "serial"), "20260101000000", False) for task in tasks]
    for rank, result in found.items():
        assert Path(result.files[0]).read_bytes() == Path(serial[rank].files[0]).read_bytes()


def test_a_task_that_kills_its_process_is_said_and_the_others_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the system kills a process for memory: the pool is broken, what it held is done again one by one."""
    (tmp_path / "killing_work.py").write_text(
        "import os\nfrom msprobe_engine.report.table.rank_table import Result\n"
        "def work(task):\n    if task.rank == 1:\n        os._exit(9)\n    return Result(task.key)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import killing_work  # type: ignore[import-not-found]

    tasks = [Task(tmp_path, tmp_path, 0, rank, stem=f"rank{rank}") for rank in range(4)]
    found = {task.rank: result for task, result in run_jobs(tasks, killing_work.work, build_failed_result, "processes", 2, 2048)}
    assert sorted(found) == [0, 1, 2, 3]
    assert "was killed" in found[1].problems[0]
    assert not any(found[rank].problems for rank in (0, 2, 3))


def test_no_script_is_run_twice(tmp_path: Path) -> None:
    """A user's script that calls compare without asking for __main__ is not run again by the processes it starts."""
    target, golden = pair(tmp_path, 2)
    script = tmp_path / "script.py"
    script.write_text(
        "from msprobe_engine.report.table.api import compare_dumps\nfrom msprobe_engine.measure.options import CompareOptions\n"
        f"print('begun')\ncompare_dumps({str(target)!r}, {str(golden)!r}, {str(tmp_path / 'out')!r},"
        " CompareOptions(scheduler='processes', workers=2))\n"
    )
    import subprocess

    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.count("begun") == 1
    assert len(list((tmp_path / "out").glob("compare_result_rank*.csv"))) == 2


@pytest.mark.slow
def test_a_dask_cluster_of_two_workers_one_of_them_killed(tmp_path: Path) -> None:
    """What the killed worker had is done by the other one; all tables are there."""
    distributed = pytest.importorskip("distributed")
    tasks = pair_paths(*pair(tmp_path, 12, calls=200)).tasks
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        found = {}
        for task, result in run_jobs(tasks, _work(tmp_path), build_failed_result, "dask", 0, 2048, cluster.scheduler_address):
            if not found:
                os.kill(cluster.workers[0].pid, signal.SIGKILL)
            found[task.rank] = result
    assert sorted(found) == list(range(12))
    assert all(Path(result.files[0]).is_file() and not result.problems for result in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("command", ["compare", "graph", "diagnose", "nan_analyze", "trends"])
def test_three_workers_elsewhere_one_of_them_killed(tmp_path: Path, command: str) -> None:
    """The command with relative paths, on workers that run in directories of their own and lose one in the midst of its work, writes and
    says what it writes and says here, byte for byte but for the time in names."""
    distributed = pytest.importorskip("distributed")
    pair(tmp_path, 24, wrong=3, calls=300)
    near = subprocess.run(_words(command, "near"), cwd=tmp_path, capture_output=True, text=True)
    with _cluster(tmp_path) as (address, workers), distributed.Client(address) as client:
        far = subprocess.Popen([*_words(command, "far"), "--scheduler", address], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        busy: list[str] = []
        while not busy and far.poll() is None:
            busy = [worker for worker, tasks in client.processing().items() if tasks]
        assert busy
        workers[client.scheduler_info()["workers"][busy[0]]["name"]].kill()
        said, _ = far.communicate(timeout=240)
    assert near.returncode == far.returncode == (0 if command == "nan_analyze" else 1)
    assert _undated(said.encode()) == _undated(near.stdout.encode())
    assert _files(tmp_path / "far") == _files(tmp_path / "near")


@contextlib.contextmanager
def _cluster(place: Path) -> Iterator[tuple[str, dict[str, subprocess.Popen[bytes]]]]:
    """A scheduler and three workers by name, each in a directory of its own."""
    known = place / "scheduler.json"

    def start(name: str, *words: str) -> subprocess.Popen[bytes]:
        (place / name).mkdir()
        module = "distributed.cli.dask_scheduler" if name == "scheduler" else "distributed.cli.dask_worker"
        command = [sys.executable, "-m", module, "--scheduler-file", str(known), "--no-dashboard", *words]
        return subprocess.Popen(command, cwd=place / name, stderr=subprocess.DEVNULL)

    processes = {"scheduler": start("scheduler", "--host", "127.0.0.1", "--port", "0")}
    try:
        while not known.exists():
            time.sleep(0.05)
        for name in ("one", "two", "three"):
            processes[name] = start(name, "--name", name, "--nthreads", "1", "--no-nanny", "--local-directory", str(place / name))
        from distributed import Client

        address = json.loads(known.read_text())["address"]
        with Client(address) as client:
            client.wait_for_workers(3, timeout=240)
        yield address, processes
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def _words(command: str, out: str) -> list[str]:
    sides = {"compare": ["-tp", "target", "-gp", "golden"], "nan_analyze": ["target"]}.get(command, ["target", "golden"])
    return [sys.executable, "-m", "msprobe_engine.cli.main", command, *sides, "-o", out]


def _undated(content: bytes) -> bytes:
    return re.sub(rb"20\d{12}", b"TIME", content).replace(b"far/", b"near/")


def _files(directory: Path) -> dict[str, bytes]:
    """Undated name -> undated content of what a command has written."""
    return {_undated(path.name.encode()).decode(): _undated(path.read_bytes()) for path in directory.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_cluster_whose_workers_run_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths of dumps, output and mappings are those of whoever asks, not of the workers; the tables are those of this machine.
    All that is asked for inside of one connection goes over it, and what this machine's memory allows bounds nothing there."""
    distributed = pytest.importorskip("distributed")
    target, golden = pair(tmp_path, 2, wrong=1)
    (tmp_path / "names.yaml").write_text("{}\n")
    with distributed.LocalCluster(n_workers=1, threads_per_worker=1, processes=True, dashboard_address=None) as workers:
        monkeypatch.chdir(tmp_path)
        here, there = target.relative_to(tmp_path), golden.relative_to(tmp_path)
        options = CompareOptions(cell_mapping="names.yaml", memory_mb=0)
        with cluster(workers.scheduler_address):
            far = compare_dumps(here, there, "far", options, scheduler=workers.scheduler_address)
            assert [event["action"] for _, event in workers.scheduler.get_events("all")].count("add-client") == 1
    near = compare_dumps(here, there, "near", options)
    assert not far.all_problems
    assert [Path(a.files[0]).read_bytes() for a in far.results] == [Path(b.files[0]).read_bytes() for b in near.results]


def test_what_goes_to_another_directory_has_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    task = absolute_task(Task(Path("a/dump.json"), Path("b/dump.json"), calibration=(Path("c"),)))
    assert (task.target, task.golden, task.stack, task.calibration) == (
        tmp_path / "a/dump.json",
        tmp_path / "b/dump.json",
        None,
        (tmp_path / "c",),
    )
    options = absolute_options(CompareOptions(cell_mapping="m.yaml", api_mapping=True, metrics=(Path("n.py"),), postprocess={"a": 1}))
    assert (options.cell_mapping, options.metrics) == (str(tmp_path / "m.yaml"), (tmp_path / "n.py",))
    assert (options.api_mapping, options.postprocess, options.data_mapping) == (True, {"a": 1}, None)


def test_no_cluster_at_the_address() -> None:
    """Said with the address and what to give."""
    pytest.importorskip("distributed")
    with pytest.raises(UsageError, match="tcp://host:port"):
        list(run_jobs([], lambda task: Result(task.key), build_failed_result, "dask", 0, 64, "nonsense://x"))


def test_an_interrupted_comparison_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables that are there are kept when the same comparison is called again; a changed dump is compared anew."""
    target, golden = pair(tmp_path, 3)
    import msprobe_engine.report.table.api as api

    real = api.compare_guarded

    def stops(task: Task, **kwargs: object) -> Result:
        if task.rank == 2:
            raise KeyboardInterrupt
        return real(task, **kwargs)  # type: ignore[arg-type]

    options = CompareOptions(workers=1)
    monkeypatch.setattr(api, "compare_guarded", stops)
    with pytest.raises(KeyboardInterrupt):
        compare_dumps(target, golden, tmp_path / "out", options)
    first = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*.csv")}
    assert len(first) == 2
    monkeypatch.setattr(api, "compare_guarded", real)
    file = target / "step0/rank0/dump.json"
    os.utime(file, ns=(0, 0))
    found = compare_dumps(target, golden, tmp_path / "out", options)
    assert "1 of 3 tables" in found.notes[-1]
    after = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*.csv")}
    assert len(after) == 3
    assert [name for name, time in first.items() if after[name] == time] == [name for name in first if "rank1" in name]
    assert not list((tmp_path / "out").glob(".*"))


def test_a_damaged_manifest_is_no_manifest(tmp_path: Path) -> None:
    """It is written anew."""
    (tmp_path / ".compare_k.json").write_text('{"stamp": 3')
    manifest = Manifest(tmp_path, "k")
    assert len(manifest.stamp) == 14
    assert manifest.find_result(Task(tmp_path, tmp_path)) is None


def test_what_is_done_is_noted_line_by_line(tmp_path: Path) -> None:
    """A task adds a line, however many were there; what a killed process has left of its last line is left out."""
    manifest, tasks = Manifest(tmp_path, "k"), []
    sizes = [0]
    for rank in range(50):
        file = tmp_path / f"{rank:02}.json"
        file.write_text("{}")
        tasks.append(Task(file, file, stem=f"result{rank:02}"))
        manifest.add_result(tasks[-1], Result(tasks[-1].key))
        sizes.append((tmp_path / ".compare_k.json").stat().st_size)
    assert max(b - a for a, b in itertools.pairwise(sizes[1:])) < 2 * (sizes[2] - sizes[1])
    with (tmp_path / ".compare_k.json").open("r+b") as written:
        written.truncate(sizes[-1] - 20)
    again = Manifest(tmp_path, "k")
    assert again.stamp == manifest.stamp
    assert [again.find_result(task) is not None for task in tasks] == [True] * 49 + [False]
    again.add_result(tasks[-1], Result(tasks[-1].key))
    assert Manifest(tmp_path, "k").find_result(tasks[-1]) is not None


@pytest.mark.parametrize("stamp", ["../../20260101000000", "2026", "\u0662" * 14])
def test_a_forged_manifest_names_no_file(tmp_path: Path, stamp: str) -> None:
    """Its time becomes part of file names, so nothing but a time is taken."""
    (tmp_path / ".compare_k.json").write_text(json.dumps({"stamp": stamp, "done": {"a": 1}}))
    assert Manifest(tmp_path, "k").stamp != stamp


def test_two_comparisons_in_one_second(tmp_path: Path) -> None:
    """They write files of their own, and what held the names is gone."""
    both = [Manifest(tmp_path, "a"), Manifest(tmp_path, "b")]
    assert both[0].stamp != both[1].stamp
    target, golden = pair(tmp_path, 1)
    stamps = {compare_dumps(target, golden, tmp_path, suffix=str(i)).summary for i in range(3)}
    assert len(stamps) == 3
    for manifest in both:
        manifest.release()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_ranks_that_workers_read_are_those_that_are_read_here(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Equal ranks, ranks with saved tensors and a rank whose file is damaged: the same columns and the same error; a file that workers do
    not see is read here, which is said."""
    distributed = pytest.importorskip("distributed")
    target, _ = pair(tmp_path, 6, wrong=2)
    files = [target / f"step0/rank{rank}/dump.json" for rank in range(6)]
    files[3].write_text(files[3].read_text().replace('"statistics"', '"tensor"'))
    files[4].write_text(files[4].read_text()[:-40])
    with distributed.LocalCluster(n_workers=1, processes=False, dashboard_address=None) as cluster:
        far, here = ReplicaReader(SharedColumns(), scheduler=cluster.scheduler_address), ReplicaReader(SharedColumns())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(far_reading, "_answer_for_file", partial(_look_but, hidden=files[5]))
            far.expect(files)
    assert [record.getMessage() for record in caplog.records if "1 of 6 files, the first is" in record.getMessage()]
    for file in files:
        told = [_columns(reader, file) for reader in (far, here)]
        assert told[0] == told[1]
        assert told[0][0]


def test_workers_read_each_file_once(tmp_path: Path) -> None:
    """Also of files that are like no other; what changes behind the reading is not mixed with what was read."""
    distributed = pytest.importorskip("distributed")
    target, _ = pair(tmp_path, 3)
    files = [target / f"step0/rank{rank}/dump.json" for rank in range(3)]
    files[1].write_text(files[1].read_text().replace('"Max": ', '"Max": 1'))
    here, read = ReplicaReader(SharedColumns()), list[Path]()
    expected = [_columns(here, file) for file in files]
    with distributed.LocalCluster(n_workers=1, processes=False, dashboard_address=None) as cluster:
        far = ReplicaReader(SharedColumns(), scheduler=cluster.scheduler_address)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(far_reading, "read_text", lambda file: (read.append(file), read_text(file))[1])
            far.expect(files)
    for file in files:
        file.write_text("{")  # nothing is read here again
    assert sorted(read) == files
    assert [_columns(far, file) for file in files] == expected


_look = far_reading._answer_for_file


def _look_but(call: str, file: Path, hidden: Path) -> Answer:
    return Answer(there=False) if file == hidden else _look(call, file)


def _columns(reader: ReplicaReader, file: Path) -> tuple[str, dict[str, Any]]:
    try:
        table = reader.read(file)
    except DumpFormatError as error:
        return str(error), {}
    return table.task, {name: list(getattr(table, name)) for name in ("ops", "name", "dtype", "shape", "numbers", "problems")} | {
        "": table.path
    }
