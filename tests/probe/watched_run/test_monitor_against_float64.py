"""`TorchProbe` as a monitor: what its files say against float64 references taken by the test itself."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import probe_ranks as pr
import pytest
import torch
from torch import nn

from msprobe_engine.core.settings.schema import (
    ConfigCheckSettings,
    DumpSettings,
    IncidentSettings,
    MonitorSettings,
    ProbeSettings,
    SinkSettings,
    TensorBoardSettings,
)
from msprobe_engine.probe.pending_steps import RowsEdit
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.monitor.probe import TorchProbe

pytestmark = pytest.mark.framework
EVERYTHING = MonitorSettings(
    activations=True, activation_gradients=True, unreduced_gradients=True, parameters=True, optimizer_states=True
)  # fmt: skip
Reference = dict[tuple[str, str, int], np.ndarray[Any, Any]]


class Net(nn.Module):
    """A chain, so that gradients of module outputs are those of tensors; `unused` never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 9)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(9, 4)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x)))


def settings(output: Path, monitor: MonitorSettings | None = EVERYTHING, **keys: Any) -> ProbeSettings:
    keys.setdefault("incident", IncidentSettings(enabled=False))
    return ProbeSettings(output_dir=str(output), monitor=monitor, **keys)


def loop(net: nn.Module, optimizer: torch.optim.Optimizer, probe: TorchProbe | None, steps: int, observe: Callable[..., None]) -> None:
    """A plain training loop; `observe(family, name, step, tensor)` takes references."""
    torch.manual_seed(5)
    kept: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_m: nn.Module, args: Any, out: torch.Tensor) -> None:
            out.retain_grad()
            kept[f"{name}.output"], kept[f"{name}.input"] = out, args[0]

        return hook

    for name in ("", "fc1", "act", "fc2") if probe is None else ():
        net.get_submodule(name).register_forward_hook(keep(name))
    for step in range(steps):
        if probe is not None:
            probe.begin_step(step)
        x = torch.randn(5, 6)
        loss = net(x).square().mean() * (step + 1)
        loss.backward()
        for name, tensor in kept.items():
            observe("actv", name, step, tensor)
            if tensor.grad is not None:
                observe("actv_grad", name, step, tensor.grad)
        for name, p in net.named_parameters():
            if p.grad is not None:
                observe("grad_reduced", name, step, p.grad)
                observe("grad_unreduced", name, step, p.grad)
            observe("param_origin", name, step, p)
        optimizer.step()
        for name, p in net.named_parameters():
            observe("param_updated", name, step, p)
            for moment in ("exp_avg", "exp_avg_sq"):
                if moment in optimizer.state.get(p, {}):
                    observe(moment, name, step, optimizer.state[p][moment])
        optimizer.zero_grad()
        if probe is not None:
            probe.end_step({"loss": loss})


def reference(steps: int, fused: bool) -> Reference:
    found: Reference = {}
    net, optimizer = build(fused)

    def observe(family: str, name: str, step: int, tensor: torch.Tensor) -> None:
        found[family, name, step] = tensor.detach().double().numpy().copy()

    loop(net, optimizer, None, steps, observe)
    return found


def build(fused: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    net = Net()
    return net, torch.optim.AdamW(net.parameters(), lr=0.01, fused=fused, foreach=False if fused else None)


def monitored(setup: ProbeSettings, steps: int, fused: bool) -> None:
    net, optimizer = build(fused)
    probe = TorchProbe(setup)
    probe.attach(net, optimizer)
    loop(net, optimizer, probe, steps, lambda *_: None)
    probe.close()


def read_csv(output: Path) -> dict[str, list[dict[str, str]]]:
    """Rows per family of the only rank."""
    (directory,) = (output / "monitor").iterdir()
    found: dict[str, list[dict[str, str]]] = {}
    for path in sorted(directory.glob("*.csv")):
        if path.name.startswith("scalars_"):
            continue
        with open(path, newline="") as file:
            found.setdefault(path.name.rsplit("_", 1)[0], []).extend(csv.DictReader(file))
    return found


@pytest.mark.parametrize("fused", [False, True])
def test_every_family_against_float64(tmp_path: Path, fused: bool) -> None:
    """Each row of each family equals statistics of the same tensor taken in float64 by the test; there is one row per tensor and
    step, and none for what does not exist (parameters without gradient). Fused updates are not stale."""
    pr.run(monitored, settings(tmp_path, strict=True), 3, fused, directory=tmp_path)
    (expected,) = (o.value for o in pr.run(reference, 3, fused, directory=tmp_path))
    rows = read_csv(tmp_path)
    seen = set()
    for family, lines in rows.items():
        micro = ["micro_step"] if family in ("actv", "actv_grad") else []
        phase = ["phase"] if family.startswith("grad_") else []
        assert list(lines[0]) == [
            "vpp_stage",
            "name",
            "step",
            *micro,
            "norm",
            "min",
            "max",
            "mean",
            "nans",
            "zeros",
            "shape",
            "dtype",
            *phase,
        ]
        for line in lines:
            key = (family, line["name"], int(line["step"]))
            assert key not in seen
            seen.add(key)
            x = expected[key]
            truth = {"norm": np.sqrt((x**2).sum()), "min": x.min(), "max": x.max(), "mean": x.mean(), "nans": 0, "zeros": (x == 0).mean()}
            for op, value in truth.items():
                assert float(line[op]) == pytest.approx(value, rel=1e-6, abs=1e-9), (key, op)
            assert line["shape"] == str(list(x.shape))
            assert line["dtype"] == "torch.float32"
    assert seen == set(expected)


def test_updates_through_data_are_not_stale(tmp_path: Path) -> None:
    """An optimizer that writes through `.data` leaves version counters alone; the parameter after its step is the new one."""

    class Silent(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # noqa: ARG002 - torch's signature
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.mul_(2.0)

    def job() -> None:
        net = nn.Sequential(nn.Linear(3, 3))
        optimizer = Silent(net.parameters(), lr=1.0)
        probe = TorchProbe(settings(tmp_path, MonitorSettings(gradients=False, parameters=True), strict=True))
        probe.attach(net, optimizer)
        for step in range(3):
            probe.begin_step(step)
            net(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            probe.end_step()
        probe.close()

    pr.run(job, directory=tmp_path)
    rows = read_csv(tmp_path)
    before = {(r["name"], int(r["step"])): float(r["norm"]) for r in rows["param_origin"]}
    after = {(r["name"], int(r["step"])): float(r["norm"]) for r in rows["param_updated"]}
    assert before
    for (name, step), norm in after.items():
        assert norm == pytest.approx(2 * before[name, step])
        assert (name, step + 1) not in before or before[name, step + 1] == pytest.approx(norm)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [({"interval": 3}, [0, 3, 6]), ({"start_step": 2, "interval": 2}, [2, 4, 6]), ({"start_step": 1, "collect_times": 2}, [1, 2])],
)
def test_schedule(tmp_path: Path, keys: dict[str, int], expected: list[int]) -> None:
    """start_step, interval and collect_times choose the steps that have rows, in every family."""
    setup = settings(tmp_path, MonitorSettings(activations=True, activation_gradients=True, **keys), strict=True)
    pr.run(monitored, setup, 8, False, directory=tmp_path)
    rows = read_csv(tmp_path)
    assert {"actv", "actv_grad", "grad_reduced"} <= set(rows)
    for lines in rows.values():
        assert sorted({int(r["step"]) for r in lines}) == expected


def test_rank_window(tmp_path: Path) -> None:
    """Ranks outside the window have no rows; those inside do, under their rank."""
    pr.run(monitored, settings(tmp_path, MonitorSettings(rank=(1,)), strict=True), 2, False, ranks=2, directory=tmp_path)
    with_rows = [d.name.split("-")[-2] for d in (tmp_path / "monitor").iterdir() if any(d.glob("grad_reduced_*"))]
    assert with_rows == ["rank1"]


def test_tensorboard_reads_the_series(tmp_path: Path) -> None:
    """TensorBoard's own reader returns the series of a gradient and of the loss, step by step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    setup = settings(tmp_path, MonitorSettings(), sinks=SinkSettings(tensorboard=TensorBoardSettings(enabled=True)), strict=True)
    pr.run(monitored, setup, 4, False, directory=tmp_path)
    accumulator = EventAccumulator(str(tmp_path / "tensorboard/rank0"), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()

    def series(tag: str) -> list[tuple[int, float]]:
        if tag in accumulator.Tags()["scalars"]:
            return [(e.step, e.value) for e in accumulator.Scalars(tag)]
        return [(e.step, float(np.asarray(e.tensor_proto.float_val)[0])) for e in accumulator.Tensors(tag)]

    written = [r for r in read_csv(tmp_path)["grad_reduced"] if r["name"] == "fc2.weight"]
    shown = series("0:fc2.weight/rank0/post_grad_norm")
    assert shown == [(int(r["step"]), pytest.approx(float(r["norm"]), rel=1e-6)) for r in written]
    assert [s for s, v in series("scalars/loss") if math.isfinite(v)] == [0, 1, 2, 3]


def test_dump_section(tmp_path: Path) -> None:
    """A dump section in the probe's settings writes its steps beside the monitor, and nothing marks them as unfinished."""
    from msprobe_engine.formats.dump.reader import open_dump

    setup = settings(tmp_path, MonitorSettings(), dump=DumpSettings(level="mix", step=(1, 3)), strict=True)
    pr.run(monitored, setup, 5, False, directory=tmp_path)
    dump = open_dump(tmp_path / "dump")
    assert dump.steps == [1, 3]
    assert all(dump.load(s).complete for s in dump.steps)
    assert {"Module.fc1.Linear.forward.0", "Module.fc1.Linear.backward.0", "Functional.linear.0.forward"} <= set(dump.load(3).entries)
    assert len(read_csv(tmp_path)["grad_reduced"]) == 5 * 4


def faulty(setup: ProbeSettings, broken: bool) -> dict[str, Any]:
    if broken:  # in a forked process: nothing to put back

        def reduce(_backend: Any, _tensor: Any) -> Any:
            raise RuntimeError("planted fault")

        TorchBackend.reduce = TorchBackend.reduce_unshielded = reduce  # type: ignore[method-assign]
    net, optimizer = build(False)
    probe = TorchProbe(setup)
    probe.attach(net, optimizer)
    losses: list[torch.Tensor] = []
    torch.manual_seed(5)
    for step in range(6):
        probe.begin_step(step)
        loss = net(torch.randn(5, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        probe.end_step()
    probe.close()
    return pr.state(net, losses)


def part(setup: MonitorSettings | None, level: str = "") -> dict[str, Any]:
    return {"monitor": setup, "incident": IncidentSettings(enabled=bool(level), level=level)}


@pytest.mark.fast_cells("gradients", "parameters", "states")
@pytest.mark.parametrize(
    "keys",
    [
        part(MonitorSettings()),
        part(MonitorSettings(gradients=False, parameters=True)),
        part(MonitorSettings(gradients=False, optimizer_states=True)),
        part(MonitorSettings(gradients=False, unreduced_gradients=True)),
        part(MonitorSettings(gradients=False, activations=True)),
        part(MonitorSettings(gradients=False, activation_gradients=True)),
        part(None, "L0"),
        part(None, "L1"),
        part(None, "mix"),
    ],
    ids=["gradients", "parameters", "states", "unreduced", "activations", "activation_gradients", "L0", "L1", "mix"],
)
def test_fault_in_a_hook(tmp_path: Path, keys: dict[str, Any]) -> None:
    """A fault inside a hook leaves loss, weights and random state bitwise as they are and says one line per part."""
    keys["config_check"] = ConfigCheckSettings(weights=False)  # else the part that reads them is one more
    good, bad = (pr.run(faulty, settings(tmp_path, **keys), broken, directory=tmp_path)[0] for broken in (False, True))
    assert bad.value == good.value
    said = bad.lines("planted fault")
    assert len(said) == (2 if keys["incident"].level == "mix" else 1), bad.log
    assert all("training goes on" in line for line in said)


def test_strict_raises(tmp_path: Path) -> None:
    """With strict settings the same fault reaches the training loop."""
    done = pr.run(faulty, settings(tmp_path, MonitorSettings(), strict=True), True, directory=tmp_path, fails=True)[0]
    assert done.code == 1
    assert "planted fault" in done.log


class Late(RowsEdit):
    """An edit of the rows that can be made when the test says so, as a merge that waits for another rank."""

    here = False

    def ready(self) -> bool:
        return self.here

    def apply(self, _rows: Any) -> None: ...


def test_a_step_that_waits_keeps_its_columns(tmp_path: Path) -> None:
    """Settings that change while the rows of an earlier step are on their way hold from the next step on, in the files too."""
    probe = TorchProbe(ProbeSettings(output_dir=str(tmp_path), monitor=MonitorSettings(ops=("norm",))))
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe.attach(model, optimizer)
    late = Late()
    for step in range(2):
        probe.begin_step(step)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            probe.pipeline.edit_rows(late)
        probe.end_step()
        if step == 0:
            probe.apply_monitor_settings(MonitorSettings(ops=("norm", "max")))
        late.here = True
    probe.close()
    (path,) = tmp_path.glob("monitor/*/grad_reduced_*.csv")
    with path.open(newline="") as file:
        rows = [(row["step"], row["norm"] != "nan", row["max"] != "nan") for row in csv.DictReader(file) if row["name"] == "bias"]
    assert rows == [("0", True, False), ("1", True, True)]
