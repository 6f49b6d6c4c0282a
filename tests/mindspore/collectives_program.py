"""Two ranks communicate in a capture: functions of mint.distributed, at once and asynchronously, and an operator in a Cell. Started by
msrun; writes what was recorded as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import mint, nn, ops
from mindspore.communication import get_rank, init

sys.path.insert(0, str(Path(__file__).parent))
from ms_capturing import capture

from msprobe_engine.records import Opaque, TensorRef
from msprobe_engine.rows import read


class Model(nn.Cell):  # type: ignore[misc]
    """A layer whose output is summed over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.ar = nn.Dense(4, 4), ops.AllReduce()

    def construct(self, x: Any) -> Any:
        return self.ar(self.fc(x))


def main() -> None:
    """Every kind of communication that the CPU has."""
    init()
    rank = get_rank()
    model, x = Model(), ms.Tensor(np.ones((2, 4), np.float32))
    waited: list[bool] = []

    def work() -> Any:
        t = ms.Tensor(np.full((2, 2), rank + 1.0, np.float32))
        mint.distributed.all_reduce(t)
        handle = mint.distributed.all_reduce(t, async_op=True)
        waited.append(not any("output" in e.sections for e in session[0].recorder.pipeline.entries if "all_reduce.1" in e.name))
        handle.wait()
        parts = [ms.Tensor(np.zeros((2, 2), np.float32)) for _ in range(2)]
        mint.distributed.all_gather(parts, t)
        left = mint.distributed.all_reduce(t, op="max", async_op=True)
        run = ms.value_and_grad(lambda x: model(x).sum(), None, model.trainable_params())
        return run(x), left

    session: list[Any] = []
    frames, _ = capture(model, work, "mix", opened=session.append)

    def plain(node: Any) -> Any:
        if isinstance(node, TensorRef):
            return read(frames[0].rows[node.row]).max if node.row >= 0 else dict(node.description.extra)
        if isinstance(node, Opaque):
            return node.json.get("value")
        if isinstance(node, dict):
            return {k: plain(v) for k, v in node.items()}
        return [plain(v) for v in node] if isinstance(node, list) else node

    found = {e.name: {"tags": dict(e.tags), "parent": e.parent, **{k: plain(v) for k, v in e.sections.items()}} for e in frames[0].entries}
    Path(f"records{rank}.json").write_text(json.dumps({"records": found, "waited": waited}))
    print("FINISHED", rank, flush=True)


if __name__ == "__main__":
    main()
