"""What the rows of both sides are joined by: their names, renumbered and renamed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from msprobe_engine.align.mapping.api import ApiMapping
from msprobe_engine.align.mapping.cell import CellMapping
from msprobe_engine.align.mapping.data import DataMapping
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.measure.options import CompareOptions


@dataclass
class Keys:
    """Keys of the rows `rows` of the target and `golden_rows` of the golden side, one each."""

    target: Sequence[Hashable]
    golden: Sequence[Hashable]
    rows: Sequence[int]
    golden_rows: Sequence[int]


def keys_of(
    target: DumpTable,
    golden: DumpTable,
    api: ApiMapping | None,
    cell: CellMapping | None,
    data: DataMapping | None,
    options: CompareOptions,
) -> Keys:
    """Keys by name.

    26.2.0 counts backward calls anew in the order they come (a recomputed forward call has no backward call of its own). When a mapping
    renames the target it does so on the golden side only, which pairs backward calls wrongly; that is kept with ``compat`` alone.
    """
    rows, golden_rows = _known(target, options), _known(golden, options)
    first, second = list(target.name), list(golden.name)
    mapped = bool(api or cell or data)
    if not options.old and not options.fuzzy and target.path.name != "debug.json":
        if not (mapped and options.compat):
            first = renumbered(target)
        second = renumbered(golden)
    names = [first[i] for i in rows]
    if api is not None:
        names = api.row_names(names, [target.ops[target.op[i]] for i in rows], golden)
    elif cell is not None:
        names = [cell.row_name(name) for name in names]
    elif data is not None:
        names = [data.row_name(target.name[i], name) for i, name in zip(rows, names)]
    return Keys(names, [second[j] for j in golden_rows], rows, golden_rows)


def _known(side: DumpTable, options: CompareOptions) -> Sequence[int]:
    """All rows; with ``compat`` 26.2.0 leaves out records whose name says no direction."""
    if options.old or not options.compat or side.path.name == "debug.json":
        return range(len(side))
    keep = [bool(_split(name)[0]) for name in side.ops]
    return [i for i in range(len(side)) if keep[side.op[i]]]


def renumbered(side: DumpTable) -> list[str]:
    """Row names with backward calls counted in the order of the file, by function or module."""
    names = list(side.name)
    counts: dict[str, int] = {}
    for op, name in enumerate(side.ops):
        head, call = _split(name)
        if not head or "backward" not in call:
            continue
        count = counts.get(head, 0)
        counts[head] = count + 1
        before, last = call
        if not before.isdigit() and not last.isdigit():
            continue
        new = f"{head}.{count if before.isdigit() else before}.{count if last.isdigit() else last}"
        if new != name:
            for i in side.rows(op):
                names[i] = new + names[i].replace(name, "")
    return names


def _split(name: str) -> tuple[str, tuple[str, str]]:
    """A record name without its last two parts, and those; ("", ...) when they say no direction."""
    parts = name.split(".")
    last, before = parts[-1], parts[-2] if len(parts) > 1 else ""
    if "parameters_grad" in (last, before):
        return ".".join(parts[:-1]), ("", "parameters_grad")
    if last in ("forward", "backward") or before in ("forward", "backward"):
        return ".".join(parts[:-2]), (before, last)
    return "", (before, last)
