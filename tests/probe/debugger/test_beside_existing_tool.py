"""Uses of `PrecisionDebugger` next to the existing tool: one script, the same records with the same numbers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import existing_debugger
import existing_run
import pytest
from existing_environment import VERSIONS, environment_of, existing_tool

from msprobe_engine.formats.dump.reader import open_dump

pytestmark = [pytest.mark.framework, pytest.mark.existing_tool]


def run(python: Path | str, out: Path) -> Path:
    """Run all cases with `python`; returns the directory of their dumps."""
    command = [str(python), existing_debugger.__file__, str(out)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=out, env=environment_of(python))
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-3000:]
    return out


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where the dumps of each version are, and of this project ("")."""
    pythons = {"": Path(sys.executable), **{version: existing_tool(version).python for version in VERSIONS}}
    return {version: run(python, tmp_path_factory.mktemp("runs")) for version, python in pythons.items()}


def known(version: str, case: str, names: list[str]) -> list[str]:
    """Record names of that version as they are here: what it writes on purpose or by mistake in another way is put right."""
    if version == "26.2.0":
        return names
    # It sees what its own hooks call and the start of `backward`, and writes parameter gradients without a number, always first.
    names = [n for n in names if not n.startswith(("Tensor.view_as.", "Torch.ones_like.")) and not n.endswith(".parameters_grad")]
    if case in ("tokens", "pairs"):  # it counts calls of modules outside of the window
        bases = sorted({n.rpartition(".")[0] for n in names if n.startswith("Module.")})
        again = {b: iter(range(99)) for b in bases}
        names = [f"{n.rpartition('.')[0]}.{next(again[n.rpartition('.')[0]])}" if n.startswith("Module.") else n for n in names]
    return names


@pytest.mark.parametrize("case", existing_debugger.CASES)
@pytest.mark.parametrize("version", VERSIONS)
def test_same_records(made: dict[str, Path], version: str, case: str) -> None:
    """Steps, names, order and statistics are those of the existing tool. Two orders differ: 26.2.0 writes a custom function before
    the modules it calls and their gradients, and the parameter gradients of a module before or after its backward record, as its
    hooks come."""
    ours, theirs = (made[v] / case / "dump" for v in ("", version))
    a, b = open_dump(ours), open_dump(theirs)
    assert a.steps == b.steps
    for step in a.steps:
        mine, other = list(a.load(step).entries), known(version, case, list(b.load(step).entries))
        if version == "8.1.1":
            mine = [n for n in mine if ".parameters_grad." not in n]
        assert sorted(mine) == sorted(other)
        if case not in ("custom", "lists"):
            assert mine == other
        if not (version == "8.1.1" and case in ("tokens", "pairs")):
            figures = existing_run.figures(ours, theirs, step)
            assert figures["different"] == []
            assert figures["statistics"] > 10
