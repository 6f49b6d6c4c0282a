"""Where things are in a dump directory, and how files get there.

{root}/step{N}/rank{R}/    of a distributed run; without a rank: proc{pid} (26.2.0 and this tool), rank (8.1.1)
    dump.json  stack.json  construct.json    level debug: debug.json only
    dump_tensor_data/                        one file per saved tensor
    not_saved.json                           tensors that were asked for and have no file, with the reason
    shapes.json                              task structure: the records without statistics
    config_check_pack.zip                    what the run was started with: of one rank, in its first step, below a dump_path
    .incomplete                              there while the step is not finished (`msprobe_engine.formats.dump.frame_log`)
    .frame.bin                               frame log, there until dump.json is (see `msprobe_engine.formats.dump.frame_log`)

A dump of an incident is one file: its dump.json holds stack.json and construct.json, each on a line of its own behind the records. The
steps that a rank had kept in memory are in one file all together (`msprobe_engine.formats.dump.ring_file`).
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import SinkError
from msprobe_engine.core.io.output_files import write_file
from msprobe_engine.core.io.regular_files import OddFileError, explain, open_regular
from msprobe_engine.formats.pack.kind import NAME as PACK

DUMP, STACK, CONSTRUCT, DEBUG = "dump.json", "stack.json", "construct.json", "debug.json"
COMPANIONS = (STACK, CONSTRUCT)
"""What lies beside a dump.json."""
WRITTEN_WITH = "written_with"
"""Key of its header: which of them were written with it, none or all."""
INSIDE = "inside"
"""Key of its header: which of them it holds itself, as keys behind ``data``."""
AFTER_UPDATE = "after_update"
"""Key of its header: the first forward call that was made when the update of the step was done, where there is one."""
TENSORS = "dump_tensor_data"
RERUN = "rerun"
"""In an incident directory: the dump of the second run of a step, laid out like any other."""
NOT_SAVED, SHAPES = "not_saved.json", "shapes.json"
BENCH = "bench.json"
"""Account of a comparison with an earlier dump, see `msprobe_engine.probe.sinks.dump.earlier_dump`."""
MARKER, FRAME_LOG = ".incomplete", ".frame.bin"
OWN_FILES = (DUMP, DEBUG, STACK, CONSTRUCT, NOT_SAVED, SHAPES, BENCH, FRAME_LOG, MARKER, PACK)
"""What a new run replaces in a step/rank directory that it writes, besides `TENSORS`."""

_STEP = re.compile(r"step([0-9]{1,18})")
_RANK = re.compile(r"rank([0-9]{1,9})?")
_PROCESS = re.compile(r"proc([0-9]{1,18})")
_HEADER_BYTES = 1024  # dump_data_dir is the fourth key


def step_of(name: str) -> int | None:
    """N of ``step{N}``, else None."""
    m = _STEP.fullmatch(name)
    return int(m[1]) if m else None


def rank_of(name: str) -> int | None:
    """R of ``rank{R}``, else None."""
    m = _RANK.fullmatch(name)
    return int(m[1]) if m and m[1] else None


def process_of(name: str) -> int | None:
    """The process id of ``proc{pid}``, else None."""
    m = _PROCESS.fullmatch(name)
    return int(m[1]) if m else None


def of_a_live_process(name: str) -> bool:
    """Is this ``proc{pid}`` of a process that runs on this machine now? False where that cannot be seen (no /proc)."""
    process = process_of(name)
    return process is not None and os.path.exists(f"/proc/{process}")


def is_rank_directory(name: str) -> bool:
    """True for ``rank{R}``, ``rank`` and ``proc{pid}``."""
    return _RANK.fullmatch(name) is not None or _PROCESS.fullmatch(name) is not None


def rank_directory(rank: int | None) -> str:
    """Name of this process' directory: ``rank{R}``, without a rank ``proc{pid}`` as 26.2.0 has it."""
    return f"proc{os.getpid()}" if rank is None else f"rank{rank}"


class DumpWriteError(SinkError):
    """A file of a dump directory cannot be written: `path`, `errno` and, in the message, what to do."""

    def __init__(self, error: OSError, path: Path | str) -> None:
        code = errno.errorcode.get(error.errno or 0, "no errno")
        why = explain(error, "set dump_path to another one")
        place = error.filename if isinstance(error, OddFileError | IsADirectoryError) else path
        super().__init__(f"cannot write {place} ({code}): {why}. Steps written before are untouched")
        self.path = str(path)
        self.errno = error.errno


def refuse_link(path: str) -> None:
    """Raises:
    OddFileError: `path` is a link. The root of a dump may be one (clusters link their disks); what is below it is ours and is not.
    """
    for place in (os.path.dirname(path), path):
        if os.path.islink(place):
            raise OddFileError(stat.S_IFLNK, place, directory=True)


def holds_inside(header: Mapping[str, Any], name: str) -> bool:
    """Does a dump.json with this header hold stack.json (construct.json) itself?"""
    inside = header.get(INSIDE)
    return isinstance(inside, list) and name in inside and name in COMPANIONS


def correct_data_dir(old: str, new: str) -> None:
    """After a rank directory was renamed from `old` to `new`: let the header of its dump.json (debug.json) name the new one.

    Raises:
        OSError: the file cannot be written again.
    """
    before, after = (json.dumps({"dump_data_dir": f"{path}/{TENSORS}"})[1:-1].encode() for path in (old, new))
    for name in (DUMP, DEBUG):
        try:
            with open(open_regular(f"{new}/{name}"), "rb") as file:
                text = file.read()
        except FileNotFoundError:
            continue
        if before in text[: _HEADER_BYTES + len(before)]:
            write_file(f"{new}/{name}", [text.replace(before, after, 1)])
