"""Filters whose output is a function of their input, as launch scripts use them to count devices and to take names apart: ``tr``, ``wc``,
``cut``, ``head``, ``tail``, ``sort``, ``uniq``, ``awk '{print NF}'``, ``sed s/a/b/``. Other forms of these are not known."""

from __future__ import annotations

import re
from collections.abc import Callable

MAX_INPUT = 200_000
_CLASSES = {
    "[:upper:]": "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "[:lower:]": "abcdefghijklmnopqrstuvwxyz",
    "[:digit:]": "0123456789",
    "[:space:]": " \t\n\r\f\v",
}
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\", "0": "\0"}
_SED = re.compile(r"s([/|,#:])((?:(?!\1)[\w .,:=/@%-]|\\[/.])*)\1((?:(?!\1)[^&\\\n])*)\1(g?)")


def filter_text(words: list[str], text: str) -> str | None:
    """The output of a filter for an input; None: it is no filter, or a form of it that is not known."""
    form = _TABLE.get(words[0])
    if form is None or len(text) > MAX_INPUT:
        return None
    try:
        return form(words[1:], text)
    except (ValueError, IndexError):
        return None


def _characters(text: str) -> str | None:
    """A set of ``tr``: ``a-z``, ``\\n``, ``[:upper:]``."""
    if text in _CLASSES:
        return _CLASSES[text]
    plain = re.sub(r"\\([nt\\0])", lambda m: _ESCAPES[m[1]], text)
    if "[" in plain or "\\" in plain:
        return None

    def span(match: re.Match[str]) -> str:
        return "".join(map(chr, range(ord(match[1]), ord(match[2]) + 1)))

    return re.sub(r"([A-Za-z0-9])-([A-Za-z0-9])", span, plain)


def _tr(words: list[str], text: str) -> str | None:
    option = words.pop(0) if words and words[0] in ("-d", "-s") else ""
    sets = [_characters(word) for word in words]
    if any(characters is None for characters in sets) or len(sets) != (1 if option else 2) or not all(sets):
        return None
    source = sets[0] or ""
    if option == "-d":
        return text.translate({ord(c): None for c in source})
    if option == "-s":
        return re.sub(f"([{re.escape(source)}])\\1+", r"\1", text)
    replacement = sets[1] or ""
    replacement += replacement[-1] * max(0, len(source) - len(replacement))
    return text.translate({ord(old): new for old, new in reversed(list(zip(source, replacement)))})


def _wc(words: list[str], text: str) -> str | None:
    counts = {"-l": text.count("\n"), "-w": len(text.split()), "-c": len(text.encode()), "-m": len(text)}
    return f"{counts[words[0]]}\n" if len(words) == 1 and words[0] in counts else None


def _options(words: list[str], values: str) -> dict[str, str] | None:
    """Short options that all have a value: ``-d, -f1``, ``-d , -f 1``; None: there is something else."""
    out: dict[str, str] = {}
    i = 0
    while i < len(words):
        word = words[i]
        if len(word) < 2 or word[0] != "-" or word[1] not in values:
            return None
        out[word[1]] = word[2:] if len(word) > 2 else words[i + 1]
        i += 1 if len(word) > 2 else 2
    return out


def _cut(words: list[str], text: str) -> str | None:
    options = _options(words, "dfc")
    if not options or ("f" in options) == ("c" in options):
        return None
    wanted = options.get("f") or options.get("c", "")
    match = re.fullmatch(r"(\d{1,6})(-(\d{0,6}))?", wanted)
    if match is None:
        return None
    first = int(match[1]) - 1
    last = None if match[2] and not match[3] else int(match[3] or match[1])
    if "c" in options:
        return "".join(line[first:last] + "\n" for line in text.splitlines())
    separator = options.get("d", "\t")
    out = []
    for line in text.splitlines():
        fields = line.split(separator)
        out.append((line if len(fields) == 1 else separator.join(fields[first:last])) + "\n")
    return "".join(out)


def _ends(words: list[str], text: str, head: bool) -> str | None:
    count = "10"
    if words:
        match = re.fullmatch(r"-n?(\d{1,6})", words[0] if words[0] != "-n" else f"-n{words[1]}")
        if match is None or len(words) > 1 + (words[0] == "-n"):
            return None
        count = match[1]
    lines = text.splitlines(keepends=True)
    return "".join(lines[: int(count)] if head else lines[len(lines) - min(int(count), len(lines)) :])


def _awk(words: list[str], text: str) -> str | None:
    separator = None
    if words and words[0].startswith("-F"):
        separator = words.pop(0)[2:] or words.pop(0)
    match = re.fullmatch(r"\{\s*print\s+(NF|\$NF|\$(\d{1,4}))\s*;?\s*\}", words[0]) if len(words) == 1 else None
    if match is None or (separator is not None and (len(separator) != 1 or separator == "\\")):
        return None
    out = []
    for line in text.splitlines():
        fields = line.split(separator) if separator not in (None, " ") and line else line.split()
        if match[1] == "NF":
            out.append(f"{len(fields)}\n")
        else:
            number = int(match[2]) if match[2] else len(fields)
            out.append((line if number == 0 else fields[number - 1] if number <= len(fields) else "") + "\n")
    return "".join(out)


def _sed(words: list[str], text: str) -> str | None:
    if words and words[0] in ("-e", "-E"):
        words.pop(0)
    match = _SED.fullmatch(words[0]) if len(words) == 1 else None
    if match is None or not match[2] or re.search(r"(?<!\\)\.", match[2]):
        return None
    old = re.sub(r"\\([/.])", r"\1", match[2])
    return "".join(line.replace(old, match[3], -1 if match[4] else 1) for line in text.splitlines(keepends=True))


def _sort(words: list[str], text: str) -> str | None:
    lines = text.splitlines()
    if words not in ([], ["-u"]) or not text.isascii() or any(line != line.lower() for line in lines):
        return None  # the order of other texts is that of the locale
    return "".join(line + "\n" for line in sorted(set(lines) if words else lines)) if all(line.isalnum() for line in lines) else None


def _uniq(words: list[str], text: str) -> str | None:
    lines = text.splitlines()
    return None if words else "".join(line + "\n" for i, line in enumerate(lines) if not i or line != lines[i - 1])


_TABLE: dict[str, Callable[[list[str], str], str | None]] = {
    "tr": _tr,
    "wc": _wc,
    "cut": _cut,
    "head": lambda words, text: _ends(words, text, head=True),
    "tail": lambda words, text: _ends(words, text, head=False),
    "awk": _awk,
    "sed": _sed,
    "sort": _sort,
    "uniq": _uniq,
}
