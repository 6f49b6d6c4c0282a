"""What counts where two runs are compared: every statistic that both have, of every rank; and the exit code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frames_of_lists import frame_of

from msprobe_engine.cli.main import main
from msprobe_engine.core.settings.schema import CsvSettings, MonitorSettings
from msprobe_engine.probe.sinks.csv.monitor import CsvSink
from msprobe_engine.report.trends.collect import collect
from msprobe_engine.report.trends.sources.source import Part, Progress, Target

STATISTICS = {"norm": 5.0, "max": 3.0, "min": -2.0, "mean": 0.01, "nans": 0.0, "zeros": 0.25}


class One:
    """A run of one tensor, ranks 0 and 1, steps 0 to 3."""

    kinds: tuple[str, ...] = ("made",)
    problems: Mapping[str, int] = {}
    left_out = 0

    def __init__(self, name: str, wrong: Mapping[str, float], rank: int = 1) -> None:
        self.path, self.ranks, self._wrong, self._rank = Path(name), [0, 1], wrong, rank

    def pieces(self) -> int:
        return 0

    def parts(self, rank: int, progress: Progress) -> Any:
        progress("")
        values = {}
        for statistic, number in STATISTICS.items():
            values[statistic] = np.full(4, number + rank)
            if rank == self._rank and statistic in self._wrong:
                values[statistic][2:] = self._wrong[statistic]
        yield Part(rank, "grad_reduced", [Target("w")], np.zeros(4, np.int64), np.arange(4), values)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"norm": 5.1}, "norm"),
        ({"max": 3.5}, "max"),
        ({"min": -1.5}, "min"),
        ({"mean": 0.5}, "mean"),
        ({"mean": 1.01 + 1e-8}, ""),
        ({"nans": 2.0}, "nans"),
        ({"zeros": 0.5}, ""),
        ({"zeros": float("nan")}, "zeros"),
    ],
)
@pytest.mark.parametrize("numbers", [1000, 8], ids=["every step and rank", "steps put together"])
def test_each_statistic_counts(wrong: Mapping[str, float], said: str, numbers: int) -> None:
    """A mean in units of the largest element; what round-off moves only by being a number or none."""
    trends = collect([One("a", wrong), One("b", {})], numbers=numbers)
    assert [one.statistic for one in trends.apart] == ([said] if said else [])
    assert trends.compared == 1


def test_ranks_are_compared_one_by_one() -> None:
    """Two ranks that have changed places have the extremes that they had."""

    class Exchanged(One):
        def parts(self, rank: int, progress: Progress) -> Any:
            yield from (Part(rank, p.metric, p.targets, p.ids, p.steps, p.values) for p in One.parts(self, 1 - rank, progress))

    assert [one.statistic for one in collect([Exchanged("a", {}), One("b", {})]).apart] != []


@pytest.mark.parametrize(
    ("ops", "other_ops", "factor", "steps", "code"),
    [
        (("norm", "mean"), ("norm", "mean"), 1.0, 3, 0),
        (("norm", "mean"), ("norm", "mean"), 1.5, 3, 1),
        (("norm", "mean"), ("norm",), 1.0, 3, 3),
        (("norm", "mean"), ("norm",), 1.5, 3, 1),
        (("norm",), ("norm",), 1.0, 4, 3),
    ],
    ids=["the same", "apart", "a statistic alone", "apart, and a statistic alone", "a step alone"],
)
def test_the_exit_code(
    tmp_path: Path,
    ops: tuple[str, ...],
    other_ops: tuple[str, ...],
    factor: float,
    steps: int,
    code: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, which, times, count in (("a", ops, 1.0, 3), ("b", other_ops, factor, steps)):
        sink = CsvSink(CsvSettings(), MonitorSettings(ops=which), output_dir=tmp_path / name, rank=0)
        for step in range(count):
            sink.write(frame_of({"w": [times if step > 1 else 1.0]}, step=step, rank=0, scalars={"loss": 1.0}), [])
        sink.close()
    assert main(["trends", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(tmp_path / "ab.html")]) == code
    assert ("statistics of grad_reduced, reduced only in a, not compared: mean" in capsys.readouterr().out) == (ops != other_ops)
