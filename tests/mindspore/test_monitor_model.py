"""The probe under `Model.train`, in both modes; incidents and dumps of the probe; Prometheus and other sinks."""

from __future__ import annotations

import json
import socket
import urllib.request
from pathlib import Path
from typing import Any

import mindspore as ms
import mindspore.dataset as ds
import monitor_programs as programs
import numpy as np
import pytest
from mindspore import nn

from msprobe_engine.config_check import entries
from msprobe_engine.config_check.pack import read_pack
from msprobe_engine.settings.load import load_settings
from msprobe_engine.settings.schema import PrometheusSettings, SinkSettings
from msprobe_integrations.mindspore.model_callback import ProbeCallback, _numbers
from msprobe_integrations.mindspore.probe import MindSporeProbe


def model_train(callbacks: list[Any]) -> list[bytes]:
    """Four steps of `Model.train`; the bytes of the weights."""
    net, optimizer = programs.build(lambda p: nn.Adam(p, 1e-2))
    numbers = np.random.RandomState(0).randn(8, 6).astype(np.float32)
    dataset = ds.NumpySlicesDataset((numbers, np.zeros((8, 3), np.float32)), ["a", "b"], shuffle=False).batch(2)
    ms.train.Model(net, nn.MSELoss(), optimizer).train(1, dataset, callbacks=callbacks, dataset_sink_mode=False)
    return [w.asnumpy().tobytes() for w in optimizer.parameters]


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_model_train(mode: str) -> None:
    """Steps are those of the loop, with their loss; in a compiled graph parameters and states are there, and no gradients. Same bits."""
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    probe = MindSporeProbe(programs.settings(gradients=True, parameters=True, optimizer_states=True, activations=True))
    weights = model_train([ProbeCallback(probe)])
    assert probe.closed
    assert [frame.step for frame in probe.frames] == [0, 1, 2, 3]
    families = {sample.family for sample in probe.frames[2].samples}
    after = {"param_updated", "exp_avg", "exp_avg_sq"}
    assert families == (after if mode == "graph" else after | {"param_origin", "grad_reduced", "actv"})
    for frame in probe.frames:
        assert frame.scalars["skipped"] == 0.0
        assert 0.1 < frame.scalars["loss"] < 0.3
    assert model_train([]) == weights


def test_numbers_of_a_scaled_loss() -> None:
    """A step with loss scaling gives loss, overflow and scale."""
    outputs = (ms.Tensor(1.5), ms.Tensor(True), ms.Tensor(1024.0))
    found = {name: float(value.asnumpy()) for name, value in _numbers(outputs).items()}
    assert found == {"loss": 1.5, "skipped": 1.0, "loss_scale": 1024.0}


def test_incident_with_capture() -> None:
    """NaN: the steps before are written as dumps of the ring's level, and the step after next with APIs; a configured dump is there too."""
    Path("probe.yaml").write_text(
        "strict: true\noutput_dir: out\nmonitor: {gradients: true}\nincident: {level: L0, capture_level: mix}\n"
        "dump: {level: L0, step: [0], task: tensor}\n"
    )
    net, optimizer = programs.build(lambda p: nn.SGD(p, 1e-2))
    probe = MindSporeProbe.from_config("probe.yaml")
    probe.attach(net, optimizer)
    gradient = ms.value_and_grad(lambda x: (net(x) ** 2).mean(), None, optimizer.parameters)
    for step, x in enumerate(programs.data(5)):
        probe.begin_step(step)
        if step == 2:
            net.norm.gamma.set_data(ms.Tensor(np.full(8, np.nan, np.float32)))
        loss, gradients = gradient(x)
        optimizer(gradients)
        probe.end_step({"loss": loss})
    probe.close()
    (incident,) = Path("out/incidents").glob("step2-*")
    before = json.loads((incident / "step1/rank0/dump.json").read_text())
    assert (before["level"], before["framework"]) == ("L0", "mindspore")
    assert "Cell.first.Dense.forward.0" in before["data"]
    armed = json.loads((incident / "step4/rank0/dump.json").read_text())
    assert armed["level"] == "mix"
    assert any(not name.startswith("Cell.") for name in armed["data"])
    assert list(Path("out/dump/step0").glob("*/dump_tensor_data/Cell.first.Dense.forward.0.output.0.npy"))


def test_prometheus_is_scraped() -> None:
    """A scrape while the training runs shows steps, loss and norms of this rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sinks = SinkSettings(prometheus=PrometheusSettings(enabled=True, port=port), memory=True)
    net, optimizer = programs.build(lambda p: nn.Adam(p, 1e-2))
    probe = MindSporeProbe(programs.settings(sinks, gradients=True, parameters=True))
    probe.attach(net, optimizer)
    programs.train(net, optimizer, probe, 3)
    assert probe.frames
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    probe.close()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert any(line.startswith("msprobe_step{") and float(line.split()[-1]) == 2 for line in lines)
    assert any(line.startswith("msprobe_loss") for line in lines)
    assert any(line.startswith("msprobe_grad_norm") for line in lines)


def test_files_of_all_sinks() -> None:
    """CSV, JSON lines, SQLite and TensorBoard are written, named after MindSpore's types."""
    Path("probe.yaml").write_text(
        "strict: true\noutput_dir: out\nmonitor: {gradients: true, optimizer_states: true, ops: [norm, max, nans, shape, dtype]}\n"
        "sinks: {jsonl: {enabled: true}, sqlite: {enabled: true}, tensorboard: {enabled: true}}\n"
    )
    assert load_settings("probe.yaml").sinks.sqlite.enabled
    net, optimizer = programs.build(lambda p: nn.Adam(p, 1e-2))
    probe = MindSporeProbe.from_config("probe.yaml")
    probe.attach(net, optimizer)
    programs.train(net, optimizer, probe, 2)
    probe.close()
    (table,) = Path("out/monitor").glob("*-rank0-*/exp_avg_0-99.csv")
    lines = table.read_text().splitlines()
    assert lines[0] == "vpp_stage,name,step,norm,max,nans,shape,dtype"
    assert lines[1].startswith("0,first.weight,0,")
    assert lines[1].endswith(',"[8, 6]",Float32')
    head, first, second = (json.loads(line) for line in Path("out/jsonl/rank0.jsonl").read_text().splitlines())
    assert "run" in head
    assert (first["step"], second["step"]) == (0, 1)
    for suffix in ("trend/*", "tensorboard/rank0/events.out.tfevents.*"):
        assert list(Path("out").glob(suffix)), suffix


def test_pack_of_what_the_run_was_started_with() -> None:
    """The probe writes environment, settings of the optimizer and digests of the weights beside its other files."""
    net, optimizer = programs.build(lambda p: nn.Adam(p, 1e-2))
    probe = MindSporeProbe(programs.settings(SinkSettings(), gradients=True))
    probe.attach(net, optimizer)
    programs.train(net, optimizer, probe, 1)
    probe.close()
    pack = read_pack(Path("out/config_check_pack.zip"))
    settings = pack.json(entries.of_rank("hyperparameters", 0))
    found = {name: settings[name]["value"] for name in ("optimizer.class", "optimizer.lr", "optimizer.betas", "seed")}
    assert found == {"optimizer.class": "Adam", "optimizer.lr": 0.01, "optimizer.betas": [0.9, 0.999], "seed": 11}
    assert set(pack.json(entries.of_step("weights", 0, 0))) == {p.name for p in optimizer.parameters}


def test_settings_that_change_while_the_training_runs() -> None:
    """With hot the file is followed: what is monitored changes at a step, and the hooks with it."""
    text = "strict: true\noutput_dir: out\nmonitor: {hot: true, gradients: %s, activations: %s}\nsinks: {memory: true}\n"
    Path("probe.yaml").write_text(text % ("true", "false"))
    net, optimizer = programs.build(lambda p: nn.SGD(p, 1e-2))
    probe = MindSporeProbe.from_config("probe.yaml")
    probe.attach(net, optimizer)
    gradient = ms.value_and_grad(lambda x: (net(x) ** 2).mean(), None, optimizer.parameters)
    for step, x in enumerate(programs.data(5)):
        probe.begin_step(step)
        _, gradients = gradient(x)
        optimizer(gradients)
        if step == 1:
            Path("probe.yaml").write_text(text % ("false", "true") + "# changed\n")
        probe.end_step()
    probe.close()
    families = [{sample.family for sample in frame.samples} for frame in probe.frames]
    assert families == [{"grad_reduced"}] * 2 + [{"actv"}] * 3
