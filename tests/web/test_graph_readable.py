"""The graph page is read in both languages, at any width, and with a dump of calls alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graph_samples import Sample, page_of, ranks
from sample_pages import write_dump

from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.report.graph.nodes.build import build
from msprobe_engine.report.graph.page.page_data import NEEDLESS, UNMATCHED, Order, columns

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A comparison with a fault, and one of 400 calls without modules."""
    root = tmp_path_factory.mktemp("readable")
    target, golden = ranks(root / "a", Sample(fault="layers.1.mlp")), ranks(root / "b", Sample())
    names = ["Functional.linear" if i % 3 else "Torch.matmul" for i in range(400)]
    long, right = write_dump(root / "c", names, wrong=231, steps=1), write_dump(root / "d", names, steps=1)
    return {"small": page_of(root / "small", target, golden), "long": page_of(root / "long", long, right)}


def test_the_reason_is_in_the_readers_language(pages: dict[str, Path], opened: Open) -> None:
    """Why a node is the suspect is said in Chinese, and in English when that is chosen."""
    page = opened(pages["small"], language="zh-CN")
    callout = page.locator(".callout.bad")
    callout.wait_for()
    assert "输入的统计值一致" in callout.inner_text()
    assert "differs" not in callout.inner_text()
    page.get_by_label("语言").select_option("en")
    page.wait_for_timeout(100)
    assert "what goes in has the same statistics" in callout.inner_text()


def test_two_verdicts_say_whose_they_are(pages: dict[str, Path], opened: Open) -> None:
    """Beside the multiples of round-off stands what 26.2.0 says, by its name, and why both can be."""
    page = opened(pages["small"])
    page.locator(".measure .index").wait_for()
    assert page.locator(".measure .index").inner_text() == "26.2.0: pass (0)"
    assert "whatever the dtype" in page.locator(".measure .index").get_attribute("title")


def test_the_title_has_its_line_in_a_narrow_window(pages: dict[str, Path], opened: Open) -> None:
    """At 400 pixels nothing of the title is cut off."""
    page = opened(pages["small"], width=400)
    page.locator(".callout.bad").wait_for()
    assert page.evaluate("(([h]) => h.scrollWidth <= h.clientWidth && h.clientWidth > 300)(document.querySelectorAll('h1'))")


def test_a_long_column_stays_readable(pages: dict[str, Path], opened: Open) -> None:
    """Of calls alone, "show all" shows as much as can be read, around the suspect; the calls are in collections."""
    page = opened(pages["long"], width=1400)
    page.locator(".callout.bad").wait_for()
    assert page.evaluate("Graph.store.sides[0].children(1).length || Graph.store.sides[0].children(0).length") < 20
    page.evaluate("Graph.view.fit()")
    page.wait_for_timeout(500)
    assert page.evaluate("Graph.view.scale()") >= 0.5
    y = page.evaluate("Graph.view.place(0, Graph.store.pair.suspect).y")
    assert 0 < y < 800


def test_rows_that_cannot_be_compared_are_not_called_missing(pages: dict[str, Path], opened: Open) -> None:
    """Two rows at one place without partners stand beside each other as not comparable; a row whose partner is elsewhere is left to it."""
    page = opened(pages["small"])
    page.locator(".callout.bad").wait_for()
    states = page.evaluate("""() => {
      const row = (place, partner) => ({ place, partner, dtype: 'float32', shape: [2], max: 1, min: 1, mean: 1, norm: 1 });
      const target = [row('input.0', null), row('input.1', null), row('input.2', 'input.1'), row('input.3', null)];
      const golden = [row('input.0', null), row('input.1', 'input.2')];
      return Graph.compare.pairs(target, golden).map((pair) => [pair.golden && pair.golden.place, Graph.compare.difference(pair).state]);
    }""")
    assert states == [["input.0", "not_compared"], [None, "only_target"], ["input.1", "same"], [None, "only_target"]]


def test_a_row_without_anything_to_compare_is_not_called_the_same(pages: dict[str, Path], opened: Open) -> None:
    """A term of a sum that was taken out has no numbers and no shape on either side: that says nothing. Structure alone is compared by
    shape. Max and Min alone, as of truth values, say that two masks are the same where all elements are, or digests do."""
    page = opened(pages["small"])
    page.locator(".callout.bad").wait_for()
    states = page.evaluate("""() => [
      { shape: null }, {}, { max: true, min: false }, { max: true, min: true }, { max: true, min: false, facts: { digest: 'a' } },
    ].map((known) => {
      const row = { place: 'output.0', dtype: 'float32', shape: [2], max: null, min: null, mean: null, norm: null, ...known };
      return Graph.compare.difference({ target: row, golden: { ...row } }).state;
    })""")
    assert states == ["not_compared", "same", "not_compared", "same", "same"]


def test_what_needs_no_partner_is_not_unmatched(tmp_path: Path) -> None:
    """Nodes that the other framework has no counterpart of have a flag of their own."""
    dump = write_dump(tmp_path / "a", ["Functional.linear", "Functional.relu"], steps=1)
    graph = build(read_side(next(dump.rglob("dump.json"))), 0, 0)
    order = Order(graph)
    partners, needless = np.full(len(order), -1), np.zeros(len(order), bool)
    needless[len(order) - 1] = True
    _, flags = columns(graph, order, partners=partners, needless=needless)
    assert [bool(flag & UNMATCHED) for flag in flags[-2:]] == [True, False]
    assert [bool(flag & NEEDLESS) for flag in flags[-2:]] == [False, True]
