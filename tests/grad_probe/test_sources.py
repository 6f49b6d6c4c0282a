"""Gradients where the optimizer holds other tensors than the model: parts of the ranks put together are the whole."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forkpool import run_ranks
from grad_training import settings

from msprobe_engine.formats.grad_probe.read import RankFiles
from msprobe_engine.formats.grad_probe.signs import positive
from msprobe_integrations.torch.dump.debugger import PrecisionDebugger

for _name in ("megatron", "deepspeed"):
    sys.path.append(str(Path(__file__).parents[1] / _name))
pytestmark = pytest.mark.framework
_SHARD = re.compile(r"\[(\d+), (\d+)\) of (\d+)")


def wholes(path: Path, step: int = 0, ranks: int = 2) -> dict[str, np.ndarray]:
    """Parameter to ``gradient > 0``, flat, put together from the parts of the ranks; parts fit together without gap or overlap, and
    whole gradients are equal on all ranks."""
    parts: dict[str, list[tuple[int, np.ndarray]]] = {}
    sizes: dict[str, int] = {}
    for rank in range(ranks):
        place = path / f"rank{rank}"
        rows = list(csv.DictReader((place / f"grad_summary_{step}.csv").read_text("utf-8-sig").splitlines()))
        signs = RankFiles(place).step(step)
        for row in rows:
            found = signs.get(row["param_name"])
            assert found is not None
            assert found.packed is not None
            flat = positive(found.packed, int(np.prod(found.shape)))
            low, high, size = (0, len(flat), len(flat)) if not row.get("shard") else map(int, _SHARD.fullmatch(row["shard"]).groups())
            assert high - low == len(flat)
            sizes[row["param_name"]] = size
            if low < high:
                parts.setdefault(row["param_name"], []).append((low, flat))
    out = {}
    for name, found in parts.items():
        whole = [flat for low, flat in found if len(flat) == sizes[name]]
        pieces = whole[:1] if whole else [flat for _, flat in sorted(found, key=lambda f: f[0])]
        assert all(np.array_equal(w, whole[0]) for w in whole)
        out[name] = np.concatenate(pieces)
        assert len(out[name]) == sizes[name]
    return out


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    """The same parameters with (but for sums in another order) the same signs; both signs occur."""
    strip = re.compile(r"^(module\.)+")
    b = {strip.sub("", name): value for name, value in b.items()}
    a = {strip.sub("", name): value for name, value in a.items()}
    assert a.keys() == b.keys()
    total = sum(len(v) for v in a.values())
    assert sum(int((a[name] != b[name]).sum()) for name in a) <= total / 1000
    assert 0 < sum(int(v.sum()) for v in a.values()) < total


def megatron(argv: str, path: str, give: bool) -> int:
    from megatron_harness import train_gpt

    a = train_gpt.arguments(["--quiet", "--steps", "2", *argv.split()])
    _, chunks, optimizer = train_gpt.build(a)
    debugger = PrecisionDebugger(settings(Path(path)))
    debugger.monitor(chunks, optimizer if give else None)
    train_gpt.train(a, chunks, optimizer)
    debugger.stop()
    assert debugger.gradients is not None
    return debugger.gradients.step


@pytest.mark.slow
def test_megatron_distributed_optimizer(tmp_path: Path) -> None:
    """The ranges that the ranks update together are the gradients that every rank has without the distributed optimizer, whether the
    plain optimizer was given or found; a clipped gradient has the same signs."""
    for name, argv, give in (("shards", "--distopt", True), ("given", "", True), ("found", "", False)):
        assert run_ranks(2, megatron, argv, str(tmp_path / name), give) == [1, 1]
    shards, given, found = (wholes(tmp_path / name, 1) for name in ("shards", "given", "found"))
    same(shards, given)
    same(given, found)
    text = (tmp_path / "shards/rank1/grad_summary_1.csv").read_text("utf-8-sig")
    assert text.splitlines()[0].endswith(",shape,shard")


@pytest.mark.slow
def test_megatron_distributed_optimizer_has_to_be_given(tmp_path: Path) -> None:
    """Found by itself it would show gradients of which most are not reduced: that is refused, and the training goes on."""
    run_ranks(2, megatron, "--distopt", str(tmp_path), False)
    assert not list(tmp_path.rglob("*.csv"))


def deepspeed(path: str) -> list[int]:
    import deepspeed_harness as harness

    steps = []
    for stage in range(4):
        engine = harness.engine_of(harness.config(stage, "fp32"))
        PrecisionDebugger._instance = None
        debugger = PrecisionDebugger(settings(Path(path) / str(stage)))
        debugger.monitor(engine, engine.optimizer if stage == 2 else None)
        for batch in harness.batches("fp32", 2):
            engine.backward(engine(batch))
            engine.step()
        debugger.stop()
        assert debugger.gradients is not None
        steps.append(debugger.gradients.step)
    return steps


@pytest.mark.slow
def test_deepspeed_zero(tmp_path: Path) -> None:
    """Parts of ZeRO make the gradients that stage 0 has, for the engine alone and with its optimizer given."""
    pytest.importorskip("deepspeed")
    assert run_ranks(2, deepspeed, str(tmp_path)) == [[1] * 4] * 2
    for stage in (1, 2, 3):
        same(wholes(tmp_path / str(stage), 1), wholes(tmp_path / "0", 1))


def fsdp2(path: str, shard: bool) -> list[str]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    if shard:
        fully_shard(net)
    debugger: Any = PrecisionDebugger(settings(Path(path)))
    debugger.monitor(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.linspace(-1, 1, 20).view(4, 5)).square().mean().backward()
        optimizer.step()
    debugger.stop()
    return [name for name, _ in debugger.gradients._names.values()]


def test_fsdp2(tmp_path: Path) -> None:
    """Local shards of DTensors say their range and make the whole gradient."""
    for name, shard in (("shards", True), ("whole", False)):
        run_ranks(2, fsdp2, str(tmp_path / name), shard)
    same(wholes(tmp_path / "shards", 1), wholes(tmp_path / "whole", 1))
    row = next(csv.DictReader((tmp_path / "shards/rank1/grad_summary_1.csv").read_text("utf-8-sig").splitlines()))
    assert row["shard"] == "[20, 35) of 35"
