"""Mappings of the user as the diagnosis takes them: what each record of the target is called on the golden side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msprobe_engine.align.calls.call_tree import Kind, Tree
from msprobe_engine.align.calls.match_structure import taken_for
from msprobe_engine.align.calls.structure import Structure
from msprobe_engine.align.frameworks import vocabulary
from msprobe_engine.align.frameworks.common_terms import several
from msprobe_engine.align.mapping.api import ApiMapping
from msprobe_engine.align.mapping.cell import CellMapping
from msprobe_engine.align.mapping.data import DataMapping, module_place
from msprobe_engine.align.mapping.layer import rows_by_layer
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.measure.options import CompareOptions

_UNMAPPED = "the mapping is not used where pipeline stages or experts are put together: names are taken as they are there"


@dataclass(frozen=True)
class Mappings:
    """As `CompareOptions` has them, each a mapping, the file that holds it, True for the built-in one, or None.

    Attributes:
        data, cell, api, layer: of rows, modules, functions, and children of classes.
        loose: as 8.1.1 reads them.
    """

    data: Any = None
    cell: Any = None
    api: Any = None
    layer: Any = None
    loose: bool = False

    @classmethod
    def of(cls, options: CompareOptions) -> Mappings:
        """Those of a comparison."""
        return cls(options.data_mapping, options.cell_mapping, options.api_mapping, options.layer_mapping, options.old)

    def __bool__(self) -> bool:
        return bool(self.data or self.cell or self.api or self.layer)

    def apply(self, target: DumpTable, golden: DumpTable) -> None:
        """Let the records of the target be taken for what they are called on the golden side (`DumpTable.aliases`), and
        rows for what stands at their places there (`DumpTable.positions`).

        Raises:
            UsageError: a mapping cannot be read or is none, or a layer mapping is given and a side has no construct.json.
        """
        if not self:
            return
        aliases, moved = taken_for(target, golden, CellMapping.read(self.cell, self.loose), ApiMapping.read(self.api, self.loose))
        names, places = list(aliases or target.ops), dict(moved or {})
        rows = rows_by_layer(target, golden, self.layer) if self.layer else self.data
        data = DataMapping.read(rows)
        if data is not None:
            _by_rows(names, places, target, golden, data)
        target.aliases, target.positions = names, places

    def apply_all(self, target: Mapping[int, DumpTable], golden: Mapping[int, DumpTable]) -> None:
        """`apply` to all ranks; one that the golden run has not is held against its first rank.

        Raises:
            UsageError: as there.
        """
        for rank, side in target.items() if golden else ():
            self.apply(side, golden.get(rank, golden[min(golden)]))


def describe_lost_mapping(before: Mapping[int, DumpTable], after: Mapping[int, DumpTable]) -> list[str]:
    """A sentence when sides that a mapping was applied to were put together into some that know nothing of it."""
    mapped = any(side.aliases is not side.ops for side in before.values())
    return [_UNMAPPED] if mapped and not any(side.aliases is not side.ops for side in after.values()) else []


def _by_rows(names: list[str], places: dict[int, str], target: DumpTable, golden: DumpTable, data: DataMapping) -> None:
    """A record whose rows belong to those of a golden record is that record, and the rows have their places there."""
    owner = {name: golden.op[row] for row, name in enumerate(golden.name)}
    for op, record in enumerate(target.ops):
        names[op] = data.row_name(f"{record}.", f"{names[op]}.")[:-1]
        chosen = None
        for row in target.rows(op):
            golden_name = data.row_name(target.name[row], "")
            golden_record = owner.get(golden_name)
            if golden_record is not None and chosen in (None, golden_record):
                chosen = golden_record
                names[op] = golden.ops[golden_record]
                places[row] = golden_name[len(golden.ops[golden_record]) :]


def propose_mapping(target: Tree, golden: Tree, structure: Structure) -> dict[str, str]:
    """Modules of the target (``path.Class``) -> what they are called on the golden side, where no mapping has said so; a cell mapping,
    the outermost modules first."""
    renamed: dict[str, str] = {}
    for i, j in structure.pairs:
        target_kind, golden_kind = target.kinds[i], golden.kinds[j]
        if (
            len(target_kind) == len(golden_kind) == 4
            and target_kind[2:] != golden_kind[2:]
            and not _built_in(target_kind, golden_kind)
            and not several(target.side, i)
            and not several(golden.side, j)
        ):
            target_place, golden_place = module_place(target.side.ops[i]), module_place(golden.side.ops[j])
            if target_place is not None and golden_place is not None and target_place != golden_place:
                renamed.setdefault(target_place, golden_place)
    golden_modules = {golden.kinds[j][2]: j for j in structure.only_golden if len(golden.kinds[j]) == 4}
    for i in structure.only_target if golden_modules else ():
        golden_record = _around(target.kinds[i][2], structure.renamed, golden_modules) if len(target.kinds[i]) == 4 else None
        target_place, golden_place = (
            module_place(target.side.ops[i]),
            None if golden_record is None else module_place(golden.side.ops[golden_record]),
        )
        if target_place is not None and golden_place is not None:
            renamed.setdefault(target_place, golden_place)
    return dict(sorted(renamed.items(), key=lambda pair: pair[0].count(".")))


def _built_in(target: Kind, golden: Kind) -> bool:
    """One module in two frameworks: at one path, of a class that both have under a name each."""
    return target[1] != golden[1] and target[2] == golden[2] and vocabulary.of_class(target[3]) == vocabulary.of_class(golden[3])


def _around(path: str, renamed: Mapping[str, str], golden_modules: Mapping[str, int]) -> int | None:
    """The module of the golden side that stands around the partners of what stands inside of this one: its class has another name too."""
    for target_path, golden_path in renamed.items():
        if target_path.startswith(f"{path}.") and golden_path.endswith(target_path[len(path) :]):
            record = golden_modules.get(golden_path[: len(path) - len(target_path)])
            if record is not None:
                return record
    return None
