"""Values of settings as they are meant."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.config.settings.normalize import dtype, plain, same


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("1e-5", 0.00001),
        ("1.25e-6", "0.00000125"),
        ("16", 16.0),
        ("True", True),
        ("true", "True"),
        (None, "null"),
        ("'my run'", "my run"),
        ("[0.9, 0.95]", (0.9, 0.95)),
        ("0.9 0.95", [0.9, 0.95]),
        ("0.9,0.95", ["0.9", "0.95"]),
        ("torch.bfloat16", "bfloat16"),
        ("AttnBackend.flash", "flash"),
        ("Cosine", "cosine"),
        ({"a": "1"}, {"a": 1}),
        (["x"], "x"),
        (float("nan"), "nan"),
    ],
)
def test_what_is_written_in_other_ways_means_the_same(a: Any, b: Any) -> None:
    """A number, a truth value, a list, a data type or an enumeration is equal however a framework writes it."""
    assert same(plain(a), plain(b))
    assert same(plain(b), plain(a))


@pytest.mark.parametrize(
    ("a", "b"),
    [("1e-5", "1e-6"), ("True", "False"), ("0.9 0.95", "0.95 0.9"), ("ring", "tree"), ("/data/A", "/data/a"), ("007", "7"), (None, "0")],
)
def test_what_means_something_else_is_not_equal(a: Any, b: Any) -> None:
    """Other numbers, orders, words and paths stay different; a number with zeros in front is a name."""
    assert not same(plain(a), plain(b))


@pytest.mark.parametrize(
    ("written", "meant"),
    [("bf16", "bfloat16"), ("torch.float16", "float16"), ("fp32", "float32"), ("16-mixed", "float16"), (32, "float32"), (None, None)],
)
def test_names_of_data_types(written: Any, meant: Any) -> None:
    """Short names of data types become those of torch."""
    assert dtype(written) == meant


@given(st.one_of(st.integers(-(2**60), 2**60), st.floats(allow_nan=False), st.booleans(), st.none()))
def test_a_value_equals_its_text(value: Any) -> None:
    """What a YAML file holds as a value and a script as text is the same."""
    assert same(plain(value), plain(str(value)))


@given(st.text(max_size=60))
def test_any_text_has_a_plain_value(text: str) -> None:
    """No text breaks it, and a value is equal to itself."""
    assert same(plain(text), plain(text))
