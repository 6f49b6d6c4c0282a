"""docs/develop/architecture.md and docs/develop/how-it-works.md name files and directories that are there, and every integration."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = "\n".join((ROOT / "docs" / "develop" / name).read_text(encoding="utf-8") for name in ("architecture.md", "how-it-works.md"))
PLACES = [ROOT, *(ROOT / name for name in ("msprobe_engine", "msprobe_integrations", "msprobe_integrations/torch"))]
NAMES = sorted(
    {
        name
        for span in re.findall(r"`([^`\n]+)`", PAGE)
        for name in re.findall(r"^[\w./]+\.(?:py|c|h|js|css|md|yaml|pth)(?=$|:)|^[\w./]+/$", span)
        if name != "msprobe_autoload.pth"  # made when a wheel is built
    }
)


def test_what_is_named_is_there() -> None:
    """A path is that from the root, or from one of the packages; a bare name is that of a file or directory somewhere in them. The page
    names a hundred files and more."""
    inside = {path.name for place in PLACES[1:3] for path in place.rglob("*")}
    missing = [name for name in NAMES if name.rstrip("/") not in inside and not any((place / name).exists() for place in PLACES)]
    assert missing == []
    assert len(NAMES) > 100


def test_every_integration_is_named() -> None:
    """Each sub-package of msprobe_integrations has at least one file on the page."""
    packages = [path.parent.name for path in (ROOT / "msprobe_integrations").glob("*/__init__.py")]
    assert len(packages) > 8
    assert [name for name in packages if f"{name}/" not in PAGE] == []
