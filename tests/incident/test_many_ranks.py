"""An incident of a large job: the work of all ranks together grows with their number, and no death leaves the merged file behind."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.core.settings.schema import IncidentSettings
from msprobe_engine.formats.monitor.alert_order import in_order, merge_equal_alerts
from msprobe_engine.formats.monitor.anomalies import from_alert, pipelines_of
from msprobe_engine.probe.incident import merge, pieces
from msprobe_engine.probe.incident.event import Event
from msprobe_engine.probe.incident.manager import IncidentManager
from msprobe_engine.probe.incident.notify import StoreNotifier
from msprobe_engine.probe.incident.writer import write_incident

EVENT = Event("step5-nan_inf", 5, "nan_inf", 1, 7, "rank 1 is NaN")


@pytest.mark.parametrize("ranks", [64, 256])
def test_all_ranks_together_read_few_files(tmp_path: Path, frame: Any, alert: Any, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's file is read about once, those of the first few more often; what the last one has written is of all ranks."""
    read: Counter[str] = Counter()
    once = pieces.read_piece
    monkeypatch.setattr(pieces, "read_piece", lambda path: read.update([path.name]) or once(path))
    for rank in range(ranks):
        write_incident(tmp_path, [frame(5, rank, entries=False)], [alert(5, rank)], event=EVENT, rank=rank, world_size=ranks)
    assert sum(read.values()) <= 16 * 17 / 2 + 1.5 * ranks
    merged = json.loads((tmp_path / "incident.json").read_text())
    assert merged["ranks_complete"] == list(range(ranks))
    assert [(one["rank"], one["ranks"]) for one in merged["alerts"]] == [(0, [f"0-{ranks - 1}"])], "what all say is written once"
    assert f"- ranks 0-{ranks - 1}, step 5, nan_inf (critical)" in (tmp_path / "summary.md").read_text()


def test_a_rank_that_will_write_again_does_not_count(tmp_path: Path, frame: Any, alert: Any) -> None:
    """A file that is not the last of its rank makes nobody merge."""
    write_incident(tmp_path, [frame(4, 0)], [alert(5, 0)], event=EVENT, rank=0, world_size=2, last=False)
    assert not (tmp_path / "incident.json").exists()
    write_incident(tmp_path, [frame(5, 0)], [alert(5, 0)], event=EVENT, rank=0, world_size=2)
    assert json.loads((tmp_path / "incident.json").read_text())["ranks_complete"] == [0]


@pytest.mark.parametrize("survivor", [0, 1, 32], ids=["the announcer lives", "the deputy lives", "a whole node has died, and all but one"])
def test_whoever_dies_the_merged_file_is_of_all_that_wrote(
    tmp_path: Path, store: Any, frame: Any, alert: Any, survivor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of forty ranks the last ones never finish, so nobody is called any more. Who looks after the incident merges in a later step."""
    ranks, writing = 40, 37  # 16 is the last number that calls somebody

    def manager(rank: int) -> IncidentManager:
        return IncidentManager(
            IncidentSettings(), output_dir=tmp_path, rank=rank, world_size=ranks, notifier=StoreNotifier(store, patience=5)
        )

    managers = {rank: manager(rank) for rank in (0, 1, survivor)}
    kept = managers[survivor]
    for rank, each in managers.items():
        each.on_frame(frame(5, rank, bad=rank == 0), [alert(5, 0)] if rank == 0 else [])
    directory = tmp_path / "incidents" / "step5-nan_inf"
    said = pieces.read_piece(directory / "samples_rank0.jsonl")
    assert said is not None
    event = Event.from_json(said["event"])
    for rank in (rank for rank in range(2, writing) if rank != survivor):
        write_incident(directory, [frame(5, rank)], [], event=event, rank=rank, world_size=ranks)
    # A file that is merged in the tick of the clock in which the last rank wrote may lack it, and is made again: all of that is long ago.
    for path in directory.iterdir():
        os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - 1_000_000_000))
    merged = directory / "incident.json"
    assert len(json.loads(merged.read_text())["ranks_complete"]) == 16
    for step in range(6, 40):
        kept.on_frame(frame(step, survivor), [])
    assert json.loads(merged.read_text())["ranks_complete"] == list(range(writing))
    times: list[Path] = []
    once = merge.merge
    monkeypatch.setattr(merge, "merge", lambda path: times.append(path) or once(path))
    for step in range(40, 300):
        kept.on_frame(frame(step, survivor), [])
    for each in managers.values():
        each.close()
    assert not times, "what has not changed is not merged again"


def test_pipelines_and_alerts_of_many_ranks() -> None:
    """Who is in a pipeline, and which ranks say the same, is found without holding each rank against each."""
    ranks, asked = 3000, Counter[int]()

    class Info(dict[str, int]):
        def get(self, key: Any, default: Any = None) -> Any:
            asked["get"] += 1  # type: ignore[index]
            return super().get(key, default)

    infos = {rank: Info(dp=rank % 1500, tp=0, pp=rank // 1500) for rank in range(ranks)}
    pipelines = pipelines_of(infos)
    assert pipelines[7] == (0, (7, 1507))
    assert pipelines[1507] == (1, (7, 1507))
    assert sum(asked.values()) <= 6 * ranks
    alert = {"rule": "nan_inf", "step": 1, "name": "w", "severity": "critical", "extra": {"family": "grad_reduced"}}
    said = [from_alert(alert | {"rank": rank}, rank, pipelines) for rank in range(ranks)]
    assert [len(group.ranks) for group in merge_equal_alerts(in_order(one for one in said if one is not None))] == [1500, 1500]
