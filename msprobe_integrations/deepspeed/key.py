"""The key ``msprobe`` of a DeepSpeed configuration: which settings hold for the engine that is made from it.

    "msprobe": "probe.yaml"
    "msprobe": {"config": "probe.yaml", "set": ["dump.step=[5]"], "output_dir": "out", "monitor": true}

DeepSpeed itself passes over keys that it does not know. Files are relative to the working directory, and failing that to the file of
the DeepSpeed configuration.
"""

from __future__ import annotations

import base64
import inspect
import json
import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.settings.tree import nearest
from msprobe_engine.core.text.words import shorten_text
from msprobe_integrations.autoload import request

KEY = "msprobe"
NAMES = ("config", "set", "output_dir", "monitor")
_chosen: weakref.ref[Any] | None = None


def choose(engine: Any) -> None:
    """This engine has the key in its own configuration, so it is the one to follow; None: no engine is chosen any more."""
    global _chosen
    _chosen = None if engine is None else weakref.ref(engine)


def find_chosen_engine() -> Any:
    """The engine that the user has chosen, None: the first that trains."""
    return None if _chosen is None else _chosen()


def request_from_config(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Ask for what the configuration in the arguments of `deepspeed.initialize` says.

    Returns:
        False: there is no such key, and nothing was done.

    Raises:
        SettingsError: the key or the settings it names are wrong.
    """
    given = _configuration(function, args, kwargs)
    node, file = _read_configuration(given)
    value = node.get(KEY) if isinstance(node, Mapping) else None
    if value is None:
        return False
    where = f"{file or 'DeepSpeed configuration'}: {KEY}"
    config, changes = parse(value, where, os.path.dirname(os.path.abspath(file)) if file else "")
    changes = (*request.environment_changes(), *changes)
    asked = request.Request(os.path.abspath(config), changes, f"key '{KEY}' of {file or 'the DeepSpeed configuration'}")
    try:
        asked.settings()
    except SettingsError as error:
        raise SettingsError(f"{where}: {error}") from None
    request.request_probe(asked.config, changes, asked.by)
    return True


def parse(value: Any, where: str, beside: str = "") -> tuple[str, tuple[str, ...]]:
    """(settings file, changes to it) of a value of the key.

    Args:
        where: for messages.
        beside: directory in which the file is looked for when the working directory has none.

    Raises:
        SettingsError: unknown key, wrong type, or no such file.
    """
    if isinstance(value, (str, os.PathLike)):
        value = {"config": os.fspath(value)}
    if not isinstance(value, Mapping):
        allowed = f"the path of a settings file, or {{{', '.join(NAMES)}}}"
        raise SettingsError(f"{where}: {shorten_text(repr(value), 80)} is not allowed; allowed: {allowed}")
    for name in value:
        if name not in NAMES:
            near = nearest(name, NAMES)
            hint = f"; did you mean '{near}'?" if near else ""
            raise SettingsError(f"{where}.{name}: unknown key{hint} Known here: {', '.join(NAMES)}")
    config = value.get("config")
    if not isinstance(config, str) or not config:
        raise SettingsError(f"{where}.config: {shorten_text(repr(config), 80)} is not allowed; allowed: the path of a settings file")
    changes = value.get("set", [])
    if isinstance(changes, str) or not isinstance(changes, (list, tuple)) or not all(isinstance(c, str) and "=" in c for c in changes):
        raise SettingsError(f"{where}.set: {shorten_text(repr(changes), 80)} is not allowed; allowed: a list of texts like 'dump.step=[5]'")
    all_changes = list(changes)
    output = value.get("output_dir")
    if output is not None:
        if not isinstance(output, str) or not output:
            raise SettingsError(f"{where}.output_dir: {shorten_text(repr(output), 80)} is not allowed; allowed: the path of a directory")
        all_changes.append(f"output_dir={json.dumps(output)}")
    monitor = value.get("monitor")
    if monitor is not None:
        if not isinstance(monitor, bool):
            raise SettingsError(f"{where}.monitor: {shorten_text(repr(monitor), 80)} is not allowed; allowed: true, false")
        all_changes.append(f"sinks.deepspeed.enabled={'true' if monitor else 'false'}")
    return _find_file(config, where, beside), tuple(all_changes)


def _find_file(config: str, where: str, beside: str) -> str:
    places = [os.path.abspath(config)]
    if beside and not os.path.isabs(config):
        places.append(os.path.join(beside, config))
    for place in places:
        if os.path.isfile(place):
            return place
    raise SettingsError(f"{where}: file '{config}' does not exist; looked for: {', '.join(dict.fromkeys(places))}")


def _configuration(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `deepspeed.initialize` takes as its configuration, in its order; None when that cannot be told."""
    try:
        given = inspect.signature(function).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):
        given = kwargs
    for name in ("config", "config_params"):
        if given.get(name) is not None:
            return given[name]
    arguments = given.get("args")
    return getattr(arguments, "deepspeed_config", None) or getattr(arguments, "deepscale_config", None)


def _read_configuration(given: Any) -> tuple[Any, str]:
    """(the configuration, its file or ``""``). What cannot be read is DeepSpeed's to complain about."""
    if isinstance(given, Mapping):
        return given, ""
    if not isinstance(given, (str, os.PathLike)):
        return None, ""
    try:
        import hjson  # type: ignore[import-untyped]  # DeepSpeed reads its configurations with it

        name = os.fspath(given)
        if os.path.exists(name):
            with open(name, encoding="utf-8") as stream:
                return hjson.load(stream), str(name)
        return hjson.loads(base64.urlsafe_b64decode(name).decode("utf-8")), ""
    except Exception as error:
        raise_of_training(error)
        return None, ""
