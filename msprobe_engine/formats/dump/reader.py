"""Reads dump directories: those of this tool and of the existing one, versions 8.1.1 and 26.2.0.

>>> dump = open_dump("out")                    # doctest: +SKIP
>>> step = dump.load(dump.steps[0], 0)         # doctest: +SKIP
>>> step.entries["Module.fc.Linear.forward.0"] # doctest: +SKIP
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msprobe_engine.core.errors import DumpFormatError, UsageError
from msprobe_engine.core.io.input_files import open_input
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.find_dumps import Entries, FoundDump, describe_content, find_dump, nearby
from msprobe_engine.formats.dump.world import Head, Times

if TYPE_CHECKING:
    from msprobe_engine.formats.dump.notebook.step_dump import StepDump

Rank = int | str
"""A rank, or the name of a directory that does not say its rank (``rank``, ``proc{pid}``)."""

_MOST_ASKED = 64
"""Ranks of a step that are asked when it was made."""
_DATA_DIRECTORY = re.compile(rb'"dump_data_dir": *"[^"]*?(proc[0-9]+)/')


def open_dump(root: Path | str, entries: Entries | None = None) -> DumpDirectory:
    """Open a dump by any of its paths: the output directory of a run, the root of a dump, a step directory, a rank directory, or its
    dump.json or debug.json. `entries`: what is in a directory, where that was listed before.

    Raises:
        DumpFormatError: there is no dump at this path.
    """
    path = Path(root)
    require_visible(path)
    if path.name in (layout.DUMP, layout.DEBUG) and not path.is_dir():
        path = path.parent
    found = find_dump(path, entries)
    if found is None and not path.is_dir():
        what = "is no directory and no dump.json" if path.exists() else f"there is no such file or directory{nearby(Path(root))}"
        raise DumpFormatError(
            f"{root}: {what}; give a dump.json, the directory of a rank or a step, the root of a dump, or the output directory of a run"
        )
    if found is None:
        raise DumpFormatError(f"{root}: no dump here; expected step{{N}}/rank{{R}}/dump.json, found {describe_content(path)}")
    return DumpDirectory(found)


def require_visible(path: Path) -> None:
    """Raises:
    DumpFormatError: whether there is something cannot be seen: the name is too long, or a directory above is not ours.
    """
    try:
        path.exists()
    except OSError as error:
        raise DumpFormatError(f"{str(path)[:200]}: cannot be looked at ({error.strerror})") from None


class DumpDirectory:
    """The steps and ranks of one dump; files are read by `load`.

    26.2.0 leaves later steps in ``proc{pid}`` when the dump began before the process group, and renames the first one to
    ``rank{R}``: where the header of the renamed one still names the process, the other steps get their rank too.

    Where two runs have written into one directory, steps and ranks of the earlier one that the later one has not replaced are none of the
    dump: `earlier_steps`, `earlier_ranks`. Files tell when their run began and when the step ended (`msprobe_engine.formats.dump.world`);
    what does not tell it is of the last run.
    """

    def __init__(self, dump: FoundDump) -> None:
        self.root, self.rings, self.strays, self.entries = dump.root, dump.rings, dump.strays, dump.entries
        self._empty = {step: sorted(name for name, path in ranks.items() if path is None) for step, ranks in dump.ranks.items()}
        found = {step: {name: path for name, path in ranks.items() if path is not None} for step, ranks in dump.ranks.items()}
        found = {step: ranks for step, ranks in found.items() if ranks}
        process_ranks = _process_ranks(found)
        self._found: dict[int | None, dict[Rank, Path]] = {}
        self._repeated: dict[int | None, list[str]] = {}
        self._current: dict[int | None, dict[Rank, Path]] = {}
        self._heads: dict[Path, Head] = {}
        for step, ranks in found.items():
            places = self._found[step] = {}
            for name, path in sorted(ranks.items()):
                rank = layout.rank_of(name)
                key: Rank = process_ranks.get(name, name) if rank is None else rank
                if key in places:
                    self._repeated.setdefault(step, []).append(f"{places[key].name} and {name}")
                    continue
                places[key] = path

    @property
    def steps(self) -> list[int]:
        """Steps, ascending. A rank directory outside a step directory counts as step 0."""
        return sorted({step or 0 for step in self._found}.difference(self.earlier_steps))

    @cached_property
    def earlier_steps(self) -> list[int]:
        """Steps that had ended before the run of a step below them began: a run that goes on has written all above its first."""
        latest, old = 0.0, list[int]()
        for step in sorted(self._found, key=lambda step: step or 0) if len(self._found) > 1 else ():
            times = [found for place in islice(self._found[step].values(), _MOST_ASKED) if (found := self._times_of(place)) is not None]
            if times and max(found.ended for found in times) < latest:
                old.append(step or 0)
            latest = max([latest, *(found.began for found in times)])
        return old

    def earlier_ranks(self, step: int) -> list[str]:
        """Names of directories whose process had ended all its steps before that of another one began."""
        current = set(self._ranks(step).values())
        return [place.name for place in self._found[self._key(step)].values() if place not in current]

    def ranks(self, step: int) -> list[Rank]:
        """Ranks of a step, ascending; directories that do not say their rank come last, by name.

        Raises:
            UsageError: no such step.
        """
        return sorted(self._ranks(step), key=lambda r: (isinstance(r, str), r if isinstance(r, int) else 0, str(r)))

    @cached_property
    def known_ranks(self) -> frozenset[int]:
        """Ranks of any step; it may be that one of an earlier run is among them."""
        found = [ranks for step, ranks in self._found.items() if (step or 0) not in self.earlier_steps]
        return frozenset(rank for ranks in found for rank in ranks if isinstance(rank, int))

    @property
    def empty_steps(self) -> list[int]:
        """Steps, ascending, of which no directory of a rank holds a dump; `steps` has them not."""
        return sorted(step or 0 for step in self._empty if step not in self._found)

    def empty_ranks(self, step: int) -> list[str]:
        """Names of directories of ranks of a step that hold no dump."""
        return self._empty[None] if step == 0 and None in self._empty else self._empty.get(step, [])

    def repeated_ranks(self, step: int) -> list[str]:
        """Names of directories that are of one rank of a step (``rank0 and rank00``), the one that is read first."""
        return self._repeated.get(self._key(step), [])

    def _key(self, step: int) -> int | None:
        return None if step == 0 and step not in self._found else step

    def _ranks(self, step: int) -> dict[Rank, Path]:
        key = self._key(step)
        if key not in self._found or step in self.earlier_steps:
            why = "is of an earlier run; give its directory to read it alone" if key in self._found else "was not dumped"
            raise UsageError(f"{self.root}: step {step} {why}; there are steps {_some(self.steps)}")
        if key not in self._current:
            self._current[key] = self._of_last_run(key)
        return self._current[key]

    def _of_last_run(self, step: int | None) -> dict[Rank, Path]:
        """Ranks of a step without those of an earlier run. Processes without a group do not wait for one another: one that had ended the
        step before another one began, and went on after that, is of the same run."""
        places = self._found[step]
        times = {rank: self._times_of(place) for rank, place in places.items()} if len(places) > 1 else {}
        last = max((found.began for found in times.values() if found is not None), default=0.0)
        return {
            rank: place
            for rank, place in places.items()
            if (found := times.get(rank)) is None or found.ended >= last or self._went_on(rank, found.began, last)
        }

    def _went_on(self, rank: Rank, began: float, until: float) -> bool:
        """Had the process of a rank that began then ended a step after `until`?"""
        asked = (self._times_of(ranks[rank]) for ranks in self._found.values() if rank in ranks)
        return any(found is not None and found.began == began and found.ended >= until for found in asked)

    def _times_of(self, place: Path) -> Times | None:
        return self.head(place).times

    def head(self, place: Path) -> Head:
        """What the file of a rank directory says in front of its records; each file is read once for it."""
        if place not in self._heads:
            self._heads[place] = Head(place)
        return self._heads[place]

    def path(self, step: int, rank: Rank | None = None) -> Path:
        """The rank directory. `rank` None: the only one.

        Raises:
            UsageError: no such step or rank.
        """
        ranks = self._ranks(step)
        if rank is None and len(ranks) == 1:
            return next(iter(ranks.values()))
        if rank is None or rank not in ranks:
            raise UsageError(
                f"{self.root}: step {step} has ranks {_some(self.ranks(step))}; {'choose one' if rank is None else f'not {rank!r}'}"
            )
        return ranks[rank]

    def load(self, step: int, rank: Rank | None = None) -> StepDump:
        """Read one rank of one step. `rank` None: the only one.

        A step that was never finished is returned with ``complete`` False and what there is of it.

        Raises:
            DumpFormatError: a file is damaged and cannot be recovered; file and line are named.
            UsageError: no such step or rank.
        """
        from msprobe_engine.formats.dump.notebook.step_dump import load_rank_directory

        return load_rank_directory(self.path(step, rank), step, rank if isinstance(rank, int) else None)

    def file(self, step: int, rank: Rank | None = None) -> Path:
        """The dump.json of a rank, which `read_table.read_side` reads, or its debug.json. `rank` None: the only one."""
        path = self.path(step, rank)
        return path / (layout.DEBUG if (path / layout.DEBUG).exists() and not (path / layout.DUMP).exists() else layout.DUMP)


def _some(values: list[Any]) -> str:
    texts = [str(v) for v in values]
    return ", ".join(texts if len(texts) <= 12 else [*texts[:10], "...", texts[-1]])


def _process_ranks(found: Mapping[int | None, Mapping[str, Path]]) -> dict[str, int]:
    """``proc{pid}`` to rank, from headers of renamed directories that still name their process."""
    if not any(layout.process_of(name) is not None for ranks in found.values() for name in ranks):
        return {}
    known: dict[str, int] = {}
    for ranks in found.values():
        for name, path in ranks.items():
            rank = layout.rank_of(name)
            if rank is None:
                continue
            try:
                with open_input(path / layout.DUMP) as file:
                    m = _DATA_DIRECTORY.search(file.read(4096))
            except OSError:
                continue
            if m:
                known[m[1].decode()] = rank
    return known
