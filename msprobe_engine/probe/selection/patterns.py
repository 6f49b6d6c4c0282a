"""The elements of ``list`` and ``tensor_list``: which record names they mean.

| element | keeps a record when |
| --- | --- |
| ``layers.1`` | it is a part of the name, so ``layers.11`` is kept too; as in the existing tool |
| ``layers.1.*``, ``*.mlp`` | with ``*`` (any text) or ``?`` (one character): it fits the whole name or a run of whole components of it |
| ``re:layers\\.(1|2)\\.`` | the regular expression is found in the name |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from msprobe_engine.core.settings.expressions import REGULAR

_ANY, _ONE = "*", "?"
_MODULE_FORMS = ("{}.forward.", "{}.backward.", "{}.parameters_grad.")
_MODULE_NAMES = ("Module.", "Cell.", "^Module\\.", "^Cell\\.", "Module\\.", "Cell\\.")
_SAMPLED = 100
"""Whether a glob or a regular expression can fit a call is tried with the call numbers 0 to 99 and with those written in it."""


class NamePatterns:
    """The elements together: a record is kept when one of them fits its name.

    Args:
        elements: as in the settings.

    Raises:
        re.error: a regular expression is wrong (`msprobe_engine.core.settings.expressions` tells beforehand).
    """

    def __init__(self, elements: Sequence[str]) -> None:
        self.elements = tuple(elements)
        self._parts = tuple(e for e in elements if not _is_pattern(e))
        self._searches: tuple[Callable[[str], object], ...] = tuple(_search(e) for e in elements if _is_pattern(e))
        self._numbers = sorted({*range(_SAMPLED), *(int(n) for e in elements if _is_pattern(e) for n in re.findall(r"[0-9]{1,6}", e))})

    def __call__(self, name: str) -> bool:
        """Does an element fit the record name?"""
        for part in self._parts:
            if part in name:
                return True
        return any(search(name) for search in self._searches)

    @property
    def only_modules(self) -> bool:
        """Does no element fit the name of an API?"""
        return all(element.removeprefix(REGULAR).startswith(_MODULE_NAMES) for element in self.elements)

    def module(self, base: str) -> tuple[bool, bool]:
        """(some call of the module can be kept, every call of it is) for the name ``Module.{path}.{Class}``."""
        return self._possible([form.format(base) for form in _MODULE_FORMS], "", base)

    def api(self, base: str) -> tuple[bool, bool]:
        """(some call of the API can be kept, every call of it is) for the name ``{Prefix}.{api}``."""
        forward, backward = self._possible([f"{base}."], ".forward", base), self._possible([f"{base}."], ".backward", base)
        return forward[0] or backward[0], forward[1] and backward[1]

    def _possible(self, heads: list[str], tail: str, base: str) -> tuple[bool, bool]:
        if any(part in base for part in self._parts):
            return True, True
        for head in heads:
            if any(_part_of_a_call(part, head, tail) for part in self._parts):
                return True, False
            if any(search(f"{head}{n}{tail}") for search in self._searches for n in self._numbers):
                return True, False
        return False, False


def _is_pattern(element: str) -> bool:
    return element.startswith(REGULAR) or _ANY in element or _ONE in element


def _search(element: str) -> Callable[[str], object]:
    if element.startswith(REGULAR):
        return re.compile(element.removeprefix(REGULAR)).search
    text = "".join(_translate_glob(element))
    return re.compile(rf"(?:^|\.){text}(?:\.|$)", re.DOTALL).search


def _translate_glob(glob: str) -> Iterator[str]:
    for character in glob:
        yield ".*" if character == _ANY else "." if character == _ONE else re.escape(character)


def _part_of_a_call(part: str, head: str, tail: str) -> bool:
    """Is there a number n so that `part` is a part of ``{head}{n}{tail}``?"""
    if part in head or (tail and part in tail):
        return True
    # what is left must hold a piece of the number: [end of head]digits[begin of tail]
    for match in re.finditer(r"[0-9]+", part):
        before, after = part[: match.start()], part[match.end() :]
        if head.endswith(before) and tail.startswith(after):
            return True
    return False
