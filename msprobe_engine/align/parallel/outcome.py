"""What runs of different layouts come to: a `GlobalTensors`, with the reasons why some of its rows cannot be compared."""

from __future__ import annotations

import dataclasses
import re
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from msprobe_engine.align.calls.call_tree import Producers
from msprobe_engine.align.calls.structure import Structure
from msprobe_engine.formats.dump.dump_table import DumpTable

AGREES = 1e-3
"""Closer than this a replica is taken for the right one when replicas disagree."""

NEAR = 1e-5
"""The same, of single numbers."""

ROUNDING = 2.0**-46
"""Adding up pieces in float64 moves the last bits; integers must stay equal."""

PASSING = frozenset(
    (
        *("to", "float", "half", "bfloat16", "double", "type", "type_as", "clone", "detach", "contiguous"),
        *("view", "view_as", "reshape", "transpose", "t", "permute", "flatten", "unflatten", "squeeze", "unsqueeze"),
    )
)
"""Calls that hand on what they got: a part stays a part."""

PART, PADDED, UNCLEAR, UPDATE = "parts of a sum", "padded", "of other shapes", "single numbers of the update"
EMPTY, LOCAL, RANDOM = "without statistics", "of one rank alone", "states of random numbers"
TOKENS = "tokens in other groups"
"""Why a row cannot be compared."""

NOTHING = (None, None, None, None)

IN_PLACE = re.compile(r"__setitem__|__i(?!nvert)\w+__|[a-z]\w*[a-z]_")
"""Names of calls that write into their first argument."""


@dataclass
class GlobalTensors:
    """Attributes:
    target, golden: sides of the whole; records are those of the first piece of each.
    structure: which record belongs to which.
    producers: as `Tree.producers`, of the first piece of the target.
    made_of: row of the target -> number of pieces, of merged ones.
    skipped: row of the target -> why it was not compared.
    source: row of the target with a part -> the latest record that gave it out.
    unsummed: rows of the target that an update takes in as parts of a sum; `source` has the record that gave them out.
    apart: rows of the target that the update of a parameter takes in, of which each rank has other numbers though each updates all of it.
    by_mean: rows of the target that are sums of shares: of these the mean alone was put together, the rest is the golden side's.
    rank: row of the target whose replicas disagree -> rank of the one that is off.
    factor: of all gradients of the pieces; 1.0 when there is none. `sure`: most gradients say so.
    """

    target: DumpTable
    golden: DumpTable
    structure: Structure
    producers: Producers
    made_of: dict[int, int] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)
    source: dict[int, int] = field(default_factory=dict)
    rank: dict[int, int] = field(default_factory=dict)
    unsummed: set[int] = field(default_factory=set)
    apart: set[int] = field(default_factory=set)
    by_mean: set[int] = field(default_factory=set)
    factor: float = 1.0
    sure: bool = False

    def swap_sides(self, partners: Mapping[int, int], producers: Producers) -> GlobalTensors:
        """The same with the sides changed over. `partners`: row of the target -> row of the golden side."""
        structure = Structure(
            sorted((golden_op, target_op) for target_op, golden_op in self.structure.pairs),
            self.structure.only_golden,
            self.structure.only_target,
            {golden_op: target_op for target_op, golden_op in self.structure.renamed.items()},
        )
        made_of = {partners[row]: n for row, n in self.made_of.items()}
        skipped = {partners[row]: why for row, why in self.skipped.items()}
        records = dict(self.structure.pairs)
        source = {partners[row]: records[op] for row, op in self.source.items() if op in records}
        unsummed = {partners[row] for row in self.unsummed}
        turned = GlobalTensors(self.golden, self.target, structure, producers, made_of, skipped, source, unsummed=unsummed)
        turned.by_mean = {partners[row] for row in self.by_mean}
        turned.factor, turned.sure = 1 / self.factor, self.sure
        return turned

    def reasons(self) -> Counter[str]:
        """How many rows were not compared, by reason."""
        return Counter(self.skipped.values())


@dataclass
class Call:
    """What is known of a record while its rows are put together: outputs come last.

    Attributes:
        cut: something that is cut, or a part, goes in.
        local: an argument says where this rank is.
        update: a number of the update goes in that cannot be compared.
        tensors, lost, parts: how many tensors go in, how many of them say something of one rank only, and how many say that or are parts.
        buffer: the first of them is a flat buffer of what lies on this rank.
    shared: what is cut on one side alone goes in, or a number of each piece: what comes out may be one, too.
    scaled: a number goes in of which each piece has its share.
    elsewhere: a table that is filled up goes in, and is cut at other rows than the other side's: each rank has looked up other tokens.
    """

    op: int
    backward: bool
    cut: bool = False
    local: bool = False
    update: bool = False
    tensors: int = 0
    lost: int = 0
    parts: int = 0
    buffer: bool = False
    shared: bool = False
    scaled: bool = False
    elsewhere: bool = False


def copy(side: DumpTable) -> DumpTable:
    """A side whose rows can be replaced."""
    copied = dataclasses.replace(
        side,
        shape=list(side.shape),
        numbers=array("d", side.numbers),
        md5=list(side.md5),
        data_name=list(side.data_name),
        nonfloat_stats=dict(side.nonfloat_stats),
        values=dict(side.values),
        nans=dict(side.nans),
        infs=dict(side.infs),
        extra=dict(side.extra),
    )
    copied.stacks, copied.construct = side.stacks, side.construct
    if side.aliases is not side.ops:
        copied.aliases = side.aliases
    return copied
