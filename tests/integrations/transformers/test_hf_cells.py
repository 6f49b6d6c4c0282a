"""Hugging Face's Trainer in every layout of docs/integrations.md with every feature. All of them run for that page (MSPROBE_TABLE) and with
MSPROBE_EVERY_CELL=1; else one layout, the others have their own tests in this folder."""

from __future__ import annotations

from pathlib import Path

import hf_cells_job as cells_job
import hf_job
import pytest
from trainer_cells import check_drift, chosen, files, proven
from trainer_checks import ranks

OPS = {"FSDP2, 2 ranks": ("all_gather", "reduce_scatter"), "DeepSpeed ZeRO 3, 2 ranks": ("all_gather",)}


@pytest.mark.parametrize("layout", chosen(list(cells_job.LAYOUTS), "FSDP2, 2 ranks"))
def test_layout(layout: str, tmp_path: Path) -> None:
    """Outputs and their gradients in dumps of all levels are those that hooks of the test's own saw without the probe; gradients,
    parameters and moments those of a float64 training by hand; sums are those of what the ranks gave; a drift of one rank and a planted
    NaN are named; bits are the same; nothing stays behind."""
    n = 1 if layout == "1 rank" else 2
    given = files(tmp_path)
    run = ranks(n, cells_job.job, layout, given)
    features = proven(run, tmp_path, hf_job.reference(n), 1.0, cells_job.FAILING, *OPS.get(layout, ("all_reduce",)))
    if layout in cells_job.COPIES:
        check_drift([one["said"] for one in run], cells_job.DRIFTING)
        features.append("replica check")
    assert ranks(n, cells_job.left_behind, layout, files(tmp_path / "left")["mix"]) == [[]] * n
