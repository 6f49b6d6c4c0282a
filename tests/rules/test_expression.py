"""Conditions as data: what they say, and what they refuse."""

from __future__ import annotations

import contextlib
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.core.errors import SettingsError
from msprobe_engine.probe.rules.expression import Expression, MissingValue


class Numbers:
    """A step with these numbers, and one norm per family."""

    def __init__(self, **numbers: float) -> None:
        self.numbers = numbers

    def scalar(self, name: str) -> float:
        if name not in self.numbers:
            raise MissingValue(name)
        return self.numbers[name]

    def select(self, op: str, family: str, pattern: str, phase: str) -> float:
        return self.scalar(f"{op} {family} {pattern} {phase}".replace(" ", "_"))


def holds(text: str, **numbers: float) -> bool | None:
    judged = Expression(text).judge(Numbers(**numbers))
    return None if judged is None else judged[0]


number = st.floats(-100, 100).map(lambda x: round(x, 3))


def arithmetic(depth: int) -> st.SearchStrategy[str]:
    leaf = st.one_of(st.sampled_from(["a", "b", "c"]), st.floats(0, 100).map(lambda x: f"{x:.3f}"))
    if depth == 0:
        return leaf
    inner = arithmetic(depth - 1)
    pair = st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})")
    return st.one_of(leaf, pair, inner.map(lambda t: f"-{t}"), inner.map(lambda t: f"abs({t})"))


def truth(depth: int) -> st.SearchStrategy[str]:
    compare = st.tuples(arithmetic(1), st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), arithmetic(1)).map(" ".join)
    if depth == 0:
        return compare
    inner = truth(depth - 1)
    joined = st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})")
    return st.one_of(compare, joined, inner.map(lambda t: f"not ({t})"))


@given(truth(2), number, number, number)
def test_it_means_what_python_means(text: str, a: float, b: float, c: float) -> None:
    """Arithmetic, comparisons and logic of an allowed expression are those of Python."""
    expected = eval(text, {"__builtins__": {}, "abs": abs}, {"a": a, "b": b, "c": c})  # an expression that this test has made
    assert holds(text, a=a, b=b, c=c) == expected


def test_windows_look_at_the_steps_before() -> None:
    """Window functions see the last values before this step; last and delta need one, the others `warmup`."""
    values = [4.0, 1.0, 3.0, 10.0, 2.0, 8.0]
    checks = {
        "median(x) == {m}": lambda past: statistics.median(past),
        "mean(x) == {m}": lambda past: math.fsum(past) / len(past),
        "max(x) == {m}": max,
        "min(x) == {m}": min,
    }
    for text, function in checks.items():
        for i in range(3, 6):
            expression = Expression(text.replace("{m}", repr(float(function(values[max(0, i - 4) : i])))), window=4, warmup=3)
            judged = [expression.judge(Numbers(x=v)) for v in values[: i + 1]]
            assert judged[:3] == [None] * 3
            assert judged[i] is not None
            assert judged[i][0]
    delta = Expression("delta(x) > 6")
    assert [j and j[0] for j in (delta.judge(Numbers(x=v)) for v in values)] == [None, False, False, True, False, False]


def test_the_past_is_not_spoiled() -> None:
    """NaN and steps without the number do not enter a window."""
    expression = Expression("x > 2 * median(x)", window=5, warmup=3)
    for value in (1.0, math.nan, 1.0, math.inf, 1.0):
        expression.judge(Numbers(x=value))
        expression.judge(Numbers())
    judged = expression.judge(Numbers(x=2.5))
    assert judged is not None
    assert judged == (True, {"x": 2.5, "median(x)": 1.0})


def test_nan_and_division_by_zero() -> None:
    """A comparison with NaN does not hold, a division by zero is NaN, isnan and isinf are true or false."""
    assert holds("x > 1 or x <= 1", x=math.nan) is False
    assert holds("1 / x > 0 or 1 / x <= 0", x=0.0) is False
    assert holds("isnan(x) and not isinf(x)", x=math.nan) is True
    assert holds("isinf(x / y)", x=math.inf, y=2.0) is True


def test_missing_numbers_say_nothing() -> None:
    """A number that the step does not hold makes the condition unknown, unless the rest decides it."""
    assert holds("missing > 1", x=1.0) is None
    assert holds("x > 0 or missing > 1", x=1.0) is True
    assert holds('scalar("lm loss") > 1') is None


def test_selectors_and_odd_names() -> None:
    """Statistics of families and numbers with any name; line breaks in YAML do not matter."""
    assert holds('norm("grad_reduced", "*") >\n 2', **{"norm_grad_reduced_*_": 3.0}) is True
    assert Expression('scalar("lm loss") > 1').judge(Numbers(**{"lm loss": 2.0})) == (True, {"scalar('lm loss')": 2.0})


HOSTILE = [
    ("loss.__class__ > 1", "attribute"),
    ("().__class__.__bases__ > 1", "attribute"),
    ("__import__('os') > 1", "not allowed"),
    ("(lambda: 1)() > 0", "by name"),
    ("[1][0] > 0", "index"),
    ("[x for x in y] > 1", "ListComp"),
    ("2 ** 99999999 > 1", "Pow"),
    ("x % 2 > 1", "Mod"),
    ("x << 99999 > 1", "LShift"),
    ("1 if x else 2", "if ... else"),
    ("f'{x}' > 1", "formatted"),
    ("(y := 3) > 1", "assignment"),
    ("max(*x) > 1", "stars"),
    ("max(x=1) > 1", "without names"),
    ("max(x, y) > 1", "one argument"),
    ("eval(x) > 1", "no function"),
    ("x > 'text'", "is no number"),
    ("x > True", "is no number"),
    ("x > 1e999", "too large"),
    ("x > " + "9" * 900, "too large"),
    ("x in y", "comparison is not allowed"),
    ("x is y", "comparison is not allowed"),
    ("median(x)", "is a number"),
    ("x", "is a number"),
    ("(x > 1) + 1 > 1", "a number is needed"),
    ("x and y", "a comparison is needed"),
    ("norm('grads', '*') > 1", "no family"),
    ("norm('grad_reducd', '*') > 1", "did you mean 'grad_reduced'"),
    ("norm('grad_reduced') > 1", "with texts"),
    ("norm('grad_reduced', x) > 1", "not both"),
    ("medain(x) > 1", "did you mean 'median'"),
    ("", "empty"),
    ("x >", "invalid syntax"),
    ("x > 1; y", "invalid syntax"),
    ("x > 1\x00", "null|invalid"),
    ("(" * 400 + "x" + ")" * 400, "nested|large"),
    ("-" * 900 + "x > 1", "large|Recursion|Memory"),
    ("not " * 200 + "x > 1", "large|Recursion|Memory"),
    (" + ".join(["x"] * 150) + " > 1", "large"),
    ("x > 1 or " * 200 + "x > 1", "characters|large"),
    ("x" * 1001, "at most 1000"),
]


@pytest.mark.parametrize(("text", "message"), HOSTILE, ids=[text[:24] for text, _ in HOSTILE])
def test_what_is_refused(text: str, message: str) -> None:
    """Everything outside of the list is refused when the settings are read, with what is allowed."""
    with pytest.raises(SettingsError, match=message) as error:
        Expression(text, where="rules: condition 'a', when")
    assert str(error.value).startswith("rules: condition 'a', when")
    assert "allowed:" in str(error.value)


def test_the_place_is_named() -> None:
    """A refusal names the column."""
    with pytest.raises(SettingsError, match="column 12"):
        Expression("loss > 1 + x.y")


@given(st.text(max_size=60))
def test_any_text_is_an_expression_or_an_error_of_ours(text: str) -> None:
    """Whatever stands there, the answer is an expression or a SettingsError."""
    with contextlib.suppress(SettingsError):
        Expression(text)
