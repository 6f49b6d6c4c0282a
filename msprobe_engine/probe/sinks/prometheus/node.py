"""One endpoint per node: every local rank leaves its families in a small file, local rank 0 serves them all.

The files are JSON (``{"written": seconds, "rank": R, "families": [[name, samples], ...]}``), replaced as a whole. They are read as data:
whatever is not exactly of this form is counted and left out, and types and help texts come from the table of metrics. The file of a rank
that died stays and is still served; its age tells. They lie in the memory of the node where that can be had, so that the file system of
the training has nothing to do with them: the rank that serves makes the directory, and whoever finds it writes there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msprobe_engine.core.io.input_files import read_input
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.core.io.output_files import make_directory, replace_file
from msprobe_engine.core.metrics_server.families import Family, Labels
from msprobe_engine.probe.sinks.prometheus.names import METRICS, PREFIX

SHARED_MEMORY = Path("/dev/shm")
"""Where processes of a node share files in memory."""
_MAX_BYTES = 16 * 1024 * 1024
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,199}")
_SUFFIXES = ("", "_total", "_bucket", "_count", "_sum")


class NodeDirectory:
    """Where the ranks of one node leave their snapshots.

    Args:
        output_dir: of the run, the same on all its ranks.
    """

    def __init__(self, output_dir: Path, first: int) -> None:
        name = hashlib.sha1(os.fsencode(output_dir.absolute()), usedforsecurity=False).hexdigest()[:16]
        self.memory = SHARED_MEMORY / f"msprobe-{os.getuid()}-{name}-node{first}"
        self.disk = output_dir.absolute() / "prometheus" / f"node{first}"

    def create_memory(self) -> None:
        """For the rank that serves; where there is no memory to share, the others write to the disk."""
        with contextlib.suppress(OSError):
            self.memory.mkdir(0o700)

    def target(self) -> Path:
        """Where a rank writes now.

        Raises:
            SinkError: there is no such place.
        """
        if self._is_ours():
            return self.memory
        make_directory(self.disk, "prometheus sink")
        return self.disk

    def sources(self) -> list[Path]:
        """Where snapshots are looked for."""
        return [self.memory, self.disk] if self._is_ours() else [self.disk]

    def remove(self) -> None:
        """Nobody serves any more."""
        if self._is_ours():
            for path in self.memory.iterdir():
                path.unlink(missing_ok=True)
            self.memory.rmdir()

    def _is_ours(self) -> bool:
        """Anybody may write to /dev/shm, so somebody else may have made a directory or link of that name."""
        with contextlib.suppress(OSError):
            status = os.lstat(self.memory)
            return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
        return False


def snapshot_path(directory: Path, rank: int) -> Path:
    """Where a rank leaves its snapshot."""
    return directory / f"rank{rank}.json"


def write_snapshot(directory: Path, rank: int, families: list[Family], now: float) -> None:
    """Replace the snapshot of `rank`.

    Raises:
        SinkError: it cannot be written.
    """
    content = [[family.name, family.samples] for family in families]
    data = json.dumps({"written": now, "rank": rank, "families": content}, separators=(",", ":"), allow_nan=False)
    replace_file(snapshot_path(directory, rank), data.encode())


def read_snapshot(path: Path, rank: int) -> tuple[float, list[Family], int]:
    """When the snapshot was written, its families, and how many samples (or families that are none) were left out.

    Raises:
        OSError: there is none, or it cannot be read.
        ValueError: it is not of the form that `write_snapshot` gives, or of another rank.
    """
    whole: Any = parse_json(read_input(path, _MAX_BYTES, follow=False))
    if not isinstance(whole, dict) or whole.get("rank") != rank or not isinstance(whole.get("families"), list):
        raise ValueError(f"{path}: not a snapshot of rank {rank}")
    families: dict[str, Family] = {}
    invalid = 0
    for raw in whole["families"]:
        try:
            name, samples = raw
            metric = METRICS[name.removeprefix(PREFIX)] if name.startswith(PREFIX) else None
            samples = list(samples)
        except (ValueError, TypeError, KeyError, AttributeError):
            metric = None
        if metric is None:
            invalid += 1
            continue
        family = families.setdefault(name, Family(name, metric.type, metric.help, []))
        for sample in samples:
            try:
                family.samples.append(_sample(sample))
            except (ValueError, TypeError, OverflowError):
                invalid += 1
    return _number(whole.get("written")), list(families.values()), invalid


def node_families(own: list[Family], directories: Sequence[Path], others: range, now: float) -> list[Family]:
    """The families of this rank and of the ranks `others`, merged by name, with the age of each snapshot."""
    merged: dict[str, Family] = {family.name: family._replace(samples=list(family.samples)) for family in own}
    ages: list[tuple[str, Labels, float]] = []
    missing = unreadable = invalid = 0
    for rank in others:
        try:
            path = next((path for each in directories if os.path.lexists(path := snapshot_path(each, rank))), None)
            if path is None:
                missing += 1
                continue
            written, families, left_out = read_snapshot(path, rank)
        except FileNotFoundError:
            missing += 1
            continue
        except (OSError, ValueError, TypeError, OverflowError, RecursionError):
            unreadable += 1
            continue
        invalid += left_out
        ages.append(("", (("rank", str(rank)),), max(0.0, now - written)))
        for family in families:
            if family.name in merged:
                merged[family.name].samples.extend(family.samples)
            else:
                merged[family.name] = family
    out = list(merged.values())
    out.append(_own("snapshot_age_seconds", ages))
    out.append(_own("snapshots_missing", [("", (), float(missing))]))
    out.append(_own("snapshots_unreadable", [("", (), float(unreadable))]))
    out.append(_own("snapshot_samples_invalid", [("", (), float(invalid))]))
    return [family for family in out if family.samples]


_FOLD: dict[str, Callable[[float, float], float]] = {"sum": lambda a, b: a + b, "max": max, "min": min}


def fold_ranks(families: list[Family], node: int) -> list[Family]:
    """One series per node instead of one per rank, with the label ``node`` in place of ``rank``.

    What the series is, `names.METRICS` says (``over_node``); metrics of kind ``each`` stay as they are.

    Args:
        node: first rank of the node.
    """
    out = []
    for family in families:
        metric = METRICS.get(family.name.removeprefix(PREFIX))
        if metric is None or metric.over_node == "each":
            out.append(family)
            continue
        fold = _FOLD[metric.over_node]
        values: dict[tuple[str, Labels], float] = {}
        for suffix, labels, value in family.samples:
            key = suffix, (("node", str(node)), *(pair for pair in labels if pair[0] != "rank"))
            values[key] = fold(values[key], value) if key in values else value
        out.append(family._replace(samples=[(suffix, labels, value) for (suffix, labels), value in values.items()]))
    return out


def _own(name: str, samples: list[tuple[str, Labels, float]]) -> Family:
    return Family(PREFIX + name, "gauge", METRICS[name].help, samples)


def _sample(raw: Any) -> tuple[str, Labels, float]:
    suffix, labels, value = raw
    if suffix not in _SUFFIXES:
        raise ValueError(f"not a suffix: {str(suffix)[:80]!r}")
    return suffix, tuple(_label(label) for label in labels), _number(value)


def _label(raw: Any) -> tuple[str, str]:
    key, value = raw
    if not (isinstance(key, str) and _NAME.fullmatch(key) and isinstance(value, str)):
        raise ValueError("not a label")
    return key, value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):  # OverflowError: 400 digits
        raise ValueError("not a number")
    return float(value)
