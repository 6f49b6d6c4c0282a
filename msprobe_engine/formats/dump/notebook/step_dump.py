"""What a dump file says, as plain data, and how its JSON becomes that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from msprobe_engine.core import names
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.log import one_line, warning
from msprobe_engine.core.process.garbage_collection import collection_paused
from msprobe_engine.core.records import Opaque, TensorDescription, place_of
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.dump_table import WORDS_OF_NUMBERS, DumpTable
from msprobe_engine.formats.dump.rank_files import stack_lines, was_cut_off
from msprobe_engine.formats.dump.ring_file import has_step_file
from msprobe_engine.formats.dump.stream import open_records
from msprobe_engine.formats.tensors.reader import TensorFiles

Value = float | int | bool | None
_STATISTICS = ("Max", "Min", "Mean", "Norm")
_KNOWN = frozenset((*_STATISTICS, "type", "dtype", "shape", "requires_grad", "nan_count", "inf_count", "digest", "md5", "data_name"))
_SECTIONS = frozenset(("input_args", "input_kwargs", "output", "parameters", "input"))
_MAX_DEPTH = 100


class DumpedTensor(NamedTuple):
    """One tensor of a dump file. Statistics are None where the file has none; NaN and infinities are floats, and those of integer tensors
    are exact integers where the writer gave them."""

    description: TensorDescription
    max: Value
    min: Value
    mean: Value
    norm: Value
    nan_count: int | None = None
    """None: the writer did not count (the existing tool); 0: there are none."""
    inf_count: int | None = None
    digest: str | None = None
    """64-bit position-weighted digest, 16 hex digits (``summary_mode: digest``)."""
    md5: str | None = None
    """CRC-32 of the bytes, 8 hex digits (``summary_mode: md5``), or XOR of the words, ``0x...`` (``xor``)."""
    data_name: str | None = None
    """Name of the saved tensor, None when it was not saved."""

    @property
    def nonfinite(self) -> bool:
        """True when the statistics or the counts show NaN or Inf."""
        if self.nan_count or self.inf_count:
            return True
        return any(isinstance(v, float) and v - v != 0 for v in (self.max, self.min, self.mean))


class DumpedEntry(NamedTuple):
    """One record.

    Attributes:
        name: record name.
        sections: as in `msprobe_engine.core.records.Entry`, with `DumpedTensor` in place of references; a debug record has the
            one section ``""``.
        parent: from construct.json, None at the top or when not known.
        stack: call stack lines, innermost first, () when not known.
        micro_step: -1 when not known.
        tags: further keys of the record (``is_recompute``, ...).
    """

    name: str
    sections: dict[str, Any]
    parent: str | None
    stack: tuple[str, ...]
    micro_step: int
    tags: Mapping[str, Any]

    def tensors(self) -> Iterator[tuple[str, DumpedTensor]]:
        """The tensors with their place: ``input.0``, ``kwargs.mask``, ``output.0.1``, ``parameters.weight``, a parameter's name in
        gradient records, ``""`` or ``0.k`` in debug records."""
        gradients = isinstance(names.parse(self.name), names.ParametersGradName)
        for section, node in self.sections.items():
            if gradients and isinstance(node, list) and len(node) == 1:
                node = node[0]  # the format wraps each gradient in a list; its file has no index
            yield from _walk(place_of(section), node)


def _walk(place: str, node: Any) -> Iterator[tuple[str, DumpedTensor]]:
    if isinstance(node, DumpedTensor):
        yield place, node
    elif isinstance(node, (dict, list)):
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _walk(f"{place}.{key}" if place else str(key), child)


@dataclass(frozen=True)
class StepDump:
    """One rank's dump of one step as nested records, for scripts and notebooks: what `DumpTable` has as columns.

    Attributes:
        table: the file's header, what lies beside it and the saved tensors; without rows.
        step, rank: None when the directory name does not say.
        entries: records in file order (order of completion), by name.
        stacks: record name to call stack lines, innermost first.
        construct: node to parent; also nodes that are no record.
        complete: everything of the step is here.
    """

    table: DumpTable
    step: int | None
    rank: int | None
    entries: dict[str, DumpedEntry]
    stacks: dict[str, tuple[str, ...]]
    construct: dict[str, str | None]
    complete: bool

    @property
    def directory(self) -> Path:
        """Where it was read from."""
        return self.table.path.parent

    @property
    def header(self) -> dict[str, Any]:
        """All keys of the file but ``data``: task, level, framework, dump_data_dir, ..."""
        return self.table.header

    @property
    def recovered(self) -> bool:
        """Read from the frame log of a process that was killed before it could write the files."""
        return self.table.recovered

    @property
    def task(self) -> str:
        """``statistics``, ``tensor``, ``structure``, ...; ``statistics`` when the file does not say."""
        return self.table.task

    @property
    def level(self) -> str:
        """``L0``, ``L1``, ``mix``, ``debug``; ``""`` when the file does not say."""
        return str(self.header.get("level", ""))

    @property
    def framework(self) -> str:
        """``pytorch``, ``mindspore``, ``mindtorch``; ``""`` when the file does not say."""
        return str(self.header.get("framework", ""))

    @property
    def files(self) -> TensorFiles:
        """The saved tensors, by ``data_name``, whatever their format."""
        return self.table.files


def load_rank_directory(path: Path | str, step: int | None = None, rank: int | None = None) -> StepDump:
    """Read the dump in one rank directory; see `DumpDirectory.load`."""
    path = Path(path)
    step = layout.step_of(path.resolve().parent.name) if step is None else step
    rank = layout.rank_of(path.name) if rank is None else rank
    debug = not (path / layout.DUMP).exists() and (path / layout.DEBUG).exists()
    table = DumpTable(path / (layout.DEBUG if debug else layout.DUMP))
    try:
        with collection_paused():
            return _load(table, step, rank)
    except DumpFormatError:
        if has_step_file(table.path) or not (path / layout.MARKER).exists():
            raise
        return StepDump(table, step, rank, {}, {}, {}, False)


def _load(table: DumpTable, step: int | None, rank: int | None) -> StepDump:
    with open_records(table.path) as records:
        data = {name: record for block in records for name, record in block.items()}
    table.header, table.recovered = records.header, records.recovered
    lines, odd = stack_lines(table.companion(layout.STACK))
    if odd:
        warning(f"{one_line(str(table.path.parent / layout.STACK))}: {odd:,} stacks are no lists of lines of text and are left out")
    stacks = {name: tuple(said) for name, said in lines.items()}
    nodes = table.companion(layout.CONSTRUCT)
    parser = EntryParser(str(table.path), stacks, nodes, table.header)
    try:
        entries = {name: parser.entry(name, value) for name, value in data.items()}
    except RecursionError:
        raise DumpFormatError(f"{table.path}: nested too deeply; no dump of a training looks so, do not trust it") from None
    complete = not was_cut_off(table.path, table.header, table.recovered) and (not table.recovered or _tensors_are_there(table, entries))
    return StepDump(table, step, rank, entries, stacks, names.node_parents(nodes), complete)


def _tensors_are_there(table: DumpTable, entries: Mapping[str, DumpedEntry]) -> bool:
    """Does every tensor that the records of a killed process name have its file? The frame log is written at the step's end, tensor
    files by threads that may not have been through."""
    wanted = {tensor.data_name for entry in entries.values() for _, tensor in entry.tensors()} - {None}
    try:
        return not wanted or wanted <= set(table.files.names())
    except DumpFormatError:
        return False


class EntryParser:
    """Makes entries of the ``data`` object of one file."""

    def __init__(self, where: str, stacks: Mapping[str, tuple[str, ...]], construct: Mapping[str, Any], header: Mapping[str, Any]) -> None:
        self._where = where
        self._no_count = 0 if header.get("nonfinite_counts") is True else None
        self._stacks = stacks
        self._construct = construct
        self._default_step = 0 if isinstance(header.get("micro_steps"), int) else -1
        self._counted = False
        self._descriptions: dict[Any, TensorDescription] = {}

    def entry(self, name: str, data: Any) -> DumpedEntry:
        """One record. Raises DumpFormatError when it is no JSON object (list in debug records)."""
        parsed = names.parse(name)
        tags: dict[str, Any] = {}
        sections: dict[str, Any] = {}
        micro_step = self._default_step
        if isinstance(parsed, names.DebugName):
            sections[""] = self.structure(data, name, 0)
        elif not isinstance(data, dict):
            raise self._error(name, f"is a {type(data).__name__}; it must be a JSON object. The file is damaged")
        else:
            gradients = isinstance(parsed, names.ParametersGradName)
            for key, value in data.items():
                if key in _SECTIONS or (gradients and isinstance(value, (list, dict))):
                    sections[key] = self.structure(value, name, 0)
                elif key == "tags" and isinstance(value, dict):
                    tags |= value
                else:
                    tags[key] = value
            if isinstance(tags.get("micro_step"), int):
                micro_step = tags.pop("micro_step")
        node = self._construct.get(name)
        said = names.node_micro_step(node)
        micro_step = micro_step if said is None else said
        return DumpedEntry(name, sections, names.node_parent(node), self._stacks.get(name, ()), micro_step, tags)

    def _error(self, name: str, what: str) -> DumpFormatError:
        return DumpFormatError(f"{self._where}: record {name[:120]!r} {what}")

    def structure(self, node: Any, name: str, depth: int) -> Any:
        """Nested arguments: list, dict, `DumpedTensor`, `Opaque`, None."""
        if depth > _MAX_DEPTH:
            raise self._error(name, f"is nested deeper than {_MAX_DEPTH}; no dump of a training looks so, do not trust it")
        if node is None:
            return None
        if isinstance(node, list):
            return [self.structure(child, name, depth + 1) for child in node]
        if isinstance(node, dict):
            if isinstance(node.get("type"), str):
                return self._tensor(node, name) if "dtype" in node or "shape" in node or "Max" in node else Opaque(node)
            return {key: self.structure(child, name, depth + 1) for key, child in node.items()}
        return Opaque(node)

    def _tensor(self, node: dict[str, Any], name: str) -> DumpedTensor:
        shape, data_name = node.get("shape"), node.get("data_name")
        if shape is not None and not (isinstance(shape, list) and all(isinstance(n, int) and -1 <= n < 1 << 63 for n in shape)):
            raise self._error(
                name, f"has a tensor of shape {_format_value(shape)}; a list of integers >= 0, or -1 for a symbolic size, is allowed"
            )
        if not isinstance(data_name, str) or data_name == "-1":
            data_name = None
        else:
            names.check_file_name(data_name, self._where)
        grad = node.get("requires_grad")
        extra = tuple((key, value) for key, value in node.items() if key not in _KNOWN)
        shown = str(node["type"]), str(node.get("dtype")), tuple(shape or ())
        description = TensorDescription(*shown, grad if isinstance(grad, bool) else None, "", extra)
        if not extra:
            description = self._descriptions.setdefault(description, description)
        top, bottom, mean, norm = (self._value(node.get(key), key, name) for key in _STATISTICS)
        nans, infs = self._count(node, "nan_count", name), self._count(node, "inf_count", name)
        digest, md5 = node.get("digest"), node.get("md5")
        digest = digest if isinstance(digest, str) else None
        return DumpedTensor(description, top, bottom, mean, norm, nans, infs, digest, None if md5 is None else str(md5), data_name)

    def _count(self, node: dict[str, Any], key: str, name: str) -> int | None:
        value = node.get(key)
        if value is None:
            return self._no_count
        if isinstance(value, int) and 0 <= value < 1 << 63:
            return int(value)
        raise self._error(name, f"has {key} = {_format_value(value)}; an integer >= 0 is allowed")

    def _value(self, value: Any, key: str, name: str) -> Value:
        if value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 64):
            return value
        if isinstance(value, str) and value in WORDS_OF_NUMBERS:
            return WORDS_OF_NUMBERS[value]
        if isinstance(value, str) and value in ("N/A", "None", ""):
            return None
        raise self._error(name, f"has {key} = {_format_value(value)}; a number of at most 64 bits, null or 'NaN' is allowed")


def _format_value(value: Any) -> str:
    """A short text of a value that may be anything, huge integers too (whose text Python refuses to make)."""
    try:
        return repr(value)[:80]
    except ValueError:
        return f"an integer of {value.bit_length()} bits"


KINDS = ("api", "module", "collective", "parameters_grad", "debug")
"""Kinds of records. ``debug`` is what the user saved by name; a name of no known form counts as ``api``."""


def kind_of(name: str) -> str:
    """One of `KINDS`, by the form of the name."""
    parsed = names.parse(name)
    if isinstance(parsed, names.ModuleName):
        return "module"
    if isinstance(parsed, names.ParametersGradName):
        return "parameters_grad"
    if isinstance(parsed, names.DebugName):
        return "debug"
    return "collective" if names.is_collective(name) else "api"
