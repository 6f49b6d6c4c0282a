"""The key `msprobe` of a DeepSpeed configuration, in all forms that DeepSpeed takes its configuration in."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed_harness as harness
import pytest
import torch
from forkpool import run_ranks

from msprobe_engine.core.errors import SettingsError
from msprobe_integrations.autoload import request
from msprobe_integrations.deepspeed import autoload, key
from msprobe_integrations.torch.training import owner

pytestmark = pytest.mark.framework
PROBE = "monitor: {activations: true}\nsinks: {memory: true, csv: {enabled: false}}\nincident: {enabled: false}\n"


def write(directory: Path, text: str = PROBE) -> Path:
    file = directory / "probe.yaml"
    file.write_text(text)
    return file


def trained(form: str, directory: str, value: Any) -> Any:
    """Steps seen of a training whose configuration comes in `form`."""
    os.chdir(directory)
    harness.deepspeed.init_distributed("gloo", verbose=False)
    autoload.arm()
    torch.manual_seed(0)
    net = harness.Net()
    conf = {**harness.config(2, "bf16"), "msprobe": value}
    given: dict[str, Any] = {}
    if form == "dict":
        given["config"] = conf
    elif form == "base64":
        given["config"] = base64.urlsafe_b64encode(json.dumps(conf).encode()).decode()
    else:
        file = Path("conf") / "ds_config.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(conf))
        if form == "file":
            given["config"] = str(file)
        elif form == "old":
            given["config_params"] = str(file)
        else:
            given["args"] = SimpleNamespace(deepspeed_config=str(file), local_rank=int(os.environ["LOCAL_RANK"]))
    engine, *_ = harness.deepspeed.initialize(model=net, model_parameters=net.parameters(), **given)
    for x in harness.batches("bf16", 2):
        engine.backward(engine(x))
        engine.step()
    observer = owner.current()
    assert observer is not None
    probe = observer.probe
    assert probe is not None
    observer.close()
    return [f.step for f in probe.frames], str(probe.settings.output_dir), request.current()


@pytest.mark.parametrize("form", ["dict", "file", "old", "arguments", "base64"])
def test_every_form(form: str, tmp_path: Path) -> None:
    """Nothing but the key switches the probe on; the settings file is found in the working directory."""
    write(tmp_path)
    value = {"config": "probe.yaml", "set": ["monitor.interval=1"], "output_dir": str(tmp_path / "out")}
    (steps, output, asked) = run_ranks(1, trained, form, str(tmp_path), value)[0]
    assert steps == [0, 1]
    assert output == str(tmp_path / "out")
    assert asked is not None
    assert "key 'msprobe'" in asked.by


def test_beside_the_configuration(tmp_path: Path) -> None:
    """A settings file that the working directory does not have is looked for beside the DeepSpeed configuration."""
    (tmp_path / "conf").mkdir()
    write(tmp_path / "conf", PROBE + f"output_dir: {tmp_path}\n")
    steps, _, asked = run_ranks(1, trained, "file", str(tmp_path), "probe.yaml")[0]
    assert steps == [0, 1]
    assert asked.config == str(tmp_path / "conf" / "probe.yaml")


def refused(directory: str, value: Any) -> str:
    try:
        trained("dict", directory, value)
    except SettingsError as error:
        return str(error)
    return ""


def test_wrong_settings_end_initialize(tmp_path: Path) -> None:
    """A mistake in the file that the key names is a SettingsError of `deepspeed.initialize`, which names the key, file and place."""
    write(tmp_path, "monitor: {activation: true}\n")
    (text,) = run_ranks(1, refused, str(tmp_path), "probe.yaml")
    assert "msprobe" in text
    assert "probe.yaml" in text
    assert "did you mean 'activations'" in text


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (["probe.yaml"], ("['probe.yaml'] is not allowed", "path of a settings file")),
        ({"confg": "probe.yaml"}, ("msprobe.confg: unknown key", "did you mean 'config'?", "config, set, output_dir, monitor")),
        ({"set": ["a=1"]}, ("msprobe.config: None is not allowed",)),
        ({"config": "probe.yaml", "set": "dump.step=[5]"}, ("msprobe.set: 'dump.step=[5]' is not allowed", "a list")),
        ({"config": "probe.yaml", "set": ["dump"]}, ("msprobe.set: ['dump'] is not allowed",)),
        ({"config": "probe.yaml", "output_dir": 3}, ("msprobe.output_dir: 3 is not allowed",)),
        ({"config": "probe.yaml", "monitor": "yes"}, ("msprobe.monitor: 'yes' is not allowed", "true, false")),
        ("nowhere.yaml", ("file 'nowhere.yaml' does not exist", "looked for")),
    ],
)
def test_mistakes_are_named(value: Any, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mistake in the key says where it is, what was seen and what is allowed."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    with pytest.raises(SettingsError) as error:
        key.parse(value, "ds_config.json: msprobe")
    for word in words:
        assert word in str(error.value)


def test_what_the_key_says_becomes_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directory and sink are changes to the file, whatever characters a path has."""
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path)
    config, changes = key.parse({"config": "probe.yaml", "output_dir": "a: b#c", "monitor": True}, "here")
    settings = request.Request(config, changes).settings()
    assert (config, settings.output_dir, settings.sinks.deepspeed.enabled) == (str(file), "a: b#c", True)


def without_key() -> Any:
    autoload.arm()
    before = harness.deepspeed.runtime.engine.DeepSpeedEngine.forward
    engine = harness.engine_of(harness.config(1, "fp32"))
    jobs = [float(engine(x).detach()) for x in harness.batches("fp32", 1)]
    return (
        len(jobs),
        owner.current(),
        request.current(),
        harness.deepspeed.runtime.engine.DeepSpeedEngine.forward is before,
        hasattr(before, "__msprobe_wraps__"),
    )


def test_changes_of_the_environment_hold_before_those_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both hold; of the same setting the key's counts."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    monkeypatch.setenv("MSPROBE_SET", "monitor.parameters=true\noutput_dir=a")
    value = {"msprobe": {"config": "probe.yaml", "output_dir": "b"}}
    assert key.request_from_config(harness.deepspeed.initialize, (), {"config": value})
    asked = request.current()
    request.forget()
    assert asked is not None
    assert asked.settings().monitor.parameters
    assert asked.settings().output_dir == "b"


def test_without_the_key_nothing_is_wrapped() -> None:
    """A DeepSpeed job that does not ask for the probe has DeepSpeed's own engine class."""
    assert run_ranks(1, without_key) == [(1, None, None, True, False)]


def chosen_by_key(directory: str) -> Any:
    os.chdir(directory)
    autoload.arm()
    conf = harness.config(1, "fp32")
    engines = [harness.engine_of(conf), harness.engine_of({**conf, "msprobe": "probe.yaml"}), harness.engine_of(conf)]
    for engine in engines:
        engine.backward(engine(harness.batches("fp32", 1)[0]))
        engine.step()
    observer: Any = owner.current()
    found = [f.step for f in observer.probe.frames], observer.engine is engines[1]
    observer.close()
    return found


def test_the_key_names_the_engine(tmp_path: Path) -> None:
    """Of several engines (actor, critic, ...) the one with the key in its own configuration is followed."""
    write(tmp_path, PROBE + f"output_dir: {tmp_path}\n")
    assert run_ranks(1, chosen_by_key, str(tmp_path)) == [([0], True)]


def test_automatic_values_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration object of Transformers, which fills in "auto" and checks it, carries the key along."""
    pytest.importorskip("transformers")
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    conf = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}, "msprobe": {"config": "probe.yaml"}}
    carried = HfDeepSpeedConfig(conf).config
    config, changes = key.parse(carried["msprobe"], "here")
    assert (config, changes) == (str(tmp_path / "probe.yaml"), ())


def test_initialize_is_wrapped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a process asks for it: a second wrapper would take the key a second time."""
    monkeypatch.setattr(harness.deepspeed, "initialize", harness.deepspeed.initialize)
    autoload._wrap(harness.deepspeed)
    once = harness.deepspeed.initialize
    autoload._wrap(harness.deepspeed)
    assert harness.deepspeed.initialize is once
