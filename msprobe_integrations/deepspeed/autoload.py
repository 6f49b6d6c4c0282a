"""How the probe gets into a DeepSpeed training that knows nothing of it: the key ``msprobe`` of ds_config.json, or MSPROBE_CONFIG."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msprobe_engine.core.guard import raise_of_training
from msprobe_integrations.autoload import imports, request
from msprobe_integrations.patching import Patches

if TYPE_CHECKING:
    from types import ModuleType

    from msprobe_engine.core.settings.schema import ProbeSettings
    from msprobe_integrations.deepspeed.engine import EngineObserver

_patches = Patches()


def arm() -> None:
    """DeepSpeed is about to be imported. Without a request only `deepspeed.initialize` is wrapped: it looks for the key."""
    imports.after_import("deepspeed", _wrap)
    if request.current() is not None:
        _observe()


def _observe() -> None:
    from msprobe_integrations.deepspeed import patches

    patches.observe(_claim)


def _claim() -> EngineObserver | None:
    from msprobe_integrations.torch.training import owner

    return owner.claim("deepspeed", _make_observer)


def _make_observer(settings: ProbeSettings, file: Path) -> EngineObserver:
    from msprobe_integrations.deepspeed.engine import EngineObserver

    return EngineObserver(settings, file=file)


def _wrap(module: ModuleType) -> None:
    _patches.around(module, "initialize", _initialize)


def _initialize(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In place of ``deepspeed.initialize``: a key of ours in its configuration asks for the probe, and names the engine that is followed.

    Wrong settings end it with a `SettingsError`: the key is part of the configuration that DeepSpeed is given.
    """
    asked = _follow_if_requested(original, args, kwargs)
    result = original(*args, **kwargs)
    if asked:
        try:
            from msprobe_integrations.deepspeed import key

            if isinstance(result, tuple) and result:
                key.choose(result[0])
        except Exception as error:
            raise_of_training(error)
            _log_failure(error)
    return result


def _follow_if_requested(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Does the configuration ask for the probe? Then engines are watched from now on."""
    try:
        from msprobe_integrations.deepspeed import key

        if not key.request_from_config(original, args, kwargs):
            return False
        _observe()
        return True
    except Exception as error:
        raise_of_training(error)
        from msprobe_engine.core.errors import ProbeError

        if isinstance(error, ProbeError):
            raise
        _log_failure(error)
        return False


def _log_failure(error: Exception) -> None:
    from msprobe_engine.core.log import get_logger

    get_logger().error("DeepSpeed is not followed, training goes on: %s: %s", type(error).__name__, error)
