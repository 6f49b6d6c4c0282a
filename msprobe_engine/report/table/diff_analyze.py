"""The first difference over all ranks of two runs, as the file that ``compare -da`` of the existing tool 26.2.0 writes.

The layout is theirs: ``{"rank_0": [{"op_name", "data_info": {"input": {row: {...}}, "output": {...}}, "stack_info"}]}``. What is in it
comes from `diagnose`, so NaN and Inf count, a single process counts, and nothing is read that an earlier comparison left behind.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msprobe_engine.core.io.output_files import guard_writing, write_file
from msprobe_engine.core.io.regular_files import make_directories
from msprobe_engine.find import origin
from msprobe_engine.find.findings import Diagnosis, Suspect, finite_json
from msprobe_engine.find.nonfinite.load import read_step
from msprobe_engine.find.run import diagnose
from msprobe_engine.formats.dump.dump_table import INPUT, MD5, OUTPUT, PARAMETERS, PARAMETERS_GRAD, DumpTable
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_engine.measure.columns import TARGET_STATS

NOTHING = "Cannot find any diff node, no need to generate analyze file."
"""What the existing tool says when the runs agree."""
_STATES = {INPUT: "input", PARAMETERS: "input", OUTPUT: "output", PARAMETERS_GRAD: "output"}


def first_differences(target: str | Path, golden: str | Path, output: str | Path) -> tuple[Path | None, Diagnosis]:
    """Write where two runs part: ``{output}/diff_analyze_{time_ns}.json``.

    Args:
        target, golden: two dumps of one kind: root, step directory, rank directory or dump.json.
        output: directory of the file.

    Returns:
        The file, and the diagnosis. None: there is no record that the numbers part at, and then nothing is written.

    Raises:
        DumpFormatError, NothingCapturedError: as `diagnose`.
        SinkError: the file cannot be written.
    """
    diagnosis = diagnose(target, golden)
    nodes = _nodes(diagnosis, Path(target), Path(golden))
    if not nodes:
        return None, diagnosis
    path = Path(output) / f"diff_analyze_{time.time_ns()}.json"
    with guard_writing(path, "name another directory with -o"):
        make_directories(str(output))
        write_file(path, [finite_json(nodes, indent=2)])
    return path, diagnosis


def _nodes(diagnosis: Diagnosis, target: Path, golden: Path) -> dict[str, list[dict[str, Any]]]:
    """Rank -> entries of the first difference: the first suspect, and the same record of the same step on other ranks."""
    first = diagnosis.first_suspect
    if first is None:
        return {}
    sides: dict[Path, dict[int, DumpTable]] = {}
    nodes: dict[str, list[dict[str, Any]]] = {}
    for suspect in _together(first, diagnosis.places or diagnosis.suspects):
        missing = suspect.kind == origin.MISSING  # then its record is one of the golden side
        path = golden if missing else target
        if path not in sides:
            dump = open_dump(path)
            sides[path] = read_step(dump, suspect.step if suspect.step in dump.steps else dump.steps[0], [])
        entry = _node(suspect, sides[path].get(suspect.rank))
        nodes.setdefault(f"rank_{suspect.rank}", []).append(entry)
    return nodes


def _together(first: Suspect, suspects: Sequence[Suspect]) -> list[Suspect]:
    found = {suspect.rank: suspect for suspect in reversed(suspects) if (suspect.record, suspect.step) == (first.record, first.step)}
    return [first, *(suspect for rank, suspect in sorted(found.items()) if rank != first.rank)]


def _node(suspect: Suspect, side: DumpTable | None) -> dict[str, Any]:
    data: dict[str, dict[str, Any]] = {"input": {}, "output": {}}
    if side is not None and suspect.record in side.ops:
        for row in side.rows(side.ops.index(suspect.record)):
            state = _STATES.get(side.role[row])
            if state is not None:
                data[state][side.name[row]] = _read_values(side, row)
    return {
        "op_name": suspect.record,
        "data_info": data,
        "stack_info": list(suspect.stack),
        "step": suspect.step,
        "rank": suspect.rank,
        "module": suspect.module,
        "source_line": suspect.source,
        "cause": suspect.kind,
        "explanation": suspect.why,
        "tensor": suspect.tensor,
        "bench_op_name": suspect.partner,
        "numbers": suspect.numbers,
    }


def _read_values(side: DumpTable, row: int) -> dict[str, Any]:
    shown: dict[str, Any] = {"NPU MD5": side.checksum(row)} if side.mode == MD5 else dict(zip(TARGET_STATS, side.stats_of(row)))
    peer = side.extra.get(row, {}).get("peer")
    return shown if peer is None else shown | {"NPU P2POp peer": peer}
