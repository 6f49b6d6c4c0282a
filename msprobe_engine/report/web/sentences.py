"""Sentences about a run in Chinese, and texts that files have in English, such as alerts and reasons of table rows.

Their templates stand in ``sentences_zh.json`` and ``texts_zh.json``, by the English ones. In those of texts ``{0}`` stands for one word,
``{0...}`` for any text, which is looked up as well; of several templates that fit the first one counts. Texts that none fits, for instance
those of another version, stay English.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path

from msprobe_engine.core.text.sentences import Sentence, fill_template

SENTENCES, TEXTS = "sentences_zh.json", "texts_zh.json"
_PLACE = re.compile(r"\{(\d)(\.\.\.)?\}")
_BETWEEN = "; "
_LONGEST = 2000
"""Characters of a text that is looked up: no page shows more of one."""


@lru_cache(maxsize=2)
def templates(file: str) -> dict[str, str]:
    """English template -> Chinese template, of `SENTENCES` or of `TEXTS`."""
    loaded: dict[str, str] = json.loads((Path(__file__).parent / file).read_text(encoding="utf-8"))
    return loaded


@lru_cache(maxsize=1)
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    return [(_pattern(english), chinese) for english, chinese in templates(TEXTS).items() if _PLACE.search(english)]


def _pattern(template: str) -> re.Pattern[str]:
    fixed = [re.escape(part) for part in _PLACE.sub("\0", template).split("\0")]
    places = ["(.+?)" if more else r"(\S+)" for _, more in _PLACE.findall(template)]
    return re.compile("".join(part for pair in zip(fixed, [*places, ""]) for part in pair), re.DOTALL)


@lru_cache(maxsize=8192)
def in_chinese(text: str) -> str:
    """The text of a file in Chinese, part by part, as far as it is known."""
    if len(text) > _LONGEST:
        return text
    if (known := templates(TEXTS).get(text)) is not None:
        return known
    for pattern, chinese in _patterns():
        if match := pattern.fullmatch(text):
            return fill_template(chinese, map(in_chinese, match.groups()))
    if _BETWEEN not in text:
        return text
    parts = text.split(_BETWEEN)
    said = [in_chinese(part) for part in parts]
    return text if said == parts else "；".join(said)  # noqa: RUF001 - Chinese is meant


def chinese(sentence: str) -> str:
    """A sentence, or a text of a file, in Chinese. What is none stays as it is, and so does a template that has no Chinese one, around its
    arguments."""
    if not isinstance(sentence, Sentence):
        return in_chinese(sentence) if " " in sentence else sentence  # names of tensors, of which there are many, have no spaces
    template = templates(SENTENCES).get(sentence.template, sentence.template)
    return fill_template(template, map(chinese, sentence.arguments))


def both(sentence: str) -> str | list[str]:
    """What ``Kit.said`` of kit.js reads: [English, Chinese], or one text that stays as it is."""
    other = chinese(sentence)
    return [str(sentence), other] if other != sentence else str(sentence)
