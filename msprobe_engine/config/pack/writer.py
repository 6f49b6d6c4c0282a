"""The pack: one zip with what a run was started with, written by all its ranks.

writer = PackWriter("pack.zip", rank=0, world_size=8)
writer.add({"env": {...}, "pip": "numpy=2.1.0\\n"})
pack = read_pack("pack.zip")
pack.json("env"), pack.ranks, pack.problems
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msprobe_engine.config.collect import job
from msprobe_engine.config.pack import equal_entries
from msprobe_engine.config.pack import file as pack_file
from msprobe_engine.config.secrets.masking import cleaned, masked_shapes, masked_tree
from msprobe_engine.core.errors import ArchiveError, DumpFormatError, SinkError, UsageError
from msprobe_engine.core.io.archives import Limits, check_members, read_member
from msprobe_engine.core.io.damaged_files import guard_reading
from msprobe_engine.core.io.input_files import open_input
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.core.io.output_files import make_directory, write_file
from msprobe_engine.core.io.regular_files import explain
from msprobe_engine.core.log import info, one_line, warn_once, warning
from msprobe_engine.formats.pack import entries
from msprobe_engine.formats.pack.kind import NAME

MOST_BYTES = 10 * 2**30
"""Of all entries together, unpacked; the existing tool's limit."""
MOST_ENTRY_BYTES = 2**30
"""Of one entry; the existing tool's limit."""
_MOST_IN_ONE = 64
"""Ranks that write one pack in turns; of a larger job each `_BLOCK` of ranks writes one."""
_BLOCK = 16
_OF_TENSORS = ("weights/", "dataset/", "msprobe/weights/", "msprobe/dataset/")
_OF_DIGESTS = ("random/", "msprobe/random/", "msprobe/ranks/", "msprobe/withheld/", entries.META)
"""Entries of which texts that look generated are digests and names of processes."""
_MOST_OF_HEAD = 1 << 24
"""Bytes of an entry that says who wrote the pack: ranks read it while they train."""
_OWN = ("env", "pip", "hyperparameters/", "dataset/", "weights/", "random/", "msprobe/")


class PackWriter:
    """Adds entries to a pack; all ranks of a run may name the same path.

    A pack that an earlier run left at the path is replaced, which is said. An earlier run is told by `run`, without one by what launchers
    say, and by this rank having written there in another process. A file that is no pack is left alone. Where the file system has no
    locks, every node writes a pack of its own beside the path (``pack@HOST.zip``), and `read_pack` reads them together. So do the blocks of
    ranks of a large job (``pack@ranks16-31.zip``; the first one writes to the path): no rank waits for thousands of others.

    Args:
        path: ends in ``.zip``; directories are made.
        rank: of this process; None: as the launcher's environment says, 0 without.
        world_size: None: as the launcher's environment says, 1 without.
        framework: ``pytorch`` or ``mindspore``; empty: none (the command line).
        step_unit: what the steps of entries count.
        run: equal on all ranks of one run and on no other; None: as far as the launcher's environment tells.
        keep_previous: a pack that is replaced is kept beside the new one, as ``pack.previous.zip``.

    Raises:
        UsageError: `path` does not end in ``.zip``.
        SinkError: its directory cannot be made.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        framework: str = "",
        step_unit: str = "forward pass",
        run: str | None = None,
        keep_previous: bool = False,
    ) -> None:
        named = self.path = Path(path)
        if self.path.suffix != ".zip":
            raise UsageError(f"the pack's path is {one_line(str(path))!r}; it must end in .zip")
        self.rank = job.rank() if rank is None else rank
        self.world_size = job.world_size() if world_size is None else world_size
        self.path = part_of(named, self.rank, self.world_size)
        self._framework, self._step_unit = framework, step_unit
        self._run, self._known_run = job.launch() if run is None else run, run is not None
        self._lock: Path | None = None
        self._keep_previous = keep_previous
        make_directory(self.path.absolute().parent, "config check")

    def add(self, contents: Mapping[str, Any]) -> None:
        """Add entries: bytes and texts as they are, anything else as JSON; what has the shape of a secret is masked (`secrets`). An entry
        of a name that was added before is replaced.

        Raises:
            SinkError: the pack cannot be written, or would be larger than `MOST_BYTES`; what was in it is as before.
        """
        made = {name: encode(_masked(name, content)) for name, content in contents.items()}
        for name, content in made.items():
            if len(content) > MOST_ENTRY_BYTES:
                raise SinkError(f"entry {one_line(name)} has {len(content)} bytes; a pack takes entries of {MOST_ENTRY_BYTES} at most")
        try:
            self._write(made)
        except pack_file.Refused as refused:
            self._leave_shared(refused)
            self._write(made)

    def _write(self, made: dict[str, bytes]) -> None:
        with pack_file.locked(self.path, self._lock) as fd:
            try:
                self._append(fd, made)
            except OSError as error:
                why = explain(error, "name another path", path=self.path)
                raise SinkError(f"cannot write the pack {one_line(str(self.path))}: {why}") from error

    def _append(self, fd: int, made: dict[str, bytes]) -> None:
        if os.fstat(fd).st_size == 0:
            pack_file.append(fd, {**self._head(), **made}, None)
            return
        try:
            before = pack_file.opened(fd)
        except ArchiveError:
            raise SinkError(f"{one_line(str(self.path))} is there and is no pack; move it away, or name another path") from None
        why = self._stale(before)
        if why:
            self._say_replaced(fd, why)
            pack_file.append(fd, {**self._head(), **made}, None)
            return
        names = {entry.filename for entry in before.entries}
        size = sum(entry.file_size for entry in before.entries) + sum(map(len, made.values()))
        if size > MOST_BYTES:
            raise SinkError(f"the pack {one_line(str(self.path))} would hold {size} bytes; {MOST_BYTES} are the most: collect fewer steps")
        if before.damaged:
            warning(f"{one_line(str(self.path))}: a process was ended while it wrote; the {len(names)} entries before are kept")
        who = entries.of_rank("ranks", self.rank)
        first = {} if who in names else {who: encode(job.place(self.rank, self.world_size))}
        if self.world_size > _MOST_IN_ONE:
            made = self._folded(made, before)
        pack_file.append(fd, {**first, **made}, before)

    def _folded(self, made: dict[str, bytes], before: pack_file.Opened) -> dict[str, bytes]:
        try:
            return equal_entries.fold(made, before, self.rank)
        except ArchiveError:
            return made  # what is damaged there is said by who reads it

    def _say_replaced(self, fd: int, why: str) -> None:
        if not self._keep_previous:
            warning(f"{one_line(str(self.path))}: {why}, replaced by a new one")
            return
        stem, at, part = self.path.stem.partition("@")
        previous = self.path.with_name(f"{stem}.previous{at}{part}.zip")
        write_file(previous, [os.pread(fd, os.fstat(fd).st_size, 0)])
        info(f"{one_line(str(self.path))}: {why}, which is {previous.name} now")

    def _head(self) -> dict[str, bytes]:
        meta = {
            "format": entries.FORMAT,
            "framework": self._framework,
            "rank": self.rank,
            "world_size": self.world_size,
            "host": job.place(0, 1)["host"],
            "node": job.place(0, 1)["node"],
            "step_unit": self._step_unit,
            "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "run": self._run,
        }
        return {entries.META: encode(meta), entries.of_rank("ranks", self.rank): encode(job.place(self.rank, self.world_size))}

    def _stale(self, before: pack_file.Opened) -> str:
        """Why what is there is not this run's pack; empty: it is."""
        there = {entry.filename: entry for entry in before.entries}
        if not all(name.startswith(_OWN) for name in there):
            raise SinkError(f"{one_line(str(self.path))} is there and is no pack of a config check; move it away, or name another path")
        if entries.META not in there:
            return "there was a pack of the existing tool"
        try:
            run = parse_json(read_member(before.file, there[entries.META], _MOST_OF_HEAD)).get("run")
            who = entries.of_rank("ranks", self.rank)
            other = parse_json(read_member(before.file, there[who], _MOST_OF_HEAD)).get("process") if who in there else job.process()
        except (ValueError, AttributeError):
            return "there was a pack that cannot be read"
        same = run == self._run and (self._known_run or other == job.process())
        return "" if same else "there was the pack of an earlier run"

    def _leave_shared(self, refused: pack_file.Refused) -> None:
        if self._lock is not None:
            raise SinkError(f"cannot lock {self._lock}: {refused}; let TMPDIR be a directory of this node")
        shared, self._lock = self.path, pack_file.lock_of_node(self.path)
        with contextlib.suppress(OSError):
            if os.path.getsize(shared) == 0:
                os.unlink(shared)
        self.path = of_node(shared, job.place(0, 1)["host"])
        warn_once(
            f"pack {shared}",
            f"config check: {one_line(str(shared))} is on a file system without locks ({refused}); this node writes {self.path.name}",
        )


def _masked(name: str, content: Any) -> Any:
    """An entry's content as it may be written, whatever who adds it has done before."""
    if name.startswith(_OF_TENSORS):
        return content
    if isinstance(content, str) or name.startswith(_OF_DIGESTS):
        return masked_shapes(content) if name == entries.PIP else masked_tree(content)
    return cleaned("", content)


def of_node(path: Path, host: str) -> Path:
    """The pack of one node, where all cannot write one."""
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in host)
    return path.with_name(f"{path.stem}@{safe}.zip")


def part_of(path: Path, rank: int, world_size: int) -> Path:
    """Where a rank writes."""
    first = rank - rank % _BLOCK
    if world_size <= _MOST_IN_ONE or not first:
        return path
    return of_node(path, f"ranks{first}-{min(first + _BLOCK, world_size) - 1}")


def encode(content: Any) -> bytes:
    """An entry's bytes. Numbers that are not finite are written as Python's JSON has them (NaN, Infinity): the existing tool does too."""
    if isinstance(content, bytes):
        return content
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)
    return text.encode("utf-8", "backslashreplace")


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
        others = sorted(path.parent.glob(f"{_plain(path.stem)}@*.zip"))
        run: str | None = None
        for file in [path, *others] if path.exists() or not others else others:
            read, its = self._read(file)
            if run is None:
                run = its
            elif its != run:
                if not (
                    _of_ranks(file) and path.exists() and file.stat().st_mtime < path.stat().st_mtime
                ):  # left by an earlier, larger job
                    self.problems.append(f"{file.name} beside it belongs to another run and is left out")
                continue
            self._found.update({name: (file, entry) for name, entry in read.items() if name not in self._found})
        self._find_equal()
        self.names = sorted(self._found)
        self.ours = entries.META in self._found
        if not any(name.startswith(_OWN) for name in self.names):
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
            with open_input(file) as opened:
                return read_member(opened, entry, MOST_ENTRY_BYTES)
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
        found = {at[1] for name in self.names if (at := entries.ranks_of(name))}
        found |= {step[2] for name in self.names if (step := entries.steps_of(name) or entries.existing_of(name))}
        return sorted(found)

    def by_rank(self, part: str) -> dict[int, str]:
        """Rank to entry of `part`: ``ranks``, ``env``, ``system``, ``hyperparameters``, ``random`` (see `entries.of_rank`)."""
        found = ((at, name) for name in self.names if (at := entries.ranks_of(name)))
        return {rank: name for (kind, rank), name in sorted(found) if kind == part}

    def by_step(self, part: str) -> dict[tuple[int, int], str]:
        """(step, rank) to entry of digests: ``weights`` or ``dataset``."""
        found = ((at, name) for name in self.names if (at := entries.steps_of(name)))
        return {(step, rank): name for (kind, step, rank), name in sorted(found) if kind == part}

    def existing(self, part: str) -> dict[tuple[int, int], str]:
        """(step, rank) to the existing tool's entry: ``weights``, ``dataset`` or ``random`` (its step is -1)."""
        found = ((at, name) for name in self.names if (at := entries.existing_of(name)))
        return {(step, rank): name for (kind, step, rank), name in sorted(found) if kind == part}

    def packages(self) -> dict[str, list[str]]:
        """Installed distributions of ``pip``: name to versions, of several the imported one first; empty without the entry."""
        found: dict[str, list[str]] = {}
        for line in self.text(entries.PIP).splitlines() if entries.PIP in self else ():
            name, given, version = line.partition("=")
            if given and name.strip():
                found.setdefault(name.strip(), []).append(version.strip())
        return {name: versions[::-1] if self.ours else versions for name, versions in found.items()}  # see `packages.text`

    def _read(self, path: Path) -> tuple[dict[str, zipfile.ZipInfo], str]:
        """The entries of one file, and which run wrote it (empty: the existing tool)."""
        run = ""
        try:
            with open_input(path) as opened:
                archive = pack_file.opened(opened.fileno())
                found, nameless, repeated = check_members(
                    archive.entries, Limits(MOST_ENTRY_BYTES, MOST_BYTES, portable=True, tolerant=True)
                )
                if entries.META in found:
                    with contextlib.suppress(ValueError, TypeError, LookupError):  # said when the entry is asked for
                        run = str(parse_json(read_member(opened, found[entries.META], _MOST_OF_HEAD))["run"])
        except OSError as error:
            raise DumpFormatError(f"cannot read the pack {one_line(str(path))}: {error.strerror or error}") from error
        except ArchiveError as error:
            raise DumpFormatError(
                f"{one_line(str(path))} {error}; packs are written by 'msprobe config_check -d' and by ConfigChecker"
            ) from error
        if nameless:
            self.problems.append(f"{path.name}: {nameless} entries have no name and are left out; no tool writes such, do not trust it")
        if archive.damaged:
            self.problems.append(f"{path.name}: its end is missing; {len(found)} entries before it are read")
        if repeated:
            self.problems.append(
                f"{path.name}: {len(repeated)} entries are there more than once ({one_line(min(repeated))}), as when two runs wrote "
                "into one pack; the last of each is taken, and steps of the earlier run may be left over"
            )
        return found, run


def read_pack(path: str | Path) -> Pack:
    """Open a pack of this tool or of the existing one, and the packs of other nodes and ranks beside it (``pack@HOST.zip``).

    Raises:
        DumpFormatError: there is none, it is no zip or no pack, or it was made to do harm (paths that lead out, sizes beyond all bounds).
    """
    if os.path.isdir(path):
        raise DumpFormatError(f"no {NAME} in {one_line(str(path))}; name a pack (.zip), or the output directory of a run that has one")
    with guard_reading(path, "a pack"):
        return Pack(Path(path))


def _of_ranks(part: Path) -> bool:
    return part.stem.partition("@")[2].startswith("ranks")


def _plain(stem: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in stem)
