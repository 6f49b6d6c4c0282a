"""The fixture `cells`: a test says which cells of docs/integrations.md it proves. They count when the test passes.

With ``MSPROBE_TABLE=<directory>`` every test process adds JSON lines to a file of its own there::

    {"framework": "PyTorch", "version": "2.13.0", "torch": "2.13.0", "python": "3.11", "layout": "DDP, 2 ranks",
     "feature": "same bits", "compared": true, "test": "tests/x/test_y.py::test_z"}
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Generator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from cell_names import FRAMEWORKS, checked

NOTES = pytest.StashKey[list[dict[str, str | bool]]]()


def installed(distribution: str) -> str:
    """Its version without a build's suffix (``2.13.0+cpu`` is 2.13.0); raises LookupError when it is not installed."""
    try:
        return version(distribution).partition("+")[0]
    except PackageNotFoundError:
        raise LookupError(
            f"{distribution} is not installed; a test that runs a checkout names the version: cells.ran(..., version=)"
        ) from None


class Cells:
    """Takes the cells of one test."""

    def __init__(self, test: str, notes: list[dict[str, str | bool]]) -> None:
        self._test = test
        self._notes = notes
        self._process = os.getpid()

    def ran(self, framework: str, layout: str, *features: str, version: str | None = None) -> None:
        """This test has run `features` of `framework` in `layout` ("ZeRO 2, 2 ranks") and found them correct: their values are those of
        gathered tensors in float64, or of one process. To be called at its end.

        Args:
            version: of the framework, when it is not the one installed in this environment (a child process on another path, a checkout).

        Raises:
            ValueError: a name that the table does not have (`cell_names`).
        """
        self._note(framework, layout, features, version, True)

    def wrote(self, framework: str, layout: str, *features: str, version: str | None = None) -> None:
        """As `ran`, for a test that has found what was asked for in the right steps and on the right ranks, and has not compared values."""
        self._note(framework, layout, features, version, False)

    def _note(self, framework: str, layout: str, features: tuple[str, ...], version: str | None, compared: bool) -> None:
        checked(framework, features)
        if not layout.strip():
            raise ValueError("the layout has no name")
        if os.getpid() != self._process:
            raise RuntimeError("cells are noted by the test, not by a rank that it has forked")
        common: dict[str, str | bool] = {
            "framework": framework,
            "version": version or installed(FRAMEWORKS[framework]),
            "torch": installed("torch"),
            "python": ".".join(platform.python_version_tuple()[:2]),
            "layout": layout.strip(),
            "compared": compared,
        }
        self._notes.extend({**common, "feature": feature, "test": self._test} for feature in features)


@pytest.fixture
def cells(request: pytest.FixtureRequest) -> Cells:
    """``cells.ran(framework, layout, *features)``: what this test proves, see `Cells.ran`."""
    notes = request.node.stash.setdefault(NOTES, [])
    notes.clear()
    return Cells(request.node.nodeid, notes)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, object, None]:
    """After a test that passed: its cells are written."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]  # pluggy's Result
    directory = os.environ.get("MSPROBE_TABLE")
    if call.when == "call" and report.passed and directory:
        notes = item.stash.get(NOTES, [])
        if notes:
            Path(directory).mkdir(parents=True, exist_ok=True)
            with open(Path(directory) / f"cells-{os.getpid()}.jsonl", "a", encoding="utf-8") as f:
                f.writelines(json.dumps(note) + "\n" for note in notes)
