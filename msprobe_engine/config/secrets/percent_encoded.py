"""Text that stands in another one as URLs have it: ``?next=https%3A%2F%2Fme%3Apassword%40host``, ``q=--password+x``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from urllib.parse import unquote

_ESCAPED = re.compile(r"%[0-9A-Fa-f]{2}")
_WORDS = re.compile(r"[A-Za-z0-9_.~+%-]+"), re.compile(r"[^\s\"'<>]+")
"""What is encoded as a whole, and what has encoded signs within it, as a name of which one letter is encoded."""
_MOST_TIMES = 3
"""A text may have been encoded again."""


def masked_percent_encoded(text: str, judge: Callable[[str], str], hidden: str) -> str:
    """`text` with each word in it replaced by `hidden` of which `judge` would not leave as it is what it stands for."""
    if "%" not in text and "+" not in text:
        return text
    for words in _WORDS:
        text = words.sub(lambda found: hidden if any(judge(plain) != plain for plain in _meanings(found[0])) else found[0], text)
    return text


def _meanings(word: str) -> Iterator[str]:
    if "+" not in word and not _ESCAPED.search(word):
        return
    for _ in range(_MOST_TIMES):
        if "+" in word:
            yield unquote(word.replace("+", " "))
        before, word = word, unquote(word)
        if word == before:
            return
        yield word
