"""C2: compiled code is compiled as often, and computes the same bits, as without the probe."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from msprobe_engine.workflow.doctor import Line
from msprobe_integrations.doctor.device import Device
from msprobe_integrations.doctor.model import Job
from msprobe_integrations.doctor.modes import DUMP, attach_probe

STEPS = 4
"""Windows are open in the second and third of them."""


class _Compiled(Job):
    """A job whose model, block or loss is compiled."""

    def __init__(self, device: str, part: str, options: dict[str, Any]) -> None:
        super().__init__("tiny", device)
        self._call: Callable[[torch.Tensor], torch.Tensor] = lambda ids: self.model(ids)
        self._scale: Callable[[torch.Tensor], torch.Tensor] = lambda logits: torch.tanh(logits / 30) * 30
        blocks: Any = self.model.get_submodule("blocks")
        if part == "model":
            self._call = torch.compile(self.model, **options)
        elif part == "block":
            blocks[1].compile(**options)
        elif part == "wrapped block":
            blocks[1] = torch.compile(blocks[1], **options)
        else:
            self._scale = torch.compile(self._scale, **options)

    def forward(self) -> torch.Tensor:
        logits = self._scale(self._call(self.batch[:, :-1]))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), self.batch[:, 1:].flatten())


def run(device: Device) -> Iterator[Line]:
    """One line per way of compiling: the compiler's own counters and the losses beside those without the probe."""
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        yield Line("compiled code", "skipped", why="TORCHDYNAMO_DISABLE is set")
        return
    compiler: dict[str, Any] = {"backend": "inductor" if device.full else "aot_eager"}
    whole = {**compiler, "fullgraph": True}
    cases = [("model", whole, "mix"), ("block", compiler, "mix"), ("function", compiler, "L1")]
    if device.type == "cuda":
        cases.insert(1, ("model", {"mode": "reduce-overhead"}, "L0"))
    cases += [("model", whole, "activations"), ("wrapped block", compiler, "L0")]
    for part, options, mode in cases:
        yield compare(device, part, options, mode)


def compare(device: Device, part: str, options: dict[str, Any], mode: str) -> Line:
    """A training with the probe in a mode beside two without."""
    name = f"compiled {part}, {options.get('mode') or options['backend']}, {mode}"
    try:
        (plain, expected), (again, _) = (_train(device, part, options, "off") for _ in range(2))
    except Exception as error:
        return Line(name, "skipped", why=f"fails without the probe: {type(error).__name__}: {str(error)[:200]}")
    losses, counts = _train(device, part, options, mode)
    wrong = [] if counts == expected else [f"frames, graphs and breaks after each step {counts}, without the probe {expected}"]
    repeatable = torch.equal(plain, again)
    if repeatable and not torch.equal(losses, plain):
        wrong.append("other losses")
    remark = [] if repeatable else ["two runs without the probe differ: bits were not compared"]
    return Line(name, "WRONG" if wrong else "ok", f"{counts[-1][1]} graphs", str(expected[-1][1]), "; ".join(wrong + remark))


def _train(device: Device, part: str, options: dict[str, Any], mode: str) -> tuple[torch.Tensor, list[tuple[int, int, int]]]:
    """Losses, and after each step the numbers of frames, graphs and graph breaks."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    job = _Compiled(str(device.device), part, options)
    losses, counts = [], []
    more: dict[str, Any] = {"step": [1, 2]} if mode in DUMP else {"start_step": 1, "collect_times": 2}
    with tempfile.TemporaryDirectory() as directory, attach_probe(job, mode, Path(directory), **({} if mode == "off" else more)) as step:
        for _ in range(STEPS):
            losses.append(step().clone())
            counts.append((counters["frames"]["total"], counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
    return torch.stack(losses).cpu(), counts
