"""Rules that hold for every html page of the product: accessible, as wide as the window, nothing of a run is markup, both languages."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import sample_pages

from msprobe_engine.report.web.words import section_of

NAMES = ("diagnosis", "table", "checkpoint", "config", "graph", "trends")
WIDTH = "document.documentElement.scrollWidth"
REACHED = "[...document.querySelectorAll('.scroll')].every(d => d.scrollWidth <= d.clientWidth || d.tabIndex === 0)"
READABLE = ("diagnosis", "checkpoint", "config")
"""Pages that say all they have without scripts."""

PIXEL = "c => [...c.getContext('2d').getImageData(c.width / 2, c.height / 2, 1, 1).data]"
"""The one in the middle of a picture."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    return sample_pages.all_pages(tmp_path_factory.mktemp("pages"))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    return sample_pages.all_pages(tmp_path_factory.mktemp("hostile"), sample_pages.HOSTILE + sample_pages.LONG)


def ready(page: Any) -> Any:
    """The page when its scripts are through. (A function to wait for would be code that the page's policy refuses.)"""
    if page.locator("noscript").count():
        page.wait_for_selector("body[data-done], #graph.ready, .t-heat", state="attached")
    return page


def width_at_rest(page: Any, most: int) -> int:
    """The page's width once it has answered a resize, which it does when the resize has come to rest: what scrolls then can be reached."""
    for _ in range(100):
        if page.evaluate(WIDTH) <= most and page.evaluate(REACHED):
            break
        page.wait_for_timeout(50)
    width: int = page.evaluate(WIDTH)
    return width


def test_the_samples_are_all_pages(pages: Mapping[str, Path]) -> None:
    """What the tests below look at is every kind of page that there is."""
    assert set(pages) == set(NAMES) == {key[5:] for key in section_of("kit") if key.startswith("kind_")}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.fast_cells("diagnosis", "graph")
def test_accessible_and_as_wide_as_the_window(name: str, pages: Mapping[str, Path], opened: Callable[..., Any], accessible: Any) -> None:
    """Axe has no serious finding, in dark and narrow none that colours or widths make; nothing sticks out of 1280 or 400 pixels."""
    page = ready(opened(pages[name]))
    if name == "table":
        page.get_by_label("Search").fill("linear.31")  # axe looks at each cell
    assert accessible(page) == []
    assert page.evaluate(WIDTH) <= 1280
    page.emulate_media(color_scheme="dark")
    page.set_viewport_size({"width": 400, "height": 800})
    page.locator("#kit-switches select").first.select_option("zh")
    assert width_at_rest(page, 400) <= 400
    assert accessible(page, ("color-contrast", "scrollable-region-focusable")) == []


@pytest.mark.parametrize("name", [*READABLE, "table", "trends"])
def test_a_chinese_page_has_no_english_sentence(name: str, pages: Mapping[str, Path], opened: Callable[..., Any]) -> None:
    """Three English words behind each other are a sentence that was forgotten; names and lines of source stand in code."""
    page = opened(pages[name])
    page.locator("#kit-switches select").first.select_option("zh")
    page.evaluate("document.querySelectorAll('code, pre').forEach(one => one.remove())")
    assert not re.findall(r"[A-Za-z]{2,}(?: [a-z]{2,}){2,}", page.evaluate("document.querySelector('main').innerText"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.fast_cells("table", "checkpoint")
def test_names_of_a_run_are_text(name: str, hostile: Mapping[str, Path], opened: Callable[..., Any]) -> None:
    """Markup in names makes no element and runs nothing, what turns the direction of writing is an escape, and long names stay inside."""
    page = ready(opened(hostile[name]))
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; }); document.querySelector('tr.pick')?.click()")
    assert page.locator("img").count() == 0
    assert page.title() != "run"
    shown = page.evaluate("document.body.innerText")
    assert not re.search("[\u202e\u2066\x07\x1b]", shown + page.title())
    assert "\\u202e" in shown
    assert "<img src=x" in shown
    assert page.evaluate(WIDTH) <= 1280
    page.set_viewport_size({"width": 400, "height": 800})
    assert width_at_rest(page, 400) <= 400


@pytest.mark.parametrize("name", NAMES)
def test_the_policy_allows_nothing_inline(name: str, pages: Mapping[str, Path]) -> None:
    """Every page names its styles and scripts by their hashes; there is no style attribute, no handler and no address in it."""
    text = pages[name].read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy
    assert "unsafe" not in policy[1]
    assert policy[1].startswith("default-src 'none'; style-src 'sha256-")
    markup = re.sub(r"<(script|style)[^>]*>.*?</\1>", "", text, flags=re.DOTALL)
    assert not re.search(r"<[^>]+\s(style|on\w+|src|href)=", markup)


@pytest.mark.parametrize("name", READABLE)
def test_readable_without_scripts(name: str, pages: Mapping[str, Path], opened: Callable[..., Any]) -> None:
    """With scripts switched off the page has the same headlines and rows."""
    count = "[document.querySelectorAll('h2').length, document.querySelectorAll('tr').length]"
    without, with_ = opened(pages[name], scripts=False), opened(pages[name])
    assert [without.locator("h2").count(), without.locator("tr").count()] == with_.evaluate(count)
    assert without.locator("h1").inner_text() == with_.locator("h1").inner_text()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.fast_cells("checkpoint", "config", "graph", "table", "trends")
def test_fixed_words_are_chinese_on_request(name: str, pages: Mapping[str, Path], opened: Callable[..., Any]) -> None:
    """Headlines and the kind of page are in Chinese; choosing English brings the words of the file back."""
    page = ready(opened(pages[name], language="zh-CN"))
    chinese = page.locator(".kind, h2[data-t], h2 [data-t], section > p [data-t]").all_inner_texts()
    assert all(re.search("[\u4e00-\u9fff]", text) for text in chinese if text)
    page.locator("#kit-switches select").first.select_option("en")
    assert not re.search("[\u4e00-\u9fff]", " ".join(page.locator("h2, .kind, th, .tile, dt").all_inner_texts()))


def test_a_table_is_searched_sorted_and_chosen(pages: Mapping[str, Path], opened: Callable[..., Any]) -> None:
    """The comparison's table shows pages of rows, marks those that are off, finds words, sorts numbers, and shows one row whole."""
    page = ready(opened(pages["table"]))
    assert "1 to 200 of 270" in page.locator(".where").inner_text()
    page.get_by_role("button", name="Later").click()
    assert "201 to 270 of 270" in page.locator(".where").inner_text()
    page.get_by_label("Search").fill("output")
    assert "1 to 90 of 90" in page.locator(".where").inner_text()
    assert page.locator("tr.bad").count() == 1
    page.get_by_label("Choose a value").select_option("=error")
    assert page.locator("tbody tr").count() == 1
    page.locator("tbody tr").focus()
    page.keyboard.press("Enter")
    assert page.locator("section dt", has_text="Tensor Shape").count() == 2
    page.get_by_label("Search").fill("")
    page.get_by_label("Choose a value").select_option("")
    head = page.get_by_role("button", name="Max diff")
    head.click()
    first = page.locator("tbody tr").first.inner_text()
    head.click()
    assert page.locator("th[aria-sort=descending]").count() == 1
    assert page.locator("tbody tr").first.inner_text() != first


def test_the_run_draws_its_pictures(pages: Mapping[str, Path], opened: Callable[..., Any]) -> None:
    """Lanes of alerts, loss, map and lines have marks in them, in both colours, and are printed in the light ones."""
    page = ready(opened(pages["trends"]))
    page.wait_for_selector(".t-chart[data-ready]")
    inks = "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.reduce((n, v) => n + (v > 0), 0)"
    light = None
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.wait_for_timeout(100)
        assert page.evaluate("Kit.theme") == scheme
        light = light or page.locator(".t-heat canvas").evaluate(PIXEL)
        for name in (".t-lanes", ".t-course", ".t-heat", ".t-chart"):
            assert page.locator(f"{name} canvas").evaluate(inks) > 1000
    page.emulate_media(media="print")
    page.wait_for_timeout(100)
    assert page.locator(".t-heat canvas").evaluate(PIXEL) == light
    assert all(page.locator("canvas[role=img]").nth(i).get_attribute("aria-label") for i in range(3))
