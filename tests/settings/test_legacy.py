"""The existing config.json and monitor_config.json."""

from __future__ import annotations

from typing import Any

import pytest

from msprobe_engine.errors import SettingsError
from msprobe_engine.settings.legacy import DUMP_KEYS, MONITOR_KEYS
from msprobe_engine.settings.load import read_settings
from msprobe_engine.settings.schema import DumpSettings, IncidentSettings, LoadSettings, MonitorSettings, RuleSettings, SliceSettings


def dump(tree: dict[str, Any]) -> tuple[DumpSettings, list[str]]:
    """Dump section and remarks."""
    settings, warnings = read_settings(tree, kind="dump")
    assert settings.dump is not None
    assert settings.monitor is None
    assert settings.rules == ()
    return settings.dump, warnings


def monitor(tree: dict[str, Any]) -> tuple[MonitorSettings, list[str]]:
    """Monitor section and remarks."""
    settings, warnings = read_settings(tree, kind="monitor")
    assert settings.monitor is not None
    assert settings.dump is None
    return settings.monitor, warnings


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
        ({"task": "tensor", "tensor": {"online_run_ut": True}}, "tensor.online_run_ut"),
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
        ({"task": "run_ut"}, "task 'run_ut' of the existing tool is not built"),
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


def test_monitor_families_follow_the_old_switches() -> None:
    """Each *_distribution key switches on its families, and only those."""
    assert monitor({"targets": {}})[0] == MonitorSettings(gradients=False, ops=("norm", "shape", "dtype"))
    tree = {
        "targets": {"layers.0": {"input": "tuple[2]:0"}, "0:head": {}},
        "xy_distribution": True,
        "wg_distribution": True,
        "monitor_mbs_grad": True,
        "param_distribution": True,
        "mv_distribution": True,
        "cc_distribution": {"enable": True, "cc_codeline": [], "cc_pre_hook": True},
        "module_ranks": [0, 3],
        "start_step": 2,
        "step_interval": 5,
        "collect_times": 1e8,
        "ops": ["min", "nans", "id", "shape"],
    }
    expected = MonitorSettings(
        targets=("layers.0", "0:head"),
        activations=True,
        activation_gradients=True,
        unreduced_gradients=True,
        micro_batch_gradients=True,
        parameters=True,
        optimizer_states=True,
        collectives=True,
        start_step=2,
        interval=5,
        rank=(0, 3),
        ops=("min", "nans", "shape", "dtype"),
    )
    assert monitor(tree) == (expected, [])


@pytest.mark.parametrize(("only", "expected"), [("forward_only", (True, False)), ("backward_only", (False, True))])
def test_activations_can_be_restricted_to_one_direction(only: str, expected: tuple[bool, bool]) -> None:
    """forward_only leaves activations, backward_only their gradients."""
    section, _ = monitor({"xy_distribution": True, only: True})
    assert (section.activations, section.activation_gradients) == expected


@pytest.mark.parametrize(
    ("form", "expected"), [("csv", (True, False, False)), ("tensorboard", (False, True, False)), ("api", (False, False, True))]
)
def test_the_format_chooses_the_sink(form: str, expected: tuple[bool, bool, bool]) -> None:
    """format csv, tensorboard and api switch on the CSV, TensorBoard and memory sinks; CSV files hold one step unless told otherwise."""
    sinks = read_settings({"format": form, "ops": ["norm"]})[0].sinks
    assert (sinks.csv.enabled, sinks.tensorboard.enabled, sinks.memory) == expected
    assert sinks.csv.steps_per_file == 1
    assert read_settings({"step_count_per_record": 50, "ops": []})[0].sinks.csv.steps_per_file == 50


def test_alert_rules_are_translated() -> None:
    """AnomalyTurbulence becomes turbulence; AnomalyNan becomes nan_inf, and with a threshold also extreme_value; dump writes incidents."""
    nan, turbulence = {"rule_name": "AnomalyNan", "args": {"threshold": 1e10}}, {"rule_name": "AnomalyTurbulence", "args": {"threshold": 1}}
    settings, warnings = read_settings({"ops": [], "alert": {"rules": [turbulence, nan, {"rule_name": "AnomalyNan"}], "dump": True}})
    assert settings.rules == (
        RuleSettings(rule="turbulence", args={"threshold": 1.0}),
        RuleSettings(rule="nan_inf"),
        RuleSettings(rule="extreme_value", args={"threshold": 1e10}),
        RuleSettings(rule="nan_inf"),
    )
    assert settings.incident == IncidentSettings(enabled=True, capture_level="")
    assert warnings == []
    assert not read_settings({"ops": []})[0].incident.enabled


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"wg_distrbution": True}, "did you mean 'wg_distribution'?"),
        ({"wg_distribution": "yes"}, "settings: wg_distribution: 'yes' (string)"),
        ({"targets": {"a": 1}}, "settings: targets: {'a': 1} (mapping)"),
        ({"module_ranks": "0"}, "settings: module_ranks: '0' (string)"),
        ({"ops": ["nrom"]}, "settings: ops[0]: 'nrom'"),
        ({"ops": "norm"}, "settings: ops: 'norm' (string)"),
        ({"format": "xml"}, "allowed: one of 'csv', 'tensorboard', 'api'"),
        ({"step_count_per_record": 0, "ops": []}, "settings: step_count_per_record: 0"),
        ({"cc_distribution": {"enabled": True}}, "settings: cc_distribution.enabled: unknown key; did you mean 'enable'?"),
        ({"alert": {"rules": [{"rule_name": "AnomalyTurbulence"}]}}, "needs a 'threshold'"),
        ({"alert": {"rules": [{"rule_name": "AnomalyTurbulence", "args": {"threshold": -1}}]}}, "alert.rules[0].args.threshold: -1"),
        ({"alert": {"rules": [{"rule_name": "AnomalyNaN"}]}}, "unknown rule; did you mean 'AnomalyNan'?"),
        ({"alert": {"rule": []}}, "settings: alert.rule: unknown key; did you mean 'rules'?"),
        ({"alert": []}, "settings: alert: [] (list)"),
        ({"ndigits": 21, "ops": []}, "settings: ndigits: 21"),
    ],
)
def test_mistakes_in_monitor_config_are_named(tree: dict[str, Any], says: str) -> None:
    """What the existing tool passed over in silence or died of is one clear line here."""
    with pytest.raises(SettingsError) as caught:
        read_settings(tree, kind="monitor")
    assert says in str(caught.value)


@pytest.mark.parametrize("key", ["all_xy", "ur_distribution", "mg_direction", "stack_info", "print_struct", "dynamic_on"])
def test_monitor_keys_that_are_not_built_give_one_remark(key: str) -> None:
    """A monitor key whose feature is not built is accepted with one remark that names it; false is silent."""
    assert monitor({"ops": [], key: False})[1] == []
    (warning,) = monitor({"ops": [], key: True})[1]
    assert f"settings: {key}: " in warning


def test_every_documented_key_is_known() -> None:
    """All keys of the existing documentation are in the tables of known keys."""
    dump_keys = (
        "task dump_path rank step level async_dump enable_dataloader dump_enable extra_info precision risk_level custom_op_namespaces load"
    )
    monitor_keys = (
        "targets xy_distribution all_xy forward_only backward_only wg_distribution monitor_mbs_grad param_distribution mv_distribution"
        " ur_distribution mg_direction cc_distribution stack_info print_struct recording_l2_features l2_targets sa_order module_ranks"
        " start_step step_interval collect_times dynamic_on ops eps ndigits format step_count_per_record append_output squash_name alert"
    )
    assert set(dump_keys.split()) <= set(DUMP_KEYS)
    assert set(monitor_keys.split()) <= set(MONITOR_KEYS)
