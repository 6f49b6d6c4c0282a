"""A small language model on known token ids: ``python token_training.py CASES OUT``. CASES is a JSON list of [name, way, settings,
environment]; each trains in a fork of its own and writes ``OUT/{name}.bits``, a digest of losses and weights. Files: ``OUT/{name}``.

The ids are large primes apart from each other, so that finding one in a file is no accident.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import ending
import torch
from torch import nn
from torch.nn import functional

from msprobe.core.config_check import ConfigChecker
from msprobe.pytorch import PrecisionDebugger, SingleSave, TorchProbe

VOCABULARY = 120_000
IDS = tuple(108_231 + 13 * i for i in range(64))
PROMPT = "the-prompt-nobody-may-read"
OTHER_PROMPT = "\u4eca\u5929\u5929\u6c14\u5f88\u597d"
"""Letters only, so that Python takes it for a name."""
STEPS = 2


class Meta(nn.Module):
    """Takes tensors by the texts that they belong to."""

    def forward(self, hidden: torch.Tensor, meta: dict[str, Any]) -> dict[str, Any]:
        return {OTHER_PROMPT: hidden + meta[PROMPT], "rest": [{PROMPT: meta[OTHER_PROMPT][PROMPT]}]}


class Model(nn.Module):
    """Embedding, one mixing layer, scores of a few sampled words; takes ids as a tensor, positions, a text and a list, as servers do."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 2)
        self.mix = nn.Linear(2, 16)
        self.head = nn.Linear(16, 2)
        self.meta = Meta()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, prompt: str, listed: list[int], options: dict[str, Any]) -> torch.Tensor:
        seen = (ids == listed[0]).sum()
        hidden = torch.relu(self.mix(self.words(ids))) * (1 + seen)
        hidden = self.meta(hidden, {PROMPT: hidden.mean(), OTHER_PROMPT: {PROMPT: hidden.sum()}})[OTHER_PROMPT]
        short = hidden[:, -3:].clamp(max=4.0 * bool("the-prompt-nobody-may-read"))  # a text in a line that calls, which stacks show
        scores = self.head(short) @ self.words(labels[0]).T
        first = torch.index_select(self.words.weight, 0, ids[0, :3])
        places = labels[:, -3:].sub(labels[0, 0]).div(13, rounding_mode="floor").abs() % labels.shape[1]
        return functional.cross_entropy(scores.flatten(0, 1), places.flatten()) + first.sum() * len(prompt) * options["scale"]


class Loop:
    """Hands batches to the model; `around` is called with the model before, between and after steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        self.losses: list[float] = []
        self.ids = torch.tensor(IDS).reshape(2, 32)

    def step(self, number: int, scale: float = 1e-4) -> torch.Tensor:
        ids = self.ids.roll(number, 1)
        call = self.model(ids, ids.roll(-1, 1), PROMPT, list(IDS[:8]), {"scale": scale, "stop": [IDS[3]], PROMPT: IDS[4]})
        self.optimizer.zero_grad()
        call.backward()
        self.optimizer.step()
        self.losses.append(float(call))
        return ids


def debugger_run(settings: dict[str, Any], out: Path, loop: Loop) -> None:
    config = out.with_suffix(".json")
    config.write_text(json.dumps({"dump_path": str(out), **settings}))
    debugger = PrecisionDebugger(str(config))
    for number in range(STEPS):
        debugger.start(loop.model)
        ids = loop.step(number)
        if settings.get("level") == "debug":
            by_text = {OTHER_PROMPT: ids.float().mean() * 0}
            debugger.save({"ids": ids, "listed": list(IDS), "text": PROMPT, "one": IDS[5], PROMPT: by_text}, "batch", False)
        debugger.stop()
        debugger.step()


def online_run(settings: dict[str, Any], out: Path, loop: Loop) -> None:
    """Calls go to a directory that a benchmark host would read."""
    shared = out / "shared"
    shared.mkdir(parents=True)
    own = {"online_run_ut": True, "nfs_path": str(shared)}
    config = out.with_suffix(".json")
    config.write_text(json.dumps({"task": "tensor", "dump_path": str(out), "level": "L1", "tensor": own, **settings}))
    debugger = PrecisionDebugger(str(config))
    for number in range(STEPS):
        debugger.start(loop.model)
        loop.step(number)
        debugger.stop()
        debugger.step()
    debugger.run.extras.close()


def probe_run(settings: dict[str, Any], out: Path, loop: Loop) -> None:
    config = out.with_suffix(".json")
    config.write_text(json.dumps({"output_dir": str(out), **settings}))
    probe = TorchProbe.from_config(config)
    probe.attach(loop.model, loop.optimizer)
    for number in range(STEPS + 3):
        probe.begin_step(number)
        loop.step(number, 1e38 if number == STEPS else 1e-4)
        probe.end_step({"loss": loop.losses[-1]})
    probe.close()


def pack_run(_settings: dict[str, Any], out: Path, loop: Loop) -> None:
    out.mkdir(parents=True)
    checker = ConfigChecker(loop.model, None, str(out / "pack.zip"))
    for number in range(STEPS):
        loop.step(number)
    del checker


def saved_run(_settings: dict[str, Any], out: Path, loop: Loop) -> None:
    saver = SingleSave(out)
    for number in range(STEPS):
        saver.save({"ids": loop.step(number), "by_text": {PROMPT: torch.ones(2), OTHER_PROMPT: [torch.ones(2)]}})
        saver.step()


def plain_run(_settings: dict[str, Any], _out: Path, loop: Loop) -> None:
    for number in range(STEPS):
        loop.step(number)


WAYS = {"debugger": debugger_run, "online": online_run, "probe": probe_run, "pack": pack_run, "saved": saved_run, "plain": plain_run}


def train(way: str, settings: dict[str, Any], out: Path) -> str:
    """Train; what stands for the bits of it."""
    loop = Loop()
    WAYS[way](settings, out, loop)
    weights = b"".join(p.detach().numpy().tobytes() for p in loop.model.parameters())
    return hashlib.sha256(repr(loop.losses[:STEPS]).encode() + (b"" if way == "probe" else weights)).hexdigest()


def run(way: str, settings: dict[str, Any], environment: dict[str, str], target: Path) -> None:
    """One case; what a training does at its end is part of it."""
    os.environ.update(environment)
    bits = train(way, settings, target / "out")
    (target / "out.json").unlink(missing_ok=True)
    target.with_suffix(".bits").write_text(bits)


if __name__ == "__main__":
    for name, way, settings, environment in json.loads(sys.argv[1]):
        target = Path(sys.argv[2]) / name
        target.mkdir(parents=True)
        if ending.fork(lambda: run(way, settings, environment, target)):  # noqa: B023  # done when it returns
            sys.exit(f"case {name} failed")
