"""``redact: [tokens]`` with MindSpore: no id and no prompt is in a dump of task tensor or in files of the monitor; without the setting
there is. The loss has the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "redaction"))


MONITOR = {"activations": True, "ops": ["norm", "min", "max", "mean", "digest"]}
SINKS = {name: {"enabled": True} for name in ("csv", "jsonl", "sqlite")}
CASES = {
    "L0": ("dump", {"task": "tensor", "level": "L0", "tensor": {"summary_mode": "md5"}}),
    "mix": ("dump", {"task": "tensor", "level": "mix", "tensor": {"summary_mode": "md5"}}),
    "monitor": ("monitor", {"monitor": MONITOR, "sinks": SINKS}),
}


@pytest.mark.parametrize("case", CASES)
def test_no_token_is_written(case: str, tmp_path: Path) -> None:
    """No id and no text of a prompt, as a value or in a name; the same loss."""
    from artifact_search import finds
    from token_program import IDS, PROMPT

    way, settings = CASES[case]
    losses = []
    for name, redact in (("redacted", {"redact": ["tokens"]}), ("open", {})):
        run = subprocess.run(
            [sys.executable, str(HERE / "token_program.py"), json.dumps({**settings, **redact}), str(tmp_path / name), way],
            env={**os.environ, "MSPROBE_KEY": "a key that was made by chance"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr[-3000:]
        losses.append(next(line for line in run.stdout.splitlines() if line.startswith("loss")))
    assert losses[0] == losses[1]
    assert way == "monitor" or list((tmp_path / "redacted").rglob("not_saved.json"))
    assert any((tmp_path / "redacted").rglob("*"))
    assert finds(tmp_path / "redacted", IDS, [PROMPT]) == []
    assert finds(tmp_path / "open", IDS, [])
    assert finds(tmp_path / "open", IDS[:1], [PROMPT])
