"""What the cells of Trainers in docs/integrations.md have in common: an eye on a training without a probe, what a probe has written of the
same training, and how the two are held against each other. A framework's own test has the training.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from trainer_checks import compare, config
from trainer_eyes import DRIFT, NAN, Drift, Eye, Norms, Plant, Spy, rank

from msprobe_engine.diagnose.nan_analyze import nan_analyze
from msprobe_engine.records import leaves
from msprobe_engine.rows import read
from msprobe_integrations.torch import owner

LEVELS = ("L0", "L1", "mix")
MONITOR = {
    "activations": True,
    "activation_gradients": True,
    "gradients": True,
    "parameters": True,
    "optimizer_states": True,
    "collectives": True,
}
_SHARD = re.compile(r"\[(\d+), (\d+)\) of (\d+)")
_WRAPPERS = re.compile(r"(^|\.)(module|_fsdp_wrapped_module|_orig_mod)(?=\.)")
_DUMPED = re.compile(r"(?:Module\..+?\.(\w+)|Functional\.(\w+))\.(?:\d+\.)?(forward|backward)\b")


def chosen(layouts: Sequence[str], *sample: str) -> list[str]:
    """All of them when the table is made or everything is asked for; else the sample, which the ordinary suite has the time for."""
    every = os.environ.get("MSPROBE_TABLE") or os.environ.get("MSPROBE_EVERY_CELL") == "1"
    return [layout for layout in layouts if every or layout in sample]


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
            low, high, whole = elements(row.get("shard") or "", math.prod(json.loads(row["shape"])))
            rows[plain(row["param_name"])] = Row(float(row["norm"]), low, high, whole)
        found.append(rows)
    return found


def elements(shard: str, size: int) -> tuple[int, int, int]:
    """First and last element of all, as `check_grad_probe` wants them; of a block of columns as if it were one of rows."""
    if not shard:
        return 0, size, size
    flat = _SHARD.fullmatch(shard)
    if flat is not None:
        return int(flat[1]), int(flat[2]), int(flat[3])
    local, offset, whole = (json.loads(f"[{found}]") for found in re.findall(r"\[([\d, ]*)\]", shard)[:3])
    at = next((d for d in range(len(whole)) if local[d] != whole[d]), 0)
    per = math.prod(whole) // whole[at]
    return offset[at] * per, (offset[at] + local[at]) * per, math.prod(whole)


def calls_of(frame: Any) -> list[dict[str, Any]]:
    """Collectives of a step, in order: op, reduce, ranks of the group, and count, mean and norm of what went in and came out."""
    found = []
    for entry in frame.entries:
        if entry.name.startswith("Distributed.") and entry.sections.get("output") is not None:
            op, tags = entry.name.split(".")[1], entry.tags
            call: dict[str, Any] = {"op": op, "reduce": tags.get("reduce"), "ranks": tags.get("group_ranks")}
            for place, ref in leaves(entry):
                statistics = read(frame.rows[ref.row])
                if ref.row >= 0 and statistics.count and statistics.norm is not None:
                    call.setdefault(place.split(".")[0], []).append((statistics.count, statistics.mean, statistics.norm))
            found.append(call)
    return found


def alerts_in(output: Path) -> list[tuple[str, int, str]]:
    """Rule, step and name of all that was said in this rank."""
    files = output.glob(f"monitor/*-rank{rank()}-*/alerts.jsonl")
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [(line["rule"], line["step"], plain(line["name"])) for line in lines]


def place_of(line: str) -> str:
    """What a line of `restored.Snapshot.changed` is about, without the numbers of objects."""
    return re.sub("#[0-9a-f]+", "", line.partition(": ")[0])


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


def check_collectives(run: Sequence[Sequence[Sequence[dict[str, Any]]]], *ops: str) -> None:
    """What came out of sums, gathered and scattered tensors is what the ranks of the group put in; each of `ops` has been seen.

    Args:
        run: of all ranks, by step.
    """
    checked = dict.fromkeys(ops, 0)
    for steps in zip(*run, strict=True):
        for calls in zip(*steps, strict=True):
            assert len({(call["op"], call["reduce"]) for call in calls}) == 1
            if not all("output" in call and ("input" in call or "kwargs" in call) for call in calls):
                continue
            inputs = [(call.get("input") or call["kwargs"])[0] for call in calls]
            outputs = [call["output"][0] for call in calls]
            by = len(calls) if calls[0]["reduce"] == "avg" else 1
            slack = 1e-5 * sum(norm for _, _, norm in inputs)
            if "all_reduce" in calls[0]["op"] and calls[0]["reduce"] in ("sum", "avg"):
                total = sum(mean for _, mean, _ in inputs) / by
                assert [mean for _, mean, _ in outputs] == [pytest.approx(total, rel=1e-5, abs=slack)] * len(calls)
            elif "reduce_scatter" in calls[0]["op"]:
                total = sum(count * mean for count, mean, _ in inputs) / by
                assert sum(count * mean for count, mean, _ in outputs) == pytest.approx(total, rel=1e-5, abs=slack)
            elif "all_gather" in calls[0]["op"]:
                whole = math.hypot(*(norm for _, _, norm in inputs))
                assert [norm for _, _, norm in outputs] == [pytest.approx(whole, rel=1e-5)] * len(calls)
            else:
                continue
            for op in ops:
                checked[op] += op in calls[0]["op"]
    assert all(checked.values()), checked


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


def proven(
    run: Sequence[Mapping[str, Any]], place: Path, reference: Mapping[Any, float], clip: float, failing: str, *ops: str
) -> list[str]:
    """Hold everything that `watched` and `spoiled` gave against the spy and the training by hand; the features that this proves.

    Args:
        run: of all ranks.
        place: where their settings are.
        reference: as `by_hand` gives it, with gradients before they are clipped to a norm of `clip`.
        ops: collectives that there must be.
    """
    for level in LEVELS:
        check_dump(run, level)
        assert [one[level].bits for one in run] == [one["bits"] for one in run], level
    check_activations(run)
    for one in run:
        assert compare(one["mix"].norms, reference) == len(reference)
    steps = range(len(run[0]["steps"]))
    gradients = [{name: norm for (family, at, name), norm in reference.items() if (family, at) == ("grad_reduced", step)} for step in steps]
    check_grad_probe([one["mix"].probed for one in run], gradients, clip)
    check_incident(place / "fault", len(run) - 1, failing)
    monitor = [f"monitor: {name}" for name in ("activations", "gradients", "parameters", "optimizer")]
    features = [*(f"dump {level}" for level in LEVELS), *monitor, "grad probe", "incident capture", "same bits"]
    if len(run) > 1:
        check_collectives([one["mix"].calls for one in run], *ops)
        features.append("collectives")
    return features
