"""Every way to call a collective is seen once, with the values, ranks and options it was called with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from collective_ways import WAYS, Call
from distributed_job import Seen, records
from forkpool import run_ranks

pytestmark = pytest.mark.framework
Recorded = tuple[list[Seen], list[Call], dict[str, int]]
PUBLIC = {"async": False}
"""Of a call of a public function that says nothing else."""


def seen(names: list[str], store: str = "") -> dict[str, Recorded]:
    if store:  # torch looks at every collective itself then, in a wrapper around the backend
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(os.environ["RANK"]), world_size=2)
    out: dict[str, Recorded] = {}
    for name in names:
        expected: list[Call] = []
        found, lost = records(lambda name=name, expected=expected: expected.extend(WAYS[name]()))
        out[name] = found, expected, lost
    return out


@pytest.fixture(scope="module")
def ran() -> list[dict[str, Recorded]]:
    """All ways, once."""
    return run_ranks(2, seen, list(WAYS))


def tensors(value: Any) -> list[float]:
    """The means of a record, without numbers and names the user passed."""
    if isinstance(value, float):
        return [value]
    if isinstance(value, dict):
        return [m for v in value.values() for m in tensors(v)]
    return [m for v in value for m in tensors(v)] if isinstance(value, list) else []


def check(found: list[Seen], expected: list[Call], lost: dict[str, int]) -> None:
    assert [r.name.rpartition(".")[0] for r in found] == [c.name for c in expected]
    for record, call in zip(found, expected):
        assert tensors(record.args) + tensors(record.kwargs) == call.before, record
        if call.after is not None:
            assert tensors(record.output) == call.after, record
        wanted = {"group_ranks": [0, 1], **(PUBLIC if not call.name.startswith(("c10d_", "functional_")) else {}), **call.tags}
        assert {key: value for key, value in record.tags.items() if key in wanted} == wanted, record
        assert "incomplete" not in record.tags, record
    assert lost == {}


@pytest.mark.parametrize("name", WAYS)
def test_way(name: str, ran: list[dict[str, Recorded]]) -> None:
    """Seen once, in order, with inputs as they were before and outputs as they were after."""
    for rank in ran:
        check(*rank[name])


def test_under_torchs_own_checks(tmp_path: Path) -> None:
    """The same with ``TORCH_DISTRIBUTED_DEBUG=DETAIL``: what torch sends to compare the calls of the ranks is not recorded."""
    names = ["functions", "process_group", "functional_collectives", "coalesced", "barriers_and_objects"]
    for rank in run_ranks(2, seen, names, str(tmp_path / "store")):
        for name in names:
            check(*rank[name])
