"""What a run of MindSpore was started with, see `msprobe_integrations.common.config.run`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from msprobe_engine.config.pack.writer import PackWriter
from msprobe_integrations.common.config import run as run_config
from msprobe_integrations.mindspore.config import start as config_start
from msprobe_integrations.mindspore.config import tensors as config_tensors


class RunConfig(run_config.RunConfig):
    """Of one `MindSporeProbe`."""

    def _writer(self, path: Path) -> PackWriter:
        rank, world_size = config_start.ranks()
        return PackWriter(path, rank=rank, world_size=world_size, framework="mindspore", step_unit="training step", keep_previous=True)

    def _rank(self) -> int:
        return config_start.ranks()[0]

    def _start(self, rank: int, models: list[Any], optimizers: Any, frame: FrameType | None) -> Callable[[], dict[str, Any]]:
        del frame  # no Trainer of another package drives MindSpore
        several = list(optimizers) if isinstance(optimizers, (list, tuple)) else [] if optimizers is None else [optimizers]
        return config_start.Start(rank, self._environment(), models, several).entries

    def _weights(self, models: list[Any]) -> dict[str, Any]:
        return config_tensors.weights(models, statistics=False)[1]
