"""A loop around an `Accelerator` in every layout of docs/integrations.md with every feature. All of them run for that page (MSPROBE_TABLE)
and with MSPROBE_EVERY_CELL=1; else one layout, the others have their own tests in this folder."""

from __future__ import annotations

from pathlib import Path

import acc_cells_job as cells_job
import acc_job
import pytest
from trainer_cells import check_drift, chosen, files, proven
from trainer_checks import ranks

OPS = {"FSDP2, 2 ranks": ("all_gather", "reduce_scatter")}


@pytest.mark.parametrize("layout", chosen(list(cells_job.LAYOUTS), "FSDP2, 2 ranks"))
def test_layout(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and their gradients in dumps of all levels are those that hooks of the test's own saw without the probe; gradients,
    parameters and moments those of a float64 training by hand; sums are those of what the ranks gave; a drift of one rank and a planted
    NaN are named; bits are the same; nothing stays behind."""
    if "ZeRO" in layout:
        monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    n = 1 if layout == "1 rank" else 2
    run = ranks(n, cells_job.job, layout, files(tmp_path))
    reference = acc_job.reference(n, cells_job.STEPS)
    features = proven(run, tmp_path, reference, 0.5, cells_job.FAILING, *OPS.get(layout, ("all_reduce",)))
    if layout in cells_job.COPIES:
        check_drift([one["said"] for one in run], cells_job.DRIFTING)
        features.append("replica check")
    assert ranks(n, cells_job.left_behind, layout, files(tmp_path / "left")["mix"]) == [[]] * n
