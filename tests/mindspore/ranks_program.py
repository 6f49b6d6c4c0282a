"""What tests look at on two ranks, one after the other: a start of msrun takes longer than all of it. Started by msrun."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import mint, nn, ops
from mindspore.communication import get_group_size, get_rank, init

from msprobe_engine.core.records import Opaque, TensorRef
from msprobe_engine.core.statistics.rows import read_row
from msprobe_integrations.mindspore.monitor.probe import MindSporeProbe

sys.path.insert(0, str(Path(__file__).parent))
import monitor_programs as programs
from ms_capturing import capture


class Model(nn.Cell):  # type: ignore[misc]
    """A layer whose output is summed over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.ar = nn.Dense(4, 4), ops.AllReduce()

    def construct(self, x: Any) -> Any:
        return self.ar(self.fc(x))


def communicate(rank: int) -> None:
    """Every kind of communication that the CPU has; what a capture has recorded is written as JSON."""
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
            return read_row(frames[0].rows[node.row]).max if node.row >= 0 else dict(node.description.extra)
        if isinstance(node, Opaque):
            return node.json.get("value")
        if isinstance(node, dict):
            return {k: plain(v) for k, v in node.items()}
        return [plain(v) for v in node] if isinstance(node, list) else node

    found = {e.name: {"tags": dict(e.tags), "parent": e.parent, **{k: plain(v) for k, v in e.sections.items()}} for e in frames[0].entries}
    Path(f"records{rank}.json").write_text(json.dumps({"records": found, "waited": waited}))


SETTINGS = """
strict: true
output_dir: out
monitor:
  gradients: true
  unreduced_gradients: true
  parameters: true
  collectives: true
  collective_inputs: true
  replica_check: {interval: 1, parameters: true, gradients: true}
rules: [{rule: nan_inf}]
sinks: {anomalies: true, jsonl: {enabled: true}}
incident: {severity: warning, level: L0, capture_level: ""}
"""


def train(rank: int, size: int) -> None:
    """Twelve steps under the monitor, each of which waits for what goes on beside it: gradients are averaged, and rank 1 changes one weight
    in step 2."""
    Path("probe.yaml").write_text(SETTINGS) if rank == 0 else None
    everybody = ms.Tensor(np.array([rank], np.float32))
    mint.distributed.all_reduce(everybody)  # the file is there
    everybody.asnumpy()
    net, optimizer = programs.build(lambda p: nn.Adam(p, 1e-2))
    probe = MindSporeProbe.from_config("probe.yaml")
    probe.attach(net, optimizer)
    mean = ops.AllReduce()
    gradient = ms.value_and_grad(lambda x: (net(x) ** 2).mean(), None, optimizer.parameters)
    for step, batch in enumerate(programs.data(12)):
        probe.begin_step(step)
        loss, gradients = gradient(batch * (1 + rank))
        gradients = tuple(mean(g) / size for g in gradients)
        if step == 2 and rank == 1:
            net.second.bias.set_data(net.second.bias + 1e-6)
        optimizer(gradients)
        total: Any = loss * 1
        handle = mint.distributed.all_reduce(total, async_op=True)
        handle.wait()
        probe.end_step({"loss": loss})
        probe.drain()
        probe.parameters.replicas.finish(60.0)  # however slow this machine is, the check of a step is over before the next one
    mint.distributed.all_reduce(everybody)
    everybody.asnumpy()  # both ranks have their answers: the first to close takes its files away
    probe.close()


if __name__ == "__main__":
    init()
    communicate(get_rank())
    train(get_rank(), get_group_size())
    print("FINISHED", get_rank(), flush=True)
