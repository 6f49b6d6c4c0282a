"""What a run of torch was started with, see `msprobe_integrations.common.config.run`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from msprobe_engine.config.pack.writer import PackWriter
from msprobe_integrations.common.config import run as run_config
from msprobe_integrations.common.config.run import NAME
from msprobe_integrations.torch.config import start as config_start
from msprobe_integrations.torch.config.doubtful import find_doubtful
from msprobe_integrations.torch.config.tensors import TensorCollector

__all__ = ["NAME", "RunConfig"]


class RunConfig(run_config.RunConfig):
    """Of one `TorchProbe`."""

    def _writer(self, path: Path) -> PackWriter:
        return config_start.pack_writer(path, "training step", keep_previous=True)

    def _rank(self) -> int:
        return config_start.ranks()[0]

    def _start(self, rank: int, models: list[Any], optimizers: Any, frame: FrameType | None) -> Callable[[], dict[str, Any]]:
        return config_start.Start(rank, self._environment(), models, optimizers, frame).entries

    def _weights(self, models: list[Any]) -> dict[str, Any]:
        found = TensorCollector().weights(models, statistics=False)
        self.doubtful = find_doubtful(models, found)
        return found.digests
