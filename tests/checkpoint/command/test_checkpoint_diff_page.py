"""Examples of docs/guide/checkpoint-diff.md."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from msprobe_engine.align.parameters.mapping_file import read_mapping
from msprobe_engine.cli.main import main
from msprobe_engine.find.checkpoint.tensor_result import TensorResult

PAGE = Path(__file__).parents[3] / "docs" / "guide" / "checkpoint-diff.md"


def blocks(language: str) -> list[str]:
    """Code blocks of the page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def lay_out(run: Path, source: Path) -> None:
    """A run's directory of the page, with the checkpoint of step 1000."""
    shutil.copytree(source / "iter_0000005", run / "iter_0001000")
    (run / "latest_checkpointed_iteration.txt").write_text("1000")


@pytest.mark.framework
@pytest.mark.slow
def test_every_command_of_the_page(megatron_checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in their order on one model in two layouts of Megatron, all say equal and leave what the page names."""
    lay_out(tmp_path / "run", megatron_checkpoints / "dense")
    lay_out(tmp_path / "golden", megatron_checkpoints / "dense-tp2pp2")
    shutil.copytree(tmp_path / "golden" / "iter_0001000", tmp_path / "hf" / "snapshot")
    monkeypatch.chdir(tmp_path)
    lines = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("msprobe ckpt")]
    assert len(lines) >= 8
    for line in lines:
        words = shlex.split(line, comments=True)
        assert main(words[1 : words.index("||") if "||" in words else None]) == 0, line
    data = json.loads(Path("report/ckpt_diff.json").read_text())
    text = PAGE.read_text(encoding="utf-8")
    report = text[text.index("## The report") : text.index("## Large checkpoints")]
    said = set(re.findall(r"`(\w+)`", report)) & data.keys()
    assert {"verdict", "equal", "different", "only_in_a", "only_in_b", "not_compared", "values", "summary", "tensors"} <= said
    assert {path.name for path in Path("report").iterdir()} == {"ckpt_diff.json", "ckpt_diff.csv", "ckpt_diff.html"}


def test_the_mapping_file_of_the_page(tmp_path: Path) -> None:
    """It is read without a mistake."""
    (text,) = blocks("yaml")
    (tmp_path / "map.yaml").write_text(text)
    found = read_mapping(tmp_path / "map.yaml")
    assert (len(found.names), len(found.ignore), found.facts["heads"]) == (3, 1, 32)


def test_the_numbers_of_the_page_are_in_a_result() -> None:
    """Every name in the table of numbers is one of a result's."""
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index("| number | meaning |") : text.index("`--rtol` and")]
    names = {name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1] if "|" in line else "")}
    assert len(names) > 12
    assert all(hasattr(TensorResult, name) or name in TensorResult.__dataclass_fields__ for name in names)
