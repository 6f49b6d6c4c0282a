"""Trains cases in forked ranks: alone under a spy, with a probe that is asked for as the environment asks, with faults.

What is imported here is imported once, in the parent; a rank takes 0.3 s to start.
"""

from __future__ import annotations

import csv
import gc
import hashlib
import importlib
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import yaml
from forkpool import run_ranks

from harness.case import Fault, Training, TrainingCase, Watcher, rank
from harness.faults import drift, nan_output
from harness.models import MODELS, Model
from harness.restored import Snapshot, snapshot
from harness.spy import Norms, Spy
from msprobe_engine.core.records import leaves
from msprobe_engine.core.statistics.rows import read_row
from msprobe_integrations.autoload import request
from msprobe_integrations.torch.training import owner

LEVELS = ("L0", "L1", "mix")
MONITOR = {
    "activations": True,
    "activation_gradients": True,
    "gradients": True,
    "gradient_phases": ["reduced", "unscaled", "clipped"],
    "parameters": True,
    "optimizer_states": True,
    "collectives": True,
}
_SHARD = re.compile(r"\[(\d+), (\d+)\) of (\d+)")
_WRAPPERS = re.compile(r"(^|\.)(module|_forward_module|_fsdp_wrapped_module|_orig_mod|net|chunk\d+)(?=\.)")
_DUMPED = re.compile(r"(?:Module\..+?\.(\w+)|Functional\.(\w+))\.(?:\d+\.)?(forward|backward)\b")


def training_case(case: TrainingCase, folder: Path, settings: Mapping[str, Any] | None = None) -> list[Any]:
    """Train a case in its ranks: the bits of each, which a probe must not change.

    Args:
        case: with its fault, if it has one.
        folder: of the settings and of what the probe writes, below ``probe``.
        settings: sections of the settings file; None: no probe.
    """
    file = None if settings is None else write_settings(folder, **settings)
    return ranks(case.ranks, lambda: train(case, folder, file)[0])


def framework_of(case: TrainingCase) -> ModuleType:
    return importlib.import_module(f"harness.frameworks.{case.framework}")


def model_of(case: TrainingCase) -> Model:
    """What a spy looks at, and where faults go."""
    return {**MODELS, **getattr(framework_of(case), "MODELS", {})}[case.model]


def drifting_of(case: TrainingCase) -> str:
    """A parameter that several ranks hold alike, and are known to."""
    return "2.bias" if case.model == "mlp" and "tp" in case.parallelism else model_of(case).drifting


def train(
    case: TrainingCase, folder: Path, file: Path | None = None, watcher: Watcher | None = None, armed: Collection[str] = ()
) -> tuple[Any, list[Any]]:
    """In a rank: its bits, and the frames of whoever has followed, who is closed. `armed`: frameworks that are armed already."""
    framework = framework_of(case)
    ask(file, *(name for name in framework.ARM if name not in armed))
    training = Training(case, folder, watcher)
    torch.manual_seed(1)
    try:
        bits = framework.train(training)
        return (bits, torch.get_rng_state().numpy().tobytes()), close() if file is not None else []
    finally:
        training.end()
        owner.release()
        request.forget()


def ask(file: Path | None, *frameworks: str) -> None:
    """As if the environment had asked for the probe when these frameworks were imported; None: nobody asks."""
    if file is None:
        return
    request.request_probe(str(file))
    for name in frameworks:
        importlib.import_module(f"msprobe_integrations.{name}.autoload").arm()


def close() -> list[Any]:
    """Whoever follows lets go; its frames."""
    observer = owner.current()
    assert observer is not None, "nobody has followed"
    assert observer.probe is not None, "the probe was switched off"
    probe = observer.probe
    observer.close()
    return probe.frames  # type: ignore[no-any-return]


def write_settings(folder: Path, **sections: Any) -> Path:
    """A settings file whose frames are kept in memory; `sections` as in probe.yaml, None leaves one out."""
    folder.mkdir(parents=True, exist_ok=True)
    text = {
        "output_dir": str(folder / "probe"),
        "strict": True,
        "log_level": "warning",
        "monitor": MONITOR,
        "sinks": {"memory": True, "csv": {"enabled": False}},
        "incident": {"enabled": False},
        **sections,
    }
    (folder / "probe.yaml").write_text(yaml.safe_dump({k: v for k, v in text.items() if v is not None}))
    return folder / "probe.yaml"


def digest(parameters: Iterable[torch.Tensor]) -> str:
    """Of all bits; of DTensors this rank's part."""
    parts = [(p.to_local() if hasattr(p, "to_local") else p).detach().contiguous().view(-1).view(torch.uint8) for p in parameters]
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()


def ranks(n: int, job: Callable[..., Any], *args: Any) -> list[Any]:
    """`job` in n forked processes: with a gloo group, or alone and without one."""
    gc.collect()
    gc.freeze()  # frameworks collect at the start of a training: not what the parent has imported
    if n > 1:
        return run_ranks(n, job, *args, timeout=240)
    context = get_context("fork")
    mine, theirs = context.Pipe(duplex=False)

    def child() -> None:
        mine.close()
        torch.set_num_threads(1)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        theirs.send(job(*args))

    process = context.Process(target=child, daemon=True)
    process.start()
    theirs.close()
    try:
        result = mine.recv() if mine.poll(240) else None
    except EOFError:
        result = None
    process.join(10)
    assert result is not None, f"the job failed, exit code {process.exitcode}; its traceback is above"
    return [result]


# everything about a case


class Row(NamedTuple):
    """A gradient of the gradient probe: elements [low, high) of all, flat."""

    norm: float
    low: int
    high: int
    size: int


class Seen(NamedTuple):
    """Of one training with a probe, in one rank.

    Attributes:
        bits: of the training.
        dump: norms by step.
        norms: (family, step, name) -> the first norm of the step; of gradients behind a scaler the unscaled one;
            those that are clipped have the family ``grad_clipped``.
        outputs: by step, name of a module -> norms of its outputs, a micro batch each.
        gradients: by step, rows of the gradient probe.
        calls: by step, the collectives in order.
        steps: their numbers, and whether they are complete.
        scalars: by step.
    """

    bits: Any
    dump: list[Norms]
    norms: dict[tuple[str, int, str], float]
    outputs: list[dict[str, list[float]]]
    gradients: list[dict[str, Row]]
    calls: list[list[dict[str, Any]]]
    steps: list[tuple[int, bool]]
    scalars: list[dict[str, float]]


class Watched(NamedTuple):
    """Of one rank.

    Attributes:
        bits: without a probe.
        spy: what it saw then.
        seen: level of the dump -> what a probe saw.
        said: alerts of the training in which a parameter drifts.
        left: what was not as before when the probe had gone.
    """

    bits: Any
    spy: dict[str, Any]
    seen: dict[str, Seen]
    said: list[tuple[str, int, str]]
    left: list[str]


def watch_case(case: TrainingCase, folder: Path, levels: Sequence[str]) -> list[Watched]:
    """All trainings that `checks.check_case` wants, one start of the ranks for all of them."""
    framework_of(case)  # imported before ranks are forked
    return ranks(case.ranks, watch_in_rank, case, folder, settings_files(case, folder, levels), levels)


def settings_files(case: TrainingCase, folder: Path, levels: Sequence[str]) -> dict[str, Path]:
    """One per level with everything watched, one for replicas, one for an incident."""
    steps = list(range(case.steps))
    found = {}
    monitor = {**MONITOR, **getattr(framework_of(case), "MONITOR", {})}
    for name, level in {**{level: level for level in levels}, "left": "mix"}.items():
        dump = {"step": steps, "level": level}
        found[name] = write_settings(folder / name, monitor=monitor, dump=dump, grad_probe={"grad_level": "L1"})
    replicas = {"gradients": False, "replica_check": {"interval": 1}}
    found["drift"] = write_settings(folder / "drift", monitor=replicas, sinks={"csv": {"enabled": True}}, log_level="silent")
    ring = {"level": "mix", "ring_steps": 3}
    found["fault"] = write_settings(folder / "fault", monitor={"gradients": True}, incident=ring, log_level="silent")
    return found


def watch_in_rank(case: TrainingCase, folder: Path, files: Mapping[str, Path], levels: Sequence[str]) -> Watched:
    model = model_of(case)
    spy = Spy(*model.spied)
    place = folder / "run"
    bits, _ = train(case, place, None, None if "compile" in case.features else spy)  # its hooks would have all compiled anew
    saw = {"steps": spy.steps, "modules": spy.modules, "sent": spy.sent, "whole": spy.whole}
    seen = {}
    for level in levels:
        found, frames = train(case, place, files[level])
        seen[level] = read_frames(case, found, frames, folder / level / "probe")
    said: list[tuple[str, int, str]] = []
    if case.replicated:
        train_faulty(case, drift(drifting_of(case)), place, files["drift"])
        said = alerts_in(folder / "drift" / "probe")
    train_faulty(case, nan_output(model.failing), place, files["fault"])
    return Watched(bits, saw, seen, said, left_behind(case, place, files["left"]))


def train_faulty(case: TrainingCase, fault: Fault, folder: Path, file: Path) -> None:
    """In a rank: with this mistake."""
    train(replace(case, fault=fault), folder, file)


LASTING = frozenset(("accelerate", "transformers", "lightning", "torchtitan"))
"""Frameworks whose classes wait for a request once they are armed."""


class _Objects(Watcher):
    """Says what differs at the objects of the loop."""

    def __init__(self) -> None:
        self.before: Snapshot | None = None

    def start(self, objects: tuple[Any, ...]) -> None:
        self.before = Snapshot(*objects, alone=True)

    def changed(self) -> list[str]:
        return [] if self.before is None else self.before.changed()


def left_behind(case: TrainingCase, folder: Path, file: Path) -> list[str]:
    """What differs after a followed training whose observer has been closed, and does not after one that nobody follows. What waits for
    trainers since their framework was armed stays for the process's life and only calls on."""
    ask(file, *LASTING.intersection(framework_of(case).ARM))
    request.forget()

    def differs(file: Path | None) -> list[str]:
        before, objects = snapshot(), _Objects()
        train(case, folder, file, objects, LASTING)
        return before.changed() + objects.changed()

    plain = {place_of(line) for line in [*differs(None), *differs(None)]}
    return [line for line in differs(file) if place_of(line) not in plain]


def place_of(line: str) -> str:
    """What a line of `Snapshot.changed` is about, without the numbers of objects."""
    return re.sub("#[0-9a-f]+", "", line.partition(": ")[0])


def read_frames(case: TrainingCase, bits: Any, frames: list[Any], output: Path) -> Seen:
    """What a probe has in memory and in the files of this rank."""
    norms: dict[tuple[str, int, str], float] = {}
    outputs: list[dict[str, list[float]]] = [{} for _ in frames]
    for number, frame in enumerate(frames):
        for record in frame.records():
            family, norm = getattr(record.source, "family", None), record.statistics.norm
            if family is None or norm is None:
                continue
            if record.source.phase == "unscaled":
                norms[family, frame.step, plain(record.name)] = norm
            if record.source.phase == "clipped":
                family = "grad_clipped"
            norms.setdefault((family, frame.step, plain(record.name)), norm)
            if family == "actv" and record.name.endswith(".output"):
                outputs[number].setdefault(plain(record.name).removesuffix(".output"), []).append(norm)
    spied = model_of(case).spied
    return Seen(
        bits,
        [
            norms_in_dump(json.loads(of_rank(output, f"dump/step{frame.step}/{{}}/dump.json").read_text())["data"], *spied)
            for frame in frames
        ],
        norms,
        outputs,
        [gradient_rows(of_rank(output, f"grad_probe/{{}}/grad_summary_{frame.step}.csv")) for frame in frames],
        [collectives_of(frame) for frame in frames],
        [(frame.step, frame.complete) for frame in frames],
        [dict(frame.scalars) for frame in frames],
    )


def of_rank(output: Path, pattern: str) -> Path:
    """The one file of this rank; alone a process may have any directory."""
    single = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
    (file,) = output.glob(pattern.format("*" if single else f"rank{rank()}"))
    return file


def plain(name: str) -> str:
    """Without what wrappers put before it."""
    while (shorter := _WRAPPERS.sub(r"\1", name).replace("..", ".").lstrip(".")) != name:
        name = shorter
    return name


def norms_in_dump(dump: Mapping[str, Any], kind: str, function: str) -> Norms:
    """Modules of a kind and calls of a function in a dump."""
    found: Norms = {}
    for name, entry in dump.items():
        known = _DUMPED.match(name)
        if known is None or "parameters_grad" in name:
            continue
        if (known[1] or "").endswith(kind) or known[2] == function:
            place = "output" if known[3] == "forward" else "input"
            found.setdefault(("module" if known[1] else "operator", known[3]), []).append(entry[place][0]["Norm"])
    return found


def gradient_rows(file: Path) -> dict[str, Row]:
    """The gradient probe of one step: parameter -> its row."""
    rows = {}
    for row in csv.DictReader(file.read_text("utf-8-sig").splitlines()):
        low, high, whole = elements(row.get("shard") or "", math.prod(json.loads(row["shape"])))
        rows[plain(row["param_name"])] = Row(float(row["norm"]), low, high, whole)
    return rows


def elements(shard: str, size: int) -> tuple[int, int, int]:
    """First and last element of all; blocks are counted band by band, so that those of a grid lie one behind the other."""
    if not shard:
        return 0, size, size
    flat = _SHARD.fullmatch(shard)
    if flat is not None:
        return int(flat[1]), int(flat[2]), int(flat[3])
    local, offset, whole = (json.loads(f"[{found}]") for found in re.findall(r"\[([\d, ]*)\]", shard)[:3])
    low = sum(offset[d] * math.prod(local[:d]) * math.prod(whole[d + 1 :]) for d in range(len(whole)))
    return low, low + math.prod(local), math.prod(whole)


def collectives_of(frame: Any) -> list[dict[str, Any]]:
    """Collectives of a step, in order: op, reduce, ranks of the group, and count, mean and norm of what went in and came out."""
    found = []
    for entry in frame.entries:
        if entry.name.startswith("Distributed.") and entry.sections.get("output") is not None:
            op, tags = entry.name.split(".")[1], entry.tags
            call: dict[str, Any] = {"op": op, "reduce": tags.get("reduce"), "ranks": tags.get("group_ranks")}
            for place, ref in leaves(entry):
                statistics = read_row(frame.rows[ref.row])
                if ref.row >= 0 and statistics.count and statistics.norm is not None:
                    call.setdefault(place.split(".")[0], []).append((statistics.count, statistics.mean, statistics.norm))
            found.append(call)
    return found


def alerts_in(output: Path) -> list[tuple[str, int, str]]:
    """Rule, step and name of all that was said in this rank."""
    files = output.glob(f"monitor/*-rank{rank()}-*/alerts.jsonl")
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [(line["rule"], line["step"], plain(line["name"])) for line in lines]
