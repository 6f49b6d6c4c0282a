"""What an output directory holds, by names and sizes: dumps by step and rank, incidents, monitor files, tables, event files."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import DumpFormatError, NothingCapturedError, UsageError
from msprobe_engine.core.io.claims import EARLIER_RUN, FURTHER_RUN
from msprobe_engine.core.io.input_files import read_input
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.core.log import one_line
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.core.text.words import many, size
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.completeness import all_of_earlier_runs
from msprobe_engine.formats.dump.rank_files import counts_of
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_engine.formats.dump.ring_file import damages_in, kept_at, kept_in, rings_among, size_of_step_file
from msprobe_engine.formats.dump.world import Head
from msprobe_engine.formats.dump.writing import packed_files
from msprobe_engine.formats.monitor.listing import Listing, list_monitor
from msprobe_engine.formats.monitor.losses import FILE, lost_in
from msprobe_engine.formats.monitor.run_layout import rank_directory
from msprobe_engine.formats.pack.kind import NAME as PACK

_JSON = (layout.DUMP, layout.DEBUG, layout.STACK, layout.CONSTRUCT, layout.SHAPES, layout.NOT_SAVED)
_MAX_DEPTH = 6
_LARGEST = 256 << 20
_RANK = re.compile(r"rank_?\d+", re.ASCII)
_KINDS = {
    f"{Path(PACK).stem}*.zip": "configuration pack",
    "*.jsonl": "JSON lines",
    "*.trend.db": "trend data base",
    "rank*_*.parquet": "Parquet files",
    "*anomaly.json": "alerts in the existing format",
    "*anomaly_analyse.json": "order of the alerts",
    "*report.html": "report",
    "diagnosis.html": "diagnosis",
    "ckpt_diff.html": "comparison of checkpoints",
    "*trends.html": "trends page",
    "graph_*.html": "graph page",
    "*.vis.db": "graphs for TensorBoard",
    "*.vis": "graphs for TensorBoard",
    "*.model_explorer.json": "graphs for Model Explorer",
}
"""Names of files to what they are; in a directory of a rank it counts for the one above."""


@dataclass(frozen=True)
class RankDump:
    """One rank of one dumped step.

    Attributes:
        tensors: names of saved tensors; -1 when the index of packed ones cannot be read.
        incomplete: the step was cut off.
        nbytes: of all files; what has several names (hard links) counts once.
        tensor_bytes: of tensor files among them.
        packed: tensors are packed into safetensors files.
        not_saved: tensors that were asked for and have no file.
        lost: what the run could not keep, in words.
    """

    name: str
    files: tuple[str, ...]
    tensors: int
    incomplete: bool
    nbytes: int = 0
    tensor_bytes: int = 0
    packed: bool = False
    not_saved: int = 0
    lost: str = ""


@dataclass
class Overview:
    """Everything found below `root`; paths are relative to it."""

    root: Path
    dumps: dict[str, dict[int, list[RankDump]]] = field(default_factory=dict)
    """Dump directory to step to ranks."""
    incidents: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Directory and content of ``incident.json`` ({} when it cannot be read)."""
    tables: dict[str, int] = field(default_factory=dict)
    """Directory to number of CSV files."""
    events: list[str] = field(default_factory=list)
    """Directories for ``tensorboard --logdir``."""
    monitors: dict[str, Listing] = field(default_factory=dict)
    """Monitor directory to what is in it."""
    others: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    """Kind and directory (or file, where it is a single one) to number of files and bytes."""

    runs: list[str] = field(default_factory=list)
    """Directories of further runs (``run-2``): two that were here at the same time, or a process that a training had started."""
    earlier: list[str] = field(default_factory=list)
    """Directories with what earlier runs had left here (``earlier-1``); not looked into."""

    latest: str = ""
    """Which of the directories the link ``latest`` leads to; "": there is no such link."""

    lost: list[str] = field(default_factory=list)
    """What the run says itself that it has lost, in sentences."""

    def text(self) -> str:
        lines = [str(self.root)]
        if self.latest:
            lines.append(f"latest: {self.latest}")
        if self.earlier:
            lines.append(f"earlier runs, not looked at: {', '.join(sorted(self.earlier))}")
        if self.runs:
            lines.append(f"further runs: {', '.join(sorted(self.runs))} (what each has written is listed below, by its directory)")
        for place, steps in sorted(self.dumps.items()):
            total = sum(rank.nbytes for ranks in steps.values() for rank in ranks)
            lines.append(f"{_join_name('dump', place)}: {many(len(steps), 'step')}, {size(total)}")
            lines += [f"  step {step}: {', '.join(map(_rank_text, ranks))}" for step, ranks in sorted(steps.items())]
        if self.incidents:
            lines.append(f"incidents: {len(self.incidents)}")
            lines += [f"  {place}{_incident_text(content)}" for place, content in self.incidents]
        lines += [f"{_join_name('monitor', place)}: {_monitor_text(monitor)}" for place, monitor in sorted(self.monitors.items())]
        lines += [f"tables {place}: {many(n, 'CSV file')}" for place, n in sorted(self.tables.items())]
        lines += [
            f"{_join_name(kind, place)}: {many(n, 'file') + ', ' if n > 1 else ''}{size(nbytes)}"
            for (kind, place), (n, nbytes) in sorted(self.others.items())
        ]
        lines += [f"TensorBoard {place}: tensorboard --logdir {self.root / place}" for place in sorted(self.events)]
        return "\n".join(map(one_line, lines))

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "latest": self.latest,
            "root": str(self.root),
            "dumps": {
                place: {str(step): [_rank_json(rank) for rank in ranks] for step, ranks in sorted(steps.items())}
                for place, steps in sorted(self.dumps.items())
            },
            "incidents": [{"path": place, "incident": content} for place, content in self.incidents],
            "monitors": {place: monitor.to_json() for place, monitor in sorted(self.monitors.items())},
            "tables": dict(sorted(self.tables.items())),
            "others": [
                {"kind": kind, "path": place, "files": n, "bytes": nbytes} for (kind, place), (n, nbytes) in sorted(self.others.items())
            ],
            "events": sorted(self.events),
            "runs": sorted(self.runs),
            "earlier": sorted(self.earlier),
            "lost": self.lost,
        }


def read_overview(root: Path) -> Overview:
    """Walk `root` (six levels deep, links are not followed).

    Raises:
        UsageError: `root` is no directory.
        NothingCapturedError: nothing in it is of a kind that we write.
    """
    kept = kept_at(root)
    if not root.is_dir() and not kept:
        reason = "is no directory" if root.exists() else "there is no such file or directory"
        raise UsageError(f"{root}: {reason}; give the output_dir of a run")
    out = Overview(root, latest=_latest(root))
    for step, places in kept.items():
        for at_rank in places.values():
            _add_kept(out, ".", step, at_rank)
    for root_text, directories, files in os.walk(root):
        directory = Path(root_text)
        place = directory.relative_to(root).as_posix()
        directories.sort()
        out.earlier += [(directory / name).relative_to(root).as_posix() for name in directories if EARLIER_RUN.fullmatch(name)]
        directories[:] = [name for name in directories if not EARLIER_RUN.fullmatch(name)]
        out.runs += [(directory / name).relative_to(root).as_posix() for name in directories if FURTHER_RUN.fullmatch(name)]
        if len(directory.relative_to(root).parts) >= _MAX_DEPTH:
            directories.clear()
        if "incident.json" in files:
            out.incidents.append((place, _read_object(directory / "incident.json")))
        rings = rings_among(directory, files)
        for step, places in kept_in(rings).items():
            for at_rank in places.values():
                _add_kept(out, place, step, at_rank)
        out.lost += damages_in(rings)
        if layout.step_of(directory.name) is not None:
            _step(directory, directories, place, out)
            directories.clear()
            continue
        if any(rank_directory(directory / name) is not None for name in directories) and (monitor := list_monitor(directory)) is not None:
            out.monitors[place] = monitor
            out.lost += monitor.lost
            directories[:] = [name for name in directories if rank_directory(directory / name) is None]
        out.lost += [sentence for name in files if name.endswith(FILE) for sentence in lost_in(directory / name)]
        if "incident.json" not in files:
            _others(directory, place, files, out)
        tables = sum(name.endswith(".csv") for name in files)
        if tables:
            out.tables[place] = tables
        if any(name.startswith("events.out.tfevents") for name in files):
            runs = _above_ranks(place)
            out.events += [runs] if runs not in out.events else []
    for place in out.dumps:
        with contextlib.suppress(DumpFormatError):  # its directories are empty, as the list says
            out.lost += all_of_earlier_runs(open_dump(root / place))
    if not any((out.dumps, out.incidents, out.tables, out.events, out.monitors, out.others, out.runs, out.earlier)):
        raise NothingCapturedError(f"{root}: nothing that msprobe writes is here; give the output_dir of a run")
    return out


def _latest(root: Path) -> str:
    try:
        target = os.readlink(root / "latest")
    except OSError:
        return ""
    return target if Path(target).name == target and (root / target).is_dir() else ""


def _others(directory: Path, place: str, files: list[str], out: Overview) -> None:
    by_kind: dict[str, list[str]] = {}
    for name in sorted(files):
        for pattern, kind in _KINDS.items():
            if fnmatchcase(name, pattern):
                by_kind.setdefault(kind, []).append(name)
                break
    for kind, names in by_kind.items():
        above = _above_ranks(place)
        key = above if above != place or len(names) > 1 else names[0] if place == "." else f"{place}/{names[0]}"
        n, nbytes = out.others.get((kind, key), (0, 0))
        out.others[kind, key] = (n + len(names), nbytes + sum(_bytes(directory / name) for name in names))


def _above_ranks(place: str) -> str:
    """The directory that holds those of the ranks, `place` itself where it is in none."""
    parts = Path(place).parts
    at = next((i for i, part in enumerate(parts) if _RANK.fullmatch(part)), len(parts))
    return Path(*parts[:at]).as_posix()


def _bytes(path: Path) -> int:
    try:
        return path.stat(follow_symlinks=False).st_size
    except OSError:  # gone meanwhile: the run still writes
        return 0


def _step(directory: Path, directories: list[str], place: str, out: Overview) -> None:
    ranks = [_rank(directory / name) for name in sorted(directories, key=_rank_order) if layout.is_rank_directory(name)]
    step = layout.step_of(directory.name)
    if ranks and step is not None:
        parent = place.rpartition("/")[0] if place != "." else "."
        _add(out, parent or ".", step, directory, ranks)


def _add_kept(out: Overview, place: str, step: int, rank: Path) -> None:
    """A step of an incident's ring, unless the rank has a directory for it, which `_rank` describes."""
    if not rank.is_dir():
        found = RankDump(rank.name, (layout.DUMP,), 0, False, size_of_step_file(rank / layout.DUMP), lost=_count_lost(rank))
        _add(out, place, step, rank.parent, [found])


def _add(out: Overview, place: str, step: int, above: Path, ranks: list[RankDump]) -> None:
    there = out.dumps.setdefault(place, {}).setdefault(step, [])
    there.extend(ranks)
    there.sort(key=lambda rank: _rank_order(rank.name))
    template = "{0}: the run could not keep everything: {1}"
    out.lost += [Sentence(template, above / rank.name, rank.lost) for rank in ranks if rank.lost]


def _rank_order(name: str) -> tuple[int, str]:
    rank = layout.rank_of(name)
    return (-1 if rank is None else rank, name)


def _rank(directory: Path) -> RankDump:
    names, nbytes = _sizes(directory)
    tensors, tensor_bytes, packed = 0, 0, False
    if (directory / layout.TENSORS).is_dir():
        inside, tensor_bytes = _sizes(directory / layout.TENSORS)
        packed = packed_files.INDEX in inside or any(name.endswith(".safetensors") for name in inside)
        tensors = _packed_names(directory / layout.TENSORS / packed_files.INDEX) if packed else len(inside)
    unsaved = _read_object(directory / layout.NOT_SAVED).get("not_saved") if layout.NOT_SAVED in names else None
    kept = 0 if layout.DUMP in names else size_of_step_file(directory / layout.DUMP)
    return RankDump(
        directory.name,
        tuple(name for name in _JSON if name in names or (kept and name == layout.DUMP)),
        tensors,
        layout.MARKER in names,
        nbytes + tensor_bytes + kept,
        tensor_bytes,
        packed,
        len(unsaved) if isinstance(unsaved, list) else 0,
        _count_lost(directory),
    )


def _count_lost(rank: Path) -> str:
    return counts_of(lost) if (lost := Head(rank).lost_parts()) else ""


def _sizes(folder: Path) -> tuple[set[str], int]:
    """Names in a directory, and the bytes of its files; a file that has several names counts once."""
    names: set[str] = set()
    seen: set[int] = set()
    total = 0
    for entry in os.scandir(folder):
        names.add(entry.name)
        try:
            found = entry.stat(follow_symlinks=False)
        except OSError:  # gone meanwhile: the run still writes
            continue
        if stat.S_ISREG(found.st_mode) and (found.st_nlink == 1 or found.st_ino not in seen):
            seen.add(found.st_ino)
            total += found.st_size
    return names, total


def _packed_names(index: Path) -> int:
    content = _read_object(index)
    parts = [content.get(key) for key in ("tensors", "aliases")]
    return sum(len(part) for part in parts if isinstance(part, dict)) if any(isinstance(part, dict) for part in parts) else -1


def _rank_text(rank: RankDump) -> str:
    count = "tensors without index" if rank.tensors < 0 else many(rank.tensors, "tensor")
    marks = [f"{count}{', packed' * rank.packed}, {size(rank.tensor_bytes)}"] * bool(rank.tensors)
    marks += [f"{rank.not_saved} NOT SAVED"] * bool(rank.not_saved) + ["INCOMPLETE"] * rank.incomplete
    marks += ["no dump.json"] * (not rank.incomplete and not {layout.DUMP, layout.DEBUG} & set(rank.files))
    return rank.name + (f" ({', '.join(marks)})" if marks else "")


def _join_name(what: str, place: str) -> str:
    return what if place in (".", what) else f"{what} {place}"


def _monitor_text(found: Listing) -> str:
    ranks = many(len(found.ranks), "rank") + (f" in {found.directories} directories" if found.directories > len(found.ranks) else "")
    steps = (
        "" if found.first is None else f", step {found.first}" if found.first == found.last else f", steps {found.first} to {found.last}"
    )
    others = f"; {found.others} director{'y' if found.others == 1 else 'ies'} of other runs not looked at" * bool(found.others)
    alerts = f"; {many(found.alerts, 'alert')}" * bool(found.alerts)
    ended = "".join(f"; {end}" + (f" on {n} ranks" if n > 1 else "") for end, n in found.ended.items())
    files = f"{many(found.files, 'file')}, {size(found.nbytes)}"
    return f"{ranks}{steps}: {', '.join(found.families) or 'no tables'} ({files}){alerts}{ended}{others}"


def _rank_json(rank: RankDump) -> dict[str, Any]:
    return {
        "rank": rank.name,
        "files": list(rank.files),
        "tensors": rank.tensors,
        "incomplete": rank.incomplete,
        "bytes": rank.nbytes,
        "tensor_bytes": rank.tensor_bytes,
        "packed": rank.packed,
        "not_saved": rank.not_saved,
        "lost": rank.lost,
    }


def _incident_text(content: dict[str, Any]) -> str:
    known = [f"{key} {content[key]}" for key in ("step", "rank", "rule", "name") if isinstance(content.get(key), (str, int, float))]
    return ": " + ", ".join(known) if known else ""


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} for anything else, and for a file too large to be opened for a listing."""
    try:
        content = parse_json(read_input(path, _LARGEST))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
