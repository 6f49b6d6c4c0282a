"""One rank of one step: both sides read, made graphs of, compared and marked. Runs in any process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from msprobe_engine.core.errors import DumpFormatError, ProbeError
from msprobe_engine.core.process.garbage_collection import collection_paused
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.measure.missing_statistics import say_unsearched
from msprobe_engine.report.graph.job import Job
from msprobe_engine.report.graph.nodes.build import build
from msprobe_engine.report.graph.nodes.model import Comparison, Graph
from msprobe_engine.report.graph.options import GraphOptions

if TYPE_CHECKING:
    from msprobe_engine.report.graph.nodes.links import Call


@dataclass
class Part:
    """What one job came to.

    Attributes:
        made: the graph, or the comparison of two; None when nothing could be made, which `problems` says.
        calls: the communication calls of the target and of the golden side, for the links between ranks.
        problems: what could not be read or compared.
        notes: what is to be known of ranks that were put together.
        weights: of a copy of the model that ranks were put together to, each parameter's statistics; those of all copies should agree.
        nonfinite: the target holds NaN or Inf somewhere.
    """

    job: Job
    made: Graph | Comparison | None = None
    calls: tuple[list[Call], ...] = ()
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    weights: dict[str, bytes] = field(default_factory=dict)
    nonfinite: bool = False


@np.errstate(all="ignore")  # the numbers of a dump may be anything
def run_job(job: Job, options: GraphOptions) -> Part:
    """Do one job. What is wrong with the data is in the result; what is wrong with the options is raised.

    Raises:
        UsageError: the options do not fit the data.
    """
    part = Part(job)
    try:
        with collection_paused():  # the columns of 200,000 nodes are no garbage
            _fill_part(part, options)
    except DumpFormatError as error:
        part.problems.append(str(error))
    except ProbeError:
        raise
    except Exception as error:
        return build_failed_part(job, error)
    return part


def build_failed_part(job: Job, error: BaseException) -> Part:
    """The result of a job that could not be done; the others go on."""
    text = str(error) if isinstance(error, ProbeError) else f"unexpected {type(error).__name__}: {error}"
    return Part(job, problems=[f"{job.place}: {text}"])


def _fill_part(part: Part, options: GraphOptions) -> None:
    job = part.job
    if job.members:
        from msprobe_engine.report.graph.merge.make import build_merged_graph, weights

        made = build_merged_graph(job, options, part.problems, part.notes)
        part.weights = weights(made)
        finish(part, made, options)
        return
    target = _graph(part, job.target, job.step, job.rank, options.old)
    if job.golden is None:
        if target is not None:
            finish(part, target, options)
        return
    golden = _graph(part, job.golden, job.golden_step, job.golden_rank, options.old)
    if target is not None and golden is not None:
        finish(part, compare(target, golden, options), options)


def compare(target: Graph, golden: Graph, options: GraphOptions) -> Comparison:
    """Match two graphs and measure what they differ by."""
    from msprobe_engine.report.graph import compare_graphs

    return compare_graphs.compare(target, golden, options)


def finish(part: Part, made: Graph | Comparison, options: GraphOptions) -> None:
    """Mark overflows, take out the communication calls, and put it into the part."""
    from msprobe_engine.report.graph.nodes import links

    graphs = (made.target, made.golden) if isinstance(made, Comparison) else (made,)
    if options.overflow:
        from msprobe_engine.report.graph.existing import overflow

        for graph in graphs:
            overflow.mark(graph, options.match == "exact")
    part.made = made
    part.calls = links.calls(made, options)
    for graph in graphs:
        part.problems += [problem for problem in graph.problems if problem not in part.problems]
        if graph.side is not None:
            if len(graphs) == 1 and not part.job.members:
                say_unsearched(graph.side)
            part.problems += [problem for problem in graph.side.problems if problem not in part.problems]
    part.nonfinite = graphs[0].side is not None and holds_nonfinite(graphs[0].side)


def _graph(part: Part, path: Any, step: int, rank: int, old: bool) -> Graph | None:
    side = read_side(path)
    made = build(side, step, rank, old)
    if len(made) == 1:
        part.problems += [f"{path}: no call in it; there is nothing to draw", *side.problems]
        return None
    return made


def holds_nonfinite(side: DumpTable) -> bool:
    """A tensor of it holds NaN or Inf."""
    if side.nans or side.infs:
        return True
    stats = side.stats
    told = np.isnan(stats) | np.isinf(stats)
    if side.nonfloat_stats:
        told[np.fromiter(side.nonfloat_stats, np.int64, len(side.nonfloat_stats))] = False
    if told.any():
        return True
    return any(_bad(value) for row, four in side.nonfloat_stats.items() if row not in side.values for value in four)


def _bad(value: object) -> bool:
    if isinstance(value, float):
        return value != value or value in (float("inf"), -float("inf"))
    return isinstance(value, str) and value.lower().lstrip("+-") in ("nan", "inf", "infinity")


def unlike(parts: Iterable[Part]) -> list[str]:
    """Sentences about copies whose weights differ, one per step."""
    firsts: dict[int, Part] = {}
    ranks_of: dict[int, list[str]] = {}
    for part in parts:
        if not part.weights:
            continue
        first = firsts.setdefault(part.job.step, part)
        names = [name for name, numbers in part.weights.items() if first.weights.get(name, numbers) != numbers]
        if names:
            ranks_of.setdefault(part.job.step, []).append(
                f"that of rank {part.job.rank} in {len(names):,} parameters (the first is {names[0]})"
            )
    return [
        f"step {step}: copies of the model differ from that of rank {firsts[step].job.rank}: {'; '.join(texts)}."
        for step, texts in sorted(ranks_of.items())
    ]
