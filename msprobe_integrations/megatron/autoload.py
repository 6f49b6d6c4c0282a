"""How the probe gets into a Megatron training that knows nothing of it: ``--msprobe-config``, or MSPROBE_CONFIG."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from msprobe_integrations.autoload import request

if TYPE_CHECKING:
    from msprobe_engine.settings.schema import ProbeSettings
    from msprobe_integrations.megatron.observer import TrainingObserver


def arm() -> None:
    """Megatron is about to be imported. Without a request, and without an argument of ours on the command line, nothing is done."""
    from msprobe_integrations.megatron import patches

    if request.current() is not None or request.flagged():
        patches.observe(_claim)


def _claim() -> TrainingObserver | None:
    from msprobe_integrations.torch import owner

    return owner.claim("megatron", _make)


def _make(settings: ProbeSettings, file: Path) -> TrainingObserver:
    from msprobe_integrations.megatron.observer import TrainingObserver

    return TrainingObserver(settings, file=file)
