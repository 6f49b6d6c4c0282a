"""The existing config.json."""

from __future__ import annotations

from typing import Any

import pytest

from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.settings.existing.config_json import DUMP_KEYS
from msprobe_engine.core.settings.load import read_settings
from msprobe_engine.core.settings.schema import DumpSettings, LoadSettings, SliceSettings


def dump(tree: dict[str, Any]) -> tuple[DumpSettings, list[str]]:
    """Dump section and remarks."""
    settings, warnings = read_settings(tree, kind="dump")
    assert settings.dump is not None
    assert settings.monitor is None
    assert settings.rules == ()
    return settings.dump, warnings


def test_a_selection_in_the_section_of_another_task() -> None:
    """Only the section of the task is read: a list elsewhere is named, unless the task has one of its own."""
    tree: dict[str, Any] = {"task": "tensor", "statistics": {"list": ["relu"]}, "tensor": {"list": []}}
    settings, warnings = dump(tree)
    assert settings.list == ()
    assert [w for w in warnings if "statistics.list: has no effect: task 'tensor' reads the section 'tensor'" in w] == warnings != []
    settings, warnings = dump(tree | {"tensor": {"list": ["gelu"]}})
    assert (settings.list, warnings) == (("gelu",), [])


def test_a_full_config_json_is_accepted_without_remarks() -> None:
    """A config.json with every key at a usual value, sections of other tasks included, is read silently."""
    tree = {
        "task": "statistics",
        "dump_path": "/data/run1",
        "rank": [0, "4-6"],
        "step": [0, 10],
        "level": "mix",
        "async_dump": False,
        "enable_dataloader": False,
        "dump_enable": None,
        "extra_info": True,
        "precision": "low",
        "risk_level": "FOCUS",
        "custom_op_namespaces": None,
        "statistics": {"scope": [], "list": ["attn"], "tensor_list": ["softmax"], "data_mode": ["all"], "summary_mode": "md5", "slice": []},
        "tensor": {"scope": [], "list": [], "data_mode": ["all"], "file_format": "npy", "summary_mode": "md5", "online_run_ut": False},
        "run_ut": {"white_list": [], "anything": 1},
        "grad_probe": {"grad_level": "L1"},
        "free_benchmark": {"fuzz_device": "npu"},
    }
    expected = DumpSettings(
        dump_path="/data/run1",
        rank=(0, 4, 5, 6),
        step=(0, 10),
        level="mix",
        risk_level="FOCUS",
        list=("attn",),
        tensor_list=("softmax",),
        summary_mode="md5",
    )
    assert dump(tree) == (expected, [])


def test_options_come_from_the_section_of_the_task() -> None:
    """Only the section named like the task is applied; values in the other ones are not looked at."""
    tree = {"task": "tensor", "tensor": {"list": ["relu"]}, "statistics": {"list": 5, "summary_mode": "md5"}}
    assert dump(tree)[0] == DumpSettings(task="tensor", list=("relu",))


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"enable_dataloader": True}, "enable_dataloader"),
        ({"task": "tensor", "tensor": {"file_format": "bin"}}, "tensor.file_format"),
        ({"task": "tensor", "tensor": {"tensor_list": ["a"]}}, "tensor.tensor_list"),
    ],
)
def test_keys_that_are_not_built_give_one_remark(tree: dict[str, Any], key: str) -> None:
    """A key whose feature is not built is accepted with one remark that names it."""
    _, warnings = dump(tree)
    assert len(warnings) == 1
    assert f"settings: {key}: " in warnings[0]


def test_nested_options_are_read_and_null_is_absent() -> None:
    """Lists of cuts and the replay section become objects; null in a key that may be absent is no mistake."""
    tree = {
        "dump_enable": True,
        "load": {"path": ".", "modules": ["Module.fc.Linear.forward.0"], "step": ["1-2"]},
        "statistics": {"slice": [{"dim": 1, "begin": -2}], "request_id": None},
    }
    expected = DumpSettings(
        dump_enable=True,
        load=LoadSettings(path=".", modules=("Module.fc.Linear.forward.0",), step=(1, 2)),
        slice=(SliceSettings(dim=1, begin=-2),),
    )
    assert dump(tree) == (expected, [])
    assert dump({"task": "tensor", "tensor": {"bench_path": None, "slice": None}})[0] == DumpSettings(task="tensor")


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"task": "statistics", "statistics": {"slice": [{"dim": -1}]}}, "settings: statistics.slice[0].dim: -1 (integer)"),
        (
            {"task": "statistics", "statistics": {"slice": [{"begin": 3, "end": 3}]}},
            "settings: slice[0].end: 3 is not behind begin 3",
        ),
        ({"task": "statistics", "statistics": {"slice": [{"dmi": 0}]}}, "settings: statistics.slice[0].dmi: unknown key"),
        ({"risk_level": "core"}, "did you mean 'CORE'?"),
        ({"task": "statistics", "lst": []}, "settings: lst: unknown key"),
        ({"task": "statistics", "statistics": {"lst": []}}, "settings: statistics.lst: unknown key; did you mean 'list'?"),
        ({"task": "statistics", "tensor": {"lst": []}}, "settings: tensor.lst: unknown key"),
        ({"task": "statistics", "statistics": [1]}, "settings: statistics: [1] (list)"),
        ({"task": "run_ut"}, "task 'run_ut' of the existing tool is no task here"),
        ({"task": "statistic"}, "did you mean 'statistics'?"),
        ({"task": "tensor", "tensor": {"data_mode": ["fwd"]}}, "settings: tensor.data_mode[0]: 'fwd'"),
        ({"task": "tensor", "async_dump": "yes"}, "settings: async_dump: 'yes' (string)"),
    ],
)
def test_mistakes_in_config_json_are_named(tree: dict[str, Any], says: str) -> None:
    """Unknown keys at any depth and wrong values are mistakes with their key path."""
    with pytest.raises(SettingsError) as caught:
        read_settings(tree)
    assert says in str(caught.value)


def test_every_documented_key_is_known() -> None:
    """All keys of the existing documentation are in the table of known keys."""
    keys = (
        "task dump_path rank step level async_dump enable_dataloader dump_enable extra_info precision risk_level custom_op_namespaces load"
    )
    assert set(keys.split()) <= set(DUMP_KEYS)
