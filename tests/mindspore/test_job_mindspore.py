"""Which rank this is, and the random streams of MindSpore, numpy and Python."""

from __future__ import annotations

import random
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, ops

from msprobe_integrations.mindspore.backend import MindSporeBackend
from msprobe_integrations.mindspore.job import initialized


def _draws() -> list[Any]:
    low, high = Tensor(0.0), Tensor(1.0)
    drawn = [ops.uniform((3,), low, high).asnumpy().tolist(), ops.uniform((3,), low, high, seed=7).asnumpy().tolist()]
    return [*drawn, random.random(), np.random.rand()]


@pytest.mark.parametrize("seed", [None, 0, 5])
def test_random_streams_go_on_where_they_were(monkeypatch: pytest.MonkeyPatch, seed: int | None) -> None:
    """After `set_random_state` the same numbers come again: with a global seed, and without one for operators with a seed of their own."""
    import sys

    monkeypatch.setattr(sys.modules["mindspore.common.seed"], "_GLOBAL_SEED", None)
    if seed is not None:
        mindspore.set_seed(seed)
    backend = MindSporeBackend()
    _draws()
    state = backend.random_state()
    first = _draws()
    second = _draws()
    backend.set_random_state(state)
    again = _draws()
    assert mindspore.get_seed() == seed
    kept = slice(None) if seed is not None else slice(1, None)
    assert again[kept] == first[kept]
    assert first[1:] != second[1:]


def test_the_generator_comes_back() -> None:
    """The state of the generator, which `manual_seed` sets, is part of it."""
    backend = MindSporeBackend()
    mindspore.manual_seed(11)
    state = backend.random_state()
    mindspore.manual_seed(12)
    backend.set_random_state(state)
    assert mindspore.initial_seed() == 11


def test_taking_the_state_changes_no_stream() -> None:
    """Looking at the random state draws nothing."""
    backend = MindSporeBackend()
    state = backend.random_state()
    plain = _draws()
    backend.set_random_state(state)
    backend.random_state()
    assert _draws() == plain


def test_the_rank_is_the_assigned_one_the_communication_s_or_the_launcher_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """An assigned rank counts first, then the communication, then RANK_ID and RANK; nonsense in them is no rank."""
    for name in ("RANK_ID", "RANK", "RANK_SIZE", "WORLD_SIZE", "MS_WORKER_NUM"):
        monkeypatch.delenv(name, raising=False)
    backend = MindSporeBackend()
    assert not initialized()
    assert (backend.rank(), backend.world_size()) == (None, 1)
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("MS_WORKER_NUM", "8")
    assert (backend.rank(), backend.world_size()) == (7, 8)
    monkeypatch.setenv("RANK_ID", "3")
    monkeypatch.setenv("RANK_SIZE", "4")
    assert (backend.rank(), backend.world_size()) == (3, 4)
    monkeypatch.setenv("RANK_ID", "three")
    assert backend.rank() == 7
    monkeypatch.setattr(mindspore.communication.GlobalComm, "INITED", True)
    monkeypatch.setattr(mindspore.communication, "get_rank", lambda: 1)
    monkeypatch.setattr(mindspore.communication, "get_group_size", lambda: 2)
    assert (backend.rank(), backend.world_size()) == (1, 2)
    backend.assigned_rank = 5
    assert backend.rank() == 5
