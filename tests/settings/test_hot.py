"""The file behind the hot switch: how often it is looked at, and what counts as a change."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.settings.hot import SECONDS_OFF, SECONDS_ON, HotSwitch
from msprobe_engine.core.settings.load import load_settings


class Clock:
    """Time that the test makes."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def write(path: Path, seconds: int, **keys: Any) -> None:
    path.write_text(json.dumps({"task": "statistics", "dump_path": "out", **keys}))
    os.utime(path, (seconds, seconds))


def switch(path: Path, clock: Clock, check: Any = lambda _: None) -> HotSwitch:
    return HotSwitch(path, {"level": "L0"}, load_settings(path, level="L0"), check, clock)


@pytest.mark.parametrize(("enabled", "seconds"), [(True, SECONDS_ON), (False, SECONDS_OFF)])
def test_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enabled: bool, seconds: float) -> None:
    """The file is asked for at most every 0.5 s while on and every 3 s while off."""
    path, clock = tmp_path / "config.json", Clock()
    write(path, 1, dump_enable=enabled)
    hot = switch(path, clock)
    looks = 0
    stat = os.stat

    def count(*args: Any, **kwargs: Any) -> os.stat_result:
        nonlocal looks
        looks += args[0] == path
        return stat(*args, **kwargs)

    monkeypatch.setattr(os, "stat", count)
    for _ in range(41):
        assert hot.poll() is None
        clock.now += seconds / 4
    assert looks == 11


def test_change(tmp_path: Path) -> None:
    """A new time or size makes it read again; overrides hold; the same settings in other words are no change."""
    path, clock = tmp_path / "config.json", Clock()
    write(path, 1, dump_enable=True)
    hot = switch(path, clock)
    found = []
    for seconds, keys in ((1, {}), (2, {"dump_enable": True, "level": "L1"}), (3, {"dump_enable": False}), (3, {"step": [1, 2, 3]})):
        write(path, seconds, **{"dump_enable": True, **keys} if seconds == 1 else keys)
        clock.now += 10
        found.append(hot.poll())
    assert found[:2] == [None, None]
    assert found[2] is not None
    assert found[2].dump is not None
    assert (found[2].dump.dump_enable, found[2].dump.level) == (False, "L0")
    assert found[3] is not None
    assert found[3].dump is not None
    assert (found[3].dump.dump_enable, found[3].dump.step) == (False, (1, 2, 3)), "without the key it stays off"


def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the owner refuses switches off like a mistake in the file, with its reason, and what was in use before stays otherwise."""
    path, clock = tmp_path / "config.json", Clock()
    write(path, 1, dump_enable=True)

    def refuse(_: Any) -> None:
        raise SettingsError("not here")

    hot = switch(path, clock, refuse)
    write(path, 2, dump_enable=True, level="L1", step=[1])
    read = hot.poll()
    assert read is not None
    assert read.dump is not None
    assert (read.dump.dump_enable, read.dump.step) == (False, ())
    assert "not here" in capsys.readouterr().err
    assert not hot.on
