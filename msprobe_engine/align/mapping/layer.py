"""Layer mapping (``-lm``): calls matched by the path of modules they run in, with names of children replaced class by class.

::

    TopLayer:             # the top of the model; Cell is its old name
      module: model
    GPTModel:             # a class of the target
      language_model.embedding: embedding
    ParallelMLP:
      dense_h_to_4h: linear_fc1

Every record gets a path: the modules around it (from construct.json; a module's own path is in its name), the functions of the framework
between its module and the call (from stack.json), and its own name. The golden record is the one at the same path and of the same
direction that came there as the same one in number. Backward calls take the path of their forward call. Below class
``ParallelTransformer`` layers count from 0, since a pipeline stage may number its own ones or those of the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from msprobe_engine.core.errors import UsageError
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.mapping_file import read_mapping, texts

TOP = "TopLayer"
NOTHING = "N/A"
_FRAMEWORK = ("site-packages/torch", "package/torch", "site-packages/mindspore", "package/mindspore")
_TOOLS = ("msprobe", "MindSpeed")
_ENTRIES = ("construct", "__call__")
_USER_CALL = {"mindspore": re.compile("construct")}
_TORCH_CALL = re.compile(r"in (for|back)ward,")
_RENUMBERED = "ParallelTransformer"
_DIGITS = re.compile(r"\d+")

Rules = Mapping[str, Mapping[str, list[tuple[str, str, int]]]]


def rows_by_layer(target: DumpTable, golden: DumpTable, source: Any) -> dict[str, str]:
    """Row name of the target -> row name of the golden side, or ``N/A``; a data mapping. Arguments and errors as `partners_by_layer`."""
    renamed: dict[str, str] = {}
    for op, golden_record in enumerate(partners_by_layer(target, golden, source)):
        _rows(renamed, target, golden, op, golden_record)
    return renamed


def partners_by_layer(target: DumpTable, golden: DumpTable, source: Any) -> list[int]:
    """Record of the golden side that belongs to each record of the target, -1 for none.

    Args:
        source: True (names are the same), a mapping, or the file with it.

    Raises:
        UsageError: a side has no construct.json, or the mapping is none.
    """
    for side in (target, golden):
        if not side.construct:
            raise UsageError(f"compare: layer mapping needs construct.json beside {side.path}; dump at level L0 or mix")
    rules = _rules({} if source is True else read_mapping(source, "layer mapping"))
    target_layers, golden_layers = _Layers(target), _Layers(golden)
    places: dict[tuple[str, str], list[int]] = {}
    for op, (scope, state) in enumerate(zip(golden_layers.scopes, golden_layers.states)):
        places.setdefault((scope, state), []).append(op)
    counts: dict[tuple[str, str], int] = {}
    converted: dict[str, str] = {}
    partners: list[int] = []
    for scope, state in zip(target_layers.scopes, target_layers.states):
        index = counts.get((scope, state), 0)
        counts[scope, state] = index + 1
        if scope not in converted:
            converted[scope] = target_layers.convert_path(scope, rules)
        candidates = places.get((converted[scope], state), ())
        partners.append(candidates[index] if index < len(candidates) else -1)
    return partners


def _rows(renamed: dict[str, str], target: DumpTable, golden: DumpTable, target_record: int, golden_record: int) -> None:
    by_place = {}
    if golden_record >= 0:
        cut = len(golden.ops[golden_record])
        by_place = {golden.name[row][cut:]: golden.name[row] for row in golden.rows(golden_record)}
    cut = len(target.ops[target_record])
    for row in target.rows(target_record):
        renamed[target.name[row]] = by_place.get(target.name[row][cut:], NOTHING)


def _rules(mapping: Any) -> Rules:
    """Class -> first part of a child's name -> (whole name, new name, number of parts), the longest first."""
    if not isinstance(mapping, Mapping):
        raise UsageError(f"compare: the layer mapping is a {type(mapping).__name__}; classes with the names of their children are needed")
    rules_by_class: dict[str, dict[str, list[tuple[str, str, int]]]] = {}
    for cls, children in mapping.items():
        rules = rules_by_class.setdefault(TOP if cls == "Cell" else str(cls), {})
        for name, new_name in texts(children, f"layer mapping of {cls}").items():
            parts = name.split(".")
            rules.setdefault(parts[0], []).append((name, new_name.partition("(")[0], len(parts)))
        for some in rules.values():
            some.sort(key=lambda rule: -rule[2])
    return rules_by_class


class _Layers:
    """Paths of one side's records.

    Attributes:
        scopes: path of each record, below `TOP`.
        states: ``forward``, ``backward``, ``parameters_grad``.
    """

    def __init__(self, side: DumpTable) -> None:
        self._side = side
        self.scopes: list[str] = []
        self.states: list[str] = []
        classes: list[str] = []
        index: dict[str, int] = {}
        for op, name in enumerate(side.ops):
            index[name] = op
            scope, state, cls = self._parse_record(name)
            self.scopes.append(scope)
            self.states.append(state)
            classes.append(cls)
        for op, name in enumerate(side.ops):
            parts = name.split(".")
            if "backward" in parts[-2:]:
                twin = index.get(".".join([*parts[:-2], *(part.replace("backward", "forward") for part in parts[-2:])]))
                if twin is not None:
                    self.scopes[op] = self.scopes[twin]
        self._renumber(classes)
        self.classes: dict[str, str] = {TOP: TOP}
        for scope, cls in zip(self.scopes, classes):
            self.classes[scope] = cls

    def _parse_record(self, name: str) -> tuple[str, str, str]:
        """(path, direction, class) of a record."""
        parts = name.split(".")
        if parts[-1] == "parameters_grad" or (len(parts) > 1 and parts[-2] == "parameters_grad"):
            parts = parts if parts[-1] == "parameters_grad" else parts[:-1]
            return _below(parts[:-3], [], parts[-3] if len(parts) > 2 else ""), "parameters_grad", parts[-2]
        if len(parts) < 4:
            return _below([], [], name), "", name
        if parts[0] in ("Module", "Cell"):
            return _below(parts[:-4], [], parts[-4]), parts[-2], parts[-3]
        parent = self._side.parent(name)
        around = parent.split(".")[:-3] if parent and parent.count(".") > 2 else []
        inside = [] if parts[0] in ("Primitive", "Jit") else self._functions(name)
        return _below(around, inside, parts[-3]), parts[-1], parts[-3]

    def _functions(self, name: str) -> list[str]:
        """The framework's function that the user's code called, when the call came from inside of the framework."""
        lines = self._side.stacks.get(name, [])
        start, end = -1, len(lines)
        call = _USER_CALL.get(self._side.framework, _TORCH_CALL)
        # 26.2.0 leaves its own lines out: the first line is the call; what MindSpore does around a cell stands before it there
        begun = call is _TORCH_CALL and not any("Template" in line for line in lines)
        for position, line in enumerate(lines):
            if "Template" in line:
                start, begun = position, True
            elif begun and call.search(line):
                end = position
                break
        last = ""
        for line in lines[start + 1 : end]:
            if not any(place in line.partition(",")[0] for place in _FRAMEWORK):
                break
            last = line
        parts = last.split(",")
        if len(parts) < 3 or any(tool in parts[0] for tool in _TOOLS) or any(entry in parts[2] for entry in _ENTRIES):
            return []
        words = parts[2].split()
        return words[1:2]

    def _renumber(self, classes: list[str]) -> None:
        starts = {f"{scope}.layers" for scope, cls in zip(self.scopes, classes) if cls == _RENUMBERED}
        if not starts:
            return
        least: dict[str, int] = {}
        for prefix, number, _ in self._layers(starts):
            least[prefix] = min(least.get(prefix, number), number)
        for prefix, number, op in list(self._layers(starts)):
            rest = self.scopes[op][len(prefix) + 1 :].partition(".")
            self.scopes[op] = f"{prefix}.{number - least[prefix]}{rest[1]}{rest[2]}"

    def _layers(self, starts: set[str]) -> list[tuple[str, int, int]]:
        """(path of the list, number, record) of records in layers that count anew; the outermost list counts."""
        layers = []
        for op, scope in enumerate(self.scopes):
            parts = scope.split(".")
            for cut in range(1, len(parts)):
                prefix = ".".join(parts[:cut])
                if prefix in starts:
                    digits = _DIGITS.findall(parts[cut])
                    if digits:
                        layers.append((prefix, int(digits[-1]), op))
                    break
        return layers

    def convert_path(self, scope: str, rules: Rules) -> str:
        """The path with names of the golden side."""
        parts = scope.split(".")
        new = [TOP]
        position = 0
        while position < len(parts) - 1:
            above = ".".join(parts[: position + 1])
            step, name = 1, parts[position + 1]
            for whole, new_name, length in rules.get(self.classes.get(above, parts[position]), {}).get(name, ()):
                if ".".join(parts[position + 1 : position + 1 + length]) == whole:
                    step, name = length, new_name
                    break
            new.append(name)
            position += step
        return ".".join(new)


def _below(around: list[str], inside: list[str], name: str) -> str:
    """A path below the top, in whose place the first part (``Module``, ``Cell``) stands."""
    return ".".join([TOP, *around[1:], *inside, name])
