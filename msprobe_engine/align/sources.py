"""What the paths of a comparison mean: which dump file of the target belongs to which of the golden run.

A path is a dump.json (debug.json), the directory of a rank, of a step, the root of a dump, the output directory of a run, or a root with
the folders of a mixed dump (``graph``, ``pynative``; 26.2.0). Ranks and steps go by number, ``rank2`` before ``rank10``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msprobe_engine.align import static_graph_sources
from msprobe_engine.align.tasks import Sources, Task
from msprobe_engine.core.errors import DumpFormatError, UsageError
from msprobe_engine.core.text.words import some
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.completeness import missing_ranks, missing_steps, steps_on_one_side
from msprobe_engine.formats.dump.find_dumps import holds_dump
from msprobe_engine.formats.dump.rank_files import parse_json, read_bytes
from msprobe_engine.formats.dump.reader import DumpDirectory, open_dump, require_visible
from msprobe_engine.formats.dump.ring_file import has_step_file

MIXED = ("graph", "pynative")
"""Folders of a mixed dump (26.2.0)."""

_STEMS = {layout.DUMP: "compare_result", layout.DEBUG: "debug_compare_result"}


def pair_paths(
    target: str | Path, golden: str | Path, steps: Iterable[int] = (), ranks: Iterable[int] = (), stack: str | Path | None = None
) -> Sources:
    """Find the pairs of dump files.

    Args:
        target: the run in question, see the module.
        golden: the run that is right.
        steps, ranks: only these; empty: all.
        stack: stack.json of the target, for a pair of files.

    Raises:
        DumpFormatError: there is no dump at a path.
        UsageError: a file against a directory, or no step or rank in common.
    """
    target_path, golden_path = _present(target), _present(golden)
    if _is_file(target_path) != _is_file(golden_path):
        file, directory = (target_path, golden_path) if _is_file(target_path) else (golden_path, target_path)
        if not _is_file(directory / file.name):
            raise UsageError(f"{file} is a file and {directory} a directory; give two dump.json, or two directories of the same kind")
        target_path, golden_path = (target_path, directory / file.name) if _is_file(target_path) else (directory / file.name, golden_path)
    if _is_file(target_path):
        return Sources([_of_files(target_path, golden_path, Path(stack) if stack else None)])
    sources = Sources()
    known_dump = _dump_at(target_path)
    if known_dump is None and (kind := static_graph_sources.kind_of(target_path)) is not None:
        static_graph_sources.pair_graphs(sources, kind, target_path, golden_path, frozenset(steps), frozenset(ranks))
        if not sources.tasks:
            raise UsageError(f"{target} against {golden}: no rank, step and graph in common to compare; name the directories themselves")
        return sources
    mixed = [name for name in MIXED if (target_path / name).is_dir() and (golden_path / name).is_dir()]
    for folder in mixed:
        _add_steps(
            sources, folder, open_dump(target_path / folder), open_dump(golden_path / folder), frozenset(steps), frozenset(ranks), True
        )
    if not mixed:
        sources.dumps = target_dump, golden_dump = known_dump or open_dump(target_path), open_dump(golden_path)
        _add_steps(sources, ".", target_dump, golden_dump, frozenset(steps), frozenset(ranks), False)
    if not sources.tasks:
        raise UsageError(f"{target} against {golden}: nothing in common to compare. {' '.join(sources.lost + sources.notes)}")
    return sources


def _dump_at(root: Path) -> DumpDirectory | None:
    try:
        return open_dump(root)
    except DumpFormatError:
        return None


def add_calibration(sources: Sources, paths: Sequence[Path]) -> None:
    """Give every task the files of further golden dumps that are of its golden rank and step; ranks without one are said in `notes`.

    Raises:
        DumpFormatError: there is no dump at a path.
        UsageError: they have none of the ranks.
    """
    dumps = [open_dump(path) for path in paths]
    lacking = []
    for number, task in enumerate(sources.tasks):
        found = [directory / task.golden.name for dump in dumps if (directory := _counterpart(dump, task, len(sources.tasks))) is not None]
        sources.tasks[number] = replace(task, calibration=tuple(file for file in found if _has(file.parent, file.name)))
        if not sources.tasks[number].calibration:
            lacking.append(task.place)
    if lacking:
        if len(lacking) == len(sources.tasks):
            raise UsageError(f"{', '.join(map(str, paths))}: no rank and step of the golden run is in these dumps of a calibration")
        sources.notes.append(f"No calibration for {_list_shortened(lacking)}: round-off is told from the dtypes there.")


def _counterpart(dump: DumpDirectory, task: Task, tasks: int) -> Path | None:
    """Directory of the task's golden rank and step in another dump; of a dump with one rank and a single task that rank. The directory of
    one process stands for rank 0 in both."""
    where = task.golden.resolve().parent
    step = layout.step_of(where.parent.name) or 0
    if step not in dump.steps and len(dump.steps) == 1:
        step = dump.steps[0]
    ranks = dump.ranks(step) if step in dump.steps else []
    rank = layout.rank_of(where.name)
    if rank in ranks:
        return dump.path(step, rank)
    alone = rank == 0 or (rank is None and sum(layout.is_rank_directory(entry.name) for entry in os.scandir(where.parent)) == 1)
    if alone and (_is_one_process(ranks) or 0 in ranks):
        return dump.path(step, 0 if 0 in ranks else ranks[0])
    return dump.path(step, ranks[0]) if len(ranks) == 1 and tasks == 1 else None


def from_json(path: str | Path) -> dict[str, Any]:
    """Read the json of version 8.1.1 (``-i``).

    Returns:
        ``npu_path``, ``bench_path``, ``stack_path`` (or None), ``is_print_compare_log``, and of MindSpore's static graphs ``rank_id`` and
        ``step_id`` (lists, empty: all), ``common`` (single points) and ``map_dict`` (name of a single point -> that of the golden run).
        Paths are as they stand in the file: relative ones count from the working directory, as there.

    Raises:
        DumpFormatError: it is not there or no JSON.
        UsageError: a key is missing or of the wrong type.
    """
    file = Path(path)
    try:
        document = parse_json(read_bytes(file), file)
    except FileNotFoundError:
        raise DumpFormatError(f"{path}: there is no such file or directory; give the json with npu_path and bench_path") from None
    if not isinstance(document, dict):
        raise UsageError(f"{path}: holds a {type(document).__name__}; a JSON object with npu_path and bench_path is needed")
    for key in ("npu_path", "bench_path"):
        if not isinstance(document.get(key), str) or not document[key]:
            raise UsageError(f"{path}: key {key!r} is {document.get(key)!r}; a path is needed")
    stack, log = document.get("stack_path") or None, document.get("is_print_compare_log", True)
    if not isinstance(stack, str | None) or not isinstance(log, bool):
        raise UsageError(f"{path}: stack_path is {stack!r} and is_print_compare_log {log!r}; a path, and true or false, are allowed")
    settings = {"npu_path": document["npu_path"], "bench_path": document["bench_path"], "stack_path": stack, "is_print_compare_log": log}
    settings["common"] = bool(document.get("common"))
    for key in ("rank_id", "step_id"):
        chosen = settings[key] = document.get(key) or []
        if not isinstance(chosen, list) or not all(type(number) is int and number >= 0 for number in chosen):
            raise UsageError(f"{path}: key {key!r} is {str(chosen)[:80]!r}; a list of numbers is allowed, an empty one means all")
    renamed = settings["map_dict"] = document.get("map_dict") or {}
    if not isinstance(renamed, dict) or not all(isinstance(name, str) for name in renamed.values()):
        raise UsageError(f'{path}: key \'map_dict\' is {str(renamed)[:80]!r}; an object of names is needed, such as {{"input": "x"}}')
    return settings


def numbers(text: str | None, flag: str) -> frozenset[int]:
    """``"0,1,4-6"`` as numbers.

    Raises:
        UsageError: it is something else.
    """
    chosen: set[int] = set()
    for part in (text or "").replace(" ", "").split(","):
        first, _, last = part.partition("-")
        if not part:
            continue
        if not first.isdecimal() or not (last.isdecimal() or "-" not in part) or len(part) > 20 or int(last or first) < int(first):
            raise UsageError(f"{flag} {text!r}: {part!r} is no number and no range; 0,1,4-6 is one")
        if int(last or first) - int(first) > 1_000_000:
            raise UsageError(f"{flag} {text!r}: {part!r} is longer than a million; there are no such many")
        chosen.update(range(int(first), int(last or first) + 1))
    return frozenset(chosen)


def _present(path: str | Path) -> Path:
    location = Path(path)
    require_visible(location)
    if not location.exists() and not holds_dump(location):
        raise DumpFormatError(
            f"{path}: there is no such file or directory; give a dump.json, the directory of a rank or a step, the root of a dump, or the "
            "output directory of a run"
        )
    if location.exists() and not location.is_dir() and not location.is_file():
        raise DumpFormatError(f"{path}: is no regular file; no dump has such a file, do not trust it")
    return location


def _is_file(path: Path) -> bool:
    return path.is_file() or (not path.exists() and has_step_file(path))


def _of_files(target: Path, golden: Path, stack: Path | None) -> Task:
    for path in (target, golden):
        if path.suffix != ".json":
            raise UsageError(f"{path}: is no .json; give a dump.json or debug.json")
    if (target.name == layout.DEBUG) != (golden.name == layout.DEBUG):
        raise UsageError(f"{target} against {golden}: a dump.json cannot be compared with a debug.json; give two of one kind")
    where = target.resolve().parent
    if stack is not None and not stack.is_file():
        raise DumpFormatError(f"{stack}: is not there; leave stack_path out, or give the stack.json of the target")
    stem = _STEMS.get(target.name, "compare_result")
    return Task(target, golden, layout.step_of(where.parent.name), layout.rank_of(where.name), ".", stem, stack)


def _add_steps(
    sources: Sources,
    folder: str,
    target: DumpDirectory,
    golden: DumpDirectory,
    steps: frozenset[int],
    ranks: frozenset[int],
    mixed: bool,
) -> None:
    for dump in (target, golden):
        if dump.strays:  # they are left alone, as 26.2.0 does; 8.1.1 stops
            said = f"{len(dump.strays)} entries beside the ranks are no rank directories: {_list_shortened(sorted(dump.strays))}."
            sources.notes.append(f"{dump.root}: {said}")
        sources.lost += missing_steps(dump, steps)
    sources.lost += [] if steps else steps_on_one_side(target, golden)
    chosen = [
        (target_step, golden_step) for target_step, golden_step in _steps(sources, target, golden) if not steps or target_step in steps
    ]
    if steps - {target_step for target_step, _ in chosen}:
        sources.lost.append(
            f"Steps {_list_shortened(sorted(steps - {target_step for target_step, _ in chosen}))} were asked for and are not in both dumps."
        )
    for target_step, golden_step in chosen:
        sources.lost += [
            sentence for dump, step in ((target, target_step), (golden, golden_step)) for sentence in missing_ranks(dump, step, ranks)
        ]
        name = f"{folder}/step{target_step}" if mixed else f"step{target_step}" if len(target.steps) > 1 else folder
        for target_rank, golden_rank in _ranks(sources, target, golden, target_step, golden_step, ranks):
            _add_files(sources, name, target_step, target_rank, golden_rank)


def _steps(sources: Sources, target: DumpDirectory, golden: DumpDirectory) -> list[tuple[int, int]]:
    if len(target.steps) == len(golden.steps) == 1:
        if target.steps != golden.steps:
            sources.notes.append(
                f"Step {target.steps[0]} is compared with step {golden.steps[0]} of the golden dump: each has one step only."
            )
        return [(target.steps[0], golden.steps[0])]
    return [(step, step) for step in target.steps if step in set(golden.steps)]


def _ranks(
    sources: Sources, target: DumpDirectory, golden: DumpDirectory, target_step: int, golden_step: int, ranks: frozenset[int]
) -> list[tuple[tuple[int | None, Path], tuple[int | None, Path]]]:
    """Pairs of (rank, directory)."""
    target_ranks, golden_ranks = target.ranks(target_step), golden.ranks(golden_step)
    common = [rank for rank in target_ranks if rank in set(golden_ranks)]
    pairs: list[tuple[int | str, int | str]]
    if (
        len(target_ranks) != len(golden_ranks)
        and 0 in (*target_ranks, *golden_ranks)
        and (_is_one_process(target_ranks) or _is_one_process(golden_ranks))
    ):
        pairs = [(target_ranks[0], golden_ranks[0])]
    elif common:
        pairs = [(rank, rank) for rank in common]
    elif len(target_ranks) == len(golden_ranks) and (
        len(target_ranks) == 1 or all(isinstance(r, int) for r in (*target_ranks, *golden_ranks))
    ):
        pairs = list(zip(target_ranks, golden_ranks))
        if len(target_ranks) > 1 or all(isinstance(r, int) for r in (*target_ranks, *golden_ranks)):
            sources.notes.append(
                f"Step {target_step}: no rank in common; paired in their order, {target_ranks[0]} with {golden_ranks[0]} and so on."
            )
    else:
        pairs = []
        sources.lost.append(
            f"Step {target_step}: ranks {_list_shortened(target_ranks)} against {_list_shortened(golden_ranks)}: "
            "which belong together cannot be told."
        )
    if len(target_ranks) != len(golden_ranks):
        sources.notes.append(
            f"Step {target_step}: {len(target_ranks)} ranks against {len(golden_ranks)}; the tables have the {len(pairs)} that both have."
        )
    for word, keys, used in (
        ("target", target_ranks, {target_rank for target_rank, _ in pairs}),
        ("golden", golden_ranks, {golden_rank for _, golden_rank in pairs}),
    ):
        alone = [key for key in keys if key not in used]
        if alone and pairs:
            sources.lost.append(f"Step {target_step}: ranks only in the {word}: {_list_shortened(alone)}.")
    if ranks:
        own = {target_rank: 0 if _is_one_process(target_ranks) else target_rank for target_rank, _ in pairs}
        missing = sorted(ranks - {rank for rank in own.values() if isinstance(rank, int)})
        pairs = [(target_rank, golden_rank) for target_rank, golden_rank in pairs if own[target_rank] in ranks]
        if missing:
            sources.lost.append(f"Step {target_step}: ranks {_list_shortened(missing)} were asked for and are not in both dumps.")
    return [
        (_locate_rank(target, target_step, target_rank), _locate_rank(golden, golden_step, golden_rank))
        for target_rank, golden_rank in pairs
    ]


def _is_one_process(ranks: Sequence[int | str]) -> bool:
    """A run of one process, whose directory (``proc{pid}``, ``rank``) does not say its rank: it is rank 0."""
    return len(ranks) == 1 and isinstance(ranks[0], str)


def _locate_rank(dump: DumpDirectory, step: int, key: int | str) -> tuple[int | None, Path]:
    return (key if isinstance(key, int) else None), dump.path(step, key)


def _add_files(
    sources: Sources, folder: str, step: int, target_place: tuple[int | None, Path], golden_place: tuple[int | None, Path]
) -> None:
    (rank, target), (golden_rank, golden) = target_place, golden_place
    rank = golden_rank if rank is None else rank
    name = f"rank{rank}" if rank is not None else target.resolve().name
    kinds = [kind for kind in (layout.DUMP, layout.DEBUG) if _has(target, kind) and _has(golden, kind)]
    for kind in kinds:
        sources.tasks.append(Task(target / kind, golden / kind, step, rank, folder, f"{_STEMS[kind]}_{name}"))
    if not kinds:
        sources.lost.append(f"{target} and {golden} have no file in common (dump.json or debug.json).")


def _has(directory: Path, kind: str) -> bool:
    names = (layout.FRAME_LOG, layout.MARKER) if kind == layout.DUMP else ()
    return has_step_file(directory / kind) or any((directory / name).exists() for name in names)


def _list_shortened(values: Sequence[Any]) -> str:
    return some([str(value)[:60] for value in values])
