"""What is collected once, when a run starts: environment, packages, system, resolved settings."""

from __future__ import annotations

import uuid
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from msprobe_engine.config.collect import job, packages, resolved, system
from msprobe_engine.config.environment.variables import Environment
from msprobe_engine.config.pack.writer import PackWriter
from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.log import debug
from msprobe_engine.formats.pack import entries
from msprobe_integrations.torch.config import sources as config_sources
from msprobe_integrations.torch.config import system as config_system

_KEY = "msprobe/config_check/run"


def ranks() -> tuple[int, int]:
    """(rank, world size): of the process group, else as the launcher's environment says."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return job.rank(), job.world_size()


def run_token() -> str | None:
    """Equal on all ranks of this run, and on no other: made by whoever asks first, shared over the job's key-value store. No collective.
    None: there is none."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        try:
            store: Any = dist.distributed_c10d._get_default_store()
            token: bytes = store.compare_set(_KEY, "", uuid.uuid4().hex)
            return token.decode()
        except Exception as error:  # a store that cannot compare, or none
            raise_of_training(error)
            debug(f"config check: no common name for the run ({type(error).__name__}: {error})")
    return None


def pack_writer(path: Any, step_unit: str = "forward pass", *, keep_previous: bool = False) -> PackWriter:
    """A writer for this rank of this run; errors as `PackWriter` has them."""
    rank, world_size = ranks()
    return PackWriter(
        path,
        rank=rank,
        world_size=world_size,
        framework="pytorch",
        step_unit=step_unit,
        run=run_token(),
        keep_previous=keep_previous,
    )


class Start:
    """What is known now is taken now; what takes long and does not change is left to `entries`, which another thread may call.

    Args:
        environment: as it may be written.
        models, optimizers: of the training, as far as they are there.
        frame: where the calls in progress begin, for finding Trainers and engines.
    """

    def __init__(
        self, rank: int, environment: Environment, models: list[Any], optimizers: Any = None, frame: FrameType | None = None
    ) -> None:
        self.rank = rank
        with torch.no_grad():
            self.settings = config_sources.collect(config_sources.Reach.of(models, optimizers, frame))
        self._environment = environment
        self._system = config_system.collect()

    def entries(self) -> dict[str, Any]:
        """For the pack: of every rank its own; of rank 0 those of the existing tool as well."""
        about = {**system.collect(), **self._system}
        found: dict[str, Any] = {
            entries.of_rank("env", self.rank): self._environment.values,
            entries.of_rank("withheld", self.rank): self._environment.entry(),
            entries.of_rank("system", self.rank): about,
            **self.of_settings(),
        }
        if self.rank == 0:
            found[entries.ENV] = self._environment.values
            found[entries.PIP] = packages.text()
        return found

    def of_settings(self) -> dict[str, Any]:
        """The resolved settings alone; empty when there are none."""
        if not self.settings:
            return {}
        found = {entries.of_rank("hyperparameters", self.rank): resolved.entry(self.settings)}
        if self.rank == 0:
            found[entries.DYNAMIC] = resolved.existing(self.settings)
        return found
