"""The reference page of the settings."""

from __future__ import annotations

from pathlib import Path

from msprobe_engine.core.settings.document import key_paths, page

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"


def test_the_page_is_current() -> None:
    """docs/reference/settings.md is what `python -m msprobe_engine.core.settings.document` writes today."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_every_key_is_on_the_page() -> None:
    """Each key of the tree has a line, or a title where it is a section."""
    for path in key_paths():
        assert f"\n* `{path.rpartition('.')[2]}` (" in page() or f"## `{path}`" in page() or f"## `{path}[]`" in page(), path
