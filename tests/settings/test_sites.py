"""``monitor.collective_sites`` is checked when settings are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.settings.load import load_settings


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
