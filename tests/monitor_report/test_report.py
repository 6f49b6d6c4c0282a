"""``msprobe monitor report``: what its page holds, and that a browser draws it."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msprobe_engine.cli.main import main
from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.records import Sample
from msprobe_engine.core.settings.schema import CsvSettings, MonitorSettings
from msprobe_engine.core.testing import frame_of
from msprobe_engine.formats.monitor.reader import open_run
from msprobe_engine.probe.sinks.csv.monitor import CsvSink
from msprobe_engine.report.trends.alerts import MAX_ALERTS
from msprobe_engine.report.run.data import BINS, LINES, collect
from msprobe_engine.report.run.page import render

HOSTILE = "layers.0.</script><script>document.title='x'</script>&amp;.weight"


def write(
    root: Path, rank: int, steps: dict[int, dict[str, list[float]]], *, alerts: dict[int, list[Alert]] | None = None, loss: float = 1.0
) -> None:
    """One rank of a run by the CSV sink: step to tensors."""
    sink = CsvSink(CsvSettings(), MonitorSettings(), output_dir=root, rank=rank)
    for step, tensors in steps.items():
        sink.write(frame_of(tensors, step=step, rank=rank, scalars={"loss": loss / (step + 1)}), (alerts or {}).get(step, []))
    sink.close()


def alert(step: int, rank: int = 0, name: str = "layers.1.w") -> Alert:
    return Alert("nan_inf", "critical", "grad", name, step, rank, math.nan, "finite", "it is NaN", extra={"meaning": "m", "next": "n"})


def picture(data: dict[str, Any], statistic: str) -> dict[str, Any]:
    found = [p for p in data["pictures"] if p["statistic"] == statistic]
    assert len(found) == 1
    return dict(found[0])


def test_a_tensor_without_elements_is_not_one_with_nan(tmp_path: Path) -> None:
    """An expert that gets no token has rows without numbers: that is nothing bad, and the picture has its other steps."""
    write(tmp_path, 0, {0: {"experts.0.w": [], "b.w": [1.0]}, 1: {"experts.0.w": [2.0], "b.w": [1.0]}, 2: {"b.w": [math.nan]}})
    data = collect(open_run(tmp_path))
    assert picture(data, "norm")["bad"] == [[], [2]]
    assert [w["layer"] for w in data["worst"] if w["first_bad"] is not None] == ["b"]


def test_layers_add_in_quadrature_and_the_largest_rank_counts(tmp_path: Path) -> None:
    """A layer's norm is that of all its tensors; over ranks the largest is shown, and each rank has its curve."""
    write(tmp_path, 0, {0: {"layers.0.a": [3.0], "layers.0.b": [4.0], "head.w": [1.0]}})
    write(tmp_path, 1, {0: {"layers.0.a": [6.0], "layers.0.b": [8.0], "head.w": [1.0]}})
    norm = picture(collect(open_run(tmp_path)), "norm")
    assert norm["layers"] == ["layers.0", "head"]
    assert norm["top"] == [[10.0], [1.0]]
    assert norm["lines"] == {"rank 0": [pytest.approx(math.sqrt(26), rel=1e-4)], "rank 1": [pytest.approx(math.sqrt(101), rel=1e-4)]}


def test_what_is_not_finite_is_named_first(tmp_path: Path) -> None:
    """A layer with NaN is at the head of the list with its first step, and its cell is marked."""
    steps = {s: {"layers.1.w": [math.nan if s == 5 else 1.0], "layers.10.w": [1.0 + 9 * (s == 3)]} for s in range(8)}
    write(tmp_path, 0, steps, alerts={5: [alert(5)]})
    data = collect(open_run(tmp_path))
    norm = picture(data, "norm")
    assert norm["layers"] == ["layers.1", "layers.10"]
    assert norm["bad"] == [[5], []]
    assert (data["worst"][0]["layer"], data["worst"][0]["first_bad"]) == ("layers.1", 5)
    jump = next(w for w in data["worst"] if w["layer"] == "layers.10")
    assert (jump["jump"], jump["below"], jump["jump_step"]) == (10.0, False, 3)
    assert data["timeline"] == [{"rule": "nan_inf", "severity": "critical", "marks": [(5, 1)]}]
    assert data["meanings"] == [{"rule": "nan_inf", "meaning": "m", "next": "n"}]


def test_one_rank_apart(tmp_path: Path) -> None:
    """The rank that differs from the others is named with its factor."""
    for rank in range(4):
        write(tmp_path, rank, {s: {"layers.0.w": [100.0 if rank == 2 else 1.0]} for s in range(3)})
    data = collect(open_run(tmp_path))
    assert [(w["rank"], w["rank_factor"]) for w in data["worst"]] == [(2, 100.0)]
    assert picture(data, "norm")["apart"] == [[0.0, 0.0, 2.0, 0.0]]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=700), st.integers(1, 7))
def test_sizes_are_bounded_and_spikes_stay(values: list[float], every: int) -> None:
    """However many steps there are, a curve has at most `BINS` points, and its largest value is that of the run."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), 0, {i * every: {"layers.0.w": [v]} for i, v in enumerate(values)})
        data = collect(open_run(folder))
    line = picture(data, "norm")["top"][0]
    assert len(line) == len(data["steps"]) == min(BINS, len(values))
    assert max(line) == pytest.approx(max(values), rel=1e-4)
    assert len(data["scalars"][0]["lines"]["rank 0"]) == len(line)


def test_many_ranks_and_alerts(tmp_path: Path) -> None:
    """More ranks than `LINES` become three curves; alerts beyond the limit are counted."""
    for rank in range(LINES + 2):
        found = {0: [alert(0, rank) for _ in range(60)]}
        write(tmp_path, rank, {0: {"layers.0.w": [float(rank + 1)]}}, alerts=found)
    data = collect(open_run(tmp_path))
    assert picture(data, "norm")["lines"] == {"smallest rank": [1.0], "median": [5.5], "largest rank": [10.0]}
    assert len(data["alerts"]) == MAX_ALERTS
    assert data["alerts_left_out"] == 100


def test_that_a_condition_is_over_is_listed_and_not_counted(tmp_path: Path) -> None:
    """The end of a lasting condition is a line of the list; counts and the time line are of what began, as in `msprobe monitor analyze`."""
    over = dataclasses.replace(alert(1), extra={"over": True})
    write(tmp_path, 0, {step: {"layers.0.w": [1.0]} for step in range(2)}, alerts={0: [alert(0)], 1: [over]})
    data = collect(open_run(tmp_path))
    assert len(data["alerts"]) == 2
    assert list(data["rules"].values()) == [1]
    assert [row["marks"] for row in data["timeline"]] == [[(0, 1)]]


def test_names_end_no_script(tmp_path: Path) -> None:
    """Names are data: no name closes the script element, and the JSON reads back."""
    write(tmp_path, 0, {0: {HOSTILE: [1.0]}}, alerts={0: [alert(0, name=HOSTILE)]})
    data = collect(open_run(tmp_path))
    page = render(data).decode()
    assert HOSTILE not in page
    inside = re.search(r'id="run">(.*?)</script>', page, re.DOTALL)
    assert inside is not None
    assert json.loads(gzip.decompress(base64.b64decode(inside[1]))) == json.loads(json.dumps(data))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page is written beside the run with mode 0640, and a summary is printed; a directory without a run is an error."""
    write(tmp_path, 0, {s: {"layers.0.w": [1.0 + 9 * (s == 2)]} for s in range(4)}, alerts={2: [alert(2)]})
    assert main(["monitor", "report", str(tmp_path)]) == 1
    assert "1 alert of rule nan_inf" in capsys.readouterr().out
    assert (tmp_path / "report.html").stat().st_mode & 0o777 == 0o640
    (tmp_path / "empty").mkdir()
    assert main(["monitor", "report", str(tmp_path / "empty")]) == 2
    with pytest.raises(UsageError):
        collect(open_run(tmp_path / "empty"))


SHOWN: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "all is well": ({}, (0, 0)),
    "a layer that jumps": ({"norms": [1.0, 1.0, 50.0]}, (0, 0)),
    "a gradient that is NaN": ({"norms": [1.0, math.nan, 1.0]}, (1, 1)),
    "a gradient that is infinite": ({"norms": [1.0, 1.0, math.inf]}, (1, 1)),
    "a loss that is NaN": ({"loss": math.nan}, (1, 1)),
    "an alert": ({"alerts": {1: [alert(1)]}}, (1, 1)),
    "a condition that is over": ({"alerts": {1: [dataclasses.replace(alert(1), extra={"over": True})]}}, (0, 0)),
    "a file that is damaged": ({"damage": True}, (3, 3)),
    "a NaN and a file that is damaged": ({"norms": [1.0, math.nan, 1.0], "damage": True}, (1, 1)),
}
"""What a run holds, and the exit codes of ``monitor report`` and of ``trends``."""


@pytest.mark.parametrize("case", SHOWN)
def test_exit_codes_say_what_the_page_shows(tmp_path: Path, case: str) -> None:
    """1: the page shows an alert or a number that is not finite; else 3: something could not be read; else 0."""
    held, codes = SHOWN[case]
    steps = {step: {"layers.0.w": [norm]} for step, norm in enumerate(held.get("norms", [1.0, 1.0, 1.0]))}
    write(tmp_path, 0, steps, alerts=held.get("alerts"), loss=held.get("loss", 1.0))
    if held.get("damage"):
        table = next(tmp_path.rglob("grad_reduced*.csv"))
        table.with_name("grad_unreduced_0-2.csv").write_bytes(b"vpp_stage,name,step,norm\n0,layers.0.w,no number,1\n")
    page = str(tmp_path / "page.html")
    assert (main(["monitor", "report", str(tmp_path), "-o", page]), main(["trends", str(tmp_path), "-o", page])) == codes


def test_a_fall_is_told_from_a_rise_and_moments_that_fill_are_no_news(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A norm that falls to a tenth of its median is said as 1/10; a second moment that is small in the first step is not said."""
    sink = CsvSink(CsvSettings(), MonitorSettings(), output_dir=tmp_path, rank=0)
    for step, (gradient, moment) in enumerate([(10.0, 0.1), (10.0, 5.0), (1.0, 5.0), (10.0, 5.0)]):
        frame = frame_of({"a.w": [gradient], "b.w": [moment]}, step=step)
        frame.samples[1] = Sample("exp_avg_sq", "b.w", frame.samples[1].ref)
        sink.write(frame, [])
    sink.close()
    assert main(["monitor", "report", str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "median" in line]
    assert lines == ["  a (grad_reduced, reduced): 1/10 of its median at step 2"]
