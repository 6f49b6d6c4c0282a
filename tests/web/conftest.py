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


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """``opened(path, width=1280, height=800, theme="light", language="en-US", scripts=True)``: a playwright `Page` of a file.

    After the test every page must have been without errors, without refusals of its security policy and without a single request.
    """
    contexts: list[Any] = []
    wrong: list[str] = []

    def open_(
        path: Path, *, width: int = 1280, height: int = 800, theme: str = "light", language: str = "en-US", scripts: bool = True
    ) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=theme, locale=language, java_script_enabled=scripts, offline=True
        )
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("console", lambda message: wrong.append(f"console: {message.text}") if message.type == "error" else None)
        page.on("request", lambda request: wrong.append(f"request: {request.url}") if not _own(request.url, path) else None)
        page.goto(path.resolve().as_uri())
        return page

    yield open_
    for context in contexts:
        context.close()
    assert not wrong, wrong


@pytest.fixture(scope="session")
def accessible() -> Callable[[Any], list[str]]:
    """Serious and critical findings of axe on a page that is open."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed (extra test)").Axe()

    def findings(page: Any) -> list[str]:
        found = axe.run(page).response["violations"]
        return [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in found if one["impact"] in ("serious", "critical")]

    return findings


def _own(url: str, path: Path) -> bool:
    return url.split("#")[0] == path.resolve().as_uri() or url.startswith(("blob:", "data:"))
