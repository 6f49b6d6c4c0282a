"""Runs functions in forked ranks of a tiny GPT job: isolated, with what they wrote to stderr and how they ended."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # every optimizer imports it: once here instead of in every forked rank
import torch.distributed as dist

ROOT = Path(__file__).parents[2]


def _load_gpt() -> Any:
    spec = importlib.util.spec_from_file_location("probe_test_gpt", ROOT / "benchmarks" / "gpt.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


gpt = _load_gpt()
TINY = gpt.Workload("tiny", layers=2, width=16, vocabulary=32, batch=2, length=8, heads=2)


class Outcome(NamedTuple):
    """How one rank ended: exit code (negative: signal), what its function returned, what it wrote to stderr."""

    code: int
    value: Any
    log: str

    def lines(self, *parts: str) -> list[str]:
        """Lines of the log that hold all of `parts`."""
        return [line for line in self.log.splitlines() if all(p in line for p in parts)]


def run(
    function: Callable[..., Any], *args: Any, ranks: int = 0, directory: Path, timeout: float = 60, group: bool = True, fails: bool = False
) -> list[Outcome]:
    """Fork `ranks` gloo ranks (0: one process without a job) that call `function`.

    Args:
        directory: for logs and results.
        group: make the process group before the function is called.
        fails: ranks may end with an exit code other than 0.
    """
    box = directory / f".ranks{time.monotonic_ns()}"
    box.mkdir(parents=True)
    pids = [_fork(rank, ranks, box, group, function, args) for rank in range(max(ranks, 1))]
    end = time.monotonic() + timeout
    codes: dict[int, int] = {}
    try:
        while len(codes) < len(pids):
            for rank, pid in enumerate(pids):
                if rank not in codes:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        codes[rank] = os.waitstatus_to_exitcode(status)
            if time.monotonic() > end:
                raise TimeoutError(f"ranks {sorted(set(range(len(pids))) - set(codes))}:\n" + _logs(box))
            time.sleep(0.01)
    finally:
        for rank, pid in enumerate(pids):
            if rank not in codes:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    if not fails and any(codes.values()):
        raise AssertionError(f"exit codes {codes}:\n{_logs(box)}")
    return [_outcome(codes[rank], box, rank) for rank in range(len(pids))]


def _logs(box: Path) -> str:
    return "\n".join(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted(box.glob("*.log")))


def _outcome(code: int, box: Path, rank: int) -> Outcome:
    answer = box / f"{rank}.answer"
    return Outcome(code, pickle.loads(answer.read_bytes()) if answer.exists() else None, (box / f"{rank}.log").read_text())


def _fork(rank: int, ranks: int, box: Path, group: bool, function: Callable[..., Any], args: tuple[Any, ...]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(box / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 2)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        torch.set_num_threads(1)
        if ranks:
            where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            os.environ.update({k: str(v) for k, v in where.items()})
            if group:
                start_group(box)
        value = function(*args)
        (box / f"{rank}.answer").write_bytes(pickle.dumps(value))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def start_group(box: Path) -> None:
    """Join the job's process group."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{box}/meet", rank=rank, world_size=world)


def write_config(directory: Path, level: str, **keys: Any) -> Path:
    """A config.json as the existing tool has it, without a rank or step window unless given. Several ranks may write one: it is there whole
    or not at all."""
    section = {k: keys.pop(k) for k in ("scope", "list", "data_mode", "summary_mode", "tensor_list", "slice") if k in keys}
    document = {"task": "statistics", "dump_path": str(directory / "dump"), "rank": [], "step": [], "level": level, **keys}
    document[document["task"]] = section
    path = directory / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"config.{os.getpid()}.json")
    part.write_text(json.dumps(document))
    os.replace(part, path)
    return path


def state(model: torch.nn.Module, losses: list[torch.Tensor]) -> dict[str, Any]:
    """What must not depend on a probe: losses, weights, random state, as bytes."""
    return {
        "losses": torch.stack(losses).numpy().tobytes(),
        "weights": {n: p.detach().numpy().tobytes() for n, p in model.named_parameters()},
        "random": torch.get_rng_state().numpy().tobytes(),
    }


def train_with_probe(
    setup: Any,
    steps: int,
    before_close: Callable[[Any], dict[str, Any]] | None = None,
    before_step: dict[int, Callable[[], None]] | None = None,
) -> dict[str, Any]:
    """State and losses after a training of the tiny job with a probe.

    Args:
        setup: its settings.
        before_close: what else is to be known, asked of the probe when all steps are written.
        before_step: what somebody does to the run before some of the steps, when all earlier ones are written.
    """
    from msprobe_integrations.torch.monitor.probe import TorchProbe

    probe = TorchProbe(setup)
    job = gpt.Job(TINY)
    probe.attach(job.model, job.optimizer)
    losses = []
    for step in range(steps):
        if before_step and step in before_step:
            probe.session.writer.flush()
            before_step[step]()
        probe.begin_step(step)
        losses.append(job.step())
        probe.end_step({"loss": losses[-1]})
    probe.session.writer.flush()
    more = before_close(probe) if before_close else {}
    probe.close()
    return {**state(job.model, losses), "lost": dict(probe.session.writer.lost), **more}


def train_with_debugger(config: Path, steps: int) -> dict[str, Any]:
    """State and losses after a training of the tiny job, as rank 3, that a `PrecisionDebugger` dumps."""
    from msprobe_integrations.torch.dump.debugger import PrecisionDebugger

    debugger = PrecisionDebugger(str(config))
    job = gpt.Job(TINY)
    losses = []
    for _ in range(steps):
        debugger.start(job.model, rank_id=3)
        losses.append(job.step())
        debugger.stop()
        debugger.step()
    debugger.run.at_exit()
    return state(job.model, losses)


def train_alone(steps: int) -> dict[str, Any]:
    """The same without a probe; nothing is lost."""
    job = gpt.Job(TINY)
    return state(job.model, [job.step() for _ in range(steps)])


def is_same_training(done: dict[str, Any], reference: dict[str, Any]) -> bool:
    """The same losses and weights, bit for bit."""
    return all(done[key] == value for key, value in reference.items())
