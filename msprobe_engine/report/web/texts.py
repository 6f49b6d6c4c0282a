"""Texts that files have in English, such as alerts and reasons of table rows, on pages that are read in Chinese.

`texts_zh.json` has their templates. ``{0}`` stands for one word, ``{0...}`` for any text, which is looked up as well; of several templates
that fit the first one counts. Texts that none fits, for instance those of another version, stay English.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path

from msprobe_engine.core.text.sentences import filled

_FILE = Path(__file__).parent / "texts_zh.json"
_PLACE = re.compile(r"\{(\d)(\.\.\.)?\}")
_BETWEEN = "; "
_LONGEST = 2000
"""Characters of a text that is looked up: no page shows more of one."""


@lru_cache(maxsize=1)
def templates() -> dict[str, str]:
    """English template -> Chinese template."""
    loaded: dict[str, str] = json.loads(_FILE.read_text(encoding="utf-8"))
    return loaded


@lru_cache(maxsize=1)
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    return [(_pattern(english), chinese) for english, chinese in templates().items() if _PLACE.search(english)]


def _pattern(template: str) -> re.Pattern[str]:
    fixed = [re.escape(part) for part in _PLACE.sub("\0", template).split("\0")]
    places = ["(.+?)" if more else r"(\S+)" for _, more in _PLACE.findall(template)]
    return re.compile("".join(part for pair in zip(fixed, [*places, ""]) for part in pair), re.DOTALL)


@lru_cache(maxsize=8192)
def in_chinese(text: str) -> str:
    """The text in Chinese, part by part, as far as it is known."""
    if len(text) > _LONGEST:
        return text
    if (known := templates().get(text)) is not None:
        return known
    for pattern, chinese in _patterns():
        if found := pattern.fullmatch(text):
            return filled(chinese, map(in_chinese, found.groups()))
    if _BETWEEN not in text:
        return text
    parts = text.split(_BETWEEN)
    said = [in_chinese(part) for part in parts]
    return text if said == parts else "；".join(said)  # noqa: RUF001 - Chinese is meant
