"""How the probe gets into a Megatron training that knows nothing of it: ``--msprobe-config``, or MSPROBE_CONFIG."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from msprobe_integrations.autoload import request

if TYPE_CHECKING:
    from msprobe_engine.core.settings.schema import ProbeSettings
    from msprobe_integrations.megatron.observer import TrainingObserver


def arm() -> None:
    """Megatron is about to be imported. Without a request, and without an argument of ours on the command line, nothing is done."""
    if request.current() is None and not request.has_probe_argument():
        return
    from msprobe_integrations.megatron import patches

    if patches.get_observer() is None:  # else a callback follows already
        patches.observe(_claim)


def _claim() -> TrainingObserver | None:
    from msprobe_integrations.torch.training import owner

    _read_flags()
    return owner.claim("megatron", _make_observer)


def _read_flags() -> None:
    """A script with a parser of its own has left our arguments alone; Megatron's has asked already, and asking again changes nothing."""
    from msprobe_engine.core.errors import ProbeError
    from msprobe_engine.core.log import get_logger
    from msprobe_integrations.megatron import flags

    try:
        given = flags.parse_flags(sys.argv[1:])[0]
        if given.config and request.current() is None:
            flags.request_probe(given)
    except ProbeError as error:
        get_logger().error("the probe is off, training goes on: %s", error)


def _make_observer(settings: ProbeSettings, file: Path) -> TrainingObserver:
    from msprobe_integrations.megatron.observer import TrainingObserver

    return TrainingObserver(settings, file=file)
