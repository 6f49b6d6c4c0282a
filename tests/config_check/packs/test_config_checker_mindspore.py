"""`ConfigChecker` for MindSpore, in the environment that MINDSPORE_ENVIRONMENT names; without one only what needs no MindSpore."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from msprobe_engine.config.pack.reader import read_pack
from msprobe_integrations.config_checker import ConfigChecker

ROOT = Path(__file__).parents[3]
SCRIPT = """
import json, os, sys, random
import mindspore as ms, mindspore.nn as nn, numpy as np
from mindspore.ops import randn
from msprobe.core.config_check import ConfigChecker
for job in json.loads(sys.argv[1]):  # each in a process of its own, which need not import MindSpore again
    print("JOB", flush=True)
    child = os.fork()
    if not child: break
    if os.waitpid(child, 0)[1]: sys.exit(1)
else: sys.exit(0)
pack, seed, mode, *more = job
ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
ConfigChecker.apply_patches("mindspore")
ConfigChecker.apply_patches("mindspore")
ms.set_seed(int(seed))
assert ms.ops.rand(2).shape == (2,) and randn(2, 3).shape == (2, 3)
net = nn.SequentialCell(nn.Dense(3, 4), nn.Dense(4, 1))
weights = np.arange(12, dtype=np.float32).reshape(4, 3)
weights[1, 2] += float(more[0]) if more else 0
net[0].weight.set_data(ms.Tensor(weights))
net[1].weight.set_data(ms.Tensor(np.ones((1, 4), np.float32)))
for dense in net: dense.bias.set_data(ms.Tensor(np.zeros(dense.bias.shape, np.float32)))
net.set_train()
checker = ConfigChecker([net], None, pack, fmk="mindspore")
for _ in range(3): out = net(ms.Tensor(np.ones((2, 3), np.float32)))
checker.close()
assert not hasattr(ms.ops.rand, "__wrapped__") and not hasattr(randn, "__wrapped__")
print("RESULT", out.asnumpy().tolist())
try: ConfigChecker("net", None, pack, fmk="mindspore")
except Exception as error: print(type(error).__name__, error)
"""


JOBS = (("a.zip", "1", "pynative"), ("b.zip", "2", "pynative", "0.5"), ("graph.zip", "1", "graph"))


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Where the packs of all jobs are, and what each job has said."""
    python, place = Path(os.environ["MINDSPORE_ENVIRONMENT"]) / "bin" / "python", tmp_path_factory.mktemp("packs")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [python, "-c", SCRIPT, json.dumps(JOBS)]
    done = subprocess.run(
        command, cwd=place, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return place, done.stdout.split("JOB\n")[1:]


@pytest.mark.slow
@pytest.mark.skipif("MINDSPORE_ENVIRONMENT" not in os.environ, reason="MINDSPORE_ENVIRONMENT names no environment with mindspore")
def test_packs_of_mindspore(packs: tuple[Path, list[str]], tmp_path: Path) -> None:
    """Weights and inputs by digest and statistics, seeds and random calls; two packs differ in what was planted; the random functions
    take their own arguments and are put back."""
    place, (said, *_) = packs
    assert "RESULT [[66.0], [66.0]]" in said
    assert "UsageError ConfigChecker: model is str" in said
    pack = read_pack(place / "a.zip")
    assert pack.meta["framework"] == "mindspore"
    assert pack.json("weights/step0/rank0/weight.json")["0.weight"]["max"] == 11.0
    assert pack.json("msprobe/dataset/step0/rank0.json")["args.0"]["samples"]
    names = {one["name"] for one in pack.json("msprobe/random/rank0.json")["calls"]}
    assert {"mindspore.set_seed", "mindspore.ops.rand", "mindspore.ops.randn"} <= names
    found = ConfigChecker.compare(place / "a.zip", place / "b.zip", tmp_path / "out", "mindspore").as_json()["differences"]
    assert {(one["sheet"], one["name"]) for one in found} >= {
        ("weights", "0.weight"),
        ("random", "mindspore.set_seed"),
        ("hyperparameters", "seed"),
    }
    assert not any(one["sheet"] == "weights" and one["name"] != "0.weight" for one in found)


@pytest.mark.slow
@pytest.mark.skipif("MINDSPORE_ENVIRONMENT" not in os.environ, reason="MINDSPORE_ENVIRONMENT names no environment with mindspore")
def test_graph_mode_says_what_it_cannot_see(packs: tuple[Path, list[str]]) -> None:
    """Compiled cells have no hooks: weights are there, inputs are not, and the training runs."""
    place, (*_, said) = packs
    assert "in graph mode forward passes are not seen" in said
    pack = read_pack(place / "graph.zip")
    assert pack.by_step("weights")
    assert not pack.by_step("dataset")


def test_functions_are_put_back_as_they_were() -> None:
    """A name that somebody else has changed since stays; inherited ones are inherited again; early imports follow."""
    import sys
    from types import ModuleType

    from msprobe_integrations.patching import Patches

    class Base:
        def f(self) -> int:
            return 1

    class Child(Base):
        def g(self) -> int:
            return 2

    late = ModuleType("late_user")
    late.taken = Child.g  # type: ignore[attr-defined]
    sys.modules["late_user"] = late
    try:
        replaced = Patches()
        replaced.wrap(Child, "f", lambda original: lambda self: original(self) + 10)
        replaced.wrap(Child, "g", lambda original: lambda self: original(self) + 10)
        replaced.wrap(Child, "absent", lambda original: original)
        replaced.early_imports()
        assert (Child().f(), Child().g(), late.taken(Child())) == (11, 12, 12)
        mine = Child.g = lambda self: 99  # type: ignore[method-assign,assignment]  # noqa: ARG005
        replaced.undo()
        assert Child.g is mine
        assert "f" not in vars(Child)
        assert late.taken(Child()) == 2
        assert not replaced
    finally:
        del sys.modules["late_user"]
