"""The JSON Schema of the settings, for editors, and their reference page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from settings_trees import build_or_fail, trees

from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.settings.document import key_paths, page
from msprobe_engine.core.settings.json_schema import json_schema
from msprobe_engine.core.settings.presets import PRESETS, preset_file
from msprobe_engine.core.settings.schema import ProbeSettings
from msprobe_engine.core.settings.tree import to_tree

CHECK = jsonschema.Draft202012Validator(json_schema())


def test_it_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())


@given(trees(ProbeSettings))
def test_what_the_settings_allow(tree: dict[str, Any]) -> None:
    """Every allowed tree, as it was written and as `settings check` prints it."""
    CHECK.validate(tree)
    CHECK.validate(to_tree(build_or_fail(tree)))


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str) -> None:
    CHECK.validate(yaml.safe_load(preset_file(name).read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "short",
    [
        {"monitor": True},
        {"dump": False},
        {"sinks": {"tensorboard": True}},
        {"rules": "recommended"},
        {"rules": ["nan_inf"]},
        {"dump": {"step": 5}},
        {"dump": {"step": "3-6"}},
        {"dump": None},
    ],
)
def test_short_forms(short: dict[str, Any]) -> None:
    CHECK.validate(short)
    build_or_fail(short)


@pytest.mark.parametrize(
    "wrong",
    [
        {"monitr": {}},
        {"monitor": {"intervall": 1}},
        {"monitor": {"interval": 0}},
        {"monitor": {"interval": True}},
        {"sinks": False},
        {"dump": {"level": "L7"}},
        {"dump": {"step": "a"}},
        {"dump": {"step": True}},
        {"rules": [True]},
        {"output_dir": None},
    ],
)
def test_what_neither_allows(wrong: dict[str, Any]) -> None:
    assert not CHECK.is_valid(wrong)
    with pytest.raises(SettingsError):
        build_or_fail(wrong)


def test_every_key_has_its_line_of_help() -> None:
    """What an editor shows beside it."""

    def described(node: Any) -> int:
        if isinstance(node, dict):
            keys = node.get("properties", {})
            assert all(key.get("description") for key in keys.values())
            return len(keys) + sum(map(described, node.values()))
        return sum(map(described, node)) if isinstance(node, list) else 0

    assert described(json_schema()) == len(key_paths())


PAGE = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"


def test_the_page_is_current() -> None:
    """docs/reference/settings.md is what `python -m msprobe_engine.core.settings.document` writes today."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_every_key_is_on_the_page() -> None:
    """Each key of the tree has a line, or a title where it is a section."""
    for path in key_paths():
        assert f"\n* `{path.rpartition('.')[2]}` (" in page() or f"## `{path}`" in page() or f"## `{path}[]`" in page(), path
