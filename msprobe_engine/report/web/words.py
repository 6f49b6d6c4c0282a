"""Fixed words of the pages, in English and Chinese.

A page is written in English; each fixed word carries its key, and kit.js puts the other language in its place when the reader chooses
that. What comes from a run (names, numbers, sentences about it) stays as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from msprobe_engine.report.web.markup import Html, text

_FILE = Path(__file__).parent / "kit_texts.json"


@lru_cache(maxsize=1)
def _sections() -> dict[str, dict[str, list[str]]]:
    loaded: dict[str, dict[str, list[str]]] = json.loads(_FILE.read_text(encoding="utf-8"))
    return loaded


def section_of(name: str) -> Mapping[str, list[str]]:
    """Key to [English, Chinese] of a section of kit_texts.json. Raises KeyError for an unknown one."""
    return _sections()[name]


def plain(section: str, key: str, *arguments: object) -> str:
    """The English words, ``{0}`` and so on replaced by the arguments. Raises KeyError for unknown words."""
    return _fill_template(section_of(section)[key][0], arguments)


def words(section: str, key: str, *arguments: object) -> Html:
    """The English words as html that kit.js can change the language of.

    The page has to name `section` among its ``sections``. Raises KeyError for unknown words.
    """
    given = "".join(f' data-t{i}="{text(str(one))}"' for i, one in enumerate(arguments))
    return Html(f'<span data-t="{section}.{key}"{given}>{text(plain(section, key, *arguments))}</span>')


def _fill_template(template: str, arguments: tuple[object, ...]) -> str:
    return re.sub(r"\{(\d)\}", lambda found: str(arguments[int(found[1])]), template)


def needs_scripts() -> Html:
    """What a page says that is made by its scripts, where these are switched off."""
    return Html(f"<noscript><p>{words('kit', 'needs_scripts')}</p></noscript>")
