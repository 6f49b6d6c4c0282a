"""Starts ranks of Megatron scripts by fork, as torchrun would: what scripts import is imported once, all but Megatron and the probe.

Reads one request a line from stdin (JSON: ranks, arguments, path, output), writes one line of answer each. A rank goes through the same
command as ``python -m msprobe_integrations.megatron``, or runs the script alone, up to its exit handlers (`ending`).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples" / "megatron"
OURS = ("msprobe", "megatron", "cpu_shim", "train_gpt", "pretrain_loop", "pkg_resources")
"""Is imported by each rank anew: the probe waits for Megatron's import, and requests differ in its version."""
LATER = (
    "megatron.core.tokenizers.text.libraries",  # imports transformers: most of the time that a small training takes
    "msprobe_integrations.megatron.observer",
    "msprobe_integrations.torch.monitor.probe",
    "tensorboard.summary.writer.event_file_writer",
)
"""Is imported when a training begins."""
LIMIT = 280.0
"""Seconds that a launch may take on a busy machine."""


def preload(path: str) -> None:
    """Import what a script imports, as a child has found out, so that ranks have it."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        sys.path[0:0] = [str(EXAMPLES), path]
        for name in ("pretrain_loop" if path else "train_gpt", *LATER):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        with os.fdopen(write, "w") as out:
            out.write("\n".join(name for name in sys.modules if not name.startswith(OURS)))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        names = answer.read().split()
    os.waitpid(child, 0)
    for name in names:
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def store() -> tuple[int, int]:
    """A process in which ranks find each other; its number and its port."""
    read, write = os.pipe()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        from torch.distributed import TCPStore

        host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(write, str(host.port).encode())
        os.close(write)
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        return child, int(answer.read())


def rank_of(request: dict[str, Any], rank: int, port: int) -> Callable[[], None]:
    """What this process, a child, is to do at the end of this program."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{request['output']}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ranks = str(request["ranks"])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks, GROUP_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RUN_ID="tests")
    if request["path"]:
        sys.path.insert(1, request["path"])  # behind the directory of the script

    def run() -> None:
        script, *rest = request["arguments"]
        if request["probe"]:
            from msprobe_integrations.megatron.launch import main

            sys.exit(main([script, *rest]))
        sys.argv = [script, *rest]
        sys.path[0] = os.path.dirname(os.path.abspath(script))
        runpy.run_path(script, run_name="__main__")

    return run


def wait(children: list[int]) -> list[int]:
    """Exit codes; when one has failed the others are ended, as torchrun does it."""
    codes: dict[int, int] = {}
    until = time.monotonic() + LIMIT
    while len(codes) < len(children):
        for child in children:
            if child not in codes and (found := os.waitpid(child, os.WNOHANG))[0]:
                codes[child] = os.waitstatus_to_exitcode(found[1])
        if any(codes.values()) or time.monotonic() > until:
            how = signal.SIGTERM if time.monotonic() < until else signal.SIGKILL
            until = min(until, time.monotonic() + 30)
            for child in children:
                if child not in codes:
                    os.kill(child, how)
        time.sleep(0.05)
    return [codes[child] for child in children]


def serve() -> Callable[[], None]:
    """Answers requests until stdin ends. In a child, what that has to do."""
    for line in sys.stdin:
        request = json.loads(line)
        host, port = store()
        children = []
        for rank in range(request["ranks"]):
            child = os.fork()
            if child == 0:
                return rank_of(request, rank, port)
            children.append(child)
        codes = wait(children)
        os.kill(host, signal.SIGKILL)
        os.waitpid(host, 0)
        print(json.dumps(codes), flush=True)
    return lambda: None


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1] / "frameworks"))
    import ending
    import torch  # noqa: F401

    sys.path.pop()
    for place in sys.argv[1:]:
        preload(place)
    ending.freeze()
    ending.run(serve())
