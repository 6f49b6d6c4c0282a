"""Our feature among MindSpeed's: in every list, its arguments on both parsers, the probe asked for, one dump."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from mindspeed_world import STAND_IN, imported_anew, write_megatron

from msprobe_integrations.autoload import request
from msprobe_integrations.megatron import patches
from msprobe_integrations.megatron.flags import Flags
from msprobe_integrations.mindspeed import autoload, feature

pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "probe.yaml"
    file.write_text(f"output_dir: {tmp_path / 'out'}\nmonitor: {{gradients: true}}\n")
    return file


@pytest.fixture
def world(tmp_path: Path) -> Iterator[None]:
    with imported_anew(STAND_IN, write_megatron(tmp_path / "m")):
        feature.feature_class.cache_clear()
        feature._warn_once.cache_clear()
        yield
    feature.feature_class.cache_clear()


def launch(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> ModuleType:
    """Import the adaptor as a script with these arguments does."""
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *arguments])
    autoload.arm()
    return importlib.import_module("mindspeed.megatron_adaptor")


def ours(features: list[Any]) -> int:
    return sum(one.feature_name == "msprobe_config" for one in features)


def test_in_every_list(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list that MindSpeed sets, the one that MindSpeed-LLM sets later, and one that has ours already have it exactly once, at the
    end; the other features stay in their order."""
    launch(monkeypatch, "--msprobe-config", str(config))
    manager = importlib.import_module("mindspeed.features_manager.features_manager").MindSpeedFeaturesManager
    first = list(manager.FEATURES_LIST)
    assert (ours(first), ours(first[-1:])) == (1, 1)
    assert [one.feature_name for one in first[:-1]] == ["basic", "own_step", "npu_datadump"]
    manager.set_features_list(first[:2])
    assert [one.feature_name for one in manager.FEATURES_LIST] == ["basic", "own_step", "msprobe_config"]
    manager.set_features_list(features_list=list(manager.FEATURES_LIST))
    assert ours(manager.FEATURES_LIST) == 1


def test_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an argument of ours and without MSPROBE_CONFIG, MindSpeed is left as it is."""
    launch(monkeypatch, "--optimization-level", "2")
    manager = importlib.import_module("mindspeed.features_manager.features_manager").MindSpeedFeaturesManager
    assert [one.feature_name for one in manager.FEATURES_LIST] == ["basic", "own_step", "npu_datadump"]
    assert not hasattr(manager.set_features_list, "__wrapped__")
    assert patches._make is None


@pytest.mark.parametrize("first", ["adaptor", "by hand", "late"])
def test_the_probe_is_asked_for(config: Path, monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    """The argument asks for the probe, whether the loader armed us, the script imports our package before the adaptor, or MindSpeed's
    features are there already; Megatron's parser then knows the arguments, once, and gives them back as they were typed."""
    arguments = ["--msprobe-config", str(config), "--msprobe-set", "monitor.gradients=false", "--own-step"]
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *arguments])
    if first == "late":
        importlib.import_module("mindspeed.features_manager")
    if first == "adaptor":
        autoload.arm()
    else:
        importlib.reload(importlib.import_module("msprobe_integrations.mindspeed"))
    importlib.import_module("mindspeed.megatron_adaptor")
    asked = request.current()
    assert asked == request.Request(str(config), ("monitor.gradients=false",))
    assert patches._make is not None
    args = importlib.import_module("megatron.training.arguments").parse_args()
    assert (args.msprobe_config, args.msprobe_set, args.own_step) == (str(config), ["monitor.gradients=false"], True)


@pytest.mark.parametrize("level", ["0", "2"])
def test_of_every_optimization_level(config: Path, monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    """MSPROBE_CONFIG alone is enough, and ``--optimization-level 0`` (no optional features) keeps the probe."""
    monkeypatch.setenv("MSPROBE_CONFIG", str(config))
    launch(monkeypatch, "--optimization-level", level)
    assert patches._make is not None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--msprobe-config", "missing.yaml"], "missing.yaml"),
        (["--msprobe-config", "{config}", "--msprobe-set", "monitor.no=1"], "monitor.no"),
        (["--msprobe-strict"], "--msprobe-config FILE"),
    ],
)
def test_a_mistake_ends_the_launch(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    """A settings file that is not there, or a wrong key, ends the process with code 2 and its name before Megatron is imported."""
    with pytest.raises(SystemExit) as ended:
        launch(monkeypatch, *(text.format(config=config) for text in arguments))
    assert ended.value.code == 2
    assert named in capsys.readouterr().err
    assert "megatron.training.training" not in sys.modules


def test_arguments_of_a_second_patching(config: Path) -> None:
    """`repatch` hands over a namespace made of a mapping: the same arguments mean the same there, and objects without them nothing."""
    args = SimpleNamespace(msprobe_config=str(config), msprobe_set="a=1", msprobe_output_dir="d", msprobe_strict=True)
    assert feature.flags_of(args) == Flags(str(config), ("a=1", "output_dir=d", "strict=true"))
    assert feature.flags_of(object()) == Flags()


@pytest.mark.parametrize(("section", "left"), [("dump: {level: L1, step: [0]}", False), ("grad_probe: {}", False), ("monitor: {}", True)])
def test_one_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], section: str, left: bool) -> None:
    """``--npu-datadump`` yields to a dump of ours, in both of the parsed arguments, and goes on beside a monitor; it is said once who
    does what."""
    file = tmp_path / "probe.yaml"
    file.write_text(f"output_dir: {tmp_path / 'out'}\n{section}\n")
    adaptor = launch(monkeypatch, "--npu-datadump", "--msprobe-config", str(file))
    assert adaptor.ARGS.npu_datadump is left
    manager = importlib.import_module("mindspeed.features_manager.features_manager").MindSpeedFeaturesManager
    args = argparse.Namespace(npu_datadump=True, optimization_level=2)
    manager.pre_validate_features_args(args)
    assert args.npu_datadump is left
    said = capsys.readouterr().err
    assert said.count("--npu-datadump") == 1
    assert ("config.json" in said) is left


def test_a_fault_of_ours_leaves_the_list(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When our feature cannot be made, MindSpeed has its own features and trains."""
    monkeypatch.setattr(feature, "add_feature", lambda _: 1 / 0)
    launch(monkeypatch, "--msprobe-config", str(config))
    manager = importlib.import_module("mindspeed.features_manager.features_manager").MindSpeedFeaturesManager
    assert len(manager.FEATURES_LIST) == 3


def test_a_version_without_lists_of_features(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where MindSpeed's manager has no `set_features_list`, that is said with what it takes away; Megatron's parser has the
    arguments."""
    monkeypatch.setattr("msprobe_integrations.requirements.MISSING", {})
    module = ModuleType("features_manager")
    manager: Any = type("MindSpeedFeaturesManager", (), {"FEATURES_LIST": []})
    module.__dict__["MindSpeedFeaturesManager"] = manager
    monkeypatch.setitem(sys.modules, autoload.MANAGER, module)
    autoload._manager(module)
    said = capsys.readouterr().err
    assert "set_features_list" in said
    assert "Megatron's has them" in said
    assert manager.FEATURES_LIST == []


@pytest.mark.parametrize("name", ["flags_of", "switch_on", "one_dump"])
def test_a_fault_of_ours_leaves_the_launch(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """A fault in what our feature does is one line, and MindSpeed's adaptor is imported with all its patches."""
    monkeypatch.setattr(feature, name, lambda _: 1 / 0)
    monkeypatch.setattr(feature, "_failed", [])
    launch(monkeypatch, "--msprobe-config", str(config), "--own-step")
    assert importlib.import_module("megatron.training.training").train_step.__qualname__.startswith("OwnStep")
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_beside_the_debugger_of_datadump(config: Path) -> None:
    """A `PrecisionDebugger` that a script makes ends a probe that was asked for from outside; the one that MindSpeed makes does not."""
    from msprobe_integrations.torch.training import owner
    from msprobe_integrations.torch.training.loop import LoopObserver

    def claimed() -> Any:
        return owner.claim("megatron", lambda settings, file: LoopObserver(settings, file=file))

    owner.release()
    request.request_probe(str(config))
    owner.of_user()
    assert claimed() is None
    autoload._datadump(ModuleType("npu_datadump"))
    assert claimed() is not None
    owner.release()
