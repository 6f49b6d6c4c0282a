"""Trees that the settings allow."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from msprobe_engine.core.settings.schema import ProbeSettings
from msprobe_engine.core.settings.tree import Key, Report, build, keys_of

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


def values(key: Key) -> st.SearchStrategy[Any]:
    """Allowed values of one key, as plain data."""
    if key.section is not None:
        one = trees(key.section)
    elif key.kind == "free":
        one = st.dictionaries(TEXT, PLAIN, max_size=3)
    elif key.choices:
        one = st.sampled_from(key.choices)
    elif key.kind == "int":
        one = st.integers(key.minimum if key.minimum is not None else -(10**9), min(key.maximum or 10**9, 10**9))
    elif key.kind == "float":
        one = st.floats(key.minimum, key.maximum, allow_nan=False, allow_infinity=False)
    else:
        one = {"bool": st.booleans(), "str": TEXT}[key.kind]
    if key.ranges:
        pair = st.tuples(st.integers(0, 500), st.integers(0, 500)).map(lambda p: f"{min(p)}-{max(p)}")
        return st.lists(one | pair, max_size=4)
    if key.name == "data_mode":
        return st.lists(st.sampled_from(["input", "output", "forward", "backward"]), max_size=3)
    if key.name == "scope":
        return st.lists(one, min_size=2, max_size=2) | st.just([])
    return st.lists(one, max_size=3) if key.many else one


def trees(cls: type[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Allowed trees of one section; every key may be absent."""
    return st.fixed_dictionaries({}, optional={key.name: values(key) for key in keys_of(cls)})


def build_or_fail(tree: Any) -> ProbeSettings:
    """The settings of a tree, without rules between keys."""
    report = Report("test")
    settings = build(ProbeSettings, tree, "", report)
    report.raise_errors()
    return settings
