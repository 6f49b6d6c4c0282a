"""This process among the others of its job, and its random streams."""

from __future__ import annotations

import os
import random
from typing import Any

import mindspore
import numpy as np

from msprobe_integrations.mindspore import environment

_RANK, _WORLD = ("RANK_ID", "RANK"), ("RANK_SIZE", "WORLD_SIZE", "MS_WORKER_NUM")


class Job:
    """What `msprobe_engine.backend.Backend` has to say about the process.

    Attributes:
        assigned_rank: what `rank` gives whatever the communication says; None: as it says.
    """

    assigned_rank: int | None = None

    def rank(self) -> int | None:
        """The assigned rank, else that of the communication (``mindspore.communication.init``), else the environment's RANK_ID or RANK,
        else None. MindSpore's launcher sets RANK_ID for its workers only."""
        if self.assigned_rank is not None:
            return self.assigned_rank
        if initialized():
            return int(mindspore.communication.get_rank())
        return _number(_RANK)

    def world_size(self) -> int:
        """Size of the communication, else the environment's RANK_SIZE, WORLD_SIZE or MS_WORKER_NUM, else 1."""
        if initialized():
            return int(mindspore.communication.get_group_size())
        return _number(_WORLD) or 1

    def random_state(self) -> dict[str, Any]:
        """States of the random streams of Python, numpy and MindSpore (its global seed, and its generator where it has one)."""
        return {"python": random.getstate(), "numpy": np.random.get_state(), "mindspore": _get_state()}

    def set_random_state(self, state: Any) -> None:
        """Put back what `random_state` gave."""
        _set_state(state["mindspore"])
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])


def initialized() -> bool:
    """Has the communication been started? Starts nothing."""
    return bool(getattr(getattr(mindspore.communication, "GlobalComm", None), "INITED", False))


def _number(names: tuple[str, ...]) -> int | None:
    for name in names:
        text = os.environ.get(name, "")
        if text.isdecimal() and len(text) < 10:
            return int(text)
    return None


def _get_state() -> dict[str, Any]:
    get = getattr(mindspore, "get_rng_state", None)
    with environment.no_grad():
        return {"seed": mindspore.get_seed(), "generator": None if get is None else get().asnumpy().copy()}


def _set_state(state: dict[str, Any]) -> None:
    if state["seed"] is not None:
        mindspore.set_seed(state["seed"])
    if state["generator"] is not None:
        mindspore.set_rng_state(mindspore.Tensor(state["generator"]))
