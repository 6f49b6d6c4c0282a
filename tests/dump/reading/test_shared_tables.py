"""What tables and trees of calls share with copies and with equal ones."""

from __future__ import annotations

import json
from pathlib import Path

from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.dump.read_table import read_side

TENSOR = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "Max": 1.0, "Min": 0.0, "Mean": 0.5, "Norm": 1.0}
CONSTRUCT = {"Torch.exp.0.forward": "Module.fc.Linear.forward.0", "Module.fc.Linear.forward.0": None}


def dumped(place: Path, maximum: float = 1.0) -> DumpTable:
    """A dump of a module and a call in it."""
    place.mkdir()
    record = {"input_args": [], "input_kwargs": {}, "output": [TENSOR | {"Max": maximum}]}
    (place / "dump.json").write_text(json.dumps({"task": "statistics", "level": "mix", "data": dict.fromkeys(CONSTRUCT, record)}))
    (place / "construct.json").write_text(json.dumps(CONSTRUCT))
    return read_side(place / "dump.json")


def test_a_copy_under_another_header_shares_what_was_read(tmp_path: Path) -> None:
    """Columns and files that were read are the same objects, names of a mapping too; the table itself keeps its header."""
    table = dumped(tmp_path / "rank0")
    table.aliases = [f"renamed.{name}" for name in table.ops]
    construct = table.construct
    (tmp_path / "rank0" / "construct.json").unlink()
    copy = table.with_header({**table.header, "rank": 7})
    assert (copy.header["rank"], "rank" in table.header) == (7, False)
    assert copy.ops is table.ops
    assert copy.construct is construct
    assert copy.aliases is table.aliases


def test_a_copy_reads_what_was_not_read(tmp_path: Path) -> None:
    """A file that nobody has asked for is read when the copy is asked for it."""
    copy = dumped(tmp_path / "rank0").with_header({})
    assert copy.construct == CONSTRUCT
    assert copy.aliases is copy.ops


def test_equal_trees_hold_their_structure_once(tmp_path: Path) -> None:
    """What follows from names and from what encloses what is one object; what nobody has asked for is found later, and is equal."""
    first, second = Tree(dumped(tmp_path / "rank0")), Tree(dumped(tmp_path / "rank1", 3.0))
    parents, kinds = first.parents, second.kinds
    known: dict[str, object] = {}
    for tree in (first, second):
        tree.share_structure(known)
    assert second.parents == parents
    assert second.index is first.index
    assert first.kinds == kinds
    third = Tree(dumped(tmp_path / "rank2"))
    third.share_structure(known)
    assert third.index is first.index
