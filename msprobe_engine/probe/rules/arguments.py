"""Arguments of a rule: typed, checked, with an error that says what is allowed."""

from __future__ import annotations

import dataclasses
import difflib
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from msprobe_engine.core.errors import SettingsError

T = TypeVar("T")
TEXT_LIMIT = 2000
"""Longest text that an argument may be."""


def arg(default: Any, help: str, *, minimum: float | None = None, above: float | None = None) -> Any:
    """A dataclass field with its rule: smallest allowed value, or a value that it must exceed."""
    return field(default=default, metadata={"help": help, "minimum": minimum, "above": above})


@dataclass(frozen=True, kw_only=True)
class CommonArgs:
    """Arguments that every rule takes."""

    max_alerts: int = arg(20, "alerts per step; the rest is counted", minimum=1)
    exclude: tuple[str, ...] = arg((), "records whose name contains one of these are left out")


@dataclass(frozen=True, kw_only=True)
class LastingArgs(CommonArgs):
    """Arguments of rules that say a lasting condition once when it begins and once when it has ended."""

    patience: int = arg(1, "monitored steps in a row before the rule fires", minimum=1)
    recovery: int = arg(10, "monitored steps without it after which it counts as ended, which is said, too", minimum=1)


def parse_args(cls: type[T], rule: str, given: Mapping[str, Any]) -> T:
    """Turn the mapping `given` into the dataclass `cls`.

    Raises:
        SettingsError: unknown key, wrong type or value out of range.
    """
    fields: dict[str, dataclasses.Field[Any]] = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, 1)
            hint = f"; did you mean '{near[0]}'?" if near else "."
            raise SettingsError(f"rules: rule '{rule}' has no argument '{key}'{hint} Allowed: {', '.join(fields)}")
        values[key] = _check_value(f"rules: {rule}.{key}", fields[key], value)
    return cls(**values)


def _check_value(where: str, spec: dataclasses.Field[Any], value: Any) -> Any:
    default = spec.default
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise SettingsError(f"{where} = {value!r}: expected true or false")
        return value
    if isinstance(default, tuple):
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise SettingsError(f"{where} = {value!r}: expected a list of names")
        return tuple(value)
    if isinstance(default, str):
        if not isinstance(value, str) or len(value) > TEXT_LIMIT:
            raise SettingsError(f"{where} = {reprlib.repr(value)}: expected a text of at most {TEXT_LIMIT} characters")
        return value
    wanted = "a whole number" if isinstance(default, int) else "a number"
    kinds = (int,) if isinstance(default, int) else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or value != value:
        raise SettingsError(f"{where} = {value!r}: expected {wanted}")
    minimum, above = spec.metadata["minimum"], spec.metadata["above"]
    if minimum is not None and value < minimum:
        raise SettingsError(f"{where} = {value!r}: expected {wanted}, {minimum} or more")
    if above is not None and value <= above:
        raise SettingsError(f"{where} = {value!r}: expected {wanted} above {above}")
    return value if isinstance(default, int) else float(value)
