"""Elements of ``list``: what they keep, and what can be said before a call has its number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.settings.load import load_settings
from msprobe_engine.probe.selection import risk
from msprobe_engine.probe.selection.patterns import NamePatterns

ONE, ELEVEN = "Module.layers.1.mlp.MLP.forward.0", "Module.layers.11.mlp.MLP.forward.0"


@pytest.mark.parametrize(
    ("element", "one", "eleven"),
    [
        ("layers.1", True, True),
        ("layers.1.", True, False),
        ("layers.1.*", True, False),
        ("*.layers.1.*", True, False),
        ("layers.?.mlp", True, False),
        ("layers.*.mlp", True, True),
        ("layers.1*", True, True),
        ("yers.1.*", False, False),
        (ONE.replace("0", "?"), True, False),
        (r"re:layers\.1\.", True, False),
        (r"re:layers\.(1|11)\.mlp", True, True),
        (r"re:^layers", False, False),
    ],
)
def test_which_names_fit(element: str, one: bool, eleven: bool) -> None:
    """A plain element is a part of the name; a glob fits whole components, a regular expression anywhere."""
    patterns = NamePatterns([element])
    assert (patterns(ONE), patterns(ELEVEN)) == (one, eleven)


def test_characters_of_regular_expressions_are_plain_in_globs() -> None:
    """Only ``*`` and ``?`` mean something in a glob."""
    assert NamePatterns(["a+b.*"])("Module.a+b.X.forward.0")
    assert not NamePatterns(["a.b*"])("Module.axb.X.forward.0")
    assert not NamePatterns(["[ab].*"])("Module.a.X.forward.0")


PIECES = ("Module", "Tensor", "layers", "1", "11", "mul", "Linear", "forward", "backward", "parameters_grad", "0", "2", "relu_", "a")
BASES = st.lists(st.sampled_from(PIECES), min_size=1, max_size=3).map(".".join)
PLAIN = st.tuples(BASES, st.integers(0, 8), st.integers(0, 8)).map(lambda t: t[0][t[1] : len(t[0]) - t[2]] or t[0])
GLOBS = st.lists(st.sampled_from((*PIECES, "*", "?", "mu?", "la*")), min_size=1, max_size=3).map(".".join)
REGULAR = st.sampled_from([r"re:\.1\.", "re:forward", r"re:mul\.[0-4]\.", "re:^Module", r"re:\.1?2$", "re:a$"])
ELEMENTS = st.lists(st.one_of(PLAIN, GLOBS, REGULAR), min_size=1, max_size=2)


@given(BASES, ELEMENTS)
def test_what_is_said_of_a_module_holds_for_its_calls(base: str, elements: list[str]) -> None:
    """A module of which a record can be kept is possible, one of which every record is kept may be certain; tried on 130 calls."""
    patterns = NamePatterns(elements)
    possible, certain = patterns.module(f"Module.{base}")
    names = [f"Module.{base}.{kind}.{n}" for kind in ("forward", "backward", "parameters_grad") for n in range(130)]
    kept = [patterns(name) for name in names]
    assert possible == any(kept)
    assert not certain or all(kept)


@given(BASES, ELEMENTS)
def test_what_is_said_of_an_api_holds_for_its_calls(base: str, elements: list[str]) -> None:
    """The same for APIs, whose number stands before the direction."""
    patterns = NamePatterns(elements)
    possible, certain = patterns.api(f"Tensor.{base}")
    kept = [patterns(f"Tensor.{base}.{n}.{direction}") for n in range(130) for direction in ("forward", "backward")]
    assert possible == any(kept)
    assert not certain or all(kept)


def test_elements_that_mean_modules_only() -> None:
    """Whether an API can be kept by its name decides which modules are hooked at level mix."""
    assert NamePatterns(["Module.layers.1", "Module.*.mlp", r"re:^Module\.", r"re:Module\.x"]).only_modules
    assert not NamePatterns(["Module.layers.1", "relu"]).only_modules


@pytest.mark.parametrize("key", ["list", "tensor_list"])
def test_a_wrong_regular_expression_is_a_settings_error(key: str) -> None:
    """The message names the key, the value and what is wrong with it."""
    with pytest.raises(SettingsError, match=rf"dump\.{key}\[1\]: 're:\(' is no regular expression: missing \)"):
        load_settings({"dump": {key: ["layers.0", "re:("]}})
    with pytest.raises(SettingsError, match=rf"{key}\[0\].*empty regular expression"):
        load_settings({"dump": {key: ["re:"]}})


@pytest.mark.parametrize(
    ("prefix", "api", "core", "focus"),
    [
        ("Functional", "linear", True, True),
        ("Torch", "chain_matmul", True, True),
        ("Tensor", "__matmul__", True, True),
        ("Functional", "layer_norm", True, True),
        ("Torch", "relu", False, True),
        ("Tensor", "__add__", False, True),
        ("Tensor", "bfloat16", False, False),
        ("Torch", "cat", False, False),
        ("Distributed", "all_reduce", True, True),
        ("NPU", "npu_swiglu", True, True),
        ("my.kernels", "rotate", True, True),
    ],
)
def test_risk_classes(prefix: str, api: str, core: bool, focus: bool) -> None:
    """CORE: multiplications, normalisation, attention, and all that is none of torch's own functions; FOCUS: all but shapes and casts."""
    assert [risk.is_recorded(level, prefix, api) for level in ("CORE", "FOCUS", "ALL")] == [core, focus, True]


def test_risk_classes_do_not_meet() -> None:
    """No API is both important and unimportant."""
    assert risk.CORE.isdisjoint(risk.LOW)
