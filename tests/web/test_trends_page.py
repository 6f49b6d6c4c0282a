"""The trends page in a browser: what it shows, and that what is not finite is always seen."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from frames_of_lists import frame_of

from msprobe_engine.cli.main import main
from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.settings.schema import CsvSettings, MonitorSettings
from msprobe_engine.probe.sinks.csv.monitor import CsvSink

PICK = """(place) => { const S = Trends.state; Object.assign(S, place); }"""
CELLS = """async () => (await Trends.pictures()).map(p => ({n: p.n, cols: p.cols,
  value: Array.from(p.value, v => Number.isFinite(v) ? v : String(v)), kind: Array.from(p.kind)}))"""
BAD = """() => { const c = document.querySelector('.t-heat canvas'), d = c.getContext('2d').getImageData(0, 0, c.width - 20, c.height).data;
  let n = 0; for (let i = 0; i < d.length; i += 4) if (d[i] === 209 && d[i + 1] === 0 && d[i + 2] === 108) n++; return n; }"""

RAISED = (("outlier", "warning", (0, 6, 7)), ("nan_inf", "critical", (3, 4)))
"""Rules, and at which steps each of two ranks raises them."""


def write(root: Path, ranks: int, steps: int, bad: dict[tuple[int, int], float], layers: int = 3, factor: float = 1.0) -> Path:
    """Each layer's norm is (1 + layer) * (1 + step), times 2 on rank 1; `bad`: rank and step to what layer 1 has there."""
    for rank in range(ranks):
        sink = CsvSink(CsvSettings(), MonitorSettings(ops=("norm", "min", "max")), output_dir=root, rank=rank)
        for step in range(steps):
            scale = (1 + step) * (2 if rank == 1 else 1) * (factor if step >= 3 else 1)
            tensors = {f"layers.{i}.w": [(1.0 + i) * scale] for i in range(layers)}
            if (rank, step) in bad:
                tensors["layers.1.w"] = [bad[rank, step]]
            sink.write(frame_of(tensors, step=step, rank=rank, scalars={"loss": 3.0 / (1 + step)}), [])
        sink.close()
    return root


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write(tmp_path_factory.mktemp("one"), 2, 6, {(1, 4): math.nan, (0, 5): -math.inf})
    assert main(["trends", str(root), "-o", str(root / "page.html")]) == 1
    return root / "page.html"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("two")
    a, b = write(root / "a", 2, 6, {}), write(root / "b", 2, 6, {(0, 5): math.nan}, factor=1.5)
    assert main(["trends", str(a), str(b), "-o", str(root / "page.html")]) == 1
    return root / "page.html"


def ready(page: Any) -> Any:
    page.wait_for_selector(".t-heat[data-ready]")
    page.wait_for_selector(".t-chart[data-ready]")
    return page


def cells(page: Any, **state: Any) -> Any:
    """The pictures that the page shows in a state; numbers that are not finite as texts."""
    page.evaluate(PICK, state)
    found = page.evaluate(CELLS)
    return found if len(found) > 1 else found[0]


def test_it_opens_on_the_first_number_that_is_not_finite(one: Path, opened: Callable[..., Any]) -> None:
    """The list names it first, the map has its cell chosen, and the pixels of NaN and Inf are there."""
    page = ready(opened(one))
    item = page.locator(".t-item").first
    assert item.locator(".name").inner_text() == "layers.1.w"
    assert "NaN · step 4 · rank 1" in item.inner_text()
    assert page.evaluate("[Trends.state.target, Trends.state.column, Trends.state.rank]") == [1, 4, 1]
    assert page.locator(".t-linebar h2").inner_text() == "layers.1.w"
    assert page.evaluate(BAD) > 500
    assert "1 NaN" in page.locator(".t-legend").inner_text()
    assert "1 Inf" in page.locator(".t-legend").inner_text()


def test_alerts_are_listed_and_lead_to_their_tensor(tmp_path: Path, opened: Callable[..., Any]) -> None:
    """What rules raised is a list of its own, with what each rule means; a row leads to its tensor, rank and step."""
    sink = CsvSink(CsvSettings(), MonitorSettings(), output_dir=tmp_path, rank=0)
    extra = {"meaning": "it left its band", "next": "dump this step"}
    raised = Alert("outlier", "critical", "grad_reduced", "layers.1.w", 2, 0, 7.0, "< 3", "7 times its median", extra=extra)
    for step in range(4):
        tensors = {f"layers.{i}.w": [1.0] for i in range(3)}
        sink.write(frame_of(tensors, step=step, rank=0, scalars={"loss": 1.0}), [raised] if step == 2 else [])
    sink.close()
    assert main(["trends", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 1
    page = ready(opened(tmp_path / "page.html"))
    assert page.locator("[role=tab][aria-selected=true]").inner_text() == "Alerts1"
    assert page.locator("#t-pane dd").inner_text() == "it left its band; dump this step"
    item = page.locator(".t-item")
    assert item.locator(".name").inner_text() == "layers.1.w"
    assert item.locator("small").all_inner_texts() == ["outlier · step 2 · rank 0", "7 times its median"]
    item.click()
    assert page.evaluate("[Trends.state.target, Trends.state.column, Trends.state.rank]") == [1, 2, 0]


def columns(page: Any) -> Callable[[float], float]:
    """Where a column of the course, the numbers above the map, begins, in pixels of the page."""
    box = page.locator(".t-course").bounding_box()
    left, count = page.evaluate("Heat.left()"), page.evaluate("Trends.state.to - Trends.state.from + 1")
    return lambda column: float(box["x"] + left + column * (box["width"] - left - 20) / count)


def test_the_course_has_the_loss_first_and_alerts_at_their_steps(tmp_path: Path, opened: Callable[..., Any]) -> None:
    """Above the map stand the facts of the run, a lane for each rule and the loss, or another number; a mark leads to its alerts."""
    for rank in range(2):
        sink = CsvSink(CsvSettings(), MonitorSettings(), output_dir=tmp_path, rank=rank)
        for step in range(8):
            made = [
                Alert(rule, severity, "grad", "layers.0.w", step, rank, 7.0, "< 3", f"{rule} {step}")
                for rule, severity, at in RAISED
                if step in at
            ]
            scalars = {"step_seconds": 1000.0, "grad_norm": 2.0, "loss": 3.0 / (1 + step) + rank}
            sink.write(frame_of({"layers.0.w": [1.0]}, step=step, rank=rank, scalars=scalars), made)
        sink.close()
    assert main(["trends", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 1
    page = ready(opened(tmp_path / "page.html"))
    page.wait_for_selector(".t-course[data-ready]")
    facts = page.locator(".t-said").inner_text()
    assert re.search(r" · \d{4}-\d\d-\d\d \d\d:\d\d:\d\d · .+ · 2 ranks · steps 0 to 7 · 2 h 13 min in its steps · 10 alerts$", facts)
    number = page.get_by_label("Number of the step")
    assert number.locator("option:checked").inner_text() == "loss"
    x, box = columns(page), page.locator(".t-course").bounding_box()
    page.mouse.move(x(1.5), box["y"] + 40)
    assert page.locator(".tip").inner_text().split("\n") == ["step 1", "rank 0 1.5", "rank 1 2.5"]
    number.select_option("grad_norm")
    page.wait_for_timeout(100)
    page.mouse.move(x(2.5), box["y"] + 40)
    assert page.locator(".tip").inner_text().split("\n") == ["step 2", "rank 0 2", "rank 1 2"]
    lanes = page.locator(".t-lanes").bounding_box()
    page.mouse.move(x(3.5), lanes["y"] + 24)
    assert page.locator(".tip").inner_text().split("\n") == ["nan_inf (critical)", "step 3: 2 alerts"]
    page.mouse.click(x(3.5), lanes["y"] + 24)
    assert page.locator(".t-item small").all_inner_texts()[::2] == ["nan_inf · step 3 · rank 0", "nan_inf · step 3 · rank 1"]
    assert page.evaluate("Trends.state.column") == 3
    page.get_by_role("button", name="All alerts").click()
    assert page.locator(".t-item").count() == 10
    page.get_by_role("button", name="outlier (6)").click()
    assert page.locator(".t-item").count() == 6
    page.locator("#t-tab-about").click()
    page.get_by_text("Settings of the monitor").click()
    assert "gradient_phases" in page.locator(".t-pane").inner_text()
    page.evaluate("Trends.set({from: 2, to: 5})")
    page.wait_for_timeout(100)
    page.mouse.click(columns(page)(0.5), box["y"] + 40)
    assert page.evaluate("Trends.state.column") == 2
    page.evaluate("Trends.book.runs[0].lanes = Array(9).fill(Trends.book.runs[0].lanes[0]); Trends.tell('change')")
    page.wait_for_timeout(100)
    assert page.locator(".t-lanes").get_attribute("tabindex") == "0"
    assert page.locator(".t-lanes").bounding_box()["height"] < 90


def test_rows_are_tensors_layers_or_all_of_them(tmp_path: Path, opened: Callable[..., Any]) -> None:
    """Norms of the tensors of a layer add in quadrature, within a rank and a step, counts as sums, others are extremes; NaN stays.
    A list leads to its tensor. Of ranks a map says how far each is from the others."""
    for rank in range(3):
        sink = CsvSink(CsvSettings(), MonitorSettings(ops=("norm", "max", "nans")), output_dir=tmp_path, rank=rank)
        for step in range(2):
            a, b = (3.0, 4.0) if rank == 0 else (30.0, math.nan if step else 4.0) if rank == 1 else (0.3, 0.4)
            sink.write(frame_of({"layers.0.a": [a], "layers.0.b": [b], "head.w": [1.0]}, step=step, rank=rank), [])
        sink.close()
    assert main(["trends", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 1
    page = ready(opened(tmp_path / "page.html"))
    base = {"statistic": 0, "map": "ts", "third": "max", "rows": "layer"}
    found = cells(page, **base)
    assert (found["n"], found["value"]) == (2, [pytest.approx(math.hypot(30, 4)), "NaN", 1, 1])
    assert cells(page, **base | {"third": 0})["value"] == [5, 5, 1, 1]
    assert cells(page, **base | {"statistic": 1})["value"] == [30, "NaN", 1, 1]
    assert cells(page, **base | {"statistic": 2})["value"] == [0, 1, 0, 0]
    assert cells(page, **base | {"rows": "all", "third": 0})["value"] == pytest.approx([math.sqrt(26)] * 2)
    found = cells(page, **base | {"map": "tr", "third": "distance"})
    assert (found["value"], found["kind"]) == ([pytest.approx(math.sqrt(10)), "NaN", pytest.approx(10), 1, 1, 1], [0, 2, 0, 0, 0, 0])
    page.evaluate("Trends.set({map: 'ts', third: 'max', rows: 'tensor', target: 1})")
    page.get_by_label("Rows", exact=True).select_option("layer")
    page.wait_for_timeout(300)
    assert page.locator(".t-linebar h2").inner_text() == "layers.0"
    assert "norms in quadrature" in page.locator(".t-sentence").inner_text()
    assert "rows=layer" in page.evaluate("location.hash")
    page.locator(".t-item").first.click()
    assert page.evaluate("[Trends.state.rows, Trends.metric().targets[Trends.state.target]]") == ["tensor", "layers.0.b"]


def test_many_ranks_are_one_band_and_their_median(tmp_path: Path, opened: Callable[..., Any]) -> None:
    """More ranks than colours are a band from the smallest to the largest, a line of their median, and the chosen rank."""
    for rank in range(10):
        sink = CsvSink(CsvSettings(), MonitorSettings(ops=("norm",)), output_dir=tmp_path, rank=rank)
        sink.write(frame_of({"layers.0.w": [rank + 1.0]}, step=0, rank=rank, scalars={"loss": rank}), [])
        sink.close()
    assert main(["trends", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 0
    page = ready(opened(tmp_path / "page.html"))
    page.evaluate("Trends.set({rank: 7})")
    page.get_by_role("button", name="Table").click()
    page.wait_for_timeout(150)
    rows = [row.split("\t")[1:] for row in page.locator(".t-table tbody tr").all_inner_texts()]
    assert rows == [["all ranks, smallest to largest", "1", "10"], ["median of the ranks", "5.5", "5.5"], ["rank 7", "8", "8"]]


def test_the_maps_hold_the_numbers_of_the_files(one: Path, opened: Callable[..., Any]) -> None:
    """Layers x steps, ranks x steps and layers x ranks, with the third fixed, largest, smallest and as spread."""
    page = ready(opened(one))
    base = {"metric": 1, "statistic": 0, "map": "ts", "third": "max"}
    found = cells(page, **base)
    assert (found["n"], found["cols"]) == (3, 6)
    assert found["value"][:6] == [2, 4, 6, 8, 10, 12]
    assert found["value"][6:] == [4, 8, 12, 16, "NaN", "Infinity", 6, 12, 18, 24, 30, 36]  # a norm is never below 0
    assert found["kind"][10:12] == [2, 3]
    assert cells(page, third="min")["value"][:6] == [1, 2, 3, 4, 5, 6]
    assert cells(page, third="spread")["value"][:2] == [0.5, 0.5]
    assert cells(page, third=0)["value"][6:11] == [2, 4, 6, 8, 10]
    found = cells(page, map="rs", third=2)
    assert (found["n"], found["cols"]) == (2, 6)
    assert found["value"] == [3, 6, 9, 12, 15, 18, 6, 12, 18, 24, 30, 36]
    assert cells(page, third="max")["value"][6:] == [6, 12, 18, 24, "NaN", 36]
    found = cells(page, map="tr", third=3)
    assert found["value"] == [4, 8, 8, 16, 12, 24]
    found = cells(page, third="max")
    assert found["kind"] == [0, 0, 3, 2, 0, 0]
    assert cells(page, **{**base, "statistic": 2})["kind"][11] == 4  # the largest: -Inf, as min has it
    assert cells(page, metric=0, statistic=0, map="ts")["value"] == pytest.approx([3, 1.5, 1, 0.75, 0.6, 0.5])


def test_two_runs_and_their_difference(two: Path, opened: Callable[..., Any]) -> None:
    """It opens on the first difference; beside each other, subtracted and relative; NaN of one run is NaN of the difference."""
    page = ready(opened(two))
    assert page.evaluate("[Trends.state.run, Trends.state.column]") == ["relative", 3]
    assert page.locator("[role=tab][aria-selected=true]").inner_text().startswith("NaN")
    words = page.locator("option").all_text_contents()
    assert {"run · a", "golden · b", "run and golden side by side", "run against golden, relative"} <= {*words}
    base = {"metric": 1, "statistic": 0, "map": "ts", "third": "min"}
    a, b = cells(page, **base, run="both")
    assert (a["value"][:6], b["value"][:6]) == ([1, 2, 3, 4, 5, 6], [1, 2, 3, 6, 7.5, 9])
    assert cells(page, run="difference")["value"][:6] == [0, 0, 0, -2, -2.5, -3]
    found = cells(page, run="relative")
    assert found["value"][:4] == pytest.approx([0, 0, 0, -1 / 3])
    assert found["kind"][11] == 2
    page.locator("#t-tab-apart").click()
    assert "step 3" in page.locator(".t-item").first.inner_text()
    page.locator(".t-item").nth(1).click()
    chosen = page.locator(".t-item[aria-current] .name").first.inner_text()
    assert page.evaluate("Trends.metric().targets[Trends.state.target]") == chosen == page.locator(".t-linebar h2").inner_text()


def test_a_filter_hides_no_nan_without_a_word(one: Path, opened: Callable[..., Any]) -> None:
    """Rows with NaN or Inf that a filter takes away are counted beside the title, and a click brings them back."""
    page = ready(opened(one))
    page.get_by_label("Filter layers").fill("layers -1.w")
    note = page.locator(".t-hidden")
    note.wait_for()
    assert note.inner_text().startswith("1 rows with NaN or Inf")
    assert page.evaluate(BAD) == 0
    note.click()
    note.wait_for(state="detached")
    assert page.evaluate(BAD) > 500
    page.get_by_role("button", name="Only NaN / Inf").click()
    assert page.evaluate(CELLS)[0]["n"] == 1
    page.get_by_label("Filter layers").fill("nothing of this name")
    page.get_by_text("No layer matches the filter.").wait_for()


def test_keyboard(one: Path, opened: Callable[..., Any]) -> None:
    """Arrows move, n goes from one NaN or Inf to the next, the status says the cell, / filters, m changes the map, ? lists the keys."""
    page = ready(opened(one))
    page.locator(".t-heat").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("[Trends.state.target, Trends.state.column]") == [2, 3]
    assert page.locator("[role=status]").first.text_content().split("\n") == ["layers.2.w", "step 3", "24"]
    page.keyboard.press("n")
    assert page.evaluate("[Trends.state.target, Trends.state.column]") == [1, 4]
    page.keyboard.press("n")
    assert page.evaluate("[Trends.state.target, Trends.state.column]") == [1, 5]
    assert "Inf" in page.locator("[role=status]").first.inner_text()
    page.keyboard.press("Shift+N")
    page.keyboard.press("Home")
    assert page.evaluate("Trends.state.column") == 0
    page.keyboard.press("m")
    assert page.evaluate("Trends.state.map") == "rs"
    page.keyboard.press("/")
    page.keyboard.type("m")  # a word, and no command
    assert page.evaluate("Trends.state.map") == "rs"
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Escape")
    assert page.get_by_role("dialog").count() == 0


def test_mouse_and_lines(one: Path, opened: Callable[..., Any]) -> None:
    """A click chooses a cell and its lines, a drag shows these steps alone, the table and the CSV have the numbers of the lines."""
    page = ready(opened(one))
    box = page.locator(".t-heat").bounding_box()
    left = page.evaluate("Math.round(Math.min(300, Math.max(90, document.querySelector('.t-heat').clientWidth * 0.26)))")
    width = box["width"] - left - 20
    page.mouse.click(box["x"] + left + width * 2.5 / 6, box["y"] + 10)
    assert page.evaluate("[Trends.state.target, Trends.state.column]") == [0, 2]
    page.wait_for_timeout(150)
    assert page.locator(".t-linebar h2").inner_text() == "layers.0.w"
    page.mouse.move(box["x"] + left + width * 1.2 / 6, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + left + width * 3.8 / 6, box["y"] + 20, steps=3)
    page.mouse.up()
    assert page.evaluate("[Trends.state.from, Trends.state.to]") == [1, 3]
    page.get_by_role("button", name="Table").click()
    page.wait_for_timeout(150)
    rows = page.locator(".t-table tbody tr").all_inner_texts()
    assert [row.split("\t") for row in rows][:2] == [["1", "rank 0", "2"], ["1", "rank 1", "4"]]
    with page.expect_download() as download:
        page.get_by_role("button", name="Save CSV").click()
    assert (Path(download.value.path()).read_text()).splitlines()[:2] == ["step,line,smallest,largest", '1,"rank 0",2,2']
    page.get_by_role("button", name="All steps").click()
    page.get_by_role("button", name="Along layers").click()
    page.wait_for_timeout(150)
    assert [row.split("\t")[0] for row in page.locator(".t-table tbody tr").all_inner_texts()] == ["layers.0.w", "layers.1.w", "layers.2.w"]


def test_the_address_keeps_what_is_shown(one: Path, opened: Callable[..., Any]) -> None:
    """The address of a page opens the same map, cell and filter again; a damaged address opens the page as it is."""
    page = ready(opened(one))
    page.evaluate("Trends.set({map: 'tr', third: 'min', colour: 'median', filter: 'layers', column: 2, target: 2})")
    page.wait_for_timeout(400)
    address = page.evaluate("location.hash")
    other = ready(opened(one))
    other.goto("about:blank")
    other.goto(one.as_uri() + address)
    ready(other)
    names = ("map", "third", "colour", "filter", "column", "target")
    assert [other.evaluate(f"Trends.state.{name}") for name in names] == ["tr", "min", "median", "layers", 2, 2]
    other.goto("about:blank")
    other.goto(one.as_uri() + "#metric=grad_reduced%2C+reduced&third=99&steps=9-1&rank=x&map=<b>")
    ready(other)
    assert other.evaluate("[Trends.state.third, Trends.state.map]") == ["max", "ts"]


@pytest.mark.slow
def test_large_pages_say_what_they_keep(tmp_path: Path, opened: Callable[..., Any], accessible: Any) -> None:
    """With few numbers allowed, columns hold several steps and groups several ranks; the one NaN is still a mark that is seen, About says
    what is kept, and the page is accessible with the chart as a table, in Chinese."""
    root = write(tmp_path, 12, 40, {(7, 21): math.nan}, layers=40)
    assert main(["trends", str(root), "-o", str(root / "page.html"), "--size", "0.03"]) == 1
    page = ready(opened(root / "page.html"))
    plan = page.evaluate("Trends.book.plan")
    assert len(plan["fine"][0]) < 40 or plan["factor"] > 1
    assert page.evaluate(BAD) >= 9
    page.evaluate("Heat.next(1)")
    assert page.evaluate("[Trends.columnOf(21)]") == [page.evaluate("Trends.state.column")]
    page.locator("#t-tab-about").click()
    assert "40 steps in" in page.locator(".t-pane").inner_text()
    page.get_by_role("button", name="Table").click()
    assert accessible(page) == []
    page.locator("#kit-switches select").first.select_option("zh")
    assert "保留" in page.locator(".t-pane").inner_text()
