"""What a gradient is made of beside what its record says: tensors that autograd has kept of the way forward, calls of modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.align.parallel import parameter_owner
from msprobe_engine.core.names import forward_twin
from msprobe_engine.measure.factorize import Integers


def of_pairs(tree: Tree, pairs: Sequence[tuple[int, int]], positions: Mapping[int, int]) -> tuple[Integers, Integers, Integers, Integers]:
    """Positions of pairs: backward calls and their forward calls; calls of modules and the gradients of the parameters of each (of all
    that have one gradient: tied weights)."""
    side = tree.side
    own, twins, members, groups = (list[int]() for _ in range(4))
    calls: dict[str, list[int]] = {}  # module path -> positions of its calls
    for position, (op, _) in enumerate(pairs):
        kind = tree.kinds[op]
        if tree.gradients[op]:
            continue
        if len(kind) == 4:
            calls.setdefault(kind[2], []).append(position)
        if kind[0] == "backward":
            twin = positions.get(tree.index.get(forward_twin(side.ops[op]), -1), -1)
            if twin >= 0:
                own.append(position)
                twins.append(twin)
    gradients = [(position, op) for position, (op, _) in enumerate(pairs) if tree.gradients[op]]
    tied: dict[parameter_owner.Mark, dict[str, None]] = {}
    for _, op in gradients:
        for row in side.rows(op):
            if (mark := parameter_owner.mark(side, row)) is not None:
                tied.setdefault(mark, {})[tree.kinds[op][2]] = None
    for position, op in gradients:
        marks = [parameter_owner.mark(side, row) for row in side.rows(op)]
        for path in dict.fromkeys((tree.kinds[op][2], *(path for mark in marks if mark is not None for path in tied[mark]))):
            behind = calls.get(path, ())
            members += behind
            groups += [position] * len(behind)
    a, b, c, d = (np.array(some, np.int64) for some in (own, twins, members, groups))
    return a, b, c, d
