"""Brace expansion: ``{a,b}`` and ``{1..8}`` in words, before every other expansion."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

from msprobe_engine.config.launch_scripts.shell.syntax import Literal, Parameter, Part, Word

MAX_WORDS = 20_000
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RANGE = re.compile(r"(-?\d{1,18})\.\.(-?\d{1,18})(?:\.\.(-?\d{1,9}))?|([A-Za-z])\.\.([A-Za-z])(?:\.\.(-?\d{1,9}))?")
_Item = str | Part


def expand_braces(word: Word) -> list[Word]:
    """The words that a word stands for; itself where it has no braces of that kind, or more than `MAX_WORDS`."""
    if not any(isinstance(part, Literal) and not part.quoted and "{" in part.text for part in word.parts):
        return [word]
    items: list[tuple[_Item, int]] = []
    for part in word.parts:
        if isinstance(part, Literal) and not part.quoted:
            items.extend((c, part.line) for c in part.text)
        else:
            items.append((part, part.line))
    results = _expand(items, [MAX_WORDS])
    return [word] if results is None else [_word(result, word.line) for result in results]


def _word(items: list[tuple[_Item, int]], line: int) -> Word:
    parts: list[Part] = []
    for item, place in items:
        last = parts[-1] if parts else None
        if not isinstance(item, str):
            parts.append(item)
        elif isinstance(last, Parameter) and not last.quoted and last.source == f"${last.name}" and _NAME.fullmatch(last.name + item):
            parts[-1] = replace(last, name=last.name + item, source=last.source + item)  # $X{1,2} is $X1 $X2
        elif isinstance(last, Literal) and not last.quoted and last.line == place:
            parts[-1] = Literal(last.text + item, place)
        else:
            parts.append(Literal(item, place))
    return Word(tuple(parts), line)


def _expand(items: list[tuple[_Item, int]], budget: list[int]) -> list[list[tuple[_Item, int]]] | None:
    start = 0
    while (group := _group(items, start)) is not None:
        begin, commas, end = group
        inner = items[begin + 1 : end]
        position = items[begin][1]
        choices: list[list[tuple[_Item, int]]] | None
        if commas:
            edges = [begin, *commas, end]
            choices = []
            for begin_edge, end_edge in pairwise(edges):
                parts = _expand(items[begin_edge + 1 : end_edge], budget)
                if parts is None:
                    return None
                choices.extend(parts)
        else:
            choices = _range("".join(item if isinstance(item, str) else " " for item, _ in inner), position)
            if choices is None:
                start = begin + 1
                continue
        rests = _expand(items[end + 1 :], budget)
        if rests is None:
            return None
        budget[0] -= len(choices) * len(rests)
        if budget[0] < 0:
            return None
        return [items[:begin] + choice + rest for choice in choices for rest in rests]
    return [items]


def _group(items: list[tuple[_Item, int]], start: int) -> tuple[int, list[int], int] | None:
    """Where the next closed ``{...}`` begins, its commas, where it ends."""
    open_at: list[tuple[int, list[int]]] = []
    group: tuple[int, list[int], int] | None = None
    for i in range(start, len(items)):
        c = items[i][0]
        if c == "{":
            open_at.append((i, []))
        elif c == "," and open_at:
            open_at[-1][1].append(i)
        elif c == "}" and open_at:
            begin, commas = open_at.pop()
            if group is None or begin < group[0]:
                group = (begin, commas, i)
            if not open_at:
                break
    return group


def _range(text: str, place: int) -> list[list[tuple[_Item, int]]] | None:
    match = _RANGE.fullmatch(text)
    if match is None:
        return None
    numbers = match[1] is not None
    first, last = (int(match[1]), int(match[2])) if numbers else (ord(match[4]), ord(match[5]))
    step = abs(int(match[3 if numbers else 6] or 1)) or 1
    if abs(last - first) // step >= MAX_WORDS:
        return None
    values = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
    width = max(len(match[1].lstrip("-")), len(match[2].lstrip("-"))) if numbers and re.search(r"(^|\.|-)0\d", text) else 0
    texts = [f"{'-' * (v < 0)}{abs(v):0{width}d}" if numbers else chr(v) for v in values]
    return [[(c, place) for c in text] for text in texts]
