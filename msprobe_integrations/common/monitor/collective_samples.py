"""What is known of collectives in the monitor, whatever the framework: where they were called, of which groups, and their stacks in a
file ``collective_stacks.csv``. A sample (family ``other``) is named after the operation (``all_reduce``) and says in `extra`::

    tag     all_reduce/rank0/post_3_0    operation, rank, pre or post, number of the call in the step, number of the tensor
    call    3
    site    /home/me/train.py[118]       where the user's code was
    group   0,1                          global ranks
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.io.csv_text import format_rows
from msprobe_engine.core.io.output_files import AppendFile
from msprobe_engine.core.io.safe_cells import safe_cell
from msprobe_engine.core.records import Sample
from msprobe_engine.core.settings.expressions import place_problem
from msprobe_engine.core.text.ranges import ranges_of
from msprobe_integrations.common.capture.stacks import line_number, walk
from msprobe_integrations.common.monitor.files import rank_directory

if TYPE_CHECKING:
    from msprobe_integrations.common.monitor.module_monitor import ModuleMonitor

PART = "collective monitor"
_MOST_RUNS = 8
"""Runs of neighbouring ranks that the label of a group names."""


class Site(NamedTuple):
    """A call stack that a collective came from.

    Attributes:
        wanted: the settings ask for it.
        place: ``path[line]`` of the innermost frame.
        stack: all frames, ``path[line] function``, innermost first.
    """

    wanted: bool
    place: str
    stack: str


class CollectiveSamples:
    """Samples and stacks of collectives, while the step is due.

    Raises:
        SettingsError: a pattern of ``collective_sites`` is no regular expression.
    """

    def __init__(self, side: ModuleMonitor) -> None:
        self._side = side
        self._probe = side.probe
        monitor = side.monitor
        for pattern in monitor.collective_sites:
            if flaw := place_problem(pattern):
                raise SettingsError(f"monitor.collective_sites: {pattern!r} {flaw}")
        self._patterns = [re.compile(pattern) for pattern in monitor.collective_sites]
        self.inputs = monitor.collective_inputs and not monitor.collective_stacks
        self.outputs = monitor.collectives and not monitor.collective_stacks
        self.stacks = monitor.collective_stacks
        self._sites: dict[tuple[Any, ...], Site] = {}
        self._hidden: dict[CodeType, bool] = {}
        self._new: dict[tuple[str, str, str], None] = {}
        self._written: set[tuple[str, str, str]] = set()

    def hides(self, code: CodeType) -> bool:
        """Is this frame left out of stacks?"""
        return "msprobe_integrations/" in code.co_filename.replace("\\", "/")

    def site(self, frame: FrameType | None) -> Site:
        """Where a collective was called; what was met before is known by its frames."""
        key = walk(frame, None, self._hidden, self.hides, -1)[0]
        site = self._sites.get(key)
        if site is None:
            lines = [(f"{code.co_filename}[{line_number(code, offset)}]", code.co_name) for code, offset in key]
            wanted = not self._patterns or any(pattern.search(line) for pattern in self._patterns for line, _ in lines)
            site = Site(wanted, lines[0][0] if lines else "", "\n".join(f"{line} {function}" for line, function in lines))
            self._sites[key] = site
        return site

    def note_stack(self, name: str, group: str, site: Site) -> None:
        """A call stack for the file."""
        key = (name, group, site.stack)
        if key not in self._written:
            self._written.add(key)
            self._new[key] = None

    def add(self, ref: Any, operation: str, when: str, number: int, i: int, site: Site, group: str, micro_step: int) -> None:
        """One tensor of a call.

        Args:
            when: ``pre`` or ``post``.
            number: of the call in the step.
            i: of the tensor in the call.
        """
        tag = f"{operation}/rank{self.rank()}/{when}_{number}_{i}"
        extra = {"tag": tag, "call": number, "site": site.place, "group": group}
        self._probe.pipeline.samples.append(Sample("other", operation, ref, "", micro_step, 0, extra))

    def on(self) -> bool:
        """Do calls count now?"""
        return self._side.on

    def micro_step(self) -> int:
        """Current micro batch."""
        return self._side.micro_step()

    def rank(self) -> int:
        return self._probe.backend.rank() or 0

    def end_step(self) -> None:
        """Write call stacks that are new."""
        if self._new:
            with self._probe.guard(PART):
                self._write()

    def _write(self) -> None:
        path = rank_directory(self._probe) / "collective_stacks.csv"
        file = AppendFile(path)
        try:
            rows = [] if file.size else [["op", "group", "site", "stack"]]
            rows += [[safe_cell(name), group, stack.partition(" ")[0], stack] for name, group, stack in self._new]
            file.append(format_rows(rows).encode("utf-8", "backslashreplace"))
        finally:
            file.close()
        self._new.clear()


def group_label(ranks: Sequence[int] | None) -> str:
    """Global ranks as text: ``0-7``, ``0,8,16``; of many runs the first ones. ``""`` when they are not known."""
    runs = ranges_of(ranks or ())
    text = ",".join(runs[:_MOST_RUNS])
    return text if len(runs) <= _MOST_RUNS else f"{text},... ({len(ranks or ())})"
