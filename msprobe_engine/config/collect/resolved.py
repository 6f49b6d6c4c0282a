"""Settings as a framework has resolved them, each with where it comes from: entry ``msprobe/hyperparameters/rank{r}.json``."""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from msprobe_engine.config.secrets.masking import HIDDEN, mask_setting
from msprobe_engine.config.secrets.names import secret_setting
from msprobe_engine.core.guard import raise_of_training

DEFAULT, FLAG, FILE, ENVIRONMENT, CODE = "default", "flag", "file", "environment", "code"
ORIGINS = (DEFAULT, FLAG, FILE, ENVIRONMENT, CODE)
"""Nobody has set it; the command line; a settings file; a variable of the environment; the program or the framework while it started."""
_DEEPEST = 12
_LONGEST = 2000
_MOST_ITEMS = 256


class Resolved(NamedTuple):
    """One setting.

    Attributes:
        value: plain data, see `plain_data`.
        origin: one of `ORIGINS`.
        where: flag, ``file``, ``file:key`` or variable; may be empty.
        framework: ``megatron``, ``deepspeed``, ``transformers``, ``accelerate``, ``torchtitan``, ``lightning``, ``torch``, ``mindspore``.
    """

    value: Any
    origin: str
    where: str
    framework: str


def entry(settings: Mapping[str, Resolved]) -> dict[str, dict[str, Any]]:
    """As it is written; secrets are masked, or hidden when their name says what they are."""
    return {
        name: {**one._asdict(), "value": mask_setting(name, one.value), "where": mask_setting(name, one.where)}
        for name, one in settings.items()
    }


def to_existing_format(settings: Mapping[str, Resolved]) -> dict[str, Any]:
    """As the existing tool's ``hyperparameters_dynamic.json`` has them: name to value. ``optimizer.lr`` is ``optimizer_lr``: 26.2.0 looks
    at what is behind the last dot only, and takes ``optimizer.class`` and ``model.class`` for one name."""
    return {name.replace(".", "_").replace(":", "_"): mask_setting(name, one.value) for name, one in settings.items()}


def merge_settings(parts: Iterable[Mapping[str, Resolved]]) -> dict[str, Resolved]:
    """Settings of several frameworks; of a name that two have, the first keeps it, and another value is ``framework:name``."""
    merged: dict[str, Resolved] = {}
    for part in parts:
        for name, setting in part.items():
            if name not in merged:
                merged[name] = setting
            elif merged[name].framework != setting.framework and not same(merged[name].value, setting.value):
                merged[f"{setting.framework}:{name}"] = setting
    return merged


def flatten_tree(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted names; lists stay values, but for lists of mappings: ``groups.0.lr``. When all items of such a list are the
    same (layers), the first stands for them, with ``groups.count``."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        deep = name.count(".") < _DEEPEST
        if isinstance(value, Mapping) and value and deep:
            flat.update(flatten_tree(value, f"{name}."))
        elif isinstance(value, (list, tuple)) and value and deep and all(isinstance(item, Mapping) and item for item in value):
            alike = len(value) > 1 and all(item == value[0] for item in value)
            for number, item in enumerate(value[:1] if alike else value[:_MOST_ITEMS]):
                flat.update(flatten_tree(item, f"{name}.{number}."))
            if alike or len(value) > _MOST_ITEMS:
                flat[f"{name}.count"] = len(value)
        else:
            flat[name] = value
    return flat


def plain_data(value: Any, depth: int = 0) -> Any:
    """A value as JSON can hold it: numbers, truth values and texts as they are, types and functions by their names, dataclasses and
    objects with ``to_dict`` as mappings; of anything else the class. Never a text with an address in it."""
    if isinstance(value, enum.Enum):  # before text and int, which some are as well
        return value.value if isinstance(value.value, str) else value.name
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}... ({len(value)} characters)"
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value) if isinstance(os.fspath(value), str) else repr(os.fspath(value))
    if depth > _DEEPEST:
        return f"<{type(value).__name__}>"
    if isinstance(value, Mapping):
        return {str(key): plain_data(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((plain_data(item, depth + 1) for item in value), key=str)
    if isinstance(value, (list, tuple)):
        return [plain_data(item, depth + 1) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_data(getattr(value, field.name, None), depth + 1) for field in dataclasses.fields(value)}
    return _name_value(value, depth)


def _name_value(value: Any, depth: int) -> Any:
    if type(value).__module__.partition(".")[0] in ("torch", "numpy", "mindspore") and not callable(value):
        if tuple(getattr(value, "shape", (0,))) in ((), (1,)) and hasattr(value, "item"):
            number = value.item()  # of an array library
            if isinstance(number, float) and str(getattr(value, "dtype", "")).lower().endswith("float32"):
                number = float(f"{number:.7g}")  # 0.001, which float32 holds as 0.0010000000475
            return plain_data(number, depth + 1)
        if type(value).__name__ in ("dtype", "device", "layout", "memory_format", "Size", "Float", "BFloat", "Int"):
            return str(value)
    if isinstance(value, type) or callable(value):
        inner = getattr(value, "func", None)  # functools.partial
        named = value if inner is None else inner
        name = getattr(named, "__qualname__", type(named).__qualname__)
        return f"{getattr(named, '__module__', '')}.{name}".lstrip(".")
    for give in ("model_dump", "to_dict"):
        make = getattr(value, give, None)
        if callable(make) and not isinstance(value, type):
            try:
                made = make()
            except Exception as error:
                raise_of_training(error)
                continue
            if isinstance(made, Mapping):
                return plain_data(made, depth + 1)
    return f"<{type(value).__module__}.{type(value).__qualname__}>"


def resolve_settings(
    values: Mapping[str, Any],
    framework: str,
    *,
    defaults: Mapping[str, Any] | None = None,
    flags: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
    variables: Mapping[str, str] | None = None,
    otherwise: str = CODE,
) -> dict[str, Resolved]:
    """Each of `values` with its origin: a flag of the command line that names it, else a file, else a variable of the environment, else
    the default if it has that value, else `otherwise`.

    Args:
        defaults: name to default.
        flags, files, variables: name to what is written as `where`.
    """
    resolved = {}
    for name, value in values.items():
        value = plain_data(value)
        origin, where = otherwise, ""
        for kind, table in ((FLAG, flags), (FILE, files), (ENVIRONMENT, variables)):
            if table and name in table:
                origin, where = kind, table[name]
                break
        else:
            if defaults is not None and name in defaults and same(plain_data(defaults[name]), value):
                origin = DEFAULT
        resolved[name] = Resolved(HIDDEN if secret_setting(name, value) else value, origin, where, framework)
    return resolved


def same(value: Any, other: Any) -> bool:
    """Equal, and of one kind: True is not 1, NaN is NaN."""
    if isinstance(value, bool) is not isinstance(other, bool):
        return False
    return bool(value == other) or (value != value and other != other)


def flags_of(arguments: Sequence[str], names: Iterable[str]) -> dict[str, str]:
    """Which of the settings `names` stand on a command line: ``--micro-batch-size 4`` is ``micro_batch_size``; ``--no-x`` is ``x`` and
    ``no_x``. Name to the flag as it was written."""
    given: dict[str, str] = {}
    for argument in arguments:
        if not argument.startswith("-") or argument.lstrip("-")[:1].isdigit():
            continue
        flag = argument.partition("=")[0]
        name = flag.lstrip("-").replace("-", "_")
        for spelling in (name, name.removeprefix("no_"), name.removeprefix("disable_")):
            given.setdefault(spelling, flag)
    flags = {}
    for name in names:
        flag = given.get(name.replace("-", "_"), "")
        if flag:
            flags[name] = flag
    return flags
