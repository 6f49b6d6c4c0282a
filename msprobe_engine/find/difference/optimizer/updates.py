"""Parameters that differ at the beginning of a step, by no more than the optimizer of the step before has moved them.

An optimizer like Adam divides by the size of a gradient, so an element whose gradient is nothing but round-off moves by up to the learning
rate, here in one direction and there in the other: the keys in the bias of a fused projection do. Statistics do not tell that from a fault
of the optimizer. A calibration does.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import numpy as np

from msprobe_engine.align.calls.alignment import are_of_different_frameworks
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.findings import Diagnosis
from msprobe_engine.find.origin import PARAMETER, TAKEN
from msprobe_engine.formats.dump.dump_table import INPUT, PARAMETERS

if TYPE_CHECKING:
    from msprobe_engine.find.difference.divergence import Divergence

TWO_OPTIMIZERS = Sentence(
    "The runs are of two frameworks: are their optimizers the same? Those of MindSpore and PyTorch differ under like names: "
    "mindspore.nn.AdamWeightDecay has no bias correction, torch.optim.AdamW has (mindspore.mint.optim.AdamW too)."
)
_MOST = 2.0
"""Two runs move an element by one update each, in two directions."""


def note_update(diagnosis: Diagnosis, previous: Divergence | None, divergence: Divergence) -> None:
    """Say so, and name the command that tells, where the first origin is such a parameter.

    Args:
        diagnosis: gets a sentence in `evidence` and the commands in `next`.
        previous: the step before; None: there is none.
        divergence: the step that has origins.
    """
    rank, origin = divergence.origins[0]
    walker, earlier = divergence.walkers[rank], previous.walkers.get(rank) if previous is not None else None
    if earlier is None or walker.calibrated or origin.kind not in (PARAMETER, TAKEN):
        return
    side, golden, was = walker.side, walker.golden.side, earlier.golden.side
    i, j = origin.row, origin.other
    held = side.role[i] == PARAMETERS or (side.role[i] == INPUT and side.requires_grad[i] and i not in walker.target.producers)
    before = next((row for row in range(len(was)) if was.name[row] == golden.name[j]), -1) if held else -1
    if before < 0 or was.shape[before] != golden.shape[j]:
        return
    earlier_row = next((row for row, name in enumerate(earlier.side.name) if name == side.name[i]), -1)
    stays = [
        word
        for word, table, row, then, place in (
            (Sentence("this run"), side, i, earlier.side, earlier_row),
            (Sentence("the golden run"), golden, j, was, before),
        )
        if place >= 0 and np.array_equal(table.stats[row], then.stats[place])
    ]
    if len(stays) == 1:
        diagnosis.evidence.append(Sentence("The step before has not moved the parameter in {0}; in the other one it has.", stays[0]))
        return
    if are_of_different_frameworks(side, golden):
        diagnosis.evidence.append(TWO_OPTIMIZERS)
    if walker.pair_of(i) in walker.lone_updates:
        template = "All gradients of the step before were the same to the last bit, and most parameters came out of its update the same."
        diagnosis.evidence.append(Sentence(template))
        return
    moved = float(np.abs(golden.stats[j] - was.stats[before])[:3].max())
    apart = float(np.abs(side.stats[i] - golden.stats[j])[:3].max())
    if not 0 < apart <= _MOST * moved:
        return
    diagnosis.evidence.append(
        Sentence(
            "The parameter differs by {0}, and the optimizer of the step before moved it by {1}: an optimizer "
            "like Adam moves elements whose "
            "gradient is round-off by as much, in two runs that are right too. A calibration tells which of both it is.",
            f"{apart:.1e}",
            f"{moved:.1e}",
        )
    )
    target_path, golden_path = (shlex.quote(str(table.path.parents[2])) for table in (side, golden))
    diagnosis.next += [
        "msprobe run --perturb ulp --output-dir MOVED -- COMMAND   (the golden training)",
        f"msprobe diagnose {target_path} {golden_path} --calibration MOVED",
    ]
