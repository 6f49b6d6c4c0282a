"""The existing monitor_config.json."""

from __future__ import annotations

from typing import Any

import pytest

from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.settings.existing.monitor_config import MONITOR_KEYS
from msprobe_engine.core.settings.load import read_settings
from msprobe_engine.core.settings.schema import IncidentSettings, LayerFeatureSettings, MonitorSettings, RuleSettings

PLAIN = {"gradients": False, "states_when": "before", "eps": 1e-8}


def monitor(tree: dict[str, Any]) -> tuple[MonitorSettings, list[str]]:
    """Monitor section and remarks."""
    settings, warnings = read_settings(tree, kind="monitor")
    assert settings.monitor is not None
    assert settings.dump is None
    return settings.monitor, warnings


def test_families_follow_the_old_switches() -> None:
    """Each *_distribution key switches on its families, and only those."""
    assert monitor({"targets": {}})[0] == MonitorSettings(**PLAIN, ops=("norm", "shape", "dtype"))
    tree = {
        "targets": {"layers.0": {"input": "tuple[2]:0"}, "0:head": {}},
        "xy_distribution": True,
        "wg_distribution": True,
        "monitor_mbs_grad": True,
        "param_distribution": True,
        "mv_distribution": True,
        "mg_direction": True,
        "ur_distribution": True,
        "stack_info": True,
        "squash_name": True,
        "eps": 1,
        "cc_distribution": {"enable": True, "cc_codeline": ["train.py"], "cc_pre_hook": True},
        "module_ranks": [0, 3],
        "start_step": 2,
        "step_interval": 5,
        "collect_times": 1e8,
        "ops": ["min", "nans", "id", "shape"],
    }
    expected = MonitorSettings(
        targets=("layers.0", "0:head"),
        activation_targets=("layers.0", "0:head"),
        activations=True,
        activation_gradients=True,
        micro_batch_gradients=True,
        parameters=True,
        optimizer_states=True,
        states_when="before",
        momentum_agreement=True,
        updates=True,
        histograms=("update", "ratio"),
        collectives=True,
        collective_inputs=True,
        collective_sites=("train.py",),
        stack_info=True,
        squash_name=True,
        eps=1.0,
        start_step=2,
        interval=5,
        rank=(0, 3),
        ops=("min", "nans", "shape", "dtype"),
    )
    assert monitor(tree) == (expected, [])


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"xy_distribution": True}, ()),
        ({"xy_distribution": True, "all_xy": True}, ()),
        ({"xy_distribution": True, "targets": {"a": {}}}, ("a",)),
        ({"xy_distribution": True, "targets": {"a": {}}, "all_xy": True}, ("*",)),
    ],
)
def test_modules_are_named_exactly(tree: dict[str, Any], expected: tuple[str, ...]) -> None:
    """A target is just that module, as in the existing tool; all_xy takes every module, and parameters stay those of the targets."""
    assert monitor(tree)[0].activation_targets == expected
    assert monitor(tree)[0].targets == tuple(tree.get("targets", ()))


@pytest.mark.parametrize(("only", "expected"), [("forward_only", (True, False)), ("backward_only", (False, True))])
def test_activations_can_be_restricted_to_one_direction(only: str, expected: tuple[bool, bool]) -> None:
    """forward_only leaves activations, backward_only their gradients."""
    section, _ = monitor({"xy_distribution": True, only: True})
    assert (section.activations, section.activation_gradients) == expected


def test_layer_features() -> None:
    """recording_l2_features switches l2_targets on; an empty list means all linear layers for linear_hook and nothing for the others."""
    tree = {
        "recording_l2_features": True,
        "l2_targets": {"attention_hook": ["attn"], "linear_hook": [], "moe_router_logit_hook": []},
        "sa_order": "b, s, h, d",
    }
    assert monitor(tree) == (
        MonitorSettings(
            **PLAIN,
            ops=("norm", "shape", "dtype"),
            layer_features=LayerFeatureSettings(attention=("attn",), attention_layout="b,s,h,d", linear=("*",)),
        ),
        [],
    )
    assert monitor({"l2_targets": {"linear_hook": []}})[0].layer_features is None
    assert monitor({"recording_l2_features": True})[0].layer_features == LayerFeatureSettings(attention_layout="s,b,h,d")


@pytest.mark.parametrize(
    ("form", "expected"), [("csv", (True, False, False)), ("tensorboard", (False, True, False)), ("api", (False, False, True))]
)
def test_the_format_chooses_the_sink(form: str, expected: tuple[bool, bool, bool]) -> None:
    """format csv, tensorboard and api switch on the CSV, TensorBoard and memory sinks; CSV files hold one step unless told otherwise."""
    sinks = read_settings({"format": form, "ops": ["norm", "nans"], "append_output": ["Dec03_21-34-40", "Dec03_21-34-41"]})[0].sinks
    assert (sinks.csv.enabled, sinks.tensorboard.enabled, sinks.memory) == expected
    assert sinks.tensorboard.ops == ("norm", "nans")
    assert (sinks.csv.steps_per_file, sinks.csv.append_output) == (1, ("Dec03_21-34-40", "Dec03_21-34-41"))
    assert read_settings({"step_count_per_record": 50, "ops": []})[0].sinks.csv.steps_per_file == 50


def test_the_directory_is_that_of_the_existing_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    """./monitor_output, or what MONITOR_OUTPUT_DIR says."""
    settings = read_settings({"targets": {}})[0]
    assert (settings.output_dir, settings.sinks.csv.path) == ("./monitor_output", "./monitor_output")
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", "elsewhere")
    settings = read_settings({"targets": {}})[0]
    assert (settings.output_dir, settings.sinks.csv.path) == ("elsewhere", "elsewhere")


def test_the_dynamic_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """dynamic_on counts with DYNAMIC_MONITOR=True only; then start_step has no effect, and that is said."""
    tree = {"targets": {}, "start_step": 4}
    assert [(m.enabled, m.hot, m.start_step) for m in (monitor(tree)[0], monitor(tree | {"dynamic_on": True})[0])] == [(True, False, 4)] * 2
    monkeypatch.setenv("DYNAMIC_MONITOR", "True")
    section, (remark,) = monitor(tree)
    assert (section.enabled, section.hot, section.start_step) == (False, True, 0)
    assert "start_step" in remark
    assert monitor(tree | {"dynamic_on": True})[0].enabled


def test_alert_rules_are_translated() -> None:
    """AnomalyTurbulence becomes turbulence; AnomalyNan becomes nan_inf, with a threshold also extreme_value; dump writes the file."""
    nan, turbulence = {"rule_name": "AnomalyNan", "args": {"threshold": 1e10}}, {"rule_name": "AnomalyTurbulence", "args": {"threshold": 1}}
    settings, warnings = read_settings({"ops": [], "alert": {"rules": [turbulence, nan, {"rule_name": "AnomalyNan"}], "dump": True}})
    assert settings.rules == (
        RuleSettings(rule="turbulence", args={"threshold": 1.0}),
        RuleSettings(rule="nan_inf"),
        RuleSettings(rule="extreme_value", args={"threshold": 1e10}),
        RuleSettings(rule="nan_inf"),
    )
    assert settings.incident == IncidentSettings(enabled=True, capture_level="")
    assert settings.sinks.anomalies
    assert warnings == []
    plain = read_settings({"ops": [], "alert": {}})[0]
    assert not plain.incident.enabled
    assert not plain.sinks.anomalies


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"wg_distrbution": True}, "did you mean 'wg_distribution'?"),
        ({"wg_distribution": "yes"}, "settings: wg_distribution: 'yes' (string)"),
        ({"mv_distribution": "yes"}, "settings: mv_distribution: 'yes' (string)"),
        ({"targets": {"a": 1}}, "settings: targets: {'a': 1} (mapping)"),
        ({"module_ranks": True}, "settings: module_ranks: True"),
        ({"module_ranks": [True]}, "settings: module_ranks[0]: True"),
        ({"module_ranks": "all"}, "settings: module_ranks[0]: 'all'"),
        ({"ops": ["nrom"]}, "settings: ops[0]: 'nrom'"),
        ({"ops": "norm"}, "settings: ops: 'norm' (string)"),
        ({"format": "xml"}, "allowed: one of 'csv', 'tensorboard', 'api'"),
        ({"step_count_per_record": 0, "ops": []}, "settings: step_count_per_record: 0"),
        ({"cc_distribution": {"enabled": True}}, "settings: cc_distribution.enabled: unknown key; did you mean 'enable'?"),
        ({"l2_targets": {"linear": []}}, "settings: l2_targets.linear: unknown key; did you mean 'linear_hook'?"),
        ({"sa_order": "h,d"}, "settings: sa_order: 'h,d'"),
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


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"ndigits": 6}, "ndigits: files hold all digits"),
        ({"print_struct": True}, "print_struct: the training is not stopped"),
        ({"cc_distribution": {"enable": True, "cc_log_only": True}}, "cc_distribution.cc_log_only: the training is not stopped"),
        ({"module_ranks": "0"}, "module_ranks: '0' is read as ['0']; write a list"),
        ({"all_xy": True}, "all_xy: has no effect without xy_distribution"),
    ],
)
def test_other_meanings_are_said_once(tree: dict[str, Any], says: str) -> None:
    """Where a key means something else than in the existing tool, one remark says so."""
    _, (remark,) = monitor({"targets": {}, **tree})
    assert says in remark


def test_a_string_of_ranks_is_understood() -> None:
    """The published baseline has "0": it means rank 0."""
    assert monitor({"module_ranks": "0"})[0].rank == (0,)
    assert monitor({"module_ranks": "0, 4-5"})[0].rank == (0, 4, 5)


def test_every_documented_key_is_known() -> None:
    """All keys of the existing documentation are in the table of known keys."""
    keys = (
        "targets xy_distribution all_xy forward_only backward_only wg_distribution monitor_mbs_grad param_distribution mv_distribution"
        " ur_distribution mg_direction cc_distribution stack_info print_struct recording_l2_features l2_targets sa_order module_ranks"
        " start_step step_interval collect_times dynamic_on ops eps ndigits format step_count_per_record append_output squash_name alert"
    )
    assert set(keys.split()) <= set(MONITOR_KEYS)
