"""The examples of docs/online-transport.md."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from msprobe_engine.accuracy.online.certificate import read_revocations
from msprobe_engine.accuracy.online.metrics import families
from msprobe_engine.accuracy.online.options import ServerOptions
from msprobe_engine.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "online-transport.md").read_text(encoding="utf-8")


def test_the_commands_of_the_page_work_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line of every shell block."""
    monkeypatch.chdir(tmp_path)
    lines = "".join(re.findall(r"^```bash\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)).splitlines()
    for line in lines:
        program, *words = shlex.split(line)
        if program == "msprobe":
            assert main(words) == 0, line
        else:
            assert program == "cp"
            shutil.copy(*words)
    assert len(lines) == 6
    assert len(read_revocations(tmp_path / "bench_tls" / "crl.pem").revoked) == 1


def test_the_page_names_all_metrics_and_the_limits_as_they_are() -> None:
    """Names of counters, and numbers that people plan with."""
    named = set(re.findall(r"`(msprobe_online_[a-z_]+)`", PAGE))
    assert named == {f.name + ("_total" if f.type == "counter" else "") for f in families([])}
    options = ServerOptions()
    assert (options.message_bytes, options.memory_bytes, options.least_rate) == (4 << 30, 8 << 30, 64 << 10)
    assert (options.greeting_seconds, options.newcomers) == (10.0, 64)
