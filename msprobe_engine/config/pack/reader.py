"""A pack as read: packs of this tool and of the existing one, and those of other nodes and ranks beside it.

pack = read_pack("pack.zip")
pack.json("env"), pack.ranks, pack.problems
"""

from __future__ import annotations

import contextlib
import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msprobe_engine.config.pack import equal_entries
from msprobe_engine.config.pack import file as pack_file
from msprobe_engine.core.errors import ArchiveError, DumpFormatError
from msprobe_engine.core.io.archives import Limits, check_members, read_member
from msprobe_engine.core.io.damaged_files import guard_reading
from msprobe_engine.core.io.input_files import open_input
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.core.log import one_line
from msprobe_engine.formats.pack import entries
from msprobe_engine.formats.pack.kind import NAME, OWN

_SMALL_BYTES = 1 << 20
"""A pack of at most so many bytes is kept in memory: its dozen entries are asked for one after the other, on file systems of a cluster."""
_MOST_KEPT = 64


class Pack:
    """A pack as read: nothing is unpacked to a disk, entries are read when they are asked for.

    Attributes:
        path: of the (first) file.
        names: of all entries, sorted.
        problems: what is wrong with the file, in words.
        ours: written by this tool; False: by the existing one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[str] = []
        self._found: dict[str, tuple[Path, zipfile.ZipInfo]] = {}
        self._kept: dict[Path, bytes] = {}
        others = sorted(path.parent.glob(f"{_plain(path.stem)}@*.zip"))
        run: str | None = None
        for file in [path, *others] if path.exists() or not others else others:
            read, hash_text = self._read_file(file)
            if run is None:
                run = hash_text
            elif hash_text != run:
                if not (
                    file.stem.partition("@")[2].startswith("ranks") and path.exists() and file.stat().st_mtime < path.stat().st_mtime
                ):  # left by an earlier, larger job
                    self.problems.append(f"{file.name} beside it belongs to another run and is left out")
                continue
            self._found.update({name: (file, entry) for name, entry in read.items() if name not in self._found})
        self._find_equal()
        self.names = sorted(self._found)
        self.ours = entries.META in self._found
        if not any(name.startswith(OWN) for name in self.names):
            raise DumpFormatError(
                f"{one_line(str(path))} is no pack of a config check: none of its {len(self.names)} entries is env, pip, hyperparameters, "
                "dataset, weights or random; packs are written by 'msprobe config_check -d' and by ConfigChecker"
            )

    def _find_equal(self) -> None:
        """Entries that are those of other ranks."""
        for at in [name for name in self._found if entries.is_same(name)]:
            equal = equal_entries.of_entry(self.raw(at))
            del self._found[at]
            for name, of in equal.items():
                if of in self._found:
                    self._found.setdefault(name, self._found[of])
                else:
                    self.problems.append(f"{one_line(name)} is that of {one_line(of)}, which is not there")

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def raw(self, name: str) -> bytes:
        """Content of an entry.

        Raises:
            DumpFormatError: it is not there, or damaged.
        """
        try:
            file, entry = self._found[name]
        except KeyError:
            raise DumpFormatError(f"{one_line(str(self.path))} has no entry {one_line(name)}") from None
        try:
            with io.BytesIO(self._kept[file]) if file in self._kept else open_input(file) as opened:
                return read_member(opened, entry, pack_file.MOST_ENTRY_BYTES)
        except (OSError, ArchiveError) as error:
            raise DumpFormatError(f"{one_line(str(file))}: entry {one_line(name)} cannot be read: {error}; take the pack again") from error

    def size(self, name: str) -> int:
        """Bytes of an entry that is there."""
        return self._found[name][1].file_size

    def text(self, name: str) -> str:
        """Content of an entry, UTF-8; what is none is shown as escapes."""
        return self.raw(name).decode("utf-8", "backslashreplace")

    def json(self, name: str) -> Any:
        """Content of an entry of JSON (also NaN and Infinity).

        Raises:
            DumpFormatError: it is not there, damaged or no JSON.
        """
        try:
            return parse_json(self.text(name))
        except ValueError as error:
            raise DumpFormatError(
                f"{one_line(str(self.path))}: entry {one_line(name)} is no JSON ({error}); was the process ended while it wrote?"
            ) from error

    def mapping(self, name: str) -> dict[str, Any]:
        """`json` of an entry that has to be an object; of one that is not there: empty.

        Raises:
            DumpFormatError: it is damaged, or no object.
        """
        if name not in self._found:
            return {}
        found = self.json(name)
        if not isinstance(found, dict):
            raise DumpFormatError(f"{one_line(str(self.path))}: entry {one_line(name)} holds {type(found).__name__}, not an object")
        return found

    @property
    def meta(self) -> dict[str, Any]:
        """``msprobe/meta.json``; empty for a pack of the existing tool."""
        return self.mapping(entries.META)

    @property
    def ranks(self) -> list[int]:
        """All ranks that have written anything, ascending."""
        ranks = {place[1] for name in self.names if (place := entries.ranks_of(name))}
        ranks |= {step[2] for name in self.names if (step := entries.steps_of(name) or entries.existing_of(name))}
        return sorted(ranks)

    def by_rank(self, part: str) -> dict[int, str]:
        """Rank to entry of `part`: ``ranks``, ``env``, ``system``, ``hyperparameters``, ``random`` (see `entries.of_rank`)."""
        placed = ((place, name) for name in self.names if (place := entries.ranks_of(name)))
        return {rank: name for (kind, rank), name in sorted(placed) if kind == part}

    def by_step(self, part: str) -> dict[tuple[int, int], str]:
        """(step, rank) to entry of digests: ``weights`` or ``dataset``."""
        return self._at_steps(part, entries.steps_of)

    def list_existing_entries(self, part: str) -> dict[tuple[int, int], str]:
        """(step, rank) to the existing tool's entry: ``weights``, ``dataset`` or ``random`` (its step is -1)."""
        return self._at_steps(part, entries.existing_of)

    def _at_steps(self, part: str, place_of: Callable[[str], tuple[str, int, int] | None]) -> dict[tuple[int, int], str]:
        placed = ((place, name) for name in self.names if (place := place_of(name)))
        return {(step, rank): name for (kind, step, rank), name in sorted(placed) if kind == part}

    def packages(self) -> dict[str, list[str]]:
        """Installed distributions of ``pip``: name to versions, of several the imported one first; empty without the entry."""
        found: dict[str, list[str]] = {}
        for line in self.text(entries.PIP).splitlines() if entries.PIP in self else ():
            name, given, version = line.partition("=")
            if given and name.strip():
                found.setdefault(name.strip(), []).append(version.strip())
        return {name: versions[::-1] if self.ours else versions for name, versions in found.items()}  # see `packages.text`

    def _read_file(self, path: Path) -> tuple[dict[str, zipfile.ZipInfo], str]:
        """The entries of one file, and which run wrote it (empty: the existing tool)."""
        run = ""
        try:
            with open_input(path) as opened:
                archive = pack_file.open_archive(opened.fileno())
                members, nameless, repeated = check_members(
                    archive.entries, Limits(pack_file.MOST_ENTRY_BYTES, pack_file.MOST_BYTES, portable=True, tolerant=True)
                )
                if entries.META in members:
                    with contextlib.suppress(ValueError, TypeError, LookupError):  # said when the entry is asked for
                        run = str(parse_json(read_member(opened, members[entries.META], pack_file.MOST_OF_HEAD))["run"])
                if len(self._kept) < _MOST_KEPT and os.fstat(opened.fileno()).st_size <= _SMALL_BYTES:
                    opened.seek(0)
                    self._kept[path] = opened.read(_SMALL_BYTES)
        except OSError as error:
            raise DumpFormatError(f"cannot read the pack {one_line(str(path))}: {error.strerror or error}") from error
        except ArchiveError as error:
            raise DumpFormatError(
                f"{one_line(str(path))} {error}; packs are written by 'msprobe config_check -d' and by ConfigChecker"
            ) from error
        if nameless:
            self.problems.append(f"{path.name}: {nameless} entries have no name and are left out; no tool writes such, do not trust it")
        if archive.damaged:
            self.problems.append(f"{path.name}: its end is missing; {len(members)} entries before it are read")
        if repeated:
            self.problems.append(
                f"{path.name}: {len(repeated)} entries are there more than once ({one_line(min(repeated))}), as when two runs wrote "
                "into one pack; the last of each is taken, and steps of the earlier run may be left over"
            )
        return members, run


def read_pack(path: str | Path) -> Pack:
    """Open a pack of this tool or of the existing one, and the packs of other nodes and ranks beside it (``pack@HOST.zip``).

    Raises:
        DumpFormatError: there is none, it is no zip or no pack, or it was made to do harm (paths that lead out, sizes beyond all bounds).
    """
    if os.path.isdir(path):
        raise DumpFormatError(f"no {NAME} in {one_line(str(path))}; name a pack (.zip), or the output directory of a run that has one")
    with guard_reading(path, "a pack"):
        return Pack(Path(path))


def _plain(stem: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in stem)
