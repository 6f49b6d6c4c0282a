"""This process among the others of its job, and its random streams."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import torch

from msprobe_integrations.torch.tensors.devices import in_use, kinds


def job_store() -> Any:
    """The store of the default process group."""
    return torch.distributed.distributed_c10d._get_default_store()


class Job:
    """What `msprobe_engine.core.backend.Backend` has to say about the process.

    Attributes:
        assigned_rank: what `rank` gives whatever the process group says; None: as it says.
    """

    assigned_rank: int | None = None

    def rank(self) -> int | None:
        """The assigned rank, else that of the process group, else the environment's RANK, else None."""
        if self.assigned_rank is not None:
            return self.assigned_rank
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank()
        text = os.environ.get("RANK", "")
        return int(text) if text.isdecimal() else None

    def world_size(self) -> int:
        """Size of the process group, else the environment's WORLD_SIZE, else 1."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_world_size()
        text = os.environ.get("WORLD_SIZE", "")
        return int(text) if text.isdecimal() else 1

    def random_state(self) -> dict[str, Any]:
        """States of the random streams of Python, numpy, torch and every initialised device."""
        state: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
        for kind, module in in_use():
            state[kind] = module.get_rng_state_all()
        return state

    def set_random_state(self, state: Any) -> None:
        """Put back what `random_state` gave."""
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        for kind in kinds():
            if kind in state:
                getattr(torch, kind).set_rng_state_all(state[kind])
