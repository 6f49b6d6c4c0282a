"""Incidents over real processes with a real TCPStore and gloo: agreement, disagreement, death."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest

from msprobe_engine.core.settings.schema import IncidentSettings
from msprobe_engine.find.nonfinite.nan_analyze import nan_analyze
from msprobe_engine.probe.incident import merge, writer
from msprobe_engine.probe.incident.manager import IncidentManager
from msprobe_engine.probe.incident.notify import DirectoryNotifier, Notifier, StoreNotifier

torch = pytest.importorskip("torch")
dist = torch.distributed
pytestmark = pytest.mark.framework

Body = Callable[[int, IncidentManager, Any, Callable[..., Any], Callable[..., Any]], None]


def die() -> NoReturn:
    """Killed as by ``kill -9``. On some systems the signal arrives a little later; nothing else is done until then."""
    os.kill(os.getpid(), signal.SIGKILL)
    while True:
        time.sleep(1)


def run(body: Body, world: int, directory: Path, frame: Any, alert: Any, kind: str = "store", **settings: Any) -> list[int | None]:
    """Fork `world` ranks; returns their exit codes. The store's server lives in this process and outlives every rank; it is made behind
    the forks, because a child that is forked beside its thread may inherit a lock that nobody opens."""
    context = multiprocessing.get_context("fork")
    port = context.Value("i", 0)

    def child(rank: int) -> None:
        torch.set_num_threads(1)
        while not port.value:
            time.sleep(0.005)
        client = dist.TCPStore("127.0.0.1", port.value, is_master=False, timeout=timedelta(seconds=20))
        notifier: Notifier
        if kind == "store":
            notifier = StoreNotifier(client, patience=10)
        else:
            notifier = DirectoryNotifier(directory / "events", patience=10)
        manager = IncidentManager(IncidentSettings(**settings), output_dir=directory, rank=rank, world_size=world, notifier=notifier)
        client.add("ready", 1)
        while client.add("ready", 0) < world:  # ranks of a job have met before they train
            time.sleep(0.005)
        body(rank, manager, dist, frame, alert)
        manager.close()
        os._exit(0)

    processes = [context.Process(target=child, args=(rank,)) for rank in range(world)]
    for process in processes:
        process.start()
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    port.value = server.port
    for process in processes:
        process.join(60)
        if process.is_alive():
            process.kill()
            process.join()
    del server
    return [process.exitcode for process in processes]


@pytest.mark.parametrize("kind", ["store", "directory"])
def test_coupled_ranks_capture_the_same_step(tmp_path: Path, frame: Any, alert: Any, kind: str) -> None:
    """With one collective per step, a NaN that only rank 1 sees in step 3 makes both ranks capture step 5."""

    def body(rank: int, manager: IncidentManager, dist: Any, frame: Any, alert: Any) -> None:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=rank, world_size=2)
        for step in range(12):
            if rank == 0 and step % 3 == 0:
                time.sleep(0.01)  # ranks drift as far as the collective lets them
            dist.all_reduce(torch.ones(1))
            bad = rank == 1 and step == 3
            manager.on_frame(frame(step, rank, bad=bad), [alert(step, rank)] if bad else [])
        (tmp_path / f"request{rank}.json").write_text(json.dumps([request.first_step for request in manager.requests]))
        dist.barrier()

    assert run(body, 2, tmp_path, frame, alert, kind) == [0, 0]
    assert [json.loads((tmp_path / f"request{rank}.json").read_text()) for rank in range(2)] == [[5], [5]]
    incident = json.loads((tmp_path / "incidents/step3-nan_inf/incident.json").read_text())
    assert incident["ranks_complete"] == [0, 1]
    assert incident["ranks_late"] == []
    assert incident["first_nonfinite"] == [incident["first_nonfinite"][0]]
    assert incident["first_nonfinite"][0]["rank"] == 1
    found = nan_analyze(tmp_path / "incidents/step3-nan_inf").findings
    assert [(item["step"], item["rank"], item["op_name"]) for item in found] == [(3, 1, "Module.fc.Linear.forward.0")]


def test_ranks_that_disagree(tmp_path: Path, frame: Any, alert: Any) -> None:
    """Two ranks that raise different rules in the same step both end up in both directories, and nothing else appears."""

    def body(rank: int, manager: IncidentManager, dist: Any, frame: Any, alert: Any) -> None:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=rank, world_size=2)
        for step in range(6):
            dist.all_reduce(torch.ones(1))
            rule = ("nan_inf", "turbulence")[rank]
            manager.on_frame(frame(step, rank), [alert(step, rank, rule=rule)] if step in (2, 3) else [])
        dist.barrier()

    assert run(body, 2, tmp_path, frame, alert) == [0, 0]
    made = sorted(path.name for path in (tmp_path / "incidents").iterdir())
    assert set(made) <= {"step2-nan_inf", "step2-turbulence"}
    assert made
    for name in made:
        assert json.loads((tmp_path / "incidents" / name / "incident.json").read_text())["ranks_complete"] == [0, 1]


def test_killed_rank_is_missing(tmp_path: Path, frame: Any, alert: Any) -> None:
    """A rank killed with -9 is listed as missing; the others write, and nan_analyze works with what is there."""

    def body(rank: int, manager: IncidentManager, dist: Any, frame: Any, alert: Any) -> None:  # noqa: ARG001
        for step in range(3):
            manager.on_frame(frame(step, rank), [])
        gone = tmp_path / "gone"
        if rank == 2:
            gone.touch()
            die()
        if rank == 0:
            while not gone.exists():  # it must not hear of the incident first
                time.sleep(0.005)
            manager.on_frame(frame(3, rank, bad=True), [alert(3, rank)])
            return
        for step in range(3, 400):
            manager.on_frame(frame(step, rank), [])
            if manager.incidents:
                return
            time.sleep(0.01)

    assert run(body, 3, tmp_path, frame, alert) == [0, 0, -signal.SIGKILL]
    directory = tmp_path / "incidents/step3-nan_inf"
    incident = json.loads((directory / "incident.json").read_text())
    assert (incident["ranks_complete"], incident["ranks_missing"]) == ([0, 1], [2])
    assert "ranks 2: wrote nothing" in (directory / "summary.md").read_text()
    found = nan_analyze(directory)
    assert [item["rank"] for item in found.findings] == [0]
    assert found.problems[0].startswith("ranks 2: wrote nothing of this incident")


def test_rank_killed_while_it_writes(tmp_path: Path, frame: Any, alert: Any) -> None:
    """A rank killed in the middle of writing its incident is listed as not finished, and its steps stay readable."""

    def body(rank: int, manager: IncidentManager, dist: Any, frame: Any, alert: Any) -> None:  # noqa: ARG001
        if rank == 1:
            from msprobe_engine.probe.incident import writer

            append = writer.append_step

            def dies_at_second_step(path: Path, step: int, parts: Any) -> None:
                if step == 1:
                    die()
                append(path, step, parts)

            writer.append_step = dies_at_second_step  # type: ignore[attr-defined]
        for step in range(3):
            manager.on_frame(frame(step, rank, bad=step == 0), [alert(step, rank)] if step == 2 else [])
        if rank == 0:  # a rank that writes later sees the other's state
            for _ in range(500):
                if (tmp_path / "incidents/step2-nan_inf/ring_rank1.steps").exists():
                    break
                time.sleep(0.01)
            time.sleep(0.2)
            manager.incidents.clear()
            manager.on_frame(frame(3, rank), [alert(2, rank)])

    assert run(body, 2, tmp_path, frame, alert) == [0, -signal.SIGKILL]
    directory = tmp_path / "incidents/step2-nan_inf"
    incident = json.loads((directory / "incident.json").read_text())
    assert (incident["ranks_complete"], incident["ranks_writing"]) == ([0], [1])
    assert [(i["step"], i["rank"]) for i in nan_analyze(directory).findings] == [(0, 0), (0, 1)]


@pytest.mark.parametrize("victim", [0, 3], ids=["it announced the incident", "it did not"])
def test_the_rank_that_merges_is_killed(tmp_path: Path, frame: Any, alert: Any, victim: int) -> None:
    """The last rank to finish is called to merge, and is killed before the merged file has its name. The others train on, one of them
    merges in a later step, and what the dead rank had written is in it."""
    world, directory, gone = 4, tmp_path / "incidents/step3-nan_inf", tmp_path / "gone"

    def body(rank: int, manager: IncidentManager, dist: Any, frame: Any, alert: Any) -> None:  # noqa: ARG001
        finish = merge.finish

        def finish_last(place: Path, mine: int, ranks: int) -> None:
            until(lambda: (place / merge.FINISHED).exists() and (place / merge.FINISHED).stat().st_size == 8 * (world - 1))
            finish(place, mine, ranks)

        def die_merging(*_: Any) -> None:
            gone.touch()
            die()

        merge.is_called = lambda number, ranks: number == ranks  # type: ignore[assignment]
        if rank == victim:
            writer.finish, merge.write_json = finish_last, die_merging  # type: ignore[assignment]
        for step in range(4):
            manager.on_frame(frame(step, rank, bad=step == 3 and rank == 0), [alert(3, 0)] if step == 3 and rank == 0 else [])
        for step in range(4, 60):
            manager.on_frame(frame(step, rank), [])
            if manager.incidents:
                until(gone.exists)
            time.sleep(0.01)

    codes = run(body, world, tmp_path, frame, alert)
    assert codes == [-signal.SIGKILL if rank == victim else 0 for rank in range(world)]
    merged = json.loads((directory / "incident.json").read_text())
    assert (merged["ranks_complete"], merged["ranks_missing"]) == (list(range(world)), [])
    assert merged["announced_by"] == 0
    assert (directory / "summary.md").is_file()


def until(there: Callable[[], bool]) -> None:
    """Wait until something is so."""
    end = time.monotonic() + 30
    while not there():
        assert time.monotonic() < end
        time.sleep(0.01)
