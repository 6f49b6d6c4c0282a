"""What an output directory holds, found by looking at names only: dumps by step and rank, incidents, tables, event files."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msprobe_engine.dump import layout
from msprobe_engine.errors import UsageError
from msprobe_engine.log import one_line

_JSON = (layout.DUMP, layout.DEBUG, layout.STACK, layout.CONSTRUCT)
_MAX_DEPTH = 6


@dataclass(frozen=True)
class RankDump:
    """One rank of one dumped step: what files are there, and whether the step was cut off."""

    name: str
    files: tuple[str, ...]
    tensors: int
    incomplete: bool


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
    """Directories with TensorBoard event files."""

    def text(self) -> str:
        """For the console."""
        lines = [str(self.root)]
        for place, steps in sorted(self.dumps.items()):
            lines.append(f"dump {place}: {_count(len(steps), 'step')}")
            lines += [f"  step {step}: {', '.join(map(_rank_text, ranks))}" for step, ranks in sorted(steps.items())]
        if self.incidents:
            lines.append(f"incidents: {len(self.incidents)}")
            lines += [f"  {place}{_incident_text(content)}" for place, content in self.incidents]
        lines += [f"tables {place}: {_count(n, 'CSV file')}" for place, n in sorted(self.tables.items())]
        lines += [f"TensorBoard {place}: tensorboard --logdir {self.root / place}" for place in sorted(self.events)]
        shown = lines if len(lines) > 1 else [f"{self.root}: nothing that msprobe writes was found here"]
        return "\n".join(one_line(line) for line in shown)

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "root": str(self.root),
            "dumps": {
                place: {
                    str(step): [{"rank": r.name, "files": list(r.files), "tensors": r.tensors, "incomplete": r.incomplete} for r in ranks]
                    for step, ranks in sorted(steps.items())
                }
                for place, steps in sorted(self.dumps.items())
            },
            "incidents": [{"path": place, "incident": content} for place, content in self.incidents],
            "tables": dict(sorted(self.tables.items())),
            "events": sorted(self.events),
        }


def look(root: Path) -> Overview:
    """Walk `root` (six levels deep, links are not followed).

    Raises:
        UsageError: `root` is no directory.
    """
    if not root.is_dir():
        raise UsageError(f"{root}: no such directory; give the output_dir of a run")
    out = Overview(root)
    for at, directories, files in os.walk(root):
        here = Path(at)
        place = here.relative_to(root).as_posix()
        directories.sort()
        if len(here.relative_to(root).parts) >= _MAX_DEPTH:
            directories.clear()
        if "incident.json" in files:
            out.incidents.append((place, _read(here / "incident.json")))
        if layout.step_of(here.name) is not None:
            _step(here, directories, place, out)
            directories.clear()
            continue
        tables = sum(name.endswith(".csv") for name in files)
        if tables:
            out.tables[place] = tables
        if any(name.startswith("events.out.tfevents") for name in files):
            out.events.append(place)
    return out


def _step(here: Path, directories: list[str], place: str, out: Overview) -> None:
    ranks = [_rank(here / name) for name in sorted(directories, key=_rank_order) if layout.is_rank_directory(name)]
    step = layout.step_of(here.name)
    if ranks and step is not None:
        parent = place.rpartition("/")[0] if place != "." else "."
        out.dumps.setdefault(parent or ".", {})[step] = ranks


def _rank_order(name: str) -> tuple[int, str]:
    rank = layout.rank_of(name)
    return (-1 if rank is None else rank, name)


def _rank(here: Path) -> RankDump:
    names = {entry.name for entry in os.scandir(here)}
    tensors = here / layout.TENSORS
    count = sum(1 for _ in os.scandir(tensors)) if tensors.is_dir() else 0
    return RankDump(here.name, tuple(name for name in _JSON if name in names), count, layout.MARKER in names)


def _rank_text(rank: RankDump) -> str:
    marks = [f"{rank.tensors} tensors"] * bool(rank.tensors) + ["INCOMPLETE"] * rank.incomplete
    marks += ["no dump.json"] * (not rank.incomplete and not {layout.DUMP, layout.DEBUG} & set(rank.files))
    return rank.name + (f" ({', '.join(marks)})" if marks else "")


def _incident_text(content: dict[str, Any]) -> str:
    known = [f"{key} {content[key]}" for key in ("step", "rank", "rule", "name") if isinstance(content.get(key), (str, int, float))]
    return ": " + ", ".join(known) if known else ""


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
