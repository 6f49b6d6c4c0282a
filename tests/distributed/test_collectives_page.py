"""docs/guide/collectives.md says what happens."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import warm

PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "collectives.md").read_text(encoding="utf-8")


def holds(shown: Any, real: Any) -> bool:
    """Is everything that the page shows in the file? Tensors may have more keys."""
    if isinstance(shown, dict) and isinstance(real, dict):
        return all(key in real and holds(value, real[key]) for key, value in shown.items())
    if isinstance(shown, list) and isinstance(real, list):
        return len(shown) == len(real) and all(map(holds, shown, real))
    return bool(shown == real)


@pytest.mark.slow
@pytest.mark.framework
def test_the_example(tmp_path: Path) -> None:
    """The script of the page runs on two ranks, and rank 1 has the record that the page shows."""
    script = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
    done = warm.ranks(2, script, cwd=tmp_path)
    assert [rank.returncode for rank in done] == [0, 0], done
    shown = json.loads("{" + re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)[0] + "}")
    real = json.loads((tmp_path / "ranks_dump/step0/rank1/dump.json").read_text())["data"]
    assert holds(shown, real), real
