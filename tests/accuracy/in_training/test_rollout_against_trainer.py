"""Log probabilities of rollout and trainer: figures, planted faults of a real training loop, files, and the page."""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from msprobe.pytorch.rl import LogProbMonitor
from msprobe_engine.accuracy.rl.causes import AGREE, MASK, NOT_FINITE, NOTHING, ROUNDING, SHIFT, TEMPERATURE, WEIGHTS, cause_of
from msprobe_engine.accuracy.rl.mismatch import Batch, measure, worst
from msprobe_engine.core.errors import UsageError

sys.path.insert(0, str(Path(__file__).parents[1]))
from toy_grpo import training


@pytest.mark.parametrize(
    ("fault", "first", "later"),
    [
        ("", AGREE, AGREE),
        ("temperature", TEMPERATURE, TEMPERATURE),
        ("low precision", ROUNDING, ROUNDING),
        ("stale weights", AGREE, WEIGHTS),
        ("logits shifted", SHIFT, SHIFT),
        ("mask", MASK, MASK),
        ("nan", NOT_FINITE, NOT_FINITE),
    ],
)
def test_faults_of_a_training(fault: str, first: str, later: str, tmp_path: Path) -> None:
    """Each planted fault is what the figures point to, in every step; a right training agrees."""
    monitor = LogProbMonitor(tmp_path, strict=True)
    found = []
    for step in training(fault):
        monitor.observe(*step)
        assert monitor.cause is not None
        found.append(monitor.cause.name)
        monitor.step()
    assert found == [first] + [later] * 4


def test_figures() -> None:
    """Estimators, ratio, clip fractions and effective sample size of numbers that can be computed by hand."""
    old, new = np.log([[0.5, 0.25, 0.9, 0.1]]), np.log([[0.25, 0.5, 0.9, 0.2]])
    found = measure(Batch.of(old, new, [[1, 1, 1, 0]]), clip=0.2)
    assert (found.tokens, found.sequences) == (3, 1)
    assert found.k1 == pytest.approx(0.0)
    assert found.k2 == pytest.approx(math.log(2) ** 2 / 3)
    assert found.k3 == pytest.approx(((0.5 - 1 + math.log(2)) + (2 - 1 - math.log(2))) / 3)
    assert (found.ratio_mean, found.ratio_least, found.ratio_most) == pytest.approx((3.5 / 3, 0.5, 2.0))
    assert (found.clip_high, found.clip_low) == pytest.approx((1 / 3, 1 / 3))
    assert found.effective == pytest.approx(3.5**2 / (3 * 5.25))
    assert (found.probability_mean, found.probability_most) == pytest.approx((0.5 / 3, 0.25))
    assert found.outside == 1
    assert [row[:3] for row in worst(Batch.of(old, new, tokens=[[7, 8, 9, 6]]), 2)] == [(0, 0, 7), (0, 1, 8)]


@pytest.mark.parametrize(
    ("rollout", "trainer", "mask", "expected"),
    [
        ([[0.0]], [[0.0]], [[0]], NOTHING),
        (np.zeros((0, 3)), np.zeros((0, 3)), None, NOTHING),
        ([[-1.0, math.nan]], [[-1.0, -2.0]], [[1, 0]], AGREE),
        ([[-1.0, -math.inf]], [[-1.0, -2.0]], None, NOT_FINITE),
        ([-1.0], [-1.0], None, AGREE),
        ([[-1e3, -1.0]], [[-1.0, -1e3]], None, WEIGHTS),
    ],
)
def test_odd_batches(rollout: Any, trainer: Any, mask: Any, expected: str) -> None:
    """Nothing in the mask, no sequences, NaN outside of it, one token, ratios that overflow."""
    assert cause_of(measure(Batch.of(rollout, trainer, mask))).name == expected


def test_files(tmp_path: Path) -> None:
    """One row a batch; the worst tokens first; ranges of positions; a second monitor continues the files."""
    for _ in range(2):
        monitor = LogProbMonitor(tmp_path, worst=2, buckets=2, strict=True)
        x = torch.full((3, 8), -1.0, dtype=torch.bfloat16)
        y = x.float().requires_grad_() * 1
        with torch.no_grad():
            y[1, 6] -= 3
        monitor.observe(x, y, tokens=torch.arange(24).reshape(3, 8))
        monitor.observe(x, x)
        monitor.step()
        monitor.close()
        assert monitor.step_count == 1

    def read(name: str) -> list[dict[str, str]]:
        return list(csv.DictReader((tmp_path / f"{name}_rank0.csv").open(newline="")))

    assert [(row["step"], row["batch"], row["cause"]) for row in read("logprob_mismatch")] == [("0", "0", SHIFT), ("0", "1", AGREE)] * 2
    (row, _) = read("logprob_worst_tokens")
    assert (row["sequence"], row["position"], row["token"], row["difference"]) == ("1", "6", "14", "-3.0")
    assert [(row["first"], row["last"], row["largest"]) for row in read("logprob_positions")[:2]] == [("0", "3", "0.0"), ("4", "7", "3.0")]
    assert read("logprob_sequences")[0]["sequence"] == "1"
    assert (tmp_path / "logprob_mismatch_rank0.csv").stat().st_mode & 0o777 == 0o640


def test_mistakes_and_faults(tmp_path: Path) -> None:
    """Wrong arguments are named; a directory that cannot be written switches the monitor off, and the training goes on."""
    for wrong in ({"clip": 0}, {"worst": 0}, {"buckets": True}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            LogProbMonitor(tmp_path, **wrong)
    monitor = LogProbMonitor(tmp_path)
    with pytest.raises(UsageError, match=r"trainer has shape \[2\], rollout \[3\]"):
        monitor.observe(torch.zeros(3), torch.zeros(2))
    with pytest.raises(UsageError, match="tokens"):
        monitor.observe([[0.0]], [[0.0]], tokens=[["a"]])
    (tmp_path / "file").write_text("")
    monitor = LogProbMonitor(tmp_path / "file" / "x")
    assert monitor.observe(torch.zeros(3), torch.zeros(3)) is not None
    assert monitor.observe(torch.zeros(3), torch.zeros(3)) is None
