"""``msprobe graph`` and ``graph_visualize``: what they draw, say and return, and the commands of docs/guide/graph.md."""

from __future__ import annotations

import json
import re
import shlex
import sqlite3
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from driver_dumps import dump, pair, tensor

from msprobe_engine.cli.main import main
from msprobe_engine.core.errors import SinkError
from msprobe_engine.report.graph import run as module
from msprobe_engine.report.graph.existing.items import items
from msprobe_engine.report.graph.nodes.model import Comparison, Graph
from msprobe_engine.report.graph.options import GraphOptions
from msprobe_engine.report.graph.run import reserve, run


class Kept:
    """A writer that keeps what it gets; the last one made is `Kept.last`."""

    last: Kept

    def __init__(self) -> None:
        Kept.last = self
        self.made: list[Graph | Comparison] = []
        self.ended = ""

    def add(self, made: Graph | Comparison) -> None:
        """Keep it."""
        self.made.append(made)

    def finish(self) -> list[Path]:
        """Nothing is written."""
        self.ended = "finish"
        return []

    def abort(self) -> None:
        """Nothing was written."""
        self.ended = "abort"


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> type[Kept]:
    """All formats are kept in memory."""
    monkeypatch.setattr(module, "open_writer", lambda *_: Kept())
    return Kept


def _say(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_two_runs_open_at_the_first_suspect(tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: type[Kept]) -> None:
    """Exit code 1; the suspect of the whole is marked in its rank, and the summary names it first."""
    target, golden = pair(tmp_path, wrong=3)
    code, out, _ = _say(capsys, "graph", target, golden, "-o", tmp_path / "o")
    assert code == 1
    assert out.startswith("First difference: train.py:1 f (step 0, rank 1, Functional.linear.3.forward)\n")
    assert "12 calls, 0 only in the target, 0 only in the golden run" in out
    found = kept.last.made
    assert [(made.step, made.rank, made.leading) for made in found] == [(0, 0, False), (0, 1, True)]
    assert isinstance(found[1], Comparison)
    assert found[1].target.names[found[1].suspect or 0] == "Functional.linear.3.forward"
    assert found[1].units[found[1].suspect or 0] > 1000
    assert found[0].suspect is None


def test_equal_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: type[Kept]) -> None:
    """Exit code 0 and no suspect."""
    target, golden = pair(tmp_path)
    code, out, _ = _say(capsys, "graph_visualize", "-tp", target, "-gp", golden, "-o", tmp_path / "o")
    assert code == 0
    assert out.startswith("No difference beyond round-off")
    assert all(made.suspect is None for made in kept.last.made)


def test_one_run_opens_at_its_first_nan(tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: type[Kept]) -> None:
    """Exit code 1; a clean run has 0, and is not searched."""
    bad = {"Functional.gelu.0.forward": {"input_args": [tensor(2.0)], "input_kwargs": {}, "output": [tensor(float("nan"))]}}
    dump(tmp_path / "bad/step3/rank0")
    dump(tmp_path / "bad/step3/rank1", extra=bad)
    code, out, _ = _say(capsys, "graph", tmp_path / "bad", "-o", tmp_path / "o")
    assert code == 1
    assert out.startswith("First NaN: train.py:1 f (step 3, rank 1, forward, operator gelu)\n")
    first, second = kept.last.made
    assert isinstance(second, Graph)
    assert first.suspect is None
    assert second.names[second.suspect or 0] == "Functional.gelu.0.forward"
    assert second.leading
    dump(tmp_path / "good/step0/rank0")
    code, out, _ = _say(capsys, "graph", tmp_path / "good", "-o", tmp_path / "o")
    assert (code, out.split("\n")[0]) == (0, "No NaN or Inf that matters.")


def test_a_nan_in_a_call_that_only_the_target_makes(tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: type[Kept]) -> None:
    """It has no partner that it differs from, and is the finding all the same, as in the other commands."""
    bad = {"Functional.gelu.0.forward": {"input_args": [tensor(2.0)], "input_kwargs": {}, "output": [tensor(float("nan"))]}}
    dump(tmp_path / "target/step0/rank0", extra=bad)
    dump(tmp_path / "golden/step0/rank0")
    code, out, _ = _say(capsys, "graph", tmp_path / "target", tmp_path / "golden", "-o", tmp_path / "o")
    assert (code, out.split("\n")[0]) == (1, "First NaN or Inf: train.py:1 f (step 0, rank 0, Functional.gelu.0.forward)")
    (made,) = kept.last.made
    assert isinstance(made, Comparison)
    assert made.target.names[made.suspect or 0] == "Functional.gelu.0.forward"


def test_steps_and_ranks_go_by_number(tmp_path: Path, kept: type[Kept]) -> None:
    """rank2 before rank10; steps likewise; chosen ones only."""
    for step in (2, 10):
        for rank in (2, 10):
            dump(tmp_path / f"d/step{step}/rank{rank}", 1)
    run(tmp_path / "d", None, tmp_path / "o")
    assert [(made.step, made.rank) for made in kept.last.made] == [(2, 2), (2, 10), (10, 2), (10, 10)]
    run(tmp_path / "d", None, tmp_path / "o", GraphOptions(steps=frozenset((10,)), ranks=frozenset((2,))))
    assert [(made.step, made.rank) for made in kept.last.made] == [(10, 2)]


def test_ranks_of_one_run_only_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: type[Kept]) -> None:
    """Those that both have are drawn; exit code 3."""
    target, golden = pair(tmp_path)
    dump(target / "step0/rank7")
    code, out, _ = _say(capsys, "graph", target, golden, "-o", tmp_path / "o")
    assert code == 3
    assert "ranks only in the target: 7" in out
    assert len(kept.last.made) == 2


@pytest.mark.slow
def test_runs_of_different_layouts_are_compared_as_wholes(tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: type[Kept]) -> None:
    """Two tensor-parallel ranks against one make no difference; with --match exact ranks go by number."""
    with tarfile.open(Path(__file__).parents[1] / "fixtures/graph/megatron.tar.xz") as tar:
        tar.extractall(tmp_path, [one for one in tar.getmembers() if one.name.split("/")[0] in ("tp2", "tp1")], filter="data")
    code, out, err = _say(capsys, "graph", tmp_path / "tp2", tmp_path / "tp1", "-o", tmp_path / "o")
    assert (code, out.split("\n")[0]) == (0, "No difference beyond round-off.")
    assert "cut over their ranks in different ways" in err
    assert len(kept.last.made) == 1
    code, out, _ = _say(capsys, "graph", tmp_path / "tp2", tmp_path / "tp1", "-o", tmp_path / "o", "--match", "exact")
    assert code == 1
    assert "ranks only in the target: 1" in out


def test_saved_values_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: type[Kept]) -> None:
    """A debug.json is drawn too; the first value that is not finite is the suspect."""
    path = tmp_path / "d/step0/rank0/debug.json"
    path.parent.mkdir(parents=True)
    data = {"good.0.debug": tensor(1.0), "bad.0.debug": {"x": [tensor(float("inf"))]}, "worse.0.debug": tensor(float("nan"))}
    path.write_text(json.dumps({"task": "statistics", "level": "debug", "framework": "pytorch", "dump_data_dir": None, "data": data}))
    code, out, _ = _say(capsys, "graph", tmp_path / "d", "-o", tmp_path / "o")
    assert (code, out.split("\n")[0]) == (1, "First NaN or Inf: step 0, rank 0, saved value bad.0.debug")
    assert [kept.last.made[0].suspect, kept.last.made[0].leading] == [2, True]
    assert "construct.json" not in out


def test_what_waits_for_the_other_ranks_may_lie_on_the_disk(tmp_path: Path, kept: type[Kept], monkeypatch: pytest.MonkeyPatch) -> None:
    """With little memory, and in processes: the same graphs, and nothing is left of it."""
    target, golden = pair(tmp_path, wrong=2)
    run(target, golden, tmp_path / "o")
    one = kept.last.made
    monkeypatch.setattr(module, "_BYTES_PER_BYTE", 1 << 40)
    run(target, golden, tmp_path / "o")
    two = kept.last.made
    assert [made.suspect for made in one] == [made.suspect for made in two]
    for a, b in zip(one, two):
        assert isinstance(a, Comparison)
        assert isinstance(b, Comparison)
        assert a.target.names == b.target.names
        assert a.index_811 == b.index_811
        assert items(a.target, 1, a.metrics(1)) == items(b.target, 1, b.metrics(1))
    assert list((tmp_path / "o").iterdir()) == []


@pytest.mark.parametrize("content", ["", "{", "[]", '{"data": 3}', '{"task": "statistics", "data": {}}'])
def test_nothing_to_draw_is_an_error(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, the file is named, and nothing is written."""
    path = dump(tmp_path / "d/step0/rank0") / "dump.json"
    path.write_text(content)
    for beside in ("construct.json", "stack.json"):
        path.with_name(beside).unlink()
    code, out, err = _say(capsys, "graph", tmp_path / "d", "-o", tmp_path / "o")
    assert (code, out) == (2, "")
    assert str(path) in err
    assert list((tmp_path / "o").iterdir()) == []


def test_a_rank_that_cannot_be_read_does_not_take_the_others_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: type[Kept]
) -> None:
    """It is said, and the exit code is 3."""
    target, golden = pair(tmp_path)
    (target / "step0/rank1/dump.json").write_text("{")
    code, out, _ = _say(capsys, "graph", target, golden, "-o", tmp_path / "o")
    assert code == 3
    assert "rank1" in out
    assert [made.rank for made in kept.last.made] == [0]


def test_an_interrupted_writer_leaves_nothing(tmp_path: Path, kept: type[Kept], monkeypatch: pytest.MonkeyPatch) -> None:
    """All writers are told."""

    def full(*_: object) -> None:
        raise SinkError("the disk is full")

    monkeypatch.setattr(Kept, "add", full)
    target, _ = pair(tmp_path)
    with pytest.raises(SinkError):
        run(target, None, tmp_path / "o")
    assert kept.last.ended == "abort"
    assert list((tmp_path / "o").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["graph"], "give RUN"),
        (["graph", "d", "-i", "x.json"], "give one of them"),
        (["graph", "d", "--format", "png"], "png"),
        (["graph", "d", "--format", ","], "--format"),
        (["graph", "d", "--step", "x"], "--step"),
        (["graph", "d", "--step", "7"], "7 were asked for"),
        (["graph", "nowhere"], "nowhere"),
        (["graph", "d", "--file_type", "json"], "--merge"),
        (["graph", "d", "--tp", "2"], "--rank_size is missing"),
        (["graph", "d", "--rank_size", "2", "1", "--tp", "2", "--pp", "1"], "one run: one value"),
        (["graph", "d", "--rank_size", "0", "--tp", "2", "--pp", "1"], "1 or more"),
        (["graph", "d", "--merge", "auto", "--tp", "2"], "leave --rank_size"),
        (["graph", "d", "--workers", "-1"], "--workers"),
        (["graph", "-i", "no.json"], "no.json"),
        (["graph", "-i", "list.json"], "npu_path"),
        (["graph", "-i", "number.json"], "npu_path"),
        (["graph", "-i", "bench.json"], "bench_path"),
    ],
)
def test_wrong_usage(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and a sentence that says what is allowed."""
    monkeypatch.chdir(tmp_path)
    dump(Path("d/step0/rank0"), 1)
    documents: dict[str, Any] = {"list": [], "number": {"npu_path": 3}, "bench": {"npu_path": "d", "bench_path": 3}}
    for name, document in documents.items():
        Path(f"{name}.json").write_text(json.dumps(document))
    code, out, err = _say(capsys, *words)
    assert (code, out) == (2, "")
    assert said in err


def test_runs_of_one_second_have_names_of_their_own(tmp_path: Path) -> None:
    """Also when the first one is done already."""
    with reserve(tmp_path) as one, reserve(tmp_path) as two:
        assert one != two
    (tmp_path / f"graph_{one}.html").touch()
    with reserve(tmp_path) as three:
        assert three != one
    assert [path.name for path in tmp_path.iterdir()] == [f"graph_{one}.html"]
    assert abs(time.mktime(time.strptime(one, "%Y%m%d%H%M%S")) - time.time()) < 30


def test_formats_of_both_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """html, and db when it is asked for; with the json of 8.1.1 html and a .vis per step and rank."""
    target, golden = pair(tmp_path, ranks=1, wrong=3)
    _say(capsys, "graph", target, golden, "-o", tmp_path / "page")
    assert [path.suffix for path in (tmp_path / "page").iterdir()] == [".html"]
    _say(capsys, "graph", target, golden, "-o", tmp_path / "a", "--format", "html,db")
    assert sorted(path.suffix for path in (tmp_path / "a").iterdir()) == [".db", ".html"]
    with sqlite3.connect(next((tmp_path / "a").glob("*.vis.db"))) as file:
        assert file.execute("select count(*) from tb_nodes where data_source = 'NPU'").fetchone() == (8,)
    (tmp_path / "c.json").write_text(json.dumps({"npu_path": str(target / "step0/rank0"), "bench_path": str(golden / "step0/rank0")}))
    code, _, _ = _say(capsys, "-f", "pytorch", "graph", "-i", tmp_path / "c.json", "-o", tmp_path / "b")
    assert code == 1
    assert sorted(path.suffix for path in (tmp_path / "b").iterdir()) == [".html", ".vis"]


@pytest.mark.usefixtures("kept")
def test_an_output_directory_is_its_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``graph`` and ``graph_visualize`` take output directories as ``diagnose`` does; of a run without a dump its only
    incident; a directory of several is told which to give."""
    target, golden = pair(tmp_path, wrong=3)
    for name, source in (("bad", target), ("good", golden)):
        (tmp_path / "runs" / name).mkdir(parents=True)
        source.rename(tmp_path / "runs" / name / "dump")
    code, out, _ = _say(capsys, "graph", tmp_path / "runs" / "bad", tmp_path / "runs" / "good", "-o", tmp_path / "o")
    assert code == 1
    assert out.startswith("First difference: train.py:1 f (step 0, rank 1")
    code, _, said = _say(capsys, "graph_visualize", "-tp", tmp_path / "runs" / "bad", "-o", tmp_path / "o")
    assert code == 0, said
    _, _, said = _say(capsys, "graph", tmp_path / "runs")
    assert f"give one of them: {tmp_path / 'runs' / 'bad' / 'dump'}, {tmp_path / 'runs' / 'good' / 'dump'}" in said
    incident = tmp_path / "nan" / "incidents" / "step3-nan_inf"
    incident.parent.mkdir(parents=True)
    (tmp_path / "runs" / "bad" / "dump").rename(incident)
    code, _, said = _say(capsys, "graph", tmp_path / "nan", "-o", tmp_path / "o")
    assert code == 0
    assert f"has no dump but that of an incident; the graph is that of {incident}" in said
    (tmp_path / "runs" / "good" / "dump").rename(incident.with_name("step4-nan_inf"))
    assert main(["graph", str(tmp_path / "nan")]) == 2
    assert f"give one of them: {incident}" in capsys.readouterr().err


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
