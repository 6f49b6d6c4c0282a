"""What the monitor sees of parameters, gradients, optimizers and activations, step by step and under `Model.train`."""

from __future__ import annotations

import json
import socket
import urllib.request
from pathlib import Path
from typing import Any

import mindspore as ms
import monitor_programs as programs
import numpy as np
import pytest
from mindspore import mint, nn, ops

from msprobe_engine.config.pack.reader import read_pack
from msprobe_engine.core.records import Frame, Sample
from msprobe_engine.core.settings.load import load_settings
from msprobe_engine.core.settings.schema import PrometheusSettings, SinkSettings
from msprobe_engine.formats.dump.ring_file import read_step_file
from msprobe_engine.formats.pack import entries
from msprobe_integrations.mindspore.monitor.model_callback import ProbeCallback, _numbers
from msprobe_integrations.mindspore.monitor.probe import MindSporeProbe

OPTIMIZERS: dict[str, Any] = {
    "nn.Adam": lambda p: nn.Adam(p, 1e-2),
    "nn.AdamWeightDecay": lambda p: nn.AdamWeightDecay(p, 1e-2, weight_decay=0.1),
    "nn.Momentum": lambda p: nn.Momentum(p, 1e-2, 0.9),
    "nn.SGD": lambda p: nn.SGD(p, 1e-2, momentum=0.9),
    "nn.RMSProp": lambda p: nn.RMSProp(p, 1e-2),
    "experimental.AdamW": lambda p: ms.experimental.optim.AdamW(p, 1e-2),
    "experimental.SGD": lambda p: ms.experimental.optim.SGD(p, 1e-2, momentum=0.9),
}
EVERYTHING: dict[str, Any] = {
    "activations": True,
    "activation_gradients": True,
    "gradients": True,
    "unreduced_gradients": True,
    "parameters": True,
    "optimizer_states": True,
    "updates": True,
    "momentum_agreement": True,
}


def watched(optimizer: Any, steps: int = 3, seen: list[Any] | None = None, **monitor: Any) -> tuple[list[Frame], list[bytes]]:
    """Frames and result of a training."""
    net, optimizer = programs.build(optimizer)
    probe = MindSporeProbe(programs.settings(**monitor))
    probe.attach(net, optimizer)
    result = programs.train(net, optimizer, probe, steps, seen)
    probe.close()
    return probe.frames, result


def norms(frame: Frame, family: str) -> dict[str, float]:
    """Norm by name of a family."""
    found = {r.name: r.statistics.norm for r in frame.records() if isinstance(r.source, Sample) and r.source.family == family}
    return {name: norm for name, norm in found.items() if norm is not None}


LIKE_OTHERS = ("nn.AdamWeightDecay", "nn.SGD", "experimental.AdamW")
"""Optimizers whose code here is that of another one in the list."""


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.slow) if name in LIKE_OTHERS else name for name in OPTIMIZERS])
def run(request: Any) -> tuple[str, list[Frame], list[bytes], list[Any]]:
    """A watched training of every kind of optimizer, and what numpy has seen of it."""
    seen: list[Any] = []
    frames, result = watched(OPTIMIZERS[request.param], seen=seen, **EVERYTHING)
    return request.param, frames, result, seen


@pytest.mark.fast_cells("nn.Adam")
def test_training_is_the_same(run: Any) -> None:
    """Losses and weights have the same bits with everything watched and with nothing."""
    name, _, result, _ = run
    net, optimizer = programs.build(OPTIMIZERS[name])
    assert programs.train(net, optimizer, None) == result


@pytest.mark.fast_cells("nn.Adam", "nn.Momentum")
def test_gradients_and_parameters(run: Any) -> None:
    """Gradients (as the backward pass and as the optimizer has them) and parameters before and after are those of the training."""
    _, frames, _, seen = run
    names = [p.name for p in programs.build(OPTIMIZERS["nn.SGD"])[1].parameters]
    for frame, (gradients, before, after) in zip(frames, seen):
        for family, arrays in (
            ("grad_reduced", gradients),
            ("grad_unreduced", gradients),
            ("param_origin", before),
            ("param_updated", after),
        ):
            expected = {name: float(np.linalg.norm(array.astype(np.float64))) for name, array in zip(names, arrays)}
            assert norms(frame, family) == pytest.approx(expected, rel=1e-6), family
        assert {s.phase for s in frame.samples if s.family == "grad_unreduced"} == {"accumulated"}
        assert frame.scalars["skipped"] == 0.0
        assert frame.scalars["learning_rate"] == pytest.approx(1e-2)
        assert frame.scalars["grad_norm"] == pytest.approx(np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients)))


def test_states(run: Any) -> None:
    """Every optimizer's states are found, under the names they have elsewhere where they are the same thing."""
    name, frames, _, _ = run
    states = {s.extra.get("state", s.family) for s in frames[-1].samples if s.family in ("exp_avg", "exp_avg_sq", "opt_state")}
    expected = {"exp_avg", "exp_avg_sq"} if "Adam" in name else {"square_avg", "momentum_buffer"} if "RMS" in name else {"momentum_buffer"}
    assert expected <= states
    assert norms(frames[-1], "exp_avg" if "Adam" in name else "opt_state")


def test_activations(run: Any) -> None:
    """Inputs and outputs of every Cell and, where there is one, the gradient: named after the path, once each."""
    _, frames, _, _ = run
    forward = [s.name for s in frames[0].samples if s.family == "actv"]
    assert forward == [
        ".input", "first.input", "first.output", "norm.input", "norm.output", "second.input", "second.output", ".output"
    ]  # fmt: skip
    gradients = norms(frames[0], "actv_grad")
    assert set(gradients) == set(forward) - {".input", "first.input"}
    assert gradients["second.output"] == pytest.approx(gradients[".output"])


@pytest.mark.fast_cells("nn.Adam")
@pytest.mark.parametrize("kind", ["nn.Adam", "nn.Momentum", "nn.SGD", "nn.Adagrad", "experimental.AdamW", "experimental.SGD"])
def test_update_of_a_known_optimizer(kind: str) -> None:
    """The update of an optimizer is what the weights have moved by, over the learning rate."""
    makers = {
        **OPTIMIZERS,
        "nn.Adagrad": lambda p: nn.Adagrad(p, learning_rate=1e-2),
        "experimental.AdamW": lambda p: ms.experimental.optim.AdamW(p, 1e-2, weight_decay=0.0),
    }
    seen: list[Any] = []
    frames, _ = watched(makers[kind], seen=seen, updates=True)
    found = norms(frames[-1], "update")
    names = [p.name for p in programs.build(OPTIMIZERS["nn.SGD"])[1].parameters]
    expected = {name: float(np.linalg.norm((b - a) / 1e-2)) for name, b, a in zip(names, seen[-1][1], seen[-1][2])}
    assert found == pytest.approx(expected, rel=2e-3)


def test_micro_batches() -> None:
    """With several backward passes in a step each one's gradient has its number, and the last is not called their sum."""
    net, optimizer = programs.build(OPTIMIZERS["nn.SGD"])
    probe = MindSporeProbe(programs.settings(unreduced_gradients=True, micro_batch_gradients=True))
    probe.attach(net, optimizer)
    gradient = ms.value_and_grad(lambda x: (net(x) ** 2).mean(), None, optimizer.parameters)
    probe.begin_step(0)
    first, second = (gradient(x)[1] for x in programs.data(2))
    optimizer(tuple(a + b for a, b in zip(first, second)))
    probe.end_step()
    probe.close()
    rows = [s for s in probe.frames[0].samples if s.family == "grad_unreduced" and s.name == "second.bias"]
    assert [(s.phase, s.micro_step) for s in rows if s.micro_step >= 0] == [("local", 0), ("local", 1), ("local", 1)]
    assert not [s for s in rows if s.phase == "accumulated"]


@pytest.mark.slow
def test_hooks_are_gone_at_the_end() -> None:
    """After `close` nothing of the probe is called any more, and the classes are as they were."""
    call = nn.Cell.__call__
    net, optimizer = programs.build(OPTIMIZERS["nn.Adam"])
    probe = MindSporeProbe(programs.settings(**EVERYTHING))
    probe.attach(net, optimizer)
    programs.train(net, optimizer, probe, 2)
    probe.close()
    assert nn.Cell.__call__ is call
    assert not optimizer._forward_pre_hook
    assert not optimizer._forward_hook
    before = len(probe.pipeline.samples)
    programs.train(net, optimizer, None, 1)
    assert len(probe.pipeline.samples) == before


@pytest.mark.slow
def test_compiled_training_step_goes_on() -> None:
    """A training step that is compiled as a whole works, and gives what it gives without the probe."""

    def losses(attach: bool) -> list[bytes]:
        net, optimizer = programs.build(OPTIMIZERS["nn.Adam"])
        probe = MindSporeProbe(programs.settings(**EVERYTHING))
        if attach:
            probe.attach(net, optimizer)

        def forward(x: Any) -> Any:
            return (net(x) ** 2).mean()

        gradient = ms.value_and_grad(forward, None, optimizer.parameters)

        @ms.jit  # type: ignore[untyped-decorator]
        def step(x: Any) -> Any:
            loss, gradients = gradient(x)
            return ops.depend(loss, optimizer(gradients))

        out = []
        for i, x in enumerate(programs.data(2)):
            if attach:
                probe.begin_step(i)
            out.append(step(x).asnumpy().tobytes())
            if attach:
                probe.end_step()
        probe.close()
        return out

    assert losses(True) == losses(False)


@pytest.mark.fast_cells("nn.Adam")
@pytest.mark.parametrize("kind", ["nn.Adam", "mint"])
def test_weights_that_do_not_move(kind: str) -> None:
    """An optimizer that runs and changes no weight (mint.optim on the CPU) is said after two updates, one that works is not."""
    make = OPTIMIZERS["nn.Adam"] if kind == "nn.Adam" else lambda p: mint.optim.Adam(p, 1e-2)
    alerts: list[Any] = []
    net, optimizer = programs.build(make)
    probe = MindSporeProbe(programs.settings(gradients=True))
    probe.pipeline.listeners.append(lambda _, found: alerts.extend(found))
    probe.attach(net, optimizer)
    programs.train(net, optimizer, probe, 4)
    probe.close()
    if kind == "nn.Adam":
        assert alerts == []
    else:
        (alert,) = alerts
        assert (alert.rule, alert.step) == ("no_progress", 1)
        assert "no weight has moved" in alert.message
        assert "mindspore.nn" in alert.message


def test_nan_is_found_where_it_begins() -> None:
    """The default rule names the first tensor with NaN, in the order of the calls, and an incident is written."""
    alerts: list[Any] = []
    net, optimizer = programs.build(OPTIMIZERS["nn.SGD"])
    probe = MindSporeProbe(programs.settings(activations=True, gradients=True))
    probe.pipeline.listeners.append(lambda _, found: alerts.extend(found))
    probe.attach(net, optimizer)
    net.norm.gamma.set_data(ms.Tensor(np.full(8, np.nan, np.float32)))
    programs.train(net, optimizer, probe, 1)
    probe.close()
    first = min((a for a in alerts if a.order >= 0), key=lambda a: a.order)
    assert (first.rule, first.name) == ("nan_inf", "norm.output")


def test_only_steps_that_are_due() -> None:
    """start_step, interval and collect_times choose the steps; in the others there is nothing."""
    frames, _ = watched(OPTIMIZERS["nn.SGD"], steps=6, gradients=True, start_step=1, interval=2, collect_times=2)
    assert [frame.step for frame in frames if frame.samples] == [1, 3]


@pytest.mark.fast_cells("eager")
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_model_train(mode: str) -> None:
    """Steps are those of the loop, with their loss; in a compiled graph parameters and states are there, and no gradients. Same bits."""
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    probe = MindSporeProbe(programs.settings(gradients=True, parameters=True, optimizer_states=True, activations=True))
    weights = programs.model_train([ProbeCallback(probe)])
    assert probe.closed
    assert [frame.step for frame in probe.frames] == [0, 1, 2, 3]
    families = {sample.family for sample in probe.frames[2].samples}
    after = {"param_updated", "exp_avg", "exp_avg_sq"}
    assert families == (after if mode == "graph" else after | {"param_origin", "grad_reduced", "actv"})
    for frame in probe.frames:
        assert frame.scalars["skipped"] == 0.0
        assert 0.1 < frame.scalars["loss"] < 0.3
    assert programs.model_train([]) == weights


def test_numbers_of_a_scaled_loss() -> None:
    """A step with loss scaling gives loss, overflow and scale."""
    outputs = (ms.Tensor(1.5), ms.Tensor(True), ms.Tensor(1024.0))
    found = {name: float(value.asnumpy()) for name, value in _numbers(outputs).items()}
    assert found == {"loss": 1.5, "skipped": 1.0, "loss_scale": 1024.0}


@pytest.mark.slow
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
    before = json.loads(read_step_file(incident / "step1/rank0/dump.json", 1 << 20))
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
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
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
    lines = [json.loads(line) for line in Path("out/jsonl/rank0.jsonl").read_text().splitlines()]
    assert "run" in lines[0]
    assert [line["step"] for line in lines if "step" in line] == [0, 1]
    assert lines[-1]["run"]["ended"]["how"] == "closed"
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
