"""What differs between two dumps of the same training, cell by cell; loaded as plain JSON, without any reader of this project.

`load` reads one rank directory, `differences` walks two of them and names every difference by its kind:

| kind | what |
| --- | --- |
| `missing`, `extra` | a record that only they, only we have |
| `name` | a record that has another name there |
| `order` | a record that comes at another place among those that both have |
| `key missing`, `key extra` | a key of a record or of a tensor that only they, only we have |
| `length` | lists of different length |
| `null` | a value here, null there |
| `type`, `dtype`, `shape`, `flag` | type text, dtype, shape, requires_grad of a tensor |
| `value` | a statistic beyond rounding, or a scalar |
| `checksum` | the md5 field |
| `file` | data_name of a tensor |
| `dangling` | a data_name of ours without its file, or a file without a data_name |
| `content` | the bits of a saved tensor (found by `suite`, which reads the files) |
| `header` | the keys in front of the records |
| `stack missing`, `stack extra`, `stack` | call stacks of a record |
| `node missing`, `node extra`, `parent` | construct.json |
| `layout` | which files a rank directory has |
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

Json = dict[str, Any]
_STATISTICS = ("Max", "Min", "Mean", "Norm")
_ROUNDING = 2e-6
"""Relative; sums of float32 numbers in another order."""
ROUNDING = 1e-4
"""What another processor may round otherwise, of the tensor's own size."""
CANCELLED = 1e-5
"""Of the largest tensor in the record: what is zero but for round-off (the gradient of a key's bias: softmax does not see it) has any
value below that."""


@dataclass
class RankDump:
    """One rank directory, raw.

    Attributes:
        header: dump.json (debug.json) without its data.
        data: its records, in file order.
        stacks: record name -> lines, innermost first.
        construct: node -> parent, in file order.
        files: names in the directory, `dump_tensor_data` without its content.
        tensors: names in ``dump_tensor_data``.
    """

    header: Json = field(default_factory=dict)
    data: Json = field(default_factory=dict)
    stacks: dict[str, list[str]] = field(default_factory=dict)
    construct: Json = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)
    directory: Path | None = None


class Difference(NamedTuple):
    """One difference. `place` is the path inside the record (``input_args.0.Max``); `whole` gives the two tensors it belongs to."""

    kind: str
    record: str
    place: str = ""
    ours: Any = None
    theirs: Any = None
    whole: tuple[Any, Any] = (None, None)

    def __str__(self) -> str:
        return f"{self.kind}: {self.record} {self.place}: ours {_short(self.ours)}, theirs {_short(self.theirs)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 150 else text[:147] + "..."


@dataclass(frozen=True)
class Context:
    """Where a difference was found, and whether ours and theirs are of different machines."""

    cell: Any
    version: str
    ours: RankDump
    theirs: RankDump
    other_machine: bool = False


@dataclass(frozen=True)
class Rule:
    """One reasoned difference."""

    id: str
    sentence: str
    applies: Callable[[Difference, Context], bool]


def load(directory: Path) -> RankDump:
    """Read a rank directory. Stacks and ``dump_data_dir`` lose what names the machine or the process."""
    dump = RankDump(directory=directory, files=sorted(p.name for p in directory.iterdir()))
    for name in ("dump.json", "debug.json"):
        if (directory / name).exists():
            dump.header = json.loads((directory / name).read_text())
            dump.data = dump.header.pop("data")
            if dump.header.get("dump_data_dir"):
                place = re.sub(r"/proc\d+/", "/proc/", os.path.normpath(dump.header["dump_data_dir"]))
                dump.header["dump_data_dir"] = place[max(place.find("dump/step"), 0) :]  # absolute here, as dump_path has it there
    if (directory / "stack.json").exists():
        dump.stacks = stacks_of(json.loads(neutral((directory / "stack.json").read_text())))
    if (directory / "construct.json").exists():
        dump.construct = json.loads((directory / "construct.json").read_text())
    if (directory / "dump_tensor_data").is_dir():
        dump.tensors = sorted(p.name for p in (directory / "dump_tensor_data").iterdir())
    return dump


def neutral(text: str) -> str:
    """The text of a stack.json without the directories of the machine: two environments have the same stacks."""
    text = re.sub(r"File [^ ,]*?/(?:site|dist)-packages/", "File /env/", text)
    text = re.sub(r"File [^ ,]*?/lib/python3\.\d+/", "File /python/", text)
    return re.sub(r"File [^ ,]*?/tests/(?:mindspore/)?compat/", "File /job/", text)


def stacks_of(document: Json) -> dict[str, list[str]]:
    """Record name -> lines, from ``{"0": [[names], [lines]]}``.

    Raises:
        AssertionError: the document has another shape, or a record has two stacks.
    """
    found: dict[str, list[str]] = {}
    for key, group in document.items():
        assert key.isdigit()
        names, lines = group
        for name in names:
            assert name not in found
            found[name] = lines
    return found


def differences(ours: RankDump, theirs: RankDump) -> list[Difference]:
    """Every difference between two rank directories. Where a record of theirs has its number left out (8.1.1: ``X.parameters_grad``),
    it is compared with our last one of that name."""
    named = {name: _numbered(name, ours.data) for name in theirs.data if name not in ours.data and _numbered(name, ours.data)}
    found = [Difference("name", new, "", new, old) for old, new in named.items()]
    if named:
        theirs = replace(theirs, data={named.get(name, name): record for name, record in theirs.data.items()})
    found += [Difference("layout", "", name, True, None) for name in ours.files if name not in theirs.files]
    found += [Difference("layout", "", name, None, True) for name in theirs.files if name not in ours.files]
    found += [Difference("dangling", owner(name, ours.data), name) for name in sorted(set(ours.tensors) ^ set(_file_names(ours.data)))]
    found += _mapping("header", "", ours.header, theirs.header)
    found += [Difference("missing", name) for name in theirs.data if name not in ours.data]
    found += [Difference("extra", name) for name in ours.data if name not in theirs.data]
    found += [Difference("order", name) for name in moved(list(ours.data), list(theirs.data), _firmness)]
    for name, record in theirs.data.items():
        if name in ours.data:
            found += _walk(name, "", ours.data[name], record)
    found += [Difference("stack missing", name) for name in theirs.stacks if name not in ours.stacks]
    found += [Difference("stack extra", name) for name in ours.stacks if name not in theirs.stacks]
    for name, lines in theirs.stacks.items():
        if name in ours.stacks and ours.stacks[name] != lines:
            found.append(Difference("stack", name, "", ours.stacks[name], lines))
    found += [Difference("node missing", name) for name in theirs.construct if name not in ours.construct]
    found += [Difference("node extra", name) for name in ours.construct if name not in theirs.construct]
    for name, parent in theirs.construct.items():
        if name in ours.construct and ours.construct[name] != parent:
            found.append(Difference("parent", name, "", ours.construct[name], parent))
    return found


def _numbered(name: str, data: Json) -> str:
    """The last ``{name}.{N}``, empty when there is none."""
    n = 0
    while f"{name}.{n}" in data:
        n += 1
    return f"{name}.{n - 1}" if n else ""


def _file_names(node: Any) -> Iterator[str]:
    """Every data_name of a record or of all."""
    if isinstance(node, dict):
        if is_tensor(node) and isinstance(node.get("data_name"), str):
            yield node["data_name"]
        else:
            for child in node.values():
                yield from _file_names(child)
    elif isinstance(node, list):
        for child in node:
            yield from _file_names(child)


def owner(file: str, data: Json) -> str:
    """The record that a tensor file belongs to."""
    parts = file.split(".")
    return next((name for i in range(len(parts), 0, -1) if (name := ".".join(parts[:i])) in data), file)


def moved(ours: list[str], theirs: list[str], weight: Callable[[str], float] = lambda _: 1.0) -> list[str]:
    """The common names that are not in the same order on both sides: those outside the heaviest common subsequence."""
    where = {name: i for i, name in enumerate(ours)}
    common = [name for name in theirs if name in where]
    places = [where[name] for name in common]
    if places == sorted(places):
        return []
    best: list[float] = []
    before: list[int] = []
    for i, name in enumerate(common):
        last = max((j for j in range(i) if places[j] < places[i]), key=best.__getitem__, default=-1)
        best.append(weight(name) + (best[last] if last >= 0 else 0.0))
        before.append(last)
    kept, i = set(), max(range(len(common)), key=best.__getitem__)
    while i >= 0:
        kept.add(i)
        i = before[i]
    return [name for i, name in enumerate(common) if i not in kept]


def _firmness(name: str) -> float:
    """How much a record is expected to be at its place: forward records most, parameter gradients least."""
    return (
        0.1
        if ".parameters_grad" in name
        else 1.0
        if ".backward" in name and not name.startswith("Module.")
        else 2.0
        if ".backward" in name
        else 9.0
    )


def _mapping(kind: str, record: str, ours: Json, theirs: Json) -> list[Difference]:
    keys = list(dict.fromkeys([*theirs, *ours]))
    return [
        Difference(kind, record, k, ours.get(k), theirs.get(k))
        for k in keys
        if ours.get(k) != theirs.get(k) or (k in ours) != (k in theirs)
    ]


def is_tensor(node: Any) -> bool:
    """Is this the description of a tensor or array?"""
    return isinstance(node, dict) and "dtype" in node and "shape" in node


def _walk(record: str, place: str, ours: Any, theirs: Any) -> Iterator[Difference]:
    if is_tensor(ours) and is_tensor(theirs):
        yield from _tensor(record, place, ours, theirs)
    elif isinstance(ours, dict) and isinstance(theirs, dict):
        for key in dict.fromkeys([*theirs, *ours]):
            inner = f"{place}.{key}" if place else str(key)
            if key not in ours:
                yield Difference("key missing", record, inner, None, theirs[key])
            elif key not in theirs:
                yield Difference("key extra", record, inner, ours[key], None)
            else:
                yield from _walk(record, inner, ours[key], theirs[key])
    elif isinstance(ours, list) and isinstance(theirs, list):
        if len(ours) != len(theirs):
            yield Difference("length", record, place, ours, theirs)
        for i, (a, b) in enumerate(zip(ours, theirs)):
            yield from _walk(record, f"{place}.{i}", a, b)
    elif (ours is None) != (theirs is None):
        yield Difference("null", record, place, ours, theirs)
    elif not same_number(ours, theirs, 0.0):
        yield Difference("value", record, place, ours, theirs)


def _tensor(record: str, place: str, ours: Json, theirs: Json) -> Iterator[Difference]:
    kinds = {"type": "type", "dtype": "dtype", "shape": "shape", "requires_grad": "flag", "md5": "checksum", "data_name": "file"}
    for key in dict.fromkeys([*theirs, *ours]):
        inner, whole = f"{place}.{key}", (ours, theirs)
        if key not in ours:
            yield Difference("key missing", record, inner, None, theirs[key], whole)
        elif key not in theirs:
            yield Difference("key extra", record, inner, ours[key], None, whole)
        elif key in kinds:
            if ours[key] != theirs[key]:
                yield Difference(kinds[key], record, inner, ours[key], theirs[key], whole)
        elif (ours[key] is None) != (theirs[key] is None):
            yield Difference("null", record, inner, ours[key], theirs[key], whole)
        elif key in _STATISTICS:
            if not same_statistic(key, ours, theirs):
                yield Difference("value", record, inner, ours[key], theirs[key], whole)
        elif ours[key] != theirs[key]:
            yield Difference("value", record, inner, ours[key], theirs[key], whole)


def same_statistic(key: str, ours: Json, theirs: Json) -> bool:
    """Are two statistics of one tensor equal but for rounding? Max and Min are elements and must be equal; a mean of numbers that
    cancel has an error relative to their size."""
    a, b = ours[key], theirs[key]
    if key in ("Max", "Min"):
        return same_number(a, b, 0.0)
    count = max(math.prod(theirs["shape"]), 1)
    norm = theirs.get("Norm")
    scale = abs(norm) / math.sqrt(count) if key == "Mean" and isinstance(norm, (int, float)) and math.isfinite(norm) else 0.0
    return same_number(a, b, _ROUNDING, scale)


def same_number(a: Any, b: Any, tolerance: float, scale: float = 0.0) -> bool:
    """Equal, with NaN equal to NaN and a relative tolerance (of the larger of both numbers and `scale`)."""
    if isinstance(a, bool) or isinstance(b, bool) or not isinstance(a, (int, float)) or not isinstance(b, (int, float)):
        return bool(a == b) and type(a) is type(b)
    if a == b or (math.isnan(a) and math.isnan(b)):
        return True
    return math.isfinite(a) and math.isfinite(b) and abs(a - b) <= tolerance * max(abs(a), abs(b), scale)


def rounds_otherwise(d: Difference, theirs: RankDump, floating: str) -> bool:
    """Can this difference come from another processor?

    Args:
        d: the difference.
        theirs: the dump that `d` was found in.
        floating: regular expression of the dtypes that are rounded.
    """
    tensor = d.whole[1]
    if not isinstance(tensor, dict) or not re.match(floating, tensor["dtype"]):
        return False
    if d.kind == "checksum":
        return isinstance(d.ours, str) and isinstance(d.theirs, str) and len(d.ours) == len(d.theirs)
    if d.kind != "value":
        return False
    return same_number(d.ours, d.theirs, ROUNDING, norm(tensor)) or same_number(d.ours, d.theirs, CANCELLED, largest(theirs.data[d.record]))


def norm(tensor: dict[str, Any]) -> float:
    """The Norm of a tensor's description, 0 when there is none that is finite."""
    found = tensor.get("Norm")
    return abs(found) if isinstance(found, float) and math.isfinite(found) else 0.0


def largest(record: Any) -> float:
    """The largest finite Norm in a record."""
    if is_tensor(record):
        return norm(record)
    inner = record.values() if isinstance(record, dict) else record if isinstance(record, list) else ()
    return max(map(largest, inner), default=0.0)
