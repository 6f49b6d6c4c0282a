"""Which dump files are put together: of each step one job per copy of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from msprobe_engine.core import names
from msprobe_engine.core.errors import DumpFormatError, UsageError
from msprobe_engine.formats.dump.stream import open_records
from msprobe_engine.report.graph.job import Job, Jobs
from msprobe_engine.report.graph.merge import device_mesh
from msprobe_engine.report.graph.options import GraphOptions, Layout

Members = tuple[tuple[int, Path], ...]

_BLOCKS = 8
"""Of a file, in which the first module is looked for."""


def merge_jobs(target: Jobs, golden: Jobs | None, options: GraphOptions) -> Jobs:
    """Put jobs of single ranks together.

    Args:
        target, golden: one job per step and rank; golden None: there is one side only.
        options: says how the ranks belong together, or that the dumps do.

    Raises:
        DumpFormatError: no rank can be read.
        UsageError: what was given does not fit the ranks that are there, or no step is on both sides.
    """
    merged = Jobs(notes=list(target.notes), lost=list(target.lost))
    given = options.layouts or (None, None)
    target_steps = _by_step(target)
    if golden is None:
        for step, members in target_steps.items():
            merged.jobs += [
                Job(some[0][1], None, step, some[0][0], members=some) for some in _models(members, given[0], merged, alone=True)
            ]
        return _some(merged)
    merged.notes += golden.notes
    merged.lost += golden.lost
    golden_steps = _by_step(golden)
    steps = sorted(set(target_steps) & set(golden_steps))
    pairs = [(step, step) for step in steps]
    if not pairs and len(target_steps) == len(golden_steps) == 1:
        pairs = [(next(iter(target_steps)), next(iter(golden_steps)))]
    if not pairs:
        raise UsageError(f"graph: no step is on both sides: {sorted(target_steps)} and {sorted(golden_steps)}")
    for name, own_steps, other_steps in (("target", target_steps, golden_steps), ("golden run", golden_steps, target_steps)):
        alone = sorted(set(own_steps) - set(other_steps))
        if alone and steps:
            merged.notes.append(f"steps {', '.join(map(str, alone[:16]))} are of the {name} alone and left out.")
    for step, golden_step in pairs:
        merged.jobs += _pairs(target_steps[step], golden_steps[golden_step], step, golden_step, options, merged)
    return _some(merged)


def _some(found: Jobs) -> Jobs:
    if not found.jobs:
        raise DumpFormatError("graph: no rank can be read; " + "; ".join(found.lost))
    return found


def _pairs(target: Members, golden: Members, step: int, golden_step: int, options: GraphOptions, merged: Jobs) -> list[Job]:
    given = options.layouts or (None, None)
    groups = _models(target, given[0], merged), _models(golden, given[-1], merged)
    if not all(groups):
        return []
    whole = tuple(tuple(member for some in side for member in some) for side in groups)
    across = _read_model_split(whole[0], given[0]) != _read_model_split(whole[1], given[-1]) or len(groups[0]) != len(groups[1])
    if across and options.layouts and options.match == "exact":  # as the existing tool does it: copy beside copy, by names
        across = False
        if len(groups[0]) != len(groups[1]):
            merged.notes.append(
                f"step {step}: {len(groups[0])} copies of the model against {len(groups[1])}; those that both have are compared."
            )
    pairs = [(whole[0], whole[1])] if across else list(zip(*groups))
    return [Job(a[0][1], b[0][1], step, a[0][0], golden_step, b[0][0], a, b, across) for a, b in pairs]


def _by_step(jobs: Jobs) -> dict[int, Members]:
    found: dict[int, list[tuple[int, Path]]] = {}
    for job in jobs.jobs:
        found.setdefault(job.step, []).append((job.rank, job.target))
    return {step: tuple(sorted(members)) for step, members in sorted(found.items())}


def _models(members: Members, given: Layout | None, merged: Jobs, alone: bool = False) -> list[Members]:
    """The ranks of each copy of the model. `alone`: they are not compared with another run, whose shapes say more."""
    files = dict(members)
    if given is not None:
        device_mesh.check(given, files)
        numbers = device_mesh.mesh_of_layout(given)
        copies = sorted({place["dp"] for place in numbers.values()})
        return [tuple((rank, files[rank]) for rank in sorted(files) if numbers[rank]["dp"] == copy) for copy in copies]
    headers: dict[int, Mapping[str, Any]] = {}
    for rank, path in members:
        try:
            headers[rank] = _header(path)
        except DumpFormatError as error:
            merged.lost.append(f"{error}. Rank {rank} is left out")
    if not headers:
        return []
    for rank in [rank for rank, header in headers.items() if device_mesh.mesh_of_header(header) is None]:
        if len(headers) > 1 and any(device_mesh.mesh_of_header(header) is not None for header in headers.values()):
            del headers[rank]
            merged.lost.append(
                f"{files[rank]}: does not say where rank {rank} stands, as the others do; it is left out. Is the file damaged?"
            )
    size = device_mesh.whole_size(headers)
    if size and size > len(headers):
        merged.lost.append(
            f"{members[0][1].parent.parent}: has {len(headers)} of the {size} ranks of the job; what the others held is missing"
        )
    if not size and len(headers) > 1 and _same_data([files[rank] for rank in headers]):
        return [tuple((rank, files[rank]) for rank in sorted(headers))]
    if alone and not size and len(headers) > 1:
        text = (
            f"{members[0][1].parent.parent}: the dumps do not say how the job was cut, so each rank is drawn by itself; "
            "give --rank_size, --tp and --pp to put them together."
        )
        if text not in merged.notes:
            merged.notes.append(text)
    return [tuple((rank, files[rank]) for rank in ranks) for ranks in device_mesh.models(headers)]


def _same_data(paths: Sequence[Path]) -> bool:
    """All ranks were given the same batch, so that they run one model together: what the first module takes in says the same. Ranks that
    have a batch each (data parallelism, sharded or not) are copies of a model. What no module takes in (masks, places) is no batch."""
    found = set()
    for path in paths:
        with open_records(path) as records:
            firsts = (_batch(name, record) for block in islice(records, _BLOCKS) for name, record in block.items())
            found.add(next((first for first in firsts if first), ""))
    return len(found) == 1 and "" not in found


def _batch(name: str, record: Any) -> str:
    """Statistics of the first tensor that the forward call of a module takes in; "" of any other record, and of a tensor of constants."""
    if not name.startswith(("Module.", "Cell.")) or names.direction(name) != names.FORWARD or not isinstance(record, Mapping):
        return ""
    taken = record.get("input_args")
    for item in taken if isinstance(taken, list) else ():
        if isinstance(item, Mapping) and item.get("Norm") is not None and item.get("Max") != item.get("Min"):
            return repr([item.get(key) for key in ("shape", "Max", "Min", "Mean", "Norm")])
    return ""


def _read_model_split(members: Members, given: Layout | None) -> Any:
    """What must be the same on both sides for a copy of the model to be compared with a copy of the model."""
    if given is not None:
        return replace(given, order="")
    header = _header(members[0][1])
    said = device_mesh.mesh_of_header(header)
    if said is None:
        return len(members)
    marks = header["parallel"].get("parameters")
    sequences = any(isinstance(mark, Mapping) and mark.get("sequence_parallel") for mark in (marks if isinstance(marks, list) else ()))
    return sorted((axis, size) for axis, size in said[1].items() if size > 1), sequences


def _header(path: Path) -> Mapping[str, Any]:
    with open_records(path) as records:
        return records.header
