"""Errors that are the training's own and came to light inside the probe."""

from __future__ import annotations

import pytest

from msprobe_engine.guard import Faults, is_of_training, of_training


def test_an_error_of_the_training_passes_every_guard() -> None:
    """It is raised as it is, whatever the settings, and the part of the probe goes on working."""
    faults = Faults()
    error = of_training(RuntimeError("kernel failed"))
    assert is_of_training(error)
    for guard in (faults.guard("dump"), faults.outward("dump")):
        with pytest.raises(RuntimeError, match="kernel failed"), guard:
            raise error
    with pytest.raises(RuntimeError, match="kernel failed"):
        faults.fail("dump", error)
    assert faults.enabled("dump")
    assert faults.counts == {}


def test_other_errors_switch_their_part_off() -> None:
    """Only what was marked is the training's."""
    faults = Faults()
    with faults.guard("dump"):
        raise RuntimeError("a mistake of ours")
    assert not faults.enabled("dump")
    assert not is_of_training(RuntimeError())
