"""Plain data to settings objects and back."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from settings_trees import PLAIN, TEXT, build_or_fail, trees

from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.core.io.yaml_text import parse_yaml
from msprobe_engine.core.settings.existing.migrate import changed_keys
from msprobe_engine.core.settings.load import load_settings
from msprobe_engine.core.settings.schema import DumpSettings, ProbeSettings
from msprobe_engine.core.settings.tree import keys_of, to_tree


@given(trees(ProbeSettings))
def test_allowed_trees_round_trip_through_yaml_and_json(tree: dict[str, Any]) -> None:
    """What is allowed is accepted; its plain form read back from YAML or JSON, or without the defaults, gives an equal object."""
    settings = build_or_fail(tree)
    plain = to_tree(settings)
    assert build_or_fail(parse_json(json.dumps(plain))) == settings
    assert build_or_fail(parse_yaml(yaml.safe_dump(plain))) == settings
    assert build_or_fail(changed_keys(settings, ProbeSettings())) == settings


@given(PLAIN | st.dictionaries(st.sampled_from([k.name for k in keys_of(ProbeSettings)]) | TEXT, PLAIN | trees(DumpSettings)))
def test_garbage_never_gives_anything_but_a_settings_error(tree: Any) -> None:
    """Whatever a mapping holds, loading it gives settings or a SettingsError with one printable line per mistake."""
    if not isinstance(tree, dict):
        tree = {"dump": tree}
    for kind in ("probe", "dump", "monitor", None):
        try:
            assert isinstance(load_settings(tree, kind=kind), ProbeSettings)
        except SettingsError as error:
            for line in str(error).split("\n"):
                assert line.startswith("settings: ")
                assert line.isprintable()


def message(tree: Any) -> str:
    """The error text of a tree that is not allowed."""
    with pytest.raises(SettingsError) as caught:
        build_or_fail(tree)
    return str(caught.value)


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"monitor": {"interval": 0}}, "test: monitor.interval: 0 (integer) is not allowed; allowed: an integer >= 1"),
        ({"monitor": {"interval": True}}, "test: monitor.interval: True (true/false) is not allowed; allowed: an integer >= 1"),
        ({"monitor": {"interval": 1.0}}, "test: monitor.interval: 1.0 (number) is not allowed; allowed: an integer >= 1"),
        ({"strict": 1}, "test: strict: 1 (integer) is not allowed; allowed: true or false"),
        ({"output_dir": None}, "test: output_dir: None (null) is not allowed; allowed: a string"),
        ({"output_dir": "a\0b"}, "test: output_dir: 'a\\x00b' (string) is not allowed; allowed: a string"),
        ({"dump": [1]}, "test: dump: [1] (list) is not allowed; allowed: a mapping with the keys task,"),
        ({"dump": {"list": "relu"}}, "(for one item write ['relu'])"),
        ({"dump": {"level": "l0"}}, "did you mean 'L0'?"),
        ({"rules": [{}, {"rule": 3}]}, "test: rules[1].rule: 3 (integer) is not allowed"),
        ({"rules": [{"args": {1: 2}}]}, "test: rules[0].args: the key 1 (integer) is not allowed; allowed: strings"),
        ({"sinks": {"prometheus": {"port": 65536}}}, "allowed: an integer >= 0 and <= 65535"),
    ],
)
def test_a_mistake_names_key_value_type_and_what_is_allowed(tree: Any, expected: str) -> None:
    """A wrong value is reported with its key path, the value, its type and what is allowed; bool is no integer."""
    assert expected in message(tree)


def test_an_unknown_key_is_reported_with_the_nearest_known_one() -> None:
    """An unknown key names its path and the nearest known key of that section."""
    assert "test: monitor.intervall: unknown key; did you mean 'interval'?" in message({"monitor": {"intervall": 3}})
    assert "test: 'a\\nb': unknown key; known here: output_dir" in message({"a\nb": 3})
    assert "test: 5: unknown key" in message({5: 3})


def test_all_mistakes_are_reported_at_once() -> None:
    """One error holds every mistake of the file, one per line."""
    assert len(message({"outputdir": 1, "strict": "x", "monitor": {"ops": ["a", "b"]}}).split("\n")) == 4


@pytest.mark.parametrize(
    ("given_value", "expected"),
    [([3, 1, 3], (1, 3)), (["3-6"], (3, 4, 5, 6)), (["3"], (3,)), (["0"], (0,)), ([5, "0-2", " 2 - 3 "], (0, 1, 2, 3, 5)), (None, ())],
)
def test_ranges_are_inclusive_sorted_and_without_repeats(given_value: Any, expected: tuple[int, ...]) -> None:
    """Lists of steps and ranks take integers and 'a-b' strings."""
    assert build_or_fail({"dump": {"step": given_value}}).dump == DumpSettings(step=expected)


@pytest.mark.parametrize("item", [-1, 1_000_001, True, 1.5, "3-1", "a-b", "-3", "1-2-3", "", None, "0-1000001", "²"])
def test_bad_items_of_ranges_are_refused(item: Any) -> None:
    """Negative, too large, reversed, non-integer and non-numeric items of a range list are mistakes at their place."""
    assert "test: dump.rank[1]: " in message({"dump": {"rank": [0, item]}})


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ({"monitor": True}, {"monitor": {}}),
        ({"monitor": False}, {}),
        ({"dump": True}, {"dump": {}}),
        ({"sinks": {"tensorboard": True, "csv": False}}, {"sinks": {"tensorboard": {"enabled": True}, "csv": {"enabled": False}}}),
        ({"incident": False}, {"incident": {"enabled": False}}),
        ({"rules": "recommended"}, {"rules": [{"rule": "recommended"}]}),
        ({"rules": ["nan_inf", {"rule": "loss_spike"}]}, {"rules": [{"rule": "nan_inf"}, {"rule": "loss_spike"}]}),
        ({"dump": {"step": 5, "rank": "0-1"}}, {"dump": {"step": [5], "rank": ["0-1"]}}),
    ],
)
def test_short_forms(short: dict[str, Any], long: dict[str, Any]) -> None:
    """A section that is on or off as it is, one rule by its name, one step."""
    assert build_or_fail(short) == build_or_fail(long)


def test_cyclic_data_is_refused() -> None:
    """A mapping that contains itself is a mistake, not an endless loop."""
    cycle: dict[str, Any] = {}
    cycle["x"] = cycle
    assert "too deep" in message({"rules": [{"args": cycle}]})
