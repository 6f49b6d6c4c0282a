"""docs/collectives.md says what happens."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "collectives.md").read_text(encoding="utf-8")


def holds(shown: Any, real: Any) -> bool:
    """Is everything that the page shows in the file? Tensors may have more keys."""
    if isinstance(shown, dict) and isinstance(real, dict):
        return all(key in real and holds(value, real[key]) for key, value in shown.items())
    if isinstance(shown, list) and isinstance(real, list):
        return len(shown) == len(real) and all(map(holds, shown, real))
    return bool(shown == real)


@pytest.mark.framework
def test_the_example(tmp_path: Path) -> None:
    """The script of the page runs on two ranks, and rank 1 has the record that the page shows."""
    script = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
    (tmp_path / "two_ranks.py").write_text(script, encoding="utf-8")
    root = str(Path(__file__).parents[2])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = {**os.environ, "PYTHONPATH": root, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    launched = [
        subprocess.Popen(
            [sys.executable, "two_ranks.py"],
            cwd=tmp_path,
            env={**env, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    texts = [process.communicate(timeout=120)[0].decode() for process in launched]
    assert [process.returncode for process in launched] == [0, 0], texts
    shown = json.loads("{" + re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)[0] + "}")
    real = json.loads((tmp_path / "ranks_dump/step0/rank1/dump.json").read_text())["data"]
    assert holds(shown, real), real
