"""Our reader and nan_analyze take every dump of the existing tool, and find in it what they find in ours of the same training.

Opt-in: MSPROBE_EXISTING_VENV_81 and MSPROBE_EXISTING_VENV_26, as in test_cells.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cells
import pytest
from cells import Cell
from matching import is_tensor, load, same_number
from results import CELLS, EVERY

from msprobe_engine.diagnose.nan_analyze import nan_analyze
from msprobe_engine.dump.reader import open_dump

pytestmark = [pytest.mark.framework, pytest.mark.timeout(900)]


def roots(version: str, cell: Cell) -> tuple[Path, Path]:
    """The dump directories of a cell, ours and theirs."""
    venv = cells.environment(version)
    if venv is None:
        pytest.skip(f"{cells.VERSIONS[version]} does not name a virtual environment with version {version}")
    return tuple(out / str(cell) / "dump" for out in (cells.ours(EVERY), cells.existing(version, venv)))  # type: ignore[return-value]


@pytest.mark.parametrize(("version", "cell"), CELLS, ids=[f"{version}-{cell}" for version, cell in CELLS])
def test_reader_takes_their_dump(version: str, cell: Cell) -> None:
    """Every step, rank, record, tensor, statistic, stack and parent that the raw files hold is in what the reader gives."""
    dump = open_dump(roots(version, cell)[1])
    for step in dump.steps:
        for rank in dump.ranks(step):
            raw, read = load(dump.path(step, rank)), dump.load(step, rank)
            assert list(read.entries) == list(raw.data)
            for name, record in raw.data.items():
                entry = read.entries[name]
                given = [tensor for _, tensor in entry.tensors()]
                stated = leaves(record)
                assert len(given) == len(stated)
                for tensor, fields in zip(given, stated):
                    assert list(tensor.description.shape) == fields["shape"]
                    assert tensor.description.dtype == fields["dtype"]
                    assert same_number(tensor.max, fields.get("Max"), 0.0)
                    assert same_number(tensor.norm, fields.get("Norm"), 0.0)
                    if "data_name" in fields:
                        path = read.tensor_path(tensor)
                        assert path is not None
                        assert path.exists()
                if name in raw.construct:
                    assert (entry.parent or None) == (raw.construct[name] or None)
                assert len(entry.stack) == len(raw.stacks.get(name, ()))


def leaves(node: Any) -> list[dict[str, Any]]:
    """The tensor objects of a record, in order."""
    if is_tensor(node):
        return [node]
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [tensor for child in children for tensor in leaves(child)]


@pytest.mark.parametrize("version", cells.VERSIONS)
def test_nan_analyze_finds_the_same(version: str) -> None:
    """The logarithm of negative numbers on rank 1 is named in their dump and in ours; where there is only a mask of infinities, in
    neither."""
    for variant, ranks, expected in (("nan", 2, "Torch.log.0.forward"), ("", 2, None), ("", 1, None)):
        for root in roots(version, Cell("statistics", "mix", "statistics", ranks, variant)):
            result = nan_analyze(root)
            assert result.problems == []
            assert [f["op_name"] for f in result.findings[:1]] == ([expected] if expected else [])
            assert not expected or "rank 1" in result.text
