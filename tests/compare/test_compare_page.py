"""docs/compare.md: its commands run as they stand there, and what it says of files is so."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from driver_dumps import dump, tensor

from msprobe_engine.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "compare.md"


def _blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All commands of the page, in their order, on two small runs; the first prints the line that the page shows."""
    monkeypatch.chdir(tmp_path)
    group = {"type": "torch.ProcessGroup", "group_ranks": [0, 1], "group_id": "x"}
    for rank in range(2):
        reduce = {"input_args": [tensor(2.0)], "input_kwargs": {"group": group}, "output": [tensor(4.0)]}
        extra = {"Distributed.all_reduce.0.forward": reduce}
        dump(Path("out/dump/step0") / f"rank{rank}", wrong=3 if rank else None, extra=extra)
        dump(Path("golden/dump/step0") / f"rank{rank}", extra=extra)
    Path("compare.json").write_text(
        json.dumps({"npu_path": "out/dump/step0/rank1/dump.json", "bench_path": "golden/dump/step0/rank1/dump.json"})
    )
    Path("merge.yaml").write_text(_blocks("yaml")[0])
    codes = []
    for block in _blocks("bash"):
        codes.append(main(shlex.split(block)[1:]))
    assert codes == [1, 1, 0]
    shown = capsys.readouterr().out
    assert shown.startswith(_blocks("text")[0].split("\n")[0])
    assert len(list(Path("merged").glob("multi_ranks_compare_merge_*.xlsx"))) == 1
    assert len(list(Path("output").glob("advisor_*.txt"))) == 1


@pytest.mark.skipif(not _blocks("python"), reason="the page has no Python")
def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives the table of 8.1.1."""
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    for root in ("out", "golden"):
        dump(Path(root) / "dump/step0/rank0")
    exec(compile(_blocks("python")[0], str(PAGE), "exec"), {})
    assert len(list(Path("output").glob("compare_result_*.xlsx"))) == 1
