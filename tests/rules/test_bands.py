"""bands.json: what is written is read again, and nothing else is accepted."""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from frames_of_lists import frame_of
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.settings.schema import ProbeSettings, RuleSettings
from msprobe_engine.probe.rules.bands import Band, Bands, load_bands, save_bands
from msprobe_engine.probe.rules.build import build_rules
from msprobe_engine.probe.rules.builtin.values.learned import LearnedRule

GOOD = Bands(
    knots=(0, 10),
    patience=2,
    scalars={"loss": Band((0.0, -1.0), (1.0, 0.0), True), "accuracy": Band((0.0, 0.5), (1.0, 1.0), False)},
    samples={"grad_reduced": {"norm": {"0 -1 reduced  w": Band((-1.0, -1.0), (1.0, 1.0), True)}}},
    changing=("0 w",),
    finite=True,
    scale=True,
)


def test_written_and_read(tmp_path: Path) -> None:
    """The file has mode 0640 and gives the same bands."""
    path = tmp_path / "bands.json"
    save_bands(GOOD, path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o640
    assert load_bands(path) == GOOD


def change(tree: Any, path: str, value: Any) -> None:
    *parts, last = path.split("/")
    for part in parts:
        tree = tree[part]
    tree[last] = value


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("msprobe_bands", 2, "another version"),
        ("msprobe_bands", True, "another version"),
        ("knots", [], "ascending"),
        ("knots", [5, 5], "ascending"),
        ("knots", ["a"], "ascending"),
        ("patience", 0, "1 or more"),
        ("scalars", [], "an object"),
        ("scalars/loss/low", [0.0], "2 finite numbers"),
        ("scalars/loss/low", [0.0, "x"], "2 finite numbers"),
        ("scalars/loss/low", [0.0, 9.0], "below high"),
        ("scalars/loss/high", [math.inf, 0.0], "2 finite numbers"),
        ("scalars/loss/log", 1, "true or false"),
        ("samples/grads", {}, "one of actv"),
        ("samples/grad_reduced/median", {}, "one of norm"),
        ("relations/parameters_change", "w", "a list of names"),
        ("relations/gradients_finite", "yes", "true or false"),
    ],
)
def test_wrong_files(tmp_path: Path, path: str, value: Any, text: str) -> None:
    """What does not fit is refused with its place, as an error of the settings where a rule names the file."""
    file = tmp_path / "bands.json"
    save_bands(GOOD, file)
    tree = json.loads(file.read_text())
    change(tree, path, value)
    file.write_text(json.dumps(tree))
    with pytest.raises(UsageError, match=text) as error:
        load_bands(file)
    assert path.split("/")[0] in str(error.value)


@given(st.binary(max_size=200))
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """Whatever the file holds, the answer is an error of ours."""
    file = tmp_path_factory.mktemp("any") / "bands.json"
    file.write_bytes(data)
    with pytest.raises(UsageError):
        load_bands(file)


def test_missing_directory_and_pipe(tmp_path: Path) -> None:
    """No file, a directory or a pipe in its place is an error, not a wait."""
    os.mkfifo(tmp_path / "pipe")
    for name in ("nothing", ".", "pipe"):
        with pytest.raises(UsageError, match=r"bands|regular|read"):
            load_bands(tmp_path / name)


def test_the_rule_follows_the_band(tmp_path: Path) -> None:
    """Values between the knots are held against a straight line; outside for `patience` steps fires once, back inside ends it; `widen`
    and `exclude` hold."""
    path = tmp_path / "bands.json"
    save_bands(Bands((0, 10), 2, scalars={"accuracy": Band((0.0, 0.5), (1.0, 1.5), False)}), path)

    def alerts(value: float, **args: Any) -> list[int]:
        (rule,) = build_rules(ProbeSettings(rules=(RuleSettings(rule="learned", args={"file": str(path), **args}),)))
        return [step for step in range(20) if rule.check(frame_of(scalars={"accuracy": value}, step=step))]

    assert alerts(0.45) == [11]  # below the line from step 10 on
    assert alerts(1.2) == [1, 13]  # above it in steps 0 to 3, said when over
    assert alerts(0.75) == []
    assert alerts(0.45, widen=2.0) == []
    assert alerts(0.45, exclude=["acc"]) == []


def test_tensors_and_relations() -> None:
    """The norm of a tensor has its band by key; gradients that were always finite have to be; a loss scale must not fall by itself."""
    rule = LearnedRule(bands=GOOD)
    seen = [rule.check(frame_of({"w": [value], "other": [99.0]}, step=i)) for i, value in enumerate([1.0, 50.0, 50.0, math.nan])]
    assert [[a.name for a in found] for found in seen] == [[], [], ["w"], ["w"]]
    assert seen[2][0].rule == seen[3][0].rule == "learned"
    rule = LearnedRule(bands=GOOD)
    scales = [(8.0, 0.0), (4.0, 1.0), (2.0, 0.0), (1.0, 0.0)]
    found = [rule.check(frame_of(scalars={"loss_scale": s, "skipped": k}, step=i)) for i, (s, k) in enumerate(scales)]
    assert [len(f) for f in found] == [0, 0, 0, 1]
