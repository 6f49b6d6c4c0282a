"""Files with the results of a pre-check: columns, cells, and going on after any kind of end."""

from __future__ import annotations

import csv
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from msprobe_engine.accuracy.judge import judge
from msprobe_engine.accuracy.result_files import DETAILS, ResultFiles, call_of, read_results
from msprobe_engine.accuracy.result_forms import DETAILS_COLUMNS, Form, bare_api, form_of
from msprobe_engine.accuracy.results import NOT_RUN, SKIP, CallResult, skipped, worst
from msprobe_engine.errors import UsageError

NAMES = [f"Torch.matmul.{n}" for n in range(4)]


def _call(name: str, scale: float = 1.0) -> CallResult:
    bench = np.linspace(-2, 2, 64)
    device = (bench * scale).astype(np.float32)
    tensors = tuple(
        judge("matmul", f"{name}.{direction}.output.0", bench, device, "torch.float64", "torch.float32")
        for direction in ("forward", "backward")
    )
    return CallResult(name, worst(tensors[:1]), worst(tensors[1:]), '=two\nlines, "quoted"', tensors, 0.1)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def test_rows_of_both_files_have_the_existing_columns_first(tmp_path: Path) -> None:
    """Readers of the existing tool's files find their columns; ours follow."""
    with ResultFiles.new(tmp_path / "out", Form(), "_rank3") as files:
        files.append(_call(NAMES[0], 1.5), "train.py:12")
        files.append(skipped(NAMES[1], "random"))
    assert files.result_path.name.endswith("_rank3.csv")
    assert files.details_path.name.startswith(DETAILS)
    assert oct(files.result_path.stat().st_mode & 0o777) == "0o640"
    first, second = _rows(files.result_path)
    assert list(first)[:4] == ["API name", "Forward Test Success", "Backward Test Success", "Message"]
    assert first["Forward Test Success"] == "error"
    assert first["Message"].startswith("'=two\nlines")
    assert first["Source Line"] == "train.py:12"
    assert second["Forward Test Success"] == "SKIP"
    assert second["Message"] == "random"
    details = _rows(files.details_path)
    assert list(details[0])[: len(DETAILS_COLUMNS)] == list(DETAILS_COLUMNS)
    assert [row["Status"] for row in details] == ["error", "error", "SKIP"]
    assert float(details[0]["Units"]) > 1e5
    assert details[0]["Shape"] == "(64,)"


def test_compat_has_the_existing_columns_alone(tmp_path: Path) -> None:
    """Numbers are cut as the existing tool cuts them, statuses are its own, and metrics it does not reach are blank."""
    with ResultFiles.new(tmp_path, form_of("8.1.1")) as files:
        files.append(_call(NAMES[0], 1.5))
        files.append(skipped(NAMES[1], "why"))
    details = _rows(files.details_path)
    assert list(details[0]) == list(DETAILS_COLUMNS)
    assert details[0]["余弦相似度"] == "1.00000000000000"
    assert details[0]["误差均衡性"] == " "
    assert details[0]["双百指标"] == " "
    assert details[0]["ULP误差大于阈值占比"] == "1.00000000000000"
    assert details[0]["双千指标"] == "0.00000000000000"
    assert [*_rows(files.result_path)[1].values()] == [NAMES[1], "SKIP", "SKIP", "why"]
    newer = form_of("26.2.0").details_rows(_call(NAMES[0], 1.0005))
    assert newer[0][DETAILS_COLUMNS.index("误差均衡性")] != " "
    assert newer[0][DETAILS_COLUMNS.index("ULP误差平均值")] == " "


def test_a_check_goes_on_after_a_cut_at_any_byte(tmp_path: Path) -> None:
    """Whatever of the files was written, going on ends in the same bytes as an uninterrupted check."""
    calls = [_call(name, 1 + 0.1 * n) for n, name in enumerate(NAMES)]
    with ResultFiles.new(tmp_path / "whole", Form()) as files:
        for call in calls:
            files.append(call)
    whole = files.result_path.read_bytes(), files.details_path.read_bytes()
    ends = {len(whole[1])} | set(range(0, len(whole[1]), 131))
    for end in sorted(ends):
        complete = sum(_details_end(whole[1], n) <= end for n in range(len(calls)))
        for cut in (0, 1, 40):
            rows = _first_lines(whole[0], complete)
            place = tmp_path / f"{end}_{cut}"
            place.mkdir()
            result = place / files.result_path.name
            result.write_bytes(rows[: max(0, len(rows) - cut)])
            result.with_name(files.details_path.name).write_bytes(whole[1][:end])
            with ResultFiles(result, Form(), go_on=True) as again:
                for call in calls:
                    if call.name not in again.done:
                        again.append(call)
                again.sort(NAMES)
            assert (result.read_bytes(), again.details_path.read_bytes()) == whole


def _first_lines(raw: bytes, count: int) -> bytes:
    from msprobe_engine.accuracy.result_files import _RECORD

    at = 3
    for _ in range(count + 1):
        match = _RECORD.match(raw, at)
        assert match is not None
        at = match.end()
    return raw[:at]


def _details_end(raw: bytes, call: int) -> int:
    return len(_first_lines(raw, 2 * (call + 1)))


def test_rows_come_into_the_order_of_the_dump(tmp_path: Path) -> None:
    """Processes end in any order; the files have the order of the calls."""
    with ResultFiles.new(tmp_path, Form()) as files:
        for name in (NAMES[2], NAMES[0], "Torch.other.0", NAMES[1]):
            files.append(_call(name))
        files.sort(NAMES)
        files.append(_call(NAMES[3]))
    assert [row["API name"] for row in _rows(files.result_path)] == [*NAMES[:3], "Torch.other.0", NAMES[3]]
    assert [row["API Name"].split(".f")[0].split(".b")[0] for row in _rows(files.details_path)][:4] == [NAMES[0]] * 2 + [NAMES[1]] * 2


def test_results_are_read_back(tmp_path: Path) -> None:
    """A check that goes on has the summary of all calls."""
    calls = [_call(NAMES[0]), skipped(NAMES[1], "why"), _call(NAMES[2], 3.0)]
    with ResultFiles.new(tmp_path, Form()) as files:
        for call in calls:
            files.append(call)
        found = list(files.done_results([NAMES[2]]))
    assert [call.name for call in found] == [NAMES[2], NAMES[0], NAMES[1]]
    assert found[1] == replace(calls[0], seconds=0.0, tensors=found[1].tensors)
    assert found[1].tensors[0].units == calls[0].tensors[0].units
    assert found[1].tensors[0].shape == (64,)
    assert found[2].skipped
    assert found[2].backward == NOT_RUN
    assert not found[2].tensors
    assert [call.forward for call in read_results(files.result_path, files.details_path)] == ["pass", SKIP, "error"]


def test_files_that_cannot_be_gone_on_with(tmp_path: Path) -> None:
    """Another form, another name, no file, and a second process are refused with the reason."""
    with ResultFiles.new(tmp_path, form_of("8.1.1")) as files:
        files.append(_call(NAMES[0]))
        with pytest.raises(UsageError, match="another process"):
            ResultFiles(files.result_path, form_of("8.1.1"), go_on=True)
    with pytest.raises(UsageError, match="--compat"):
        ResultFiles(files.result_path, Form(), go_on=True)
    with pytest.raises(UsageError, match="is called"):
        ResultFiles(tmp_path / "mine.csv", Form(), go_on=True)
    with pytest.raises(UsageError, match="no such"):
        ResultFiles(tmp_path / f"accuracy_checking_result_{'1' * 14}.csv", Form(), go_on=True)
    link = tmp_path / f"accuracy_checking_result_{'2' * 14}.csv"
    os.symlink(files.result_path, link)
    with pytest.raises(Exception, match=r"a link is where"):
        ResultFiles(link, form_of("8.1.1"), go_on=True)


def test_names() -> None:
    """Calls and bare names of APIs, whatever their number of segments."""
    assert call_of("Torch.linalg.inv.0.forward.output.0") == "Torch.linalg.inv.0" == call_of("Torch.linalg.inv.0")
    assert call_of("Tensor.add_.1.forward.input.0.written") == "Tensor.add_.1"
    assert bare_api("Torch.linalg.inv.0.backward.output.0") == "linalg.inv"
    assert bare_api("Torch.add.0") == "add"
    assert bare_api("Tensor.add_.1.forward") == "add_"


def test_no_cell_steers_a_terminal(tmp_path: Path) -> None:
    """Control characters of names, messages and sources are escapes in both files, as elsewhere; line breaks of messages stay."""
    hostile = "\x1b]0;owned\x07\x9b2J\u202e"
    with ResultFiles.new(tmp_path, Form()) as files:
        files.append(CallResult(f"Torch.{hostile}.0", "SKIP", message=f"why\n{hostile}"), f"x.py:1 in {hostile}")
        for path in (files.result_path, files.details_path):
            text = path.read_text("utf-8-sig")
            assert not set(hostile) - set("]0;owned2J") & set(text)
            assert "\\x1b]0;owned\\x07\\x9b2J\\u202e" in text
            assert "why\n" in text
