"""A process as ``msprobe run`` starts it, for a training that the test writes as any script would."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from msprobe_engine.core.records import Frame
from msprobe_integrations.torch import autoload
from msprobe_integrations.torch.training import owner
from msprobe_integrations.torch.training.plain.training_detector import TrainingDetector

MONITOR = {"gradients": True, "parameters": True, "optimizer_states": True}


class Launch(NamedTuple):
    """What a launched process leaves.

    Attributes:
        frames: of the steps; there when the block is left.
        directory: the output directory.
    """

    frames: list[Frame]
    directory: Path

    def scalars(self, name: str) -> list[Any]:
        """One number of every step, None where it has none."""
        return [frame.scalars.get(name) for frame in self.frames]


@contextmanager
def launched(monitor: dict[str, Any] | bool | None = None, **sections: Any) -> Iterator[Launch]:
    """Inside, torch was just imported in a process with MSPROBE_CONFIG; at the end the process ends."""
    directory = Path(tempfile.mkdtemp(prefix="msprobe-test-"))
    settings = {"output_dir": str(directory / "out"), "strict": True, "sinks": {"memory": True}, "incident": {"enabled": False}}
    settings |= {"monitor": MONITOR if monitor is None else monitor} | sections
    file = directory / "probe.json"
    file.write_text(json.dumps(settings))
    os.environ["MSPROBE_CONFIG"] = str(file)
    launch = Launch([], directory / "out")
    try:
        autoload.arm()
        yield launch
        observer = owner.current()
        probe = None if observer is None else observer.probe
        if observer is not None:
            observer.close()
        if probe is not None:
            launch.frames.extend(probe.frames)
    finally:
        del os.environ["MSPROBE_CONFIG"]
        if TrainingDetector.current is not None:
            TrainingDetector.current.stand_back()
        owner.release()


class Two(nn.Module):
    """A model whose two parts are called by its own forward."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, width), nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(torch.tanh(self.encoder(x)))


def batch(number: int, rank: int = 0) -> torch.Tensor:
    """[8, 4], float32."""
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * rank + number))


def two(seed: int = 0) -> Two:
    torch.manual_seed(seed)
    return Two()


def names(frame: Frame, family: str) -> set[tuple[int, str]]:
    """(model, parameter) of the samples of a family."""
    found = [(sample.vpp_stage, sample.name) for sample in frame.samples if sample.family == family]
    assert len(found) == len(set(found)), found
    return set(found)
