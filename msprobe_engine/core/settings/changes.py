"""Changes to a settings file from a command line: ``dump.step=[5]`` sets one key, whatever the file says."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from msprobe_engine.core.errors import SettingsError, TextError
from msprobe_engine.core.io.yaml_text import parse_yaml

_FORM = re.compile(r"\s*([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\s*=(.*)", re.DOTALL)


def changed(node: Any, changes: Sequence[str], source: str) -> Any:
    """`node`, the content of a settings file, with the changes made; `node` itself stays as it is.

    Args:
        changes: ``key.path=value`` each; the value is YAML (``5``, ``[1, 3-6]``, ``true``, text).
        source: the file, for messages.

    Raises:
        SettingsError: a change has another form, or leads through a key that is no section.
    """
    for change in changes:
        match = _FORM.fullmatch(change)
        if match is None:
            raise SettingsError(f"'{change}' is no change of a setting; allowed: KEY=VALUE, like dump.step=[5] or monitor.activations=true")
        try:
            value = parse_yaml(match[2])
        except TextError as error:
            raise SettingsError(f"'{change}': the value is not YAML: {error}") from None
        node = _set(node, match[1].split("."), value, change, source)
    return node


def _set(node: Any, path: Sequence[str], value: Any, change: str, source: str) -> Any:
    if not path:
        return value
    if node is not None and not isinstance(node, Mapping):
        raise SettingsError(f"'{change}': {source} has no section there: what stands above '{path[0]}' is {node!r}")
    inner = dict(node or {})
    inner[path[0]] = _set(inner.get(path[0]), path[1:], value, change, source)
    return inner
