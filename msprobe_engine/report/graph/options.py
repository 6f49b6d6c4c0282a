"""What a graph is asked to be; the same for every rank and step of it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

from msprobe_engine.core.errors import UsageError

OLD, NEW = "8.1.1", "26.2.0"
"""The two generations of files, named after the releases of the existing tool that write them."""

GENERATIONS = (OLD, NEW)
MATCHES = ("structure", "exact")
HTML, VIS, DB, MODEL_EXPLORER = "html", "vis", "db", "model_explorer"
FORMATS = (HTML, VIS, DB, MODEL_EXPLORER)


@dataclass(frozen=True)
class Layout:
    """How one side was cut over its ranks, as ``--rank_size --tp --pp --vpp --order`` say it.

    Attributes:
        tp, pp, vpp: sizes of the tensor, pipeline and virtual pipeline groups.
        order: of the groups from the fastest to the slowest (``tp-cp-ep-dp-pp``).
    """

    rank_size: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    order: str = "tp-cp-ep-dp-pp"


@dataclass(frozen=True)
class GraphOptions:
    """Settings of one graph. What is not given is decided from the data.

    Attributes:
        generation: whose rules hold where the two releases of the existing tool differ, one of `GENERATIONS`.
        formats: what is written, among `FORMATS`.
        match: ``structure``: nodes that the existing tool's rules leave without a partner are matched by their place; ``exact``: they are
            left; one of `MATCHES`.
        fuzzy: calls of functions are matched without their numbers, modules without regard to shapes.
        layer_mapping: None; True: nodes are matched by their names alone; or a mapping of layers, or the file that holds it.
        overflow: mark nodes that make NaN or Inf, or numbers that grow a hundredfold.
        complete_stack: 8.1.1's file holds the whole call stack of each node, else one line.
        tensor_log: say every tensor that is compared.
        progress_log: 26.2.0: progress as lines of a log, in place of a bar.
        ranks, steps: only these; empty means all.
        merge: put the ranks of one model copy together: ``""`` (no), ``auto`` (as the dumps themselves say), ``given`` (as `layouts` says).
        layouts: of the target and, with two sides, of the golden run.
        file_type: with merging ``json`` writes the merged dump in place of graph files; else ``db``.
        memory_mb: memory that all ranks in flight may take, in MiB.
        workers: processes; 0 means one per core.
        scheduler: address of a Dask scheduler (``tcp://host:8786``); "": this machine.

    Raises:
        UsageError: a value is not among what is allowed.
    """

    generation: str = NEW
    formats: tuple[str, ...] = (HTML,)
    match: str = "structure"
    fuzzy: bool = False
    layer_mapping: Any = None
    overflow: bool = False
    complete_stack: bool = False
    tensor_log: bool = False
    progress_log: bool = False
    ranks: frozenset[int] = field(default_factory=frozenset)
    steps: frozenset[int] = field(default_factory=frozenset)
    merge: str = ""
    layouts: tuple[Layout, ...] = ()
    file_type: str = "db"
    memory_mb: int = 2048
    workers: int = 0
    scheduler: str = ""

    def __post_init__(self) -> None:
        _among("generation", self.generation, GENERATIONS)
        _among("match", self.match, MATCHES)
        _among("merge", self.merge, ("", "auto", "given"))
        _among("file_type", self.file_type, ("db", "json"))
        if not self.formats:
            raise UsageError(f"graph: no format; allowed: {', '.join(FORMATS)}")
        for one in self.formats:
            _among("format", one, FORMATS)
        if (self.merge == "given") != bool(self.layouts):
            raise UsageError("graph: merging as given and the sizes of the groups belong together; give both or none")

    def for_workers(self) -> GraphOptions:
        """Those of a process that may run in another directory: what is the name of a file is an absolute one."""
        named = isinstance(self.layer_mapping, (str, os.PathLike))
        return replace(self, layer_mapping=os.path.abspath(self.layer_mapping)) if named else self

    @property
    def old(self) -> bool:
        """The rules are those of 8.1.1."""
        return self.generation == OLD


def _among(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"graph: {name} is {value!r}; allowed: {', '.join(map(repr, allowed))}")
