"""A NaN or Inf that one of two runs has and the other has not, where the comparison of their numbers does not come to it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find import findings
from msprobe_engine.find.detect import Run
from msprobe_engine.find.findings import Diagnosis
from msprobe_engine.find.nonfinite.flags import NONFINITE, row_flags
from msprobe_engine.find.nonfinite.load import number_ranks
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.dump.replicas.reader import StepTables, of_each
from msprobe_engine.formats.dump.ring_file import open_step_file

SAME, SAME_BESIDE_NAN = Sentence("All numbers are the same."), Sentence("All numbers beside NaN are the same.")
SAME_IN_COMMON = Sentence("The numbers that both runs have are the same.")
_NONFINITE = (findings.NONFINITE, findings.OVERFLOW)
_NOT_FINITE = (b"NaN", b"Infinity")
"""What JSON of Python writes of a number that is not finite."""
_PIECE = 1 << 20


def add_nonfinite_of_one_side(
    diagnosis: Diagnosis, target: Run, golden: Run, tables: StepTables, steps: Collection[int] = (), ranks: Collection[int] = ()
) -> None:
    """A NaN in calls that only the target makes has nothing to be compared with; the run alone tells, if the golden one has none.
    `tables`: what was read before; `steps`, `ranks`: only these were compared; empty: all."""
    from msprobe_engine.find.single_run import diagnose_alone

    if diagnosis.finding not in (findings.NONE, findings.STRUCTURE) or not diagnosis.unseen:
        return
    alone = diagnose_alone(target, tables)
    asked = [suspect for suspect in alone.suspects if (not steps or suspect.step in steps) and (not ranks or suspect.rank in ranks)]
    if alone.finding in _NONFINITE and asked and diagnose_alone(golden, tables).finding == findings.NONE:
        diagnosis.finding, diagnosis.suspects, diagnosis.places = alone.finding, asked, []
        diagnosis.evidence = [line for line in diagnosis.evidence if line not in (SAME, SAME_BESIDE_NAN, SAME_IN_COMMON)] + alone.evidence


def add_later_nonfinite(diagnosis: Diagnosis, target: Run, golden: Run, tables: StepTables, finite: Collection[Path] = ()) -> None:
    """Where the numbers part first may be something else than what ends in NaN later: each side's first NaN or Inf that the other has not.

    The steps behind the first difference are not compared. Dumps are looked at again only where one of their files has a number that is
    not finite (`tables`: what was read of them before); infinities of masks, which both runs have, are none that matter.
    """
    from msprobe_engine.find.single_run import diagnose_alone

    if not diagnosis.suspects or diagnosis.finding in _NONFINITE or not (_may_have(target, finite) or _may_have(golden, finite)):
        return
    sides = {"target": diagnose_alone(target, tables), "golden": diagnose_alone(golden, tables)}
    bad = [side for side, alone in sides.items() if alone.finding in _NONFINITE]
    if len(bad) == 1 and (first := sides[bad[0]].first_suspect) is not None:
        known = {(suspect.step, suspect.rank, suspect.record) for suspect in diagnosis.suspects}
        if (first.step, first.rank, first.record) not in known:
            diagnosis.nonfinite = {bad[0]: first}


def files_without(sides: Mapping[int, DumpTable]) -> set[Path]:
    """Files of ranks that were read, in which no tensor holds NaN or an infinity."""
    held = of_each(sides, lambda side: bool((row_flags(side) & NONFINITE).any()))
    return {side.path for rank, side in sides.items() if not held[rank]}


def _may_have(run: Run, finite: Collection[Path]) -> bool:
    if (dump := run.dump) is None:
        return False
    places = (place for step in dump.steps for _, place in number_ranks(dump, step))
    files = (place / name for place in places for name in (layout.DUMP, layout.DEBUG, layout.FRAME_LOG))
    return any(_holds(file, _NOT_FINITE) for file in files if file not in finite)


def _holds(file: Path, words: Sequence[bytes]) -> bool:
    """One of the words stands in the file; a file that cannot be read holds nothing."""
    kept = max(map(len, words)) - 1
    try:
        with open_step_file(file) as stream:
            tail = b""
            while piece := stream.read(_PIECE):
                tail += piece
                if any(word in tail for word in words):
                    return True
                tail = tail[-kept:]
    except OSError:
        return False
    return False
