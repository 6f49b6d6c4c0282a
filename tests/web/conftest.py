"""Shared by the tests of pages in a browser: one headless Chromium per session, opened pages, what may not happen on any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def browser(binary: Callable[[str], str]) -> Iterator[Any]:
    """The browser of the session: a playwright `Browser` over the system's chromium."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra test)")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=binary("chromium"), args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


class Tabs:
    """Pages that one test after the other uses, as a process for each of them would cost a second; a test never sees that."""

    def __init__(self, browser: Any) -> None:
        self.wrong: list[str] = []
        self._browser = browser
        self._path = Path()
        self._idle: dict[tuple[str, bool], list[Any]] = {}
        self._used: list[tuple[tuple[str, bool], Any]] = []

    def take(self, path: Path, width: int, height: int, theme: str, language: str, scripts: bool) -> Any:
        """An empty page that may show nothing but a file."""
        kind = language, scripts
        page = self._idle[kind].pop() if self._idle.get(kind) else self._made(language, scripts)
        self._used.append((kind, page))
        self._path = path
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=theme, media="null")
        return page

    def free(self) -> None:
        """The test is over: what it typed, chose and kept is forgotten."""
        for kind, page in self._used:
            if kind[1]:
                page.evaluate("localStorage.clear()")
            page.goto("about:blank")
            page.mouse.move(0, 0)
            self._idle.setdefault(kind, []).append(page)
        self._used = []

    def _made(self, language: str, scripts: bool) -> Any:
        page = self._browser.new_context(locale=language, java_script_enabled=scripts, offline=True).new_page()
        page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        page.on("console", lambda message: self.wrong.append(f"console: {message.text}") if message.type == "error" else None)
        page.on("request", lambda request: self.wrong.append(f"request: {request.url}") if not _own(request.url, self._path) else None)
        return page


@pytest.fixture(scope="session")
def tabs(browser: Any) -> Tabs:
    """The pages of the session."""
    return Tabs(browser)


@pytest.fixture
def opened(tabs: Tabs) -> Iterator[Callable[..., Any]]:
    """``opened(path, width=1280, height=800, theme="light", language="en-US", scripts=True, address="")``: a playwright `Page` of a file.

    After the test every page must have been without errors, without refusals of its security policy and without a single request.
    """
    tabs.wrong = []

    def open_(
        path: Path,
        *,
        width: int = 1280,
        height: int = 800,
        theme: str = "light",
        language: str = "en-US",
        scripts: bool = True,
        address: str = "",
    ) -> Any:
        page = tabs.take(path, width, height, theme, language, scripts)
        page.goto(path.resolve().as_uri() + address)
        return page

    yield open_
    tabs.free()
    assert not tabs.wrong, tabs.wrong


@pytest.fixture(scope="session")
def accessible() -> Callable[..., list[str]]:
    """``accessible(page, rules=())``: serious and critical findings of axe on a page that is open, of all rules or of some."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed (extra test)").Axe()

    def findings(page: Any, rules: tuple[str, ...] = ()) -> list[str]:
        options = {"runOnly": {"type": "rule", "values": list(rules)}} if rules else None
        found = axe.run(page, options=options).response["violations"]
        return [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in found if one["impact"] in ("serious", "critical")]

    return findings


def _own(url: str, path: Path) -> bool:
    return url.split("#")[0] == path.resolve().as_uri() or url.startswith(("blob:", "data:", "about:"))
