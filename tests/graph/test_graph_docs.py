"""docs/guide/graph.md: its commands run as they stand there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from driver_dumps import dump, tensor

from msprobe_engine.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "graph.md"


def _blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All commands of the page, in their order; the first prints the lines that the page shows, and writes the files it names."""
    monkeypatch.chdir(tmp_path)
    group = {"type": "torch.ProcessGroup", "group_ranks": [0, 1], "group_id": "x"}
    reduce = {"input_args": [tensor(2.0)], "input_kwargs": {"group": group}, "output": [tensor(4.0)]}
    for rank in range(2):
        dump(Path("out/dump/step0") / f"rank{rank}", wrong=3 if rank else None, extra={"Distributed.all_reduce.0.forward": reduce})
        dump(Path("golden/dump/step0") / f"rank{rank}", extra={"Distributed.all_reduce.0.forward": reduce})
    Path("compare.json").write_text(json.dumps({"npu_path": "out/dump/step0", "bench_path": "golden/dump/step0"}))
    lines = [line for block in _blocks("bash") for line in block.splitlines() if line.startswith("msprobe ")]
    assert len(lines) >= 4
    assert main(shlex.split(lines[0])[1:]) == 1
    shown = capsys.readouterr().out
    for line in _blocks("text")[0].replace("train.py:12 forward", "train.py:1 f").splitlines():  # the line of these runs
        pattern = re.sub(r"\d{14}", r"\\d{14}", re.escape(line)).replace(r"\.\.\.", ".+")
        assert re.search(f"^{pattern}$", shown, re.MULTILINE), line
    assert [main(shlex.split(line)[1:]) for line in lines[1:4]] == [0, 1, 1]
    merging = [main(shlex.split(line)[1:]) for line in lines if "--merge" in line or "--tp" in line]
    assert merging == [0, 1, 0, 0]
    assert sorted(path.name for path in Path("merged").rglob("*.json")) == ["construct.json", "dump.json", "stack.json"]
    assert {path.name.partition(".")[2] for path in Path("output").iterdir()} == {"html", "vis", "vis.db"}
