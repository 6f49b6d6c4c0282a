"""Changes to a settings file from a command line."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.settings.changes import apply_changes
from msprobe_engine.core.settings.load import load_settings

KEYS = st.sampled_from(["a", "b", "monitor", "step_", "_x1"])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.text(st.characters(exclude_categories=["Cc", "Cs", "Cn"], exclude_characters="\ufeff")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


def at(node: Any, path: list[str]) -> Any:
    for name in path:
        node = node[name]
    return node


@given(
    tree=st.dictionaries(KEYS, st.dictionaries(KEYS, st.dictionaries(KEYS, VALUES))),
    path=st.lists(KEYS, min_size=1, max_size=3),
    value=VALUES,
)
def test_one_key_is_changed_and_no_other(tree: dict[str, Any], path: list[str], value: Any) -> None:
    """JSON is YAML: the value arrives as it is; all other keys, and the tree that was given, stay."""
    before = copy.deepcopy(tree)
    after = apply_changes(tree, [f"{'.'.join(path)}={json.dumps(value, ensure_ascii=False)}"], "file")
    assert tree == before
    assert at(after, path) == value
    for name in tree:
        if name != path[0]:
            assert after[name] == tree[name]
    if len(path) > 1 and path[0] in tree:
        assert {k: v for k, v in after[path[0]].items() if k != path[1]} == {k: v for k, v in tree[path[0]].items() if k != path[1]}


@given(path=st.lists(KEYS, min_size=1, max_size=3), first=VALUES, second=VALUES)
def test_the_last_change_of_a_key_counts(path: list[str], first: Any, second: Any) -> None:
    """Changes are made in their order."""
    name = ".".join(path)
    assert (
        at(
            apply_changes(
                None, [f"{name}={json.dumps(first, ensure_ascii=False)}", f" {name} ={json.dumps(second, ensure_ascii=False)}"], "file"
            ),
            path,
        )
        == second
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("monitor", "'monitor' is no change of a setting; allowed: KEY=VALUE"),
        ("=5", "is no change"),
        ("a..b=5", "is no change"),
        ("a b=5", "is no change"),
        ("a=[1", "the value is not YAML"),
        ("a=!!python/object:os.system x", "the value is not YAML"),
        ("a.b=5", "has no section there"),
    ],
)
def test_what_is_no_change(change: str, words: str) -> None:
    """The message shows the change and says what is wrong with it."""
    with pytest.raises(SettingsError, match=r"^'") as caught:
        apply_changes({"a": 3}, [change], "probe.yaml")
    assert words in str(caught.value)
    assert change in str(caught.value)


def test_a_file_with_changes(tmp_path: Path) -> None:
    """Sections that the file does not have are made; mistakes are those of the file's own keys."""
    path = tmp_path / "probe.yaml"
    path.write_text("monitor: {gradients: true}\n")
    settings = load_settings(path, changes=("monitor.gradients=false", "dump.step=[1, 3-4]", "output_dir=here"))
    assert settings.monitor is not None
    assert settings.dump is not None
    assert (settings.monitor.gradients, settings.output_dir) == (False, "here")
    with pytest.raises(SettingsError, match="did you mean 'step'"):
        load_settings(path, changes=("dump.stp=1",))


@pytest.mark.parametrize(
    ("change", "expected"),
    [("dump.step=5", (5,)), ("dump.step=[5]", (5,)), ("dump.step=3-4", (3, 4)), ("dump.step=[1, 3-4]", (1, 3, 4))],
)
def test_steps_of_a_change(change: str, expected: tuple[int, ...]) -> None:
    """One step needs no list, which a shell would want in quotes."""
    dump = load_settings({"dump": True}, changes=(change,)).dump
    assert dump is not None
    assert dump.step == expected


def test_a_change_within_a_section_that_is_switched_on_in_short() -> None:
    """It goes on being on."""
    settings = load_settings({"sinks": {"tensorboard": True}, "monitor": True}, changes=("sinks.tensorboard.path=x", "monitor.interval=3"))
    assert (settings.sinks.tensorboard.enabled, settings.sinks.tensorboard.path) == (True, "x")
    assert settings.monitor is not None
    assert settings.monitor.interval == 3
