"""Which calls of a dump are checked: what its file holds, the lists of the settings, and calls that repeat others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.accuracy.precheck.calls import Call, bare_name, read_calls, remarks_on_lists, why_not, without_repeats
from msprobe_engine.accuracy.settings import PrecheckSettings, load_precheck_settings
from msprobe_engine.errors import DumpFormatError, SettingsError, UsageError


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


def test_the_bare_name_is_what_stands_between_the_type_and_the_number() -> None:
    """Names of any depth have one."""
    assert [bare_name(name) for name in ("Torch.matmul.0", "Torch.linalg.inv.3", "odd")] == ["matmul", "linalg.inv", "odd"]


def test_a_dump_that_does_not_say_its_framework_is_what_its_tensors_are(tmp_path: Path) -> None:
    """What an argument's text says does not count."""
    text = {"type": "str", "value": '"type": "mindspore.Tensor"'}
    for first, framework in ((tensor([2]), "pytorch"), ({**tensor([2], dtype="Float32"), "type": "mindspore.Tensor"}, "mindspore")):
        file = tmp_path / "dump.json"
        file.write_text(json.dumps({"level": "L1", "data": {"Functional.relu.0.forward": {"input_args": [text, first], "output": []}}}))
        assert read_calls(file).framework == framework
