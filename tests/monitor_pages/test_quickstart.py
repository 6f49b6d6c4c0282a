"""docs/quickstart: the program and the commands of the five minutes do what the pages say, in both languages."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from page_blocks import ROOT, blocks

PAGE = "docs/quickstart/index.md"


def test_both_languages_have_the_same_commands() -> None:
    assert blocks(PAGE, "bash") == blocks("docs/quickstart/zh.md", "bash")


@pytest.mark.slow
@pytest.mark.framework
def test_the_five_minutes(tmp_path: Path) -> None:
    """Every command runs, and each answer that the page shows is printed by the command above it."""
    (program,) = blocks(PAGE, "python")
    (tmp_path / "train.py").write_text(program)
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "PYTHONPATH": path, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    said = ""
    for language, block in re.findall(r"^```(bash|text)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if language == "text":
            for line in block.splitlines():
                assert line in said, f"{line}\nis not in\n{said}"
            continue
        for line in block.splitlines():
            words = shlex.split(line)
            assert words[0] == "msprobe"
            done = subprocess.run(
                [sys.executable, "-m", "msprobe_engine.cli.main", *words[1:]],
                cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False,
            )  # fmt: skip
            said = done.stdout.replace(f"{tmp_path}/", "")
            assert done.returncode == (1 if words[1] == "diagnose" else 0), (line, done.stdout, done.stderr)
    for page in ("diagnose-1/diagnosis.html", "report-1/report.html"):
        assert list((tmp_path / "msprobe_output").glob(f"*/analysis/{page}"))
