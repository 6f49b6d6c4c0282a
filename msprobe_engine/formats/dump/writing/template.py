"""From entries to the template of a dump file, and the cache that makes this work rare.

The entries of a step mostly look like those of the step before. `LayoutCache.find` compares them with the layouts seen lately
(C, a fraction of a millisecond for thousands of tensors) and only builds a new one when something differs; entries that did not
change keep their text even then.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from msprobe_engine.core import names
from msprobe_engine.core.records import Entry, Opaque, TensorRef, place_of
from msprobe_engine.formats.dump.writing import text as _text
from msprobe_engine.formats.dump.writing.tensor_names import file_name, holds_gradients
from msprobe_engine.formats.dump.writing.text import Float64, Int32, Template

_log = logging.getLogger("msprobe.dump")
_quoted = json.encoder.encode_basestring_ascii  # json.dumps of a str, without the way through the encoder
Flags = npt.NDArray[np.bool_]
_ENTRY_DEPTH = 2  # indentation of a record name in dump.json


class Options(NamedTuple):
    """What of an entry is written.

    Attributes:
        data_mode: subset of ``input``, ``output``, ``forward``, ``backward``; ``("all",)``: everything. An axis that is not named is
            not filtered. Input only leaves ``parameters`` out, as 26.2.0 does.
        saves: says whether the tensors of a record are saved and get the name of their file; None: no record's are.
        suffix: of tensor files.
        summary_mode: ``md5`` adds the CRC-32 to the statistics of tensors, ``xor`` writes the XOR in place of them; ``statistics``
            and ``digest`` are the same here.
    """

    data_mode: tuple[str, ...] = ("all",)
    saves: Callable[[str], bool] | None = None
    suffix: str = ".pt"
    summary_mode: str = "statistics"

    def sections(self, entry: Entry) -> list[str]:
        """The sections of `entry` that are written; empty: the entry is left out."""
        if not self.data_mode or "all" in self.data_mode:
            return list(entry.sections)
        mode = set(self.data_mode)
        direction = names.direction(entry.name)
        if direction is not None and mode & {names.FORWARD, names.BACKWARD} and direction not in mode:
            return []
        kinds = mode & {"input", "output"}
        if len(kinds) != 1:
            return list(entry.sections)
        dropped: tuple[str, ...] = ("output",) if kinds == {"input"} else ("input", "input_args", "input_kwargs")
        if "forward" in mode and kinds == {"input"}:
            dropped = ("output", "parameters")
        return [s for s in entry.sections if s not in dropped]


class EntryText(NamedTuple):
    """The text of one entry, with its operations counted from its own beginning."""

    entry: Entry
    text: str
    ops: Int32
    slots: list[int]
    floats: list[float]
    saved: list[bool]


@dataclass(frozen=True)
class Layout:
    """Everything of a list of entries but numbers.

    Attributes:
        entries: the list this was made from.
        data: template of the ``data`` object of dump.json.
        n_slots, n_floats: number of tensors and float scalars.
        construct: text of construct.json.
        micro_steps: number of micro batches, 1 when unknown.
        saved: [n_slots] bool, which tensors have a row that is saved.
    """

    entries: list[Entry]
    data: Template
    n_slots: int
    n_floats: int
    construct: str
    micro_steps: int = 1
    saved: Flags | None = None
    stack_files: list[tuple[list[list[str]], str]] = field(default_factory=list, compare=False)

    def stack(self, stacks: list[list[str]]) -> str:
        """Text of stack.json for these stacks; the last one is remembered."""
        if not self.stack_files or self.stack_files[0][0] != stacks:
            self.stack_files[:] = [(stacks, _stack_json(self.entries, stacks))]
        return self.stack_files[0][1]


class LayoutCache:
    """Layouts seen lately. Not safe for concurrent use: the caller holds a lock.

    Args:
        micro_steps: write construct.json as 26.2.0 does for Megatron, ``{node: [parent, micro step]}``.
        size: how many layouts are kept (training, validation, first and last micro batch, ...).
    """

    MAX_ENTRIES = 200_000

    def __init__(self, options: Options, micro_steps: bool = False, size: int = 4) -> None:
        self._options = options
        self._micro_steps = micro_steps
        self._size = size
        self._layouts: list[Layout] = []
        self._entries: dict[str, EntryText] = {}

    def find(
        self, entries: list[Entry], level: str, rows: Flags | None = None, lost: frozenset[str] = frozenset()
    ) -> tuple[Layout, Int32, Float64]:
        """The layout of `entries`, the rows of its tensors ([n_slots] int32, -1: none) and its float scalars ([n_floats]).

        Args:
            rows: [n] bool, whether a row is saved; the last one False, for rows behind the end. None: nothing is saved.
            lost: file names that are missing although their row is saved.
        """
        if lost:
            return self._build(list(entries), level, rows, lost)
        for i, layout in enumerate(self._layouts):
            slots, floats = np.empty(layout.n_slots, np.int32), np.empty(layout.n_floats, np.float64)
            if _text.same_layout(entries, layout.entries, slots, floats) and _same_saved(layout.saved, slots, rows):
                if i:
                    self._layouts.insert(0, self._layouts.pop(i))
                return layout, slots, floats
        layout, slots, floats = self._build(list(entries), level, rows, lost)
        self._layouts.insert(0, layout)
        del self._layouts[self._size :]
        return layout, slots, floats

    def _build(self, entries: list[Entry], level: str, rows: Flags | None, lost: frozenset[str]) -> tuple[Layout, Int32, Float64]:
        pieces: dict[str, tuple[EntryText, int, int]] = {}
        slots: list[int] = []
        floats: list[float] = []
        saved: list[bool] = []
        for entry in entries:
            piece = self.entry(entry, rows) if not lost else entry_text(entry, self._options, rows, lost)
            if piece.text:
                if entry.name in pieces:
                    _log.warning("record '%s' was seen twice in one step; the dump keeps the later one", entry.name)
                    del pieces[entry.name]
                pieces[entry.name] = (piece, len(slots), len(floats))
            slots += piece.slots
            floats += piece.floats
            saved += piece.saved
        if len(self._entries) > self.MAX_ENTRIES:
            self._entries.clear()
        kept = list(pieces.values())
        texts = [piece.text for piece, _, _ in kept]
        ops = np.concatenate([np.zeros((0, 4), np.int32), *(piece.ops for piece, _, _ in kept)])
        if len(ops):
            counts = np.array([len(piece.ops) for piece, _, _ in kept])
            lengths = np.array([len(text) for text in texts])
            starts = 2 + np.cumsum(lengths + 2) - (lengths + 2)  # behind "{\n", each text followed by ",\n"
            first_slot, first_float = (np.repeat([p[k] for p in kept], counts) for k in (1, 2))
            ops[:, 0] += np.repeat(starts, counts).astype(np.int32)
            ops[:, 3] += np.where(ops[:, 1] == _text.SCALAR, first_float, first_slot).astype(np.int32)
        body = "{\n" + ",\n".join(texts) + "\n }" if texts else "{}"
        template = Template(body.encode("ascii"), np.ascontiguousarray(ops))
        construct = "{}" if level == "L1" else _construct_json(entries, self._micro_steps)
        micro_steps = max([0, *(e.micro_step for e in entries)]) + 1
        flags = None if rows is None else np.array(saved, np.bool_)
        layout = Layout(entries, template, len(slots), len(floats), construct, micro_steps, flags)
        return layout, np.array(slots, np.int32), np.array(floats, np.float64)

    def entry(self, entry: Entry, rows: Flags | None) -> EntryText:
        """The text of one entry; `rows`: see `find`."""
        known = self._entries.get(entry.name)
        if known is not None:
            slots, floats = np.empty(len(known.slots), np.int32), np.empty(len(known.floats), np.float64)
            saved = None if rows is None else np.array(known.saved, np.bool_)
            if _text.same_layout([entry], [known.entry], slots, floats) and _same_saved(saved, slots, rows):
                return known._replace(slots=slots.tolist(), floats=floats.tolist())
        made = entry_text(entry, self._options, rows)
        self._entries[entry.name] = made
        return made


def _same_saved(saved: Flags | None, slots: Int32, rows: Flags | None) -> bool:
    """Do the rows in `slots` have files as `saved` says?"""
    if rows is None or saved is None:
        return rows is saved
    return bool((rows[np.minimum(slots, len(rows) - 1)] == saved).all())


def entry_text(entry: Entry, options: Options, rows: Flags | None = None, lost: frozenset[str] = frozenset()) -> EntryText:
    """The text of one entry as a member of ``data``; empty when `options` leave the entry out. `rows`, `lost`: see `LayoutCache.find`."""
    builder = _Builder(entry.name, options, rows, lost)
    wanted = options.sections(entry)
    saved = isinstance(names.parse(entry.name), names.DebugName)
    builder.add_text(f"{' ' * _ENTRY_DEPTH}{json.dumps(entry.name)}: ")
    if not saved:
        builder.add_text("{")
    first = True
    for section, structure in entry.sections.items():
        kept = len(builder.parts), builder.length, len(builder.ops)
        if saved:  # a debug record is the variable itself
            builder.structure(structure, _ENTRY_DEPTH, "" if len(entry.sections) == 1 else section)
            continue
        if structure is None and section == "output":
            structure = [None]  # as 26.2.0 writes a call without a result: the overflow levels of both versions end with an error at null
        builder.add_text(f"{'' if first else ','}\n{' ' * (_ENTRY_DEPTH + 1)}{json.dumps(section)}: ")
        builder.structure(structure, _ENTRY_DEPTH + 1, place_of(section))
        if section in wanted:
            first = False
        else:  # its tensors keep their slots, its text goes
            builder.remove_text(*kept)
    if not saved:
        for key, value in _facts(entry).items():
            builder.add_text(f"{'' if first else ','}\n{' ' * (_ENTRY_DEPTH + 1)}{json.dumps(key)}: {json_text(value, _ENTRY_DEPTH + 1)}")
            first = False
        builder.add_text("}" if first else f"\n{' ' * _ENTRY_DEPTH}}}")
    if (not wanted and entry.sections) or "node_only" in entry.tags:
        return EntryText(entry, "", np.zeros((0, 4), np.int32), builder.slots, builder.floats, builder.saved)
    ops = np.array(builder.ops, np.int32).reshape(-1, 4)
    return EntryText(entry, "".join(builder.parts), ops, builder.slots, builder.floats, builder.saved)


def _facts(entry: Entry) -> dict[str, Any]:
    """Further keys of a record. The existing tool's compare looks for a checksum in every value and stops with an error at a number,
    also in a list; so what is no text and no bool is within the object ``tags``."""
    plain = {str(key): value for key, value in entry.tags.items() if isinstance(value, (bool, str))}
    inner = {str(key): value for key, value in entry.tags.items() if not isinstance(value, (bool, str))}
    if entry.micro_step > 0:
        inner["micro_step"] = entry.micro_step
    return {**plain, "tags": inner} if inner else plain


class _Builder:
    """Collects text and operations."""

    def __init__(self, name: str, options: Options, rows: Flags | None, lost: frozenset[str]) -> None:
        self.saved: list[bool] = []
        self._rows = rows if rows is not None and options.saves is not None and options.saves(name) else None
        self._all_rows = rows
        self._lost = lost
        self._gradients = holds_gradients(name)
        self.parts: list[str] = []
        self.length = 0
        self.ops: list[tuple[int, int, int, int]] = []
        self.slots: list[int] = []
        self.floats: list[float] = []
        self._name = name
        self._options = options

    def add_text(self, part: str) -> None:
        self.parts.append(part)
        self.length += len(part)

    def remove_text(self, parts: int, length: int, ops: int) -> None:
        """Take back text, not slots."""
        del self.parts[parts:]
        del self.ops[ops:]
        self.length = length

    def structure(self, node: Any, depth: int, place: str) -> None:
        """A nested argument; `depth` is the indentation of the line it starts on."""
        if isinstance(node, TensorRef):
            self._tensor(node, depth + 1, place)
        elif isinstance(node, Opaque):
            self._opaque(node.json, depth)
        elif node is None or depth > _text.MAX_DEPTH - 4:
            self.add_text("null")
            _count(node, self.slots, self.floats, depth)
            self.saved += [False] * (len(self.slots) - len(self.saved))
        elif isinstance(node, (dict, list)):
            members: list[tuple[str, str, Any]]
            if isinstance(node, dict):
                opening, closing = "{", "}"
                members = [(f"{json.dumps(str(k))}: ", str(k), v) for k, v in node.items()]
            else:
                opening, closing = "[", "]"
                members = [("", str(i), v) for i, v in enumerate(node)]
            self.add_text(opening)
            for i, (key, part, child) in enumerate(members):
                self.add_text(f"{',' if i else ''}\n{' ' * (depth + 1)}{key}")
                self.structure(child, depth + 1, f"{place}.{part}" if place else part)
            self.add_text(f"\n{' ' * depth}{closing}" if members else closing)
        else:
            self.add_text(json_text(node, depth))

    def _opaque(self, value: Any, depth: int) -> None:
        scalar = _text.scalar(value)
        if scalar is None:
            self.add_text(json_text(value, depth))
            return
        indent = " " * (depth + 1)
        head = ",\n".join(f'{indent}"{key}": {{}}' for key in value)
        before, _, after = head.replace('"type": {}', '"type": "float"').partition("{}")
        self.add_text("{\n" + before)
        self.ops.append((self.length, _text.SCALAR, 0, len(self.floats)))
        self.floats.append(scalar)
        self.add_text(f"{after}\n{' ' * depth}}}")

    def _tensor(self, ref: TensorRef, depth: int, place: str) -> None:
        description, indent = ref.description, " " * depth
        shape = json_text(list(description.shape), depth)
        self.add_text(f'{{\n{indent}"type": {json.dumps(description.type)},\n{indent}"dtype": {json.dumps(description.dtype)},\n')
        self.add_text(f'{indent}"shape": {shape},\n')
        kind = _text.BOOLEAN if description.dtype.rpartition(".")[2].lower().startswith("bool") else _text.NUMERIC
        # the existing tool takes no checksum of a numpy array
        mode = "statistics" if description.type == "numpy.ndarray" else self._options.summary_mode
        if mode == "xor":
            kind = _text.XOR
        self.ops.append((self.length, kind, depth, len(self.slots)))
        if description.requires_grad is not None:
            self.add_text(f',\n{indent}"requires_grad": {"true" if description.requires_grad else "false"}')
        data_name = self._data_name(ref.row, place)
        if data_name:
            self.add_text(f',\n{indent}"data_name": {json.dumps(data_name)}')
        if mode == "md5":
            self.ops.append((self.length, _text.CRC, depth, len(self.slots)))
        for key, value in description.extra:
            self.add_text(f",\n{indent}{json.dumps(str(key))}: {json_text(value, depth)}")
        if kind == _text.BOOLEAN:
            self.ops.append((self.length, _text.TRUES, depth, len(self.slots)))
        self.ops.append((self.length, _text.TAIL, depth, len(self.slots)))
        self.slots.append(ref.row if ref.row >= 0 else -1)
        self.saved.append(_has(self._all_rows, ref.row))
        self.add_text(f"\n{' ' * (depth - 1)}}}")

    def _data_name(self, row: int, place: str) -> str | None:
        if not _has(self._rows, row):
            return None
        name = file_name(self._name, place, self._options.suffix, self._gradients)
        return None if name in self._lost else name


def _has(rows: Flags | None, row: int) -> bool:
    return rows is not None and 0 <= row < len(rows) and bool(rows[row])


def _count(node: Any, slots: list[int], floats: list[float], depth: int) -> None:
    """Slots of what is too deep to be written, so that `same_layout` counts alike."""
    if isinstance(node, TensorRef):
        slots.append(-1)
    elif isinstance(node, Opaque):
        value = _text.scalar(node.json)
        if value is not None:
            floats.append(value)
    elif isinstance(node, (dict, list)) and depth < 4 * _text.MAX_DEPTH:
        for child in node.values() if isinstance(node, dict) else node:
            _count(child, slots, floats, depth + 1)


def json_text(value: Any, depth: int) -> str:
    """``json.dumps(value, indent=1)`` on a line that is indented by `depth`. What json cannot write becomes
    ``{"type": "<its type>"}``: one odd argument must not cost the step."""
    try:
        text = json.dumps(value, indent=1)
    except (TypeError, ValueError, RecursionError, OverflowError):
        text = json.dumps({"type": f"{type(value).__module__}.{type(value).__qualname__}"}, indent=1)
    return text.replace("\n", "\n" + " " * depth) if depth else text


def _stack_json(entries: Sequence[Entry], stacks: list[list[str]]) -> str:
    """``{number: [[record names], [lines]]}``, equal stacks merged, forward records only."""
    merged: dict[tuple[str, ...], list[str]] = {}
    for entry in entries:
        if 0 <= entry.stack < len(stacks) and names.direction(entry.name) == names.FORWARD:
            merged.setdefault(tuple(stacks[entry.stack]), []).append(entry.name)
    return json_text({str(i): [list(dict.fromkeys(seen)), list(lines)] for i, (lines, seen) in enumerate(merged.items())}, 0)


def _construct_json(entries: Sequence[Entry], micro_steps: bool) -> str:
    """``{node: parent}``; parents that are no record (``optimizer``, modules that were not asked for) are roots."""
    known = {entry.name for entry in entries}
    nodes: dict[str, Any] = {}
    for entry in entries:
        if names.direction(entry.name) is None or isinstance(names.parse(entry.name), (names.ParametersGradName, names.DebugName)):
            continue
        if entry.parent is not None and entry.parent not in known and entry.parent not in nodes:
            nodes[entry.parent] = [None, max(entry.micro_step, 0)] if micro_steps else None
        nodes[entry.name] = [entry.parent, max(entry.micro_step, 0)] if micro_steps else entry.parent
    if micro_steps:
        nodes[names.MICRO_STEP_KEY] = max((e.micro_step for e in entries), default=0) + 1
    if micro_steps:
        return json_text(nodes, 0)
    lines = [f" {_quoted(name)}: {'null' if parent is None else _quoted(parent)}" for name, parent in nodes.items()]
    return "{\n" + ",\n".join(lines) + "\n}" if lines else "{}"
