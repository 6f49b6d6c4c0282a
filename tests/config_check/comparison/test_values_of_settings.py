"""Values of settings as they are meant; a setting with several values in one collection is equal to no single one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.config.collect.pack import collect
from msprobe_engine.config.settings.normalize import dtype, plain, same
from msprobe_engine.find.config.comparison import Comparison
from msprobe_engine.find.config.packs import compare_packs, verify


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


ONE = "torchrun train.py --lr 1e-4 --seed 1 --micro-batch-size 2 --global-batch-size 8 --num-layers 2\n"


def _pack(folder: Path, name: str, script: str) -> tuple[Path, list[str]]:
    path = folder / f"{name}.sh"
    path.write_text(script)
    return collect([path], folder / f"{name}.zip")


def _matter(found: Comparison) -> list[tuple[str, str, str]]:
    return [(one.bench_name, one.bench, one.cmp) for one in found.differences if one.matters]


@pytest.mark.parametrize(
    "script",
    [
        ONE + ONE.replace("--seed 1", "--seed 2"),
        ONE.replace("--seed 1", "--seed 2") + ONE,
        f"for S in 1 2; do\n{ONE.replace('--seed 1', '--seed $S')}done\n",
        f'if [ "$(hostname)" = a ]; then\n{ONE}else\n{ONE.replace("--seed 1", "--seed 2")}fi\n',
    ],
)
def test_two_commands_with_other_seeds_are_not_one(tmp_path: Path, script: str) -> None:
    """A saved pack of one command against a script with two: the other seed is a difference, whichever comes first, and is noted."""
    good, _ = _pack(tmp_path, "good", ONE)
    two, notes = _pack(tmp_path, "two", script)
    assert [note for note in notes if "'seed' has several values" in note]
    for found in (compare_packs(good, two), verify(good, [tmp_path / "two.sh"])):
        (row,) = _matter(found)
        assert (row[0], row[1], set(row[2].split(" or "))) == ("seed", "1", {"1", "2"})
    assert not _matter(compare_packs(two, two))


def test_the_same_values_in_another_order_are_equal(tmp_path: Path) -> None:
    """Two sides with the same two values, written otherwise, say the same."""
    a, _ = _pack(tmp_path, "a", ONE + ONE.replace("--lr 1e-4", "--lr 2e-4"))
    b, _ = _pack(tmp_path, "b", ONE.replace("--lr 1e-4", "--lr 0.0002") + ONE)
    assert not _matter(compare_packs(a, b))


def test_an_option_of_one_command_only_is_not_given_by_the_other(tmp_path: Path) -> None:
    """``--bf16`` of one of two commands of a program is a difference to a run without it and to one with it."""
    two, _ = _pack(tmp_path, "two", ONE + ONE.replace("--lr", "--bf16 --lr"))
    for name, one in (("without", ONE), ("with", ONE.replace("--lr", "--bf16 --lr"))):
        good, _ = _pack(tmp_path, name, one)
        (row,) = _matter(compare_packs(good, two))
        assert row[2] == "True or not given"


def test_what_is_computed_of_several_values_is_not_known(tmp_path: Path) -> None:
    """The micro batch of two commands differs: the global batch that it feeds does not make that harmless."""
    two, _ = _pack(tmp_path, "two", ONE + ONE.replace("--micro-batch-size 2", "--micro-batch-size 4"))
    good, _ = _pack(tmp_path, "good", ONE)
    assert [row[0] for row in _matter(compare_packs(good, two))] == ["micro-batch-size"]


def test_a_variable_that_differs_between_commands_is_a_difference(tmp_path: Path) -> None:
    """``NCCL_ALGO`` of two commands is equal to neither of its values."""
    good, _ = _pack(tmp_path, "good", f"export NCCL_ALGO=Ring\n{ONE}")
    two, notes = _pack(tmp_path, "two", f"export NCCL_ALGO=Ring\n{ONE}export NCCL_ALGO=Tree\n{ONE}")
    assert _matter(compare_packs(good, two)) == [("NCCL_ALGO", "Ring", "Ring or Tree")]
    assert [note for note in notes if "several values of NCCL_ALGO" in note]
