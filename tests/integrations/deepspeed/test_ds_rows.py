"""Every layout of DeepSpeed in docs/integrations.md, values compared with what hooks of the test's own and DeepSpeed's gathered gradients
say of the same training without a probe. All of them run for that page (MSPROBE_TABLE) and with MSPROBE_EVERY_CELL=1; else two layouts.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from ds_rows_job import FAILING, HPZ, LAYOUTS, STEPS, job, left_behind
from forkpool import run_ranks
from trainer_cells import LEVELS, check_activations, check_collectives, check_dump, check_grad_probe, check_incident, chosen, files

pytestmark = pytest.mark.framework
EXPERTS = "EP 2 (MoE), ZeRO 1, 2 ranks"
CHOSEN = chosen(list(LAYOUTS), "ZeRO 2, 2 ranks", "PP 2, 2 ranks")
_PLACE = tempfile.TemporaryDirectory()


def place(layout: str) -> Path:
    return Path(_PLACE.name) / str(list(LAYOUTS).index(layout))


@functools.cache
def ran(layout: str) -> list[dict[str, Any]]:
    return run_ranks(2, job, layout, files(place(layout)), timeout=500)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("layout", CHOSEN)
def test_dump(layout: str, level: str) -> None:
    """Outputs of layer norms and gradients of these outputs are what hooks saw, in every step, micro batch and rank; a level has what
    belongs to it; losses, weights and the random state are the same bits."""
    run = ran(layout)
    check_dump(run, level)
    for one in run:
        assert one[level].bits == one["bits"]


@pytest.mark.parametrize("layout", CHOSEN)
def test_monitor(layout: str) -> None:
    """Outputs of layer norms are what hooks saw; gradients and parameters have the norms of the whole ones before the update, and the
    first moment is what Adam makes of the first gradient."""
    run = ran(layout)
    check_activations(run)
    near = functools.partial(pytest.approx, rel=2e-2 if layout == EXPERTS else 1e-4, abs=1e-9)  # the former in bfloat16
    for one in run:
        seen = one["mix"].norms
        for step in range(STEPS):
            assert one["gradients"][step]
            for name, norm in one["gradients"][step].items():
                assert seen["grad_reduced", step, name] == near(norm), name
            for name, norm in one["parameters"][step].items():
                assert seen["param_origin", step, name] == near(norm), name
        for name, norm in one["gradients"][0].items():
            assert seen["exp_avg", 0, name] == near(0.1 * norm), name


@pytest.mark.parametrize("layout", [layout for layout in CHOSEN if layout != EXPERTS])
def test_grad_probe(layout: str) -> None:
    """Norms are those of the whole gradients, the ranges of the ranks make up the whole (experts: test_ds_cells.py)."""
    run = ran(layout)
    whole = [{name: norm for one in run for name, norm in one["gradients"][step].items()} for step in range(STEPS)]
    for level in LEVELS:
        check_grad_probe([one[level].probed for one in run], whole)


SENT = {
    "ZeRO 0, 2 ranks": ("all_reduce",),
    "ZeRO 1, 2 ranks": ("all_reduce", "all_gather"),
    "ZeRO 2, 2 ranks": ("all_reduce", "all_gather"),
    "ZeRO 3, 2 ranks": ("reduce_scatter", "all_gather"),
    HPZ: ("all_gather",),
    "PP 2, 2 ranks": (),
    EXPERTS: ("all_reduce", "all_gather"),
}


def totals(run: Sequence[Mapping[str, Any]], level: str, op: str, place: str) -> list[list[float]]:
    """By rank: the sums of what its calls have taken or given."""
    calls = [[call for step in one[level].calls for call in step if op in call["op"]] for one in run]
    sides = [[call.get(place) or call["kwargs"] for call in each] for each in calls]
    return [[side[0][0] * side[0][1] for side in each] for each in sides]


@pytest.mark.parametrize("layout", CHOSEN)
def test_collectives(layout: str) -> None:
    """Sums are sums, gathered tensors are made of their parts, what was scattered or exchanged adds up, and what one stage of a pipeline
    has sent the other has got."""
    run = ran(layout)
    for level in ("L1", "mix"):
        shared = [
            [[call for call in step if call["ranks"] == [0, 1] and call["op"] not in ("send", "recv")] for step in one[level].calls]
            for one in run
        ]
        check_collectives(shared, *SENT[layout])
        if layout.startswith("PP"):
            sent, came = totals(run, level, "send", "output"), totals(run, level, "recv", "output")
            assert all(came)
            assert came == [pytest.approx(sent[1], rel=1e-6), pytest.approx(sent[0], rel=1e-6)]
        if layout == EXPERTS:
            given, got = (totals(run, level, "all_to_all", place) for place in ("input", "output"))
            assert all(got)
            assert [sum(both) for both in zip(*got)] == pytest.approx([sum(both) for both in zip(*given)], rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("layout", CHOSEN)
def test_incident(layout: str) -> None:
    """`nan_analyze` names step, rank and module of a planted fault."""
    ran(layout)
    check_incident(place(layout) / "fault", 1, FAILING.get(layout, "second"))


@pytest.mark.skipif(HPZ not in CHOSEN, reason="the other layouts of ZeRO have it in test_ds_layouts.py")
def test_nothing_is_left_behind() -> None:
    """Every name of DeepSpeed and torch, of the engine, its optimizer and its model is the same object again."""
    assert run_ranks(2, left_behind, HPZ, timeout=200) == [[], []]
