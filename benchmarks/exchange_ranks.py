"""What the exchange costs a rank, among real processes on this machine: files, threads, and CPU time per step.

    python benchmarks/exchange_ranks.py --ranks 16 48

Every rank merges 130 rows, compares the digests of 2,000 tensors and puts 3 numbers beside those of the others, among all ranks, in each
step; between steps it sleeps, so that the CPU time is that of the exchange. Files and threads are those above what the process had before.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from msprobe_engine.core.statistics import rows as R
from msprobe_integrations.torch.ranks.merge import RowExchange
from msprobe_integrations.torch.ranks.replica_channel import Channel

ROWS, DIGESTS, NUMBERS = 130, 2000, 3


class Figures(NamedTuple):
    """Of one rank.

    Attributes:
        cpu_ms: of a step, all threads.
        own_ms: the most CPU time that its training spent in a step on giving numbers away and looking at answers; it waits for nothing.
        answered: steps whose answers have come.
    """

    files: int
    threads: int
    start_ms: float
    cpu_ms: float
    own_ms: float
    answered: int


def run_rank(rank: int, ranks: int, init: str, steps: int, pause: float, answers: Any) -> None:
    """One rank, in a process of its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{init}", rank=rank, world_size=ranks)
    before, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    began = time.process_time()
    rows = RowExchange(), RowExchange(purpose="outliers")
    channel = Channel(range(ranks), [str(i) for i in range(DIGESTS)])
    while not all(exchange.connected for exchange in (*rows, channel)):
        time.sleep(0.01)
    start = time.process_time() - began
    dist.barrier()
    answered, held, merges = 0, 0.0, []
    mine, digests, known = R.empty(ROWS), np.arange(DIGESTS), np.ones(DIGESTS, bool)
    began = time.process_time()
    for step in range(steps):
        begin = time.thread_time()
        for exchange, count in zip(rows, (ROWS, NUMBERS * min(ranks, 64))):
            merge = exchange.merge(step, ["a"], range(min(count, ROWS)))
            merge.start(mine)
            merges.append(merge)
        channel.submit(step, digests, known, lambda _: None)
        channel.poll()
        held = max(held, time.thread_time() - begin)
        time.sleep(pause)
    for merge in merges:
        merge.wait(30)
        answered += merge.merged is not None
    cpu = (time.process_time() - began) / steps
    files, now = len(os.listdir("/proc/self/fd")) - before, len(os.listdir("/proc/self/task")) - threads
    assert threading.active_count() >= now
    answers.put(tuple(Figures(files, now, start * 1e3, cpu * 1e3, held * 1e3, answered // 2)))
    dist.barrier()
    for exchange in (*rows, channel):
        exchange.close()
    dist.barrier()


def measure(ranks: int, steps: int, pause: float) -> list[Figures]:
    """Of so many ranks."""
    context = multiprocessing.get_context("fork")
    answers: Any = context.Queue()
    with tempfile.TemporaryDirectory() as place:
        processes = [context.Process(target=run_rank, args=(rank, ranks, f"{place}/init", steps, pause, answers)) for rank in range(ranks)]
        for process in processes:
            process.start()
        figures = [Figures(*answers.get(timeout=600)) for _ in range(ranks)]
        for process in processes:
            process.join(60)
    return figures


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 48])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between steps")
    options = parser.parse_args()
    print(f"{'ranks':>6}{'files':>12}{'threads':>9}{'start ms':>10}{'CPU ms/step':>14}{'busiest':>9}{'own ms':>9}{'answered':>10}")
    for ranks in options.ranks:
        figures = measure(ranks, options.steps, options.pause)
        files = sorted(one.files for one in figures)
        cpu = [one.cpu_ms for one in figures]
        print(
            f"{ranks:6}{f'{files[len(files) // 2]} to {files[-1]}':>12}{max(one.threads for one in figures):9}"
            f"{statistics.mean(one.start_ms for one in figures):10.1f}{statistics.mean(cpu):14.2f}{max(cpu):9.2f}"
            f"{max(one.own_ms for one in figures):9.2f}{min(one.answered for one in figures):10}",
            flush=True,
        )


if __name__ == "__main__":
    main()
