"""Small settings files that would take for ever or all memory if they were expanded."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.settings.load import load_settings

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
