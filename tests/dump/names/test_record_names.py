"""The grammar of record names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.core import names
from msprobe_engine.core.errors import DumpFormatError, UsageError

FIXTURES = Path(__file__).parents[2] / "fixtures"
segment = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,12}", fullmatch=True)
path = st.lists(st.one_of(segment, st.integers(0, 99).map(str)), min_size=1, max_size=5).map(".".join)
number = st.integers(0, 10**12)
direction = st.sampled_from(["forward", "backward"])
api_prefix = path.filter(lambda p: p.split(".")[0] not in ("Module", "Cell"))

records = st.one_of(
    st.builds(names.ApiName, api_prefix, segment, number, direction),
    st.builds(names.ModuleName, st.sampled_from(["Module", "Cell"]), path, segment, direction, number),
    st.builds(names.ParametersGradName, st.sampled_from(["Module", "Cell"]), path, segment, st.none() | number),
    st.builds(names.DebugName, path.filter(lambda n: not n.endswith("_grad")), number, st.booleans()),
)


@given(records)
def test_parse_is_the_inverse_of_format(record: names.RecordName) -> None:
    """Parsing a formatted name gives the parts back, whatever the dots in prefix and path."""
    parsed = names.parse(str(record))
    if isinstance(record, names.ApiName) and any(not p for p in record.prefix.split(".")):
        return
    assert parsed is not None
    assert str(parsed) == str(record)
    assert type(parsed) is type(record)
    assert parsed == record


@given(st.text(max_size=60))
def test_any_text_is_answered(text: str) -> None:
    """Arbitrary text gives None or a name that formats back to an equal meaning, never an exception."""
    parsed = names.parse(text)
    assert parsed is None or names.parse(str(parsed)) == parsed


@pytest.mark.parametrize("version", ["8.1.1", "26.2.0"])
def test_every_name_of_the_existing_tool_is_understood(version: str) -> None:
    """Every record name and node in the dumps of both versions parses and formats back to itself, but for the special nodes."""
    seen = set()
    for file in (FIXTURES / version).rglob("*.json"):
        doc = json.loads(file.read_text())
        if file.name in ("dump.json", "debug.json"):
            seen |= set(doc["data"])
        elif file.name == "construct.json":
            seen |= set(doc) - {names.OPTIMIZER, names.CLIP_GRAD}
    assert len(seen) > 50
    for name in seen:
        assert str(names.parse(name)) == name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Functional.linear.0.backward", "backward"),
        ("Module.a.B.forward.3", "forward"),
        ("Module.a.B.parameters_grad", "backward"),
        ("loss_grad.0.debug", "backward"),
        ("loss.0.debug", None),
        ("optimizer", None),
    ],
)
def test_direction(name: str, expected: str | None) -> None:
    """The direction is read from the name's rule; parameter gradients count as backward."""
    assert names.direction(name) == expected


def test_number_before_and_after_the_direction() -> None:
    """API names carry the number before the direction, module names after it."""
    assert names.parse("Primitive.matmul.MatMul.0.forward") == names.ApiName("Primitive.matmul", "MatMul", 0, "forward")
    assert names.parse("Module.0.Linear.forward.7") == names.ModuleName("Module", "0", "Linear", "forward", 7)


@pytest.mark.parametrize("bad", ["../x", "a/b", "a\\b", "a\0b", ".."])
def test_file_names_cannot_leave_their_directory(bad: str) -> None:
    """A name with a separator or control character is refused when a file name is made or read."""
    with pytest.raises(UsageError, match="tensor file name"):
        names.tensor_file(bad + "/", "input.0")
    with pytest.raises(DumpFormatError, match="plain file name"):
        names.check_file_name(bad, "dump.json")


def test_huge_call_numbers_are_no_names() -> None:
    """A call number of thousands of digits is refused without converting it."""
    assert names.parse(f"Torch.add.{'9' * 10000}.forward") is None
