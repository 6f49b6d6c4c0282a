"""A training whose operator fails while a dump is taken ends as it would without the dump."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ms_programs import run

PROGRAM = Path(__file__).with_name("failing_training.py")


def _run(*arguments: str) -> list[str]:
    return run(PROGRAM, *arguments, check=True).stdout.splitlines()


@pytest.mark.parametrize(
    ("how", "error"), [("unused", "RuntimeError Cholesky expects"), ("outside", "ValueError For 'TensorScatterUpdate'")]
)
def test_the_training_ends_as_it_would(how: str, error: str) -> None:
    """Type and text of the error are those without a capture, also of a result that nobody looks at; the capture's own guard is not told,
    and what was seen before is there."""
    (plain,) = _run(how, "none")
    assert plain.startswith(error)
    watched, seen = _run(how, "mix")
    assert watched == plain
    assert seen.startswith("{} [")
    assert "'Cell.first.Dense.forward.0'" in seen


@pytest.mark.parametrize("how", ["step", "exit"])
def test_a_failure_that_nobody_has_waited_for_is_not_kept_back(how: str, tmp_path: Path) -> None:
    """The framework tells of a failed operator once, and gives empty memory for its result from then on: where the dump waits it goes on to
    the training, and the step is written all the same."""
    done = run(PROGRAM.with_name("failing_late.py"), how, cwd=tmp_path)
    assert "Gather" in (done.stdout if how == "step" else done.stderr)
    assert "is switched off" not in done.stderr
    (written,) = tmp_path.glob("dump/step0/*/dump.json")
    assert list(json.loads(written.read_text())["data"]) == ["Cell.layer.Dense.forward.0"]
