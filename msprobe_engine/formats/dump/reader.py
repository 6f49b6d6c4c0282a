"""Reads dump directories: those of this tool and of the existing one, versions 8.1.1 and 26.2.0.

>>> dump = open_dump("out")                    # doctest: +SKIP
>>> step = dump.load(dump.steps[0], 0)         # doctest: +SKIP
>>> step.entries["Module.fc.Linear.forward.0"] # doctest: +SKIP
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from msprobe_engine.core import names
from msprobe_engine.core.errors import DumpFormatError, TextError, UnreadableFileError, UsageError
from msprobe_engine.core.io.input_files import open_input, read_input
from msprobe_engine.core.io.json_text import parse_json as parse_text
from msprobe_engine.core.io.regular_files import OddFileError
from msprobe_engine.core.log import one_line, warning
from msprobe_engine.core.process.garbage_collection import collection_paused
from msprobe_engine.formats.dump import frame_log, layout
from msprobe_engine.formats.dump.find_dumps import describe_content, find_dump, nearby
from msprobe_engine.formats.dump.parsed import DumpedEntry, DumpedTensor, EntryParser, StepDump
from msprobe_engine.formats.dump.stacks import stack_lines

__all__ = ["DumpDirectory", "DumpedEntry", "DumpedTensor", "StepDump", "load_rank_directory", "open_dump"]

Rank = int | str
"""A rank, or the name of a directory that does not say its rank (``rank``, ``proc{pid}``)."""

MOST_BYTES = 16 << 30
"""Of a file that is read at once; what is larger is in the layout that `formats.dump.stream` reads in blocks."""
_DATA_DIRECTORY = re.compile(rb'"dump_data_dir": *"[^"]*?(proc[0-9]+)/')


def open_dump(root: Path | str) -> DumpDirectory:
    """Open a dump by any of its paths: the output directory of a run, the root of a dump, a step directory, a rank directory, or its
    dump.json or debug.json.

    Raises:
        DumpFormatError: there is no dump at this path.
    """
    path = Path(root)
    require_visible(path)
    if path.name in (layout.DUMP, layout.DEBUG) and not path.is_dir():
        path = path.parent
    if not path.is_dir():
        what = "is no directory and no dump.json" if path.exists() else f"there is no such file or directory{nearby(Path(root))}"
        raise DumpFormatError(
            f"{root}: {what}; give a dump.json, the directory of a rank or a step, the root of a dump, or the output directory of a run"
        )
    found = find_dump(path)
    if found is None:
        raise DumpFormatError(f"{root}: no dump here; expected step{{N}}/rank{{R}}/dump.json, found {describe_content(path)}")
    return DumpDirectory(*found)


def require_visible(path: Path) -> None:
    """Raises:
    DumpFormatError: whether there is something cannot be seen: the name is too long, or a directory above is not ours.
    """
    try:
        path.exists()
    except OSError as error:
        raise DumpFormatError(f"{str(path)[:200]}: cannot be looked at ({error.strerror})") from None


class DumpDirectory:
    """The steps and ranks of one dump; files are read by `load`.

    26.2.0 leaves later steps in ``proc{pid}`` when the dump began before the process group, and renames the first one to
    ``rank{R}``: where the header of the renamed one still names the process, the other steps get their rank too.
    """

    def __init__(self, root: Path, ranks_found: Mapping[int | None, Mapping[str, Path | None]]) -> None:
        self.root = root
        self._empty = {step: sorted(name for name, path in ranks.items() if path is None) for step, ranks in ranks_found.items()}
        found = {step: {name: path for name, path in ranks.items() if path is not None} for step, ranks in ranks_found.items()}
        found = {step: ranks for step, ranks in found.items() if ranks}
        process_ranks = _process_ranks(found)
        self._found: dict[int | None, dict[Rank, Path]] = {}
        self._repeated: dict[int | None, list[str]] = {}
        for step, ranks in found.items():
            places = self._found[step] = {}
            for name, path in sorted(ranks.items()):
                rank = layout.rank_of(name)
                key: Rank = process_ranks.get(name, name) if rank is None else rank
                if key in places:
                    self._repeated.setdefault(step, []).append(f"{places[key].name} and {name}")
                    continue
                places[key] = path

    @property
    def steps(self) -> list[int]:
        """Steps, ascending. A rank directory outside a step directory counts as step 0."""
        return sorted(step or 0 for step in self._found)

    def ranks(self, step: int) -> list[Rank]:
        """Ranks of a step, ascending; directories that do not say their rank come last, by name.

        Raises:
            UsageError: no such step.
        """
        return sorted(self._ranks(step), key=lambda r: (isinstance(r, str), r if isinstance(r, int) else 0, str(r)))

    @cached_property
    def known_ranks(self) -> frozenset[int]:
        """Ranks of any step."""
        return frozenset(rank for ranks in self._found.values() for rank in ranks if isinstance(rank, int))

    @property
    def empty_steps(self) -> list[int]:
        """Steps, ascending, of which no directory of a rank holds a dump; `steps` has them not."""
        return sorted(step or 0 for step in self._empty if step not in self._found)

    def empty_ranks(self, step: int) -> list[str]:
        """Names of directories of ranks of a step that hold no dump."""
        return self._empty[None] if step == 0 and None in self._empty else self._empty.get(step, [])

    def repeated_ranks(self, step: int) -> list[str]:
        """Names of directories that are of one rank of a step (``rank0 and rank00``), the one that is read first."""
        return self._repeated.get(None if step == 0 and None in self._found else step, [])

    def _ranks(self, step: int) -> dict[Rank, Path]:
        if step in self._found:
            return self._found[step]
        if step == 0 and None in self._found:
            return self._found[None]
        raise UsageError(f"{self.root}: step {step} was not dumped; there are steps {_some(self.steps)}")

    def path(self, step: int, rank: Rank | None = None) -> Path:
        """The rank directory. `rank` None: the only one.

        Raises:
            UsageError: no such step or rank.
        """
        ranks = self._ranks(step)
        if rank is None and len(ranks) == 1:
            return next(iter(ranks.values()))
        if rank is None or rank not in ranks:
            raise UsageError(
                f"{self.root}: step {step} has ranks {_some(self.ranks(step))}; {'choose one' if rank is None else f'not {rank!r}'}"
            )
        return ranks[rank]

    def load(self, step: int, rank: Rank | None = None) -> StepDump:
        """Read one rank of one step. `rank` None: the only one.

        A step that was never finished is returned with ``complete`` False and what there is of it.

        Raises:
            DumpFormatError: a file is damaged and cannot be recovered; file and line are named.
            UsageError: no such step or rank.
        """
        return load_rank_directory(self.path(step, rank), step, rank if isinstance(rank, int) else None)


def _some(values: list[Any]) -> str:
    texts = [str(v) for v in values]
    return ", ".join(texts if len(texts) <= 12 else [*texts[:10], "...", texts[-1]])


def _process_ranks(found: Mapping[int | None, Mapping[str, Path]]) -> dict[str, int]:
    """``proc{pid}`` to rank, from headers of renamed directories that still name their process."""
    if not any(layout.process_of(name) is not None for ranks in found.values() for name in ranks):
        return {}
    known: dict[str, int] = {}
    for ranks in found.values():
        for name, path in ranks.items():
            rank = layout.rank_of(name)
            if rank is None:
                continue
            try:
                with open_input(path / layout.DUMP) as file:
                    m = _DATA_DIRECTORY.search(file.read(4096))
            except OSError:
                continue
            if m:
                known[m[1].decode()] = rank
    return known


def load_rank_directory(path: Path | str, step: int | None = None, rank: int | None = None) -> StepDump:
    """Read the dump in one rank directory; see `DumpDirectory.load`."""
    with collection_paused():
        return _load(Path(path), step, rank)


def _load(path: Path, step: int | None, rank: int | None) -> StepDump:
    step = layout.step_of(path.resolve().parent.name) if step is None else step
    rank = layout.rank_of(path.name) if rank is None else rank
    marked = (path / layout.MARKER).exists()
    file = path / (layout.DUMP if (path / layout.DUMP).exists() else layout.DEBUG)
    problem: DumpFormatError | None = None
    if file.exists():
        try:
            document = _object(read_json(file), file)
            complete = document.get("complete", True) is not False and not (marked and _older(file, path / layout.MARKER))
            stack, construct = (_companion(document, file, name) for name in layout.COMPANIONS)
            return _step_dump(path, step, rank, document, stack, construct, complete)
        except DumpFormatError as error:
            problem = error
    try:
        logged = frame_log.decode(read_bytes(path / layout.FRAME_LOG), str(path / layout.FRAME_LOG))
        document = _object(parse_json(logged.dump_json(str(path / layout.FRAME_LOG)), path / layout.FRAME_LOG), path / layout.FRAME_LOG)
        stack = parse_json(logged.stack or b"{}", path / layout.FRAME_LOG)
        construct = parse_json(logged.construct or b"{}", path / layout.FRAME_LOG)
        complete = document.get("complete", True) is not False
        dump = _step_dump(path, step, rank, document, stack, construct, complete, recovered=True)
        return dump if not complete or _tensors_are_there(dump) else replace(dump, complete=False)
    except (OSError, DumpFormatError, ValueError) as error:
        if problem is not None:
            raise problem from None
        if marked:
            return StepDump(path, step, rank, {}, {}, complete=False)
        if isinstance(error, DumpFormatError):
            raise
        raise DumpFormatError(
            f"{path}: neither {layout.DUMP} nor {layout.DEBUG} is here; give a directory that a dump was written to"
        ) from None


def _tensors_are_there(dump: StepDump) -> bool:
    """Does every tensor that the records of a killed process name have its file? The frame log is written at the step's end, tensor
    files by threads that may not have been through."""
    wanted = {tensor.data_name for entry in dump.entries.values() for _, tensor in entry.tensors()} - {None}
    if not wanted:
        return True
    from msprobe_engine.formats.tensors.reader import TensorFiles

    try:
        return wanted <= set(TensorFiles(dump.directory).names())
    except DumpFormatError:
        return False


def read_stacks(directory: Path) -> dict[str, tuple[str, ...]]:
    """Lines of the recorded stack by record name, of one rank directory; {} where the dump has none.

    Raises:
        DumpFormatError: the file is damaged.
    """
    file = directory / layout.STACK
    if not file.exists() and (directory / layout.DUMP).exists():
        return _stacks(read_inside(directory / layout.DUMP, layout.STACK), directory / layout.DUMP)
    return _stacks(_optional(file), file)


def framework_of(header: Mapping[str, Any], records: Iterable[object]) -> str:
    """``pytorch``, ``mindspore``, ``mindtorch``: what dump.json says, else what the tensors in its records are."""
    said = header.get("framework")
    if isinstance(said, str) and said:
        return said
    return "mindspore" if any('"type": "mindspore.' in json.dumps(record) for record in records) else "pytorch"


def _older(file: Path, marker: Path) -> bool:
    """True when `file` was left by an earlier run whose directory is being replaced."""
    try:
        return file.stat().st_mtime_ns < marker.stat().st_mtime_ns
    except OSError:
        return False


def _step_dump(
    path: Path,
    step: int | None,
    rank: int | None,
    document: dict[str, Any],
    stack: Any,
    construct: Any,
    complete: bool,
    recovered: bool = False,
) -> StepDump:
    where = str(path / layout.DUMP)
    data = document.get("data")
    if not isinstance(data, dict):
        raise DumpFormatError(f"{where}: key 'data' is {'missing' if data is None else 'no JSON object'}; this is no dump file")
    header = {key: value for key, value in document.items() if key != "data"}
    stacks = _stacks(stack, path / layout.STACK)
    nodes = _object(construct, path / layout.CONSTRUCT)
    parser = EntryParser(where, stacks, nodes, header)
    try:
        entries = {name: parser.entry(name, value) for name, value in data.items()}
    except RecursionError:
        raise DumpFormatError(f"{where}: nested too deeply; no dump of a training looks so, do not trust it") from None
    parents = names.node_parents(nodes)
    return StepDump(path, step, rank, header, entries, stacks, parents, complete, recovered)


def _stacks(document: Any, file: Path) -> dict[str, tuple[str, ...]]:
    found, odd = stack_lines(_object(document, file))
    if odd:
        warning(f"{one_line(str(file))}: {odd:,} stacks are no lists of lines of text and are left out")
    return {name: tuple(lines) for name, lines in found.items()}


def _object(document: Any, file: Path) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise DumpFormatError(f"{file}: holds a {type(document).__name__}; a JSON object is needed")
    return document


def _optional(file: Path) -> Any:
    return read_json(file) if file.exists() else {}


def _companion(document: dict[str, Any], file: Path, name: str) -> Any:
    return document.pop(name, {}) if layout.holds_inside(document, name) else _optional(file.parent / name)


def read_inside(file: Path, name: str) -> Any:
    """stack.json or construct.json that a dump.json holds; {} where it does not.

    Raises:
        FileNotFoundError, DumpFormatError: as `read_bytes`, or it is no JSON.
    """
    data = read_bytes(file)
    start = data.rfind(b'\n "%s": {' % name.encode())
    if start < 0:  # not there, or somebody has laid the file out in another way
        return _object(parse_json(data, file), file).get(name, {}) if name.encode() in data else {}
    start = data.index(b"{", start)
    return parse_json(data[start : data.find(b"\n", start)].rstrip(b","), file)


def read_json(file: Path) -> Any:
    """The JSON of a dump file; NaN and Infinity are accepted, as the format has them.

    Raises:
        DumpFormatError: it cannot be read or is no JSON; file, line and what to do are named.
    """
    try:
        data = read_bytes(file)
    except FileNotFoundError:
        raise DumpFormatError(f"{file}: is not there any more; does the run still write?") from None
    return parse_json(data, file)


def read_bytes(file: Path) -> bytes:
    """The content of a file of a dump.

    Raises:
        FileNotFoundError: it is not there.
        UnreadableFileError: it is a pipe or a device, which would never end.
        DumpFormatError: it cannot be read, or is larger than `MOST_BYTES`.
    """
    try:
        return read_input(file, MOST_BYTES)
    except FileNotFoundError:
        raise
    except OddFileError:
        raise UnreadableFileError(f"{file}: is no regular file; no dump has such a file, do not trust it") from None
    except OSError as error:
        raise DumpFormatError(f"{file}: cannot be read ({error.strerror}); check owner and mode") from None


def parse_json(data: bytes, file: Path, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """`read_json` of bytes; `file` is named in errors. `pairs` makes the objects, as `json.loads` has it."""
    if not data.strip():
        raise DumpFormatError(f"{file}: is empty; the run was stopped before it wrote this step. Leave the step out or dump it again")
    try:
        return parse_text(data, pairs)
    except TextError as error:
        if error.line is None:
            raise DumpFormatError(f"{file}: {error}; no dump of a training looks so, do not trust it") from None
        cut = error.at_end or not data.rstrip().endswith(b"}")
        cause = "it was cut off while being written (killed process or full disk)" if cut else "it is damaged or was edited"
        raise DumpFormatError(f"{file}: line {error.line}: {error.problem}; {cause}. Leave the step out or dump it again") from None
