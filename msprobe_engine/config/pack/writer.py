"""The pack: one zip with what a run was started with, written by all its ranks.

writer = PackWriter("pack.zip", rank=0, world_size=8)
writer.add({"env": {...}, "pip": "numpy=2.1.0\\n"})
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msprobe_engine.config.collect import job
from msprobe_engine.config.pack import equal_entries
from msprobe_engine.config.pack import file as pack_file
from msprobe_engine.config.pack.file import MOST_BYTES, MOST_ENTRY_BYTES, MOST_OF_HEAD
from msprobe_engine.config.secrets.masking import mask_setting, masked_shapes, masked_tree
from msprobe_engine.core.errors import ArchiveError, SinkError, UsageError
from msprobe_engine.core.io.archives import read_member
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.core.io.output_files import make_directory, write_file
from msprobe_engine.core.io.regular_files import explain
from msprobe_engine.core.log import info, one_line, warn_once, warning
from msprobe_engine.formats.pack import entries
from msprobe_engine.formats.pack.kind import OWN

_MOST_IN_ONE = 64
"""Ranks that write one pack in turns; of a larger job each `_BLOCK` of ranks writes one."""
_BLOCK = 16
_OF_TENSORS = ("weights/", "dataset/", "msprobe/weights/", "msprobe/dataset/")
_OF_DIGESTS = ("random/", "msprobe/random/", "msprobe/ranks/", "msprobe/withheld/", entries.META)
"""Entries of which texts that look generated are digests and names of processes."""


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
        made = {name: encode(_mask_entry(name, content)) for name, content in contents.items()}
        for name, content in made.items():
            if len(content) > MOST_ENTRY_BYTES:
                raise SinkError(f"entry {one_line(name)} has {len(content)} bytes; a pack takes entries of {MOST_ENTRY_BYTES} at most")
        try:
            self._write(made)
        except pack_file.Refused as refused:
            self._leave_shared(refused)
            self._write(made)

    def _write(self, made: dict[str, bytes]) -> None:
        with pack_file.lock_file(self.path, self._lock) as fd:
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
            before = pack_file.open_archive(fd)
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
            made = self._fold_equal_entries(made, before)
        pack_file.append(fd, {**first, **made}, before)

    def _fold_equal_entries(self, made: dict[str, bytes], before: pack_file.Opened) -> dict[str, bytes]:
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
        if not all(name.startswith(OWN) for name in there):
            raise SinkError(f"{one_line(str(self.path))} is there and is no pack of a config check; move it away, or name another path")
        if entries.META not in there:
            return "there was a pack of the existing tool"
        try:
            run = parse_json(read_member(before.file, there[entries.META], MOST_OF_HEAD)).get("run")
            who = entries.of_rank("ranks", self.rank)
            other = parse_json(read_member(before.file, there[who], MOST_OF_HEAD)).get("process") if who in there else job.process()
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


def _mask_entry(name: str, content: Any) -> Any:
    """An entry's content as it may be written, whatever who adds it has done before."""
    if name.startswith(_OF_TENSORS):
        return content
    if isinstance(content, str) or name.startswith(_OF_DIGESTS):
        return masked_shapes(content) if name == entries.PIP else masked_tree(content)
    return mask_setting("", content)


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
