"""``msprobe trends``: what it reads, how it bounds it, what it finds."""

from __future__ import annotations

import json
import math
import re
import shlex
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frames_of_lists import frame_of
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.cli.main import main, sub_parser
from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.settings.schema import CsvSettings, MonitorSettings
from msprobe_engine.formats.monitor.convert.data2db import data2db
from msprobe_engine.probe.sinks.csv.monitor import CsvSink
from msprobe_engine.report.trends.bins import Bins, Extremes
from msprobe_engine.report.trends.collect import collect
from msprobe_engine.report.trends.findings import over_ranks
from msprobe_engine.report.trends.page import block_targets, islands
from msprobe_engine.report.trends.plan import plan
from msprobe_engine.report.trends.sources import dumps
from msprobe_engine.report.trends.sources.open_source import open_source
from msprobe_engine.report.trends.sources.order import in_order
from msprobe_engine.report.trends.sources.source import ABSMAX, SCALARS, Part, Progress, Target, Wanted

OPS = ("norm", "min", "max", "mean", "nans")
FIXTURES = Path(__file__).parents[1] / "fixtures"


class Made:
    """A source of given rows: metric to rank to target to step to numbers."""

    kinds: tuple[str, ...] = ("made",)
    problems: Mapping[str, int] = {}

    def __init__(self, rows: Mapping[str, Mapping[int, Mapping[str, Mapping[int, list[float]]]]], name: str = "made") -> None:
        self.path = Path(name)
        self._rows = rows
        self.ranks = sorted({rank for ranks in rows.values() for rank in ranks})

    def pieces(self) -> int:
        return 0

    def parts(self, rank: int, progress: Progress) -> Iterator[Part]:
        progress(f"rank {rank}")
        for metric, ranks in self._rows.items():
            targets = ranks.get(rank, {})
            cells = [(i, step, v) for i, steps in enumerate(targets.values()) for step, values in steps.items() for v in values]
            if cells:
                ids, steps, values = (np.array(column) for column in zip(*cells))
                yield Part(rank, metric, [Target(t) for t in targets], ids, steps, {"norm": values.astype(float)})


def run(root: Path, rank: int, steps: Mapping[int, Mapping[str, list[float]]]) -> Path:
    sink = CsvSink(CsvSettings(), MonitorSettings(ops=OPS), output_dir=root, rank=rank)
    for step, tensors in steps.items():
        sink.write(frame_of(tensors, step=step, rank=rank, scalars={"loss": 1.0 + step}), [])
    sink.close()
    return root


def grid(trends: Any, metric: str, statistic: str, number: int = 0) -> Any:
    return over_ranks(trends.runs[number].grids[metric, statistic]).high


def test_every_number_of_a_small_run_is_kept(tmp_path: Path) -> None:
    """Targets, ranks and steps of the files are the page's; what was not written is missing, and not NaN."""
    run(tmp_path, 0, {0: {"a": [3.0, 4.0], "b": [1.0]}, 2: {"a": [-2.0], "b": [math.nan]}})
    run(tmp_path, 1, {0: {"a": [6.0, 8.0]}, 1: {"a": []}})
    trends = collect([open_source(tmp_path)])
    metric = trends.metrics["grad_reduced, reduced"]
    assert [t.shown for t in metric.targets] == ["a", "b"]
    assert metric.statistics == ["norm", ABSMAX, "max", "min", "mean", "nans"]
    cube = trends.runs[0].grids[metric.name, "norm"].cube
    np.testing.assert_array_equal(cube.missing[0], [[False, True, False], [False, True, True]])
    np.testing.assert_array_equal(cube.high[0][~cube.missing[0]], [5.0, 2.0, 10.0])
    assert np.isnan(cube.high[1, 0, 2])
    assert trends.runs[0].grids[metric.name, ABSMAX].cube.high[0, 0, 2] == 2.0
    assert grid(trends, SCALARS, "value")[0].tolist() == [1.0, 2.0, 3.0]
    assert [(f.step, f.ranks, f.kind, f.statistics) for f in trends.runs[0].nonfinite] == [
        (2, (0,), "NaN", ("norm", "min", "max", "mean", "nans"))
    ]


def test_all_formats_say_the_same(tmp_path: Path) -> None:
    """CSV, and the trend data base that is made of it, give the same page."""
    run(tmp_path / "run", 0, {s: {"a": [1.0 + s], "b": [1e12, math.inf]} for s in range(4)})
    data2db(tmp_path / "db", tmp_path / "run")
    one, two = collect([open_source(tmp_path / "run")]), collect([open_source(tmp_path / "db")])
    assert [(m.name, m.targets) for m in one.metrics.values()] == [(m.name, m.targets) for m in two.metrics.values()]
    for metric in one.metrics.values():
        for statistic in metric.statistics:
            np.testing.assert_array_equal(grid(one, metric.name, statistic), grid(two, metric.name, statistic))


def test_a_data_base_of_the_existing_tool(tmp_path: Path) -> None:
    """NULL is NaN or missing and said to be so; 1e9 + 1, which that tool writes for infinity, is infinity."""
    path = tmp_path / "monitor_data.trend.db"
    with closing(sqlite3.connect(path)) as db:
        db.executescript("""
            CREATE TABLE monitoring_targets(target_id INTEGER, target_name TEXT, vpp_stage INTEGER, micro_step INTEGER);
            CREATE TABLE monitoring_metrics(metric_id INTEGER, metric_name TEXT);
            CREATE TABLE trend_data(rank INTEGER, step INTEGER, target_id INTEGER, metric_id INTEGER, norm REAL);
            INSERT INTO monitoring_targets VALUES (1, 'w', 0, 0); INSERT INTO monitoring_metrics VALUES (1, 'grad_reduced');
            INSERT INTO trend_data VALUES (0, 0, 1, 1, 2.0), (0, 1, 1, 1, NULL), (0, 2, 1, 1, 1000000001.0);""")
    trends = collect([open_source(path)])
    np.testing.assert_array_equal(grid(trends, "grad_reduced", "norm")[0], [2.0, math.nan, math.inf])
    assert any("not say which" in problem for problem in trends.runs[0].problems)


@pytest.mark.parametrize("version", ["8.1.1", "26.2.0"])
def test_dumps_of_the_existing_tool(version: str) -> None:
    """Every step of a dump of the existing tool is a column, its records are rows in the order in which they ran."""
    roots = {path.parents[2] for path in (FIXTURES / version).glob("*/step*/rank[0-9]/dump.json")}
    assert roots
    for root in sorted(roots)[:3]:
        trends = collect([open_source(root)])
        assert "forward" in trends.metrics
        assert trends.runs[0].kinds == ("dump",)
        assert trends.plan.fine.of == len(list(root.glob("step*")))
        assert not np.isnan(grid(trends, "forward", "norm")).all()


@pytest.mark.parametrize("content", ['{"data": {', "[]", '{"task": "statistics", "data": {"Functional.relu.0.forward": 3}}'])
def test_a_damaged_step_is_left_out_and_said(tmp_path: Path, content: str) -> None:
    """A step that cannot be read does not take the others with it."""
    for step in (0, 1):
        place = tmp_path / f"step{step}" / "rank0"
        place.mkdir(parents=True)
        tensor = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "Max": "NaN", "Min": 0.0, "Mean": 0.5, "Norm": 1.0 + step}
        good = {"task": "statistics", "level": "L1", "data": {"Functional.relu.0.forward": {"input_args": [], "output": [tensor]}}}
        (place / "dump.json").write_text(content if step else json.dumps(good))
    trends = collect([open_source(tmp_path)])
    assert grid(trends, "forward", "norm")[0, 0] == 1.0
    assert [f.kind for f in trends.runs[0].nonfinite] == ["NaN"]
    assert trends.runs[0].problems or content.endswith("3}}")


@given(
    st.integers(1, 2000), st.integers(1, 40), st.integers(1, 3000), st.integers(1, 500_000), st.booleans(), st.integers(0, 10**6)
)  # fmt: skip
def test_the_plan_keeps_the_budget(steps: int, ranks: int, rows: int, budget: int, doubled: bool, first: int) -> None:
    """The page never holds more numbers than asked for, unless one column of one group of ranks is more already; every step and rank has
    its place."""
    found = plan(np.arange(first, first + steps), np.arange(ranks), rows, budget, doubled)
    smallest = 2 * rows * (1 if ranks < 2 else 2)
    assert found.numbers <= max(budget, smallest)
    assert len(found.coarse) == -(-len(found.fine) // found.factor)
    places = found.fine.place(np.arange(first, first + steps))
    assert (np.diff(places) >= 0).all()
    assert set(places.tolist()) == set(range(len(found.fine)))
    assert set(found.ranks.place(np.arange(ranks)).tolist()) == set(range(len(found.ranks)))


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(allow_nan=True, allow_infinity=True)), max_size=40))
def test_extremes_lose_nothing(rows: list[tuple[int, float]]) -> None:
    """The largest and the smallest of each cell are those of its numbers; one NaN makes the cell NaN; infinities are the extremes."""
    found = Extremes((4,))
    found.add(np.array([i for i, _ in rows], np.int64), np.array([v for _, v in rows], np.float64))
    for cell in range(4):
        mine = np.array([v for i, v in rows if i == cell])
        assert found.missing[cell] == (not len(mine))
        if len(mine):
            np.testing.assert_equal([found.high[cell], found.low[cell]], [mine.max(), mine.min()])


def test_a_bounded_page_keeps_spikes_and_nan() -> None:
    """Of 2,000 steps and 8 ranks in a small page, the one large number and the one NaN are in their columns; the list names the step."""
    rows = {rank: {f"layers.{i}.w": {s: [1.0] for s in range(2000)} for i in range(3)} for rank in range(8)}
    rows[6]["layers.1.w"][1210] = [500.0]
    rows[4]["layers.2.w"][77] = [math.nan]
    trends = collect([Made({"grad_reduced": rows})], numbers=2000)
    how = trends.plan
    assert how.numbers <= 2000
    assert len(how.fine) < 2000
    high = grid(trends, "grad_reduced", "norm")
    assert high[1].max() == 500.0
    assert how.fine.place(np.array([1210]))[0] == high[1].argmax()
    assert np.isnan(high[2]).sum() == 1
    assert [(f.step, f.ranks, f.steps) for f in trends.runs[0].nonfinite] == [(77, (4,), 1)]
    assert np.nanmax(trends.runs[0].grids["grad_reduced", "norm"].cube.high) == 500.0
    assert trends.runs[0].stand_out[0].factor == pytest.approx(500.0)


def test_numbers_that_are_not_finite_come_in_the_order_of_execution() -> None:
    """Cause before consequence: the loss behind the forward pass and before the gradients, their norm behind these, other numbers last."""
    bad: dict[int, list[float]] = {4: [math.nan]}
    scalars = dict.fromkeys(("learning_rate", "grad_norm", "loss", "lm loss"), bad)
    run = {
        "param_updated": {0: {"w": bad}},
        "grad_reduced": {0: {"layers.0.w": bad, "layers.1.w": bad}},
        "actv": {0: {"layers.0.output": bad, "layers.1.output": bad}},
        SCALARS: {0: scalars},
    }
    trends = collect([Made(run)])
    assert [trends.metrics[f.metric].targets[f.target].name for f in trends.runs[0].nonfinite] == [
        "layers.0.output",
        "layers.1.output",
        "loss",
        "lm loss",
        "layers.1.w",
        "layers.0.w",
        "grad_norm",
        "w",
        "learning_rate",
    ]


def test_two_runs_share_their_axes_and_the_first_difference_is_found() -> None:
    """Steps are matched by number (moved by --shift), targets by name; of what differs the layer that ran first comes first."""

    def of(wrong: float, first: int = 0) -> dict[str, Any]:
        def steps(factor: float) -> dict[int, list[float]]:
            return {first + s: [(factor if s >= 3 else 1.0) * (1 + s)] for s in range(6)}

        return {
            "grad_reduced": {0: {f"layers.{i}.w": steps(wrong) for i in range(4)}},
            "actv": {0: {f"layers.{i}.output": steps(wrong if i >= 2 else 1.0) for i in range(4)}},
            SCALARS: {0: {"loss": steps(wrong), "step_seconds": steps(5.0 * wrong)}},
        }

    trends = collect([Made(of(1.0), "a"), Made(of(1.5, 100), "b")], shift=-100)
    assert trends.plan.fine.of == 6
    assert [(f.step, f.metric, trends.metrics[f.metric].targets[f.target].name) for f in trends.apart] == [
        (3, "actv", "layers.2.output"),
        (3, "actv", "layers.3.output"),
        (3, SCALARS, "loss"),
        *[(3, "grad_reduced", f"layers.{i}.w") for i in (3, 2, 1, 0)],
    ]
    assert all(f.factor == pytest.approx(1 / 3) for f in trends.apart)


def test_a_difference_is_as_large_as_it_is_drawn() -> None:
    """Of the larger of both numbers, whatever the step and however many ranks differ."""
    for ranks in (1, 8):
        one, two = ({"m": {rank: {"x": {s: [number] for s in range(9)}} for rank in range(ranks)}} for number in (0.002, 0.001))
        (found,) = collect([Made(one, "a"), Made(two, "b")]).apart
        assert found.factor == pytest.approx(0.5)


def test_the_limit_follows_how_the_runs_begin() -> None:
    """Runs that begin alike are apart at the smallest difference; runs that never were quite the same at one in a thousand."""
    for first, limit in ((0.0, 1e-6), (1e-5, 1e-3)):
        one = {"m": {0: {"x": {s: [1.0] for s in range(5)}}}}
        two = {"m": {0: {"x": {s: [1.0 + (first if s < 2 else 1e-5 if s < 4 else 1e-2)] for s in range(5)}}}}
        trends = collect([Made(one, "a"), Made(two, "b")])
        assert trends.limit == limit
        assert [f.step for f in trends.apart] == [2 if first == 0 else 4]


UNEVEN = {
    "a rank ends a step early": (lambda rank, step: (rank, step) != (1, 5), 6, 5),
    "a rank has a hole": (lambda rank, step: (rank, step) != (0, 2), 6, 2),
    "every other step": (lambda _, step: step % 2 == 0, 6, 1),
    "within a column of many steps": (lambda rank, step: (rank, step) != (1, 3000), 4000, 3000),
}


@pytest.mark.parametrize("case", UNEVEN)
@pytest.mark.parametrize("swapped", [False, True])
def test_numbers_of_other_steps_and_ranks_are_not_compared(case: str, swapped: bool) -> None:
    """What both runs have is the same. Where one lacks a number the extremes are of other numbers: no difference, and nothing that is
    passed over in silence. A row beside it is whole."""
    there, steps, first = UNEVEN[case]

    def of(kept: Any) -> dict[str, Any]:
        def numbers(rank: int) -> dict[int, list[float]]:
            return {step: [1.0 + rank + step] for step in range(steps) if kept(rank, step)}

        return {"m": {rank: {"x": numbers(rank), "whole": {s: [1.0] for s in range(steps)}} for rank in (0, 1)}}

    whole, uneven = Made(of(lambda *_: True), "whole"), Made(of(there), "uneven")
    trends = collect([uneven, whole] if swapped else [whole, uneven])
    assert trends.apart == []
    assert trends.left_alone
    (said,) = trends.runs[0].problems
    column = int(trends.plan.fine.first[trends.plan.fine.place(np.array([first]))[0]])
    assert said.startswith(f"1 rows have numbers of a step or rank that one run alone has, the first at step {column};")


def test_nan_on_one_side_only_is_a_difference() -> None:
    """Two runs are apart where one is finite and the other is not, and together where both have the same NaN."""
    one = {"m": {0: {"x": {0: [1.0]}, "y": {0: [math.nan]}, "z": {0: [math.inf]}}}}
    two = {"m": {0: {"x": {0: [math.nan]}, "y": {0: [math.nan]}, "z": {0: [-math.inf]}}}}
    trends = collect([Made(one, "a"), Made(two, "b")])
    assert [trends.metrics["m"].targets[f.target].name for f in trends.apart] == ["x", "z"]


def test_pipeline_stages_are_layers_of_their_own(tmp_path: Path) -> None:
    """Layer 0 of the second stage is not layer 0 of the first, and stands behind all layers of the first."""
    for rank in (0, 1):
        run(tmp_path, rank, {0: {f"layers.{i}.w": [1.0 + rank] for i in (0, 1)}})
        (directory,) = (tmp_path / "monitor").glob(f"*rank{rank}*")
        facts = json.loads((directory / "run.json").read_text())
        (directory / "run.json").write_text(json.dumps({**facts, "rank_info": {"pp": rank}}))
    trends = collect([open_source(tmp_path)])
    shown = [t.shown for t in trends.metrics["grad_reduced, reduced"].targets]
    assert shown == ["layers.0.w", "layers.1.w", "pp1:layers.0.w", "pp1:layers.1.w"]


def test_layers_are_in_the_order_of_the_model() -> None:
    """Numbers count as numbers, what has none stays where it was."""
    names = ["embed.w", "layers.10.a", "layers.9.a", "layers.9.b", "layers.0.a", "head.w"]
    order = [t.name for t in in_order([Target(n) for n in names])]
    assert order == ["embed.w", "layers.0.a", "layers.9.a", "layers.9.b", "layers.10.a", "head.w"]


def test_rows_of_digits_that_are_no_numbers_have_an_order_too() -> None:
    """Digits that `int` does not take, and thousands of them, are text."""
    names = ["layers.\u00b2.w", f"layers.{'9' * 5000}.w", "layers.1.w"]
    assert {target.name for target in in_order([Target(name) for name in names])} == set(names)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("CREATE VIEW trend_data AS WITH RECURSIVE c(x) AS (SELECT 0 UNION ALL SELECT x + 1 FROM c) SELECT x AS rank FROM c", "is a view"),
        ("CREATE TABLE trend_data (rank, step, target_id, metric_id); INSERT INTO trend_data VALUES (x'ff', 0, 1, 1)", "are no numbers"),
        ("CREATE TABLE trend_data (rank, step, target_id, metric_id); INSERT INTO trend_data VALUES (0, 0, 1, 1)", "no such table"),
        ("CREATE TABLE other (x)", "no such table: trend_data"),
    ],
)
def test_a_data_base_that_is_none_is_said(script: str, says: str, tmp_path: Path) -> None:
    """What is wrong with a data base is in the message; a view is not asked, for it may have no end."""
    with closing(sqlite3.connect(tmp_path / "x.trend.db")) as db:
        db.executescript(script)
    with pytest.raises(UsageError, match=says):
        collect([open_source(tmp_path / "x.trend.db")])


def test_a_data_base_with_anything_in_its_columns(tmp_path: Path) -> None:
    """A path and names that are no UTF-8, and ranks that are no numbers beside those that are, do not keep the rest from being read."""
    path = tmp_path / "x\udcff.trend.db"  # the byte 0xff, which is no UTF-8
    with closing(sqlite3.connect(path)) as db:
        db.executescript(
            """CREATE TABLE trend_data (rank, step, target_id, metric_id, norm);
            CREATE TABLE monitoring_targets (target_id, target_name, vpp_stage, micro_step);
            CREATE TABLE monitoring_metrics (metric_id, metric_name);
            INSERT INTO monitoring_metrics VALUES (1, 'grad');
            INSERT INTO monitoring_targets VALUES (1, x'ff61', 0, 0);
            INSERT INTO trend_data VALUES (0, 0, 1, 1, 2.0), ('x', 0, 1, 1, 2.0);"""
        )
    source = open_source(path)
    trends = collect([source])
    assert source.ranks == [0]
    assert [target.name for metric in trends.metrics.values() for target in metric.targets] == ["\\xffa"]


def test_micro_batches_are_their_extremes_or_rows(tmp_path: Path) -> None:
    """Several micro batches of a step are one cell with the largest and the smallest; on request a row each."""
    sink = CsvSink(CsvSettings(), MonitorSettings(ops=OPS), output_dir=tmp_path, rank=0)
    for micro in range(3):
        sink.write(frame_of({"x": [float(micro + 1)]}, family="actv", phase="", micro_step=micro, step=5), [])
    sink.close()
    cube = collect([open_source(tmp_path)]).runs[0].grids["actv", "norm"].cube
    assert (cube.high.item(), cube.low.item()) == (3.0, 1.0)
    apart = collect([open_source(tmp_path, Wanted(micro_steps=True))])
    assert [t.shown for t in apart.metrics["actv"].targets] == ["x [micro 0]", "x [micro 1]", "x [micro 2]"]


def test_monitor_and_dump_of_one_run_are_one_page(tmp_path: Path) -> None:
    """An output directory with both has the metrics of both, on one axis of steps."""
    run(tmp_path, 0, {s: {"a.w": [1.0]} for s in range(3)})
    place = tmp_path / "dump" / "step5" / "rank0"
    place.mkdir(parents=True)
    tensor = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "Max": 1.0, "Min": 0.0, "Mean": 0.5, "Norm": 1.0}
    content = {"task": "statistics", "level": "L1", "data": {"Functional.relu.0.forward": {"input_args": [], "output": [tensor]}}}
    (place / "dump.json").write_text(json.dumps(content))
    trends = collect([open_source(tmp_path)])
    assert list(trends.metrics) == [SCALARS, "grad_reduced, reduced", "forward"]
    assert trends.plan.fine.first.tolist() == [0, 1, 2, 5]
    assert trends.runs[0].kinds == ("csv", "dump")


def test_what_a_run_writes_meanwhile_is_left_out_and_said() -> None:
    """A run that goes on writes steps and tensors between the two passes: the page has what the first pass saw, and says what it left."""

    class Going(Made):
        reads = 0

        def parts(self, rank: int, progress: Progress) -> Iterator[Part]:
            self.reads += 1
            self._rows: dict[str, dict[int, dict[str, dict[int, list[float]]]]] = {"actv": {0: {"a": {0: [1.0], 1: [2.0]}}}}
            if self.reads > 1:
                self._rows["actv"] = {0: {"b": {0: [9.0]}, "a": {0: [1.0], 1: [2.0], 2: [math.nan]}}}
                self._rows["later"] = {0: {"a": {0: [1.0]}}}
            yield from super().parts(rank, progress)

    trends = collect([Going({"actv": {0: {"a": {0: [1.0]}}}})])
    (run,) = trends.runs
    assert [target.name for target in trends.metrics["actv"].targets] == ["a"]
    np.testing.assert_array_equal(run.grids["actv", "norm"].cube.high, [[[1.0, 2.0]]])
    assert sum(run.problems.values()) == 3
    assert not run.nonfinite


def test_a_dump_that_is_large_is_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page does not depend on how much of a dump stays in memory between its passes."""
    path = FIXTURES / "26.2.0" / "two_ranks"
    pages = []
    for rows in (dumps.KEPT_ROWS, 0):
        monkeypatch.setattr(dumps, "KEPT_ROWS", rows)
        pages.append(dict(islands(collect([open_source(path)]))))
    assert pages[0] == pages[1]


def test_what_is_asked_for(tmp_path: Path) -> None:
    """Ranks, steps, metrics, statistics and targets that are not wanted are not on the page; nothing left is an error with words."""
    for rank in range(3):
        run(tmp_path, rank, {s: {"a.w": [1.0], "b.w": [2.0]} for s in range(5)})
    wanted = Wanted(ranks=frozenset({1, 2}), steps=frozenset({3, 4}), metrics=("grad",), statistics=("NORM",), targets=("b",))
    trends = collect([open_source(tmp_path, wanted)])
    assert (trends.runs[0].ranks, trends.plan.fine.first.tolist()) == ([1, 2], [3, 4])
    assert [(m.name, [t.shown for t in m.targets], m.statistics) for m in trends.metrics.values()] == [
        ("grad_reduced, reduced", ["b.w"], ["norm"])
    ]
    with pytest.raises(UsageError, match="none of the ranks"):
        open_source(tmp_path, Wanted(ranks=frozenset({9})))
    with pytest.raises(UsageError, match="nothing to show"):
        collect([open_source(tmp_path, Wanted(targets=("zzz",)))])
    with pytest.raises(UsageError, match="no files of a monitor"):
        open_source(tmp_path / "nowhere")


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=12))
def test_blocks_hold_each_number_as_what_it_is(values: list[float]) -> None:
    """A number of a block is the run's to float32, or exactly where float32 would make it 0 or infinite; NaN and missing are two things."""
    rows = {"m": {0: {"x": {2 * i: [v] for i, v in enumerate(values)}, "y": {1: [0.5]}}}}
    trends = collect([Made(rows)])
    content = dict(islands(trends))["c.0.0.0.0"]
    size = content[0]
    plain = np.frombuffer(content[1:], np.uint8).reshape(size, -1).T.copy().view("<f4" if size == 4 else "<f8").reshape(2, -1)
    gone = plain.view("<u4" if size == 4 else "<u8") == (0xFFC00000 if size == 4 else 0xFFF8000000000000)
    steps = trends.plan.fine.first.tolist()
    for i, v in enumerate(values):
        got = plain[0, steps.index(2 * i)]
        assert not gone[0, steps.index(2 * i)]
        assert math.isfinite(got) == math.isfinite(v)
        assert (got == 0) == (v == 0)
        np.testing.assert_allclose(got, v, rtol=1e-7, atol=1e-44)
    assert gone[0, steps.index(1)]
    assert block_targets(trends) >= 1


def test_bins_are_even() -> None:
    """Steps are spread evenly over the columns; few steps have one each."""
    assert Bins.even(np.arange(3), 10).single
    found = Bins.even(np.arange(1000) * 7, 64)
    sizes = np.bincount(found.place(np.arange(1000) * 7))
    assert (len(sizes), sizes.min(), sizes.max()) == (64, 15, 16)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line per run, what is kept, what stands out; the page is beside the run, mode 0640; wrong use is exit code 2."""
    for name in ("a", "b"):
        run(tmp_path / name, 0, {s: {"layers.0.w": [math.nan if name == "b" and s == 2 else 1.0]} for s in range(4)})
    assert main(["trends", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    out = capsys.readouterr().out
    assert "every step and rank is kept" in out
    assert "NaN: step 2, rank 0, layers.0.w (grad_reduced, reduced) (norm, min, max, mean, nans)" in out
    assert "only one of them is finite" in out
    page = tmp_path / "a" / "analysis" / "trends-1" / "trends.html"
    assert page.stat().st_mode & 0o777 == 0o640
    assert main(["trends", str(tmp_path / "a"), "--size", "0"]) == 2
    assert main(["trends", str(tmp_path / "none")]) == 2
    assert "no such directory" in capsys.readouterr().err


def test_the_examples_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands of docs/guide/trends.md run as they stand there, and every option it names is one."""
    text = (Path(__file__).parents[2] / "docs" / "guide" / "trends.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name, factor in (("RUN", 1.0), ("GOLDEN", 1.5)):
        run(tmp_path / name, 0, {s: {"layers.0.w": [factor if s > 2 else 1.0]} for s in range(5)})
    lines = [shlex.split(line, comments=True) for line in re.findall(r"^msprobe (?!monitor).*$", text, re.MULTILINE)]
    assert len(lines) == 4
    assert [main(words[1:]) for words in lines] == [0, 1, 1, 0]
    assert Path("RUN/analysis/trends-1/trends.html").exists()
    assert main(["trends", "trend", "-o", "db.html"]) == 0
    out = capsys.readouterr().out
    assert "runs apart by more than 1e-06: 1, first:" in out
    known = set(sub_parser("trends")._option_string_actions)
    assert set(re.findall(r"`(--[a-z_-]+)", text)) <= known
