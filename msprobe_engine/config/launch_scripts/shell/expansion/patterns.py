"""Patterns of the shell (``*``, ``?``, ``[a-z]``) in time proportional to pattern times text; no regular expression is made of them."""

from __future__ import annotations

from dataclasses import dataclass

MAX_WORK = 2_000_000


class PatternTooLong(Exception):
    """Pattern times text is more than `MAX_WORK`."""


@dataclass(frozen=True, slots=True)
class _Set:
    """``[...]``: single characters and ranges."""

    ranges: tuple[tuple[str, str], ...]
    negated: bool

    def __contains__(self, c: str) -> bool:
        return any(low <= c <= high for low, high in self.ranges) != self.negated


_Item = tuple[str, object]  # ("one", "a"), ("any", None), ("star", None), ("set", _Set)
_CLASSES = {
    "digit": (("0", "9"),),
    "lower": (("a", "z"),),
    "upper": (("A", "Z"),),
    "alpha": (("a", "z"), ("A", "Z")),
    "alnum": (("a", "z"), ("A", "Z"), ("0", "9")),
    "space": ((" ", " "), ("\t", "\r")),
    "blank": ((" ", " "), ("\t", "\t")),
    "xdigit": (("0", "9"), ("a", "f"), ("A", "F")),
    "punct": (("!", "/"), (":", "@"), ("[", "`"), ("{", "~")),
}


def compile_pattern(pieces: list[tuple[str, bool]]) -> list[_Item]:
    """A pattern of texts; those marked True are quoted and stand for themselves."""
    items: list[_Item] = []
    characters = [(c, quoted) for text, quoted in pieces for c in text]
    i = 0
    while i < len(characters):
        c, quoted = characters[i]
        if quoted:
            items.append(("one", c))
        elif c == "*":
            if not items or items[-1][0] != "star":
                items.append(("star", None))
        elif c == "?":
            items.append(("any", None))
        elif c == "[" and (parsed := _parse_set(characters, i)) is not None:
            items.append(("set", parsed[0]))
            i = parsed[1]
        elif c == "\\" and i + 1 < len(characters):
            i += 1
            items.append(("one", characters[i][0]))
        else:
            items.append(("one", c))
        i += 1
    return items


def _parse_set(characters: list[tuple[str, bool]], start: int) -> tuple[_Set, int] | None:
    """``[...]`` at `start`: what is in it and where it ends; None where no bracket closes it."""
    i = start + 1
    negated = i < len(characters) and characters[i] in (("!", False), ("^", False))
    i += negated
    first = i
    ranges: list[tuple[str, str]] = []
    while i < len(characters):
        c, quoted = characters[i]
        if c == "]" and not quoted and i > first:
            return _Set(tuple(ranges), negated), i
        text = "".join(c for c, _ in characters[i : i + 12])
        if text.startswith("[:") and (end := text.find(":]")) > 0 and text[2:end] in _CLASSES:
            ranges.extend(_CLASSES[text[2:end]])
            i += end + 2
            continue
        if i + 2 < len(characters) and characters[i + 1] == ("-", False) and characters[i + 2] != ("]", False):
            ranges.append((c, characters[i + 2][0]))
            i += 3
            continue
        ranges.append((c, c))
        i += 1
    return None


def ends(items: list[_Item], text: str) -> list[int]:
    """All n, ascending, so that the pattern matches the first n characters of the text.

    Raises:
        PatternTooLong: that would take too long.
    """
    if (len(items) + 1) * (len(text) + 1) > MAX_WORK:
        raise PatternTooLong
    last = len(items)
    states = _add_reachable({0}, items)
    positions = [0] if last in states else []
    for n, c in enumerate(text, 1):
        following = set()
        for state in states:
            if state == last:
                continue
            kind, matcher = items[state]
            if kind == "star":
                following.add(state)
            elif kind == "any" or (kind == "one" and matcher == c) or (kind == "set" and c in matcher):  # type: ignore[operator]
                following.add(state + 1)
        if not following:
            break
        states = _add_reachable(following, items)
        if last in states:
            positions.append(n)
    return positions


def _add_reachable(states: set[int], items: list[_Item]) -> set[int]:
    out = set(states)
    for state in states:
        while state < len(items) and items[state][0] == "star":
            state += 1
            out.add(state)
    return out


def matches(items: list[_Item], text: str) -> bool:
    found = ends(items, text)
    return bool(found) and found[-1] == len(text)


def without_head(items: list[_Item], text: str, longest: bool) -> str:
    """``${X#pattern}``, with `longest` ``##``."""
    found = ends(items, text)
    return text[found[-1 if longest else 0] :] if found else text


def without_tail(items: list[_Item], text: str, longest: bool) -> str:
    """``${X%pattern}``, with `longest` ``%%``."""
    found = ends(items[::-1], text[::-1])
    return text[: len(text) - found[-1 if longest else 0]] if found else text


def replace_matches(items: list[_Item], text: str, new: str, operator: str) -> str:
    """``${X/pattern/new}``; operator ``/``, ``//`` (all), ``/#`` (at the beginning) or ``/%`` (at the end)."""
    if operator == "/%":
        shorter = without_tail(items, text, longest=True)
        return shorter + new if shorter != text or matches(items, "") else text
    if operator == "/#":
        positions = ends(items, text)
        return new + text[positions[-1] :] if positions else text
    if not items:
        return text
    if not text:
        return new if matches(items, "") else text
    if all(kind == "one" for kind, _ in items):
        return text.replace("".join(str(character) for _, character in items), new, -1 if operator == "//" else 1)
    out, i, work = [], 0, 0
    while i < len(text):
        work += len(items) * (len(text) - i)
        if work > MAX_WORK:
            raise PatternTooLong
        positions = ends(items, text[i:])
        if positions and positions[-1]:
            out.append(new)
            i += positions[-1]
            if operator == "/":
                break
        else:
            out.append(text[i])
            i += 1
    return "".join(out) + text[i:]
