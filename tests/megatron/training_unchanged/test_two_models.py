"""Two Megatron trainings in one process, as an actor and its critic are."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import pytest
from forkpool import run_ranks
from megatron_harness import observed, probe_settings, train_gpt

from msprobe_engine.core.settings.schema import MonitorSettings

LAYERS = {"A": 2, "B": 3}


def job(order: str, output: str) -> tuple[list[Any], list[Any]]:
    """Losses of all passes, and what each step has seen: number, modules of the capture, samples, loss."""
    observer, sink = observed(probe_settings(MonitorSettings(gradients=True), level="mix", output=output))
    known, parallel = train_gpt.known, train_gpt.state.initialize_model_parallel

    def known_but_once(make: Any, **rest: Any) -> Any:
        return known(make, **rest) if make is not parallel else None

    built = {}
    for name, layers in LAYERS.items():
        a = train_gpt.arguments(["--quiet", "--steps", "1", "--distopt", "--layers", str(layers)])
        built[name] = (a, *train_gpt.build(a)[1:])
        train_gpt.known = known_but_once
    losses = [train_gpt.train(*built[name])[0] for name in order]
    observer.close()
    frames = [(f.step, modules(f.entries), sorted(s.name for s in f.samples), f.scalars.get("loss")) for f in sink.frames]
    return losses, frames


def modules(entries: Any) -> list[str]:
    """Operators differ: the buffers that Megatron makes once, and whether gradients are clipped."""
    return sorted(entry.name for entry in entries if entry.name.startswith(("Module.", "Functional.")))


@functools.cache
def alone() -> list[Any]:
    with tempfile.TemporaryDirectory() as place:
        return run_ranks(2, job, "BB", place)


@pytest.mark.framework
@pytest.mark.parametrize("order", ["ABAB", *(pytest.param(order, marks=pytest.mark.slow) for order in ("AABB", "BABA"))])
@pytest.mark.slow
def test_the_newest_is_followed(order: str, tmp_path: Any) -> None:
    """Passes and updates of the model that was built first are in no step of the other's: each has what it has alone, with its loss."""
    both = run_ranks(2, job, order, str(tmp_path / "both"))
    steps = [at for at, name in enumerate(order) if name == "B"]
    for (_, expected), (losses, frames) in zip(alone(), both):
        assert len(frames) == len(expected) == 2
        assert [frame[:3] for frame in frames] == [frame[:3] for frame in expected]
        assert [float(frame[3]) for frame in frames] == pytest.approx([losses[at] for at in steps], rel=1e-6)
