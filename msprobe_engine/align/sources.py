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
    one, two = _present(target), _present(golden)
    if _is_file(one) != _is_file(two):
        file, directory = (one, two) if _is_file(one) else (two, one)
        if not _is_file(directory / file.name):
            raise UsageError(f"{file} is a file and {directory} a directory; give two dump.json, or two directories of the same kind")
        one, two = (one, directory / file.name) if _is_file(one) else (directory / file.name, two)
    if _is_file(one):
        return Sources([_of_files(one, two, Path(stack) if stack else None)])
    found = Sources()
    first = _dump_at(one)
    if first is None and (kind := static_graph_sources.kind_of(one)) is not None:
        static_graph_sources.pair_graphs(found, kind, one, two, frozenset(steps), frozenset(ranks))
        if not found.tasks:
            raise UsageError(f"{target} against {golden}: no rank, step and graph in common to compare; name the directories themselves")
        return found
    mixed = [name for name in MIXED if (one / name).is_dir() and (two / name).is_dir()]
    for folder in mixed:
        _add_steps(found, folder, open_dump(one / folder), open_dump(two / folder), frozenset(steps), frozenset(ranks), True)
    if not mixed:
        found.dumps = one_dump, other = first or open_dump(one), open_dump(two)
        _add_steps(found, ".", one_dump, other, frozenset(steps), frozenset(ranks), False)
    if not found.tasks:
        raise UsageError(f"{target} against {golden}: nothing in common to compare. {' '.join(found.lost + found.notes)}")
    return found


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
    found = {"npu_path": document["npu_path"], "bench_path": document["bench_path"], "stack_path": stack, "is_print_compare_log": log}
    found["common"] = bool(document.get("common"))
    for key in ("rank_id", "step_id"):
        chosen = found[key] = document.get(key) or []
        if not isinstance(chosen, list) or not all(type(number) is int and number >= 0 for number in chosen):
            raise UsageError(f"{path}: key {key!r} is {str(chosen)[:80]!r}; a list of numbers is allowed, an empty one means all")
    renamed = found["map_dict"] = document.get("map_dict") or {}
    if not isinstance(renamed, dict) or not all(isinstance(name, str) for name in renamed.values()):
        raise UsageError(f'{path}: key \'map_dict\' is {str(renamed)[:80]!r}; an object of names is needed, such as {{"input": "x"}}')
    return found


def numbers(text: str | None, flag: str) -> frozenset[int]:
    """``"0,1,4-6"`` as numbers.

    Raises:
        UsageError: it is something else.
    """
    found: set[int] = set()
    for part in (text or "").replace(" ", "").split(","):
        first, _, last = part.partition("-")
        if not part:
            continue
        if not first.isdecimal() or not (last.isdecimal() or "-" not in part) or len(part) > 20 or int(last or first) < int(first):
            raise UsageError(f"{flag} {text!r}: {part!r} is no number and no range; 0,1,4-6 is one")
        if int(last or first) - int(first) > 1_000_000:
            raise UsageError(f"{flag} {text!r}: {part!r} is longer than a million; there are no such many")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _present(path: str | Path) -> Path:
    found = Path(path)
    require_visible(found)
    if not found.exists() and not holds_dump(found):
        raise DumpFormatError(
            f"{path}: there is no such file or directory; give a dump.json, the directory of a rank or a step, the root of a dump, or the "
            "output directory of a run"
        )
    if found.exists() and not found.is_dir() and not found.is_file():
        raise DumpFormatError(f"{path}: is no regular file; no dump has such a file, do not trust it")
    return found


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
    found: Sources,
    folder: str,
    one: DumpDirectory,
    two: DumpDirectory,
    steps: frozenset[int],
    ranks: frozenset[int],
    mixed: bool,
) -> None:
    for dump in (one, two):
        if dump.strays:  # they are left alone, as 26.2.0 does; 8.1.1 stops
            said = f"{len(dump.strays)} entries beside the ranks are no rank directories: {_list_shortened(sorted(dump.strays))}."
            found.notes.append(f"{dump.root}: {said}")
        found.lost += missing_steps(dump, steps)
    found.lost += [] if steps else steps_on_one_side(one, two)
    chosen = [(a, b) for a, b in _steps(found, one, two) if not steps or a in steps]
    if steps - {a for a, _ in chosen}:
        found.lost.append(f"Steps {_list_shortened(sorted(steps - {a for a, _ in chosen}))} were asked for and are not in both dumps.")
    for a, b in chosen:
        found.lost += [sentence for dump, step in ((one, a), (two, b)) for sentence in missing_ranks(dump, step, ranks)]
        name = f"{folder}/step{a}" if mixed else f"step{a}" if len(one.steps) > 1 else folder
        for first, second in _ranks(found, one, two, a, b, ranks):
            _add_files(found, name, a, first, second)


def _steps(found: Sources, one: DumpDirectory, two: DumpDirectory) -> list[tuple[int, int]]:
    if len(one.steps) == len(two.steps) == 1:
        if one.steps != two.steps:
            found.notes.append(f"Step {one.steps[0]} is compared with step {two.steps[0]} of the golden dump: each has one step only.")
        return [(one.steps[0], two.steps[0])]
    return [(step, step) for step in one.steps if step in set(two.steps)]


def _ranks(
    found: Sources, one: DumpDirectory, two: DumpDirectory, a: int, b: int, ranks: frozenset[int]
) -> list[tuple[tuple[int | None, Path], tuple[int | None, Path]]]:
    """Pairs of (rank, directory)."""
    first, second = one.ranks(a), two.ranks(b)
    common = [rank for rank in first if rank in set(second)]
    pairs: list[tuple[int | str, int | str]]
    if len(first) != len(second) and 0 in (*first, *second) and (_is_one_process(first) or _is_one_process(second)):
        pairs = [(first[0], second[0])]
    elif common:
        pairs = [(rank, rank) for rank in common]
    elif len(first) == len(second) and (len(first) == 1 or all(isinstance(r, int) for r in (*first, *second))):
        pairs = list(zip(first, second))
        if len(first) > 1 or all(isinstance(r, int) for r in (*first, *second)):
            found.notes.append(f"Step {a}: no rank in common; paired in their order, {first[0]} with {second[0]} and so on.")
    else:
        pairs = []
        found.lost.append(
            f"Step {a}: ranks {_list_shortened(first)} against {_list_shortened(second)}: which belong together cannot be told."
        )
    if len(first) != len(second):
        found.notes.append(f"Step {a}: {len(first)} ranks against {len(second)}; the tables have the {len(pairs)} that both have.")
    for word, keys, used in (("target", first, {p for p, _ in pairs}), ("golden", second, {q for _, q in pairs})):
        alone = [key for key in keys if key not in used]
        if alone and pairs:
            found.lost.append(f"Step {a}: ranks only in the {word}: {_list_shortened(alone)}.")
    if ranks:
        own = {p: 0 if _is_one_process(first) else p for p, _ in pairs}
        missing = sorted(ranks - {rank for rank in own.values() if isinstance(rank, int)})
        pairs = [(p, q) for p, q in pairs if own[p] in ranks]
        if missing:
            found.lost.append(f"Step {a}: ranks {_list_shortened(missing)} were asked for and are not in both dumps.")
    return [(_locate_rank(one, a, p), _locate_rank(two, b, q)) for p, q in pairs]


def _is_one_process(ranks: Sequence[int | str]) -> bool:
    """A run of one process, whose directory (``proc{pid}``, ``rank``) does not say its rank: it is rank 0."""
    return len(ranks) == 1 and isinstance(ranks[0], str)


def _locate_rank(dump: DumpDirectory, step: int, key: int | str) -> tuple[int | None, Path]:
    return (key if isinstance(key, int) else None), dump.path(step, key)


def _add_files(found: Sources, folder: str, step: int, first: tuple[int | None, Path], second: tuple[int | None, Path]) -> None:
    (rank, one), (other, two) = first, second
    rank = other if rank is None else rank
    name = f"rank{rank}" if rank is not None else one.resolve().name
    kinds = [kind for kind in (layout.DUMP, layout.DEBUG) if _has(one, kind) and _has(two, kind)]
    for kind in kinds:
        found.tasks.append(Task(one / kind, two / kind, step, rank, folder, f"{_STEMS[kind]}_{name}"))
    if not kinds:
        found.lost.append(f"{one} and {two} have no file in common (dump.json or debug.json).")


def _has(directory: Path, kind: str) -> bool:
    names = (layout.FRAME_LOG, layout.MARKER) if kind == layout.DUMP else ()
    return has_step_file(directory / kind) or any((directory / name).exists() for name in names)


def _list_shortened(values: Sequence[Any]) -> str:
    return some([str(value)[:60] for value in values])
