"""Starting and joining incidents."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.settings.schema import IncidentSettings
from msprobe_engine.find.nonfinite.incident_samples import load
from msprobe_engine.probe.incident.event import Event
from msprobe_engine.probe.incident.manager import CaptureRequest, IncidentManager
from msprobe_engine.probe.incident.notify import SilentNotifier, StoreNotifier
from msprobe_engine.probe.incident.pieces import read_piece


def managers(tmp_path: Path, store: Any, n: int = 2, **settings: Any) -> list[IncidentManager]:
    return [
        IncidentManager(IncidentSettings(**settings), output_dir=tmp_path, rank=r, world_size=n, notifier=StoreNotifier(store, patience=5))
        for r in range(n)
    ]


def test_other_rank_joins_and_captures_the_same_step(tmp_path: Path, store: Any, frame: Any, alert: Any) -> None:
    """A rank without an alert of its own writes its ring into the same directory and captures the agreed step."""
    a, b = managers(tmp_path, store)
    for step in range(5):
        assert a.on_frame(frame(step, 0), []) is None
        assert b.on_frame(frame(step, 1), []) is None
    first = a.on_frame(frame(5, 0, bad=True), [alert(5, 0)])
    second = b.on_frame(frame(5, 1), [])
    assert first == second == CaptureRequest("mix", 7, 1, tmp_path / "incidents/step5-nan_inf")
    assert b.on_frame(frame(6, 1), []) is None
    incident = json.loads((tmp_path / "incidents/step5-nan_inf/incident.json").read_text())
    assert incident["ranks_complete"] == [0, 1]
    assert incident["steps"] == [0, 1, 2, 3, 4, 5]
    assert a.capture_wanted(7) == first
    assert a.capture_wanted(6) is a.capture_wanted(8) is None
    for m in (a, b):
        m.close()


def test_ranks_that_are_not_chosen_write_one_file(tmp_path: Path, store: Any, frame: Any, alert: Any) -> None:
    """Where `incident.rank` names other ranks, a rank says what it saw and writes nothing else; one with an alert writes all the same. The
    merged file knows them all."""
    a, b = managers(tmp_path, store, rank=(7,))
    assert a.on_frame(frame(4, 0), []) is b.on_frame(frame(4, 1), []) is None
    first = a.on_frame(frame(5, 0, bad=True), [alert(5, 0)])
    assert first is not None
    assert b.on_frame(frame(5, 1, bad=True), []) is None
    directory = tmp_path / "incidents/step5-nan_inf"
    assert sorted(path.name for path in directory.glob("*rank1*")) == ["samples_rank1.jsonl"]
    assert [len((directory / f"samples_rank{rank}.jsonl").read_text().splitlines()) > 1 for rank in (0, 1)] == [True, False]
    incident = json.loads((directory / "incident.json").read_text())
    assert incident["ranks_complete"] == [0, 1]
    assert incident["steps"] == [4, 5]
    assert [found["rank"] for found in incident["first_nonfinite"]] == [0, 1]
    for m in (a, b):
        m.close()


def test_both_ranks_fire(tmp_path: Path, store: Any, frame: Any, alert: Any) -> None:
    """Ranks that see the same thing in the same step share one directory."""
    a, b = managers(tmp_path, store)
    first, second = a.on_frame(frame(5, 0), [alert(5, 0)]), b.on_frame(frame(5, 1), [alert(5, 1)])
    assert first is not None
    assert first == second
    assert [p.name for p in (tmp_path / "incidents").iterdir()] == ["step5-nan_inf"]
    incident = json.loads((tmp_path / "incidents/step5-nan_inf/incident.json").read_text())
    assert [(x["rank"], x["ranks"]) for x in incident["alerts"]] == [(0, ["0-1"])]


def test_late_rank_says_so(tmp_path: Path, store: Any, frame: Any, alert: Any) -> None:
    """A rank that hears of it after the agreed step captures its next step and says that it was late."""
    a, b = managers(tmp_path, store)
    a.on_frame(frame(5, 0), [alert(5, 0)])
    request = b.on_frame(frame(9, 1), [])
    assert request is not None
    assert (request.first_step, request.late) == (10, True)
    assert json.loads((tmp_path / "incidents/step5-nan_inf/incident.json").read_text())["ranks_late"] == [1]


def test_rank_that_hears_of_it_ahead_of_its_own_frame_writes_again(tmp_path: Path, store: Any, frame: Any, alert: Any) -> None:
    """News of step 5 that comes when a rank has finished step 3 does not cost this rank's steps 4 and 5, nor its alerts."""
    a, b = managers(tmp_path, store)
    a.on_frame(frame(5, 0), [alert(5, 0)])
    b.on_frame(frame(3, 1), [])
    path = tmp_path / "incidents/step5-nan_inf/samples_rank1.jsonl"
    assert (read_piece(path) or {})["steps"] == [3]
    b.on_frame(frame(4, 1), [])
    b.on_frame(frame(5, 1), [alert(5, 1)])
    b.on_frame(frame(6, 1), [])
    piece = read_piece(path)
    assert piece is not None
    assert piece["steps"] == [3, 4, 5]
    assert list(load([path], [])) == [3, 4, 5], "the samples that were written first are not taken twice"
    assert [len(ranks[1].calls) for ranks in load([path], []).values()] == [2, 2, 2]
    assert [one["rank"] for one in piece["alerts"]] == [1]
    assert piece["capture"]["first_step"] == 7


def test_late_frames_move_the_capture(tmp_path: Path, store: Any, frame: Any, alert: Any) -> None:
    """When the frame of step 5 is finished only after step 6 has ended, step 8 is the one that all can still reach."""
    a, _ = managers(tmp_path, store)
    request = a.on_frame(frame(5, 0), [alert(5, 0)], now=6)
    assert request is not None
    assert request.first_step == 8


@pytest.mark.parametrize(("cooldown", "limit", "expected"), [(20, 10, 1), (0, 10, 6), (2, 10, 1), (0, 3, 3)])
def test_cooldown_and_limit(
    tmp_path: Path, store: Any, frame: Callable[..., Any], alert: Callable[..., Any], cooldown: int, limit: int, expected: int
) -> None:
    """No new incident within the cool-down of the last or of its alerts, and no more than the limit."""
    (m,) = managers(tmp_path, store, 1, cooldown_steps=cooldown, max_incidents=limit)
    for step in range(6):
        m.on_frame(frame(step), [alert(step)])
    assert len(list((tmp_path / "incidents").iterdir())) == expected
    assert m.suppressed == 6 - expected


@pytest.mark.parametrize(("broken", "expected"), [(range(3, 40), 1), (range(3, 5), 2)], ids=["goes on", "is over"])
def test_one_incident_per_cause(
    tmp_path: Path, store: Any, frame: Callable[..., Any], alert: Callable[..., Any], broken: range, expected: int
) -> None:
    """What lasts longer than the cool-down is still of the same cause while the loss is no number; after that it is another one."""
    (m,) = managers(tmp_path, store, 1, cooldown_steps=10)
    for step in range(40):
        m.on_frame(frame(step, bad=step in broken), [alert(step)] if step in (3, 30) else [])
    assert len(list((tmp_path / "incidents").iterdir())) == expected


def test_warnings_start_nothing(tmp_path: Path, store: Any, frame: Any, alert: Any) -> None:
    """Alerts that are no critical ones start no incident; a disabled section does nothing at all."""
    (m,) = managers(tmp_path, store, 1)
    assert m.on_frame(frame(0), [alert(0, severity="warning")]) is None
    (off,) = managers(tmp_path, store, 1, enabled=False)
    assert off.on_frame(frame(0), [alert(0)]) is None
    assert len(off.ring) == 0
    assert not (tmp_path / "incidents").exists()


def test_nothing_armed_without_level(tmp_path: Path, store: Any, frame: Any, alert: Any) -> None:
    """An empty capture_level writes the ring and arms nothing."""
    (m,) = managers(tmp_path, store, 1, capture_level="")
    assert m.on_frame(frame(0), [alert(0)]) is None
    assert (tmp_path / "incidents/step0-nan_inf/incident.json").is_file()


def test_disk_trouble_does_not_raise(tmp_path: Path, store: Any, frame: Any, alert: Any, caplog: Any) -> None:
    """A directory that cannot be made is logged and counted; the capture is still asked for."""
    (tmp_path / "incidents").write_text("a file is in the way")
    (m,) = managers(tmp_path, store, 1)
    assert m.on_frame(frame(0), [alert(0)]) is not None
    assert m.lost == 1
    assert "training goes on" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"id": "../../etc"},
        {"id": "a/b"},
        {"id": ".."},
        {"id": 7},
        {"step": -1},
        {"step": True},
        {"rank": "0"},
        {"capture_step": 1 << 60},
        {"rule": None},
    ],
)
def test_events_from_the_network_are_checked(change: dict[str, Any]) -> None:
    """An event with a path in its id or a wrong type is refused by name of the field."""
    good = Event("step5-nan_inf", 5, "nan_inf", 1, 7).to_json()
    assert Event.from_json(good).capture_step == 7
    with pytest.raises(UsageError, match=next(iter(change))):
        Event.from_json({**good, **change})


def test_bad_event_is_ignored(tmp_path: Path, store: Any, frame: Any) -> None:
    """A peer that announces nonsense causes no directory."""
    (m,) = managers(tmp_path, store, 1)
    StoreNotifier(store, patience=5).announce({"id": "../x", "step": 1})
    assert m.on_frame(frame(0), []) is None
    assert not (tmp_path / "incidents").exists()


def test_second_run_in_the_same_directory(tmp_path: Path, frame: Any, alert: Any) -> None:
    """A later run with the same output directory does not mix its files with those of an earlier one."""
    for _ in range(3):
        m = IncidentManager(IncidentSettings(), output_dir=tmp_path, rank=0, world_size=1, notifier=SilentNotifier())
        m.on_frame(frame(0), [alert(0)])
    assert sorted(p.name for p in (tmp_path / "incidents").iterdir()) == ["step0-nan_inf", "step0-nan_inf-run2", "step0-nan_inf-run3"]
