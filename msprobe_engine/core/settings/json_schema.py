"""The settings tree as a JSON Schema, for editors: the keys, what may stand there, defaults and the line of help, from the schema alone.

What it allows is what `tree.build` allows, with the short forms (``monitor: true``, ``rules: recommended``, ``step: 5``). Rules between
keys and the arguments of alert rules are known to ``msprobe settings check`` only.
"""

from __future__ import annotations

from typing import Any

from msprobe_engine.core.settings import rank_choice
from msprobe_engine.core.settings.schema import ProbeSettings
from msprobe_engine.core.settings.tree import Key, keys_of, to_tree

_RANGE = r"^\s*[0-9]{1,7}\s*(-\s*[0-9]{1,7}\s*)?$"


def json_schema() -> dict[str, Any]:
    """Of the whole file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "msprobe settings",
        **_section(ProbeSettings),
    }


def _section(section: type[Any]) -> dict[str, Any]:
    text = (section.__doc__ or "").strip()
    about = {} if text.startswith(f"{section.__name__}(") or not text else {"description": text.splitlines()[0]}
    return {**about, "type": "object", "additionalProperties": False, "properties": {key.name: _key(key) for key in keys_of(section)}}


def _key(key: Key) -> dict[str, Any]:
    """One key: its value, its short forms, and null where that means that it is absent."""
    shapes = _shapes(key)
    if key.optional or key.many or key.section is not None:
        shapes.append({"type": "null"})
    value = shapes[0] if len(shapes) == 1 else {"anyOf": shapes}
    default = [to_tree(item) if key.section is not None else item for item in key.default] if key.many else key.default
    given = {} if key.default is None or (key.section is not None and not key.many) else {"default": default}
    return {"description": key.help, **given, **value}


def _shapes(key: Key) -> list[dict[str, Any]]:
    if key.ranges:
        bounds = _bounds(key)
        one = [{"type": "integer", **bounds}, {"type": "string", "pattern": _RANGE}]
        chosen: list[dict[str, Any]] = [{"enum": list(rank_choice.ROLES)}, {"type": "object"}] if key.ranks else []
        return [{"type": "array", "items": {"anyOf": one}}, *one, *chosen]
    single = _single(key)
    if not key.many:
        if key.section is None:
            return [single]
        off = key.optional or any(inner.name == "enabled" for inner in keys_of(key.section))
        return [single, {"type": "boolean"} if off else {"const": True}]
    if key.item:
        item = _single(next(inner for inner in keys_of(key.section) if inner.name == key.item)) if key.section is not None else {}
        return [{"type": "array", "items": {"anyOf": [single, item]}}, item]
    return [{"type": "array", "items": single}]


def _single(key: Key) -> dict[str, Any]:
    if key.section is not None:
        return _section(key.section)
    kind = {"bool": "boolean", "int": "integer", "float": "number", "str": "string"}.get(key.kind, "object")
    return {"enum": list(key.choices)} if key.choices else {"type": kind, **_bounds(key)}


def _bounds(key: Key) -> dict[str, Any]:
    bounds = {"minimum": key.minimum, "maximum": key.maximum}
    return {name: bound for name, bound in bounds.items() if bound is not None}
