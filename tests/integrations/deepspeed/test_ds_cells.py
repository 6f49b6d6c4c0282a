"""Experts over two ranks with every level of the dump and the gradient probe, values compared; copies that ZeRO 1 and 2 keep."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import pytest
from ds_cells_job import LEVELS, STEPS, drifting, left_behind, watched
from forkpool import run_ranks

pytestmark = pytest.mark.framework
EXPERTS = "EP 2 (MoE), ZeRO 1, 2 ranks"
_SHARD = re.compile(r"\[(\d+), (\d+)\) of (\d+)")


@functools.cache
def ran() -> list[dict[str, Any]]:
    return run_ranks(2, watched, timeout=120)


@pytest.mark.parametrize("level", LEVELS)
def test_dump(level: str) -> None:
    """Outputs of linear layers and of calls of ``linear``, and the gradients of these outputs, are what hooks saw in the same training
    without a probe; a level has what belongs to it; losses and weights are the same bits."""
    wanted = {"L0": {"module"}, "L1": {"operator"}, "mix": {"module", "operator"}}[level]
    for rank in ran():
        bits, seen, _ = rank[level]
        assert bits == rank["bits"]
        for norms, expected in zip(seen, rank["norms"], strict=True):
            assert {kind for kind, _ in norms} == wanted
            for kind in wanted:
                assert norms[kind, "forward"] == pytest.approx(expected[kind, "forward"], rel=1e-6)
                assert sorted(norms[kind, "backward"]) == pytest.approx(sorted(expected[kind, "backward"]), rel=1e-6)


def test_grad_probe() -> None:
    """Norms are those of the gradients that DeepSpeed gathers by itself; ranges of the ranks make up the whole, an expert has one rank."""
    run = ran()
    for at, rank in enumerate(run):
        for step in range(STEPS):
            for name, whole in rank["gradients"][step].items():
                owners = [rank] if "deepspeed_experts" in name else run
                rows = [one["mix"][2][step].get(name) for one in owners]
                ranges = {(row[1], row[0]) for row in rows if row is not None}
                assert ranges, (at, name)
                parts = sorted((*map(int, found.groups()), n) for text, n in ranges if (found := _SHARD.fullmatch(text)))
                parts = [part for part in parts if part[0] < part[1]]
                if parts:
                    assert [part[0] for part in parts] == [0, *(part[1] for part in parts[:-1])]
                    assert parts[-1][1] == parts[-1][2]
                norms = [part[3] for part in parts] or [next(iter(ranges))[1]]
                assert math.hypot(*norms) == pytest.approx(whole, rel=5e-3), name  # gathered ones are in bfloat16


def test_nothing_is_left_behind() -> None:
    """Every name of DeepSpeed and torch, of the engine, its optimizer and its model is the same object again."""
    assert run_ranks(2, left_behind) == [[], []]


@pytest.mark.parametrize("layout", ["ZeRO 1, 2 ranks", "ZeRO 2, 2 ranks", EXPERTS])
def test_replicas(layout: str) -> None:
    """A parameter that is another one on one rank when the update has gathered it is named in that step, before the next one heals it."""
    said = [line for lines in run_ranks(2, drifting, layout) for line in lines if "replica_mismatch" in line]
    name = "i.weight" if layout == EXPERTS else "b.weight"
    assert said
    assert any(name in line for line in said), said
