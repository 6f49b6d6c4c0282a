"""What the pre-check reads and writes: calls of a dump, settings, result files, the summary."""

from __future__ import annotations

import csv
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msprobe_engine.accuracy.precheck.calls import Call, read_calls, remarks_on_lists, why_not, without_repeats
from msprobe_engine.accuracy.precheck.summary import Tally, source_line, text
from msprobe_engine.accuracy.result_files import DETAILS, ResultFiles, call_of, read_results
from msprobe_engine.accuracy.result_forms import DETAILS_COLUMNS, Form, bare_api, form_of
from msprobe_engine.accuracy.results import (
    ERROR,
    NOT_RUN,
    PASS,
    SKIP,
    WARNING,
    CallResult,
    TensorResult,
    build_skipped_result,
    not_judged,
    worst,
)
from msprobe_engine.accuracy.settings import PrecheckSettings, load_precheck_settings
from msprobe_engine.accuracy.verdict.judge import judge
from msprobe_engine.core.errors import DumpFormatError, SettingsError, UsageError

# Which calls of a dump are checked: what its file holds, the lists of the settings, and calls that repeat others.


def tensor(shape: list[int], high: float = 1.0, dtype: str = "torch.float32") -> dict[str, Any]:
    return {"type": "torch.Tensor", "dtype": dtype, "shape": shape, "Max": high, "Min": -high, "Mean": 0.0, "Norm": high}


def record(*args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"input_args": list(args), "input_kwargs": kwargs, "output": [tensor([2])]}


def write(directory: Path, data: dict[str, Any], level: str = "L1") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "dump.json"
    file.write_text(json.dumps({"task": "statistics", "level": level, "framework": "pytorch", "dump_data_dir": None, "data": data}))
    return file


def test_forward_and_backward_records_of_one_call_are_one_call_in_the_order_of_the_file(tmp_path: Path) -> None:
    """Modules are left out, a backward record without its forward is told of."""
    data = {
        "Torch.relu.0.forward": record(tensor([2])),
        "Module.fc.Linear.forward.0": record(tensor([2])),
        "Torch.linalg.inv.0.forward": record(tensor([2, 2])),
        "Torch.relu.0.backward": {"input": [tensor([2])], "output": [tensor([2])]},
        "Torch.exp.7.backward": {"input": [tensor([2])], "output": [tensor([2])]},
    }
    found = read_calls(write(tmp_path, data, "mix"))
    assert [(call.name, call.kind, call.api, call.backward is not None) for call in found.calls] == [
        ("Torch.relu.0", "Torch", "relu", True),
        ("Torch.linalg.inv.0", "Torch", "linalg.inv", False),
    ]
    assert "1 backward records have no forward record" in found.remarks[0]


@pytest.mark.parametrize(("stacks", "said"), [('{"0": [["Torch.relu.0.forward"], ["File a.py"]]}', 0), ("{cut off", 1)])
def test_calls_are_read_without_a_stack_that_is_damaged(stacks: str, said: int, tmp_path: Path) -> None:
    """What stands beside dump.json names lines of code only: where it is damaged that is said, and every call is there."""
    file = write(tmp_path, {"Torch.relu.0.forward": record(tensor([2]))})
    (tmp_path / "stack.json").write_text(stacks)
    found = read_calls(file)
    assert [call.name for call in found.calls] == ["Torch.relu.0"]
    assert [sum("stack.json" in sentence for sentence in found.missing), "Torch.relu.0.forward" in found.stacks] == [said, not said]


def test_a_further_backward_pass_is_checked_with_the_forward_record_of_its_call(tmp_path: Path) -> None:
    """Its number is that of the call plus a million for each pass before."""
    back = {"input": [tensor([2])], "output": [tensor([2])]}
    data = {"Torch.relu.3.forward": record(tensor([2])), "Torch.relu.3.backward": back, "Torch.relu.2000003.backward": back}
    found = read_calls(write(tmp_path, data))
    assert [call.name for call in found.calls] == ["Torch.relu.3", "Torch.relu.2000003"]
    assert found.calls[1].record == found.calls[0].record
    assert found.remarks == ()


def test_the_dump_is_found_by_its_file_its_directory_or_its_root_unless_there_are_several(tmp_path: Path) -> None:
    """Of several ranks one has to be named."""
    file = write(tmp_path / "step0" / "rank0", {"Torch.relu.0.forward": record(tensor([2]))})
    assert [len(read_calls(path).calls) for path in (file, file.parent, tmp_path)] == [1, 1, 1]
    write(tmp_path / "step0" / "rank1", {"Torch.relu.0.forward": record(tensor([2]))})
    with pytest.raises(UsageError, match=r"holds 2 dumps .*give the dump.json of one rank"):
        read_calls(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "dump.json"),
        ('{"data": []}', "no JSON object"),
        ('{"level": "L0", "data": {}}', "level is L0, and calls of APIs are in levels L1 and mix"),
        ('{"data": {"Torch.relu.0.forward": 3}}', "holds no call of an API"),
    ],
)
def test_what_is_no_dump_of_calls_is_said(tmp_path: Path, text: str, message: str) -> None:
    """Damaged files and dumps of another level give one sentence."""
    (tmp_path / "dump.json").write_text(text)
    with pytest.raises((DumpFormatError, UsageError), match=message):
        read_calls(tmp_path / "dump.json")


def test_repeats_differ_only_in_the_numbers_of_their_tensors() -> None:
    """Shape, type, other arguments and a backward make another call; extremes, norms and file names do not."""
    one, other = tensor([2, 3]), {**tensor([2, 3], 9.0), "data_name": "x.pt", "md5": "00"}
    calls = [
        Call("Torch.relu.0", record(one)),
        Call("Torch.relu.1", record(other)),
        Call("Torch.relu.2", record(one), {"input": []}),
        Call("Torch.relu.3", record(tensor([3, 2]))),
        Call("Torch.relu.4", record(tensor([2, 3], dtype="torch.bfloat16"))),
        Call("Torch.sum.0", record(one, dim={"type": "int", "value": 0})),
        Call("Torch.sum.1", record(other, dim={"type": "int", "value": 0})),
        Call("Torch.sum.2", record(one, dim={"type": "int", "value": 1})),
        Call("Tensor.sum.0", record(one, dim={"type": "int", "value": 1})),
    ]
    assert [call.name for call in without_repeats(calls)] == [
        "Torch.relu.0", "Torch.relu.2", "Torch.relu.3", "Torch.relu.4", "Torch.sum.0", "Torch.sum.2", "Tensor.sum.0",
    ]  # fmt: skip


def test_lists_take_bare_names_and_patterns_and_black_wins() -> None:
    """Six APIs without a result are never checked; casts are, but for the existing tool's rules."""
    settings = PrecheckSettings(white_list=("relu", "Torch.s*", "to", "empty"), black_list=("Torch.sum.1",))
    names = ("Torch.relu.0", "Torch.sum.0", "Torch.sum.1", "Tensor.exp.0", "Torch.empty.0", "Tensor.to.0")
    assert [why_not(Call(name, {}), settings) for name in names] == [
        None,
        None,
        "API sum is in black_list",
        "API exp is not in white_list",
        "API empty has no result that can be compared",
        None,
    ]
    assert why_not(Call("Tensor.to.0", {}), settings, compat=True) == "API to is not checked by the existing tool"


def test_a_name_in_a_list_that_no_call_has_is_told_with_the_nearest_one() -> None:
    """Lists that leave nothing are a mistake."""
    calls = [Call("Torch.softmax.0", {}), Call("Torch.matmul.0", {})]
    assert remarks_on_lists(calls, PrecheckSettings(black_list=("sofmax",))) == [
        "black_list: no call of 'sofmax' in this dump; did you mean 'softmax'?"
    ]
    with pytest.raises(
        UsageError, match=r"leave no call to be checked; APIs of the dump: matmul, softmax\nwhite_list: no call of 'matmull'"
    ):
        remarks_on_lists(calls, PrecheckSettings(white_list=("matmull",)))


def test_settings_are_the_section_of_config_json_or_a_flat_file(tmp_path: Path) -> None:
    """Mistakes name file, key, value and what is allowed."""
    (tmp_path / "config.json").write_text('{"task": "run_ut", "dump_path": "", "run_ut": {"white_list": ["add"], "port": 60000}}')
    (tmp_path / "config.yaml").write_text("white_list: []\nblack_list: [add]\nprecision: 9\nrank_list: [0, '4-6']\n")
    (tmp_path / "none.json").write_text('{"task": "statistics", "statistics": {"scope": []}}')
    (tmp_path / "wrong.yaml").write_text("whitelist: []\nprecision: 21\nis_online: 1\n")
    assert load_precheck_settings(tmp_path / "config.json")[0] == PrecheckSettings(white_list=("add",), port=60000)
    assert load_precheck_settings(tmp_path / "config.yaml")[0] == PrecheckSettings(black_list=("add",), precision=9, rank_list=(0, 4, 5, 6))
    settings, remarks = load_precheck_settings(tmp_path / "none.json")
    assert settings == PrecheckSettings()
    assert "run_ut: is not there; the defaults hold" in remarks[0]
    with pytest.raises(SettingsError) as caught:
        load_precheck_settings(tmp_path / "wrong.yaml")
    lines = str(caught.value).splitlines()
    assert "whitelist: unknown key; did you mean 'white_list'?" in lines[0]
    assert "precision: 21 (integer) is not allowed; allowed: an integer >= 0 and <= 20" in lines[1]
    assert "is_online: 1 (integer) is not allowed; allowed: true or false" in lines[2]


def test_a_dump_that_does_not_say_its_framework_is_what_its_tensors_are(tmp_path: Path) -> None:
    """What an argument's text says does not count."""
    text = {"type": "str", "value": '"type": "mindspore.Tensor"'}
    for first, framework in ((tensor([2]), "pytorch"), ({**tensor([2], dtype="Float32"), "type": "mindspore.Tensor"}, "mindspore")):
        file = tmp_path / "dump.json"
        file.write_text(json.dumps({"level": "L1", "data": {"Functional.relu.0.forward": {"input_args": [text, first], "output": []}}}))
        assert read_calls(file).framework == framework


# Files with the results of a pre-check: columns, cells, and going on after any kind of end.

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
        files.append(build_skipped_result(NAMES[1], "random"))
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
        files.append(build_skipped_result(NAMES[1], "why"))
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
    calls = [_call(NAMES[0]), build_skipped_result(NAMES[1], "why"), _call(NAMES[2], 3.0)]
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


# What `msprobe acc_check` says at its end.


def call(name: str, status: str, units: float | None) -> CallResult:
    tensor = TensorResult(f"{name}.forward.output.0", (2, 3), "torch.float64", "torch.bfloat16", status=status, units=units)
    return CallResult(name, status, tensors=(tensor,))


def test_the_worst_come_first_and_errors_before_warnings() -> None:
    """An error without a number, or of NaN, is worse than any number."""
    tally = Tally()
    for result in (
        call("Torch.a.0", WARNING, 1e9), call("Torch.b.0", ERROR, 50.0), call("Torch.c.0", ERROR, 7e3),
        call("Torch.d.0", ERROR, math.nan), call("Torch.e.0", PASS, 1.0),
    ):  # fmt: skip
        tally.add(result)
    shown = text(tally, {})
    assert shown.splitlines()[:2] == [
        "5 calls, 5 checked: 3 error, 1 warning, 1 pass forward; none backward",
        "4 calls do not pass, the worst first:",
    ]
    assert [line.split(":")[0].strip() for line in shown.splitlines() if line.startswith("  Torch")] == [
        "Torch.d.0", "Torch.c.0", "Torch.b.0", "Torch.a.0",
    ]  # fmt: skip
    assert "forward.output.0 (bfloat16 2x3): 7e+03 times what round-off makes of it" in shown
    assert tally.errors == 3


def test_reasons_of_skipped_calls_are_counted_without_their_numbers() -> None:
    """What a dump calls its APIs cannot steer a terminal, and a long list ends."""
    tally = Tally()
    for n in range(30):
        tally.add(build_skipped_result(f"Torch.x.{n}", f"no kernel for Torch.x.{n}\nsecond line"))
        tally.add(build_skipped_result(f"Torch.y.{n}", f"reason {'abcdefghijklmnopqrstuvwxyzABCD'[n]}\x1b[31m"))
    shown = text(tally, {})
    assert "60 calls, 0 checked: 60 skipped forward; none backward" in shown
    assert "      30  no kernel for API" in shown
    assert "and for 19 more reasons" in shown
    assert "\x1b" not in shown
    assert tally.checked == 0
    assert SKIP in shown.upper()


def test_the_source_line_is_the_innermost_of_the_user() -> None:
    """Frames inside of torch and of this package are passed over, unless there is no other."""
    inside = "File /venv/lib/python3.11/site-packages/torch/nn/modules/linear.py, line 134, in forward, \n return F.linear("
    own = "File /job/model.py, line 7, in block, \n x = self.fc(x)"
    assert source_line([inside, own]) == "/job/model.py:7 in block"
    assert source_line([inside]) == "/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py:134 in forward"
    assert source_line([]) == source_line(["no frame"]) == ""


def test_a_fault_of_the_check_is_no_skipped_call() -> None:
    """It is counted apart, with the place, and the check was not complete; the operator's own refusal is a reason to skip."""
    tally = Tally()
    tally.add(build_skipped_result("Torch.a.0", "RuntimeError: the operator does not take this"))
    assert not tally.incomplete
    try:
        {}["standard"]
    except KeyError as error:
        tally.add(not_judged("Torch.b.0", error))
    assert tally.incomplete
    assert tally.checked == 0
    shown = text(tally, {})
    assert "1 skipped:\n       1  RuntimeError: the operator does not take this" in shown
    assert "1 calls could not be judged: a fault of the check" in shown
    assert "  Torch.b.0: KeyError: 'standard'" in shown


def test_with_compat_the_reason_is_that_of_the_old_rule() -> None:
    """Units of round-off are ours: a status of the existing tool's rules has the numbers that these look at."""
    tensor = TensorResult(
        "Torch.a.0.forward.output.0", (2,), "torch.float64", "torch.float32", {"cosine": 0.5, "max_abs": 2.0}, status=ERROR, units=0.0
    )
    tally = Tally()
    tally.add(CallResult("Torch.a.0", ERROR, tensors=(tensor,)))
    shown = text(tally, {}, by_old_rules=True)
    assert "(float32 2): by the existing tool's rule: cosine 0.5, largest error 2" in shown
    assert "round-off" not in shown


def test_a_check_of_few_of_the_calls_says_so() -> None:
    """More than half not checked is a warning, unless nobody wanted them checked, or nobody can."""
    for reason, warned in (("torch 2 has no operator Torch.x", True), ("API x is in black_list", False), ("draws random numbers", False)):
        tally = Tally()
        for n in range(3):
            tally.add(call(f"Torch.a.{n}", PASS, 1.0))
        for n in range(4):
            tally.add(build_skipped_result(f"Torch.x.{n}", reason))
        assert ("warning: 4 of 7 calls could not be checked" in text(tally, {})) is warned
