"""Names that may stand in ``scope``, and in ``monitor.collective_sites``, checked when settings are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.names import ApiName, ModuleName
from msprobe_engine.core.settings.load import load_settings, problem

PART = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
PATH = st.lists(PART | st.integers(0, 99).map(str), min_size=1, max_size=3).map(".".join)
DIRECTION = st.sampled_from(["forward", "backward"])
FUNCTIONS = st.builds(ApiName, PART.filter(lambda p: p not in ("Module", "Cell")), PART, st.integers(0, 9999), DIRECTION).map(str)
MODULES = st.builds(ModuleName, st.sampled_from(["Module", "Cell"]), PATH, PART, DIRECTION, st.integers(0, 9999)).map(str)


@given(FUNCTIONS, MODULES)
def test_full_names(function: str, module: str) -> None:
    """Every full name is right at the levels that record its kind, whatever its prefix, and told apart at the others."""
    assert problem(function, "L1") == problem(function, "mix") == problem(module, "L0") == problem(module, "mix") == ""
    assert "names a function, and level L0 records modules" in problem(function, "L0")
    assert "names a module, and level L1 records functions" in problem(module, "L1")


@given(MODULES)
def test_what_was_meant(module: str) -> None:
    """A module's name without its number, or with number and direction exchanged, leads to a name that is allowed."""
    parts = module.split(".")
    for wrong in (".".join(parts[:-1]), ".".join([*parts[:-2], parts[-1], parts[-2]])):
        said = problem(wrong, "L0")
        if said:
            meant = said.partition("did you mean '")[2].rstrip("'?")
            assert not meant or problem(meant, "L0") == ""


@pytest.mark.parametrize(
    "name", ["", ".", "x", "Module", "Module.forward.0", "a.debug", "x.0.debug", "Functional.linear.٣.forward", "a" * 1000]
)
def test_no_names(name: str) -> None:
    """Anything else is no full name, at every level, and the message stays short of the name itself."""
    for level in ("L0", "L1", "mix"):
        said = problem(name, level)
        assert said.startswith("is no full record name; allowed at level")
        assert len(said) < 400


def test_pattern_that_is_none(tmp_path: Path) -> None:
    """A pattern that is no regular expression is refused with its place and what is wrong; a good one is kept as it is."""
    path = tmp_path / "probe.yaml"
    path.write_text("monitor:\n  collective_sites: ['train\\.py\\[12\\]', 'a[1']\n")
    with pytest.raises(SettingsError, match=r"monitor\.collective_sites\[1\]: 'a\[1' is no regular expression"):
        load_settings(path)
    path.write_text("monitor:\n  collective_sites: ['train\\.py\\[12\\]']\n")
    monitor = load_settings(path).monitor
    assert monitor is not None
    assert monitor.collective_sites == (r"train\.py\[12\]",)
