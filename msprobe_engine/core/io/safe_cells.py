"""Names as files show them: safe in a spreadsheet, and shortened on request."""

from __future__ import annotations

import re
from collections.abc import Iterable

from msprobe_engine.core.records import FAMILIES, Sample

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters that make a spreadsheet run a cell (CSV injection, as OWASP lists them)."""
_SQUASH = tuple(re.compile(rf".*\.({part})", re.DOTALL) for part in (r"layers?\..*", r"embeddings?\..*", "final.*", "output.*", "norm.*"))
"""Patterns of the existing tool (26.2.0) in their order; the group is what stays."""
_PLACE = re.compile(r"(.*)(\.(?:input|output)(?:_\d+)?)", re.DOTALL)

_TAG_RANK = re.compile(r"^rank\d+/", re.ASCII)


def safe_cell(text: str) -> str:
    """A text as one CSV cell (RFC 4180). A text that a spreadsheet would run as a formula gets an apostrophe in front; so does one
    that has such an apostrophe already, which makes the way back unique (`plain_name`)."""
    if text.startswith(_FORMULA) or (text.startswith("'") and text.lstrip("'").startswith(_FORMULA)):
        text = "'" + text
    if "\0" in text:  # csv readers before Python 3.11 stop there
        text = text.replace("\0", "\\0")
    if any(c in text for c in ',"\n\r'):
        return '"' + text.replace('"', '""') + '"'
    return text


def safe_or_number(text: str) -> str:
    """`safe_cell`, but of a number: those below 0 are no formulas."""
    try:
        float(text)
    except ValueError:
        return safe_cell(utf8(text))
    return text


def utf8(text: str) -> str:
    """A text that UTF-8 can hold: halves of a surrogate pair and undecodable bytes are written as escapes."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def plain_name(cell: str) -> str:
    """The name of a cell that `safe_cell` has written, after a CSV reader."""
    return cell[1:] if cell.startswith("'") and cell.lstrip("'").startswith(_FORMULA) else cell


def plain_tag(name: str, tag: str) -> str:
    """The tag of a row of ``other`` without the name and the rank in front of it, which stand elsewhere.

    >>> plain_tag("all_reduce", "all_reduce/rank3/post_0_1")
    'post_0_1'
    """
    return _TAG_RANK.sub("", tag.removeprefix(f"{name}/"))


def shorten_name(name: str) -> str:
    """The short form of a parameter or module tensor name, or the name itself: from ``layers.``, ``embedding.``, ``final``, ``output``
    or ``norm`` on. The place of a module tensor (``.output_0``) is no part of the module's name."""
    module, place = match.groups() if (match := _PLACE.fullmatch(name)) is not None else (name, "")
    for pattern in _SQUASH:
        if (short := pattern.fullmatch(module)) is not None:
            return str(short[1]) + place
    return name


class Names:
    """Short names of one run: a short name stands for one name only, so that no row takes the place of another.

    Names of one step that would be shortened to the same all stay whole; a name that comes later and finds its short form taken
    stays whole, too. (A whole name that is the short form of an earlier one gets ``#2`` behind it.)
    """

    def __init__(self, squash: bool) -> None:
        self.squash = squash
        self._shown: dict[str, str] = {}
        self._taken: set[str] = set()

    def samples(self, samples: list[Sample]) -> list[Sample]:
        """The samples under the names that files show."""
        if not self.squash:
            return samples
        shown = self._shown
        new = dict.fromkeys(s.name for s in samples if s.name not in shown)
        if new:
            self._add(new)
        return [s if (name := shown[s.name]) == s.name else s._replace(name=name) for s in samples]

    def by_family(self, samples: list[Sample]) -> dict[str, list[Sample]]:
        """`samples` by the family whose file they belong in; what no family is for is ``other``. Without those that the frame counts as
        lost because nobody knows their numbers (scope ``unknown``): a NaN in their place would be taken for one of the training."""
        families: dict[str, list[Sample]] = {}
        for sample in self.samples(samples):
            if sample.ref.row < 0 and sample.extra.get("scope") == "unknown":
                continue
            families.setdefault(sample.family if sample.family in FAMILIES else "other", []).append(sample)
        return families

    def _add(self, names: Iterable[str]) -> None:
        short = {name: shorten_name(name) for name in names}
        wanted: dict[str, int] = {}
        for text in short.values():
            wanted[text] = wanted.get(text, 0) + 1
        whole = set(short)
        for name, text in short.items():
            free = text not in self._taken and wanted[text] == 1 and (text == name or text not in whole)
            shown = text if free else name
            while shown in self._taken:
                shown += "#2"
            self._shown[name] = shown
            self._taken.add(shown)
