"""Every link of the pages leads to a file, and to a heading where it names one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")])


def text_of(page: Path) -> str:
    """The page without its code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    found = set()
    for heading in re.findall(r"^#+ +(.+?) *$", text_of(page), re.MULTILINE):
        found.add(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links(page: Path) -> None:
    """No link of the page is dead."""
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            dead.append(target)
    assert not dead


def test_every_page_is_found_from_the_readme() -> None:
    """Each page of docs/ is linked from README.md or from a page that is; both languages of the README link the same pages."""
    seen, new = set(), {ROOT / "README.md"}
    while new:
        page = new.pop()
        seen.add(page)
        for target in re.findall(r"\]\(([^)\s#]+\.md)", text_of(page)):
            if not re.match(r"\w+:", target) and (path := (page.parent / target).resolve()) not in seen:
                new.add(path)
    assert not set((ROOT / "docs").rglob("*.md")) - seen
    link = r"\]\((docs/(?!images/)[^)]+)\)"
    english, chinese = (set(re.findall(link, (ROOT / name).read_text())) for name in ("README.md", "README.zh.md"))
    assert english == chinese


def test_both_readmes_show_the_same_code() -> None:
    """The code blocks of both languages are the same but for their comments and what stands in < >."""
    plain = []
    for name in ("README.md", "README.zh.md"):
        code = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        plain.append([(language, re.sub(r" *#.*| *<.*?>", "", text)) for language, text in code])
    assert plain[0] == plain[1]
