"""One place where a difference between two runs begins."""

from __future__ import annotations

from dataclasses import dataclass

RESULT, TAKEN, PARAMETER, GRADIENT = "result", "taken in", "parameter", "gradient"
ARGUMENT, NONFINITE, EXTRA, MISSING, UNUSED = "argument", "non-finite", "extra call", "missing call", "unused result"
UNSUMMED = "unsummed part"
CHANGED = "changed afterwards"
INSIDE = "made inside"
GRADLESS = "no gradient"
DEFAULT = "argument of one side"
PRECISION = "precision"
DTYPE, SHAPE, GRAD_FLAG, GROUP, REDUCTION, MODULE = "dtype", "shape", "requires_grad", "group", "reduction", "module"
"""What a record says beside numbers (`call_facts`), as `ARGUMENT` does."""


@dataclass
class DifferenceOrigin:
    """One place where a difference begins.

    Attributes:
        op: record of the target; of a `MISSING` call the one that misses it.
        partner: record of the golden side, -1 when there is none; the missing call.
        kind: `RESULT`, `TAKEN`, `PARAMETER`, `GRADIENT`, `ARGUMENT`, `NONFINITE`, `EXTRA`, `MISSING`, `UNUSED`
            (a call whose result is right, and is not what goes on), `CHANGED` (its result is right, and comes out different where
            it is taken in: something that no record has lies between), `INSIDE` (a module whose own code makes what a module in it takes
            in), `GRADLESS` (a tensor that requires a gradient on one side only) or
            `DEFAULT` (an argument that one side gives and the other leaves to its default).
        row, other: the row that shows it, on both sides (-1: none).
        distance: of that row.
        inside: largest distance of what went in.
        limit: what would have been round-off.
        times: how many times what round-off may do the number that is most off differs.
        noise: the difference looks like rounding: elements move at random, the norm hardly moves.
        aside: no place where a difference begins; what comes out is the same (`find.difference.harmless.same_result`).
    """

    op: int
    partner: int
    kind: str
    row: int
    other: int
    distance: float
    inside: float
    limit: float
    times: float = 0.0
    noise: bool = False
    aside: bool = False

    @property
    def weight(self) -> float:
        """How many times more than round-off."""
        return self.times
