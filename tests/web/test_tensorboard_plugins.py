"""The TensorBoard plugins of the existing tool, in a browser, open the files that we write: ``tb-graph-ascend`` of PyPI (extra `test`), and
the one in 26.2.0 when MSPROBE_EXISTING_VENV_26 names an environment with it."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from existing_graph import cases, unpack

from msprobe_engine.graph.options import DB, NEW, OLD, VIS, GraphOptions
from msprobe_engine.graph.run import run

pytestmark = pytest.mark.timeout(240)
ROOT, HEAD = "Module.module.Transformer.forward.0", "Module.module.head.Head.forward.0"
VALUE = "2.3733718395233154"
"""The largest value of an input of `HEAD` in the clean run."""
WAIT = 20_000


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``db/run`` and ``vis/run``: two ranks, one of them with NaN, beside a clean run."""
    out = tmp_path_factory.mktemp("logs")
    case = next(case for case in cases(NEW) if case.name == "job-nan")
    target, golden = unpack(case, out / "dumps")
    for name, generation in ((DB, NEW), (VIS, OLD)):
        run(target, golden, out / name / "run", GraphOptions(generation=generation, formats=(name,), overflow=True, workers=1))
    return out


class Plugin:
    """The plugin in a page; nodes are boxes named after their side and themselves.

    Attributes:
        asked: the rank of every request.
        wrong: errors of scripts, and answers that say that something failed.
    """

    def __init__(self, browser: Any, address: str) -> None:
        self.wrong: list[str] = []
        self.asked: list[int | None] = []
        context = browser.new_context(viewport={"width": 1600, "height": 1000}, locale="en-US")
        self.page = context.new_page()
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


@pytest.mark.parametrize("kind", [DB, VIS])
def test_the_plugin_of_pypi_opens_ours(browser: Any, board: Callable[[str, Path], str], logs: Path, kind: str) -> None:
    """Both kinds of files: opening a module on both sides, rows of a selected node, search, matched nodes; colours and their filter."""
    if importlib.util.find_spec("tensorboard") is None or importlib.util.find_spec("server.plugin") is None:
        pytest.skip("tb-graph-ascend is not installed (extra test)")
    plugin = Plugin(browser, board(sys.executable, logs / kind))
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


def test_the_plugin_of_26_opens_ours(browser: Any, board: Callable[[str, Path], str], logs: Path) -> None:
    """The same in 26.2.0's own plugin, and the other rank."""
    venv = os.environ.get("MSPROBE_EXISTING_VENV_26")
    if not venv:
        pytest.skip("MSPROBE_EXISTING_VENV_26 does not name a virtual environment with version 26.2.0")
    plugin = Plugin(browser, board(f"{venv}/bin/python", logs / DB))
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


def _until(read: Callable[[], int | bool], seconds: float = 30.0) -> int | bool:
    """The first value that is true."""
    end = time.monotonic() + seconds
    while not (value := read()) and time.monotonic() < end:
        time.sleep(0.2)
    return value
