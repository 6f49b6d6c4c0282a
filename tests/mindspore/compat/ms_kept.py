"""Dumps of the existing tool on MindSpore as the fixtures keep them: one text file per rank directory, one record per line.

    PYTHONPATH=tests/compat python tests/mindspore/compat/ms_kept.py {8.1.1|26.2.0} VENV

makes the files of ``tests/fixtures/compat_mindspore/{version}`` again by running the training under that version. They have to be made
again when ms_training.py changes, because call stacks name its lines.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import ms_cells
from kept import pack
from matching import load
from ms_cells import Cell

FIXTURES = Path(__file__).parents[2] / "fixtures" / "compat_mindspore"
KEPT: dict[str, list[tuple[Cell, int]]] = {
    "26.2.0": [
        (Cell("transformer", "statistics", "mix", "statistics"), 0),
        (Cell("transformer", "statistics", "L0", "md5"), 1),
        (Cell("chain", "statistics", "L1", "statistics"), 1),
        (Cell("chain", "statistics", "L0", "statistics", "fit"), 1),
        (Cell("chain", "tensor", "debug", "statistics"), 0),
        (Cell("chain", "structure", "mix", "statistics"), 0),
    ],
    "8.1.1": [
        (Cell("transformer", "statistics", "L1", "md5"), 0),
        (Cell("chain", "tensor", "mix", "statistics"), 1),
    ],
}
"""Version -> cells with the step that is kept."""


def file_of(version: str, cell: Cell, step: int) -> Path:
    """Where a rank directory is kept."""
    return FIXTURES / version / f"{cell}.step{step}.json"


def make(version: str, venv: Path) -> None:
    """Run the kept cells under an existing version and write their files."""
    with tempfile.TemporaryDirectory() as directory:
        out = ms_cells.run(version, venv / "bin" / "python", [cell for cell, _ in KEPT[version]], Path(directory))
        for cell, step in KEPT[version]:
            path = file_of(version, cell, step)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(pack(load(ms_cells.rank_directories(out, cell, step)[0])))


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]).absolute())
