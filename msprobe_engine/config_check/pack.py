"""The pack: one zip with what a run was started with, written by all its ranks.

writer = PackWriter("pack.zip", rank=0, world_size=8)
writer.add({"env": {...}, "pip": "numpy=2.1.0\\n"})
pack = read_pack("pack.zip")
pack.json("env"), pack.ranks, pack.problems
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msprobe_engine.config_check import entries, job, pack_file
from msprobe_engine.config_check.secrets import cleaned, masked_shapes, masked_tree
from msprobe_engine.core.io.damaged_files import guard_reading
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.core.io.output_files import make_directory, write_file
from msprobe_engine.errors import DumpFormatError, SinkError, UsageError
from msprobe_engine.log import info, one_line, warn_once, warning

MOST_BYTES = 10 * 2**30
"""Of all entries together, unpacked; the existing tool's limit."""
MOST_ENTRY_BYTES = 2**30
"""Of one entry; the existing tool's limit."""
MOST_PACKED = 1100
"""An entry that unpacks to more than so many times its size, and to more than a few MB, was made to fill a memory: deflate ends at 1032."""
_OF_TENSORS = ("weights/", "dataset/", "msprobe/weights/", "msprobe/dataset/")
_OF_DIGESTS = ("random/", "msprobe/random/", "msprobe/ranks/", "msprobe/withheld/", entries.META)
"""Entries of which texts that look generated are digests and names of processes."""
_OWN = ("env", "pip", "hyperparameters/", "dataset/", "weights/", "random/", "msprobe/")


class PackWriter:
    """Adds entries to a pack; all ranks of a run may name the same path.

    A pack that an earlier run left at the path is replaced, which is said. An earlier run is told by `run`, without one by what launchers
    say, and by this rank having written there in another process. A file that is no pack is left alone. Where the file system has no
    locks, every node writes a pack of its own beside the path (``pack@HOST.zip``), and `read_pack` reads them together.

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
        self.path = Path(path)
        if self.path.suffix != ".zip":
            raise UsageError(f"the pack's path is {one_line(str(path))!r}; it must end in .zip")
        self.rank = job.rank() if rank is None else rank
        self.world_size = job.world_size() if world_size is None else world_size
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
                advice = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "is the disk still there?"
                raise SinkError(f"cannot write the pack {one_line(str(self.path))}: {error.strerror or error}; {advice}") from error

    def _append(self, fd: int, made: dict[str, bytes]) -> None:
        if os.fstat(fd).st_size == 0:
            pack_file.append(fd, {**self._head(), **made}, None)
            return
        try:
            with pack_file.opened(fd) as before:
                why = self._stale(before.zip)
                if why:
                    self._say_replaced(fd, why)
                    pack_file.append(fd, {**self._head(), **made}, None)
                    return
                names = set(before.zip.namelist())
                size = sum(entry.file_size for entry in before.zip.infolist()) + sum(map(len, made.values()))
                if size > MOST_BYTES:
                    raise SinkError(
                        f"the pack {one_line(str(self.path))} would hold {size} bytes; {MOST_BYTES} are the most: collect fewer steps"
                    )
                if before.damaged:
                    warning(f"{one_line(str(self.path))}: a process was ended while it wrote; the {len(names)} entries before are kept")
                who = entries.of_rank("ranks", self.rank)
                first = {} if who in names else {who: encode(job.place(self.rank, self.world_size))}
                pack_file.append(fd, {**first, **made}, before)
        except zipfile.BadZipFile:
            raise SinkError(f"{one_line(str(self.path))} is there and is no pack; move it away, or name another path") from None

    def _say_replaced(self, fd: int, why: str) -> None:
        if not self._keep_previous:
            warning(f"{one_line(str(self.path))}: {why}, replaced by a new one")
            return
        previous = self.path.with_name(f"{self.path.stem}.previous.zip")
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

    def _stale(self, before: zipfile.ZipFile) -> str:
        """Why what is there is not this run's pack; empty: it is."""
        names = set(before.namelist())
        if not all(name.startswith(_OWN) for name in names):
            raise SinkError(f"{one_line(str(self.path))} is there and is no pack of a config check; move it away, or name another path")
        if entries.META not in names:
            return "there was a pack of the existing tool"
        try:
            run = parse_json(before.read(entries.META)).get("run")
            who = entries.of_rank("ranks", self.rank)
            other = parse_json(before.read(who)).get("process") if who in names else job.process()
        except (ValueError, AttributeError, zipfile.BadZipFile):
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
                self.problems.append(f"{file.name} beside it belongs to another run and is left out")
                continue
            self._found.update({name: (file, entry) for name, entry in read.items() if name not in self._found})
        self.names = sorted(self._found)
        self.ours = entries.META in self._found
        if not any(name.startswith(_OWN) for name in self.names):
            raise DumpFormatError(
                f"{one_line(str(path))} is no pack of a config check: none of its {len(self.names)} entries is env, pip, hyperparameters, "
                "dataset, weights or random; packs are written by 'msprobe config_check -d' and by ConfigChecker"
            )

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
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return pack_file.content(fd, entry)
            finally:
                os.close(fd)
        except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
            raise DumpFormatError(f"{one_line(str(file))}: entry {one_line(name)} cannot be read: {error}; take the pack again") from error
        except Exception as error:  # zlib.error, lzma.LZMAError and whatever else unpacks
            raise DumpFormatError(f"{one_line(str(file))}: entry {one_line(name)} is damaged: {error}; take the pack again") from error

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
        found: dict[str, zipfile.ZipInfo] = {}
        twice: set[str] = set()
        run = ""
        with _open(path) as archive:
            everything = archive.zip.infolist()
            listed = [entry for entry in everything if entry.filename and not entry.is_dir()]
            if nameless := sum(not entry.filename for entry in everything):
                self.problems.append(f"{path.name}: {nameless} entries have no name and are left out; no tool writes such, do not trust it")
            if len(listed) > pack_file.MOST_ENTRIES:
                raise DumpFormatError(f"{one_line(str(path))} has {len(listed)} entries; {pack_file.MOST_ENTRIES} are the most")
            for entry in listed:
                _refuse(path, entry)
                if entry.filename in found:
                    twice.add(entry.filename)
                found[entry.filename] = entry
            total = sum(entry.file_size for entry in found.values())
            if total > MOST_BYTES:
                raise DumpFormatError(f"{one_line(str(path))} unpacks to {total} bytes; {MOST_BYTES} are the most")
            if entries.META in found:
                with contextlib.suppress(Exception):  # said when the entry is asked for
                    run = str(parse_json(archive.zip.read(found[entries.META]))["run"])
        if archive.damaged:
            self.problems.append(f"{path.name}: its end is missing; {len(found)} entries before it are read")
        if twice:
            self.problems.append(
                f"{path.name}: {len(twice)} entries are there more than once ({one_line(sorted(twice)[0])}), as when two runs wrote "
                "into one pack; the last of each is taken, and steps of the earlier run may be left over"
            )
        return found, run


def read_pack(path: str | Path) -> Pack:
    """Open a pack of this tool or of the existing one, and the packs of other nodes beside it (``pack@HOST.zip``).

    Raises:
        DumpFormatError: there is none, it is no zip or no pack, or it was made to do harm (paths that lead out, sizes beyond all bounds).
    """
    with guard_reading(path, "a pack"):
        return Pack(Path(path))


def _refuse(path: Path, entry: zipfile.ZipInfo) -> None:
    name = entry.filename
    if name.startswith(("/", "\\")) or "\\" in name or ":" in name or ".." in name.split("/") or "\0" in name:
        raise DumpFormatError(f"{one_line(str(path))}: the name of entry {one_line(name)!r} leads out of the pack; nothing of it is read")
    if entry.file_size > MOST_ENTRY_BYTES or (entry.file_size > 2**24 and entry.file_size > MOST_PACKED * max(1, entry.compress_size)):
        raise DumpFormatError(
            f"{one_line(str(path))}: entry {one_line(name)} says it unpacks from {entry.compress_size} to {entry.file_size} bytes; "
            f"{MOST_ENTRY_BYTES} and {MOST_PACKED} times are the most"
        )
    if entry.flag_bits & 0x1:
        raise DumpFormatError(f"{one_line(str(path))}: entry {one_line(name)} is encrypted; packs are not")


@contextlib.contextmanager
def _open(path: Path) -> Iterator[pack_file.Opened]:
    with contextlib.ExitStack() as stack:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            archive = stack.enter_context(pack_file.opened(fd))
        except OSError as error:
            raise DumpFormatError(f"cannot read the pack {one_line(str(path))}: {error.strerror or error}") from error
        except zipfile.BadZipFile as error:
            raise DumpFormatError(
                f"{one_line(str(path))} is no zip; packs are written by 'msprobe config_check -d' and by ConfigChecker"
            ) from error
        yield archive


def _plain(stem: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in stem)
