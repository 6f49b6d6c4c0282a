"""The probe changes nothing: loss, weights and random state are the same bits with it and without it."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from every_family import EVERY_FAMILY
from forkpool import run_ranks
from megatron_harness import probe_settings, run_gpt

MANY = 4
ALL = replace(EVERY_FAMILY, micro_batch_gradients=True, digest=True, histograms=("grad_reduced", "update"))
CASES = (
    *((1, "", level) for level in ("monitor", "L0", "L1", "mix")),
    *((2, "--distopt --overlap --overlap-param", level) for level in ("monitor", "L0", "L1", "mix")),
    *((2, "--distopt", level) for level in ("monitor", "L1")),
    *((2, "--tp 2", level) for level in ("monitor", "L0", "L1")),
    *((2, "--pp 2 --untie", level) for level in ("monitor", "L0", "L1")),
    (2, "--pp 2", "mix"),
    (2, "--bf16 --distopt", "mix"),
    (2, "--ep 2 --experts 4 --allgather --distopt", "mix"),
    (4, "--tp 2 --pp 2", "mix"),
    (4, "--tp 2 --sp --distopt --overlap", "mix"),
)


def job(argv: str, level: str | None, output: str) -> tuple[dict[str, Any], int, int]:
    settings = None if level is None else probe_settings(ALL, level="" if level == "monitor" else level, output=output)
    state, frames = run_gpt(argv, settings)
    return state, len(frames), sum(len(f.entries) for f in frames)


@functools.cache
def without(ranks: int, argv: str) -> list[Any]:
    return run_ranks(ranks, job, argv, None, "")


@pytest.mark.fast_cells("2---distopt-monitor")
@pytest.mark.framework
@pytest.mark.parametrize(("ranks", "argv", "level"), CASES)
def test_bits_are_the_same(ranks: int, argv: str, level: str, tmp_path: Path) -> None:
    """After 4 steps with everything watched, losses, weights and the random state equal those of a run
    without the probe, bit by bit, on every rank."""
    argv = f"--steps {MANY} {argv}"
    plain = without(ranks, argv)
    probed = run_ranks(ranks, job, argv, level, str(tmp_path), timeout=240)
    for (expected, _, _), (state, frames, entries) in zip(plain, probed):
        assert frames == MANY
        assert (entries > 0) == (level != "monitor")
        assert state == expected
