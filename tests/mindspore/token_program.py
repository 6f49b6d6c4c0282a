"""A cell on known token ids, dumped with its tensors: ``python token_program.py SETTINGS OUT``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
from mindspore import nn

from msprobe.mindspore import PrecisionDebugger

VOCABULARY = 120_000
IDS = tuple(108_231 + 13 * i for i in range(64))


class Model(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, 2), nn.Dense(2, 2)

    def construct(self, ids: Any, listed: Any) -> Any:  # noqa: ARG002 - an argument that a dump would show
        return self.head(self.words(ids)).sum()


if __name__ == "__main__":
    out = Path(sys.argv[2])
    out.mkdir()
    config = out.with_suffix(".json")
    config.write_text(json.dumps({"dump_path": str(out), **json.loads(sys.argv[1])}))
    mindspore.set_seed(0)
    model = Model()
    debugger = PrecisionDebugger(str(config))
    gradients = mindspore.value_and_grad(model, None, model.trainable_params())
    debugger.start(model)
    loss, _ = gradients(mindspore.Tensor(np.array(IDS, np.int32).reshape(2, 32)), list(IDS[:4]))
    debugger.stop()
    debugger.step()
    print("loss", float(loss).hex())
