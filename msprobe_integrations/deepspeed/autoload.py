"""How the probe gets into a DeepSpeed training that knows nothing of it: the key ``msprobe`` of ds_config.json, or MSPROBE_CONFIG."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msprobe_integrations.autoload import imports, request

if TYPE_CHECKING:
    from types import ModuleType

    from msprobe_engine.settings.schema import ProbeSettings
    from msprobe_integrations.deepspeed.engine import EngineObserver


def arm() -> None:
    """DeepSpeed is about to be imported. Without a request only `deepspeed.initialize` is wrapped: it looks for the key."""
    imports.after_import("deepspeed", _initialize)
    if request.current() is not None:
        _observe()


def _observe() -> None:
    from msprobe_integrations.deepspeed import patches

    patches.observe(_claim)


def _claim() -> EngineObserver | None:
    from msprobe_integrations.torch import owner

    return owner.claim("deepspeed", _make)


def _make(settings: ProbeSettings, file: Path) -> EngineObserver:
    from msprobe_integrations.deepspeed.engine import EngineObserver

    return EngineObserver(settings, file=file)


def _initialize(module: ModuleType) -> None:
    """Wrap ``deepspeed.initialize``: a key of ours in its configuration asks for the probe, and names the engine that is followed.

    Wrong settings end it with a `SettingsError`: the key is part of the configuration that DeepSpeed is given.
    """
    original: Any = module.initialize

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        from msprobe_integrations.deepspeed import key

        if key.take(original, args, kwargs):
            _observe()
            from msprobe_integrations.deepspeed import patches

            result = original(*args, **kwargs)
            patches.choose(result)
            return result
        return original(*args, **kwargs)

    module.initialize = initialize  # type: ignore[attr-defined]
