"""How the probe gets into a training loop of plain torch that knows nothing of it: ``msprobe run``, or MSPROBE_CONFIG."""

from __future__ import annotations

from types import ModuleType

from msprobe_integrations.autoload.imports import after_import


def arm() -> None:
    """Torch is about to be imported, and a probe was asked for."""
    after_import("torch", _start_training_detector)


def _start_training_detector(_torch: ModuleType) -> None:
    """Wait for an optimizer. What a probe is made of is imported when a training begins: most processes that import torch train
    nothing."""
    from msprobe_integrations.torch.training.plain.training_detector import TrainingDetector

    TrainingDetector.start()
