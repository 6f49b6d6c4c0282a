"""Our verdicts without `compat`: an error stands where a difference begins, warnings behind it, nothing on round-off."""

from __future__ import annotations

import json
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.align.calls.match import match
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.find.run import diagnose
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.measure.columns import COLOUR, GOLDEN_NAME, MESSAGE, RESULT, TARGET_NAME, UNMATCHED
from msprobe_engine.measure.options import CompareOptions
from msprobe_engine.report.table.pairs import common_mode, compare_pair

FIXTURES = Path(__file__).parents[2] / "fixtures" / "compare"


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved tensors of runs with one fault each."""
    root = tmp_path_factory.mktemp("tensor_mix")
    with tarfile.open(FIXTURES / "26.2.0" / "tensor_mix.tar.xz") as archive:
        archive.extractall(root, filter="data")
    return root


def _table(target: DumpTable, golden: DumpTable, **options: Any) -> list[dict[str, Any]]:
    asked = CompareOptions(workers=1, **options)
    blocks = compare_pair(target, golden, match(target, golden, asked), asked)
    return [dict(zip(block, row)) for block in blocks for row in zip(*block.values())]


def _name(row: dict[str, Any]) -> str:
    return str(row[GOLDEN_NAME] if row[TARGET_NAME] == UNMATCHED else row[TARGET_NAME])


@pytest.mark.fast_cells("bf16", "eps", "gradient", "nan")
@pytest.mark.parametrize("fault", ["bf16", "eps", "gradient", "nan", "inf", "more", "fewer", "shape", "arguments"])
def test_the_first_error_is_the_first_suspect(fault: str, tensors: Path) -> None:
    """The verdicts of rows are those of the diagnosis: a call that only one side has is the error, not what takes in what it gives."""
    target, golden = tensors / fault / "dump.json", tensors / "golden" / "dump.json"
    rows = _table(read_side(target), read_side(golden))
    errors = [row for row in rows if row[RESULT] == "error"]
    first = diagnose(target, golden).first_suspect
    if first is None:  # the runs do not make the same calls, and no number says where
        assert not errors
        return
    assert _name(errors[0]).startswith(f"{first.record}.")
    assert all(row[MESSAGE] for row in errors)


def test_a_run_against_itself_passes(tensors: Path) -> None:
    """No row is off and none has anything to say about a difference, whatever NaN and Inf both sides hold."""
    golden = tensors / "golden" / "dump.json"
    rows = _table(read_side(golden), read_side(golden))
    assert {row[RESULT] for row in rows} == {"pass"}


def test_rows_of_either_side_alone_are_listed(tensors: Path) -> None:
    """A call more and a call less: both are in the table, with N/A for the other name and why they are off."""
    for fault, missing in (("more", GOLDEN_NAME), ("fewer", TARGET_NAME)):
        rows = _table(read_side(tensors / fault / "dump.json"), read_side(tensors / "golden" / "dump.json"))
        alone = [row for row in rows if row[missing] == UNMATCHED]
        assert alone
        assert {row[RESULT] for row in alone} == {"warning"} | ({"error"} if fault == "fewer" else set())
        assert all("only the" in row[MESSAGE] for row in alone)


def test_columns_of_8_1_1_say_it_in_their_words(tensors: Path) -> None:
    """Yes, No and colours: red where an error is, yellow where a warning is."""
    target, golden = read_side(tensors / "eps" / "dump.json"), read_side(tensors / "golden" / "dump.json")
    rows = _table(target, golden, columns="8.1.1")
    seen = Counter((row["Accuracy Reached or Not"], row[COLOUR]) for row in rows)
    assert set(seen) == {("Yes", ""), ("No", "yellow"), ("No", "red")}
    assert seen["No", "red"] == sum(row[RESULT] == "error" for row in _table(target, golden))


def _dump(path: Path, *, scale: float = 1.0, dtype: str = "torch.float32", md5: str = "", task: str = "statistics") -> DumpTable:
    """Two products one after the other; the result of the first is off by `scale`."""

    def item(value: float, checksum: str = "0") -> dict[str, Any]:
        four = {"Max": value, "Min": -value, "Mean": 0.1 * value, "Norm": 8 * value}
        return {
            "type": "torch.Tensor",
            "dtype": dtype,
            "shape": [8, 16],
            **four,
            "requires_grad": False,
            **({"md5": checksum} if md5 else {}),
        }

    data = {
        "Torch.matmul.0.forward": {"input_args": [item(1.0), item(2.0)], "input_kwargs": {}, "output": [item(3.0 * scale, md5)]},
        "Torch.matmul.1.forward": {
            "input_args": [item(3.0 * scale, md5), item(2.0)],
            "input_kwargs": {},
            "output": [item(5.0 * scale, md5)],
        },
    }
    path.mkdir()
    document = {"task": task, "level": "L1", "framework": "pytorch", "dump_data_dir": None, "data": data}
    (path / "dump.json").write_text(json.dumps(document, indent=1))
    return read_side(path / "dump.json")


@pytest.mark.parametrize(
    ("dtype", "scale", "verdicts"),
    [
        ("torch.float32", 1 + 2e-7, ["pass"] * 6),
        ("torch.float32", 1 + 1e-4, ["pass", "pass", "error", "warning", "pass", "warning"]),
        ("torch.bfloat16", 1 + 1e-4, ["pass"] * 6),
        ("torch.bfloat16", 1.2, ["pass", "pass", "error", "warning", "pass", "warning"]),
    ],
)
def test_the_limit_is_round_off_of_the_dtype(dtype: str, scale: float, verdicts: list[str], tmp_path: Path) -> None:
    """What float32 cannot explain bfloat16 can. What comes in off is a warning, not another error."""
    rows = _table(_dump(tmp_path / "a", scale=scale, dtype=dtype), _dump(tmp_path / "b", dtype=dtype))
    assert [row[RESULT] for row in rows] == verdicts


def test_runs_of_another_precision_are_said_to_be(tmp_path: Path) -> None:
    """All types differ and no number does: the types are the finding."""
    _dump(tmp_path / "a", dtype="torch.float16"), _dump(tmp_path / "b")
    found = diagnose(tmp_path / "a" / "dump.json", tmp_path / "b" / "dump.json")
    assert found.finding == "structure"
    assert found.first_suspect is not None
    assert "6 of 6 tensors have another type, the first torch.float16 against torch.float32" in found.first_suspect.why


def test_checksums_know_no_round_off(tmp_path: Path) -> None:
    """One bit is a difference; the first record that has it is the error."""
    rows = _table(_dump(tmp_path / "a", md5="1"), _dump(tmp_path / "b", md5="2"))
    assert [row[RESULT] for row in rows] == ["pass", "pass", "error", "warning", "pass", "warning"]


def test_sides_of_different_kinds(tmp_path: Path) -> None:
    """Checksums of two kinds, or tensors and statistics, are compared by the statistics that both hold. The existing tool does not, so with
    its tables, or where a side holds nothing but checksums, both files and what they hold are named."""
    plain, checked = _dump(tmp_path / "a"), _dump(tmp_path / "b", md5="1")
    assert common_mode(plain, checked, compat=False) == "statistics"
    with pytest.raises(DumpFormatError, match=r"holds statistics.*holds md5"):
        common_mode(plain, checked, compat=True)
    only_checksums = _dump(tmp_path / "d", md5="1")
    only_checksums.stats[:] = float("nan")
    with pytest.raises(DumpFormatError, match=r"holds statistics.*holds md5"):
        common_mode(plain, only_checksums, compat=False)
    saved = _dump(tmp_path / "c", task="tensor")
    assert common_mode(saved, plain, compat=False) == "statistics"
    with pytest.raises(DumpFormatError, match="holds tensor"):
        common_mode(saved, plain, compat=True)
