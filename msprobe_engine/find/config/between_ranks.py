"""One pack: which rank, and which node, has something else than the others?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msprobe_engine.config.environment.rules import OF_PROCESS, environment_rules
from msprobe_engine.config.environment.variables import Environment
from msprobe_engine.config.pack.reader import Pack, read_pack
from msprobe_engine.config.settings import normalize
from msprobe_engine.config.settings.aliases import known_terms
from msprobe_engine.config.severity import CHANGES, HARMLESS, MAY, SEVERITIES
from msprobe_engine.core.text.ranges import format_ranges
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.config.difference import DATASET, ENV, SETTINGS, SYSTEM, WEIGHTS, short
from msprobe_engine.find.config.environment import of_job
from msprobe_engine.find.config.pack_settings import DYNAMIC_FILE, PackSide
from msprobe_engine.find.config.system import classify_fact, facts

NOT_THERE = "not there"
MOST_NAMES = 6
MOST_RANKS = 2**20
"""A job of more is a number that somebody made up."""
_PARTS = {"env": "environment", "hyperparameters": "settings", "system": "system"}


@dataclass(frozen=True)
class Deviation:
    """A name that some ranks have otherwise than most.

    Attributes:
        sheet: ``env``, ``hyperparameters``, ``system`` or ``weights``.
        value: what the `ranks` have.
        others: what most ranks have.
        nodes: hosts on which all ranks are among `ranks`; empty: it does not follow nodes.
    """

    sheet: str
    name: str
    value: str
    others: str
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    severity: str
    why: str

    def sentence(self) -> str:
        """One line for a console."""
        where = f"node {', '.join(self.nodes)} (rank {format_ranges(self.ranks)})" if self.nodes else f"rank {format_ranges(self.ranks)}"
        return f"{where}: {self.sheet} {self.name} is {short(self.value)}, {short(self.others)} elsewhere; {self.why}"


@dataclass
class Ranks:
    """What one pack says about its ranks.

    Attributes:
        ranks: that have written.
        hosts: rank to host.
        deviations: the worst first.
        missing: what ranks of the job should have written and have not; whether they are as the others cannot be told.
        notes: what could not be told.
    """

    path: str
    ranks: tuple[int, ...] = ()
    hosts: Mapping[int, str] = field(default_factory=dict)
    deviations: list[Deviation] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def matter(self) -> list[Deviation]:
        """Those that are not harmless."""
        return [one for one in self.deviations if one.severity != HARMLESS]

    @property
    def exit_code(self) -> int:
        """0: all ranks have the same of what matters, 1: not, 3: those that have written have, and others have not written."""
        return 1 if self.matter else 3 if self.missing else 0

    def headline(self) -> str:
        """The first line."""
        hosts = len(set(self.hosts.values()))
        where = f"{len(self.ranks)} rank{'' if len(self.ranks) == 1 else 's'}{f' on {hosts} nodes' if hosts > 1 else ''}"
        if not self.matter and self.missing:
            return f"Cannot tell: {'; '.join(self.missing)}. No difference that matters in what {where} wrote."
        if not self.matter:
            return f"No difference that matters between {where}."
        odd = sorted({rank for one in self.matter for rank in one.ranks})
        things = f"{len(self.matter)} thing{'' if len(self.matter) == 1 else 's'}"
        return f"Of {where}, rank {format_ranges(odd)} {'differs' if len(odd) == 1 else 'differ'} from the others in {things}."

    def as_json(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "equal": self.exit_code == 0,
            "pack": self.path,
            "ranks": list(self.ranks),
            "hosts": {str(rank): host for rank, host in self.hosts.items()},
            "differences": [vars(one) | {"ranks": list(one.ranks), "nodes": list(one.nodes)} for one in self.matter],
            "harmless": [
                vars(one) | {"ranks": list(one.ranks), "nodes": list(one.nodes)} for one in self.deviations if one not in self.matter
            ],
            "missing": self.missing,
            "notes": self.notes,
        }


def between_ranks(pack: str | Path | Pack) -> Ranks:
    """Hold the ranks of one pack against each other.

    Raises:
        DumpFormatError: the path is no pack.
    """
    side = PackSide(pack if isinstance(pack, Pack) else read_pack(pack))
    places = side.places()
    hosts = {rank: str(place.get("host", "")) for rank, place in places.items()}
    out = Ranks(str(side.pack.path), tuple(sorted(set(side.pack.ranks) | set(places))), hosts)
    out.missing += _describe_missing_parts(side, out.ranks)
    if len(out.ranks) < 2:
        out.notes.append("the pack has what one rank wrote; there is nothing to hold against it")
        out.missing += side.problems
        return out
    rules, terms = environment_rules(), known_terms()
    if side.pack.by_rank("env"):
        environments = side.env(True)
        variables = {rank: of_job(one) for rank, one in environments.items()}
        _values_not_shown(out, environments)
        _hold(out, ENV, variables, lambda name: (rules.of(name).severity, rules.of(name).why))
    else:
        out.notes.append("the environment was not collected rank by rank")
    if side.ranks_with_settings():
        values = {rank: {one.name: one.value for one in of.settings.values()} for rank, of in side.settings(DYNAMIC_FILE, True).items()}

        def of_setting(name: str) -> tuple[str, str]:
            alias = terms.of(name)
            row = alias.term if alias is not None else terms.pattern(name)
            return row.severity, row.why

        _hold(out, SETTINGS, values, of_setting)
    _hold(out, SYSTEM, {rank: facts(one) for rank, one in side.system().items()}, classify_fact)
    _weights(out, side)
    out.deviations.sort(key=lambda one: (SEVERITIES.index(one.severity), one.sheet, one.name))
    out.missing += side.problems
    return out


def _values_not_shown(out: Ranks, environments: Mapping[int, Environment]) -> None:
    """What cannot be held against each other: values that are not in the pack and have no digest."""
    names = sorted({name for one in environments.values() for name, hidden in one.withheld.items() if not hidden.digest} - OF_PROCESS)
    if not names:
        return
    out.notes.append(f"{len(names)} variables of the environment are in the pack without their values and without digests; not compared")
    matter = [name for name in names if environment_rules().may_change(name)]
    if matter:
        out.missing.append(f"values that may change the numbers are masked in the pack: {', '.join(matter[:MOST_NAMES])}")


def _describe_missing_parts(side: PackSide, ranks: tuple[int, ...]) -> list[str]:
    """Ranks of the job that have written nothing, or not what others have."""
    expected = side.world_size
    absent = [] if expected is None else sorted(set(range(min(expected, MOST_RANKS))) - set(ranks))
    out = [f"the job has {expected} ranks, and rank {format_ranges(absent)} has written nothing"] if absent else []
    parts = {word: set(side.pack.by_rank(part)) for part, word in _PARTS.items()}
    for part in (WEIGHTS, DATASET):
        wrote = [{rank for _, rank in found} for found in (side.pack.list_existing_entries(part), side.pack.by_step(part))]
        parts[part] = set().union(*wrote)
    for word, having in parts.items():
        without = sorted(set(ranks) - having)
        if having and without:
            out.append(f"rank {format_ranges(without)} has written no {word}, which others have")
    return out


def _hold(out: Ranks, sheet: str, by_rank: Mapping[int, Mapping[str, Any]], judge: Any) -> None:
    """A deviation for every value of a name that fewer ranks have than another one."""
    if len(by_rank) < 2:
        return
    for name in sorted({name for one in by_rank.values() for name in one}):
        shown = {rank: normalize.show_value(one[name]) if name in one else NOT_THERE for rank, one in by_rank.items()}
        if len(set(shown.values())) < 2:
            continue
        most, count = Counter(shown.values()).most_common(1)[0]
        if count == 1 and len(shown) > 2:
            continue  # every rank has its own: that is what it is for
        severity, why = judge(name)
        for value in dict.fromkeys(shown.values()):
            if value == most or normalize.same(normalize.plain(value), normalize.plain(most)):
                continue
            ranks = tuple(rank for rank, one in shown.items() if one == value)
            out.deviations.append(Deviation(sheet, name, value, most, ranks, _nodes(out.hosts, ranks), severity, why))


def _nodes(hosts: Mapping[int, str], ranks: tuple[int, ...]) -> tuple[str, ...]:
    """Hosts that the ranks are exactly all of; empty when they are not, or when all lie on one host."""
    on = {hosts.get(rank, "") for rank in ranks}
    if "" in on or len(set(hosts.values())) < 2 or {rank for rank, host in hosts.items() if host in on} != set(ranks):
        return ()
    return tuple(sorted(on))


def _weights(out: Ranks, side: PackSide) -> None:
    """Parameters that are whole on every rank (equal shapes, no parallel cut) and not the same at the first step."""
    ours = side.tensors(WEIGHTS).ours
    if not ours:
        return
    first = min(step for step, _ in ours)
    by_rank = {rank: entry for (step, rank), entry in ours.items() if step == first}
    cut = _is_cut(side)
    if len(by_rank) < 2 or cut:
        if cut:
            out.notes.append(f"weights are not held against each other: ranks hold other parts of the model ({cut})")
        return
    odd: dict[tuple[int, ...], list[str]] = {}
    for name in sorted(set.intersection(*(set(entry) for entry in by_rank.values()))):
        digests = {rank: str(entry[name].get("digest")) for rank, entry in by_rank.items() if isinstance(entry[name], Mapping)}
        if len({str(by_rank[rank][name].get("shape")) for rank in digests}) > 1 or len(set(digests.values())) < 2:
            continue
        if any(by_rank[rank][name].get("placements") or by_rank[rank][name].get("whole") for rank in digests):
            continue  # shards
        most, count = Counter(digests.values()).most_common(1)[0]
        ranks = tuple(rank for rank, digest in digests.items() if digest != most) if count > 1 or len(digests) == 2 else tuple(digests)
        odd.setdefault(ranks, []).append(name)
    for ranks, names in odd.items():
        what = f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
        why = Sentence("ranks that should begin with the same weights do not; one of them was initialised or loaded in another way")
        severity = MAY if len(ranks) == len(by_rank) else CHANGES
        out.deviations.append(Deviation(WEIGHTS, what, "other bits", "the same bits", ranks, _nodes(out.hosts, ranks), severity, why))


def _is_cut(side: PackSide) -> str:
    """Which parallel sizes say that ranks hold other parts; empty: none."""
    files = side.settings_files()
    if not files:
        return ""
    of = next(iter(side.settings(files[-1], False).values()))
    sizes = {name: of.number(name) for name in ("tensor_parallel", "pipeline_parallel", "expert_parallel")}
    return ", ".join(f"{name.replace('_', ' ')} {size}" for name, size in sizes.items() if size is not None and size > 1)
