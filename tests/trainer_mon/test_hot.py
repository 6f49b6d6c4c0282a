"""The settings file that is followed while the training runs (`msprobe_engine.probe.hot_settings`)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.settings import text
from msprobe_engine.core.settings.load import read_settings
from msprobe_engine.probe.hot_settings import HotMonitor, switched_off

NATIVE = "# ours\nmonitor:\n  hot: true\n  enabled: true  # the switch\n  collect_times: 2\nsinks:\n  csv: {enabled: true}\n"


class Clock:
    """Time that passes as told."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class Wire:
    """Carries announcements between the ranks of a test, late on demand."""

    def __init__(self) -> None:
        self.boxes: list[list[dict[str, Any]]] = []
        self.sent: list[dict[str, Any]] = []

    def end(self) -> End:
        self.boxes.append([])
        return End(self, len(self.boxes) - 1)


class End:
    """One rank's notifier."""

    lead_steps = 2

    def __init__(self, wire: Wire, number: int) -> None:
        self.wire, self.number, self.closed = wire, number, False

    def announce(self, event: Mapping[str, Any]) -> None:
        self.wire.sent.append(dict(event))
        for box in self.wire.boxes:
            box.append(json.loads(json.dumps(event)))

    def poll(self) -> list[dict[str, Any]]:
        out, self.wire.boxes[self.number] = self.wire.boxes[self.number], []
        return out

    def close(self) -> None:
        self.closed = True


def write(path: Path, content: str) -> None:
    """Put another content in place, with a time that surely differs."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_text(content)
    os.utime(path, ns=(before + 10**9, before + 10**9))


def follower(path: Path, **keys: Any) -> HotMonitor:
    """A `HotMonitor` on a file that is read now. Looks at every step: the clock stands."""
    return HotMonitor(path, read_settings(path)[0], clock=keys.pop("clock", lambda: 0.0), **keys)


def test_a_single_process_changes_with_the_next_step(tmp_path: Path) -> None:
    """What was written during step n holds from step n + 1; nothing new gives None."""
    path = tmp_path / "probe.yaml"
    write(path, "monitor: {hot: true, enabled: false}\n")
    hot = follower(path)
    assert hot.end_step(0) is None
    write(path, "monitor: {hot: true, parameters: true}\n")
    changed = hot.end_step(1)
    assert changed is not None
    assert changed.monitor is not None
    assert (changed.monitor.enabled, changed.monitor.parameters) == (True, True)
    assert hot.end_step(2) is None
    write(path, "monitor: {hot: true, parameters: true}\n")  # written again without a change
    assert hot.end_step(3) is None


def test_a_broken_file_is_said_once_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong with the file, the settings before stay, with one message per change of the file."""
    path = tmp_path / "probe.yaml"
    write(path, "monitor: {hot: true}\n")
    hot = follower(path)
    said: list[str] = []
    monkeypatch.setattr("msprobe_engine.core.log.warning", said.append)
    for step, content in enumerate(["monitor: {hot: true", "monitor: {hto: true}\n", "[1, 2]\n", "\x00"]):
        write(path, content)
        assert hot.end_step(2 * step) is None
        assert hot.end_step(2 * step + 1) is None
        assert len(said) == step + 1
        assert "those before stay" in said[-1]
    path.unlink()
    assert hot.end_step(20) is None
    assert len(said) == 4
    write(path, "monitor: {hot: true, parameters: true}\n")
    assert hot.end_step(21) is not None


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    """A pipe that somebody holds open and a directory in the file's place are said, change nothing, and leave no open file behind."""
    path = tmp_path / "probe.yaml"
    write(path, "monitor: {hot: true}\n")
    hot = follower(path)
    files = len(os.listdir("/proc/self/fd"))
    for step in range(0, 10, 2):
        path.unlink()
        path.mkdir()
        assert hot.end_step(step) is None
        path.rmdir()
        os.mkfifo(path)
        held = os.open(path, os.O_RDWR)
        assert hot.end_step(step + 1) is None
        os.close(held)
    assert len(os.listdir("/proc/self/fd")) == files
    path.unlink()
    write(path, "monitor: {hot: true, parameters: true}\n")
    assert hot.end_step(20) is not None


def test_without_its_section_the_monitor_is_off(tmp_path: Path) -> None:
    """Taking the section out switches off, and the file stays watched."""
    path = tmp_path / "probe.yaml"
    write(path, "monitor: {hot: true}\nlog_level: error\n")
    hot = follower(path)
    write(path, "log_level: error\n")
    changed = hot.end_step(0)
    assert changed is not None
    assert changed.monitor is not None
    assert not changed.monitor.enabled
    write(path, "monitor: {hot: true}\n")
    assert hot.end_step(1) is not None


def test_all_ranks_change_at_one_step(tmp_path: Path) -> None:
    """Rank 0 alone reads: the others see no file at all and change at the step that it names, two after its look."""
    path = tmp_path / "probe.yaml"
    write(path, "monitor: {hot: true, enabled: false}\n")
    wire = Wire()
    elsewhere = tmp_path / "elsewhere.yaml"
    elsewhere.write_text(path.read_text())
    ranks = [follower(p, rank=r, world_size=3, notifier=wire.end()) for r, p in enumerate((path, elsewhere, elsewhere))]
    elsewhere.unlink()
    began: dict[int, int] = {}
    for step in range(8):
        if step == 3:
            write(path, "monitor: {hot: true, parameters: true}\n")
        for rank, hot in enumerate(ranks):
            changed = hot.end_step(step)
            if changed is not None and changed.monitor is not None and changed.monitor.parameters:
                began[rank] = step + 1
    assert began == {0: 5, 1: 5, 2: 5}
    assert len(wire.sent) == 1
    for hot in ranks:
        hot.close()


def test_changes_at_every_step_hold_on_all_ranks_alike(tmp_path: Path) -> None:
    """A file that changes faster than a change travels: every rank takes the same settings at the same steps, none is left out."""
    path = tmp_path / "probe.yaml"
    write(path, "monitor: {hot: true}\n")
    wire = Wire()
    ranks = [follower(path, rank=r, world_size=2, notifier=wire.end()) for r in range(2)]
    seen: list[dict[int, int]] = [{}, {}]
    for step in range(6):
        write(path, f"monitor: {{hot: true, interval: {step + 2}}}\n")
        for rank, hot in enumerate(ranks):
            changed = hot.end_step(step)
            if changed is not None and changed.monitor is not None:
                seen[rank][step + 1] = changed.monitor.interval
    assert seen[0] == seen[1] == {2: 2, 3: 3, 4: 4, 5: 5, 6: 6}


def test_a_change_at_the_end_of_the_collection_comes_at_its_step(tmp_path: Path) -> None:
    """A change that was announced for the step after the last of the collection holds from that step on, on all ranks."""
    path = tmp_path / "probe.yaml"
    write(path, "monitor: {hot: true, collect_times: 3}\n")
    wire = Wire()
    ranks = [follower(path, rank=r, world_size=2, notifier=wire.end()) for r in range(2)]
    for step in range(3):
        if step == 1:
            write(path, "monitor: {hot: true, collect_times: 30}\n")
        changes = [hot.end_step(step) for hot in ranks]
        if step < 2:
            assert changes == [None, None]
    assert [change is not None and change.monitor is not None and change.monitor.collect_times for change in changes] == [30, 30]
    assert [change is not None and change.monitor is not None and change.monitor.enabled for change in changes] == [True, True]


def test_what_others_send_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An announcement that makes no sense changes nothing and raises nothing; one of another kind is not looked at."""
    path = tmp_path / "probe.yaml"
    write(path, "monitor: {hot: true}\n")
    wire = Wire()
    first, second = wire.end(), wire.end()
    hot = follower(path, rank=1, world_size=2, notifier=second)
    said: list[str] = []
    monkeypatch.setattr("msprobe_engine.core.log.warning", said.append)
    for event in (
        {"kind": "settings"},
        {"kind": "settings", "text": "monitor: 3", "step": 1},
        {"kind": "settings", "text": "{}", "step": "x"},
        {"kind": "settings", "text": "monitor: {hot: true}", "step": float("inf")},
        {"kind": "settings", "text": "\ud800", "step": 1},
    ):
        first.announce(event)
    first.announce({"kind": "nan"})
    assert hot.end_step(0) is None
    assert len(said) == 5


@pytest.mark.parametrize("name", ["monitor_config.json", "probe.yaml"])
def test_collect_times_switches_off_in_the_file(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After collect_times monitored steps the monitor is off; rank 0 changes the one word in the file, which a link may name, and keeps
    the rest of it to the byte; then it may be switched on again."""
    monkeypatch.setenv("DYNAMIC_MONITOR", "True")
    target = tmp_path / f"there-{name}"
    content = NATIVE if name.endswith("yaml") else '{"targets": {}, "dynamic_on":true,\n\t"collect_times": 2}'
    write(target, content)
    target.chmod(0o600)
    path = tmp_path / name
    path.symlink_to(target)
    hot = follower(path)
    other = follower(path, rank=1)
    assert [hot.end_step(0), other.end_step(0)] == [None, None]
    for one in (hot, other):
        changed = one.end_step(1)
        assert changed is not None
        assert changed.monitor is not None
        assert not changed.monitor.enabled
    assert path.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o600
    expected = content.replace("enabled: true  #", "enabled: false  #").replace('"dynamic_on":true', '"dynamic_on":false')
    assert target.read_text() == expected != content
    assert hot.end_step(2) is None
    write(target, content)
    changed = hot.end_step(3)
    assert changed is not None
    assert changed.monitor is not None
    assert changed.monitor.enabled
    assert [hot.end_step(4) is None, hot.end_step(5) is None] == [True, False]


def test_an_edit_at_the_end_of_the_collection_wins(tmp_path: Path) -> None:
    """Who changes the file in the last step of the collection finds the own text there, not that of the switch."""
    path = tmp_path / "probe.yaml"
    write(path, NATIVE)
    hot = follower(path)
    again = NATIVE.replace("collect_times: 2", "collect_times: 3")
    assert hot.end_step(0) is None
    write(path, again)
    assert hot.end_step(1) is not None  # off
    assert path.read_text() == again
    changed = hot.end_step(2)
    assert changed is not None
    assert changed.monitor is not None
    assert changed.monitor.enabled


def test_looking_costs_a_hundredth(tmp_path: Path) -> None:
    """A file system that is slow, in eight looks in a row, is asked less often: the next look comes no earlier than a hundred times the
    duration of a look."""
    path = tmp_path / "probe.yaml"
    write(path, "monitor: {hot: true}\n")
    clock = Clock()
    hot = follower(path, clock=clock)
    for step in range(7):
        assert hot.end_step(step) is None  # each took a second
    write(path, "monitor: {hot: true, parameters: true}\n")
    assert hot.end_step(7) is not None
    write(path, "monitor: {hot: true}\n")
    assert next(step for step in range(8, 300) if hot.end_step(step) is not None) in range(90, 110)


@given(st.dictionaries(st.sampled_from(["wg_distribution", "xy_distribution", "all_xy"]), st.booleans()), st.integers(0, 4), st.booleans())
def test_one_word_is_changed(tmp_path_factory: Any, flags: dict[str, bool], indent: int, on: bool) -> None:
    """Of any JSON file only the value of the switch changes; a switch that is off or missing gives None."""
    path = tmp_path_factory.getbasetemp() / "monitor_config.json"
    tree = {"targets": {"dynamic_on": {}}, **flags, "dynamic_on": on}
    raw = json.dumps(tree, indent=indent or None).encode()
    after = switched_off(raw, path)
    if not on:
        assert after is None
    else:
        assert after is not None
        assert text.parse(after, path) == {**tree, "dynamic_on": False}
        assert len(after) == len(raw) + 1
    assert switched_off(json.dumps({"targets": {}, **flags}).encode(), path) is None


def test_files_that_are_no_settings() -> None:
    """What cannot be parsed raises, what is no mapping has no switch."""
    assert switched_off(b"[1]", Path("a.yaml")) is None
    with pytest.raises(SettingsError):
        switched_off(b"{", Path("a.json"))
