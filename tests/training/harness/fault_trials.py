"""Runs a training with one function of ours broken, to its very end, and says what came of it."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from forkpool import run_ranks
from log_lines import heard

from harness import renames
from harness.case import Training, TrainingCase
from harness.probe_faults import PACKAGES, Plant, apart, counted, ended, is_wrapper, loaded, planted
from harness.run import framework_of
from msprobe_integrations.autoload import imports

Bits = tuple[bytes, ...]
OF_GUARDS = ("msprobe_engine.core.guard", "msprobe_engine.core.log", "msprobe_engine.core.errors")
"""What says that something has failed: nothing is behind it."""


OF_USERS = (
    "msprobe_integrations.common.capture.containers",
    "msprobe_integrations.common.capture.structure",
    "msprobe_integrations.torch.tensors.containers",
    "msprobe_integrations.torch.tensors.describe",
    "msprobe_integrations.torch.tensors.structure",
)
"""What asks objects of the user's: one that cannot be described is left out, and nothing is said."""
QUIET = ("_iteration", "argument", "_asked")
"""What is asked of a framework and may have no answer."""
AT_THE_END = ("apart",)
"""What lets go of memory when all is over: without it nothing is missing that could be said."""


FOLLOWING = ("callbacks", "callback_handler")
"""Without these a training is not followed at all, which is said."""


class Job(NamedTuple):
    """A training.

    Attributes:
        train: ``(directory, whether there is a probe)`` to everything that a probe could have changed.
        ranks: processes, with a gloo group if there are several.
        calls: methods that it calls itself, as a user does: a fault in their place is not behind any guard.
        packages: what is planted in although another job calls it too, beginnings of module names.
    """

    train: Callable[[Path, bool], Bits]
    ranks: int = 1
    calls: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()


class Outcome(NamedTuple):
    """What one rank has done.

    Attributes:
        bits: of its training.
        raised: how often the fault was raised.
        said: messages of the probe.
        at_exit: what was raised when the process ended.
    """

    bits: Bits
    raised: int
    said: list[str]
    at_exit: list[str]


class Trial(NamedTuple):
    """A fault to try.

    Attributes:
        plant: the function that raises.
        after: calls that it does first.
        one_rank: only on the last rank.
    """

    plant: Plant
    after: int
    one_rank: bool


SECTIONS: dict[str, Any] = {
    "monitor": {
        **dict.fromkeys(("activations", "activation_gradients", "gradients", "unreduced_gradients", "parameters"), True),
        **dict.fromkeys(("optimizer_states", "updates", "momentum_agreement", "collectives", "collective_inputs"), True),
        "gradient_phases": ["reduced", "unscaled", "clipped"],
        "layer_features": {"linear": ["*"]},
        "ops": ["norm", "min", "max", "mean", "nans", "zeros", "kurtosis", "underflow"],
        "replica_check": {"interval": 1},
    },
    "dump": {"step": [1], "level": "mix"},
    "grad_probe": {"grad_level": "L1"},
    "rules": [{"rule": "extreme_value", "severity": "critical", "args": {"threshold": 1e-30}}],
    "incident": {"level": "L0", "capture_level": "mix", "max_incidents": 1},
}
"""Everything on, as in a settings file."""


def start_process_with_probe(place: Path, *frameworks: str, **sections: Any) -> Path:
    """A process as MSPROBE_CONFIG makes it, which is about to import these frameworks; returns the settings file."""
    file = place / "probe.json"
    file.write_text(json.dumps({"output_dir": str(place / "out"), **SECTIONS, **sections}))
    os.environ["MSPROBE_CONFIG"] = str(file)
    for name in frameworks:
        imports.before_import(name, importlib.import_module(f"msprobe_integrations.{name}.autoload").arm)
    return file


def make_job(case: TrainingCase, *packages: str, **sections: Any) -> Job:
    """A case of the harness that the environment's probe follows; `packages`, `sections`: as in `Job`, and of the settings."""

    def train(place: Path, seen: bool) -> Bits:
        framework = framework_of(case)
        if seen:
            start_process_with_probe(place, *framework.ARM, **sections)
        torch.manual_seed(1)
        bits = framework.train(Training(case, place / "run"))
        return repr(bits).encode(), torch.get_rng_state().numpy().tobytes()

    framework_of(case)  # imported before processes are forked
    return Job(train, case.ranks, packages=packages)


def outcome(job: Job, trial: Trial | None, seen: bool = True, error: BaseException | None = None) -> Outcome:
    """Train in this process, up to what the interpreter does at its end."""
    said = heard()
    printed = sys.stderr = io.StringIO()
    here = trial is not None and not (trial.one_rank and dist.is_initialized() and dist.get_rank() != dist.get_world_size() - 1)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place, contextlib.ExitStack() as stack:
        raised = stack.enter_context(planted(trial.plant, error, trial.after)) if here and trial is not None else []
        bits = job.train(Path(place), seen)
        at_exit = ended()
    said += [line for line in printed.getvalue().splitlines() if line.startswith("msprobe: ")]  # before there is a logger
    return Outcome(bits, len(raised), said, at_exit)


def of_fault(found: Outcome) -> list[str]:
    """Messages that tell of the fault."""
    return [text for text in found.said if "planted in" in text]


def outcomes(job: Job, trial: Trial | None, seen: bool = True) -> list[Outcome]:
    """Of all ranks, in a process of their own."""
    one = lambda: outcome(job, trial, seen)  # noqa: E731
    found: list[Outcome] = apart(lambda: run_ranks(job.ranks, one, timeout=240) if job.ranks > 1 else [one()])
    return found


def reached(job: Job, packages: tuple[str, ...] = PACKAGES) -> dict[Plant, int]:
    """Functions that `job` calls, and how often; what it has imported is imported here as well."""
    before = set(sys.modules)

    def names() -> list[str]:
        outcome(job, None)
        return [name for name in sys.modules if name not in before]

    def calls() -> dict[Plant, int]:
        with counted(list(loaded(packages))) as found:
            outcome(job, None)
        return found

    for name in _last(job, names):  # torch imports much at its first use: children that follow find it
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    return _last(job, calls)


def _last(job: Job, function: Callable[[], Any]) -> Any:
    """What `function` gives on the last rank, in a process of its own."""
    return apart(lambda: run_ranks(job.ranks, function, timeout=200)[-1] if job.ranks > 1 else function(), 200.0)


def trials(job: Job, calls: dict[Plant, int], known: set[Plant], stride: int = 1) -> list[Trial]:
    """A fault in each function: from its first call on or from one in the middle, on all ranks or on one.

    Args:
        job: which calls them.
        calls: how often each is called.
        known: which other jobs have tried.
        stride: one function in so many. The name of a function decides, so that neither a new one nor one that is called on some
            machines only changes which others are tried.
    """
    plants = sorted((p for p in calls if p.module not in OF_GUARDS and not is_wrapper(p)), key=str)
    mine = [p for p in plants if (p not in known or p.module.startswith(job.packages)) and f"{p.owner}.{p.name}" not in job.calls]
    drawn = [(p, draw // stride) for p in mine if (draw := zlib.crc32(str(p).encode())) % stride == 0]
    return [Trial(p, calls[p] // 4 if k % 2 else 0, job.ranks > 1 and k % 4 > 1) for p, k in drawn]


def wrong(job: Job, trial: Trial, wanted: list[Outcome]) -> list[str]:
    """Where a fault has come out: other bits, an end that is none, a part that says so more than once, nothing that is said."""
    where = f"{trial.plant} after {trial.after}{' on one rank' if trial.one_rank else ''}"
    try:
        found = outcomes(job, trial)
    except AssertionError as error:
        return [f"{where}: {error}"]
    problems: list[str] = []
    for rank, (with_it, without) in enumerate(zip(found, wanted, strict=True)):
        if with_it.bits != without.bits:
            problems.append(f"{where}: other bits on rank {rank}")
        if with_it.at_exit:
            problems.append(f"{where}: at exit: {with_it.at_exit}")
        said = of_fault(with_it)
        parts = Counter(text.partition(" training goes on")[0].partition(": Planted")[0] for text in said)
        problems += [f"{where}: said {count} times: {part}" for part, count in parts.items() if count > 1]
        if with_it.raised and not said and trial.plant.module not in OF_USERS and trial.plant.name not in (*QUIET, *AT_THE_END):
            problems.append(f"{where}: nothing was said on rank {rank}")
    return problems


def lacking(job: Job, package: str, name: str, wanted: list[Outcome]) -> list[str]:
    """What is wrong when a framework has `name` no longer: other bits, an error, or nothing that names it."""

    def train(place: Path, seen: bool) -> Bits:
        renames.rename(name, f"{name}_of_another_version", package)
        return job.train(place, seen)

    renames.functions(package)  # once, before children are forked
    try:
        found = outcomes(job._replace(train=train), None)
    except AssertionError as error:
        return [f"{name}: {error}"]
    problems = [f"{name}: other bits" for with_it, without in zip(found, wanted, strict=True) if with_it.bits != without.bits]
    for each in found:
        if name not in FOLLOWING:
            problems += [f"{name}: {text}" for text in each.said if "switched off" in text or "not follow" in text]
        if not any(name in text for text in each.said):
            problems.append(f"{name}: is not named")
    return problems


def table(found: Any) -> str:
    """Lines, for a message."""
    return "\n".join(map(str, found))
