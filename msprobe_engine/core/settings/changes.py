"""Changes to a settings file from a command line: ``dump.step=[5]`` sets one key, whatever the file says."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from msprobe_engine.core.errors import SettingsError, TextError
from msprobe_engine.core.io.yaml_text import parse_yaml
from msprobe_engine.core.settings.schema import ProbeSettings
from msprobe_engine.core.settings.tree import keys_of, written_out

_FORM = re.compile(r"\s*([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\s*=(.*)", re.DOTALL)


def apply_changes(node: Any, changes: Sequence[str], source: str) -> Any:
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
        node = _set_value(node, match[1].split("."), value, change, source, ProbeSettings)
    return node


def _set_value(node: Any, path: Sequence[str], value: Any, change: str, source: str, section: type[Any] | None) -> Any:
    """`section`: of the settings tree, where `node` is one; what stands there in short (``tensorboard: true``) is written out first."""
    if not path:
        return value
    if node is not None and not isinstance(node, Mapping):
        raise SettingsError(f"'{change}': {source} has no section there: what stands above '{path[0]}' is {node!r}")
    inner = dict(node or {})
    key = next((key for key in keys_of(section) if key.name == path[0]), None) if section is not None else None
    before = inner.get(path[0])
    if key is not None and key.section is not None and len(path) > 1:
        before = written_out(key, before)
    below = None if key is None or key.many else key.section
    inner[path[0]] = _set_value(before, path[1:], value, change, source, below)
    return inner
