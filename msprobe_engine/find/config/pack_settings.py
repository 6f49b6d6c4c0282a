"""A pack as one side of a comparison: what the checkers need, whoever wrote it (this tool, or either version of the existing one)."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msprobe_engine.config.environment.variables import Environment, of_entries
from msprobe_engine.config.pack.reader import Pack
from msprobe_engine.config.secrets.masking import mask_setting
from msprobe_engine.config.secrets.names import judged_name
from msprobe_engine.config.settings.normalize import Several
from msprobe_engine.config.settings.pack_settings import NOT_KNOWN, PackSettings, Setting
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.log import one_line
from msprobe_engine.core.text.ranges import format_ranges
from msprobe_engine.find.config.difference import NO_RANK
from msprobe_engine.find.config.tensors import Place, Tensors, flat_tags
from msprobe_engine.formats.pack import entries

STATIC_FILE = entries.STATIC.rpartition("/")[2]
MOST_LEVELS = 100
OF_RANK = ("rank", "local_rank", "node_rank", "device", "pid", "hostname")
"""Last parts of the names of settings that every rank has its own of."""
DYNAMIC_FILE = entries.DYNAMIC.rpartition("/")[2]


_SESSION_KEY = secrets.token_bytes(32)
"""Of this process: digests of values in packs that hold all variables, see `of_entries`."""

_META = ("format", "framework", "rank", "world_size", "created", "run")
_OF_RANKS = ("ranks", "env", "withheld", "system")
"""Parts that every rank writes."""
WITH_COUNTS = 2
"""The format from which on a pack says what was withheld, and how many variables there are."""
MOST_MISSING = 8
"""Entries of which one sentence names so many."""
EMPTY = 4
"""Bytes of an entry that holds nothing: ``{}``, ``[]``, ``null``."""


class PackSide:
    """The entries of a pack by checker. What is damaged is left out and said in `problems`."""

    def __init__(self, pack: Pack) -> None:
        self.pack = pack
        self.problems: list[str] = list(pack.problems)
        self.meta = self.read_mapping(entries.META)
        self.static = self.read_mapping(entries.STATIC_SETTINGS)
        self.versions = {name: versions[0] for name, versions in self._packages().items()}
        for sentence in _missing_of(self):
            self._add_problem(f"{one_line(str(pack.path))}: {sentence}")

    @property
    def world_size(self) -> int | None:
        """Ranks of the job that wrote the pack; None: it was not written by a job."""
        size = self.meta.get("world_size")
        return size if isinstance(size, int) and self.meta.get("framework") else None

    def has(self, part: str) -> bool:
        """Is anything there for a checker?"""
        names = self.pack.names
        if part == "env":
            return entries.ENV in names or bool(self.pack.by_rank("env"))
        if part == "pip":
            return entries.PIP in names
        if part == "hyperparameters":
            return bool(self.settings_files())
        if part == "system":
            return bool(self.pack.by_rank("system"))
        return bool(self.pack.list_existing_entries(part) or self.pack.by_step(part))

    def env(self, by_rank: bool) -> dict[int, Environment]:
        """Variables by rank, or one for all; of the command line with those that its scripts set."""
        ranks, withheld = self.pack.by_rank("env"), self.pack.by_rank("withheld")
        if by_rank and ranks:
            return {
                rank: of_entries(self.read_mapping(name), self.read_mapping(withheld.get(rank, "")), _SESSION_KEY)
                for rank, name in ranks.items()
            }
        one = self.read_mapping(entries.ENV) if entries.ENV in self.pack else self.read_mapping(next(iter(ranks.values()), ""))
        all_ranks = of_entries(one, self.read_mapping(next(iter(withheld.values()), "")), _SESSION_KEY)
        set_by_scripts = self.static.get("env")
        if not isinstance(set_by_scripts, dict):
            return {NO_RANK: all_ranks}
        hidden = self.static.get("withheld")
        scripts = of_entries(set_by_scripts, hidden if isinstance(hidden, dict) else {}, _SESSION_KEY)
        names = {*scripts.values, *scripts.withheld}
        before = {name: value for name, value in all_ranks.values.items() if name not in names}
        others = {name: hidden for name, hidden in all_ranks.withheld.items() if name not in names}
        return {NO_RANK: Environment({**before, **scripts.values}, {**others, **scripts.withheld}, all_ranks.key)}

    def packages(self) -> dict[str, list[str]]:
        """Name to versions."""
        return self._packages()

    def settings_files(self) -> tuple[str, ...]:
        """Which of `STATIC_FILE` and `DYNAMIC_FILE` have anything."""
        found = []
        if entries.STATIC in self.pack or entries.STATIC_SETTINGS in self.pack:
            found.append(STATIC_FILE)
        if entries.DYNAMIC in self.pack or self.pack.by_rank("hyperparameters"):
            found.append(DYNAMIC_FILE)
        return tuple(found)

    def settings(self, file: str, by_rank: bool) -> dict[int, PackSettings]:
        """The settings of a file: by rank where both packs know them so, else one for all ranks."""
        if file == STATIC_FILE:
            found = self._static()
            floats = any(isinstance(one.value, float) for one in found)
            return {NO_RANK: self._side(found, no_floats=not self.pack.ours and not floats)}
        ranks = self.pack.by_rank("hyperparameters")
        if ranks and (by_rank or entries.DYNAMIC not in self.pack):
            sides: dict[int, PackSettings] = {}
            known: dict[str, PackSettings] = {}
            for rank, name in ranks.items() if by_rank else list(ranks.items())[:1]:
                entry = {name: one for name, one in self.read_mapping(name).items() if name.rpartition(".")[2] not in OF_RANK}
                text = json.dumps(entry, sort_keys=True, default=str)  # most ranks have the same
                if text not in known:
                    known[text] = self._side(_read_resolved_settings(entry))
                sides[rank if by_rank else NO_RANK] = known[text]
            return sides
        if ranks:  # ours, beside a pack of the existing tool: what was resolved says more than null
            return {NO_RANK: self._side(_read_resolved_settings(self.read_mapping(next(iter(ranks.values())))))}
        dynamic = [Setting(name, value, framework="megatron") for name, value in self.read_mapping(entries.DYNAMIC).items()]
        return {NO_RANK: self._side(dynamic, opaque=not self.pack.ours)}

    def ranks_with_settings(self) -> bool:
        """Were they collected rank by rank?"""
        return bool(self.pack.by_rank("hyperparameters"))

    def _side(self, settings: list[Setting], opaque: bool = False, no_floats: bool = False) -> PackSettings:
        return PackSettings(settings, world_size=self.world_size, versions=self.versions, opaque=opaque, no_floats=no_floats)

    def _static(self) -> list[Setting]:
        values = self.static.get("values")
        if isinstance(values, dict) and values:
            return [_read_static_setting(name, judged_name(name, values), one) for name, one in values.items()]
        values = self.read_mapping(entries.STATIC)
        return [Setting(name, _each(mask_setting(judged_name(name, values), value))) for name, value in values.items()]

    def tensors(self, part: str) -> Tensors:
        """``weights`` or ``dataset``, of the existing tool and ours."""
        flat = flat_tags if part == "dataset" else _tensors_of
        existing = _Entries(self.pack.list_existing_entries(part), lambda name: flat(self.read_mapping(name)))
        return Tensors(existing, _Entries(self.pack.by_step(part), self.read_mapping))

    def random(self) -> tuple[dict[int, Any], dict[int, Any]]:
        """The existing tool's entries by rank, and ours."""
        existing = {
            rank: {function: calls for function, calls in self.read_mapping(name).items() if isinstance(calls, list)}
            for (_, rank), name in self.pack.list_existing_entries("random").items()
        }
        return existing, {rank: self.read_mapping(name) for rank, name in self.pack.by_rank("random").items()}

    def system(self) -> dict[int, Mapping[str, Any]]:
        """Drivers, devices, flags by rank."""
        return {rank: self.read_mapping(name) for rank, name in self.pack.by_rank("system").items()}

    def places(self) -> dict[int, Mapping[str, Any]]:
        """Where the ranks ran: ``host``, ``node``."""
        return {rank: self.read_mapping(name) for rank, name in self.pack.by_rank("ranks").items()}

    def _packages(self) -> dict[str, list[str]]:
        try:
            return self.pack.packages()
        except DumpFormatError as error:
            self._add_problem(str(error))
            return {}

    def read_mapping(self, name: str) -> dict[str, Any]:
        """An entry that is an object; empty where it is not there, or damaged, which `problems` says."""
        try:
            found = self.pack.mapping(name)
        except DumpFormatError as error:
            self._add_problem(str(error))
            return {}
        if _is_deep(found):
            self._add_problem(
                f"{self.pack.path}: entry {one_line(name)} is nested more than {MOST_LEVELS} levels deep, which no pack's is; left out"
            )
            return {}
        return found

    def _add_problem(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


class _Entries(Mapping[Place, Mapping[str, Any]]):
    """Entries by step and rank, each read when it is asked for: of thousands of ranks not all fit into memory."""

    def __init__(self, names: Mapping[Place, str], read: Callable[[str], Mapping[str, Any]]) -> None:
        self._names, self._read = names, read

    def __getitem__(self, place: Place) -> Mapping[str, Any]:
        return self._read(self._names[place])

    def __iter__(self) -> Iterator[Place]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [child for one in level if isinstance(one, (dict, list)) for child in (one.values() if isinstance(one, dict) else one)]
        if not level:
            return False
    return True


def _tensors_of(entry: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {name: one for name, one in entry.items() if isinstance(one, dict)}


def _read_resolved_settings(entry: Mapping[str, Any]) -> list[Setting]:
    """Our entry: name -> ``{"value", "origin", "where", "framework"}``; where two frameworks give a name other values, the second's is
    ``framework:name``."""
    return [
        Setting(
            name.removeprefix(f"{one.get('framework', '')}:"),
            one.get("value"),
            str(one.get("origin", "")),
            str(one.get("where", "")),
            str(one.get("framework", "")),
        )
        for name, one in entry.items()
        if isinstance(one, Mapping) and "value" in one
    ]


def _read_static_setting(name: str, judged: str, one: Any) -> Setting:
    """Our entry of a static collection: ``{"value", "where", "file", "line", "known"}``.

    Args:
        judged: the name that says whether it is a secret.
    """
    if not isinstance(one, Mapping):
        return Setting(name, one)
    line = one.get("line")
    several = one.get("several")
    place = str(one.get("file", ""))
    value = Several.of(mask_setting(judged, several)) if isinstance(several, list) and several else one.get("value")
    return Setting(name, value, str(one.get("where", "")) if one.get("known", True) else NOT_KNOWN, f"{place}:{line}" if line else place)


def _each(value: Any) -> Any:
    """Of a key to which several files gave other values all of them."""
    if not isinstance(value, dict) or value.get("description") != "duplicate_value":
        return value
    values = value.get("values")
    return Several.of(values) if isinstance(values, list) and len(values) > 1 else values


def _missing_of(side: PackSide) -> list[str]:
    """Sentences about entries that a pack of this tool must have and has not, or that are empty; none of a pack of the existing tool."""
    pack = side.pack
    if not any(name.startswith("msprobe/") for name in pack.names):
        return []
    found: list[str] = []
    if entries.META not in pack:
        found.append(f"there is no entry {entries.META}, so what else is missing cannot be told")
    elif lacking := [key for key in _META if key not in side.meta]:
        found.append(f"{entries.META} has no {', '.join(lacking)}")
    counted = format_of(side) >= WITH_COUNTS
    ranks = set(pack.ranks)
    for part in _OF_RANKS:
        wanted = ranks if side.world_size is not None else {0} & ranks
        if part == "withheld" and not counted:
            continue
        if part == "env" and side.world_size is None:  # of the command line: the entry of the existing tool
            wanted = set()
        if absent := sorted(wanted - pack.by_rank(part).keys()):
            found.append(f"there is no entry of {part} of rank {format_ranges(absent)}")
    needed = [entries.ENV, entries.PIP] if 0 in ranks else []
    needed += [entries.DYNAMIC] if 0 in pack.by_rank("hyperparameters") else []
    needed += [entries.STATIC_SETTINGS] if entries.STATIC in pack else []
    found += [f"there is no entry {name}" for name in needed if name not in pack]
    if entries.PIP in pack and not side.packages():
        found.append(f"{entries.PIP} names no package")
    found += [f"the entry {name} is empty" for name in _never_empty(side) if pack.size(name) <= EMPTY]
    found += [sentence for rank, name in pack.by_rank("withheld").items() if counted for sentence in _counts(side, rank, name)]
    return found[:MOST_MISSING] + ([f"and {len(found) - MOST_MISSING} more things are missing"] if len(found) > MOST_MISSING else [])


def format_of(side: PackSide) -> int:
    number = side.meta.get("format")
    return number if isinstance(number, int) else 1


def _never_empty(side: PackSide) -> Iterator[str]:
    for part in ("ranks", "system", "hyperparameters"):
        yield from side.pack.by_rank(part).values()
    yield from (name for name in (entries.META, entries.STATIC_SETTINGS) if name in side.pack)
    for part in ("weights", "dataset"):
        yield from side.pack.by_step(part).values()


def _counts(side: PackSide, rank: int, name: str) -> Iterator[str]:
    """The list of what was withheld says how long it is, and how many values stand beside it."""
    entry = side.read_mapping(name)
    if not all(isinstance(entry.get(key), kind) for key, kind in (("variables", dict), ("key_id", str), ("values", int), ("names", int))):
        yield f"{name} does not say what was withheld"
        return
    if len(entry["variables"]) != entry["names"]:
        yield f"{name} names {len(entry['variables'])} variables, and {entry['names']} were withheld"
    where = side.pack.by_rank("env").get(rank, entries.ENV)
    for place in dict.fromkeys((where, entries.ENV) if rank == 0 else (where,)):
        if place in side.pack and len(side.read_mapping(place)) != entry["values"]:
            yield f"{place} has the values of {len(side.read_mapping(place))} variables, and {entry['values']} were collected"
