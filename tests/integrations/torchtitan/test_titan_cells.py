"""Every layout of torchtitan in docs/integrations.md with every feature. All of them run for that page (MSPROBE_TABLE) and with
MSPROBE_EVERY_CELL=1, else one."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import titan_cells_job as job
import titan_job
import trainer_cells as tc
from trainer_checks import compare, ranks

pytestmark = pytest.mark.framework
titan_job.stand_in()
CHOSEN = tc.chosen(list(job.LAYOUTS), "TP 2, 2 ranks")
CLIP = 1.0
"""torchtitan's default."""


@functools.cache
def ran(layout: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        titan_job.assets(folder / "run")
        return ranks(job.LAYOUTS[layout].ranks, job.watched, job.LAYOUTS[layout], folder / "run", tc.files(folder))


def gradients(layout: str) -> list[dict[str, float]]:
    """By step, of all stages: norms of the whole gradients, before they are clipped."""
    whole = {key: value for rank in ran(layout) for key, value in rank["whole"].items() if key[0] == "grad_reduced"}
    return [{name: value for (_, at, name), value in whole.items() if at == step} for step in range(job.STEPS)]


@pytest.mark.parametrize("level", tc.LEVELS)
@pytest.mark.parametrize("layout", CHOSEN)
def test_dump(layout: str, level: str) -> None:
    """Outputs of norm layers and of calls of ``rms_norm``, and gradients of these outputs, are what hooks saw in the same training without
    a probe; a level has what belongs to it."""
    tc.check_dump(ran(layout), level)


@pytest.mark.parametrize("layout", CHOSEN)
def test_monitor(layout: str) -> None:
    """Outputs are what hooks saw; gradients, parameters before and after and moments are those of the whole tensors, gathered, in
    float64."""
    run = ran(layout)
    tc.check_activations(run)
    for rank in run:
        assert compare(rank["mix"].norms, rank["whole"]) > 50


@pytest.mark.parametrize("layout", [layout for layout in CHOSEN if layout != "1 rank"])
def test_collectives(layout: str) -> None:
    """What is between the ranks of a layout is what hooks of the test saw, or what both ends say."""
    run = ran(layout)
    for step in range(job.STEPS):
        calls = [rank["mix"].calls[step] for rank in run]
        assert all(calls)
        CHECKS[layout.split(",")[0]](layout, step, calls)


def check_shards(layout: str, step: int, calls: list[list[dict[str, Any]]]) -> None:
    """Shards of all ranks make up the whole gradients."""
    reduced = [call for rank in calls for call in rank if "reduce_scatter" in call["op"]]
    total = sum(norm**2 for norm in gradients(layout)[step].values())
    assert sum(call["output"][0][2] ** 2 for call in reduced) == pytest.approx(total, rel=1e-4)


def check_sums(layout: str, step: int, calls: list[list[dict[str, Any]]]) -> None:
    """What is gathered is what the ranks gave; what is summed, or summed and scattered, has the sum of what they gave."""
    first, second = calls
    assert [call["op"] for call in first] == [call["op"] for call in second]
    kinds = set()
    for pair in zip(first, second):
        (counts, means, norms), (after, out_means, out_norms) = (
            list(zip(*(call[place][0] for call in pair))) for place in ("input", "output")
        )
        kind = pair[0]["op"].removeprefix("functional_").partition("_tensor")[0]
        gave = sum(count * mean for count, mean in zip(counts, means))
        scale = 1e-4 * sum(norms) * counts[0] ** 0.5
        if kind == "all_gather_into":
            assert out_norms == pytest.approx([sum(norm**2 for norm in norms) ** 0.5] * 2, rel=1e-5)
        elif kind == "reduce_scatter":
            assert sum(count * mean for count, mean in zip(after, out_means)) == pytest.approx(gave, abs=scale)
        elif pair[0]["reduce"] == "sum":
            assert [count * mean for count, mean in zip(after, out_means)] == pytest.approx([gave] * 2, abs=scale)
        kinds.add(kind)
    assert kinds == {"all_gather_into", "reduce_scatter", "all_reduce"}
    gathered = [call["output"][0][2] for call in first if "all_gather" in call["op"]]
    (last,) = ran(layout)[0]["modules"][step]["norm"]
    assert last == pytest.approx(min(gathered, key=lambda norm: abs(norm - last)), rel=1e-5)  # the whole output of the last norm layer


def check_messages(layout: str, step: int, calls: list[list[dict[str, Any]]]) -> None:
    """A stage receives what the other sent; the first sends the outputs of its last layer."""

    def norms(rank: int, op: str, place: str) -> list[float]:
        return [one[2] for call in calls[rank] if call["op"] == op for one in call[place]]

    for here, there in ((0, 1), (1, 0)):
        assert norms(here, "irecv", "output") == pytest.approx(norms(there, "isend", "input"), rel=1e-6)
    sent, got = norms(0, "batch_isend_irecv", "output")
    assert norms(1, "batch_isend_irecv", "output") == pytest.approx([got, sent], rel=1e-6)
    assert [*norms(0, "isend", "input"), sent] == pytest.approx(ran(layout)[0]["mix"].outputs[step]["layers.0"], rel=1e-6)


CHECKS = {"FSDP2": check_shards, "TP 2": check_sums, "PP 2": check_messages}


@pytest.mark.parametrize("layout", CHOSEN)
def test_grad_probe(layout: str) -> None:
    """Gradients of an update are those of that step, clipped; shards make up the whole."""
    tc.check_grad_probe([rank["mix"].probed for rank in ran(layout)], gradients(layout), CLIP)


@pytest.mark.parametrize("layout", CHOSEN)
def test_same_bits(layout: str) -> None:
    """Parameters, losses and the random state are those without a probe; nothing of torchtitan, torch, the model or the Trainer is
    another object after the probe has gone."""
    for rank in ran(layout):
        assert [rank[level].bits for level in tc.LEVELS] == [rank["bits"]] * len(tc.LEVELS)
        assert rank["left"] == []


@pytest.mark.parametrize("layout", CHOSEN)
def test_incident(layout: str, tmp_path: Path) -> None:
    """A parameter that drifts on one rank is named in that step, and before it nothing is; `nan_analyze` finds step, rank and module of a
    NaN that was planted."""
    chosen, given = job.LAYOUTS[layout], tc.files(tmp_path)
    titan_job.assets(tmp_path / "run")
    said = ranks(chosen.ranks, job.spoiled, chosen, tmp_path / "run", given)
    tc.check_incident(given["fault"].parent, chosen.ranks - 1, chosen.failing)
    features = ["incident capture"]
    if chosen.copy:
        tc.check_drift(said, chosen.copy)
        features.append("replica check")
