"""What a training is, as data; and what a framework's module tells of it while it runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

CLIP = 0.1
"""Largest norm of all gradients of a case with the feature ``clipping``."""
SIZES = ("dp", "fsdp1", "fsdp2", "tp", "pp", "ep")
"""Dimensions whose sizes multiply to the number of ranks; other keys of `TrainingCase.parallelism` say how (``zero``: its stage)."""
DATA = ("dp", "fsdp1", "fsdp2", "ep")
"""Dimensions whose ranks have batches of their own."""


class Fault(NamedTuple):
    """A mistake of the training, not of the probe.

    Attributes:
        name: for ids and messages.
        on: what is changed.
        apply: ``(thing, training)`` to the thing that takes its place: a module, an optimizer, an iterable of batches, a dictionary of
            launch settings. What happens later is added to ``training.after_update``.
    """

    name: str
    on: Literal["launch", "data", "model", "optimizer"]
    apply: Callable[[Any, Training], Any]


@dataclass(frozen=True)
class TrainingCase:
    """One row.

    Attributes:
        framework: a module of `harness.frameworks`.
        model: a key of `models.MODELS`.
        parallelism: dimension to size, see `SIZES`.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        features: ``accumulation``, ``clipping`` and what the framework's module knows.
        fault: a mistake that is planted.
        steps: updates.
    """

    framework: str
    model: str = "mlp"
    parallelism: Mapping[str, int] = field(default_factory=dict)
    precision: str = "fp32"
    features: tuple[str, ...] = ()
    fault: Fault | None = None
    steps: int = 3

    def __str__(self) -> str:
        sizes = [f"{name}{size}" for name, size in self.parallelism.items()]
        precision = [] if self.precision == "fp32" else [self.precision]
        return " ".join([self.framework, *sizes, *precision, *self.features, *([self.fault.name] if self.fault else [])])

    @property
    def ranks(self) -> int:
        return math.prod(size for name, size in self.parallelism.items() if name in SIZES)

    @property
    def data_ranks(self) -> int:
        """Ranks with batches of their own; ranks that share one are neighbours."""
        return math.prod(size for name, size in self.parallelism.items() if name in DATA)

    @property
    def micro_batches(self) -> int:
        return 2 if "accumulation" in self.features or "pp" in self.parallelism else 1

    @property
    def clip(self) -> float:
        return CLIP if "clipping" in self.features else 0.0

    @property
    def replicated(self) -> bool:
        """Do ranks hold the same parameters?"""
        divided = self.parallelism.get("zero") == 3
        return self.ranks > 1 and not divided and bool({"dp", "tp", "ep"} & set(self.parallelism))


def rank() -> int:
    """0 without a group."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_last_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1


class Watcher:
    """Sees a training that tells of itself; this one looks at nothing."""

    def begin(self, model: Any) -> None:
        """The model is there, and nothing is wrapped around it."""

    def start(self, objects: tuple[Any, ...]) -> None:
        """The loop begins, over these objects."""

    def before_clipping(self, model: Any) -> None:
        """Gradients are reduced; all ranks come here."""

    def after_update(self) -> None:
        """The optimizer has updated the model."""

    def end(self) -> None:
        """The training is over."""


class Training:
    """A case while it is trained in a rank.

    Attributes:
        step: updates so far.
        folder: for files of the framework.
        watcher: who is told.
        after_update: functions that a fault wants to be called after each update, before the watcher.
        at_end: functions that a fault wants to be called when the training is over.
    """

    def __init__(self, case: TrainingCase, folder: Path, watcher: Watcher | None = None) -> None:
        self.case, self.folder = case, folder
        self.step = 0
        self.after_update: list[Callable[[], None]] = []
        self.at_end: list[Callable[[], None]] = []
        self.watcher = watcher or Watcher()

    def data_rank(self) -> int:
        """Which batches this rank has."""
        return rank() * self.case.data_ranks // self.case.ranks

    def launch(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Arguments or configuration that the training is started with."""
        return self._changed("launch", settings)  # type: ignore[no-any-return]

    def data(self, batches: Any) -> Any:
        """An iterable of batches, as the loop gets it."""
        return self._changed("data", batches)

    def model(self, model: Any) -> Any:
        """The model before it is wrapped."""
        model = self._changed("model", model)
        self.watcher.begin(model)
        return model

    def optimizer(self, optimizer: Any) -> Any:
        """The optimizer as the script makes it."""
        return self._changed("optimizer", optimizer)

    def start(self, *objects: Any) -> None:
        """The loop begins."""
        self.watcher.start(objects)

    def clipping(self, model: Any) -> None:
        """Gradients of `model` are reduced and not clipped."""
        self.watcher.before_clipping(model)

    def updated(self) -> None:
        """An update is done."""
        self.step += 1
        for function in self.after_update:
            function()
        self.watcher.after_update()

    def end(self) -> None:
        """Nothing follows."""
        for function in self.at_end:
            function()
        self.watcher.end()

    def _changed(self, on: str, thing: Any) -> Any:
        fault = self.case.fault
        return fault.apply(thing, self) if fault is not None and fault.on == on else thing
