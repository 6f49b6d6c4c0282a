"""A cell on known token ids, dumped with its tensors or monitored: ``python token_program.py SETTINGS OUT dump|monitor``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
from mindspore import nn

from msprobe.mindspore import PrecisionDebugger
from msprobe_integrations.mindspore.monitor.probe import MindSporeProbe

VOCABULARY = 120_000
IDS = tuple(108_231 + 13 * i for i in range(64))
PROMPT = "the-prompt-nobody-may-read"


class Meta(nn.Cell):
    """Takes a tensor by the text that it belongs to."""

    def construct(self, hidden: Any, by_text: Any) -> Any:
        return hidden + by_text[PROMPT]


class Model(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head, self.meta = nn.Embedding(VOCABULARY, 2), nn.Dense(2, 2), Meta()

    def construct(self, ids: Any, listed: Any) -> Any:  # noqa: ARG002 - an argument that a dump would show
        hidden = self.words(ids)
        return self.head(self.meta(hidden, {PROMPT: hidden * 2})).sum()


def dump(config: Path, model: Model, step: Any) -> Any:
    debugger = PrecisionDebugger(str(config))
    debugger.start(model)
    loss = step()
    debugger.stop()
    debugger.step()
    return loss


def monitor(config: Path, model: Model, step: Any) -> Any:
    probe = MindSporeProbe.from_config(config)
    probe.attach(model, nn.SGD(model.trainable_params(), 1e-2))
    probe.begin_step(0)
    loss = step()
    probe.end_step({"loss": loss})
    probe.close()
    return loss


if __name__ == "__main__":
    out = Path(sys.argv[2])
    out.mkdir()
    config = out.with_suffix(".json")
    where = "dump_path" if sys.argv[3] == "dump" else "output_dir"
    config.write_text(json.dumps({where: str(out), **json.loads(sys.argv[1])}))
    mindspore.set_seed(0)
    model = Model()
    gradients = mindspore.value_and_grad(model, None, model.trainable_params())

    def step() -> Any:
        return gradients(mindspore.Tensor(np.array(IDS, np.int32).reshape(2, 32)), list(IDS[:4]))[0]

    loss = {"dump": dump, "monitor": monitor}[sys.argv[3]](config, model, step)
    print("loss", float(loss).hex())
