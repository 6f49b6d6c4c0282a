"""The page for coding assistants: its commands and options are there. Pages that ``msprobe help`` prints are those of the docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from msprobe_engine.cli.main import PAGES, all_commands, main, sub_parser

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "for-assistants.md").read_text(encoding="utf-8")
LINES = re.findall(r"(?:`|^)msprobe ([^`#\n]+)", PAGE, re.MULTILINE)


@pytest.mark.parametrize("topic", PAGES)
def test_the_package_has_it(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    (page,) = (ROOT / "docs").rglob(PAGES[topic])
    assert main(["help", topic]) == 0
    out, text = capsys.readouterr().out, page.read_text(encoding="utf-8")
    if topic == "assistants":
        assert out == text
        return
    assert not set("`|#[]") & set(out)  # for people on a terminal: no Markdown
    rows = re.findall(r"^\| (.+?) \| (.+?) \| \[(.+?)\]\(.+\) \|$", text, re.MULTILINE)
    assert len(rows) > 20
    for symptom, command, name in rows:
        assert f"{symptom}\n    {command}\n    page: {name}\n".replace("`", "") in out


@pytest.mark.parametrize("line", LINES)
def test_commands_and_options(line: str) -> None:
    """Every command is one, and takes the words that stand with it: its options, with a value where they want one."""
    words = line.split(" -- ")[0].split()
    if words[0] == "help":
        return
    name = " ".join(words[:2]) if " ".join(words[:2]) in all_commands() else words[0]
    assert name in all_commands()
    sub_parser(name).parse_args([word.strip("[]") for word in words[len(name.split()) :]])


def test_exit_codes() -> None:
    """Those of the one table."""
    from msprobe_engine.cli.options.json_answer import MEANINGS

    for code in MEANINGS:
        assert f"\n| {code} | " in PAGE
