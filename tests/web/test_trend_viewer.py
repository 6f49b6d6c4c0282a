"""The existing tool's trend viewer (26.2.0's TensorBoard plug-in) opens our trend data bases.

Opt-in: MSPROBE_EXISTING_VENV_26 names a virtual environment with version 26.2.0.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.monitor.data2db import Options, data2db
from msprobe_engine.settings.schema import CsvSettings, MonitorSettings
from msprobe_engine.sinks.csv import CsvSink
from msprobe_engine.testing import frame_of


@pytest.fixture
def viewer(tmp_path: Path, board: Callable[[str, Path], str]) -> str:
    """The address of the viewer over a data base of ours: two ranks, 5 steps, 3 layers, one NaN."""
    place = os.environ.get("MSPROBE_EXISTING_VENV_26")
    if not place:
        pytest.skip("MSPROBE_EXISTING_VENV_26 does not name a virtual environment")
    for rank in (0, 1):
        sink = CsvSink(CsvSettings(), MonitorSettings(ops=("norm", "max")), output_dir=tmp_path / "run", rank=rank)
        for step in range(5):
            tensors = {f"layers.{i}.w": [math.nan if (rank, step, i) == (1, 4, 2) else 1.0 + i + step] for i in range(3)}
            sink.write(frame_of(tensors, step=step, rank=rank), [])
        sink.close()
    (done,) = data2db(tmp_path / "logs", tmp_path / "run", options=Options(micro_step=False))
    assert done.path.stat().st_mode & 0o777 == 0o640  # the plug-in refuses what others can write
    return board(f"{place}/bin/python", tmp_path / "logs")


def test_the_existing_viewer_opens_ours(viewer: str, browser: Any) -> None:
    """Its heat map has a cell per layer and rank, and a click on one draws the line along the steps."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    page = context.new_page()
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
    context.close()
