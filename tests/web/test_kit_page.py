"""The frame of all pages: its policy, its islands, its switches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.report.web.markup import section, table, text
from msprobe_engine.report.web.page import page
from msprobe_engine.report.web.words import words

HOSTILE = "</script><script>document.title='run'</script><img src=x onerror=document.title='run'>\u202e\x00\x1b[31m" + "x" * 100_000


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "page.html"
    rows = [(HOSTILE, 1), ("a", 2)]
    body = "".join(section(words("kit", "all"), table(("name", words("kit", "blank")), rows, numbers={1}, names={0})))
    path.write_bytes(b"".join(page(HOSTILE, kind="diagnosis", body=body, verdict="bad", data=[("one", b"\x00\xff" * 400_000)])))
    return path


def test_islands_come_back_as_they_were(plain: Path, opened: Callable[..., Any]) -> None:
    """Bytes of an island are the same in the browser, however many."""
    found = opened(plain).evaluate("Kit.data('one').then(b => [b.length, b[0], b[1], b[799999]])")
    assert found == [800_000, 0, 255, 255]


def test_names_are_text(plain: Path, opened: Callable[..., Any]) -> None:
    """A name that would end the element, turn the writing or steer a terminal is shown as it is written, and nothing of it runs."""
    shown = opened(plain)
    assert shown.title() != "run"
    assert shown.locator("img").count() == 0
    assert "\\u202e" in shown.locator("h1").inner_text()
    assert shown.evaluate("Kit.name('a\\u202eb\\u0007')") == "a\\u202eb\\u0007"
    assert text("\x00") == "\\x00"


def test_a_script_that_is_not_of_the_page_does_not_run(plain: Path, browser: Any) -> None:
    """The policy in the file refuses any script and style but those it names by their hashes."""
    content = plain.read_text().replace("</body>", "<script>document.title='run'</script><p style='color:red' id=p>x</p></body>")
    plain.write_text(content)
    context = browser.new_context()
    shown = context.new_page()
    shown.goto(plain.as_uri())
    assert shown.title() != "run"
    assert shown.evaluate("getComputedStyle(document.getElementById('p')).color") != "rgb(255, 0, 0)"
    context.close()


def test_language_and_colours_are_chosen(plain: Path, opened: Callable[..., Any]) -> None:
    """The switches change fixed words and colours at once, and the page opens with what the reader's system prefers."""
    shown = opened(plain)
    assert shown.locator("h2").inner_text() == "all"
    dark = shown.evaluate("getComputedStyle(document.body).backgroundColor")
    shown.get_by_label("Language").select_option("zh")
    assert shown.locator("h2").inner_text() == "全部"
    assert shown.evaluate("document.documentElement.lang") == "zh-Hans"
    shown.get_by_label("配色").select_option("dark")
    assert shown.evaluate("Kit.theme") == "dark"
    assert shown.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    assert opened(plain, theme="dark", language="zh-CN").evaluate("[Kit.theme, Kit.language]") == ["dark", "zh"]


def test_readable_without_scripts(plain: Path, opened: Callable[..., Any]) -> None:
    """Headline, words and tables stand in the file itself."""
    shown = opened(plain, scripts=False)
    assert shown.locator("table td.number").all_inner_texts() == ["1", "2"]
    assert shown.locator("#kit-switches select").count() == 0
