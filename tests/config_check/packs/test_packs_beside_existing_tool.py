"""Our packs before the existing tool's compare, and its packs beside ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from existing_environment import VERSIONS, existing_tool

from msprobe_engine.config.pack.reader import read_pack
from msprobe_integrations.config_checker import ConfigChecker

pytestmark = pytest.mark.existing_tool
COMPARE = """
import inspect, json, sys
import pandas as pd
from msprobe.core.config_check import ConfigChecker
bench, cmp, out = sys.argv[1:4]
arguments = {"fmk": "pytorch"} if "fmk" in inspect.signature(ConfigChecker.compare).parameters else {}
ConfigChecker.compare(bench, cmp, out, **arguments)
sheets = pd.read_excel(out + "/result.xlsx", sheet_name=None)
print("RESULT" + json.dumps({name: json.loads(sheet.to_json(orient="records")) for name, sheet in sheets.items()}))
"""


def theirs(version: str, bench: Path, cmp: Path, out: Path) -> tuple[dict[str, str], dict[str, list[dict[str, Any]]]]:
    """(checker to verdict, sheet to rows) of the existing compare."""
    done = existing_tool(version).run("python", "-c", COMPARE, bench, cmp, out, cwd=bench.parent)
    sheets = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))[6:])
    return {row["filename"]: str(row["pass_check"]).lower() for row in sheets.pop("summary")}, sheets


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory, train: Callable[..., str]) -> dict[str, Path]:
    """Packs of the same training, and of ones with a difference; ``existing``: written by the existing tool."""
    place = tmp_path_factory.mktemp("packs")
    found = {}
    for name, given in {"a": {}, "b": {}, "planted": {"bit": "1", "sample": "0", "extra": "torch.rand"}}.items():
        found[name] = place / f"{name}.zip"
        train(found[name], micro_steps="2", **given)
    found["existing"] = place / "existing.zip"
    train(found["existing"], python=str(existing_tool("26.2.0").python), tool="existing", steps="2")
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_the_existing_compare_reads_our_packs(version: str, packs: dict[str, Path], tmp_path: Path) -> None:
    """All of its checkers run on two packs of ours: equal ones pass, and a difference is where it is."""
    good = {"pass", "true"}
    verdicts, sheets = theirs(version, packs["a"], packs["b"], tmp_path / "equal")
    assert set(verdicts) == {"env", "pip", "dataset", "weights", "hyperparameters", "random"}
    assert set(verdicts.values()) <= good, (verdicts, sheets)
    assert len(sheets["weights"]) == 2 * 3
    verdicts, sheets = theirs(version, packs["a"], packs["planted"], tmp_path / "planted")
    assert {checker for checker, verdict in verdicts.items() if verdict not in good} == {"weights", "dataset", "random"}
    assert {row["weight_name"] for row in sheets["weights"] if row["step"] == 0 and not row["equal"]} <= {
        "linear.weight"
    }  # too small for it
    assert {row["tag"] for row in sheets["dataset"] if row["step"] == 0 and not row["equal"]} == {"args.0", "kwargs.labels"}
    assert {row["op"] for row in sheets["random"] if not row["check_result"]} == {"torch.rand"}


def test_a_pack_of_the_existing_tool_and_ours_have_the_same_numbers(packs: dict[str, Path], tmp_path: Path) -> None:
    """One training, once with each tool: its compare finds weights and inputs equal, bit by bit of the statistics, and so does ours."""
    verdicts, _ = theirs("26.2.0", packs["existing"], packs["a"], tmp_path / "out")
    assert verdicts["weights"] == verdicts["dataset"] == "pass"
    old, new = read_pack(packs["existing"]), read_pack(packs["a"])
    assert not old.ours
    for part in ("weights", "dataset"):
        assert list(old.list_existing_entries(part)) == list(new.list_existing_entries(part)) == [(0, 0), (1, 0)]
        for name in old.list_existing_entries(part).values():
            assert old.json(name) == new.json(name)
    found = ConfigChecker.compare(packs["existing"], packs["a"], tmp_path / "ours")
    wrong = [one for one in found.as_json()["differences"] if one["sheet"] in ("weights", "dataset")]
    assert wrong == []


def test_the_existing_tool_refuses_or_replaces_nothing_of_ours(packs: dict[str, Path], tmp_path: Path, train: Callable[..., str]) -> None:
    """A pack of the existing tool at our path is replaced, not appended to."""
    path = tmp_path / "pack.zip"
    path.write_bytes(packs["existing"].read_bytes())
    train(path)
    found = read_pack(path)
    assert found.ours
    assert found.problems == []
    assert list(found.list_existing_entries("weights")) == [(0, 0)]
