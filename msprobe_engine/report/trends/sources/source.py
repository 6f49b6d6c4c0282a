"""What a run has written, as parts: the rows of one metric of one rank, whatever wrote them.

A metric is a family of the monitor (one phase, state or tag of it) or a pass of a dump (``forward``, ``backward``, ``recompute``,
``parameters_grad``, ``optimizer``); the numbers of the steps (loss, gradient norm, ...) are the metric `SCALARS`. A target is a tensor
of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.names import layer_of
from msprobe_engine.formats.monitor.series import Floats, Integers

SCALARS = "numbers of the steps"
VALUE = "value"
"""The statistic of `SCALARS`."""
ABSMAX = "largest absolute value"
DUMPED = frozenset(("forward", "backward", "recompute", "parameters_grad", "optimizer"))
"""Metrics of dumps, whose `Key.micro_step` is the number of the call."""
_PROBLEMS_SAID = 5

Progress = Callable[[str], None]


class Target(NamedTuple):
    """A row of a heat map.

    Attributes:
        name: as the files have it, with what tells it apart from others of this name behind: ``#2`` is the third call, ``[micro 3]``
            the fourth micro batch of the step.
        pp, vpp: stage of the pipeline and chunk: names of Megatron's layers count from 0 in every one of them.
    """

    name: str
    pp: int = 0
    vpp: int = 0

    @property
    def shown(self) -> str:
        """The name with stage and chunk in front where there are several."""
        return self._behind_stage(f"{self.vpp}:{self.name}" if self.vpp > 0 else self.name)

    @property
    def layer(self) -> str:
        """The layer of the model that it belongs to, likewise; a module of a dump belongs to that of the calls in it."""
        return self._behind_stage(layer_of(self.name.removeprefix("Module.").removeprefix("Cell.").partition(":")[0], self.vpp))

    def _behind_stage(self, name: str) -> str:
        return f"pp{self.pp}:{name}" if self.pp else name


@dataclass(frozen=True)
class Part:
    """Rows of one metric of one rank. A row may occur several times (micro batches, calls): all of them count.

    Attributes:
        targets: what `ids` refer to.
        ids, steps: of every row, int64 [n].
        values: statistic to float64 [n].
        there: statistic to which rows have it, [n]; all where it is not named. NaN elsewhere is a real NaN.
        order: of dumps: when in its step a row was made, int64 [n], as `msprobe_engine.report.trends.findings.moment_of` makes it; empty:
            of other files, which do not say.
        masked: rows whose -Inf the run has taken for that of masks: they are shown, and are no fault, [n]; empty: none.
    """

    rank: int
    metric: str
    targets: Sequence[Target]
    ids: Integers
    steps: Integers
    values: Mapping[str, Floats]
    there: Mapping[str, npt.NDArray[np.bool_]] = field(default_factory=dict)
    order: Integers = field(default_factory=lambda: np.empty(0, np.int64))
    masked: npt.NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, bool))

    def of(self, rows: npt.NDArray[np.bool_]) -> Part:
        return replace(
            self,
            ids=self.ids[rows],
            steps=self.steps[rows],
            values={name: values[rows] for name, values in self.values.items()},
            there={name: mask[rows] for name, mask in self.there.items()},
            order=self.order[rows] if len(self.order) else self.order,
            masked=self.masked[rows] if len(self.masked) else self.masked,
        )


class Source(Protocol):
    """A run that can be read twice: once to see what there is, once to take it."""

    path: Path
    kinds: tuple[str, ...]
    ranks: list[int]

    def parts(self, rank: int, progress: Progress) -> Iterator[Part]: ...

    def pieces(self) -> int:
        """How often reading it twice tells `progress`."""
        ...

    @property
    def problems(self) -> Mapping[str, int]: ...

    @property
    def left_out(self) -> int:
        """Of `problems` what is damage or missing: rows, records and files that were left out, ranks and steps that are not here."""
        ...


@dataclass(frozen=True)
class Wanted:
    """What of a run is asked for.

    Attributes:
        ranks, steps: only these; None: all.
        metrics, statistics, targets: only those whose name holds one of these texts; empty: all.
        micro_steps: micro batches of a step are targets of their own; else the extremes over them count.
        since, until: of the monitor only directories whose time stamp (``Dec03_21-34-40``) lies in this range.
    """

    ranks: frozenset[int] | None = None
    steps: frozenset[int] | None = None
    metrics: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    micro_steps: bool = False
    since: str | None = None
    until: str | None = None

    def takes(self, text: str, of: Sequence[str]) -> bool:
        """Whether a name is among those wanted."""
        return not of or any(word.casefold() in text.casefold() for word in of)

    def restrict_part(self, part: Part) -> Part | None:
        """The part without what is not wanted, None when nothing is left."""
        if not self.takes(part.metric, self.metrics):
            return None
        keep = np.ones(len(part.ids), bool)
        if self.targets:
            keep &= np.array([self.takes(target.shown, self.targets) for target in part.targets], bool)[part.ids]
        if self.steps is not None:
            keep &= np.isin(part.steps, np.array(sorted(self.steps), np.int64))
        chosen = {name: values for name, values in part.values.items() if self.takes(name, self.statistics)}
        if not chosen or not keep.any():
            return None
        part = replace(part, values=chosen, there={name: mask for name, mask in part.there.items() if name in chosen})
        if keep.all():
            return part
        part = part.of(keep)
        used, ids = np.unique(part.ids, return_inverse=True)
        return replace(part, targets=[part.targets[i] for i in used.tolist()], ids=ids.astype(np.int64))


def format_problems(problems: Mapping[str, int]) -> str:
    """The first problems of a run as the end of a message, "" without any."""
    return "".join(f"\n  {what}" for what in list(problems)[:_PROBLEMS_SAID])


class Both:
    """Several sources of one run, each with metrics of its own."""

    def __init__(self, path: Path, sources: Sequence[Source]) -> None:
        self.path = path
        self.kinds = tuple(kind for source in sources for kind in source.kinds)
        self.ranks = sorted({rank for source in sources for rank in source.ranks})
        self.sources = sources

    def parts(self, rank: int, progress: Progress) -> Iterator[Part]:
        for source in self.sources:
            if rank in source.ranks:
                yield from source.parts(rank, progress)

    def pieces(self) -> int:
        return sum(source.pieces() for source in self.sources)

    @property
    def problems(self) -> Mapping[str, int]:
        return {what: count for source in self.sources for what, count in source.problems.items()}

    @property
    def left_out(self) -> int:
        return sum(source.left_out for source in self.sources)


def with_absmax(
    values: Mapping[str, Floats], there: Mapping[str, npt.NDArray[np.bool_]]
) -> tuple[dict[str, Floats], dict[str, npt.NDArray[np.bool_]]]:
    """The statistics and, where there are smallest and largest, the largest absolute value of them."""
    out, masks = dict(values), dict(there)
    if "min" in out and "max" in out:
        out[ABSMAX] = np.maximum(np.abs(out["min"]), np.abs(out["max"]))
        if "min" in masks:
            masks[ABSMAX] = masks["min"] & masks.get("max", masks["min"])
    return out, masks
