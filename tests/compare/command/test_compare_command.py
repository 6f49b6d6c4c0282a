"""``msprobe compare``: the finding first, exit codes, flags of both generations, and bad input that loses nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from driver_dumps import dump, pair, tensor

from msprobe_engine.cli.main import main
from msprobe_engine.report.table_files.reading import read_table

Capture = pytest.CaptureFixture[str]


def run(*words: object) -> int:
    """The command."""
    return main(["compare", *map(str, words)])


def summary(out: Path) -> dict[str, object]:
    """The json of the one comparison in a directory."""
    (path,) = out.glob("compare_summary_*.json")
    assert path.stat().st_mode & 0o777 == 0o640
    found: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_equal_runs_give_0(tmp_path: Path, capsys: Capture) -> None:
    """A table per rank, no row that is off, and a first line that says so."""
    target, golden = pair(tmp_path)
    assert run("-tp", target, "-gp", golden, "-o", tmp_path / "out") == 0
    assert capsys.readouterr().out.startswith("No difference beyond round-off")
    found = summary(tmp_path / "out")
    assert found["finding"] == "none"
    assert found["verdicts"] == {"pass": 48}
    assert len(list((tmp_path / "out").glob("compare_result_rank[01]_*.csv"))) == 2


def test_paths_as_diagnose_has_them(tmp_path: Path) -> None:
    """Target and golden without flags, and flags around them."""
    target, golden = pair(tmp_path, wrong=3)
    assert run(target, golden, "-o", tmp_path / "out") == 1
    assert run(target, "-o", tmp_path / "turned", golden) == 1
    assert summary(tmp_path / "out")["first_suspect"] == summary(tmp_path / "turned")["first_suspect"]


def test_the_first_line_is_where_it_begins(tmp_path: Path, capsys: Capture) -> None:
    """Exit code 1; rank and call are named, in the json too."""
    target, golden = pair(tmp_path, wrong=3)
    assert run("-tp", target / "step0", "-gp", golden / "step0", "-o", tmp_path / "out") == 1
    first = capsys.readouterr().out.split("\n")[0]
    assert "rank 1" in first
    assert "Functional.linear.3.forward" in first
    found = summary(tmp_path / "out")
    assert found["finding"] == "divergence"
    suspect = found["first_suspect"]
    assert isinstance(suspect, dict)
    assert (suspect["record"], suspect["rank"], suspect["step"]) == ("Functional.linear.3.forward", 1, 0)


def test_the_way_of_8_1_1(tmp_path: Path) -> None:
    """Its json gives its columns as xlsx, and the advice; -c leaves the advice out."""
    target, golden = pair(tmp_path, 1, wrong=2)
    given = tmp_path / "compare.json"
    given.write_text(json.dumps({"npu_path": f"{target}/step0/rank0/dump.json", "bench_path": f"{golden}/step0/rank0/dump.json"}))
    assert main(["-f", "pytorch", "compare", "-i", str(given), "-o", str(tmp_path / "out")]) == 1
    (table,) = (tmp_path / "out").glob("compare_result_*.xlsx")
    header = next(read_table(table))
    assert "NPU Requires_grad" not in header
    assert header[-1] == "NPU_Stack_Info"
    (advice,) = (tmp_path / "out").glob("advisor_*.txt")
    assert advice.read_text().startswith("Line: ")
    assert run("-i", given, "-o", tmp_path / "two", "-c") == 1
    assert not list((tmp_path / "two").glob("advisor*"))


def test_the_way_of_8_1_1_without_the_package_of_workbooks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table is a csv, which one line says, and the exit code is that of the comparison; a workbook that was asked for is an error."""
    monkeypatch.setitem(sys.modules, "xlsxwriter", None)
    target, golden = pair(tmp_path, 1, wrong=2)
    given = tmp_path / "compare.json"
    given.write_text(json.dumps({"npu_path": f"{target}/step0/rank0/dump.json", "bench_path": f"{golden}/step0/rank0/dump.json"}))
    assert run("-i", given, "-o", tmp_path / "out") == 1
    assert len(list((tmp_path / "out").glob("compare_result_*.csv"))) == 1
    assert "msprobe-integrations[xlsx]" in capsys.readouterr().err
    assert run("-i", given, "-o", tmp_path / "two", "--xlsx") == 2


def test_compat_ends_with_0(tmp_path: Path) -> None:
    """As the existing tool does when it is done."""
    target, golden = pair(tmp_path, wrong=3)
    assert run("-tp", target, "-gp", golden, "-o", tmp_path / "out", "--compat") == 0


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([], "give RUN and GOLDEN"),
        (["-tp", "a"], "give RUN and GOLDEN"),
        (["a"], "give RUN and GOLDEN"),
        (["a", "-tp", "b", "-gp", "c"], "leave one of them out"),
        (["a", "b", "-i", "x"], "give one of them"),
        (["-i", "x", "-tp", "a"], "both say what is compared"),
        (["-tp", "a", "-gp", "b", "-fm", "-dm", "m.yaml"], "leave one out"),
        (["-tp", "a", "-gp", "b", "-cm", "-am"], "only one is used"),
        (["-tp", "a", "-gp", "b", "--consistent_check"], "belong together"),
        (["-tp", "a", "-gp", "b", "--backend", "fsdp"], "belong together"),
        (["-tp", "a", "-gp", "b", "-s"], "-s belongs to -i"),
        (["-tp", "a", "-gp", "b", "-c"], "-c belongs to 8.1.1"),
        (["-tp", "a", "-gp", "b", "-da", "--xlsx"], "leave the formats out"),
        (["-tp", "a", "-gp", "b", "-m", "atb"], "only auto"),
        (["-tp", "a", "-gp", "b", "--scheduler", "tcp://x:1", "--workers", "2"], "leave one out"),
        (["-tp", "a", "-gp", "b", "--memory_mb", "1"], "64 or more"),
        (["-tp", "a", "-gp", "b"], "there is no such file or directory"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(flags: list[str], sentence: str, capsys: Capture) -> None:
    """Exit code 2, one line."""
    assert run(*flags) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_damaged_ranks_do_not_stop_the_others(tmp_path: Path, capsys: Capture) -> None:
    """A truncated file, an empty dump and a rank that only one side has: each is said, the rest is compared, exit code 3."""
    target, golden = pair(tmp_path, 4)
    file = target / "step0/rank1/dump.json"
    file.write_bytes(file.read_bytes()[:400])
    (golden / "step0/rank2/dump.json").write_text('{"task": "statistics", "data": {}}')
    dump(target / "step0/rank7")
    assert run("-tp", target, "-gp", golden, "-o", tmp_path / "out") == 3
    found = summary(tmp_path / "out")
    problems = " ".join(map(str, found["problems"]))  # type: ignore[call-overload]
    assert "rank1/dump.json" in problems
    assert "no record in it" in problems
    assert "ranks only in the target: 7" in problems
    assert sorted(p.name[:20] for p in (tmp_path / "out").glob("*.csv")) == ["compare_result_rank0", "compare_result_rank3"]
    assert "warning" in capsys.readouterr().out


def test_unmatched_rows_of_both_sides_are_counted(tmp_path: Path, capsys: Capture) -> None:
    """Calls of one side only are in the table, in the summary and on the console."""
    dump(
        tmp_path / "a/step0/rank0",
        extra={"Torch.exp.0.forward": {"input_args": [tensor(2.0)], "input_kwargs": {}, "output": [tensor(3.0)]}},
    )
    dump(
        tmp_path / "b/step0/rank0",
        extra={"Torch.sin.0.forward": {"input_args": [tensor(2.0)], "input_kwargs": {}, "output": [tensor(9.0)]}},
    )
    run("-tp", tmp_path / "a", "-gp", tmp_path / "b", "-o", tmp_path / "out")
    found = summary(tmp_path / "out")
    assert (found["only_target"], found["only_golden"]) == (2, 2)
    text = capsys.readouterr().out
    assert "2 rows only in the target: Torch.exp.0.forward.input.0" in text


def test_hostile_names_are_shown_and_run_nowhere(tmp_path: Path, capsys: Capture) -> None:
    """Formulas, escapes of terminals, markup and ways out of the directory stay text."""
    names = [
        "=cmd|' /C calc'!A0.0.forward",
        "../../../etc/passwd.0.forward",
        "\x1b[31mred.0.forward",
        "</script><script>alert(1).0.forward",
    ]
    extra = {name: {"input_args": [tensor(1.0)], "input_kwargs": {}, "output": [tensor(2.0)]} for name in names}
    dump(tmp_path / "a/step0/rank0", extra=extra)
    dump(tmp_path / "b/step0/rank0", extra={"-1+1.0.forward": extra[names[0]]})
    before = set(tmp_path.iterdir())
    run("-tp", tmp_path / "a", "-gp", tmp_path / "b", "-o", tmp_path / "out", "--csv", "--xlsx", "--html")
    assert set(tmp_path.iterdir()) - before == {tmp_path / "out"}
    (table,) = (tmp_path / "out").glob("*.csv")
    assert not [line for line in table.read_text(encoding="utf-8").split("\n") if line.startswith(("=", "-", "+", "@"))]
    (page,) = (tmp_path / "out").glob("*.html")
    assert "<script>alert" not in page.read_text(encoding="utf-8")
    assert "\x1b" not in capsys.readouterr().out
    (sheet,) = (tmp_path / "out").glob("*.xlsx")
    shown = {row[0] for row in read_table(sheet)}
    assert f"{names[0]}.input.0" in shown
