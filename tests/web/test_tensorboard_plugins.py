"""The TensorBoard plugins of the existing tool, in a browser, open the graphs and trend data bases that we write: ``tb-graph-ascend`` of
PyPI (extra `test`), and those in 26.2.0 (`make venv-existing`)."""

from __future__ import annotations

import importlib.util
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from existing_environment import environment_of, existing_tool
from existing_graph import cases, unpack
from frames_of_lists import frame_of

from msprobe_engine.core.settings.schema import CsvSettings, MonitorSettings
from msprobe_engine.formats.monitor.convert.data2db import data2db
from msprobe_engine.formats.monitor.convert.monitor2db import Options
from msprobe_engine.probe.sinks.csv.monitor import CsvSink
from msprobe_engine.report.graph.options import DB, NEW, OLD, VIS, GraphOptions
from msprobe_engine.report.graph.run import run

pytestmark = pytest.mark.timeout(240)
ROOT, HEAD = "Module.module.Transformer.forward.0", "Module.module.head.Head.forward.0"
VALUE = "2.3733718395233154"
"""The largest value of an input of `HEAD` in the clean run."""
WAIT = 20_000
BOARD = """
import sysconfig
from importlib import metadata
from tensorboard import default, main
own = metadata.distributions(path=[sysconfig.get_path("purelib")])
plugins = [point for distribution in own for point in distribution.entry_points if point.group == "tensorboard_plugins"]
default.get_dynamic_plugins = lambda: [point.load() for point in plugins]
main.run_main()
"""
"""TensorBoard with the plugins of its own environment: that of 26.2.0 sees ours too, whose plugin has the same name."""


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``db/run`` and ``vis/run``: two ranks, one of them with NaN, beside a clean run; in ``db`` a trend data base of two ranks, 5
    steps, 3 layers, one NaN."""
    out = tmp_path_factory.mktemp("logs")
    case = next(case for case in cases(NEW) if case.name == "job-nan")
    target, golden = unpack(case, out / "dumps")
    for name, generation in ((DB, NEW), (VIS, OLD)):
        run(target, golden, out / name / "run", GraphOptions(generation=generation, formats=(name,), overflow=True, workers=1))
    for rank in (0, 1):
        sink = CsvSink(CsvSettings(), MonitorSettings(ops=("norm", "max")), output_dir=out / "monitor", rank=rank)
        for step in range(5):
            tensors = {f"layers.{i}.w": [math.nan if (rank, step, i) == (1, 4, 2) else 1.0 + i + step] for i in range(3)}
            sink.write(frame_of(tensors, step=step, rank=rank), [])
        sink.close()
    (done,) = data2db(out / DB, out / "monitor", options=Options(micro_step=False))
    assert done.path.stat().st_mode & 0o777 == 0o640  # the plugin refuses what others can write
    return out


@pytest.fixture(scope="module")
def board() -> Iterator[Callable[[str, Path], str]]:
    """``board(python, directory)``: the address of a TensorBoard over a directory, one for all tests."""
    started: dict[tuple[str, Path], tuple[subprocess.Popen[str], str]] = {}

    def start(python: str, directory: Path) -> str:
        if (python, directory) not in started:
            started[python, directory] = _board(python, directory)
        return started[python, directory][1]

    yield start
    for process, _ in started.values():
        process.terminate()
        process.wait(30)


def _board(python: str, directory: Path) -> tuple[subprocess.Popen[str], str]:
    command = [python, "-c", BOARD, "--logdir", str(directory), "--port", "0", "--load_fast=false"]
    environment = environment_of(python)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment, cwd=directory)
    said = ""
    assert process.stderr is not None
    for line in process.stderr:
        said += line
        found = re.search(r"http://localhost:(\d+)/", line)
        if found:
            return process, f"http://127.0.0.1:{found.group(1)}"
    raise AssertionError(said)


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """An empty page."""
    context = browser.new_context(viewport={"width": 1600, "height": 1000}, locale="en-US")
    yield context.new_page()
    context.close()


def existing() -> str:
    """The python of the environment with 26.2.0."""
    return str(existing_tool("26.2.0").python)


class Plugin:
    """The plugin of graphs in a page; nodes are boxes named after their side and themselves.

    Attributes:
        asked: the rank of every request.
        wrong: errors of scripts, and answers that say that something failed.
    """

    def __init__(self, page: Any, address: str) -> None:
        self.wrong: list[str] = []
        self.asked: list[int | None] = []
        self.page = page
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("response", self._answered)
        self.page.goto(f"{address}/#graph_ascend", timeout=WAIT)
        self.frame = self.page.frame_locator("iframe")
        self.node(ROOT).wait_for(timeout=WAIT)

    def _answered(self, response: Any) -> None:
        asked = response.request.post_data_json if "/graph_ascend/" in response.url and response.request.method == "POST" else None
        if not asked:
            return
        self.asked.append(asked.get("metaData", {}).get("rank"))
        text = response.text()
        if '"success": false' in text:
            self.wrong.append(f"{response.url}: {text[:300]}")

    def node(self, name: str, side: str = "N") -> Any:
        """The box of a node: side N is the target, B the reference."""
        return self.frame.locator(f'[name="{side}___{name}"]').first

    def click(self, name: str, twice: bool = False) -> None:
        """Click a node; twice opens it."""
        box = self.node(name).bounding_box()
        place = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        (self.page.mouse.dblclick if twice else self.page.mouse.click)(*place)

    def open_and_select(self, value: str) -> None:
        """Open a module on both sides, then select one inside and see its rows of both sides with their metrics."""
        self.click(ROOT, twice=True)
        for side in "NB":
            self.node(HEAD, side).wait_for(timeout=WAIT)
        self.settle(HEAD)
        self.click(HEAD)
        for text in ("MaxRelativeErr", "output.0.logits", value):
            self.frame.get_by_text(text).first.wait_for(timeout=WAIT)

    def settle(self, name: str) -> None:
        """Boxes move for a moment after their parent was opened."""
        before = None
        while before != (now := self.node(name).bounding_box()):
            before = now
            time.sleep(0.3)

    def reading(self, pattern: str) -> int:
        """The number in the first text like `pattern`."""
        text = self.frame.get_by_text(re.compile(pattern)).first
        text.wait_for(timeout=WAIT)
        found = re.search(pattern, text.inner_text())
        assert found is not None
        return int(found.group(1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DB, VIS])
def test_the_plugin_of_pypi_opens_ours(page: Any, board: Callable[[str, Path], str], logs: Path, kind: str) -> None:
    """Both kinds of files: opening a module on both sides, rows of a selected node, search, matched nodes; colours and their filter."""
    if importlib.util.find_spec("tensorboard") is None or importlib.util.find_spec("server.plugin") is None:
        pytest.skip("tb-graph-ascend is not installed (extra test)")
    plugin = Plugin(page, board(sys.executable, logs / kind))
    plugin.open_and_select(VALUE if kind == DB else f"{float(VALUE):.6f}")
    if kind == DB:
        assert plugin.node(ROOT).get_attribute("fill") == "#FF704D"
        plugin.frame.locator(".color-option vaadin-checkbox").nth(2).click()
        assert _until(lambda: plugin.reading(r"符合精度误差节点\((\d+)\)")) > 200
    else:  # this release of the plugin finds no settings, so no colours, in any .vis file, those of 8.1.1 neither
        plugin.wrong = [one for one in plugin.wrong if "loadGraphConfigInfo" not in one]
    plugin.frame.get_by_text("功能", exact=True).first.click()
    every = _until(lambda: plugin.reading(r"节点列表\((\d+)\)"))
    assert every == 473
    assert plugin.reading(r"调试侧\((\d+)\)") == 0  # without a partner
    field = plugin.frame.locator("vaadin-text-field input").first
    field.fill("masked_fill")
    field.press("Enter")
    assert _until(lambda: (found := plugin.reading(r"节点列表\((\d+)\)")) < every and found) == 8
    assert plugin.wrong == []


@pytest.mark.existing_tool
def test_the_plugin_of_26_opens_ours(page: Any, board: Callable[[str, Path], str], logs: Path) -> None:
    """The same in 26.2.0's own plugin, and the other rank."""
    plugin = Plugin(page, board(existing(), logs / DB))
    assert plugin.node(ROOT).get_attribute("fill") == "#FF704D"
    plugin.open_and_select(VALUE)
    plugin.frame.get_by_text("Error", exact=True).first.click()
    assert _until(lambda: plugin.reading(r"Node List\((\d+)\)")) > 200
    plugin.frame.get_by_test_id("searchSiderButton").click()
    field = plugin.frame.get_by_placeholder("Search by Name").last
    field.fill("masked_fill")
    field.press("Enter")
    assert _until(lambda: (found := plugin.reading(r"Node List\((\d+)\)")) < 200 and found) == 8
    plugin.frame.get_by_text("Tensor.masked_fill.0.forward").first.click()

    plugin.node("Tensor.masked_fill.0.forward", "N").wait_for(timeout=WAIT)  # its parents are open now, on both sides
    plugin.frame.locator(".anticon-file").first.click()
    plugin.frame.locator(".ant-select").nth(3).click()
    plugin.frame.locator(".ant-select-item-option").filter(has_text="1").last.click()
    plugin.node(ROOT).wait_for(timeout=WAIT)
    assert plugin.asked[-1] == 1
    assert plugin.wrong == []


@pytest.mark.existing_tool
def test_the_trend_viewer_of_26_opens_ours(page: Any, board: Callable[[str, Path], str], logs: Path) -> None:
    """Its heat map has a cell per layer and rank, and a click on one draws the line along the steps."""
    page.set_viewport_size({"width": 1400, "height": 900})
    viewer = board(existing(), logs / DB)
    with page.expect_response(lambda response: "heatmap_data" in response.url) as got:
        page.goto(f"{viewer}/#TrendVis")
    cells = got.value.json()
    assert cells["success"]
    assert [cell[2] for cell in cells["data"]] == [1.0, 2.0, 3.0] * 2
    assert {cell[1][1] for cell in cells["data"]} == {f"{i}_0_layers.{i - 1}.w_0" for i in (1, 2, 3)}
    page.frame_locator("iframe").locator("canvas").first.wait_for()
    page.wait_for_timeout(2000)  # its chart moves while it is laid out
    with page.expect_response(lambda response: response.url.endswith("/trend")) as got:
        page.mouse.click(800, 300)
    line = got.value.json()["data"]
    assert line["dimensions"] == [0, 1, 2, 3, 4]
    assert line["values"][0] in (1.0, 2.0, 3.0)


def _until(read: Callable[[], int | bool], seconds: float = 30.0) -> int | bool:
    """The first value that is true."""
    end = time.monotonic() + seconds
    while not (value := read()) and time.monotonic() < end:
        time.sleep(0.2)
    return value
