"""The list of calls that a dump holds: each forward record of an API with its backward record, and which of them are checked."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

from msprobe_engine.accuracy.results import bare_name
from msprobe_engine.accuracy.settings import BLOCKED_THERE, PrecheckSettings
from msprobe_engine.core.errors import DumpFormatError, UsageError
from msprobe_engine.core.io.safe_cells import utf8
from msprobe_engine.core.log import printable
from msprobe_engine.core.names import of_first_pass
from msprobe_engine.core.operator_traits import UNINITIALISED
from msprobe_engine.core.settings.tree import nearest
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.completeness import warn_of_earlier_runs
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.dump.rank_files import framework_of, missing_records
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_engine.formats.dump.stream import open_records

_MODULES = ("Module", "Cell", "Primitive")
_OF_THE_DATA = ("Max", "Min", "Mean", "Norm", "Max_except_inf_nan", "Min_except_inf_nan", "data_name", "md5", "crc32")
"""Keys of a tensor's record that say what was in it, not what it was."""
_DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an API.

    Attributes:
        name: ``"Torch.matmul.0"``; a further backward pass through it is a call with the same forward, ``"Torch.matmul.1000000"``.
        record: of its forward, as in dump.json.
        backward: of its backward, None when the dump has none.
    """

    name: str
    record: Mapping[str, Any]
    backward: Mapping[str, Any] | None = None

    def message(self) -> dict[str, Any]:
        """What the process that checks it is told, see `worker`."""
        return {"name": self.name, "record": self.record, "backward": self.backward}

    @property
    def kind(self) -> str:
        """``"Torch"``, ``"Functional"``, ``"Distributed"``, ..."""
        return self.name.partition(".")[0]

    @property
    def api(self) -> str:
        """Bare name: ``"matmul"``, ``"linalg.inv"``."""
        return bare_name(self.name)


@dataclass(frozen=True, slots=True)
class DumpCalls:
    """What one dump.json holds.

    Attributes:
        framework: ``pytorch``, ``mindspore``, ``mindtorch``.
        calls: in the order of the file.
        remarks: what of the file was not taken, one line each.
        missing: sentences about records that the file cannot have (`formats.dump.completeness`), and about a damaged stack.json.
        stacks: record name -> lines of the recorded stack, innermost first.
    """

    file: Path
    framework: str
    calls: tuple[Call, ...]
    remarks: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    stacks: Mapping[str, Sequence[str]] = field(default_factory=dict)


def find_dump(path: str | Path) -> Path:
    """The dump.json of one rank and step: the file itself, its directory, or a dump that has no second.

    Raises:
        DumpFormatError: there is no dump here.
        UsageError: there are several.
    """
    given = Path(path)
    if given.is_file() or (given.suffix == ".json" and not given.is_dir()):
        return given
    dump = open_dump(given)
    warn_of_earlier_runs(dump)
    places = [dump.path(step, rank) for step in dump.steps for rank in dump.ranks(step)]
    if len(places) > 1:
        some = ", ".join(str(place) for place in places[:4]) + (", ..." if len(places) > 4 else "")
        raise UsageError(f"{path}: holds {len(places)} dumps ({some}); give the dump.json of one rank")
    return places[0] / layout.DUMP


def read_calls(path: str | Path) -> DumpCalls:
    """All calls of APIs in a dump; modules are no APIs and are left out.

    Raises:
        DumpFormatError: no dump, or a damaged one.
        UsageError: several dumps at this path, or one without a call of an API.
    """
    file = find_dump(path)
    forward: dict[str, Mapping[str, Any]] = {}
    backward: dict[str, Mapping[str, Any]] = {}
    modules, odd, count = 0, [], 0
    with open_records(file) as records:
        for block in records:
            count += len(block)
            for key, record in block.items():
                name, _, direction = printable(utf8(key)).rpartition(".")  # as the result files have it
                if key.startswith(tuple(f"{kind}." for kind in _MODULES[:2])):
                    modules += 1
                elif direction not in _DIRECTIONS or "." not in name or not isinstance(record, dict):
                    odd.append(key)
                else:
                    (forward if direction == "forward" else backward)[name] = record
        header = dict(records.header)
    missing = missing_records(file, header, count, recovered=records.recovered, repeated=records.repeated)
    further = {name: forward[first] for name in backward if name not in forward and (first := of_first_pass(name)) in forward}
    alone = len(backward.keys() - forward.keys() - further.keys())
    if not forward:
        level = header.get("level")
        hint = f"; its level is {level}, and calls of APIs are in levels L1 and mix" if level in ("L0", "L2", "debug") else ""
        raise UsageError(f"{file}: holds no call of an API{hint}")
    remarks = []
    if odd:
        remarks.append(f"{len(odd)} records are no calls (the first: {odd[0][:120]})")
    if alone:
        remarks.append(f"{alone} backward records have no forward record; they cannot be checked")
    calls = tuple(Call(name, record, backward.get(name)) for name, record in (*forward.items(), *further.items()))
    table = DumpTable(file, header, recovered=records.recovered)
    stacks = table.stacks
    framework = framework_of(header, forward.values())
    return DumpCalls(file, framework, calls, tuple(remarks), (*missing, *table.problems), stacks)


def without_repeats(calls: Iterable[Call]) -> list[Call]:
    """Of calls of one API with the same arguments but for the numbers in their tensors, the first; calls with and without a backward
    are two."""
    seen: set[tuple[str, str, bool, str]] = set()
    kept = []
    for call in calls:
        record = {key: _form(call.record.get(key)) for key in ("input_args", "input_kwargs")}
        key = (call.kind, call.api, call.backward is not None, json.dumps(record, sort_keys=True))
        if key not in seen:
            seen.add(key)
            kept.append(call)
    return kept


def _form(node: Any) -> Any:
    if isinstance(node, dict):
        tensor = "dtype" in node and "shape" in node
        return {key: _form(child) for key, child in node.items() if not (tensor and (key in _OF_THE_DATA or key.endswith("_count")))}
    return [_form(child) for child in node] if isinstance(node, list) else node


class Named(Protocol):
    """A call as lists know it."""

    @property
    def name(self) -> str: ...

    @property
    def api(self) -> str: ...


def why_not(call: Named, settings: PrecheckSettings, compat: bool = False) -> str | None:
    """The reason that the lists give not to check a call, None when it is to be checked; with `compat` as the existing tool has it."""
    if call.api in UNINITIALISED:
        return f"API {call.api} has no result that can be compared"
    if compat and call.api in BLOCKED_THERE:
        return f"API {call.api} is not checked by the existing tool"
    if _is_listed(call, settings.black_list):
        return f"API {call.api} is in black_list"
    if settings.white_list and not _is_listed(call, settings.white_list):
        return f"API {call.api} is not in white_list"
    return None


def _is_listed(call: Named, names: Sequence[str]) -> bool:
    return any(name == call.api or name == call.name or (_is_pattern(name) and fnmatchcase(call.name, name)) for name in names)


def _is_pattern(name: str) -> bool:
    return any(sign in name for sign in "*?[")


def remarks_on_lists(calls: Sequence[Call], settings: PrecheckSettings, compat: bool = False) -> list[str]:
    """Names in the lists that no call has, with the nearest that one has.

    Raises:
        UsageError: nothing is left to be checked.
    """
    apis = sorted({call.api for call in calls})
    remarks = []
    for key in ("white_list", "black_list"):
        for name in getattr(settings, key):
            if not any(_is_listed(call, (name,)) for call in calls):
                near = nearest(name, apis)
                remarks.append(f"{key}: no call of {name!r} in this dump" + (f"; did you mean {near!r}?" if near else ""))
    if all(why_not(call, settings, compat) for call in calls):
        known = ", ".join(apis[:12]) + (", ..." if len(apis) > 12 else "")
        raise UsageError("\n".join([f"white_list and black_list leave no call to be checked; APIs of the dump: {known}", *remarks]))
    return remarks


__all__ = ["Call", "DumpCalls", "DumpFormatError", "bare_name", "find_dump", "read_calls", "remarks_on_lists", "why_not", "without_repeats"]
