"""This process among the others of its job, and its random streams."""

from __future__ import annotations

import random
import sys
from typing import Any

import mindspore
import numpy as np

from msprobe_engine.core.process.launch import number_of
from msprobe_integrations.mindspore import environment
from msprobe_integrations.requirements import MissingNameError, need

_RANK, _WORLD = ("RANK_ID", "RANK"), ("RANK_SIZE", "WORLD_SIZE", "MS_WORKER_NUM")


class Job:
    """What `msprobe_engine.core.backend.Backend` has to say about the process.

    Attributes:
        assigned_rank: what `rank` gives whatever the communication says; None: as it says.
    """

    assigned_rank: int | None = None

    def rank(self) -> int | None:
        """The assigned rank, else that of the communication (``mindspore.communication.init``), else the environment's RANK_ID or RANK,
        else None. MindSpore's launcher sets RANK_ID for its workers only."""
        if self.assigned_rank is not None:
            return self.assigned_rank
        if is_initialized():
            return int(mindspore.communication.get_rank())
        return number_of(_RANK)

    def world_size(self) -> int:
        """Size of the communication, else the environment's RANK_SIZE, WORLD_SIZE or MS_WORKER_NUM, else 1."""
        if is_initialized():
            return int(mindspore.communication.get_group_size())
        return number_of(_WORLD) or 1

    def random_state(self) -> dict[str, Any]:
        """States of the random streams of Python, numpy and MindSpore: its global seed, how often each random operator was seeded from it,
        and its generator where it has one. What CPU kernels count for themselves (`ops.StandardNormal`, `nn.Dropout`) the framework
        neither shows nor takes; ``mindspore.set_seed`` does not reach it either."""
        return {"python": random.getstate(), "numpy": np.random.get_state(), "mindspore": _get_state()}

    def set_random_state(self, state: Any) -> None:
        """Put back what `random_state` gave."""
        _set_state(state["mindspore"])
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])


def is_initialized() -> bool:
    """Has the communication been started? Starts nothing. False where this version does not say, which is said."""
    part = "ranks joined through MindSpore's communication"
    try:
        return bool(need(need(mindspore.communication, "GlobalComm", for_=part), "INITED", for_=part))
    except MissingNameError:
        return False


def _seeds() -> Any:
    """MindSpore's module of seeds. Its name in ``mindspore.common`` is that of a function as well."""
    return sys.modules.get("mindspore.common.seed")


def _get_state() -> dict[str, Any]:
    get = getattr(mindspore, "get_rng_state", None)
    with environment.no_grad():
        generator = None if get is None else np.array(get().asnumpy())
    kernels = getattr(_seeds(), "_KERNEL_SEED", None)
    return {"seed": mindspore.get_seed(), "kernels": None if kernels is None else dict(kernels), "generator": generator}


def _set_state(state: dict[str, Any]) -> None:
    seeds = _seeds()
    if hasattr(seeds, "_GLOBAL_SEED"):
        seeds._GLOBAL_SEED = state["seed"]  # set_seed() begins all streams anew, and takes no None
    elif state["seed"] is not None:
        mindspore.set_seed(state["seed"])
    if state["kernels"] is not None:
        seeds._KERNEL_SEED.clear()
        seeds._KERNEL_SEED.update(state["kernels"])
    if state["generator"] is not None:
        with environment.no_grad():
            mindspore.set_rng_state(mindspore.Tensor(state["generator"]))
