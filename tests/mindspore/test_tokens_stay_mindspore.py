"""``redact: [tokens]`` with MindSpore: no id is in a dump of task tensor; without the setting there is. The loss has the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "redaction"))


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_no_token_is_written(level: str, tmp_path: Path) -> None:
    from artifact_search import finds
    from token_program import IDS

    losses = []
    for name in ("redacted", "open"):
        settings = {
            "task": "tensor",
            "level": level,
            "tensor": {"summary_mode": "md5"},
            **({"redact": ["tokens"]} if name == "redacted" else {}),
        }
        run = subprocess.run(
            [sys.executable, str(HERE / "token_program.py"), json.dumps(settings), str(tmp_path / name)],
            env={**os.environ, "MSPROBE_KEY": "a key that was made by chance"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr[-3000:]
        losses.append(next(line for line in run.stdout.splitlines() if line.startswith("loss")))
    assert losses[0] == losses[1]
    assert list((tmp_path / "redacted").rglob("not_saved.json"))
    assert finds(tmp_path / "redacted", IDS, []) == []
    assert finds(tmp_path / "open", IDS, [])
