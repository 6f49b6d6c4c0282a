"""Settings files as plain data; small ones that would take for ever or all memory if they were expanded."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.settings.load import load_settings
from msprobe_engine.core.settings.text import MAX_BYTES, parse, read_file


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.yaml", "x: 1\ny: 2\nx: 3\n", "'x' appears twice (line 3, column 1)"),
        ("a.yaml", "a: {x: 1, x: 2}", "'x' appears twice"),
        ("a.json", '{"a": {"x": 1, "x": 2}}', "'x' appears twice"),
        ("a.yaml", "a: [1", "not valid YAML"),
        ("a.json", "{", "not valid JSON"),
        ("a.yaml", "a: !!python/object/apply:os.system ['true']", "not valid YAML"),
        ("a.yaml", "? [1]\n: 2", "not valid YAML"),
        ("a.yaml", "a: " + "[" * 1200, "not valid YAML"),
        ("a.json", "[1 2]", "not valid JSON: Expecting ',' delimiter (line 1, column 4)"),
        ("a.json", '{"a": 1,}', "omma"),
        ("a.json", " ", "the file is empty"),
        ("a.json", "[" * 100_000, "not valid JSON"),
        ("a.json", "1" * 5000, "not valid JSON"),
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path: Path, name: str, content: str, says: str) -> None:
    """Duplicate keys, broken syntax and Python tags are a SettingsError that names the file and the place."""
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(SettingsError) as caught:
        read_file(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_merge_keys_and_byte_order_marks_are_understood() -> None:
    """YAML's merge key may repeat what it overrides, and a byte order mark is no content."""
    text = b"\xef\xbb\xbfbase: &b {x: 1}\nother:\n  <<: *b\n  x: 2\n"
    assert parse(text, Path("a.yaml")) == {"base": {"x": 1}, "other": {"x": 2}}


def test_other_kinds_of_files_are_refused(tmp_path: Path) -> None:
    """A wrong suffix, a missing file, a directory, a huge file and a named pipe, which would be waited for, each give a
    SettingsError that says so."""
    huge = tmp_path / "huge.json"
    huge.write_bytes(b" " * (MAX_BYTES + 1))
    (tmp_path / "dir.yaml").mkdir()
    os.mkfifo(tmp_path / "pipe.json")
    for path, says in [
        ("a.toml", ".yaml"),
        ("missing.yaml", "No such file"),
        ("dir.yaml", "directory"),
        ("huge.json", "larger than"),
        ("pipe.json", "is no regular file"),
    ]:
        with pytest.raises(SettingsError, match=says):
            read_file(tmp_path / path)


@given(st.binary(max_size=200), st.sampled_from(["a.yaml", "a.json"]))
def test_any_bytes_parse_or_give_a_settings_error(raw: bytes, name: str) -> None:
    """Whatever bytes a file holds, reading it gives data or a SettingsError that begins with its name."""
    try:
        parse(raw, Path(name))
    except SettingsError as error:
        assert str(error).startswith(name)  # noqa: PT017 - both outcomes are right


def test_mappings_that_merge_each_other_come_to_an_end() -> None:
    """Ten lines of YAML that each merge the one before ten times would be a hundred million keys; they are refused, or copied once."""
    lines = ["k0: &k0 {" + ", ".join(f"a{i}: 0" for i in range(10)) + "}"]
    lines += [f"k{n}: &k{n} {{<<: [{', '.join([f'*k{n - 1}'] * 10)}]}}" for n in range(1, 9)]
    try:
        assert len(parse("\n".join(lines).encode(), Path("a.yaml"))["k8"]) == 10
    except SettingsError as error:
        assert "more than 100000 keys" in str(error)  # noqa: PT017 - both outcomes are right


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefghijk", "bcdefghijkl")
)


@pytest.mark.parametrize("use", ["output_dir: *l", "monitor: *l", "rules: [{rule: nan_inf, args: {x: *l}}]", "monitor: {targets: *l}"])
def test_yaml_alias_bombs_are_errors(tmp_path: Path, use: str) -> None:
    """Aliases of aliases (3 * 10**11 values) are refused without being written out."""
    file = tmp_path / "probe.yaml"
    file.write_text(f"{BOMB}{use}\n")
    with pytest.raises(SettingsError) as error:
        load_settings(file)
    assert len(str(error.value)) < 20_000


def test_overlapping_ranges_are_each_once(tmp_path: Path) -> None:
    """Thousands of overlapping ranges cost no more than their union."""
    file = tmp_path / "config.json"
    step = [f"{i}-900000" for i in range(5000)] + [3, "1-2", 3]
    file.write_text(json.dumps({"task": "statistics", "level": "L1", "rank": [], "step": step}))
    begin = time.monotonic()
    dump = load_settings(file).dump
    assert dump is not None
    assert dump.step == tuple(range(900_001))
    assert time.monotonic() - begin < 10
