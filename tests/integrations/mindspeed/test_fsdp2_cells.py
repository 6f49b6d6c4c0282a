"""The row of MindSpeed-LLM's FSDP2 backend in docs/integrations.md: a Trainer of the same form with every feature, values compared with
what hooks of the test's own saw in the same training without a probe."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from forkpool import run_ranks
from fsdp2_cells_job import LIMIT, job, left_behind
from trainer_cells import LEVELS, check_activations, check_collectives, check_dump, check_grad_probe, check_incident, files

pytestmark = pytest.mark.framework
LAYOUT = ("MindSpeed", "MindSpeed-LLM FSDP2, 2 ranks")
VERSION = "stand-in for MindSpeed-LLM's Trainer"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    place = tmp_path_factory.mktemp("fsdp2")
    return run_ranks(2, job, files(place), timeout=200), place


@pytest.mark.parametrize("level", LEVELS)
def test_dump(ran: Any, level: str) -> None:
    """Outputs of layer norms and gradients of these outputs are what hooks saw, in every step and micro batch; what the Trainer logs,
    weights and the random state are the same bits."""
    check_dump(ran[0], level)
    for one in ran[0]:
        assert one[level].bits == one["bits"]


def test_monitor(ran: Any) -> None:
    """Outputs of layer norms are what hooks saw; gradients, as they were before they were clipped, and parameters have the norms of the
    whole ones, and the first moment is what Adam makes of the first gradient."""
    check_activations(ran[0])
    near = functools.partial(pytest.approx, rel=1e-4, abs=1e-9)
    for one in ran[0]:
        seen = one["mix"].norms
        for step, (_, logged) in enumerate(one["bits"][0]):
            by = min(1.0, LIMIT / (logged + 1e-6))
            for name, norm in one["gradients"][step].items():
                assert seen["grad_reduced", step, name] == near(norm / by), name
            for name, norm in one["parameters"][step].items():
                assert seen["param_origin", step, name] == near(norm), name
        for name, norm in one["gradients"][0].items():
            assert seen["exp_avg", 0, name] == near(0.1 * norm), name


def test_grad_probe(ran: Any) -> None:
    """Norms are those of the whole gradients that the optimizer got, the ranges of the ranks make up the whole."""
    check_grad_probe([one["mix"].probed for one in ran[0]], ran[0][0]["gradients"])


def test_collectives(ran: Any) -> None:
    """Gathered parameters are made of the parts of both ranks, and reduced gradients add up over them."""
    check_collectives([one["mix"].calls for one in ran[0]], "all_gather", "reduce_scatter")


def test_incident(ran: Any) -> None:
    """`nan_analyze` names step, rank and module of a planted fault."""
    check_incident(ran[1] / "fault", 1, "4")


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """Model, optimizer and every name of torch are what they were."""
    assert run_ranks(2, left_behind, files(tmp_path)["mix"]) == [[], []]
