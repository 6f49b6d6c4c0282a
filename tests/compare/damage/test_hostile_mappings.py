"""Mapping files that are small and would be huge as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from msprobe_engine.align.mapping.api import _entries
from msprobe_engine.core.errors import UsageError
from msprobe_engine.formats.mapping_file import texts


def _nested() -> list[Any]:
    """A list of 9 lists ... 15 deep, as aliases of a YAML file give it: its text would have 9**15 items."""
    value: list[Any] = ["x"]
    for _ in range(15):
        value = [value] * 9
    return value


@pytest.mark.parametrize("read", [lambda value: texts({"a": value}, "cell mapping"), lambda value: _entries({"a": value}), _entries])
def test_nested_aliases_are_refused_at_once(read: Callable[[Any], Any]) -> None:
    """The message names the place, and never writes the value out."""
    with pytest.raises(UsageError, match="list"):
        read(_nested())
