"""What watching gradients costs, in units of one memory pass over them.

    python benchmarks/gradients.py --workload compute-bound

A memory pass is one read of every gradient (`torch.linalg.vector_norm` of each, float32). The added time is that of a training step with
`TorchProbe` watching reduced gradients, reduced and unreduced ones, minus a step of the same job without a probe; steps alternate.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import gpt

from msprobe.pytorch import TorchProbe


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=list(gpt.WORKLOADS), default="compute-bound")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    logging.disable(logging.WARNING)
    workload = gpt.WORKLOADS[a.workload]
    plain = gpt.Job(workload)
    plain.forward().backward()
    grads = [p.grad.clone() for p in plain.model.parameters() if p.grad is not None]
    plain.update()
    size = sum(g.numel() * g.element_size() for g in grads)
    one_pass = statistics.median(seconds(lambda: [torch.linalg.vector_norm(g) for g in grads]) for _ in range(20))
    speed = size / one_pass / 1e9
    print(f"{workload.name}: {len(grads)} gradients, {size / 1e6:.0f} MB, one memory pass {one_pass * 1e3:.2f} ms ({speed:.1f} GB/s)")
    for label, switches in (("reduced", {"gradients": True}), ("reduced and unreduced", {"gradients": True, "unreduced_gradients": True})):
        with tempfile.TemporaryDirectory() as out:
            job = gpt.Job(workload)
            probe = TorchProbe.from_config({"output_dir": out, "monitor": switches, "sinks": {"csv": {"enabled": True}}})
            probe.attach(job.model, job.optimizer)
            added, base = [], []
            for number in range(a.steps + 3):

                def step(number: int = number, job: gpt.Job = job, probe: TorchProbe = probe) -> None:
                    probe.begin_step(number)
                    job.step()
                    probe.end_step()

                pair = seconds(step), seconds(plain.step)
                if number >= 3:
                    added.append(pair[0] - pair[1])
                    base.append(pair[1])
            probe.close()
        extra, ordinary = statistics.median(added), statistics.median(base)
        passes = extra / one_pass
        print(f"  {label:24s} +{extra * 1e3:.2f} ms per step ({1 + extra / ordinary:.4f} of a step), {passes:.2f} memory passes")


if __name__ == "__main__":
    main()
