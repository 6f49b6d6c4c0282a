"""How the probe gets into a program that trains with Hugging Face's Trainer and knows nothing of the probe."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any


def arm() -> None:
    """Transformers is about to be imported and a probe was asked for."""
    from msprobe_integrations.transformers import patches

    patches.patch_trainer("environment", _follow_training)


def _follow_training(trainer: Any) -> AbstractContextManager[None]:
    from msprobe_integrations.transformers.callback import follow_training

    return follow_training(trainer)
