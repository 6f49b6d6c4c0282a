"""Every layout of Lightning in docs/integrations.md with every feature. All of them run for that page (MSPROBE_TABLE) and with
MSPROBE_EVERY_CELL=1, else one."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pl_cells_job as job
import pl_job
import pytest
import trainer_cells as tc
from trainer_checks import compare, ranks

pytestmark = pytest.mark.framework
CHOSEN = tc.chosen(list(job.LAYOUTS), "FSDP2, 2 ranks")


@functools.cache
def ran(layout: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        return ranks(job.LAYOUTS[layout].ranks, job.watched, job.LAYOUTS[layout], folder, tc.files(folder))


@functools.cache
def truth(layout: str) -> dict[Any, float]:
    """The same in one process, by hand, in float64."""
    found = pl_job.reference(job.LAYOUTS[layout].ranks)
    return {key: value for key, value in found.items() if key[1] < job.STEPS}


def gradients(layout: str) -> list[dict[str, float]]:
    """Norms by step."""
    found = truth(layout)
    return [{key[2]: found[key] for key in found if key[:2] == ("grad_reduced", step)} for step in range(job.STEPS)]


@pytest.mark.parametrize("level", tc.LEVELS)
@pytest.mark.parametrize("layout", CHOSEN)
def test_dump(layout: str, level: str) -> None:
    """Outputs of linear layers and of calls of ``linear``, and gradients of these outputs, are what hooks saw in the same training without
    a probe; a level has what belongs to it."""
    tc.check_dump(ran(layout), level)


@pytest.mark.parametrize("layout", CHOSEN)
def test_monitor(layout: str) -> None:
    """Outputs are what hooks saw; gradients, parameters before and after and moments are those of one process in float64; the sum of
    squares of what is reduced is that of the whole gradients."""
    run = ran(layout)
    tc.check_activations(run)
    features = ["monitor: activations", "monitor: gradients", "monitor: parameters", "monitor: optimizer"]
    for rank in run:
        assert compare(rank["mix"].norms, truth(layout)) == 5 * 4 * job.STEPS
    if len(run) > 1:
        check_collectives(layout, run)
        features.append("collectives")


def check_collectives(layout: str, run: list[dict[str, Any]]) -> None:
    """What came out of the reductions of a step makes up the gradients of the whole batch: on each rank, or all shards together."""
    op, holders = ("all_reduce", 2) if layout.startswith("DDP") else ("reduce_scatter", 1)
    for step, whole in enumerate(gradients(layout)):
        reduced = [call for rank in run for call in rank["mix"].calls[step] if op in call["op"]]
        assert {tuple(call["ranks"]) for call in reduced} == {(0, 1)}
        got = sum(call["output"][0][2] ** 2 for call in reduced)
        assert got == pytest.approx(holders * sum(norm**2 for norm in whole.values()), rel=1e-4)


@pytest.mark.parametrize("layout", CHOSEN)
def test_grad_probe(layout: str) -> None:
    """Gradients of an update are those of that step, although Lightning makes them within it; shards make up the whole."""
    tc.check_grad_probe([rank["mix"].probed for rank in ran(layout)], gradients(layout))


@pytest.mark.parametrize("layout", CHOSEN)
def test_same_bits(layout: str) -> None:
    """Parameters, losses and the random state are those without a probe; nothing of Lightning, torch, the module or the Trainer is another
    object after the probe has gone."""
    for rank in ran(layout):
        assert [rank[level].bits for level in tc.LEVELS] == [rank["bits"]] * len(tc.LEVELS)
        assert rank["left"] == []


@pytest.mark.parametrize("layout", CHOSEN)
def test_incident(layout: str, tmp_path: Path) -> None:
    """A parameter that drifts on one rank is named in that step, and before it nothing is; `nan_analyze` finds step, rank and module of a
    NaN that was planted."""
    chosen, given = job.LAYOUTS[layout], tc.files(tmp_path)
    said = ranks(chosen.ranks, job.spoiled, chosen, tmp_path, given)
    tc.check_incident(given["fault"].parent, chosen.ranks - 1, "net.0")
    features = ["incident capture"]
    if chosen.copies:
        tc.check_drift(said, "net.2.bias")
        features.append("replica check")
