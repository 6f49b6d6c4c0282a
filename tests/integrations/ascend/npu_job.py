"""Runs in a process of its own: the probe on a device ``npu``. Prints one line of JSON, part by part.

npu_job.py [cuda]       cuda: the trainings name the device so, after ``transfer_to_npu``
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(TESTS / "torch")]

import python_npu  # noqa: E402
import torch  # noqa: E402
from capturing import capture  # noqa: E402
from torch import nn  # noqa: E402

from msprobe_engine.core.records import Frame  # noqa: E402
from msprobe_engine.core.settings.schema import CsvSettings, IncidentSettings, MonitorSettings, ProbeSettings, SinkSettings  # noqa: E402
from msprobe_engine.core.statistics import rows  # noqa: E402
from msprobe_integrations.torch.monitor.probe import TorchProbe  # noqa: E402

MONITOR = MonitorSettings(
    activations=True,
    activation_gradients=True,
    parameters=True,
    optimizer_states=True,
    updates=True,
    gradients=True,
    unreduced_gradients=True,
    momentum_agreement=True,
    ops=("norm", "min", "max", "mean", "nans", "zeros"),
)


DEVICE = sys.argv[1] if len(sys.argv) > 1 else "npu"


class Training:
    """Three updates of one model on a device."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).to(DEVICE if device == "npu" else device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=False)
        self.x = torch.arange(8.0).reshape(2, 4).to(next(self.model.parameters()).device)

    def step(self) -> torch.Tensor:
        """One update."""
        loss = self.model(self.x).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def bits(self) -> list[str]:
        """The weights."""
        return [p.detach().cpu().numpy().tobytes().hex() for p in self.model.parameters()]


def monitored(device: str) -> tuple[list[Frame], list[str]]:
    """Frames and weights of a training under the monitor."""
    training = Training(device)
    sinks = SinkSettings(csv=CsvSettings(enabled=False), memory=True)
    settings = ProbeSettings(
        output_dir=tempfile.mkdtemp(), strict=True, monitor=MONITOR, sinks=sinks, incident=IncidentSettings(enabled=False)
    )
    probe = TorchProbe(settings)
    probe.attach(training.model, training.optimizer)
    for step in range(3):
        python_npu.flag["overflow"] = int(step > 0)
        probe.begin_step(step)
        loss = training.step()
        probe.end_step({"loss": loss})
    probe.close()
    return probe.frames, training.bits()


def monitor() -> Any:
    """Numbers of every family, on both devices."""
    out: dict[str, Any] = {"events": python_npu.EVENTS}
    for device in ("cpu", "npu"):
        frames, bits = monitored(device)
        out[device] = [
            {f"{r.source.family} {r.source.phase} {r.name}": [r.statistics.norm, r.statistics.count] for r in frame.records()}
            for frame in frames
        ]
        out[f"{device} scalars"] = [dict(frame.scalars) for frame in frames]
        out[f"{device} lost"] = [dict(frame.lost) for frame in frames]
        plain = Training(device)
        for _ in range(3):
            plain.step()
        out[f"{device} same"] = plain.bits() == bits
    return out


def dump() -> Any:
    """Records of NPU operators at level L1, however they are called."""
    import torch_npu  # type: ignore[import-not-found]

    def work() -> None:
        x = torch.ones(2, 4, device=DEVICE, requires_grad=True)
        y = torch_npu.npu_rms_norm(x, torch.ones(4, device=DEVICE))[0]
        z = torch_npu.npu_swiglu(y)
        torch.ops.npu.npu_swiglu(y)
        torch.ops.npu.npu_swiglu.default(y)
        torch_npu.npu_wrapped_swiglu(y)
        attended = torch_npu.npu_fusion_attention(x, x, x, 1)[0]
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            total = z.sum() + attended.sum()
        total.backward()

    (frame,) = capture(None, work, "L1")
    found = []
    for entry in frame.entries:
        output = entry.sections.get("output") or []
        first = output[0] if isinstance(output, list) and output else None
        mean = rows.read_row(frame.rows[first.row]).mean if first is not None and getattr(first, "row", -1) >= 0 else None
        found.append([entry.name, mean, first.description.device if first is not None else ""])
    return found


def randomness() -> Any:
    """Random states and seeds."""
    from msprobe_integrations.torch.randomness.seeds import seed_all, undo_seed_all
    from msprobe_integrations.torch.ranks.job import Job

    generator = python_npu.generator()
    state = Job().random_state()
    torch.npu.manual_seed_all(77)  # type: ignore[attr-defined]
    Job().set_random_state(state)
    again = bool(torch.equal(generator.get_state(), state["npu"][0]))
    seed_all(5)
    seeded, chosen = generator.initial_seed(), os.environ.get("HCCL_DETERMINISTIC")
    undo_seed_all()
    after = os.environ.get("HCCL_DETERMINISTIC")
    return {"kinds": sorted(state), "again": again, "seeded": seeded, "hccl": chosen, "after": after}


def tensors() -> Any:
    """Task tensor: files of tensors of the device."""
    from msprobe_integrations.torch.dump.debugger import PrecisionDebugger

    place = tempfile.mkdtemp()
    training = Training(DEVICE)
    debugger = PrecisionDebugger({"task": "tensor", "level": "L1", "dump_path": place, "tensor": {}})
    debugger.start(training.model)
    training.step()
    python_npu.late["on"] = True
    late = torch.relu(training.x).to("cpu", non_blocking=True)
    early = str(late.tolist())
    python_npu.late["on"] = False
    debugger.stop()
    debugger.step()
    debugger._at_exit()
    files = sorted(Path(place).rglob("*.pt"))
    loaded = [torch.load(f, weights_only=True) for f in files]
    first, copied = (
        next(t for f, t in zip(files, loaded) if f.name == name)
        for name in ("Functional.linear.0.forward.input.0.pt", "Tensor.to.0.forward.output.0.pt")
    )
    values = {"first": first.tolist(), "early": early, "late": copied.tolist()}
    stacks = [line for file in Path(place).rglob("stack.json") for line in file.read_text().splitlines() if "transfer_to_npu" in line]
    return {"stacks": stacks, "files": len(files), "devices": sorted({t.device.type for t in loaded}), **values}


def devices() -> Any:
    """What the config check writes down of devices and random streams."""
    from msprobe_integrations.torch.config import checker as config_random
    from msprobe_integrations.torch.config import start as config_system

    calls = config_random.TorchRandomCalls()
    calls.start()
    torch.manual_seed(3)
    torch.get_device_module(DEVICE).manual_seed(4)
    torch.rand(2)
    calls.stop()
    return {
        "devices": config_system.devices(),
        "states": sorted(config_random.states()),
        "calls": [[call["name"], call["count"]] for call in calls.record.calls()],
    }


def extremes() -> Any:
    """Rows of both devices where a power of a value does not fit float32, and of integers that do not."""
    from msprobe_engine.core.statistics import histograms
    from msprobe_integrations.torch.backend import TorchBackend

    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(5000, generator=generator)
    tensors = {f"{scale:g}": normal * scale for scale in (1e20, 1e-8, 1e-11, 1e-25)}
    tensors |= {"bf16": (normal * 1e20).bfloat16(), "fp16": normal.half()}
    tensors |= {"int64": (normal * 1e15).long() + 2**60, "uint64": (normal.abs() * 1e15).long().view(torch.uint64)}
    out: dict[str, Any] = {name: [] for name in tensors}
    for device in ("cpu", "npu"):
        backend = TorchBackend()
        backend.want_moments = True
        there = {name: one.to(device) for name, one in tensors.items()}
        refs = {name: backend.reduce(one) for name, one in there.items()}
        first = backend.histogram(there["1e-08"], "log2")
        update = backend.reduce_update("sgd", there["1e-08"], there["1e-11"], {}, {"lr": 0.01, "weight_decay": 0.1})
        assert not backend.unsupported, backend.unsupported
        data = backend.finish_step().rows()
        for name, ref in refs.items():
            one = rows.read_row(data[ref.row])
            out[name].append([one.count, one.zeros, one.max, one.min, one.mean, one.norm, one.kurtosis])
        out.setdefault("histogram", []).append(histograms.counts(data, first, "log2").tolist())
        out.setdefault("update", []).append(None if update is None else rows.read_row(data[update.row]).norm)
    return out


def formats() -> Any:
    """Tensors in a private format: rows, files, messages."""
    import torch_npu

    from msprobe_integrations.torch.backend import TorchBackend
    from msprobe_integrations.torch.tensors import describe

    backend = TorchBackend()
    plain = torch.arange(1.0, 13.0).reshape(3, 4).to(DEVICE)
    blocked = torch_npu.npu_format_cast(plain, 29)
    weight = nn.Parameter(blocked.detach())
    refs = [backend.reduce(one) for one in (plain, blocked, weight, plain)]
    pair = [backend.reduce_agreement(one, plain) for one in (plain, blocked)]
    whole = python_npu.in_private_format(torch.ones(2, 2, dtype=torch.int32).to(DEVICE))
    refused = backend.reduce(whole)
    found = backend.finish_step().rows()
    assert all(ref.row >= 0 for ref in refs + pair)
    saved = describe.resolve(weight)[0]
    return {
        "rows": [found[ref.row].tobytes().hex() for ref in refs],
        "pairs": [found[ref.row].tobytes().hex() for ref in pair],
        "same": [backend.reduce(plain).description == refs[0].description, refs[1].description == refs[0].description],
        "saved": saved.cpu().tolist() if saved is not None else None,
        "still": [torch_npu.get_npu_format(blocked), python_npu._host(blocked).unique().tolist()],
        "refused": [refused.row, sorted(backend.unsupported)],
    }


def overflow() -> Any:
    """What a device that does not saturate says of its flag: it is not asked, unless torch_npu says that it is forced to keep one."""
    from msprobe_integrations.torch.ascend.overflow import NpuOverflow

    utils = torch.npu.utils  # type: ignore[attr-defined]
    earlier, os.environ["FORCE_OVERFLOW_CHECK"] = utils.is_support_inf_nan, "1"
    python_npu.flag["overflow"] = 1
    utils.is_support_inf_nan = lambda: True
    found = [NpuOverflow().add({})]  # an older torch_npu, which knows no such variable
    for forced in (False, True):
        utils.is_force_overflow_check = lambda forced=forced: forced
        found.append(NpuOverflow().add({}))
    del utils.is_force_overflow_check, os.environ["FORCE_OVERFLOW_CHECK"]
    utils.is_support_inf_nan = earlier
    return [{name: float(value) for name, value in (one or {}).items()} for one in found]


class Offload(nn.Module):
    """Gives a tensor of the host that the device still fills, by another name than that of the copy."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Without a wait."""
        return x.to("cpu", non_blocking=True).view(-1)


def arrivals() -> Any:
    """Means of outputs at level mix where copies to the host come late."""
    buffer, half = torch.zeros(2), torch.zeros(2, dtype=torch.float16)
    waits: list[int] = []

    def work() -> None:
        x, y = torch.full((2,), 3.0).to(DEVICE), torch.full((2,), 5.0).to(DEVICE)
        python_npu.late["on"] = True
        before = python_npu.EVENTS.count("synchronize")
        kept.append(model(x))
        torch.relu(x).to("cpu", non_blocking=True)
        buffer.copy_(x, non_blocking=True)
        buffer.view(2, 1)  # never has numbers: the memory is written to before they were there
        buffer.copy_(y, True)
        half.copy_(x, non_blocking=True)  # another type: there is no tensor with these values
        waits.append(python_npu.EVENTS.count("synchronize") - before)
        python_npu.arrive()
        kept.append(torch.add(buffer, 1))
        half.copy_(y, non_blocking=True)  # does not arrive within the step
        python_npu.late["on"] = False

    kept: list[Any] = []
    model = nn.Sequential(Offload())
    (frame,) = capture(model, work, "mix")
    python_npu.arrive()
    found = {}
    for entry in frame.entries:
        output: Any = entry.sections.get("output")
        if output and ".backward" not in entry.name:
            ref = output[0]
            mean = rows.read_row(frame.rows[ref.row]).mean if ref.row >= 0 else None
            found[entry.name] = [mean, ref.description.dtype, ref.description.device, dict(ref.description.extra)]
    return {"waits": waits, "found": found}


if __name__ == "__main__":
    python_npu.install()
    if DEVICE == "cuda":
        python_npu.transfer()
    parts = (monitor, dump, randomness, tensors, devices, extremes, formats, arrivals, overflow)
    print(json.dumps({part.__name__: part() for part in parts}))
