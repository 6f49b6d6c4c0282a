"""`diagnose` on the monitor output of two runs: whether their models were given the same batches."""

from __future__ import annotations

from pathlib import Path

import pytest
from written_monitor import Monitor

from msprobe_engine.find.findings import Diagnosis
from msprobe_engine.find.run import diagnose

SAME = ["0.25", "0.5", "0.125"]


def write_run(root: Path, batches: list[str] | None, off: int | None = None) -> Path:
    """Monitor output of three steps with these digests of batches on rank 1 (rank 0 has the same in all runs); in step `off` an
    activation of rank 1 is another one."""
    monitor = Monitor(root)
    if off is not None:
        monitor.put(1, off, "actv", "layers.0.output", "9")
    monitor.write()
    for rank, digests in enumerate((SAME, batches)):
        (place,) = (root / "monitor").glob(f"*-rank{rank}-*")
        lines = [f"{step},batch_digest,{digest}" for step, digest in enumerate(digests or [])] if batches else []
        (place / "scalars_0-9.csv").write_text("\n".join(["step,name,value", *lines]) + "\n")
    return root


def diagnose_runs(root: Path, batches: list[str] | None, off: int | None, golden: list[str] | None = None) -> Diagnosis:
    return diagnose(write_run(root / "target", batches, off), write_run(root / "golden", golden or SAME))


@pytest.mark.parametrize(("changed", "said"), [(0, "from the first step on"), (1, "those of the steps before are the same (1)")])
def test_another_batch_comes_first(changed: int, said: str, tmp_path: Path) -> None:
    """Where the runs part in the step of another batch, that batch is named first, with its rank."""
    batches = [*SAME[:changed], "0.75", *SAME[changed + 1 :]]
    found = diagnose_runs(tmp_path, batches, changed)
    first = found.first_suspect
    assert first is not None
    assert (found.finding, first.kind, first.step, first.rank) == ("divergence", "data", changed, 1)
    assert said in first.why
    assert found.suspects[1].record == "actv/layers.0.output"


@pytest.mark.parametrize("digest", ["0.75", "nan", ""])
def test_digests_of_other_inputs_say_nothing(digest: str, tmp_path: Path) -> None:
    """Digests that differ in a step in which the runs agree were made of something else; a cell may be no number. Neither is another
    batch, nor are the batches said to be the same."""
    found = diagnose_runs(tmp_path, [digest, *SAME[1:]], 1)
    assert found.first_suspect is not None
    assert found.first_suspect.record == "actv/layers.0.output"
    assert digest != "0.75" or not any("the same samples" in line for line in found.evidence)


def test_a_rank_without_integers(tmp_path: Path) -> None:
    """A rank that is given no integers in either run (a later stage of a pipeline) does not hide another batch of the others."""
    runs = write_run(tmp_path / "target", SAME, 1), write_run(tmp_path / "golden", SAME)
    for run in runs:
        for place in (run / "monitor").glob("*-rank1-*"):
            (place / "scalars_0-9.csv").write_text("step,name,value\n")
    (place,) = (runs[0] / "monitor").glob("*-rank0-*")
    (place / "scalars_0-9.csv").write_text("step,name,value\n0,batch_digest,0.25\n1,batch_digest,0.75\n")
    found = diagnose(*runs)
    assert found.first_suspect is not None
    assert (found.first_suspect.kind, found.first_suspect.rank) == ("data", 0)


def test_a_batch_behind_the_fault_is_no_cause(tmp_path: Path) -> None:
    """Runs that part before the first other batch part for another reason; that the batches are the same until then is said."""
    found = diagnose_runs(tmp_path, [*SAME[:2], "0.75"], 1)
    assert found.first_suspect is not None
    assert found.first_suspect.record == "actv/layers.0.output"
    assert any("the same samples until then" in line and "steps compared: 2" in line for line in found.evidence)


def test_other_batches_with_the_same_numbers_are_no_difference(tmp_path: Path) -> None:
    """An integer that the model is given and that changes no number is nothing."""
    found = diagnose_runs(tmp_path, ["0.75", *SAME[1:]], None)
    assert (found.finding, found.suspects, found.problems) == ("none", [], [])


@pytest.mark.parametrize("off", [None, 1])
def test_runs_without_digests(off: int | None, tmp_path: Path) -> None:
    """Output of a version that wrote no digests: nothing is said of batches, and nothing is missing."""
    found = diagnose_runs(tmp_path, None, off)
    assert found.finding == ("none" if off is None else "divergence")
    assert found.problems == []
    assert not any("batch" in line for line in (*found.evidence, *(suspect.why for suspect in found.suspects)))
