"""Modules that bear another name on the golden side: told from calls that are missing, and written as the mapping that says so."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from msprobe_engine.align.mapping.data import module_place
from msprobe_engine.align.mapping.user_mapping import propose_mapping
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.formats.mapping_file import write_mapping

if TYPE_CHECKING:
    from msprobe_engine.find.difference.divergence import Divergence
    from msprobe_engine.find.findings import Diagnosis

FILE = "cell_mapping.yaml"
_SHOWN = 3


def add_renames(diagnosis: Diagnosis, divergence: Divergence) -> None:
    """Add the pairs of names of a step to `diagnosis.mapping`."""
    for rank, walker in divergence.walkers.items():
        if rank not in divergence.wholes and divergence.structures[rank].renamed:
            diagnosis.mapping |= propose_mapping(walker.target, walker.golden, divergence.structures[rank])


def report_renames(diagnosis: Diagnosis) -> None:
    """Add to the evidence how many names differ, and the first of them. Calls of modules whose class has another name too are missing on
    neither side: when no others are, none is."""
    if diagnosis.mapping:
        known = {*diagnosis.mapping, *diagnosis.mapping.values()}
        if all(module_place(name) in known for missing in diagnosis.unmatched.values() for name in missing):
            diagnosis.unmatched = {}
        pairs = [f"{target_name} -> {golden_name}" for target_name, golden_name in diagnosis.mapping.items()]
        more = Sentence(" and {0} more", f"{len(pairs) - _SHOWN:,}") if len(pairs) > _SHOWN else ""
        shown = ", ".join(pairs[:_SHOWN])
        diagnosis.evidence.append(Sentence("{0} modules bear other names in the golden run: {1}{2}.", f"{len(pairs):,}", shown, more))


def write(diagnosis: Diagnosis, path: Path) -> Path | None:
    """Write the pairs of names as a cell mapping, which ``-cm`` takes; None when there are none.

    Raises:
        OSError: it cannot be written.
    """
    if not diagnosis.mapping:
        return None
    write_mapping(path, diagnosis.mapping)
    return path
