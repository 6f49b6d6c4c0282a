"""C3: several ranks, here on one device. The training has the bits it has without the probe, rows of sharded gradients are those of the
gathered ones, and no communicator of the device is made."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from msprobe_engine.workflow.doctor import Line
from msprobe_integrations.doctor.device import Device
from msprobe_integrations.doctor.model import Job
from msprobe_integrations.doctor.modes import attach_probe

START = "spawn"
"""How ranks are started."""
_STEPS = 3
_SECONDS = 120
_MODES = ("monitor", "mix")
_OWN = {"cuda": "nccl", "npu": "hccl", "xpu": "xccl"}
"""What devices communicate by."""


def run(device: Device) -> Iterator[Line]:
    """Two ranks over gloo, and as many as there are devices, at most two, over what the device communicates by."""
    if not dist.is_available():
        yield Line("ranks", "skipped", why="this torch has no torch.distributed")
        return
    for kind in ("DDP", "FSDP2"):
        yield compare(device, kind, "gloo", 2)
    own = _OWN.get(device.type)
    if own is None:
        yield Line("communicators of the device", "skipped", why="needs a GPU or NPU")
        return
    world = min(2, device.module.device_count())
    for kind in ("DDP", "FSDP2"):
        yield compare(device, kind, own, world)


def compare(device: Device, kind: str, backend: str, world: int) -> Line:
    name = f"{kind}, {world} rank{'s' * (world > 1)}, {backend}"
    results = _ranks(device, kind, backend, world)
    errors = [result["error"] for result in results if "error" in result]
    if errors:
        without = all("error" in result and not result["plain"] for result in results)  # not one rank has come through without the probe
        return Line(name, "skipped" if without else "WRONG", why=("fails without the probe: " if without else "") + errors[0])
    wrong = [text for result in results for text in result["wrong"]]
    remark = [] if all(result["repeatable"] for result in results) else ["two runs without the probe differ: bits were not compared"]
    made = [result["communicators"] for result in results if result["communicators"] is not None]
    if any(probed > plain for plain, probed in made):
        wrong.append(f"communicators without and with the probe: {made[0]}")
    return Line(name, "WRONG" if wrong else "ok", f"{results[0]['rows']} rows", why="; ".join([*wrong[:5], *remark]))


def _ranks(device: Device, kind: str, backend: str, world: int) -> list[dict[str, Any]]:
    """What the ranks have found; one that ended early has an error."""
    import torch.multiprocessing as multiprocessing

    context: Any = multiprocessing.get_context(START)
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        each = (str(device.device.type), kind, backend, world, port, folder)
        processes = [context.Process(target=_rank, args=(rank, *each)) for rank in range(world)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
        files = [Path(folder) / f"{rank}.json" for rank in range(world)]
        ended = {"error": f"a rank ended early, or not within {_SECONDS} s", "plain": True}
        return [json.loads(file.read_text()) if file.exists() else ended for file in files]


def _rank(rank: int, place: str, kind: str, backend: str, world: int, port: int, folder: str) -> None:
    """One rank; its result is a file."""
    log = Path(folder) / f"nccl{rank}"
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": str(log)}
    if place == "npu":
        import torch_npu  # noqa: F401  # type: ignore[import-not-found,unused-ignore]
    result: dict[str, Any] = {"plain": False, "rows": 0, "wrong": [], "communicators": None}
    try:
        number = rank if backend != "gloo" else 0
        device = place if place == "cpu" else f"{place}:{number}"
        if place != "cpu":
            getattr(torch, place).set_device(number)
        dist.init_process_group(backend, rank=rank, world_size=world)
        plain, first_count = _train(device, kind, rank, "off")[0], _communicators(log)
        again, second_count = _train(device, kind, rank, "off")[0], _communicators(log)
        result |= {"plain": True, "repeatable": torch.equal(plain, again)}
        for mode in _MODES:
            bits, rows, wrong = _train(device, kind, rank, mode)
            result["rows"] += rows
            result["wrong"] += [f"rank {rank}, {mode}: {text}" for text in wrong]
            if torch.equal(plain, again) and not torch.equal(bits, plain):
                result["wrong"].append(f"rank {rank}, {mode}: other bits in losses or weights")
        if second_count:
            result["communicators"] = second_count + len(_MODES) * (second_count - first_count), _communicators(log)
        dist.destroy_process_group()
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    file = Path(folder) / f"{rank}.json"
    file.with_suffix(".part").write_text(json.dumps(result))
    file.with_suffix(".part").rename(file)


def _communicators(log: Path) -> int:
    """How many NCCL has made so far in this process."""
    return log.read_text(errors="replace").count("Init COMPLETE") if log.exists() else 0


class _Sharded(Job):
    """A job whose model is wrapped, with a batch of its own on each rank; `norms` are those of whole gradients in the last update."""

    def __init__(self, device: str, kind: str, rank: int) -> None:
        super().__init__("tiny", device)
        self.batch = self.batch.roll(rank + 1, 1)
        self.norms: dict[str, float] = {}
        if kind == "DDP":
            self.model = DistributedDataParallel(self.model)
        else:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
            blocks: Any = self.model.get_submodule("blocks")
            for block in blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)

    def update(self) -> None:
        for name, parameter in self.model.named_parameters():
            grad: Any = parameter.grad
            whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            self.norms[name.removeprefix("module.")] = float(whole.double().norm())
        super().update()


def _train(device: str, kind: str, rank: int, mode: str) -> tuple[torch.Tensor, int, list[str]]:
    """Losses and bits of the weights; how many rows were looked at, and what is wrong with them."""
    job = _Sharded(device, kind, rank)
    more: dict[str, Any] = {"histograms": []} if mode == "monitor" else {}
    with tempfile.TemporaryDirectory() as directory:
        with attach_probe(job, mode, Path(directory), **more) as step:
            losses = torch.stack([step() for _ in range(_STEPS)])
        local = [p.to_local() if hasattr(p, "to_local") else p for p in job.model.parameters()]
        bits = torch.cat([losses.flatten(), *(part.detach().flatten() for part in local)]).cpu()
        rows, wrong = 0, []
        for record in step.frames[-1].records() if mode == "monitor" else ():
            if getattr(record.source, "family", "") != "grad_reduced":
                continue
            rows += 1
            expected, norm = job.norms.get(record.name), record.statistics.norm
            if expected is None or norm is None or abs(norm - expected) > 1e-6 * max(expected, 1e-30):
                wrong.append(f"gradient of {record.name}: norm {norm}, of the gathered one {expected}")
        if mode == "monitor" and rows < len(job.norms):
            wrong.append(f"{rows} rows of {len(job.norms)} gradients")
        return bits, rows, wrong
