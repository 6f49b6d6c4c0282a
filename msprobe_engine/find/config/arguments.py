"""Arguments that the program was started with (``program.arguments`` of the system entry), graded as settings are.

A framework resolves its own arguments, and an optimizer shows its learning rate: what settings of the pack say already is compared there
and not here. What is left belongs to the program alone, so an argument of no known name may matter.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from msprobe_engine.config.collect.resolved import FLAG
from msprobe_engine.config.launch_scripts.arguments import is_option, read_options
from msprobe_engine.config.launch_scripts.shell.values import Known, Place, Text, show_text
from msprobe_engine.config.settings import normalize
from msprobe_engine.config.settings.aliases import key
from msprobe_engine.config.settings.pack_settings import PackSettings, Setting
from msprobe_engine.config.severity import HARMLESS
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.config import difference
from msprobe_engine.find.config.compare_settings import compare_settings
from msprobe_engine.find.config.difference import SETTINGS, Difference, merge_ranks

POSITIONAL = "argument "
"""Name of a word without an option, with its number."""
_NONE = Sentence("not given")
_NEGATIONS = ("no_", "disable_")
_START_TIME = re.compile(
    r"20[0-9]{6}[-_T]?[0-9]{4}(?:[0-9]{2})?|20[0-9]{2}-[0-9]{2}-[0-9]{2}[-_T ]+[0-9]{2}[-:_.]?[0-9]{2}(?:[-:_.]?[0-9]{2})?"
)
"""Date and time of day; a date alone may be the release of a data set."""
_MEETING_POINT = re.compile(r"(?:tcp|env|file|etcd|c10d)://.*")
"""Where ranks find each other."""


@dataclass
class ComparedArguments:
    """What comparing the arguments gave.

    Attributes:
        differences: one of each argument, also the harmless ones.
        masked: names of arguments that look like secrets, and so were not compared.
        unknown: those of them that may change the numbers.
    """

    differences: list[Difference] = field(default_factory=list)
    masked: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)


def compare_arguments(
    bench: Mapping[int, Mapping[str, Any]],
    cmp: Mapping[int, Mapping[str, Any]],
    settings: tuple[Mapping[int, PackSettings], Mapping[int, PackSettings]],
    reported: Sequence[Difference],
    own_files: tuple[Collection[str], Collection[str]] = ((), ()),
) -> ComparedArguments:
    """Compare rank by rank.

    Args:
        bench, cmp: ``program`` of the system entries, by rank.
        settings: what each side has resolved, by rank; empty: nothing.
        reported: differences of these settings.
        own_files: names of the pack itself and of the files whose settings are in it, which are compared by their content.
    """
    out = ComparedArguments()
    found: list[tuple[tuple[int, ...], Difference]] = []
    names = {key(name) for one in reported if one.matters for name in (one.bench_name, one.cmp_name)}
    terms = {one.term for one in reported if one.matters and one.term}
    for ranks, golden_program, target_program in difference.pairs(bench, cmp, lambda program: [_script(program), program.get("arguments")]):
        golden, target = (
            PackSettings(read_arguments(golden_program.get("arguments"))),
            PackSettings(read_arguments(target_program.get("arguments"))),
        )
        title = " / ".join(dict.fromkeys((_script(golden_program), _script(target_program))))
        resolved = (settings[0].get(ranks[0]) or PackSettings(()), settings[1].get(ranks[0]) or PackSettings(()))
        differences = compare_settings(golden, target, f"{title} arguments").differences
        for one in differences:
            given = {key(name) for name in (one.bench_name, one.cmp_name)} & {*golden.settings, *target.settings}
            if not given:  # computed, or a default
                continue
            by_settings = given & names or one.term in terms or all(_is_resolved(name, (golden, target), resolved) for name in given)
            if not by_settings:
                found.append((ranks, _row(one, title, golden, target, own_files)))
        masked = golden.masked | target.masked
        out.masked |= {name for name in masked if key(name) not in {*resolved[0].masked, *resolved[1].masked}}
        out.unknown |= {name for name in out.masked & set(masked) if not masked[name] and golden.terms.pattern(name).severity != HARMLESS}
    out.differences = merge_ranks(found, tuple(set(bench) & set(cmp)))
    return out


def read_arguments(arguments: Any) -> list[Setting]:
    """Options by their names; of one that is given several times all values, in their order."""
    words = [(Known(word, Place("", 0)),) for word in arguments if isinstance(word, str)] if isinstance(arguments, list) else []
    found: dict[str, tuple[str, list[Any]]] = {}
    positionals = 0
    for part in _parts(words):
        options = read_options(part, FLAG, _ignore_note)
        for name, one in options.found.items():
            found.setdefault(key(name), (name, []))[1].append(one.value)
        for text in options.positionals:
            positionals += 1
            name = f"{POSITIONAL}{positionals}"
            found[name] = (name, [show_text(text)])
    return [Setting(name, values[0] if len(values) == 1 else values, FLAG) for name, values in found.values()]


def with_arguments(resolved: PackSettings, program: Mapping[str, Any]) -> PackSettings:
    """Settings of a run and, for the comparison with a launch script that has them all, the arguments that are in none of these."""
    said = {alias.term.name for name in resolved.settings for alias in resolved.aliases(name) if not alias.term.group}
    flags = {key(one.where) for one in resolved.settings.values() if one.origin == FLAG}
    known = {*resolved.settings, *map(key, resolved.masked), *flags}
    more = [
        one
        for one in read_arguments(program.get("arguments"))
        if key(one.name) not in known
        and not one.name.startswith(POSITIONAL)
        and not said & {alias.term.name for alias in resolved.terms.aliases(one.name)}
    ]
    side = PackSettings([*resolved.settings.values(), *more], world_size=resolved.world_size, versions=resolved.versions)
    side.masked |= resolved.masked
    return side


def _ignore_note(_place: Place, _text: str) -> None:
    """All values of an option that is given again are kept, so there is nothing to say."""


def _parts(words: Sequence[Text]) -> Iterator[Sequence[Text]]:
    """Each option with what follows it."""
    starts = [0, *(i for i, word in enumerate(words) if i and is_option(word)), len(words)]
    return (words[start:end] for start, end in pairwise(starts))


def _script(program: Mapping[str, Any]) -> str:
    return os.path.basename(str(program.get("script", "")))


def _is_resolved(name: str, arguments: tuple[PackSettings, PackSettings], resolved: tuple[PackSettings, PackSettings]) -> bool:
    """Do settings of both sides hold what this argument says, or what is taken without it?"""
    given = [_settings_of(side.settings[name], name, known) if name in side.settings else None for side, known in zip(arguments, resolved)]
    names = set().union(*(one for one in given if one))
    return all(bool(names & set(known.settings)) if one is None else bool(one) for one, known in zip(given, resolved))


def _settings_of(argument: Setting, name: str, resolved: PackSettings) -> set[str]:
    """Names of the settings that hold the value of an argument."""
    value = normalize.plain(argument.value)
    terms = {alias.term.name: alias for alias in resolved.terms.aliases(name) if not alias.term.group}
    positive = next((name.removeprefix(word) for word in _NEGATIONS if name.startswith(word)), "")
    return {
        other
        for other, one in resolved.settings.items()
        if (one.origin == FLAG and key(one.where) == name)
        or (other == name and normalize.same(normalize.plain(one.value), value))
        or (other == positive and value is True and normalize.plain(one.value) is False)
        or any(
            alias.term.name in terms
            and normalize.same(resolved.read_setting(alias, one), resolved.read_setting(terms[alias.term.name], argument))
            for alias in resolved.aliases(other)
        )
    }


def _row(
    one: Difference, title: str, golden: PackSettings, target: PackSettings, own_files: tuple[Collection[str], Collection[str]]
) -> Difference:
    """Under the name of the program, with the option as it is typed."""
    of_sides = ((one.bench_name, golden), (one.cmp_name, target))
    names = [f"{title} arguments: {_format_argument_name(name)}" if key(name) in side.settings else "" for name, side in of_sides]
    shared = next(name for name in names if name)
    severity, why = one.severity, one.why
    if one.matters and not one.term and _START_TIME.sub("", one.bench) == _START_TIME.sub("", one.cmp) != "":
        severity, why = HARMLESS, Sentence("only the time in it differs, which is that of the start")
    elif one.matters and all(os.path.basename(value) in files for value, files in zip((one.bench, one.cmp), own_files)):
        severity, why = HARMLESS, Sentence("it names the pack, or a file whose settings are in it")
    elif one.matters and all(not value or _MEETING_POINT.fullmatch(value) for value in (one.bench, one.cmp)):
        severity, why = HARMLESS, Sentence("it says where the ranks find each other")
    return replace(
        one,
        sheet=SETTINGS,
        bench_name=names[0] or shared,
        cmp_name=names[1] or shared,
        bench=one.bench if names[0] else _NONE,
        cmp=one.cmp if names[1] else _NONE,
        severity=severity,
        why=why,
    )


def _format_argument_name(name: str) -> str:
    return name if name.startswith(POSITIONAL) else f"--{name}"
