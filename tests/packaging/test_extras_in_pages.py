"""A page whose examples need an extra names it with its pip command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
USES = {
    "tls": r"msprobe certs (init|host)",
    "xlsx": r"--xlsx\b|result\.xlsx|compare -i \S+\.json|msprobe merge_result",
    "parquet": r"--parquet\b",
    "dask": r"--scheduler\b",
    "prometheus": r"prometheus: \{|prometheus:\n +enabled: true",
    "tensorboard": r"tensorboard: \{|csv2tb",
    "plots": r"similarities_picture",
}
"""Extra to what an example has of it."""
NO_EXAMPLES = (
    "architecture.md",
    "how-it-works.md",
    "compatibility.md",
    "compatibility-mindspore.md",
    "settings.md",
    "cli.md",
    "benchmarks.md",
    "hardware.md",
)
"""Pages of reference."""


@pytest.mark.parametrize("extra", USES)
def test_pages_name_the_extra(extra: str) -> None:
    lacking = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        named = re.search(rf"pip install [^`\n]*\[[^\]]*\b{extra}\b", text)
        if page.name not in NO_EXAMPLES and re.search(USES[extra], text) and not named:
            lacking.append(page.name)
    assert lacking == []


def test_extras_are_there() -> None:
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    assert USES.keys() <= set(re.findall(r"^([\w-]+) *=", declared, re.MULTILINE))
