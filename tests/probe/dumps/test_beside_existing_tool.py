"""The same script under this project and under the existing tool: entries, statistics, and its compare of the two dumps."""

from __future__ import annotations

import sys
from pathlib import Path

import existing_environment
import existing_run
import pytest

from msprobe_engine.formats.dump.reader import open_dump

sys.path.insert(0, str(Path(__file__).parents[2] / "dump"))
import existing_tool

pytestmark = [pytest.mark.framework, pytest.mark.existing_tool]


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
@pytest.mark.parametrize("version", existing_environment.VERSIONS)
def test_real_run(tmp_path: Path, version: str, level: str) -> None:
    """What both tools record of one training has the same statistics to 1e-5, nothing that 26.2.0 records is missing here, and the
    existing tool's compare takes our dump against its own, both ways."""
    existing = existing_environment.existing_tool(version)
    ours = existing_run.run(sys.executable, level, tmp_path / "ours")
    theirs = existing_run.run(existing.python, level, tmp_path / "theirs")
    figures = existing_run.figures(ours, theirs, step=0)
    print(figures)
    missing = figures["only_theirs"]
    if version == "8.1.1":
        # It writes parameter gradients without a number, and sees what its own hooks (view_as) and the start of `backward` call.
        missing = [n for n in missing if not n.endswith(".parameters_grad") and not n.startswith(("Tensor.view_as.", "Torch.ones_like."))]
    assert missing == []
    assert figures["different"] == []
    assert figures["common"] > 20
    files = [open_dump(root).path(0) / "dump.json" for root in (ours, theirs)]
    for target, golden, name in ((*files, "ours_theirs"), (*reversed(files), "theirs_ours")):
        sheet = existing_tool.compare(version, existing.directory, target, golden, tmp_path / name)
        matched = [r for r in sheet if r["Bench Name"] not in ("N/A", "")]
        print(name, len(sheet), len(matched))
        assert len(matched) > 40
