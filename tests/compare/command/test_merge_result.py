"""merge_result: rows of communication calls of many ranks in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.cli.main import main
from msprobe_engine.core.errors import DumpFormatError, NothingCapturedError, SettingsError
from msprobe_engine.report.table.merge_result import merge_result, read_wanted
from msprobe_engine.report.table_files import open_table
from msprobe_engine.report.table_files.reading import read_table

STATISTICS = ["NPU Name", "Max diff", "Min diff", "Mean diff", "L2norm diff", "MaxRelativeErr", "MinRelativeErr", "MeanRelativeErr"]
STATISTICS += ["NormRelativeErr", "NPU max", "Bench max", "Result"]
NAMES = ["Distributed.all_reduce.0.forward.input.0", "Distributed.all_reduce.0.forward.input.group", "Torch.add.0.forward.output.0", "=1+1"]


def table(path: Path, mode: str, shift: float = 0.0, columns: list[str] = STATISTICS) -> None:
    """A table as compare writes it."""
    block: dict[str, Any] = {name: [shift + i + n / 8 for i in range(4)] for n, name in enumerate(columns)}
    block["NPU Name"] = NAMES
    for name in columns:
        if "diff" in name:
            block[name][1] = "N/A"
        if name.endswith(" max"):
            block[name][1] = "tp-0-1"
    written = open_table(path, columns, mode)
    written.write(block)
    written.close()


def config(path: Path, text: str = "api: [Distributed.all_reduce]\n") -> Path:
    """The yaml."""
    path.write_text(text)
    return path


@pytest.mark.parametrize("mode", ["csv", "xlsx"])
@pytest.mark.parametrize("name", ["compare_result_rank{}_20260101000000", "compare_result_rank{0}-rank{0}_20260101000000"])
def test_names_of_both_versions_and_both_formats(tmp_path: Path, mode: str, name: str) -> None:
    """A sheet per metric, a column per rank in numeric order; the value of an argument stands in place of N/A."""
    for rank in (10, 2):
        table(tmp_path / "in" / f"{name.format(rank)}.{mode}", mode, shift=rank)
    found = merge_result(tmp_path / "in", tmp_path / "out", config(tmp_path / "c.yaml"))
    assert found.ranks == [2, 10]
    assert found.path.name.startswith("multi_ranks_compare_merge_")
    assert found.path.stat().st_mode & 0o777 == 0o640
    rows = list(read_table(found.path))
    assert rows[0] == ["NPU Name", "rank2", "rank10"]
    assert rows[1] == [NAMES[0], "2.125", "10.125"]
    assert rows[2] == [NAMES[1], "NPU:tp-0-1  Bench:tp-0-1", "NPU:tp-0-1  Bench:tp-0-1"]
    assert len(rows) == 1 + 8 * 2  # the header is that of every sheet


def test_chosen_metrics_and_what_is_left_out(tmp_path: Path) -> None:
    """compare_index chooses; tables of checksums and calls that are not there are said."""
    for rank in (0, 1):
        table(tmp_path / f"compare_result_rank{rank}_20260101000000.csv", "csv")
    table(tmp_path / "compare_result_rank2_20260101000000.csv", "csv", columns=["NPU Name", "NPU MD5", "Result"])
    table(tmp_path / "compare_result_rank1_20250101000000.csv", "csv", shift=50)
    text = "api: [Distributed.all_reduce, Distributed.barrier]\ncompare_index: [Max diff]\n"
    found = merge_result(tmp_path, tmp_path / "out", config(tmp_path / "c.yaml", text))
    assert [row[0] for row in read_table(found.path)] == ["NPU Name", NAMES[0], NAMES[1]]
    notes = " ".join(found.notes)
    assert "checksums" in notes
    assert "no Distributed.barrier" in notes
    assert "rank 1 has 2 tables; the latest counts" in notes


def test_wrong_input_is_said(tmp_path: Path) -> None:
    """No tables, a broken one, and wrong configurations."""
    wanted = config(tmp_path / "c.yaml")
    with pytest.raises(NothingCapturedError, match="two are needed"):
        merge_result(tmp_path, tmp_path / "out", wanted)
    for rank in (0, 1):
        (tmp_path / f"compare_result_rank{rank}_20260101000000.xlsx").write_bytes(b"PK no")
    with pytest.raises(DumpFormatError, match="no table that can be read"):
        merge_result(tmp_path, tmp_path / "out", wanted)
    for text, word in (
        ("", "api"),
        ("api: 3", "api"),
        ("api: [a]\ncompare_index: [nothing]", "'nothing' is not known"),
        ("api: [", "yaml"),
    ):
        with pytest.raises(SettingsError, match=word):
            read_wanted(config(tmp_path / "d.yaml", text))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The flags of the existing tool; 0 when done, 2 with one sentence when not."""
    for rank in (0, 1):
        table(tmp_path / f"compare_result_rank{rank}_20260101000000.csv", "csv")
    wanted = config(tmp_path / "c.yaml")
    assert main(["merge_result", "-i", str(tmp_path), "-o", str(tmp_path / "out"), "-config", str(wanted)]) == 0
    assert "2 rows of ranks 0, 1" in capsys.readouterr().out
    assert main(["merge_result", "-i", str(tmp_path / "out"), "-o", str(tmp_path), "-config", str(wanted)]) == 2
    assert "two are needed" in capsys.readouterr().err


def test_a_table_that_was_cut_off(tmp_path: Path) -> None:
    """A csv says nothing of its length, but ends with a line feed: what does not is named."""
    for rank in range(2):
        table(tmp_path / f"compare_result_rank{rank}_20260101000000", "csv")
    file = tmp_path / "compare_result_rank1_20260101000000.csv"
    file.write_bytes(file.read_bytes()[:-3])
    notes = merge_result(tmp_path, tmp_path / "out", config(tmp_path / "c.yaml")).notes
    assert [note for note in notes if "cut off" in note] == [f"{file.name} ends in the middle of a line: it was cut off."]
    command = ["merge_result", "-i", str(tmp_path), "-o", str(tmp_path / "out"), "-config", str(tmp_path / "c.yaml")]
    assert main(command) == 3
    file.write_bytes(b"")
    table(tmp_path / "compare_result_rank7_20260101000000.csv", "csv")
    assert main(command) == 3
