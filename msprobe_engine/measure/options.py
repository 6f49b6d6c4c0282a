"""What a comparison is asked to do; the same for every rank and step of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import UsageError

OLD, NEW = "8.1.1", "26.2.0"
"""The two generations of columns, named after the releases of the existing tool that write them."""

GENERATIONS = (OLD, NEW)
MATCHES = ("structure", "name")
FORMATS = ("csv", "xlsx", "parquet", "html")
SCHEDULERS = ("auto", "serial", "threads", "processes", "dask")
BACKENDS = ("fsdp", "megatron")


@dataclass(frozen=True)
class CompareOptions:
    """Settings of one comparison. What is not given is decided from the data.

    Attributes:
        columns: generation of the columns, one of `GENERATIONS`.
        compat: verdicts, matching and rows exactly as that generation of the existing tool has them.
        match: ``structure`` or ``name``; counts only without `compat`.
        fuzzy: names are compared without their call numbers.
        data_mapping, cell_mapping, api_mapping, layer_mapping: a mapping, the file that holds it, True for the built-in one, or None.
        stack: show the call stack on the first row of each record. None: when the target has one.
        advisor: write the advice of 8.1.1 into a text file.
        formats: of the tables, among `FORMATS`.
        tensor_log: say every tensor that is compared.
        ranks, steps: only these; empty means all.
        memory_mb: memory that the whole comparison may take, in MiB.
        workers: processes or threads; 0 means one per core.
        scheduler: one of `SCHEDULERS`.
        calibration: further dumps of the golden training, moved by one rounding unit: our verdicts count in what they show.
        postprocess: matrices that tensors are multiplied by before they are compared (``--config`` of 26.2.0), or the file with them.
        consistent_check: training against inference, whose modules are named otherwise.
        backend: of the training then, among `BACKENDS`.
        metrics: files with further metrics of tensors.

    Raises:
        UsageError: a value is not among what is allowed.
    """

    columns: str = NEW
    compat: bool = False
    match: str = "structure"
    fuzzy: bool = False
    data_mapping: Any = None
    cell_mapping: Any = None
    api_mapping: Any = None
    layer_mapping: Any = None
    stack: bool | None = None
    advisor: bool = False
    formats: tuple[str, ...] = ("csv",)
    tensor_log: bool = False
    ranks: frozenset[int] = field(default_factory=frozenset)
    steps: frozenset[int] = field(default_factory=frozenset)
    memory_mb: int = 2048
    workers: int = 0
    scheduler: str = "auto"
    calibration: tuple[Path, ...] = ()
    postprocess: Any = None
    consistent_check: bool = False
    backend: str | None = None
    metrics: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        _among("columns", self.columns, GENERATIONS)
        _among("match", self.match, MATCHES)
        _among("scheduler", self.scheduler, SCHEDULERS)
        for form in self.formats:
            _among("formats", form, FORMATS)
        if self.backend is not None:
            _among("backend", self.backend, BACKENDS)
        if self.calibration and self.compat:
            raise UsageError("compare: a calibration is for our verdicts, compat for those of the existing tool; leave one out")
        if self.calibration and self.consistent_check:
            raise UsageError("compare: training against inference is measured by fixed limits; leave the calibration out")

    @property
    def old(self) -> bool:
        """The columns are those of 8.1.1."""
        return self.columns == OLD


def _among(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"compare: {name} is {value!r}; allowed: {', '.join(allowed)}")
