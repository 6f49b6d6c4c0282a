"""What ranks of a large job have to do to tell each other what they see: the exchange along a tree of them, and news of an incident.

The tree: what every rank does with a message (`tree.Lane`), and how a message is read and written (`links`), runs for all ranks of one
exchange, with messages that are passed on in memory; messages, bytes and the CPU time of each rank are counted. The members say that they
have come (`members.Members`) to a real `TCPStore` in a process of its own, whose requests and time are counted.

News of an incident: what the job's store has to do so that the ranks of a large job hear of an incident, and how long a rank is held.

The store is a real `TCPStore` in a process of its own, and so are the connections: one process stands for many nodes, each with the
notifier of its first rank (`msprobe_engine.probe.incident.node_notify`); the other ranks of a node ask the store once, at the start. The
steps are those of a training that does nothing else. Then the same with a question in every step, as ranks of small jobs ask it, by one
rank of each node: what it would be for all ranks is that times the ranks of a node.

    python benchmarks/exchange.py --ranks 512 10240 --nodes
    python benchmarks/exchange.py --nodes 64 1280
    python benchmarks/exchange.py --nodes 256 --steps 50 --json figures.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed

from msprobe_engine.probe.incident.node_notify import NodeNotifier
from msprobe_engine.probe.incident.notify import StoreNotifier
from msprobe_integrations.common.ranks.connections import decode, encode
from msprobe_integrations.common.ranks.members import COMPLETE, Members
from msprobe_integrations.common.ranks.tree import SELF, Kind, Lane, Message, shapes_of

_dist: Any = torch.distributed
RANKS_PER_NODE = 8
NODES_PER_PROCESS = 320
CONNECTING = 64
LONGEST_SECONDS = 30.0


@dataclass(frozen=True)
class Figures:
    """Of one number of nodes.

    Attributes:
        start_ms: CPU of the store's process until every node waits.
        step_ms: the same for one step of all nodes in which nothing happens.
        longest_ms: that a rank was held at the end of a step: of a node that has a process of its own, as in a real job.
        waits: calls of that rank in which it gave up the core to wait for something. Where there is none, a longer hold is of the system,
            which gave the core to another process.
        event_ms, heard_ms: CPU of the store's process for one event, and until every node has heard of it.
        asking_ms: what a step would cost the store's process if every rank asked.
        sockets: of the store's process.
    """

    nodes: int
    ranks: int
    start_ms: float
    step_ms: float
    longest_ms: float
    waits: int
    event_ms: float
    heard_ms: float
    asking_ms: float
    sockets: int


@dataclass(frozen=True)
class TreeFigures:
    """Of one exchange among so many ranks.

    Attributes:
        words: what each rank has in a step, in numbers of 8 bytes.
        neighbours: of the rank that has most; `deep` are connections from the first rank to the farthest.
        requests: to the store until all are there, and `start_s` the CPU time of its process and of the busiest rank.
        messages, bytes: that the busiest rank receives and sends in a step; `step_ms` its time for them, `mean_ms` that of a rank.
        answer_ms: from the last rank's numbers to the last rank's answer along the slowest way, without the network and its calls.
    """

    ranks: int
    words: int
    neighbours: int
    deep: int
    requests: int
    start_s: float
    messages: int
    bytes: int
    step_ms: float
    mean_ms: float
    answer_ms: float


class CountedStore:
    """A rank's connection to the store."""

    def __init__(self, store: Any) -> None:
        self._store, self.requests = store, 0

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
        return getattr(self._store, name)


def meet(ranks: int) -> tuple[int, float]:
    """All ranks say that they have come, and where; each looks once in vain. Requests, and CPU seconds of the store's process."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=serve, args=(there,))
    server.start()
    store = _dist.TCPStore("127.0.0.1", here.recv(), is_master=False, timeout=timedelta(seconds=120))
    begun = _cpu_ms(server.pid)
    stores = [CountedStore(store) for _ in range(ranks)]
    members = [Members(one, "rows", range(ranks), rank) for rank, one in enumerate(stores)]
    for one in members:
        one.arrive("0" * 32 + " 40000 " + "f" * 40 + " 10.1.2.3")
        one.state()
    shapes = shapes_of(tuple(range(ranks)))
    for one, shape in zip(members, shapes):
        if not one.state() & COMPLETE:
            raise RuntimeError("not all ranks have come")
        if shape.parent >= 0 and not one.address(shape.parent):
            raise RuntimeError("a rank without an address")
    took = (_cpu_ms(server.pid) - begun) / 1e3
    here.send("end")
    server.join()
    return sum(one.requests for one in stores), took


def measure_tree(ranks: int, words: int, steps: int, met: tuple[int, float]) -> TreeFigures:
    """One exchange of so many ranks, in which each has `words` numbers in a step."""
    requests, store_s = met
    shapes = shapes_of(tuple(range(ranks)))
    lanes = [Lane(shape, np.minimum) for shape in shapes]
    depth = [0] * ranks
    for place, shape in enumerate(shapes):
        depth[place] = depth[shape.parent] + 1 if shape.parent >= 0 else 0
    took, messages, sizes = np.zeros((steps, ranks)), np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    ready, answered = np.zeros(ranks), np.zeros(ranks)
    numbers = np.arange(words, dtype=np.int64)
    answer_ms = []
    for step in range(steps):
        ready[:], answered[:] = 0.0, 0.0
        pending: deque[tuple[int, int, Message | bytes]] = deque(
            (SELF, place, Message(Kind.UP, 0, step, 7, numbers)) for place in reversed(range(ranks))
        )
        while pending:
            source, place, data = pending.popleft()
            began = time.thread_time()
            message = data if isinstance(data, Message) else decode(bytearray(data))[0]
            sent = lanes[place].receive(source, message)
            out = [(place, to, encode(what)) for to, what in sent if to != SELF]
            spent = time.thread_time() - began
            took[step, place] += spent
            ready[place] += spent
            answered[place] = ready[place]
            messages[place] += len(out) + (source != SELF)
            sizes[place] += sum(len(what) for _, _, what in out) + (len(data) if isinstance(data, bytes) else 0)
            for _, to, _ in out:
                ready[to] = max(ready[to], ready[place])
            pending.extend(out)
        answer_ms.append(float(answered.max()) * 1e3)
    usual = np.median(took, axis=0)  # what else the machine does costs some steps more
    return TreeFigures(
        ranks,
        words,
        max(len(shape.children) + (shape.parent >= 0) for shape in shapes),
        max(depth),
        requests,
        round(store_s, 2),
        int(messages.max()) // steps,
        int(sizes.max()) // steps,
        round(float(usual.max()) * 1e3, 3),
        round(float(usual.mean()) * 1e3, 3),
        round(float(np.median(answer_ms)), 2),
    )


def serve(pipe: Any) -> None:
    """The process of rank 0, as far as it answers for the store."""
    _allow_files()
    store = _dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=120))
    pipe.send(store.port)
    pipe.recv()


def stand_for(port: int, first: int, nodes: int, pipe: Any) -> None:
    """A process that stands for some nodes: it does what it is told and says how long the longest call took."""
    _allow_files()
    wait = timedelta(seconds=120)
    with ThreadPoolExecutor(CONNECTING) as pool:  # a connection takes 0.2 s of waiting
        stores: list[Any] = list(pool.map(lambda _: _dist.TCPStore("127.0.0.1", port, is_master=False, timeout=wait), range(nodes)))
        watched: list[Any] = list(pool.map(lambda store: store.clone(), stores))
    notifiers: list[Any] = []
    while (told := pipe.recv()) != "end":
        word, *rest = told
        longest, heard, waits = 0.0, 0, 0
        if word == "watch":
            pairs = enumerate(zip(stores, watched))
            notifiers = [NodeNotifier(store, str(first + n), first=True, watched=another) for n, (store, another) in pairs]
            for notifier in notifiers:
                while notifier._watcher is None:
                    time.sleep(0.001)
        elif word == "ask":
            for notifier in notifiers:
                notifier.close()
            notifiers = [StoreNotifier(store, patience=10.0) for store in stores]
        elif word == "announce":
            notifiers[0].announce({"id": rest[0]})
        else:
            for notifier in notifiers:
                begin, gave_up = time.perf_counter(), resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
                heard += len(notifier.poll())
                longest = max(longest, time.perf_counter() - begin)
                waits += resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw > gave_up
        pipe.send((longest, heard, waits))
    os._exit(0)


def measure(nodes: int, steps: int) -> Figures:
    """Of so many nodes."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=serve, args=(there,))
    server.start()
    port = here.recv()
    members: list[Any] = []
    processes = []
    shares = [1, *(min(NODES_PER_PROCESS, nodes - first) for first in range(1, nodes, NODES_PER_PROCESS))]
    for first, share in zip((0, *range(1, nodes, NODES_PER_PROCESS)), shares):
        mine, its = context.Pipe()
        processes.append(context.Process(target=stand_for, args=(port, first, share, its)))
        processes[-1].start()
        members.append(mine)

    def tell(*words: Any, who: Sequence[Any] = members) -> tuple[float, int, int]:
        for pipe in who:
            pipe.send(words)
        said = [pipe.recv() for pipe in who]
        return said[0][0], sum(heard for _, heard, _ in said), said[0][2]

    begun = _cpu_ms(server.pid)
    tell("watch")
    start, sockets = _cpu_ms(server.pid) - begun, len(os.listdir(f"/proc/{server.pid}/fd"))
    begun, longest, waits = _cpu_ms(server.pid), 0.0, 0
    for _ in range(steps):
        held, _, waited = tell("step")
        longest, waits = max(longest, held), waits + waited
    step = (_cpu_ms(server.pid) - begun) / steps
    begun, began, heard = _cpu_ms(server.pid), time.perf_counter(), 0
    tell("announce", "x", who=members[:1])
    while heard < nodes and time.perf_counter() < began + LONGEST_SECONDS:
        heard += tell("step")[1]
    if heard < nodes:
        print(f"{nodes - heard} of {nodes} nodes did not hear of the event in {LONGEST_SECONDS} s")
    heard_ms, event = (time.perf_counter() - began) * 1e3, _cpu_ms(server.pid) - begun
    tell("ask")
    begun = _cpu_ms(server.pid)
    for _ in range(steps):
        tell("step")
    asking = (_cpu_ms(server.pid) - begun) / steps * RANKS_PER_NODE
    for pipe in members:
        pipe.send("end")
    for process in processes:
        process.join()
    here.send("end")
    server.join()
    start, step, longest, event, heard_ms, asking = (round(ms, 2) for ms in (start, step, longest * 1e3, event, heard_ms, asking))
    return Figures(nodes, nodes * RANKS_PER_NODE, start, step, longest, waits, event, heard_ms, asking, sockets)


def _cpu_ms(pid: int | None) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")


def _allow_files() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[16, 512, 10_240], help="of one exchange")
    parser.add_argument("--words", type=int, nargs="+", default=[1, 2080, 4000], help="a vote, 130 rows, digests of 2,000 tensors")
    parser.add_argument("--nodes", type=int, nargs="*", default=[64, 256, 1280], help=f"of {RANKS_PER_NODE} ranks each; of the news")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--json", type=Path, help="a file for the figures")
    options = parser.parse_args()
    figures: list[Any] = []
    if options.ranks:
        print(" ".join(f"{field.name:>10}" for field in fields(TreeFigures)))
    for ranks in options.ranks:
        met = meet(ranks)
        for words in options.words:
            figures.append(measure_tree(ranks, words, max(5, options.steps // 10), met))
            print(" ".join(f"{value:>10,}" for value in vars(figures[-1]).values()), flush=True)
    if options.nodes:
        names = ("start", "step", "held", "waits", "event", "heard")
        print(f"{'nodes':>6}{'ranks':>8}{''.join(f'{name:>9}' for name in names)}{'if all ask':>12}{'sockets':>9}   (ms)")
    for nodes in options.nodes:
        now = measure(nodes, options.steps)
        figures.append(now)
        print(
            f"{now.nodes:6,}{now.ranks:8,}{now.start_ms:9.0f}{now.step_ms:9.2f}{now.longest_ms:9.2f}{now.waits:9}"
            f"{now.event_ms:9.0f}{now.heard_ms:9.0f}{now.asking_ms:12.1f}{now.sockets:9,}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in figures], indent=1) + "\n")


if __name__ == "__main__":
    main()
