"""What the cells of Trainers in docs/integrations.md have in common: an eye on a training without a probe, what a probe has written of the
same training, and how the two are held against each other. A framework's own test has the training.
"""

from __future__ import annotations

import csv
import functools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from trainer_checks import config

from msprobe_engine.diagnose.nan_analyze import nan_analyze
from msprobe_engine.records import leaves
from msprobe_engine.rows import read
from msprobe_integrations.torch import owner

sys.path.append(str(Path(__file__).parents[2] / "examples" / "megatron"))
from fault import damaged

LEVELS = ("L0", "L1", "mix")
MONITOR = {
    "activations": True,
    "activation_gradients": True,
    "gradients": True,
    "parameters": True,
    "optimizer_states": True,
    "collectives": True,
}
DRIFT = NAN = 1
"""Step in which a parameter drifts, or a module gives NaN."""
Norms = dict[tuple[str, str], list[float]]
"""(module or operator, forward or backward) -> norms of outputs, or of their gradients, in the order in which they came."""
_SHARD = re.compile(r"\[(\d+), (\d+)\) of (\d+)")
_WRAPPERS = re.compile(r"(^|\.)(module|_fsdp_wrapped_module|_orig_mod)(?=\.)")
_DUMPED = re.compile(r"(?:Module\..+?\.(\w+)|Functional\.(\w+))\.(?:\d+\.)?(forward|backward)\b")


def chosen(layouts: Sequence[str], *sample: str) -> list[str]:
    """All of them when the table is made or everything is asked for; else the sample, which the ordinary suite has the time for."""
    every = os.environ.get("MSPROBE_TABLE") or os.environ.get("MSPROBE_EVERY_CELL") == "1"
    return [layout for layout in layouts if every or layout in sample]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part; float64."""
    tensor = tensor.detach()
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).double()


# what a training is looked at, or spoiled, with


class Eye:
    """Sees a training and leaves it alone."""

    def __init__(self) -> None:
        self.step = 0

    def begins(self, model: torch.nn.Module) -> None:
        """The model is there, and nothing is wrapped around it."""

    def updated(self) -> None:
        """The optimizer has updated it."""
        self.step += 1

    def leaves(self) -> None:
        """The training is over."""


class Spy(Eye):
    """Hooks of the test's own on modules of a kind, and on calls of the function that they call.

    Args:
        kind: end of the name of their class.
        function: of torch.nn.functional.
    """

    def __init__(self, kind: str = "Linear", function: str = "linear") -> None:
        super().__init__()
        self.kind, self.function = kind, function
        self.steps: list[Norms] = [{}]
        self.modules: list[dict[str, list[float]]] = [{}]
        """By step: name of a module -> norms of its outputs, a micro batch each."""
        self._original: Any = None
        self._handles: list[Any] = []

    def begins(self, model: torch.nn.Module) -> None:
        for name, module in model.named_modules():
            if type(module).__name__.endswith(self.kind):
                self._handles.append(module.register_forward_hook(functools.partial(self._left, name)))
        original = self._original = getattr(torch.nn.functional, self.function)

        @functools.wraps(original)
        def called(*args: Any, **kwargs: Any) -> torch.Tensor:
            output = original(*args, **kwargs)
            self._keep("operator", output)
            return output  # type: ignore[no-any-return]

        setattr(torch.nn.functional, self.function, called)

    def _left(self, name: str, module: torch.nn.Module, _args: Any, output: torch.Tensor) -> None:
        if module.training:
            self.modules[-1].setdefault(name, []).append(float(local(output).norm()))
        self._keep("module", output)

    def _keep(self, kind: str, output: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            now = self.steps[-1]
            now.setdefault((kind, "forward"), []).append(float(local(output).norm()))
            if output.requires_grad:
                output.register_hook(lambda g: now.setdefault((kind, "backward"), []).append(float(local(g).norm())) or None)

    def updated(self) -> None:
        super().updated()
        self.steps.append({})
        self.modules.append({})

    def leaves(self) -> None:
        if self._original is not None:
            setattr(torch.nn.functional, self.function, self._original)
        for handle in self._handles:
            handle.remove()
        self.steps.pop()
        self.modules.pop()


class Drift(Eye):
    """One element of a parameter is another one in step `DRIFT`, on the last rank alone: from the update before it on.

    Args:
        name: of the parameter.
        optimizer: a class that gathers the parameters again in every `step`: from the end of this step's own on.
    """

    def __init__(self, name: str, optimizer: type | None = None) -> None:
        super().__init__()
        self.name, self.optimizer = name, optimizer
        self.model: Any = None
        self._update = vars(optimizer)["step"] if optimizer is not None else None

    def begins(self, model: torch.nn.Module) -> None:
        self.model = model
        if self._update is not None:
            update, calls = self._update, [0]

            @functools.wraps(update)
            def step(*args: Any, **kwargs: Any) -> Any:
                result = update(*args, **kwargs)
                if calls[0] == DRIFT:
                    self._drift()
                calls[0] += 1
                return result

            self.optimizer.step = step  # type: ignore[union-attr]

    def updated(self) -> None:
        super().updated()
        if self.step == DRIFT and self._update is None:
            self._drift()

    def leaves(self) -> None:
        if self._update is not None:
            self.optimizer.step = self._update  # type: ignore[union-attr]

    def _drift(self) -> None:
        if rank() == dist.get_world_size() - 1:
            parameter = dict(self.model.named_parameters())[self.name].data
            (parameter.to_local() if hasattr(parameter, "to_local") else parameter).view(-1)[0] += 1


class Plant(Eye):
    """In one step a module of the last rank gives NaN, by a real operation.

    Args:
        name: of the module.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def begins(self, model: torch.nn.Module) -> None:
        module = model.get_submodule(self.name)
        forward = module.forward
        last = dist.get_world_size() - 1 if dist.is_initialized() else 0

        @functools.wraps(forward)
        def faulty(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            spoiled = self.step == NAN and torch.is_grad_enabled() and rank() == last
            return damaged(output, "log_of_negative", 3) if spoiled else output

        module.forward = faulty  # type: ignore[method-assign]


# what runs in a rank


class Row(NamedTuple):
    """A gradient of the gradient probe: elements [low, high) of all, flat."""

    norm: float
    low: int
    high: int
    size: int


class Seen(NamedTuple):
    """Of one training with a probe, in one rank."""

    bits: Any
    dump: list[Norms]
    """By step."""
    norms: dict[tuple[str, int, str], float]
    """(family, step, name) -> the first norm of the step."""
    outputs: list[dict[str, list[float]]]
    """By step: name of a module -> norms of its outputs, a micro batch each."""
    probed: list[dict[str, Row]]
    calls: list[list[dict[str, Any]]]
    """By step: the collectives, in order."""


Train = Callable[[Path | None, Eye], Any]
"""(settings file or None, eye) -> bits. Asks for the probe as the environment would; the eye is told of model and updates; who follows is
not closed."""


def rank() -> int:
    """0 without a group."""
    return dist.get_rank() if dist.is_initialized() else 0


def files(folder: Path, **more: Any) -> dict[str, Path]:
    """Settings files of the trainings: one per level with everything watched, one for replicas, one for an incident. `more`: sections."""
    found = {}
    for level in LEVELS:
        sections = {"monitor": MONITOR, "dump": {"step": [0, 1, 2], "level": level}, "grad_probe": {"grad_level": "L1"}}
        found[level] = config(folder / level, **{**sections, **more})
    alone = {"gradients": False, "replica_check": {"interval": 1}}
    sinks = {"csv": {"enabled": True}}
    found["drift"] = config(folder / "drift", monitor=alone, sinks=sinks, log_level="silent", **more)
    ring = {"level": "mix", "ring_steps": 3}
    found["fault"] = config(folder / "fault", monitor={"gradients": True}, incident=ring, log_level="silent", **more)
    return found


def watched(train: Train, given: Mapping[str, Path], spy: Spy) -> dict[str, Any]:
    """The training without a probe, spied on, and with everything watched at each level of the dump."""
    found: dict[str, Any] = {"bits": train(None, spy)}
    spy.leaves()
    found |= {"steps": spy.steps, "modules": spy.modules}
    for level in LEVELS:
        bits = train(given[level], Eye())
        found[level] = seen(bits, given[level].parent / "probe", len(spy.steps), spy.kind, spy.function)
    return found


def spoiled(train: Train, given: Mapping[str, Path], drift: Drift | None, failing: str) -> list[tuple[str, int, str]]:
    """A training in which a parameter drifts: what was said. Then one in which the module `failing` gives NaN."""
    said = []
    if drift is not None:
        train(given["drift"], drift)
        drift.leaves()
        close()
        said = alerts_in(given["drift"].parent / "probe")
    train(given["fault"], Plant(failing))
    close()
    return said


def close() -> list[Any]:
    """Whoever follows lets go; its frames, and the next training may be followed."""
    observer = owner.current()
    assert observer is not None, "nobody has followed"
    assert observer.probe is not None, "the probe was switched off"
    probe = observer.probe
    observer.close()
    owner.release()
    return probe.frames


def seen(bits: Any, output: Path, steps: int, kind: str = "Linear", function: str = "linear") -> Seen:
    """What was seen by whoever follows now, who is closed, in memory and in the files of this rank."""
    frames = close()
    norms: dict[tuple[str, int, str], float] = {}
    outputs: list[dict[str, list[float]]] = [{} for _ in range(steps)]
    for frame in frames:
        for record in frame.records():
            family = getattr(record.source, "family", None)
            if family is not None and record.statistics.norm is not None:
                norms.setdefault((family, frame.step, plain(record.name)), record.statistics.norm)
                if family == "actv" and record.name.endswith(".output"):
                    outputs[frame.step].setdefault(plain(record.name).removesuffix(".output"), []).append(record.statistics.norm)
    calls = [calls_of(frame) for frame in frames]
    return Seen(bits, dumped(output, steps, kind, function), norms, outputs, probed(output, steps), calls)


def plain(name: str) -> str:
    """Without what wrappers put before it."""
    while (shorter := _WRAPPERS.sub(r"\1", name).replace("..", ".").lstrip(".")) != name:
        name = shorter
    return name


def dumped(output: Path, steps: int, kind: str = "Linear", function: str = "linear") -> list[Norms]:
    """Modules of a kind and calls of a function in the dump of this rank, by step."""
    found = []
    for step in range(steps):
        one = f"rank{rank()}" if dist.is_initialized() else "*"
        (file,) = output.glob(f"dump/step{step}/{one}/dump.json")
        found.append(norms_of(json.loads(file.read_text())["data"], kind, function))
    return found


def norms_of(dump: Mapping[str, Any], kind: str, function: str) -> Norms:
    """The same of one dump."""
    found: Norms = {}
    for name, entry in dump.items():
        known = _DUMPED.match(name)
        if known is None or "parameters_grad" in name:
            continue
        if (known[1] or "").endswith(kind) or known[2] == function:
            place = "output" if known[3] == "forward" else "input"
            found.setdefault(("module" if known[1] else "operator", known[3]), []).append(entry[place][0]["Norm"])
    return found


def probed(output: Path, steps: int) -> list[dict[str, Row]]:
    """The gradient probe of this rank: by step, parameter -> its row."""
    found = []
    for step in range(steps):
        one = f"rank{rank()}" if dist.is_initialized() else "*"
        (file,) = output.glob(f"grad_probe/{one}/grad_summary_{step}.csv")
        rows = {}
        for row in csv.DictReader(file.read_text("utf-8-sig").splitlines()):
            size = math.prod(json.loads(row["shape"]))
            low, high, whole = map(int, _SHARD.fullmatch(row["shard"]).groups()) if row.get("shard") else (0, size, size)  # type: ignore[union-attr]
            rows[plain(row["param_name"])] = Row(float(row["norm"]), low, high, whole)
        found.append(rows)
    return found


def calls_of(frame: Any) -> list[dict[str, Any]]:
    """Collectives of a step, in order: op, reduce, ranks of the group, and count, mean and norm of what went in and came out."""
    found = []
    for entry in frame.entries:
        if entry.name.startswith("Distributed.") and entry.sections.get("output") is not None:
            op, tags = entry.name.split(".")[1], entry.tags
            call: dict[str, Any] = {"op": op, "reduce": tags.get("reduce"), "ranks": tags.get("group_ranks")}
            for place, ref in leaves(entry):
                statistics = read(frame.rows[ref.row])
                if statistics.count and statistics.norm is not None:
                    call.setdefault(place.split(".")[0], []).append((statistics.count, statistics.mean, statistics.norm))
            found.append(call)
    return found


def alerts_in(output: Path) -> list[tuple[str, int, str]]:
    """Rule, step and name of all that was said in this rank."""
    files = output.glob(f"monitor/*-rank{rank()}-*/alerts.jsonl")
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [(line["rule"], line["step"], plain(line["name"])) for line in lines]


# how it is held against each other


def check_dump(run: Sequence[Mapping[str, Any]], level: str) -> None:
    """Outputs of the modules and calls, and gradients of these outputs, are what the spy saw, in every step and rank; a level has what
    belongs to it and nothing else."""
    wanted = {"L0": {"module"}, "L1": {"operator"}, "mix": {"module", "operator"}}[level]
    for one in run:
        for norms, expected in zip(one[level].dump, one["steps"], strict=True):
            assert {kind for kind, _ in norms} == wanted
            for kind in wanted:
                assert norms[kind, "forward"] == pytest.approx(expected[kind, "forward"], rel=1e-5)
                assert sorted(norms[kind, "backward"]) == pytest.approx(sorted(expected[kind, "backward"]), rel=1e-5)


def check_activations(run: Sequence[Mapping[str, Any]], level: str = "mix") -> None:
    """Outputs of the modules are what the spy saw, in every step, micro batch and rank."""
    for one in run:
        for outputs, expected in zip(one[level].outputs, one["modules"], strict=True):
            assert expected
            for name, norms in expected.items():
                assert outputs[name] == pytest.approx(norms, rel=1e-5), name


def check_grad_probe(run: Sequence[Sequence[Mapping[str, Row]]], gradients: Sequence[Mapping[str, float]], clip: float = 0) -> None:
    """Norms are those of the whole gradients, clipped; the ranges of the ranks make up the whole.

    Args:
        run: of all ranks, by step.
        gradients: by step, parameter -> norm before it was clipped.
        clip: largest norm of all together.
    """
    for step, whole in enumerate(gradients):
        total = math.hypot(*whole.values())
        by = min(1.0, clip / (total + 1e-6)) if clip else 1.0
        assert {name for steps in run for name in steps[step]} == set(whole)
        for name, norm in whole.items():
            rows = [steps[step][name] for steps in run if name in steps[step]]
            parts = sorted({(row.low, row.high): row for row in rows if row.low < row.high}.values(), key=lambda row: row.low)
            assert [row.low for row in parts] == [0, *(row.high for row in parts[:-1])], name
            assert parts[-1].high == parts[-1].size, name
            assert math.hypot(*(row.norm for row in parts)) == pytest.approx(norm * by, rel=2e-4, abs=1e-9), name


def check_incident(folder: Path, where: int, module: str) -> None:
    """`nan_analyze` names step, rank and module of the planted fault."""
    (incident, *_) = sorted((folder / "probe" / "incidents").glob("step*"))
    first = nan_analyze(incident).findings[0]
    assert (first["step"], first["rank"], plain(first["module"])) == (NAN, where, module)


def check_drift(said: Sequence[Sequence[tuple[str, int, str]]], name: str) -> None:
    """Silent until the parameter has drifted; then it is named, and nothing else is in that step."""
    found = [(step, what) for alerts in said for rule, step, what in alerts if rule == "replica_mismatch"]
    assert found
    assert min(found) == (DRIFT, name)
    assert {what for step, what in found if step == DRIFT} == {name}
