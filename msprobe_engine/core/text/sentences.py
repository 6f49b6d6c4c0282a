"""Sentences about a run that know what they were made of, so that pages can say them in another language.

A `Sentence` is its English text, which is what consoles and files get. Pages look up the other language by its template
(``web/sentences.py``); names and numbers are its arguments and stay as they are, unless they are sentences themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_PLACE = re.compile(r"\{(\d)\}")


class Sentence(str):
    """English text of a template and its arguments.

    Args:
        template: English, with ``{0}`` to ``{9}`` where arguments go.
        arguments: names and formatted numbers, or sentences.
    """

    template: str
    arguments: tuple[str, ...]

    def __new__(cls, template: str, *arguments: object) -> Sentence:
        given = tuple(argument if isinstance(argument, Sentence) else str(argument) for argument in arguments)
        made = super().__new__(cls, fill_template(template, given))
        made.template = template
        made.arguments = given
        return made

    def __add__(self, other: str) -> Sentence:
        return Sentence("{0}{1}", self, other)

    def __getnewargs__(self) -> tuple[str, ...]:  # type: ignore[override] # copies and processes make it anew of its parts
        return (self.template, *self.arguments)


def fill_template(template: str, arguments: Iterable[str]) -> str:
    """A template with its arguments in their places; what looks like a place in an argument is none."""
    given = list(arguments)
    return _PLACE.sub(lambda found: given[int(found[1])], template)


def join_sentences(separator: str, parts: Iterable[object]) -> Sentence:
    """Parts after each other, in any language; nested as deep as the logarithm of their number, because pages say them part by part."""
    made = list(parts)
    while len(made) > 1:
        last = made[len(made) & ~1 :]
        made = [Sentence(f"{{0}}{separator}{{1}}", left, right) for left, right in zip(made[::2], made[1::2])] + last
    return Sentence("{0}", made[0]) if made else Sentence("")


def one_line_of(text: str) -> str:
    """`log.one_line` of a text; a sentence stays one."""
    from msprobe_engine.core.log import one_line

    if not isinstance(text, Sentence):
        return one_line(text)
    return Sentence(text.template, *map(one_line_of, text.arguments))
