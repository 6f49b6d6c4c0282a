"""The face of what writes graphs into files, and what a writer is told before the first one."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from msprobe_engine.report.graph.nodes.model import Comparison, Graph
from msprobe_engine.report.graph.options import DB, HTML, MODEL_EXPLORER, VIS, GraphOptions
from msprobe_engine.report.graph.same_graphs import Alike


@dataclass(frozen=True)
class Plan:
    """What is going to be written.

    Attributes:
        output: directory; it exists.
        stamp: time in the names of the files, 14 digits; no other run in the directory has it.
        options: of the whole.
        target, golden: the paths as given; golden "" where there is one side only.
        places: (step, rank) in the order in which they will be added; of a merged graph the first rank of it.
        first: (step, rank) where the first suspect of all is; None without one.
        alike: ranks without a graph of their own.
    """

    output: Path
    stamp: str
    options: GraphOptions
    target: str
    golden: str
    places: tuple[tuple[int, int], ...]
    first: tuple[int, int] | None = None
    alike: Alike = field(default_factory=Alike)

    @property
    def comparing(self) -> bool:
        """There are two sides."""
        return bool(self.golden)

    @property
    def word(self) -> str:
        """What the names of the files begin with: ``compare`` or ``build``."""
        return "compare" if self.comparing else "build"


class Writer(Protocol):
    """Is made with a `Plan` (`open_writer`); takes graphs one by one and never holds more than it must."""

    def add(self, made: Graph | Comparison) -> None:
        """Take the next one; its links and suspect are known.

        Raises:
            SinkError: it cannot be written.
        """

    def finish(self) -> list[Path]:
        """All were added: give the files their names and return these.

        Raises:
            SinkError: they cannot be written.
        """

    def abort(self) -> None:
        """Leave nothing behind."""


MERGED_DUMP = "merged_dump"
"""The mode of ``--file_type json``; no format among others."""


_CLASSES = {
    VIS: ("existing.vis_json", "VisJsonWriter"),
    DB: ("existing.vis_db", "VisDbWriter"),
    MODEL_EXPLORER: ("model_explorer", "ModelExplorerWriter"),
    MERGED_DUMP: ("merge.write_back", "MergedDumpWriter"),
}


def open_writer(mode: str, plan: Plan) -> Writer:
    """The writer of one of `options.FORMATS`, or of `MERGED_DUMP`; its module is imported only now."""
    if mode == HTML:
        from msprobe_engine.report.graph.page.page import PageWriter

        # the end of a path tells one run from another
        title = " ↔ ".join("/".join(Path(path).parts[-2:]) for path in (plan.target, plan.golden) if path)
        return PageWriter(
            plan.output / f"graph_{plan.stamp}.html", title, plan.target, plan.golden or None, first=plan.first, alike=plan.alike
        )
    module, name = _CLASSES[mode]
    made: Writer = getattr(importlib.import_module(f"msprobe_engine.report.graph.{module}"), name)(plan)
    return made
