"""Words of a command line as options: ``--lr 1e-4``, ``--lr=1e-4``, ``--bf16``, ``--betas 0.9 0.95``, ``key=value`` of Hydra."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from msprobe_engine.config.launch_scripts.shell.values import Known, Place, Text, Unknown, show_text, unknown_of
from msprobe_engine.config.launch_scripts.static_values import Found

_OPTION = re.compile(r"--?[A-Za-z]")
_OVERRIDE = re.compile(r"[+~]{0,2}([A-Za-z_][\w/@]*(?:[.][\w/@-]+)*)=")
_DELETED = re.compile(r"~([A-Za-z_][\w/@]*(?:[.][\w/@-]+)*)")
_MANY_WORDS = re.compile(r"ARGS|ARGUMENTS|OPTS|OPTIONS|EXTRA|FLAGS|PARAMS|CMD|OVERRIDES?|_ARG\b|^\$\{?[@*]|\[[@*]\]", re.IGNORECASE)

Note = Callable[[Place, str], None]


@dataclass(slots=True)
class Options:
    """What a list of words comes to.

    Attributes:
        found: option (without dashes) or key -> value; the last of several.
        positionals: words that belong to no option.
    """

    found: dict[str, Found] = field(default_factory=dict)
    positionals: list[Text] = field(default_factory=list)


def is_option(word: Text) -> bool:
    """The word begins like an option; negative numbers do not."""
    first = word[0] if word else None
    return isinstance(first, Known) and bool(_OPTION.match(first.text))


def place_of(word: Text) -> Place:
    """Where a word is written."""
    return word[0].at if word else Place("", 0)


def read_options(words: Sequence[Text], where: str, note: Note) -> Options:
    """Options of a program whose parser is not known.

    What follows an option up to the next one are its values. Words that are not known and may be none at all (``$EXTRA_ARGS``) are no
    values; where they are one of a few texts, the options in these are there under that condition.

    Args:
        where: the `Found.where` of options; overrides have their own.
        note: takes what has to be said of a line.
    """
    out = Options()
    i, count = 0, len(words)
    while i < count:
        word = words[i]
        i += 1
        if _passed_on(word):
            _perhaps(word, out, where, note)
            continue
        if _is_override(word):
            _override(word, out, note)
            continue
        if not is_option(word):
            out.positionals.append(word)
            continue
        first = word[0]
        assert isinstance(first, Known)
        if show_text(word) == "--":
            out.positionals.extend(words[i:])
            break
        name, equals, rest = first.text.partition("=")
        values: list[Text] = [(Known(rest, first.at), *word[1:])] if equals else []
        if not equals and len(word) > 1:
            name = show_text(word)
        while not equals and i < count and not is_option(words[i]):
            if _passed_on(words[i]) and (_list_like(words[i]) or (values and not _one_of_few(words[i]))):
                break
            if values and _is_override(words[i]):
                break
            values.append(words[i])
            i += 1
        _store_option(out, name.lstrip("-"), _build_found(values, where, first.at), note)
    return out


def _build_found(values: list[Text], where: str, at: Place) -> Found:
    texts = [show_text(text) for text in values]
    value: object = True if not texts else texts[0] if len(texts) == 1 else texts
    unknown = next((piece for text in values if (piece := unknown_of(text)) is not None), None)
    if unknown is None:
        return Found(value, where, at.file, at.line)
    why = f"{unknown.source} {unknown.why}"
    if unknown.options:
        why += ": " + " or ".join(repr(" ".join(option)) for option in unknown.options)
    return Found(value, where, at.file, at.line, False, why)


def _store_option(out: Options, name: str, found: Found, note: Note) -> None:
    before = out.found.get(name)
    if before is not None and before.value != found.value:
        said = f"'{name}' is given again; {found.value!r} counts here, {before.value!r} of {before.file}, line {before.line} does not"
        note(Place(found.file, found.line), said)
    out.found[name] = found


def _passed_on(word: Text) -> bool:
    """Nothing of the word is known, and it may be several words or none."""
    return len(word) == 1 and isinstance(word[0], Unknown) and word[0].many


def _one_of_few(word: Text) -> bool:
    """The word is one of a few texts, so that it is seen whether it can be a value."""
    return isinstance(word[0], Unknown) and bool(word[0].options)


def _list_like(word: Text) -> bool:
    """A variable that by its name holds options, so that it is not the value of the option before it."""
    first = word[0]
    if not isinstance(first, Unknown):
        return False
    if first.options:
        return any(_OPTION.match(option[0]) or _OVERRIDE.match(option[0]) for option in first.options if option)
    return bool(_MANY_WORDS.search(first.source))


def _perhaps(word: Text, out: Options, where: str, note: Note) -> None:
    """Words that may be there: their options are known under a condition only."""
    first = word[0]
    assert isinstance(first, Unknown)
    if not first.options:
        note(first.at, f"{first.source} {first.why}; options in it are not known")
        return
    for option in first.options:
        inner = read_options([(Known(text, first.at),) for text in option], where, note)
        for name, found in inner.found.items():
            if name not in out.found:
                out.found[name] = replace(found, known=False, why=f"{first.source} {first.why}; it is given only then")


def _is_override(word: Text) -> bool:
    first = word[0] if word else None
    return isinstance(first, Known) and (bool(_OVERRIDE.match(first.text)) or bool(_DELETED.fullmatch(show_text(word))))


def _override(word: Text, out: Options, note: Note) -> None:
    """``key=value``, ``+key=value``, ``~key`` of Hydra and its like."""
    first = word[0]
    assert isinstance(first, Known)
    match = _OVERRIDE.match(first.text)
    if match is None:
        _store_option(out, first.text.lstrip("~"), Found(None, "override", first.at.file, first.at.line), note)
        return
    value: Text = (Known(first.text[match.end() :], first.at), *word[1:])
    _store_option(out, match[1], replace(_build_found([value], "override", first.at)), note)
