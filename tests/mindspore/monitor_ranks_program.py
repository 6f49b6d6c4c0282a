"""Two ranks train the same network: gradients are averaged, and rank 1 changes one weight in step 2. Started by msrun."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import mint, nn, ops
from mindspore.communication import get_group_size, get_rank, init

from msprobe_integrations.mindspore.probe import MindSporeProbe

sys.path.insert(0, str(Path(__file__).parent))
import monitor_programs as programs

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


def main() -> None:
    """Twelve steps, each of which waits for what goes on beside it."""
    init()
    rank, size = get_rank(), get_group_size()
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
    print("FINISHED", rank, flush=True)


if __name__ == "__main__":
    main()
