"""The whole way of the online pre-check: from the hooks of a training into the spool of a benchmark host, against a plain socket copy.

    python benchmarks/online_training.py
    python benchmarks/online_training.py --network 125 --sizes 65536 1048576

Training and benchmark host are two processes on loopback. The training is a chain of additions and multiplications of tensors of one size,
forward and backward, so that there is as little of itself in it as can be. The host writes everything into a spool on the local disk,
acknowledges it, and counts it as checked without checking. Time is from the first call of a step until the host has all of them; two
steps before that are sent and not measured. A copy is ``sendall`` of as many bytes, a MiB at a time. CPU of the training is what it needs
beyond a run without the probe; with other programs on the machine it says more than the times. `--network` holds both to so many MB/s
(TCP pacing).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from online import HOST, Copy, start

from msprobe_engine.accuracy.online.events import Peer
from msprobe_engine.accuracy.online.options import Address, ServerOptions
from msprobe_engine.accuracy.online.queue_dir.spool import Spool
from msprobe_engine.accuracy.online.tcp.server import Server

WARM = 2
SO_MAX_PACING_RATE = 47
_CHUNK = 1 << 20


class Round(NamedTuple):
    """One run: bytes that arrived, seconds, messages, and CPU seconds of the training (beyond a plain one) and of the host."""

    nbytes: int
    seconds: float
    messages: int
    training: float
    host: float


def receive(pipe: Connection, root: Path) -> None:
    """A host that checks nothing. Answers with its CPU seconds, bytes and messages of all trainings, and how many have ended."""
    spool = Spool(root / "spool")

    def take(peer: Peer, header: Mapping[str, Any], payload: memoryview) -> None:
        for call in spool.add(peer, header, payload):
            spool.mark_checked(call)
        spool.finished.clear()

    server = Server(Address(HOST, 0), take, ServerOptions(), lambda event: print(event.message) if event.bad else None, spool.last)
    pipe.send(server.port)
    while True:
        pipe.recv()
        states = server.sessions()
        ended = sum(state.final is not None for state in states)
        pipe.send((time.process_time(), sum(state.bytes for state in states), sum(state.received for state in states), ended))


def train(pipe: Connection, host: Connection, config: Path, size: int, calls: int, steps: int, network: int) -> None:
    """One training; sends a `Round`."""
    pace(network)
    import torch

    from msprobe.pytorch import PrecisionDebugger

    torch.set_num_threads(1)

    class Chain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i in range(calls):
                x = torch.mul(x, self.weight) if i % 2 else torch.add(x, self.weight)
            return x

    model, x = Chain(), torch.randn(size // 256, 64)

    def step() -> None:
        model(x).sum().backward()
        model.weight.grad = None

    def ask() -> tuple[float, int, int, int]:
        host.send(0)
        found: tuple[float, int, int, int] = host.recv()
        return found

    def settled() -> tuple[float, int, int, int]:
        before = ask()
        while True:
            time.sleep(0.5)
            now = ask()
            if now[1] == before[1]:
                return now
            before = now

    for _ in range(WARM):
        step()
    used = time.process_time()
    for _ in range(steps):
        step()
    plain = time.process_time() - used
    ended = ask()[3]
    debugger = PrecisionDebugger(str(config))
    for i in range(WARM + steps):
        if i == WARM:
            first = settled()
            begin, used = time.perf_counter(), time.process_time()
        debugger.start(model)
        step()
        debugger.stop()
        debugger.step()
    while (last := ask())[3] == ended:
        time.sleep(0.002)
    seconds, used = time.perf_counter() - begin, time.process_time() - used
    pipe.send(Round(last[1] - first[1], seconds, last[2] - first[2], used - plain, last[0] - first[0]))


def pace(network: int) -> None:
    """From now on connections of this process send at most so many MB/s; 0: as fast as they can."""
    if network:
        connect = socket.create_connection

        def slowly(*arguments: Any, **more: Any) -> socket.socket:
            made = connect(*arguments, **more)
            made.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, network * 1_000_000)
            return made

        socket.create_connection = slowly


def ours(root: Path, host: Connection, port: int, size: int, arguments: argparse.Namespace) -> Round:
    """One training in a process of its own."""
    steps = arguments.steps
    config = root / "config.json"
    tensor = {"online_run_ut": True, "host": HOST, "port": port}
    settings = {"task": "tensor", "level": "L1", "dump_path": str(root), "step": list(range(WARM + steps)), "tensor": tensor}
    config.write_text(json.dumps(settings))
    calls = max(2, arguments.megabytes * 1_000_000 // steps // size * 4 // 9)
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=train, args=(theirs, host, config, size, calls, steps, arguments.network))
    process.start()
    theirs.close()
    found: Round = mine.recv()
    process.join()
    return found


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=400, help="about so many per run")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64 << 10, 1 << 20, 16 << 20], help="bytes per tensor")
    parser.add_argument("--network", type=int, default=0, help="MB/s; 0: loopback as it is")
    parser.add_argument("--directory", type=Path, help="where the spool is (default: the directory for temporary files)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        root = Path(folder)
        host, port = start(receive, root)
        copy = Copy(None)
        print("| tensors | a message | copy, MB/s | ours, MB/s | ratio | copy, CPU s/GB | training | benchmark host |")
        print("|---|---|---|---|---|---|---|---|", flush=True)
        pace(arguments.network)
        data = memoryview(os.urandom(_CHUNK))
        for size in arguments.sizes:
            rounds = [ours(root, host, port, size, arguments) for _ in range(arguments.rounds)]
            copies = [copy(data, max(1, r.nbytes // _CHUNK)) for r in rounds]
            rates = [r.nbytes / r.seconds / 1e6 for r in rounds]
            plain = [r.nbytes // _CHUNK * _CHUNK / seconds / 1e6 for r, (seconds, _) in zip(rounds, copies, strict=True)]
            costs = [[c / r.nbytes * 1e9 for r, (_, c) in zip(rounds, copies, strict=True)]]
            costs += [[r.training / r.nbytes * 1e9 for r in rounds], [r.host / r.nbytes * 1e9 for r in rounds]]
            ratio = statistics.median(a / b for a, b in zip(rates, plain, strict=True))
            message = statistics.median(r.nbytes / r.messages for r in rounds) / 1e6
            said = " | ".join(f"{statistics.median(cost):.2f}" for cost in costs)
            print(
                f"| {size >> 10} KiB | {message:.1f} MB | {statistics.median(plain):.0f} | {statistics.median(rates):.0f} "
                f"| {ratio:.2f} | {said} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
