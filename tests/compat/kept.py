"""Dumps of the existing tool as the fixtures keep them: one text file per rank directory, one record per line.

    python tests/compat/kept.py {8.1.1|26.2.0} VENV

makes the files of ``tests/fixtures/compat/{version}`` again by running the training under that version. They have to be made again when
training.py changes, because call stacks name its lines.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import cells
from cells import Cell
from matching import Json, RankDump, load

FIXTURES = Path(__file__).parent.parent / "fixtures" / "compat"
KEPT: dict[str, list[tuple[Cell, int, int]]] = {
    "26.2.0": [
        (Cell("statistics", "L0", "statistics", 1), 0, 0),
        (Cell("statistics", "mix", "statistics", 2), 0, 1),
        (Cell("statistics", "debug", "md5", 1), 0, 0),
        (Cell("statistics", "L0", "xor", 2), 0, 1),
        (Cell("tensor", "L0", "md5", 1), 0, 0),
        (Cell("structure", "mix", "statistics", 1), 0, 0),
    ],
    "8.1.1": [
        (Cell("statistics", "mix", "statistics", 1), 0, 0),
        (Cell("tensor", "debug", "statistics", 1), 0, 0),
    ],
}
"""Version -> cells with the step and the place of the rank directory that is kept."""
FACTS = (
    Cell("statistics", "mix", "statistics", 2),
    Cell("statistics", "L1", "md5", 1),
    Cell("statistics", "debug", "statistics", 1),
    Cell("tensor", "mix", "md5", 1),
    Cell("tensor", "debug", "statistics", 1),
    Cell("structure", "L0", "statistics", 1),
    Cell("statistics", "mix", "statistics", 1, "no_extra"),
    Cell("statistics", "mix", "statistics", 1, "tensor_list"),
)
"""Cells of test_facts.py."""
RUN = tuple(dict.fromkeys((*FACTS, *(cell for cases in KEPT.values() for cell, _, _ in cases))))
"""What test_facts.py and test_kept.py look at, in one run."""


def file_of(version: str, cell: Cell, step: int, rank: int) -> Path:
    """Where a rank directory is kept."""
    return FIXTURES / version / f"{cell}.step{step}.rank{rank}.json"


def pack(dump: RankDump) -> str:
    """A rank directory as text; NaN and infinities as Python's json writes them."""
    stacks: dict[tuple[str, ...], list[str]] = {}
    for name, lines in dump.stacks.items():
        stacks.setdefault(tuple(lines), []).append(name)
    whole = {"header": dump.header, "files": dump.files, "tensors": dump.tensors}
    parts = [f'"{key}": {_text(value)}' for key, value in whole.items()]
    parts.append('"data": {\n' + ",\n".join(f"{_text(name)}: {_text(record)}" for name, record in dump.data.items()) + "\n}")
    lines = {line: i for i, line in enumerate(dict.fromkeys(line for stack in stacks for line in stack))}
    parts.append('"lines": [\n' + ",\n".join(map(_text, lines)) + "\n]")
    parts.append('"stacks": [\n' + ",\n".join(_text([names, [lines[x] for x in stack]]) for stack, names in stacks.items()) + "\n]")
    parts.append('"construct": {\n' + ",\n".join(f"{_text(node)}: {_text(parent)}" for node, parent in dump.construct.items()) + "\n}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _text(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def unpack(text: str) -> RankDump:
    """The rank directory of `pack`."""
    document: Json = json.loads(text)
    lines = document.pop("lines")
    stacks = {name: [lines[i] for i in stack] for names, stack in document.pop("stacks") for name in names}
    return RankDump(**document, stacks=stacks)


def make(version: str, venv: Path) -> None:
    """Run the kept cells under an existing version and write their files."""
    with tempfile.TemporaryDirectory() as directory:
        out = cells.run(version, venv / "bin" / "python", [cell for cell, _, _ in KEPT[version]], Path(directory))
        for cell, step, rank in KEPT[version]:
            path = file_of(version, cell, step, rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(pack(load(cells.rank_directories(out, cell, step)[rank])))


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]).absolute())
