"""Parameters that are not what the update of the step before has left, where those of the golden run are: something changed them in
between, as a checkpoint that was read back."""

from __future__ import annotations

from msprobe_engine.align.parallel.merge_statistics import SAME
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.findings import Suspect
from msprobe_engine.formats.monitor.reader import Run
from msprobe_engine.formats.monitor.series import Key

_MOVES = {"update", "ratio"}
_BEFORE, _AFTER, _OP = "param_origin", "param_updated", "norm"


def changed_between(target: Run, golden: Run) -> list[Suspect]:
    """The parameters of the first step in which some are, in the order of the model; none where parameters never are what was left: another
    copy of them is written then."""
    changed: list[tuple[int, int, int, Suspect]] = []
    for rank in sorted(set(target.ranks) & set(golden.ranks)):
        target_pairs, golden_pairs = _pairs(target, rank), _pairs(golden, rank)
        kept = {place for place, (left, there) in target_pairs.items() if _same(left, there)}
        for number, ((step, key), (left, there)) in enumerate(target_pairs.items()):
            if (step, key) in kept or (step, key) not in golden_pairs or not _same(*golden_pairs[step, key]):
                continue
            if not any(other_step == step or other == key for other_step, other in kept):
                continue
            template = "norm is {0} behind the update of step {1} and {2} when step {3} begins; in the golden run it is the same"
            why = Sentence(template, f"{left:.9g}", step - 1, f"{there:.9g}", step)
            row = f"{_BEFORE}/{key.name}"
            suspect = Suspect(
                row, key.name.rpartition(".")[0], rank, step, kind="series", why=why, tensor=row, distance=abs(left - there) / there
            )
            changed.append((step, rank, number, suspect))
    first = min((step for step, *_ in changed), default=-1)
    return [suspect for step, _, _, suspect in sorted(changed, key=lambda item: item[:3]) if step == first]


def _pairs(run: Run, rank: int) -> dict[tuple[int, Key], tuple[float, float]]:
    """(step, parameter) -> its norm behind the update of the step before, and when the step begins. Nothing where the optimizer that was
    watched moves none of them: it has copies, and what is written back behind its step is the update."""
    families, watched = run.families(rank), run.info(rank).get("monitor")
    if not all(family in families and _OP in run.ops(rank, family) for family in (_BEFORE, _AFTER)):
        return {}
    if isinstance(watched, dict) and watched.get("updates") and not _MOVES & set(families):
        return {}
    begins, left = run.series(rank, _BEFORE, _OP), run.series(rank, _AFTER, _OP)
    pairs: dict[tuple[int, Key], tuple[float, float]] = {}
    for key, series in begins.items():
        if key in left:
            ends = dict(zip(left[key].steps.tolist(), left[key].values.tolist()))
            steps = zip(series.steps.tolist(), series.values.tolist())
            pairs.update({(step, key): (ends[step - 1], value) for step, value in steps if step - 1 in ends and value > 0})
    return pairs


def _same(behind: float, begins: float) -> bool:
    return abs(behind - begins) <= SAME * begins
