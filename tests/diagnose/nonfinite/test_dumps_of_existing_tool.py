"""The existing tool's own dumps of four ranks with a NaN of known origin: `nan_analyze` and `diagnose` name it first in all of them.

The dumps, and what the version that made them says of each, are from ``tests/fixtures/make_existing_nan.py``.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from msprobe_engine.find.nonfinite.nan_analyze import nan_analyze
from msprobe_engine.find.run import diagnose
from msprobe_engine.report.table.diff_analyze import first_differences

FIXTURES = Path(__file__).parents[2] / "fixtures"
VERSIONS = ("8.1.1", "26.2.0")
TRUTH = {
    "before": (2, r"Torch\.sqrt\.0\.forward"),
    "between": (1, r"Torch\.sqrt\.0\.forward"),
    "after": (3, r"Torch\.log\.0\.forward"),
    "two_groups": (3, r"Torch\.sqrt\.0\.forward"),
    "two_groups_late": (2, r"Torch\.div\.0\.forward"),
    "side_branch": (1, r"Torch\.log\.0\.forward"),
    "nested_output": (1, r"Module\..*Nested\.forward\.0|Module\.fc\..*|Tensor\.clone\.0\.forward"),
    "send_recv": (1, r"Torch\.sqrt\.0\.forward"),
    "send_back": (3, r"Torch\.mul\.0\.forward|Tensor\.__mul__\.0\.forward"),
    "in_collective": (None, r"Distributed\.all_reduce\.0\.forward"),
    "gathered": (2, r"Torch\.sqrt\.0\.forward"),
    "broadcast": (3, r"Torch\.sqrt\.0\.forward"),
    "backward": (1, r"Torch\.sqrt\.0\.backward"),
    "no_fault": (None, ""),
}
"""Case -> rank (None: any) and record; "" when there is no fault."""
PAIRS = {"backward": (1, r"Torch\.mul\.0\.forward"), "in_collective": (None, r"(Torch\.full_like|Distributed\.all_reduce)\.0\.forward")}
"""Where the two programs of a case part before the NaN is born."""
ALL = [(version, case) for version in VERSIONS for case in json.loads((FIXTURES / f"nan_{version}.json").read_text())]
"""Without the pipelines that 8.1.1 does not get through."""


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("nan")
    for version in VERSIONS:
        with tarfile.open(FIXTURES / f"nan_{version}.tar.gz") as archive:
            archive.extractall(root / version, filter="data")
    return root


def right(case: str, rank: int, record: str, other: Mapping[str, tuple[int, str]] = MappingProxyType({})) -> bool:
    true_rank, pattern = other.get(case, TRUTH[case])
    return (true_rank is None or rank == true_rank) and re.fullmatch(pattern, record) is not None


@pytest.mark.parametrize(("version", "case"), ALL)
def test_nan_analyze(version: str, case: str, dumps: Path) -> None:
    """The first suspect is the record in which the NaN or Inf was born; the run without it is clean."""
    found = nan_analyze(dumps / version / case / "bad" / "step0").findings
    if case == "no_fault":
        assert not found
        return
    assert right(case, found[0]["rank"], found[0]["op_name"]), [(item["rank"], item["op_name"]) for item in found]
    assert not nan_analyze(dumps / version / case / "clean").findings


@pytest.mark.parametrize(("version", "case"), ALL)
def test_diagnose_alone(version: str, case: str, dumps: Path) -> None:
    """`diagnose` of the one run names the same; of a run without a fault it says none."""
    found = diagnose(dumps / version / case / "bad")
    if case == "no_fault":
        assert found.finding == "none"
        return
    first = found.first_suspect
    assert first is not None
    assert found.finding in ("nonfinite", "overflow")
    assert right(case, first.rank, first.record), found.headline()


@pytest.mark.fast_cells("8.1.1-before", "8.1.1-between", "8.1.1-after", "8.1.1-two_groups")
@pytest.mark.parametrize(("version", "case"), ALL)
def test_diagnose_against_the_clean_run(version: str, case: str, dumps: Path, tmp_path: Path) -> None:
    """Held against the run without the fault `diagnose` names the same record, and ``diff_analyze`` holds it; equal runs give none."""
    bad, clean = dumps / version / case / "bad", dumps / version / case / "clean"
    assert diagnose(clean, clean).finding == "none"
    assert first_differences(clean, clean, tmp_path)[0] is None
    found = diagnose(bad, clean)
    if case == "no_fault":
        assert found.finding == "none"
        return
    first = found.first_suspect
    assert first is not None
    assert right(case, first.rank, first.record, PAIRS), found.headline()
    path, _ = first_differences(bad, clean, tmp_path)
    assert path is not None
    nodes = json.loads(path.read_text())
    node = nodes[f"rank_{first.rank}"][0]
    assert node["op_name"] == first.record
    assert set(node["data_info"]) == {"input", "output"}
    assert node["data_info"]["output"]
    assert list(tmp_path.iterdir()) == [path]


def test_what_the_existing_tool_says() -> None:
    """The sentence of docs/evidence/benchmarks.md: how many of the cases the two versions of the existing tool name first."""
    for version in VERSIONS:
        said = json.loads((FIXTURES / f"nan_{version}.json").read_text())
        hits = sum(_hit(case, said[case]) for case in said)
        assert f"{hits} of {len(said)} ({version})" in (FIXTURES.parents[1] / "docs/evidence/benchmarks.md").read_text()


def _hit(case: str, said: list[str]) -> bool:
    if case == "no_fault":
        return not said
    named = [entry.split(" ", 1) for entry in said]
    return bool(named) and all(right(case, int(rank.removeprefix("rank_")), record) for rank, record in named)
